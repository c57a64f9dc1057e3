"""F8: two sweeps on one folder: the second is refused at once, by name; a dead owner's lock is free at once."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import EnvironmentFault
from autotune.sweep import interrupts
from autotune.sweep.interrupts import one_writer, refuse_if_held

HOLD = """
import pathlib, sys
from autotune.sweep.interrupts import one_writer
with one_writer(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
Sweep = Callable[..., dict[str, Any]]


def test_a_second_sweep_is_refused_at_once_by_name_and_starts_when_the_first_is_killed(
    deterministic: Sweep, injected: Callable[[str], None], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "sweep.json").write_text(json.dumps(deterministic(tmp_path)))
    with subprocess.Popen([sys.executable, "-c", HOLD, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"

        injected("F8")
        begun = time.monotonic()
        second = subprocess.run(
            [sys.executable, "-m", "autotune", "run", str(tmp_path / "sweep.json"), "--out", str(out)], capture_output=True, text=True, check=False
        )
        took = time.monotonic() - begun
        first.kill()

    assert second.returncode == 3
    assert took < 15.0  # two seconds on a machine that is not crowded
    assert f"held by pid {first.pid} on {socket.gethostname()} since 2" in second.stderr
    assert "Resume" not in second.stderr
    refuse_if_held(out)  # free without any cleaning up
    with one_writer(out):
        assert f"pid {os.getpid()} on" in (out / ".lock").read_text()


def test_a_file_system_that_can_not_lock_is_refused_in_words(
    injected: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(_fd: int, _how: int) -> None:  # as some network file systems answer
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(interrupts.fcntl, "flock", no_locks)
    injected("F8")

    with (
        pytest.raises(EnvironmentFault, match=r"must be able to lock files.*No locks available.*Choose an --out on a local file system"),
        one_writer(tmp_path),
    ):
        pass
