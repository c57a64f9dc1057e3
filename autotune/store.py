"""The content-addressed store of artifacts: a chain's prefix is built once, whoever asks for it, and never trusted unread.

An entry is a folder named by its key. It is written beside the others, re-opened and hashed, and only then renamed into place, so a
reader never sees half of one. Hashes are checked on every read; a damaged entry goes to quarantine and is built again. Files are
copied, never linked: onnx refuses external data that has a second hard link, even in the user's own model.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.digest import digest_file, digest_of, dump_json, files_under, sync_folder, write_durably
from autotune.model import ModelHandler, handler_from_json

ENTRY_FILE = "entry.json"
FILES = "files"
ENTRIES, BUILDING, QUARANTINE = "entries", "building", "quarantine"
LOCK_FILE = ".lock"
FORMAT = 2  # of an entry, part of every key: other versions are misses


@dataclass(frozen=True)
class Artifact:
    """What the store holds under a key: the handler of the files, and whether they were there before."""

    key: str
    handler: ModelHandler
    digest: str
    cached: bool


@dataclass(frozen=True)
class Evicted:
    """What was dropped to keep a size limit, and what is still there; all in bytes."""

    keys: tuple[str, ...]
    freed_bytes: int
    left_bytes: int


class Store:
    """Artifacts under one folder, shared by the trials of a sweep and by later runs on the same folder.

    Opening it removes what killed builders left, unless it is not to `tidy`.
    """

    def __init__(self, folder: Path, *, tidy: bool = True) -> None:
        self.folder = folder
        for name in (ENTRIES, BUILDING, QUARANTINE):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for place in self.abandoned() if tidy else ():
            shutil.rmtree(place, ignore_errors=True)

    def key(self, facts: Mapping[str, Any]) -> str:
        """SHA-256 over everything that can change the result: parent, pass and version, config, libraries, data."""
        return digest_of({"format": FORMAT, **facts})

    # ------------------------------------------------------------------ building

    def place(self) -> Path:
        """A new empty folder to build an artifact in, on the store's file system. Its name says which process builds there."""
        pid = os.getpid()
        place = self.folder / BUILDING / f"{pid}-{_started(pid)}-{uuid.uuid4().hex[:12]}"
        (place / FILES).mkdir(parents=True)
        return place

    def abandoned(self) -> list[Path]:
        """Building places of processes that are gone."""
        found = []
        for place in sorted((self.folder / BUILDING).glob("*")):
            pid, _, rest = place.name.partition("-")
            started = rest.partition("-")[0]
            if not pid.isdigit() or _started(int(pid)) != started:
                found.append(place)
        return found

    def publish(self, key: str, place: Path, handler: ModelHandler, *, facts: Mapping[str, Any], seconds: float = 0.0) -> Artifact:
        """Hash what was built in `place`, write the entry last, and move it under its key. A whole entry that is already there wins.

        `seconds` is what building took. Raises `OSError` when the disk does not take it; nothing is left then, in `place` neither.
        """
        try:
            files = {name: _made_durable(place / FILES / name) for name in files_under(place / FILES)}
            digest = digest_of(files_digest(files))
            handler = handler_from_json({**handler.to_json(), "folder": str(place / FILES)})  # opened again, from the disk
            data = {**handler.to_json(), "folder": ""}  # where it stands is the store's business
            content = {"format": FORMAT, "key": key, "digest": digest, "files": files, "handler": data, "facts": facts, "seconds": seconds}
            content = json.loads(dump_json(content))
            write_durably(place / ENTRY_FILE, dump_json({**content, "self": digest_of(content)}))
            final = self._entry(key)
            if not final.parent.exists():
                final.parent.mkdir(exist_ok=True)
                sync_folder(final.parent.parent)
            while not _moved(place, final):
                found = self.find(key)  # another builder was first; when its entry is damaged, it is in quarantine now
                if found is not None:
                    return replace(found, cached=False)
            sync_folder(final.parent)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        return Artifact(key, replace(handler, folder=final / FILES), digest, cached=False)

    # ------------------------------------------------------------------ reading

    def find(self, key: str) -> Artifact | None:
        """Return the artifact of a key after checking every byte of it; None for a miss. A damaged entry is moved to quarantine."""
        entry = self._entry(key)
        if not os.path.lexists(entry):
            return None
        try:
            data = json.loads((entry / ENTRY_FILE).read_text())
            damage = _damage(entry, key, data)
        except (FileNotFoundError, NotADirectoryError):
            damage = "no entry file"
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            damage = f"can't be read: {error.strerror}"  # one bad place on a disk; a disk that is all bad refuses the next write
        except (ValueError, KeyError, TypeError, AttributeError):
            damage = "unreadable entry file"
        if damage:
            self._quarantine(entry, damage)
            return None
        with contextlib.suppress(OSError):
            os.utime(entry)  # when it was last of use
        handler = handler_from_json({**data["handler"], "folder": str(entry / FILES)})
        return Artifact(key=key, handler=handler, digest=data["digest"], cached=True)

    def files_of(self, key: str) -> Path:
        """Where an artifact's files stand."""
        return self._entry(key) / FILES

    def all_keys(self) -> list[str]:
        """Keys of all entries, sorted; nothing is checked."""
        return sorted(p.name for p in (self.folder / ENTRIES).glob("??/*"))

    def quarantined(self) -> list[Path]:
        """Damaged entries that were set aside, each with a `why.txt`; over all runs on this folder."""
        return sorted((self.folder / QUARANTINE).iterdir())

    def _entry(self, key: str) -> Path:
        return self.folder / ENTRIES / key[:2] / key

    def _quarantine(self, entry: Path, why: str) -> None:
        target = self.folder / QUARANTINE / f"{entry.name}-{uuid.uuid4().hex[:6]}"
        try:
            entry.rename(target)
        except FileNotFoundError:
            return  # another reader was first
        if target.is_dir() and not target.is_symlink():
            write_durably(target / "why.txt", why + "\n")

    # ------------------------------------------------------------------ the size limit

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep every entry from being evicted while this block runs."""
        with (self.folder / LOCK_FILE).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            yield

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Hold the store while nobody uses it; False when somebody does."""
        with (self.folder / LOCK_FILE).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def evict(self, limit_bytes: int, *, keep: Collection[str]) -> Evicted:
        """Drop entries that are worth least until the others fit the limit, but none of `keep`, and none at all while any is in use.

        Worth is the seconds that building it again would take, per byte, less the longer it was of no use.
        """
        sizes = {key: folder_bytes(self._entry(key)) for key in self.all_keys()}
        total, dropped = sum(sizes.values()), []
        freed = 0
        with self.alone() as nobody_else:
            if total > limit_bytes and nobody_else:
                for key in sorted(set(sizes) - set(keep), key=lambda k: (self._worth(k, sizes[k]), k)):
                    # Away at once: a reader finds all of an entry or nothing.
                    target = self.folder / BUILDING / f"0-evicted-{uuid.uuid4().hex[:12]}"
                    self._entry(key).rename(target)
                    shutil.rmtree(target, ignore_errors=True)
                    dropped.append(key)
                    freed += sizes[key]
                    if total - freed <= limit_bytes:
                        break
        return Evicted(tuple(dropped), freed, total - freed)

    def _worth(self, key: str, size: int) -> float:
        entry = self._entry(key)
        try:
            seconds = float(json.loads((entry / ENTRY_FILE).read_text())["seconds"])
            idle_minutes = max(0.0, time.time() - entry.stat().st_mtime) / 60
        except (OSError, ValueError, KeyError, TypeError):
            return 0.0
        return seconds / max(size, 1) / (1 + idle_minutes)


def _damage(entry: Path, key: str, data: Any) -> str:
    """What is wrong with an entry, in words; empty when every byte is as it was published."""
    if data["key"] != key:
        return f"it is the entry of {data['key'][:12]}"
    if data["format"] != FORMAT:
        return f"it is of format {data['format']}"
    if data["self"] != digest_of({k: v for k, v in data.items() if k != "self"}):
        return f"{ENTRY_FILE} has changed"
    if any(p.is_symlink() for p in (entry, *entry.rglob("*"))) or files_under(entry / FILES) != sorted(data["files"]):
        return "files are missing, too many or links"
    for name, (size, sha256) in data["files"].items():
        path = entry / FILES / name
        facts = path.stat()
        if facts.st_nlink != 1:
            return f"{name} has a second name: a change there would be one here"
        if facts.st_size != size or digest_file(path) != sha256:
            return f"{name} has changed"
    return ""


def _moved(place: Path, final: Path) -> bool:
    """Whether a folder took its new name; False when another stands there."""
    try:
        place.rename(final)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True


def _made_durable(path: Path) -> list[Any]:
    """Size and SHA-256 of a file, opened again after its bytes went to the disk: a late error of the disk shows here."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return [path.stat().st_size, digest_file(path)]


def _started(pid: int) -> str:
    """When a process was started, in the kernel's ticks since boot, so that a number used again is another process; `gone` for none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "gone"
    return "gone" if fields[0] in "ZX" else fields[19]


def folder_bytes(folder: Path) -> int:
    """Bytes of all regular files under a folder, or of the one file; 0 for a link."""
    if folder.is_symlink():
        return 0
    if folder.is_file():
        return folder.stat().st_size
    return sum((folder / name).stat().st_size for name in files_under(folder))


def files_digest(files: Mapping[str, Any]) -> dict[str, str]:
    """Name to SHA-256, the form that `ModelHandler.digest` is made of."""
    return {name: sha256 for name, (_, sha256) in files.items()}
