"""F9: the disk is full, read-only or failing, or there are no file handles. The sweep ends whole with exit status 3, naming path and need;
nothing is torn; when there is room again the same command goes on to the same end.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autotune.store import Store
from autotune.sweep.result import read_result
from tests.faults.agreement import disagreements

ONE_PROCESS = Path(__file__).with_name("one_process.py")
DISK_BYTES = 8 << 20
RUN = {"id", "point", "status", "origin", "model_digest", "session", "metrics", "constraints", "unchanged", "shares_with"}


@dataclass(frozen=True)
class Control:
    """A sweep file and what it comes to where nothing is in the way."""

    sweep: Path
    out: Path

    def begun(self, out: Path) -> Path:
        """A run folder that holds this sweep and nothing more: it is resumed, so no check of the room comes before."""
        out.mkdir()
        for name in ("run.json", "sweep.yaml"):
            (out / name).write_bytes((self.out / name).read_bytes())
        return out


def command(control: Control, out: Path, *before: str, ray: bool = False, **how: Any) -> subprocess.CompletedProcess[str]:
    program = ["-m", "autotune"] if ray else [str(ONE_PROCESS), *before]
    arguments = ["run", str(control.sweep), "--out", str(out)]
    return subprocess.run([sys.executable, *program, *arguments], capture_output=True, text=True, check=False, timeout=280, **how)


@pytest.fixture(scope="module")
def control(deterministic: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Control:
    folder = tmp_path_factory.mktemp("control")
    (folder / "sweep.json").write_text(json.dumps(deterministic(folder, budget={"trials": 3})))
    made = Control(folder / "sweep.json", folder / "out")
    done = command(made, made.out)
    assert done.returncode == 0, done.stderr
    return made


@contextlib.contextmanager
def mounted(place: Path, size: int) -> Iterator[Path]:
    """A small file system in memory; tests that can't have one (no root here) are skipped."""
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True, check=False).returncode != 0:
        pytest.skip("file systems can't be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", DISK_BYTES) as place:
        yield place


def leave(disk: Path, kilobytes: int) -> Path:
    """Fill a disk up to so many kilobytes; the file that does it is returned."""
    found = os.statvfs(disk)
    ballast = disk / "ballast"
    ballast.write_bytes(b"\0" * (found.f_bavail * found.f_frsize - kilobytes * 1024))
    return ballast


def assert_nothing_is_torn(out: Path) -> None:
    for path in out.rglob("*.json"):
        stage_file = path.name == "result.json" and path.parent != out  # of a child that the disk ended: written in one go, read by nobody
        if not stage_file and "tmp" not in path.relative_to(out).parts:
            json.loads(path.read_text())
    assert [p for p in out.rglob(".*.tmp") if p.parent.name != "tmp"] == []
    if not (out / "store" / "entries").exists():
        return
    store = Store(out / "store")
    assert all(store.find(key) is not None for key in store.all_keys())
    assert store.quarantined() == []
    assert list((out / "store" / "building").iterdir()) == []


def assert_the_same_end(control: Control, out: Path) -> None:
    def end(run: Path) -> list[dict[str, Any]]:
        found = []
        for record in read_result(run).records:
            content = json.loads((run / "trials" / record.id / "trial.json").read_text())
            metrics = {k: v for k, v in content["metrics"].items() if k != "peak_memory"}
            found.append({k: v for k, v in {**content, "metrics": metrics}.items() if k in RUN})
        return found

    assert end(out) == end(control.out)
    ours, theirs = (json.loads((r / "result.json").read_text()) for r in (out, control.out))
    assert {k: ours[k] for k in ("status", "front", "trials")} == {k: theirs[k] for k in ("status", "front", "trials")}
    assert disagreements(out, ["latency", "accuracy"], ["minimize", "maximize"]) == []


def assert_stopped_in_words(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert "internal error" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    for word in words:
        assert word in errors[0]


# Kilobytes that are left when the sweep begins: it is the copy of the model, then the baseline's evidence, a pass, a record, the bundle.
ENOUGH = 700  # kilobytes that the whole sweep may find room in
LEFT = (300,)
LEFT_ALL = tuple(k for k in range(8, 900, 40) if k not in LEFT)


@pytest.mark.parametrize("kilobytes", [*LEFT, *(pytest.param(k, marks=pytest.mark.slow) for k in LEFT_ALL)])
def test_a_sweep_on_a_disk_that_fills_up_stops_whole_and_goes_on_when_there_is_room(
    control: Control, disk: Path, injected: Callable[[str], None], kilobytes: int
) -> None:
    out = control.begun(disk / "out")
    ballast = leave(disk, kilobytes)
    injected("F9")

    stopped = command(control, out)
    if stopped.returncode != 0:  # with much room, the sweep is at its end before
        assert_stopped_in_words(stopped, "disk: ", str(out), "o space left", "free there", "the same command")
        assert_nothing_is_torn(out)
    else:
        assert kilobytes > ENOUGH
    ballast.unlink()
    again = command(control, out)

    assert again.returncode == 0, again.stderr
    assert_the_same_end(control, out)


@pytest.mark.long
def test_under_ray_too_a_full_disk_ends_the_sweep_and_no_trial_is_blamed(control: Control, disk: Path, injected: Callable[[str], None]) -> None:
    out = control.begun(disk / "out")
    ballast = leave(disk, 300)
    injected("F9")

    stopped = command(control, out, ray=True)
    assert_stopped_in_words(stopped, "disk: ", str(out), "o space left", "free there", "the same command")
    assert_nothing_is_torn(out)
    assert not list(out.glob("trials/*/trial.json"))
    ballast.unlink()
    again = command(control, out, ray=True)

    assert again.returncode == 0, again.stderr
    assert_the_same_end(control, out)


MOST_WRITES = 55  # that such a sweep surely makes
WRITES = (14,)
WRITES_ALL = tuple(n for n in range(1, 90) if n not in WRITES)


@pytest.mark.parametrize("number", [*WRITES, *(pytest.param(n, marks=pytest.mark.slow) for n in WRITES_ALL)])
def test_a_failure_at_the_nth_write_of_the_sweep_itself_tears_nothing(
    control: Control, tmp_path: Path, injected: Callable[[str], None], number: int
) -> None:
    out = tmp_path / "out"
    kind = ("ENOSPC", "EIO", "EROFS", "EMFILE", "EDQUOT")[number % 5]
    injected("F9")

    stopped = command(control, out, "--fail-write", str(number), kind)
    if stopped.returncode != 0:
        assert_stopped_in_words(stopped, os.strerror(getattr(errno, kind)), "the same command")
        assert_nothing_is_torn(out)
    else:
        assert number > MOST_WRITES
    again = command(control, out)

    assert again.returncode == 0, again.stderr
    assert_the_same_end(control, out)


def test_a_limit_on_file_size_is_named(control: Control, tmp_path: Path, injected: Callable[[str], None]) -> None:
    out = tmp_path / "out"
    injected("F9")

    stopped = command(control, out, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY)))

    assert_stopped_in_words(stopped, str(out), "File too large", "ulimit -f")
    assert_nothing_is_torn(out)


def test_too_few_file_handles_are_refused_by_number_before_anything_is_written(
    control: Control, tmp_path: Path, injected: Callable[[str], None]
) -> None:
    injected("F9")

    refused = command(control, tmp_path / "out", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)))

    assert_stopped_in_words(refused, "files: a sweep needs 1024 file handles; got a limit of 128", "ulimit -n")
    assert not (tmp_path / "out").exists()


def test_a_read_only_folder_is_named(control: Control, tmp_path: Path, injected: Callable[[str], None]) -> None:
    with mounted(tmp_path / "disk", DISK_BYTES) as place:
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        injected("F9")

        refused = command(control, place / "out")

    assert_stopped_in_words(refused, f"disk: {place / 'out'} must take what the sweep writes", "Read-only file system", "Make it writable")


def test_a_file_where_the_run_folder_should_stand_is_named(control: Control, tmp_path: Path, injected: Callable[[str], None]) -> None:
    (tmp_path / "thesis").write_text("years")
    injected("F9")

    refused = command(control, tmp_path / "thesis" / "out")

    assert_stopped_in_words(refused, str(tmp_path / "thesis"), "Not a directory")
    assert (tmp_path / "thesis").read_text() == "years"


def test_a_sweep_that_surely_does_not_fit_is_refused_with_figures(control: Control, tmp_path: Path, injected: Callable[[str], None]) -> None:
    with mounted(tmp_path / "disk", 1 << 20) as place:
        injected("F9")

        refused = command(control, place / "out")

        assert_stopped_in_words(refused, "must have room for the sweep: at least 2.2", "a copy of the model (129 kB), 1 artifact ", " MB free there")
        assert not (place / "out" / "run.json").exists()
