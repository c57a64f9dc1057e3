"""The lane: one measurement at a time on a device, and nobody of ours builds meanwhile. A kernel lock, so a dead owner frees it.

The lock files stand in one folder for the whole host, whoever's sweeps they are: `/tmp`, or what `AUTOTUNE_LANES` names. They are empty and
may stay: only the locks on them count. Containers that don't share that folder don't see each other; what one of them takes from
the other's measurements shows in these as foreign load.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

FOLDER_VARIABLE = "AUTOTUNE_LANES"
HOST_FOLDER = Path("/tmp")  # not TMPDIR, which may differ between two sweeps on the host


def lane_file(execution_provider: str) -> Path:
    """The lock file of a device; one per execution provider, for the whole host and all its users."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder or (HOST_FOLDER if HOST_FOLDER.is_dir() else tempfile.gettempdir())) / f"autotune-lane-{execution_provider}.lock"


@contextlib.contextmanager
def lane(execution_provider: str, *, exclusive: bool) -> Iterator[None]:
    """Hold the device's lane: exclusive to time, shared to build. Waits as long as it takes; waiting is nobody's time limit.

    Whoever comes passes a gate first and waits for the lane in it. So builders that come after a measurement do not slip in before it.
    """
    path = lane_file(execution_provider)
    with contextlib.ExitStack() as held:
        with _locked(path.with_suffix(".gate"), exclusive=True):
            held.enter_context(_locked(path, exclusive=exclusive))
        yield


@contextlib.contextmanager
def _locked(path: Path, *, exclusive: bool) -> Iterator[None]:
    while True:
        descriptor = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            if not _is_still(path, descriptor):
                continue  # someone tidied up while we waited: others lock the new file
            yield
            return
        finally:
            os.close(descriptor)  # lets go


def _open(path: Path) -> int:
    """Open a lock file for reading, which is enough to lock it, whoever made it; a file of our own name where that is not allowed."""
    for candidate in (path, path.with_name(f"{path.stem}-{os.getuid()}{path.suffix}")):
        with contextlib.suppress(OSError):
            return _open_or_make(candidate)
    return _open_or_make(path)


def _open_or_make(path: Path) -> int:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        # Made apart from opened: the kernel refuses O_CREAT on another user's file in a folder like /tmp (fs.protected_regular).
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
        os.fchmod(descriptor, 0o644)  # the umask may have kept it from others
    except FileExistsError:
        descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return descriptor


def _is_still(path: Path, descriptor: int) -> bool:
    mine = os.fstat(descriptor)
    for name in (path, path.with_name(f"{path.stem}-{os.getuid()}{path.suffix}")):
        with contextlib.suppress(OSError):
            there = os.lstat(name)
            if (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino):
                return True
    return False
