"""`clean` on a run folder made by hand: what goes, what stays, and the bytes it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autotune.cli import main
from autotune.errors import ConfigError, EnvironmentFault
from autotune.store import folder_bytes
from autotune.sweep.clean import clean, referenced
from autotune.sweep.interrupts import one_writer

KEYS = {name: letter * 64 for name, letter in zip(("base", "best", "front", "other", "final", "nobody"), "abcdef", strict=True)}


def write(path: Path, content: Any = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def stages(*names: str) -> dict[str, Any]:
    return {"stages": [{"name": n, "key": KEYS[n]} for n in names] + [{"name": "session", "key": ""}]}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    write(run / "run.json", "{}")
    for number, key in enumerate(KEYS.values()):
        write(run / "store" / "entries" / key[:2] / key / "entry.json", "{}")
        write(run / "store" / "entries" / key[:2] / key / "files" / "model.onnx", "x" * 1000 * (number + 1))
    write(run / "baseline" / "baseline.json", stages("base"))
    write(run / "trials" / "t-0000" / "trial.json", stages("best"))
    write(run / "trials" / "t-0001" / "trial.json", stages("front"))
    write(run / "trials" / "t-0002" / "trial.json", stages("other"))
    write(run / "trials" / "t-0002" / "final" / "trial.json", stages("final"))
    key = KEYS["best"]
    write(run / "best_so_far.json", {"best": "t-0000", "front": ["t-0001"], "model": f"store/entries/{key[:2]}/{key}/files"})
    write(run / "result.json", {"best": {"id": "t-0000"}, "front": ["t-0001"]})
    write(run / "best.bundle" / "bundle.json", "{}")
    return run


LEFTOVERS = [
    "store/building/1-1-abc/files/half.onnx", "store/quarantine/aaa/why.txt", "trials/t-0003/latency/log.txt", "trials/t-0001/check/tmp/x",
    "trials/t-0002/final/latency/tmp/x", "baseline/convert/tmp/x", ".result.json.12.tmp", "trials/t-0001/.trial.json.7.tmp",
    "measured/.a.json.9.tmp", "ray/tune/x", "probe/x", ".best.bundle.building/model/x", ".best.bundle.old/x", ".samples/x", ".study.journal.new/x",
]  # fmt: skip
STAYS = [
    "trials/t-0001/tmp/log.txt", "trials/t-0001/check/log.txt", "trials/t-0002/final/tmp/log.txt", "trials.csv", "study.journal", "plan.json",
    "measured/a.json", "report.html", "notes.tmp", "trials/t-0001/.hidden", "best.bundle/.x.1.tmp",
]  # fmt: skip


def test_only_what_nothing_refers_to_goes_and_the_bytes_are_those_announced(made: Path) -> None:
    for name in (*LEFTOVERS, *STAYS):
        write(made / name, "y" * 100)
    before = folder_bytes(made)
    files = {p for p in made.rglob("*") if p.is_file()}

    announced = clean(made, dry_run=True)
    assert {p for p in made.rglob("*") if p.is_file()} - {made / ".lock", made / "store" / ".lock"} == files
    lock = (made / ".lock").stat().st_size
    done = clean(made)

    assert done.freed_bytes == announced.freed_bytes == before + lock - folder_bytes(made) > 100 * len(LEFTOVERS)
    assert [i.path for i in done.leftovers] == [i.path for i in announced.leftovers]
    assert [n for n in LEFTOVERS if (made / n).exists()] == []
    assert [n for n in STAYS if not (made / n).exists()] == []
    assert {p.name for p in (made / "store" / "entries").glob("*/*")} == set(KEYS.values()) - {KEYS["nobody"]}
    assert clean(made).leftovers == ()


def test_all_keeps_only_what_the_best_and_the_front_are_made_of(made: Path) -> None:
    clean(made, everything=True)

    kept = {KEYS[name] for name in ("base", "best", "front")}
    assert {p.name for p in (made / "store" / "entries").glob("*/*")} == kept == referenced(made, front_only=True)


def test_an_earlier_bundle_stays_while_there_is_no_other(made: Path) -> None:
    write(made / ".best.bundle.old" / "bundle.json", "{}")
    (made / "best.bundle" / "bundle.json").unlink()

    clean(made)

    assert (made / ".best.bundle.old" / "bundle.json").exists()


def test_half_a_record_refers_to_nothing_and_is_no_obstacle(made: Path) -> None:
    for name, text in (("trials/t-0000/trial.json", "{"), ("best_so_far.json", ""), ("result.json", "[]")):
        write(made / name, text)

    clean(made)

    assert not (made / "store" / "entries" / KEYS["best"][:2] / KEYS["best"]).exists()
    assert (made / "trials" / "t-0000" / "trial.json").exists()


def test_a_link_is_taken_away_and_not_followed(made: Path, tmp_path: Path) -> None:
    write(tmp_path / "mine" / "thesis.tex", "years")
    (made / "ray").symlink_to(tmp_path / "mine")
    (made / "trials" / "t-0001" / "check").mkdir()
    (made / "trials" / "t-0001" / "check" / "tmp").symlink_to(tmp_path / "mine")

    clean(made)

    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years"
    assert not (made / "ray").is_symlink()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "thesis.tex", "years")

    with pytest.raises(ConfigError, match=r"clean: the folder must be that of a run, with a run\.json"):
        clean(tmp_path)

    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_run_that_a_sweep_holds_is_refused_by_name(made: Path) -> None:
    with one_writer(made), pytest.raises(EnvironmentFault, match=rf"held by pid {os.getpid()}"):
        clean(made, dry_run=True)


def test_the_command_says_what_would_go_and_what_went(made: Path) -> None:
    dry = CliRunner().invoke(main, ["clean", str(made), "--dry-run"])
    as_json = CliRunner().invoke(main, ["clean", str(made), "--json"])
    again = CliRunner().invoke(main, ["clean", str(made)])

    content = json.loads(as_json.stdout)
    assert (dry.exit_code, as_json.exit_code, again.exit_code) == (0, 0, 0)
    assert f"would free {content['freed_bytes']:,} bytes" in dry.stdout
    assert [(r["why"], r["bytes"]) for r in content["removed"]] == [("an artifact that no trial refers to", 6002)]
    assert again.stdout == "nothing to remove\n"


def test_the_command_refuses_in_words_with_its_exit_status(made: Path, tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys; from pathlib import Path; from autotune.sweep.interrupts import one_writer\n"
         "with one_writer(Path(sys.argv[1])): print(flush=True); sys.stdin.read()", str(made)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        holder.stdout.readline()

        held = CliRunner().invoke(main, ["clean", str(made)])
    finally:
        holder.kill()
        holder.communicate()
    missing = CliRunner().invoke(main, ["clean", str(tmp_path / "nothing")])

    assert (held.exit_code, missing.exit_code) == (3, 2)
    assert f"held by pid {holder.pid}" in held.stderr
    assert "Give the --out folder of a run" in missing.stderr
