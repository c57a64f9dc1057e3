"""The content-addressed store of artifacts: a chain's prefix is built once, whoever asks for it, and never trusted unread.

An entry is a folder named by its key. It is written beside the store, re-opened and hashed, and only then renamed into place, so a
reader never sees half of one. Hashes are checked on every read; a damaged entry goes to quarantine and is built again. Files are
copied, never linked: onnx refuses external data that has a second hard link, even in the user's own model.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.digest import digest_file, digest_of, dump_json, files_under, write_durably
from autotune.model import ModelHandler, handler_from_json

ENTRY_FILE = "entry.json"
FILES = "files"
FORMAT = 1  # of an entry: other versions are misses


@dataclass(frozen=True)
class Artifact:
    """What the store holds under a key: the handler of the files, and whether they were there before."""

    key: str
    handler: ModelHandler
    digest: str
    cached: bool


class Store:
    """Artifacts under one folder, shared by the trials of a sweep and by later runs on the same folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.quarantined: list[str] = []
        for name in ("entries", "building", "quarantine"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def key(self, facts: Mapping[str, Any]) -> str:
        """SHA-256 over everything that can change the result: parent, pass and version, config, libraries, data."""
        return digest_of({"format": FORMAT, **facts})

    def place(self) -> Path:
        """A new empty folder to build an artifact in, on the store's file system."""
        place = self.folder / "building" / f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        (place / FILES).mkdir(parents=True)
        return place

    def publish(self, key: str, place: Path, handler: ModelHandler, *, facts: Mapping[str, Any]) -> Artifact:
        """Hash what was built in `place`, write the entry last, and move it under its key. An entry that is already there wins."""
        files = {name: [(place / FILES / name).stat().st_size, digest_file(place / FILES / name)] for name in files_under(place / FILES)}
        data = handler.to_json()
        data["folder"] = ""  # where it stands is the store's business
        digest = digest_of(files_digest(files))
        write_durably(
            place / ENTRY_FILE, dump_json({"format": FORMAT, "key": key, "digest": digest, "files": files, "handler": data, "facts": facts})
        )
        final = self._entry(key)
        final.parent.mkdir(exist_ok=True)
        with contextlib.suppress(OSError):  # another builder was first: its entry is as good
            place.rename(final)
        shutil.rmtree(place, ignore_errors=True)
        found = self.find(key)
        if found is None:
            raise OSError(f"the store could not keep {key[:12]} in {self.folder}")
        return replace(found, cached=False)

    def find(self, key: str) -> Artifact | None:
        """Return the artifact of a key after checking every byte of it; None for a miss. A damaged entry is moved to quarantine."""
        entry = self._entry(key)
        try:
            data = json.loads((entry / ENTRY_FILE).read_text())
        except FileNotFoundError:
            if entry.exists():
                self._quarantine(entry, "no entry file")
            return None
        except ValueError:
            self._quarantine(entry, "unreadable entry file")
            return None
        if data.get("format") != FORMAT:
            return None
        present = files_under(entry / FILES)
        damage = "" if data["key"] == key else f"it is the entry of {data['key'][:12]}"
        if present != sorted(data["files"]):
            damage = "files are missing or too many"
        for name in present if not damage else []:
            size, sha256 = data["files"][name]
            path = entry / FILES / name
            if path.stat().st_size != size or digest_file(path) != sha256:
                damage = f"{name} has changed"
        if damage:
            self._quarantine(entry, damage)
            return None
        handler = handler_from_json({**data["handler"], "folder": str(entry / FILES)})
        return Artifact(key=key, handler=handler, digest=data["digest"], cached=True)

    def files_of(self, key: str) -> Path:
        """Where an artifact's files stand."""
        return self._entry(key) / FILES

    def _entry(self, key: str) -> Path:
        return self.folder / "entries" / key[:2] / key

    def _quarantine(self, entry: Path, why: str) -> None:
        self.quarantined.append(f"{entry.name[:12]}: {why}")
        target = self.folder / "quarantine" / f"{entry.name}-{uuid.uuid4().hex[:6]}"
        entry.rename(target)
        write_durably(target / "why.txt", why + "\n")


def files_digest(files: Mapping[str, Any]) -> dict[str, str]:
    """Name to SHA-256, the form that `ModelHandler.digest` is made of."""
    return {name: sha256 for name, (_, sha256) in files.items()}
