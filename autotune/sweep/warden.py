"""Ends a Ray session of ours when its sweep is gone, however it went: a small process that waits for the end of a socket.

Ray's own processes look after the process that started them, but slowly: two of its agents stay for a minute after a SIGKILL, and the
session's folder for ever. The kernel's parent-death signal reaches only direct children. So every process of a session carries a mark
in its environment, which children inherit whoever starts them, and the warden kills all that carry it or have a file of the session's folder
open. It is no part of the session itself. Linux only, as /proc is.

`python -P -m autotune.sweep.warden FD FOLDER` is the warden; `Warden` is what a sweep uses.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

MARK = "AUTOTUNE_SESSION"  # in the environment of all that belongs to a session: its folder
MADE = b"made"
PATIENCE_S = 10.0  # for all to be gone


class Warden:
    """A session folder of its own, and the promise that nothing of the session outlives this object or this process.

    Start the session's processes with `environment`. Use as a context manager.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.gettempdir(), f"autotune-{secrets.token_hex(4)}")  # short: Ray's sockets stand below it
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "autotune.sweep.warden", str(theirs.fileno()), str(self.folder)],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C in the terminal is not meant for it
            )  # fmt: skip
        self._socket = ours
        answer = ours.recv(64)  # the folder is the warden's to make: made here, a SIGKILL before the warden runs would leave it for good
        if answer != MADE:
            number = int(answer or errno.EIO)
            raise OSError(number, os.strerror(number), str(self.folder))

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment with the session's mark."""
        return {**os.environ, MARK: str(self.folder)}

    def __enter__(self) -> Warden:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the session now: its processes are killed, its folder is removed."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE_S + 5)


def members(folder: Path) -> list[int]:
    """Live processes of a session: their environment carries its mark, or they hold a file of its folder open.

    Ray writes its processes' titles over their environment, but each holds its logs. Zombies hold nothing and are left out.
    """
    mark, prefix = f"{MARK}={folder}".encode(), f"{folder}/"
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in Path(entry.path, "environ").read_bytes().split(b"\0") or any(_holds(entry.path, prefix)):
                    found.append(int(entry.name))
    return found


def _holds(process: str, prefix: str) -> Iterator[bool]:
    for handle in os.scandir(f"{process}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            yield os.readlink(handle.path).startswith(prefix)


def end_session(folder: Path) -> bool:
    """Kill all members of a session, again and again until there are none and its folder is gone. False when something remains."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        left = members(folder)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                return True
        time.sleep(0.02)
    return False


def main() -> None:
    """Make the session's folder, wait for the other side to go, then end its session."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folder = Path(sys.argv[2])
    with socket.socket(fileno=int(sys.argv[1])) as channel, contextlib.suppress(OSError):
        try:
            folder.mkdir(mode=0o700)
        except OSError as error:
            channel.send(str(error.errno).encode())
            return
        channel.send(MADE)
        while channel.recv(64):
            pass
    end_session(folder)


if __name__ == "__main__":
    main()
