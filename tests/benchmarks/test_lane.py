"""The lane: real processes that exclude each other, die, and find what others left."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autotune.benchmarks.lane import HOST_FOLDER, lane, lane_file

EP = "CPUExecutionProvider"
HOLDER = """
import sys
from autotune.benchmarks.lane import lane
with lane("CPUExecutionProvider", exclusive=sys.argv[1] == "exclusive"):
    print("held", flush=True)
    sys.stdin.read()
"""


ANOTHER_USER = """
import fcntl, os, sys
os.setuid(65534)
file = os.open(sys.argv[1], os.O_RDONLY)
try:
    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
except BlockingIOError:
    print("busy")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOTUNE_LANES", str(tmp_path))
    return tmp_path


@contextmanager
def holder(how: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lane until its input is closed."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def holds(process: subprocess.Popen[str]) -> bool:
    assert process.stdout is not None
    return process.stdout.readline() == "held\n"


class Waiter:
    """A thread of this process that asks for the lane, notes when it has it, and keeps it until told."""

    def __init__(self, *, exclusive: bool) -> None:
        self.has, self.let_go = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, args=(exclusive,), daemon=True)
        self.thread.start()

    def _run(self, exclusive: bool) -> None:
        with lane(EP, exclusive=exclusive):
            self.has.set()
            self.let_go.wait(60)

    def end(self) -> None:
        self.let_go.set()
        self.thread.join(60)


@pytest.mark.parametrize("exclusive", [True, False])
def test_whoever_times_is_alone_and_the_next_one_follows(exclusive: bool) -> None:
    with holder("exclusive") as other:
        assert holds(other)
        next_one = Waiter(exclusive=exclusive)
        assert not next_one.has.wait(0.3)

        other.communicate("")

    assert next_one.has.wait(30)
    next_one.end()


def test_builders_share_the_lane() -> None:
    with holder("shared") as other:
        assert holds(other)
        builder = Waiter(exclusive=False)

        assert builder.has.wait(30)
        builder.end()


def test_builders_that_come_after_a_measurement_do_not_slip_in_before_it() -> None:
    early = Waiter(exclusive=False)
    assert early.has.wait(30)
    with holder("exclusive") as timer:
        gate = lane_file(EP).with_suffix(".gate")
        wait_until_locked(gate)
        late = Waiter(exclusive=False)
        assert not late.has.wait(0.3)  # it could share the lane with the early one, but waits behind the measurement

        early.end()

        assert holds(timer)
        assert not late.has.is_set()
        timer.communicate("")
    assert late.has.wait(30)
    late.end()


def wait_until_locked(path: Path) -> None:
    """Wait for another process to hold a lock on a file."""
    import fcntl

    while True:
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return


def test_a_dead_owner_holds_nothing() -> None:
    with holder("exclusive") as other:
        assert holds(other)
        other.kill()
        other.wait()

        waiter = Waiter(exclusive=True)

        assert waiter.has.wait(30)
        waiter.end()
    assert lane_file(EP).exists()  # a file alone locks nobody out


def test_a_lock_file_that_was_tidied_away_does_not_make_two_lanes() -> None:
    with holder("exclusive") as other:
        assert holds(other)
        waiting = Waiter(exclusive=True)  # on the old file
        assert not waiting.has.wait(0.3)
        lane_file(EP).unlink()
        fresh = Waiter(exclusive=True)  # behind the gate, where the first one waits
        other.communicate("")

    assert waiting.has.wait(30)
    assert not fresh.has.wait(0.3)
    waiting.end()
    assert fresh.has.wait(30)
    fresh.end()


def test_the_file_can_be_locked_by_users_who_may_only_read_it() -> None:
    before = os.umask(0o077)
    try:
        with lane(EP, exclusive=True):
            pass
    finally:
        os.umask(before)

    assert lane_file(EP).stat().st_mode & 0o777 == 0o644


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_two_users_share_one_lane(folder: Path) -> None:
    folder.chmod(0o1777)
    for parent in folder.parents:
        if parent.stat().st_mode & 0o001 == 0:
            parent.chmod(parent.stat().st_mode | 0o011)
    with lane(EP, exclusive=True):
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", ANOTHER_USER, str(lane_file(EP))], capture_output=True, text=True, check=False
        )  # fmt: skip

    assert (done.stdout, done.stderr) == ("busy\n", "")


def test_something_else_in_the_files_place_is_not_followed(folder: Path) -> None:
    victim = folder / "victim"
    victim.write_text("mine")
    lane_file(EP).symlink_to(victim)

    with lane(EP, exclusive=True):
        assert victim.read_text() == "mine"

    assert (folder / f"autotune-lane-{EP}-{os.getuid()}.lock").exists()


def test_the_lane_does_not_move_with_the_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.delenv("AUTOTUNE_LANES")
    usual = lane_file(EP)
    monkeypatch.setenv("TMPDIR", str(folder))

    assert lane_file(EP) == usual
    assert usual.parent == HOST_FOLDER
