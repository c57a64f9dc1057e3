"""Sweeps as processes of their own, for faults that only show from outside: signals, terminals, killed processes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.trial import stage_now

PATIENCE_S = 240.0  # a crowded machine is no fault


class SweepProcess:
    """`autotune run` in a process of its own, with a temporary folder of its own; on a terminal of its own if asked for."""

    def __init__(self, sweep: Path, out: Path, *more: str, terminal: bool = False, env: Mapping[str, str] | None = None) -> None:
        self.out = out
        self.temporary = Path(tempfile.mkdtemp(prefix="f"))  # short: Ray's sockets stand below it
        self.command = [sys.executable, "-m", "autotune", "run", str(sweep), "--out", str(out), *more]
        own = dict.fromkeys(("TMPDIR", "AUTOTUNE_LANES", "AUTOTUNE_TEST_MARK"), str(self.temporary))
        environment = {**os.environ, **own, "TERM": "xterm", **(env or {})}
        environment.pop("NO_COLOR", None)
        self.master = -1
        if terminal:
            self.master, slave = pty.openpty()
            self.process = subprocess.Popen(
                self.command, stdin=slave, stdout=slave, stderr=slave, env=environment, preexec_fn=_take_terminal  # noqa: PLW1509 -- in a test
            )  # fmt: skip
            os.close(slave)
        else:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        self._output = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        fd = self.master if self.master >= 0 else self.process.stdout.fileno()  # type: ignore[union-attr] # a pipe without a terminal
        with contextlib.suppress(OSError, ValueError):
            while part := os.read(fd, 65536):
                self._output += part

    @property
    def output(self) -> str:
        return bytes(self._output).decode(errors="replace")

    def wait_for(self, condition: Callable[[], Any], *, what: str) -> None:
        """Wait until something holds while the sweep runs."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, f"it ended before {what}: {self.output[-3000:]}"
            assert time.monotonic() < deadline, f"never came to {what}: {self.output[-3000:]}"
            time.sleep(0.005)

    def wait_for_trials(self, count: int) -> None:
        self.wait_for(lambda: len(list(self.out.glob("trials/*/trial.json"))) >= count, what=f"{count} trials")

    def wait_for_stage(self, what: str, stage: str) -> None:
        """Wait until a trial (or the baseline) is in a stage."""
        self.wait_for(lambda: (now := stage_now(self.out)) and now["what"].startswith(what) and stage in now["stage"], what=f"{what} {stage}")

    def ended(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the end and return the exit status."""
        status = self.process.wait(timeout_s)
        self._reader.join(5.0)
        return status

    def close_terminal(self) -> None:
        """Close the terminal under the sweep."""
        os.close(self.master)
        self.master = -1

    def members(self) -> dict[int, str]:
        """Live processes that this sweep started, whoever started them for it, with their command lines."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) not in (os.getpid(), self.process.pid):
                with contextlib.suppress(OSError):
                    mine = f"AUTOTUNE_TEST_MARK={self.temporary}".encode() in (entry / "environ").read_bytes()
                    if mine or any(os.readlink(f).startswith(f"{self.temporary}/") for f in (entry / "fd").iterdir()):
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    def folders(self) -> dict[str, list[str]]:
        """Temporary folders of this sweep, with what is in them."""
        return {f.name: sorted(p.name for p in f.iterdir()) for f in self.temporary.glob("autotune-*/")}

    def kill(self, words: str) -> int:
        """SIGKILL the process whose command line has these words; returns its id."""
        pid = next(p for p, line in self.members().items() if words in line)
        os.kill(pid, signal.SIGKILL)
        return pid

    def nothing_left(self, *, within_s: float = 20.0) -> bool:
        """Whether all processes and temporary folders of the sweep are gone, or go in time."""
        deadline = time.monotonic() + within_s
        while self.members() or self.folders():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def clean_up(self) -> None:
        """End what a failed test left."""
        for pid in [self.process.pid, *self.members()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if self.master >= 0:
            os.close(self.master)
        shutil.rmtree(self.temporary, ignore_errors=True)


def _take_terminal() -> None:
    """Make stdin the controlling terminal of a new session, as a shell's is."""
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextlib.contextmanager
def sweeping(sweep: Mapping[str, Any], folder: Path, *more: str, **options: Any) -> Iterator[SweepProcess]:
    """A sweep that runs into `folder/out`; nothing of it is left afterwards, however the test ends."""
    path = folder / "sweep.json"
    path.write_text(json.dumps(sweep))
    process = SweepProcess(path, folder / "out", *more, **options)
    try:
        yield process
    finally:
        process.clean_up()


def press(process: SweepProcess, key: bytes) -> None:
    """Press a key on the sweep's terminal."""
    _, ready, _ = select.select([], [process.master], [], 5.0)
    assert ready
    os.write(process.master, key)


__all__ = ["PATIENCE_S", "SweepProcess", "press", "sweeping"]
