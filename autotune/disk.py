"""Disks that are full, read-only or failing, and processes out of file handles: how they show, and the one error that names them.

They are nobody's trial: a sweep ends on them whole, with the path and the need, and the same command goes on later.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from autotune.errors import EnvironmentFault

FULL = "Free some space there and give the same command: it goes on where it was."
WRITABLE = "Make it writable and give the same command: it goes on where it was."
HANDLES = "Raise the limit (ulimit -n) and give the same command: it goes on where it was."
DEVICE = "Look after the device, or take the run folder elsewhere; the same command goes on where it was."
REMEDIES = {
    errno.ENOSPC: FULL, errno.EDQUOT: FULL, errno.EFBIG: "Raise the limit on file size (ulimit -f) and give the same command: it goes on.",
    errno.EROFS: WRITABLE, errno.EACCES: WRITABLE, errno.EPERM: WRITABLE, errno.ENOTDIR: WRITABLE,
    errno.EMFILE: HANDLES, errno.ENFILE: HANDLES, errno.EIO: DEVICE,
}  # fmt: skip
# What a child may die of that is not the trial's own doing. A pass that opens too many files itself, or may not read its data, is.
IN_CHILDREN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
NEXT_TO_NOTHING = 1 << 20  # bytes free: libraries that fail without an errno's words fail for this
HANDLES_NEEDED = 1024  # the driver of a sweep with Ray holds about 200, its raylet more


class DiskFault(EnvironmentFault):
    """A disk that is full, read-only or failing, or no file handles left (exit status 3). What is finished stays; the same command goes on."""


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write on the file system of a folder, or of its nearest parent that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def in_words(count: int) -> str:
    """A number of bytes with a unit that fits: 12.3 MB."""
    for size, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


def fault_of(error: BaseException, folder: Path) -> DiskFault | None:
    """The fault behind an exception (or behind what caused it) that came up while writing into `folder`; None for any other."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, DiskFault):
            return current
        if isinstance(current, OSError) and current.errno in REMEDIES:
            named = current.filename2 or current.filename  # a copy names its source first
            path = Path(os.fsdecode(named)) if isinstance(named, str | bytes) else folder
            if REMEDIES[current.errno] is WRITABLE and not (path.is_relative_to(folder) or folder.is_relative_to(path)):
                return None  # a file of the user's that can't be read
            notes = getattr(current, "__notes__", [])
            return _fault(current.errno, path, ", ".join(notes), os.strerror(current.errno))
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return None


def fault_in(words: str, folder: Path, *, needed: int = 0) -> DiskFault | None:
    """The fault behind the last words of a child that worked in `folder`; None when it died of something else.

    Libraries tell of it in their own words or in none at all, so a file system with next to nothing free counts too. `needed`: bytes
    that were to be written, as far as that is known.
    """
    lower = words.lower()
    need = f"at least {in_words(needed)} needed" if needed else ""
    for number in IN_CHILDREN:
        if os.strerror(number).lower() in lower:
            path = re.search(re.escape(os.strerror(number)) + r": '([^']+)'", words, re.IGNORECASE)
            return _fault(number, Path(path[1]) if path else folder, need, os.strerror(number))
    if free_bytes(folder) < NEXT_TO_NOTHING:
        last = words.strip().splitlines()[0][:200] if words.strip() else "without a word"
        return _fault(errno.ENOSPC, folder, need, f"next to no space left, and a stage that died: {last}")
    return None


def _fault(number: int, path: Path, need: str, words: str) -> DiskFault:
    if number in (errno.EMFILE, errno.ENFILE):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return DiskFault("files", f"a sweep needs file handles, also to open {path}", f"{words!r} with a limit of {limit}", REMEDIES[number])
    facts = [f"{in_words(free_bytes(path))} free there"] if REMEDIES[number] is FULL else []
    facts += [need] if need else []
    return DiskFault("disk", f"{path} must take what the sweep writes", f"{words!r}" + (f" ({', '.join(facts)})" if facts else ""), REMEDIES[number])


@contextlib.contextmanager
def faults_named(folder: Path) -> Iterator[None]:
    """Turn an `OSError` of the disk or of file handles, whoever wrapped it, into a `DiskFault` that names path and need."""
    try:
        yield
    except DiskFault:
        raise
    except Exception as error:
        fault = fault_of(error, folder)
        if fault is None:
            raise
        raise fault from error


@contextlib.contextmanager
def enough_handles() -> Iterator[None]:
    """Lift this process's limit on open files as far as a sweep with Ray needs and the system lets it; put it back at the end.

    Raises `DiskFault` when the system's own limit is too low: Ray's processes would die or hang of it later.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < HANDLES_NEEDED:
        if hard != resource.RLIM_INFINITY and hard < HANDLES_NEEDED:
            raise DiskFault("files", f"a sweep needs {HANDLES_NEEDED} file handles", f"a limit of {hard}", HANDLES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (HANDLES_NEEDED, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
