"""Room for a sweep: refuse what surely does not fit before the first trial, keep the store under its limit between trials."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from autotune.config import size_bytes
from autotune.disk import DiskFault, free_bytes, in_words
from autotune.records import TrialRecord
from autotune.store import Store
from autotune.sweep.estimate import model_bytes
from autotune.sweep.prepare import Prepared

OWN_FILES = 2 << 20  # bytes of records, evidence and logs that the smallest sweep leaves
SMALLEST = 4  # an artifact is at least this part of the model: 8-bit weights of 32


def check_room(prepared: Prepared, folder: Path) -> None:
    """Refuse a sweep that surely does not fit: the copy of the model, an artifact for each pass of the default chain, the bundle.

    Raises `DiskFault` with the figures. A sweep of many points needs more; `autotune plan` estimates how much at most.
    """
    size = model_bytes(prepared)
    pipeline = prepared.pipeline
    passes = [s for s in pipeline.steps(pipeline.default_point()) if not pipeline.classes[s.pass_name].contract.session_only]
    each = -(-size // SMALLEST)
    needed, free = size + each * (len(passes) + 1) + OWN_FILES, free_bytes(folder)
    if free < needed:
        artifacts = "1 artifact" if len(passes) == 1 else f"{len(passes)} artifacts"
        parts = f"a copy of the model ({in_words(size)}), {artifacts} and the bundle (at least {in_words(each)} each) and records"
        raise DiskFault(
            "disk", f"{folder} must have room for the sweep: at least {in_words(needed)} for {parts}", f"{in_words(free)} free there",
            "Free some space there, or choose another --out.",
        )  # fmt: skip


class StoreLimit:
    """Keeps a store under the sweep file's `budget.store`, and counts what that cost."""

    def __init__(self, store: Store, limit: str | None) -> None:
        self._store, self._limit, self._text = store, size_bytes(limit) if limit else 0, limit
        self._dropped = self._freed = self._over = 0

    def keep(self, records: Iterable[TrialRecord]) -> None:
        """Evict what is worth least, but nothing that these trials (the best one, the front) were made of."""
        if not self._limit:
            return
        done = self._store.evict(self._limit, keep={s.key for r in records for s in r.stages if s.key})
        self._dropped += len(done.keys)
        self._freed += done.freed_bytes
        self._over = max(0, done.left_bytes - self._limit)

    def notes(self) -> list[str]:
        """What happened, in words for the result."""
        found = []
        if self._dropped:
            freed = in_words(self._freed)
            found.append(f"the store was kept under {self._text}: {self._dropped} artifacts ({freed}) were dropped, to be built again if needed")
        if self._over:
            found.append(f"the store is {in_words(self._over)} over its limit of {self._text}: the best model and the front need what is left")
        return found
