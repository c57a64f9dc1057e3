"""Digests and canonical JSON: what makes two things equal, whatever wrote them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plain(value: object) -> Any:
    """Turn tuples into lists, sets into sorted lists, paths into strings, numpy values into numbers and lists: what JSON can hold."""
    if isinstance(value, bool | str | int) or value is None:
        return value
    if isinstance(value, float):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(v) for v in value), key=canonical)  # the order of a set differs from process to process
    if isinstance(value, Sequence):
        return [plain(v) for v in value]
    to_list = getattr(value, "tolist", None)
    if callable(to_list):
        return to_list()
    to_json = getattr(value, "to_json", None)
    if callable(to_json):
        return plain(to_json())
    raise TypeError(f"{type(value).__name__} has no JSON form")


def canonical(value: object) -> str:
    """Write a value as JSON with sorted keys and no spaces: equal values, equal text. Refuses NaN and infinities."""
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def dump_json(value: object, *, indent: int | None = 2) -> str:
    """Write JSON for people and machines: numbers that JSON can't hold (NaN, infinities) become null."""
    # ASCII, so that it reads back in any locale, and text that is no valid Unicode can be written at all.
    return json.dumps(_finite(plain(value)), indent=indent, allow_nan=False) + ("\n" if indent else "")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return value


def digest_of(value: object) -> str:
    """SHA-256 of the canonical JSON, 64 hex digits."""
    return hashlib.sha256(canonical(value).encode(errors="surrogatepass")).hexdigest()


def digest_file(path: Path) -> str:
    """SHA-256 of the bytes of one file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_tree(folder: Path) -> str:
    """SHA-256 over relative name and bytes of every file in a folder (or of the one file given). `FileNotFoundError` for neither."""
    if folder.is_file():
        return digest_file(folder)
    if not folder.is_dir():
        raise FileNotFoundError(folder)
    return digest_of({name: digest_file(folder / name) for name in files_under(folder)})


def files_under(folder: Path) -> list[str]:
    """Relative POSIX names of the regular files under a folder, sorted; links are not followed and not listed."""
    found = []
    for root, folders, names in os.walk(folder, followlinks=False):
        folders.sort()
        for name in names:
            path = Path(root, name)
            if path.is_file() and not path.is_symlink():
                found.append(path.relative_to(folder).as_posix())
    return sorted(found)


def write_durably(path: Path, text: str | bytes) -> None:
    """Replace a file at once and for good: temporary file, fsync, rename, fsync of the folder. A reader never sees half of it.

    Raises `OSError` with the path and a note of the bytes; the old file stays as it was then, and nothing new is left behind.
    """
    data = text.encode() if isinstance(text, str) else text
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        error.filename = error.filename or str(path)  # a failed write knows none
        error.add_note(f"{len(data)} bytes were to be written")
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
