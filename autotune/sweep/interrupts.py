"""What ends a sweep early, and who may write into its folder: signals, and one lock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from autotune.errors import EnvironmentFault

LOCK_FILE = ".lock"
AT_ONCE = 130  # exit status of a sweep that was told twice to end
_CAN_NOT_LOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or a closed terminal, at a moment where all that is finished is on disk.

    No `Exception`: libraries that catch those in their loops would swallow it.
    """


class Interrupts:
    """The signals that end a sweep early. The first one is raised as `Interrupted`; a second one ends the process at once (130).

    While `held`, a signal is only kept, and raised at the end of the block: what stands in it is done whole or not begun.
    """

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.ending = False  # set by whoever saves after an interrupt: nothing is raised any more
        self._held = 0
        self._first = 0.0

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Take a signal in."""
        self.seen.append(number)
        if len(self.seen) == 1:
            self._first = time.monotonic()
        elif number != signal.SIGHUP or time.monotonic() - self._first > 1.0:  # the kernel and the shell both tell of a closed terminal
            os._exit(AT_ONCE)
        if not self._held:
            self.check()

    def check(self) -> None:
        """Raise `Interrupted` if a signal came."""
        if self.seen and not self.ending:
            raise Interrupted(signal.Signals(self.seen[0]).name)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep signals until the block ends, then raise."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if not self._held:
            self.check()


@contextlib.contextmanager
def interruptible() -> Iterator[Interrupts]:
    """Handle SIGINT, SIGTERM and SIGHUP as interrupts of the sweep, as far as this is the main thread.

    SIGHUP stays ignored where it is: that is what `nohup` asks for.
    """
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {s: signal.signal(s, interrupts.handle) for s in numbers}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def refuse_if_held(folder: Path) -> None:
    """Raise `EnvironmentFault` when another process writes into the run folder; takes nothing and makes nothing."""
    path = folder / LOCK_FILE
    if not path.is_file():
        return
    with path.open("r+") as file:
        _take(file.fileno(), path)


@contextlib.contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Hold the run folder by a kernel lock, which a dead owner gives back by itself.

    Raises `EnvironmentFault` naming the owner when another process has it, and where the file system can't lock.
    """
    path = folder / LOCK_FILE
    with path.open("a+") as file:
        _take(file.fileno(), path)
        file.seek(0)
        file.truncate()
        file.write(f"pid {os.getpid()} on {socket.gethostname()} since {datetime.now(UTC).isoformat(timespec='seconds')}\n")
        file.flush()
        yield


def _take(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = path.read_text(errors="replace").strip() or "an unknown process"
        raise EnvironmentFault(
            "run", f"one sweep at a time may write into {path.parent.name}", f"held by {owner}", "Wait for it, or choose another --out."
        ) from None
    except OSError as error:
        if error.errno not in _CAN_NOT_LOCK:
            raise
        raise EnvironmentFault(
            "run", "the file system of the run folder must be able to lock files, or two sweeps could write into it at once",
            f"{os.strerror(error.errno or 0)} in {path.parent}", "Choose an --out on a local file system.",
        ) from None  # fmt: skip
