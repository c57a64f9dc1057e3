"""What passes find out about a model that is dear to find and the same for many trials: found once, shared by content-keyed files."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.digest import digest_of, dump_json, write_durably


@dataclass(frozen=True)
class Findings:
    """A folder that the passes of a sweep share; without one, everything is found anew each time.

    A finding must follow from its facts alone: whoever comes first writes it for all. What is found is plain JSON, and comes back the same
    whether it was found now or read. Processes that want the same finding at once wait for the first of them; damaged files are found again.
    """

    folder: Path | None = None

    def once(self, what: str, facts: Mapping[str, Any], find: Callable[[], Any]) -> Any:
        """Return what `find` returns, or what it returned before for equal facts. `what` names the kind, and is part of the file's name."""
        if self.folder is None:
            return json.loads(dump_json(find()))
        key = digest_of({"what": what, "facts": facts})
        path = self.folder / f"{what}-{key}.json"
        with _alone(path.with_suffix(".lock")):
            known = _read(path, key)
            if known is None:
                known = {"key": key, "found": json.loads(dump_json(find()))}
                with contextlib.suppress(OSError):  # a full disk is told by whoever has to write there
                    write_durably(path, dump_json({**known, "self": digest_of(known)}))
        return known["found"]


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold a lock that ends with its process; where none can be had, the work is done twice."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a")
    except OSError:
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: Path, key: str) -> dict[str, Any] | None:
    """A finding that is whole, or None."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        content = {"key": data["key"], "found": data["found"]}
        return content if data["key"] == key and data["self"] == digest_of(content) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
