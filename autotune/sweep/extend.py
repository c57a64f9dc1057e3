"""What a run folder belongs to, and what of a sweep may change under its finished trials. See docs/decisions/0006."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.config import LoadedSweep, parse_sweep
from autotune.digest import digest_of
from autotune.errors import AutotuneError, ConfigError
from autotune.pipeline import InputFacts, Pipeline
from autotune.records import TrialRecord

# Keys of the sweep file that leave every finished measurement what it is: they say how long to go on, where to look and what to choose.
EXTENDABLE = frozenset({"budget", "constraints", "objectives", "pick", "strict", "search", "chain", "validation", "storage"})
STUDIED = ("constraints", "objectives", "chain", "validation", "strict")  # and search.enabled: what the study's own content depends on
LONG_TAILS = ("p95", "p99")  # percentiles that need more runs than are made for nobody
SHOWN = 5


@dataclass(frozen=True)
class Change:
    """One difference between the sweep that a run folder belongs to and the one given: where, and in words."""

    path: str
    words: str

    @property
    def extendable(self) -> bool:
        head, _, rest = self.path.partition(".")
        return head == "sweep" and rest.partition(".")[0] in EXTENDABLE

    def __str__(self) -> str:
        return f"{self.path}: {self.words}"


def changes_between(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Differences of two identities, `{"sweep": content, "data": digests}`, in the order of their keys."""
    if digest_of(before) == digest_of(now):
        return []
    found = list(_differences(before, now, ""))
    old, new = (s["sweep"] for s in (before, now))
    tails = _tails(new) - _tails(old)
    if tails:
        found.append(Change("measurements", f"{', '.join(sorted(tails))} needs more runs than the finished trials have"))
    return found


def _tails(sweep: Mapping[str, Any]) -> set[str]:
    texts = [*sweep.get("constraints", ()), *sweep.get("objectives", ())]
    return {q for q in LONG_TAILS if any(q in text for text in texts)}


def _differences(before: Any, now: Any, path: str) -> Iterator[Change]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted({*before, *now}):
            yield from _differences(before.get(key), now.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (a, b) in enumerate(zip(before, now, strict=True)):
            yield from _differences(a, b, f"{path}.{index}")
    elif before != now:
        yield Change(path, "content changed" if path.startswith("data.") else f"{_short(before)} before, {_short(now)} now")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else text[:157] + "..."


def refuse(changes: Sequence[Change], *, extend: bool, finished: int) -> None:
    """Raise `ConfigError` for a changed sweep, unless all of it may change and `extend` was asked for."""
    blocked = [c for c in changes if not c.extendable]
    if not changes or (extend and not blocked):
        return
    shown = blocked if extend else [*blocked, *(c for c in changes if c.extendable)]
    words = "; ".join(map(str, shown[:SHOWN])) + (f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else "")
    kept = f"{finished} finished trials" if finished != 1 else "1 finished trial"
    if blocked:
        in_the_way = ", ".join(dict.fromkeys(c.path for c in blocked[:SHOWN]))
        do = f"Give the same sweep to go on, --fresh to start again, or another --out; --extend can't keep measurements under another {in_the_way}."
    else:
        do = f"Give the same sweep to go on, --extend to go on with the new one and keep {kept}, --fresh to start again, or another --out."
    raise ConfigError("resume", "a run folder belongs to one sweep", words, do)


def study_content(sweep: Mapping[str, Any]) -> str:
    """Digest of what a study's own content depends on: one under another digest is written anew from the records."""
    return digest_of([*(sweep.get(k) for k in STUDIED), (sweep.get("search") or {}).get("enabled")])


def outside_of(pipeline: Pipeline, facts: InputFacts, earlier: Sequence[Mapping[str, Any]], records: Mapping[int, TrialRecord]) -> frozenset[int]:
    """Numbers of the finished trials that are no points of this chain, or other passes or settings under the same names.

    `earlier`: the sweeps that the run had before it was extended, each with the number of trials until then. Raises `ConfigError` when
    one of them can't be compiled any more.
    """
    compiled: dict[str, Pipeline] = {}
    found = set()
    for number, record in records.items():
        if not record.point:
            continue
        if not pipeline.space.contains(record.point):
            found.add(number)
            continue
        then = next((e["sweep"] for e in earlier if number < e["trials"]), None)
        if then is None:
            continue
        key = digest_of(then)
        if key not in compiled:
            compiled[key] = _compiled(then, facts)
        if compiled[key].steps(record.point) != pipeline.steps(record.point):
            found.add(number)
    return frozenset(found)


def _compiled(sweep: Mapping[str, Any], facts: InputFacts) -> Pipeline:
    try:
        return Pipeline(LoadedSweep(parse_sweep(sweep), Path("/")), facts)  # its paths are absolute
    except AutotuneError as error:
        raise ConfigError(
            "resume", "the sweep as it was before --extend must still compile, to tell what its trials were", str(error), "Start again with --fresh."
        ) from error
