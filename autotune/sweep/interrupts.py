"""What ends a sweep early, and who may write into its folder: signals, and one lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from autotune.errors import EnvironmentFault


class Interrupted(BaseException):
    """Ctrl-C, SIGTERM or a closed terminal, at a moment where all that is finished is on disk.

    No `Exception`: libraries that catch those in their loops would swallow it.
    """


class Interrupts:
    """The signals that end a sweep early. The first one is raised as `Interrupted`; a second one ends the process at once (130).

    While `held`, a signal is only kept: native code that it would be raised through turns it into another error. Whoever holds it
    calls `check` where it may be raised.
    """

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._held = False

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Take a signal in."""
        self.seen.append(number)
        if len(self.seen) > 1:
            os._exit(130)
        if not self._held:
            self.check()

    def check(self) -> None:
        """Raise `Interrupted` if a signal came."""
        if self.seen:
            raise Interrupted(signal.Signals(self.seen[0]).name)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep signals until the block ends, then raise."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self.check()


@contextlib.contextmanager
def interruptible() -> Iterator[Interrupts]:
    """Handle SIGINT, SIGTERM and SIGHUP as interrupts of the sweep, as far as this is the main thread."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = {s: signal.signal(s, interrupts.handle) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Hold the run folder by a kernel lock. Raises `EnvironmentFault` naming the owner when another process has it."""
    path = folder / ".lock"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "an unknown process"
            raise EnvironmentFault(
                "run", f"one sweep at a time may write into {folder.name}", f"held by {owner}", "Wait for it, or choose another --out."
            ) from None
        file.seek(0)
        file.truncate()
        file.write(f"pid {os.getpid()} since {datetime.now(UTC).isoformat(timespec='seconds')}\n")
        file.flush()
        yield
