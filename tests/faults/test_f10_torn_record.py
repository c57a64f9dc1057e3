"""F10: the record is torn at every byte, followed by garbage, or gone. What was finished is still there, and study and records agree."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest

from autotune.digest import dump_json
from autotune.records import Cause, MetricValue, Status, TrialRecord
from autotune.search_spaces.parameters import Categorical
from autotune.search_spaces.space import compile_space
from autotune.sweep.ray_tune import record_reader
from autotune.sweep.result import SweepResult
from autotune.sweep.run import run
from autotune.sweep.search import JOURNAL_FILE, Asked, Goals, Search, open_study, rewrite_study
from tests.faults.agreement import disagreements

NAMES, DIRECTIONS = ["latency", "accuracy"], ["minimize", "maximize"]
SPACE = compile_space({"a": Categorical(list(range(10))), "b": Categorical(list(range(10)))})
TRIALS = 6


def evaluate(asked: Asked) -> TrialRecord:
    if asked.point["a"] == 3:
        return TrialRecord(asked.number, asked.point, Status.FAILED, asked.origin, cause=Cause.EXCEPTION, stage="quantize", message="no kernel")
    metrics = {n: MetricValue(v, v, v) for n, v in (("latency", 1 + asked.point["a"] / 7), ("accuracy", 1 / (1 + asked.point["b"])))}
    return TrialRecord(asked.number, asked.point, Status.OK, asked.origin, metrics=metrics, constraints=({"expr": "c", "violation": 0.0},))


def values(record: TrialRecord) -> tuple[float, ...] | None:
    return tuple(record.metrics[n].value for n in NAMES) if record.measured else None


GOALS = Goals(("minimize", "maximize"), values, lambda r: tuple(float(c["violation"]) for c in r.constraints))


def resumed(run_folder: Path) -> tuple[Search, str]:
    """What a sweep does with a run folder that it finds."""
    study, word = open_study(run_folder, None, DIRECTIONS, NAMES)  # type: ignore[arg-type] # two literals
    search = Search(SPACE, goals=GOALS, study=study, budget=TRIALS, seed=0, sampler="random", first=[({"a": 3, "b": 0}, "default")])
    read = record_reader(run_folder)
    records = {n: r for n in range(TRIALS) if (r := read(n)) is not None}
    search.resume(
        records.get, on_disk=max(records, default=-1) + 1,
        renew=lambda fill: rewrite_study(run_folder, None, DIRECTIONS, NAMES, fill),  # type: ignore[arg-type] # two literals
    )  # fmt: skip
    return search, word


def go_on(search: Search, run_folder: Path, *, until: int = TRIALS) -> None:
    while len(search.records) < until and (asked := search.ask()) is not None:
        record = evaluate(asked)
        folder = run_folder / "trials" / record.id
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "trial.json").write_text(dump_json(record.to_json()))
        search.tell(record)


def what_is_told(study: optuna.Study) -> list[tuple[Any, ...]]:
    return [(t.number, t.state.name, t.values, t.params, t.user_attrs) for t in study.get_trials()]


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """A run folder with four trials, told and on record."""
    search, _ = resumed(tmp_path)
    go_on(search, tmp_path, until=4)
    return tmp_path


def test_torn_at_each_byte_of_its_last_record_the_study_opens_and_the_trials_before_are_the_same(told: Path, injected: Callable[[str], None]) -> None:
    journal = told / JOURNAL_FILE
    whole = journal.read_bytes()
    start = whole.rstrip(b"\n").rfind(b"\n") + 1
    before = what_is_told(resumed(told)[0].study)
    for cut in range(start + 1, len(whole)):
        journal.write_bytes(whole[:cut])
        injected("F10")

        study, word = open_study(told, None, DIRECTIONS, NAMES)  # type: ignore[arg-type] # two literals

        assert word == f"dropped an unfinished last line ({cut - start} bytes) from {JOURNAL_FILE}"
        assert what_is_told(study)[:3] == before[:3]
        assert study.get_trials()[3].state.name == "RUNNING"
        assert what_is_told(resumed(told)[0].study) == before
        assert disagreements(told, NAMES, DIRECTIONS) == []


def test_cut_after_any_of_its_lines_the_study_gets_back_from_the_records_what_it_lost(told: Path, injected: Callable[[str], None]) -> None:
    journal = told / JOURNAL_FILE
    whole = journal.read_bytes()
    before = what_is_told(resumed(told)[0].study)
    lines = whole.splitlines(keepends=True)
    for count in range(len(lines)):  # 0: an empty file
        journal.write_bytes(b"".join(lines[:count]))
        injected("F10")

        search, word = resumed(told)

        assert word == ""
        assert what_is_told(search.study) == before
        assert len(search.records) == 4
        assert disagreements(told, NAMES, DIRECTIONS) == []


@pytest.mark.parametrize("tail", [b"\0" * 4096, b"\xff\xfe garbage", b"{}{}\n", b"garbage\nmore\n", b'"text"\n', b"\n\n", b'{"op_code":', b"\0\n\0"])
def test_a_tail_of_anything_is_dropped_with_a_word(told: Path, injected: Callable[[str], None], tail: bytes) -> None:
    journal = told / JOURNAL_FILE
    whole = journal.read_bytes()
    before = what_is_told(resumed(told)[0].study)
    journal.write_bytes(whole + tail)
    injected("F10")

    search, word = resumed(told)

    assert f"({len(tail)} bytes) from {JOURNAL_FILE}" in word
    assert what_is_told(search.study) == before
    go_on(search, told)
    assert disagreements(told, NAMES, DIRECTIONS) == []


def test_a_damaged_line_in_the_middle_loses_no_finished_trial_and_the_file_is_kept_beside(told: Path, injected: Callable[[str], None]) -> None:
    journal = told / JOURNAL_FILE
    before = what_is_told(resumed(told)[0].study)
    whole = journal.read_bytes()
    lines = whole.splitlines(keepends=True)
    for number in range(len(lines)):
        damaged = b"".join([*lines[:number], b"#" + lines[number][1:], *lines[number + 1 :]])
        journal.write_bytes(damaged)
        injected("F10")

        search, word = resumed(told)

        assert what_is_told(search.study) == before
        if number < len(lines) - 1:
            assert "everything after its first damaged line" in word
            assert (told / f"{JOURNAL_FILE}.damaged").read_bytes() == damaged
        assert disagreements(told, NAMES, DIRECTIONS) == []


@pytest.mark.parametrize("record", ["", "{", "[]", "{}", "\0\0\0", '{"number": 1}', None])
def test_a_trial_whose_record_is_torn_runs_again_and_is_told_anew(told: Path, injected: Callable[[str], None], record: str | None) -> None:
    path = told / "trials" / "t-0001" / "trial.json"
    whole = path.read_text()
    points = [t.user_attrs["point"] for t in resumed(told)[0].study.get_trials()]
    path.unlink() if record is None else path.write_text(record)
    injected("F10")

    search, _ = resumed(told)

    assert search.repairs == ["the study was written anew from the records of the trials: it told otherwise of t-0001"]
    assert sorted(search.records) == [0, 2, 3]
    asked = search.ask()
    assert asked is not None
    assert (asked.number, json.dumps(asked.point, separators=(",", ":"))) == (1, points[1].replace(" ", ""))
    search.again(Asked(asked.number, asked.point, asked.origin, 0))
    go_on(search, told)
    assert path.read_text() == whole
    assert disagreements(told, NAMES, DIRECTIONS) == []


def test_a_value_that_differs_from_the_record_is_put_right(told: Path, injected: Callable[[str], None]) -> None:
    journal = told / JOURNAL_FILE
    before = what_is_told(resumed(told)[0].study)
    value = json.loads((told / "trials" / "t-0001" / "trial.json").read_text())["metrics"]["latency"]["value"]
    raw = journal.read_text()
    assert f"{value!r}," in raw
    journal.write_text(raw.replace(f"{value!r},", "0.001,", 1))
    injected("F10")

    search, _ = resumed(told)

    assert search.repairs
    assert what_is_told(search.study) == before


def test_a_trial_that_neither_study_nor_record_knows_any_more_gets_a_point_and_the_others_stay(told: Path, injected: Callable[[str], None]) -> None:
    (told / JOURNAL_FILE).write_bytes(b"")
    (told / "trials" / "t-0001" / "trial.json").write_text("{")
    kept = {p: p.read_text() for p in told.glob("trials/*/trial.json") if "t-0001" not in str(p)}
    injected("F10")

    search, _ = resumed(told)
    go_on(search, told)

    assert sorted(search.records) == list(range(TRIALS))
    assert len({json.dumps(r.point) for r in search.records.values()}) == TRIALS
    assert {p: p.read_text() for p in kept} == kept
    assert disagreements(told, NAMES, DIRECTIONS) == []


@pytest.mark.long
def test_a_sweep_over_torn_records_says_so_and_ends_as_before(
    deterministic: Callable[..., dict[str, Any]], tmp_path: Path, injected: Callable[[str], None]
) -> None:
    sweep, out = deterministic(tmp_path, budget={"trials": 4}), tmp_path / "out"
    before = run(sweep, out)
    keys = {"id", "point", "status", "model_digest"}
    (out / "trials" / "t-0002" / "trial.json").write_bytes(b"\0" * 100)
    with (out / JOURNAL_FILE).open("ab") as file:
        file.write(b"\0" * 512)
    shutil.rmtree(out / "best.bundle")
    os.unlink(out / "result.json")
    injected("F10")

    after = run(sweep, out)

    notes = after.summary["notes"]
    assert f"dropped an unfinished last line (512 bytes) from {JOURNAL_FILE}" in notes
    assert "the records of t-0002 were damaged: run again" in notes
    assert summary(after, keys) == summary(before, keys)
    assert after.summary["front"] == before.summary["front"]
    assert disagreements(out, NAMES, DIRECTIONS) == []


def summary(result: SweepResult, keys: set[str]) -> list[dict[str, Any]]:
    return [{k: v for k, v in json.loads((result.run / "trials" / r.id / "trial.json").read_text()).items() if k in keys} for r in result.records]
