"""The ladder of cheaper answers, seen from the whole sweep: what trials are told of those before them, and what it saved.

Rungs, cheapest first: a point that was tried, a chain's prefix that was built, a model whose bytes were measured, a static rule, the cheap
checks, latency, accuracy by looks.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from autotune.benchmarks.statistics import CONFIDENCE
from autotune.constraints import Verdict, is_cost
from autotune.pareto import pareto_front
from autotune.records import Interval, MetricValue, Status, TrialRecord
from autotune.selection import UNTOUCHED, Objective, compared, tolerance, widened
from autotune.trial import BY_LOOKS, EQUAL_BYTES, EQUAL_POINT, EQUAL_PREFIX, LADDER, LATENCY


class FrontBoxes:
    """What a trial is told of the trials before it, as plain data: the losses, with intervals, of those that may put it off the front.

    They are certain of every constraint (the untouched model is so by nature): one that may still fall at the end would leave nobody in
    the place of those that it ended. The losses are those of `select`, over the objectives and over what its picks look at; of trials that
    another one equals or beats in all of them by estimate, none is told, and of those with the very same losses and limits the first.
    `eps_latency` and `eps_score` are the tolerances of `select`; `family` is the largest number of models that its intervals may have to
    hold for together, its looks included.
    """

    def __init__(
        self, objectives: Sequence[Objective], baseline: Mapping[str, MetricValue], score: str, *, higher_is_better: bool, eps_latency: float,
        eps_score: float, family: int,
    ) -> None:  # fmt: skip
        self._objectives, self._baseline = list(objectives), baseline
        self._axes = list(objectives)
        for name, cost in (("latency", True), (score, not higher_is_better), ("size", is_cost("bytes"))):
            if name in baseline and all(a.name != name for a in self._axes):
                self._axes.append(Objective(name, bool(cost)))
        self._error = (1 - CONFIDENCE) / (max(family, 1) * len(self._axes))
        self._eps = {a.name: tolerance(a.name, baseline[a.name], eps_latency=eps_latency, eps_score=eps_score) for a in self._axes}
        self._counted: list[TrialRecord] = []  # those that `_front` is of
        self._front: list[tuple[TrialRecord, tuple[Interval, ...]]] = []

    def of(self, records: Iterable[TrialRecord]) -> dict[str, Any]:
        """What is told of these. Where they are those of the last call and more, only what came is looked at."""
        ordered = sorted(records, key=lambda r: r.number)
        known = len(self._counted)
        if len(ordered) < known or any(a is not b for a, b in zip(self._counted, ordered, strict=False)):
            self._counted, self._front, known = [], [], 0
        came = [r for r in ordered[known:] if self._is_sure(r)]
        self._counted = ordered
        if came:
            self._front = self._best([*self._front, *((r, self._box(r)) for r in came)])
        return {
            "objectives": [o.name for o in self._objectives], "minimize": {a.name: a.minimize for a in self._axes}, "error": self._error,
            "eps": dict(self._eps),
            "boxes": [
                {"trial": r.id, "axes": {a.name: _finite(i) for a, i in zip(self._axes, box, strict=True)}} for r, box in self._front
            ],
        }  # fmt: skip

    def _is_sure(self, record: TrialRecord) -> bool:
        return (
            record.status is Status.OK and not record.partial and all(a.name in record.metrics for a in self._axes)
            and (record.origin == UNTOUCHED or all(c["verdict"] == Verdict.CERTAIN for c in record.constraints))
        )  # fmt: skip

    def _box(self, record: TrialRecord) -> tuple[Interval, ...]:
        return tuple(
            widened(compared(record.metrics[a.name], self._baseline[a.name], minimize=a.minimize), record.metrics[a.name], error=self._error)
            for a in self._axes
        )

    @staticmethod
    def _best(boxes: Sequence[tuple[TrialRecord, tuple[Interval, ...]]]) -> list[tuple[TrialRecord, tuple[Interval, ...]]]:
        """The front by estimates, of equal boxes the first."""
        front = pareto_front(np.array([[i.value for i in box] for _, box in boxes]))
        first: dict[tuple[Interval, ...], TrialRecord] = {}
        for (record, box), on_front in zip(boxes, front, strict=True):
            if on_front:
                first.setdefault(box, record)
        return [(record, box) for box, record in first.items()]


def _finite(interval: Interval) -> dict[str, float]:
    """An interval as JSON holds it; a limit that is not known stays out of reach."""
    limit = 1e300
    return {k: min(max(v, -limit), limit) for k, v in interval.to_json().items()}


def ledger(records: Sequence[TrialRecord], *, rows: int) -> dict[str, Any]:
    """What each rung saved, from the records: rows not run, seconds of latency and of passes not spent, and whose work was shared.

    `rows`: those that a trial is scored on. Seconds saved are those that the shared work took where it was done; for a trial that ended
    before its latency or within, what is left of the median of those that went on. All of it is what the ladder spared, never what was spent on it.
    """
    by_id = {r.id: r for r in records}
    built = {s.key: (r.id, s.seconds) for r in sorted(records, key=lambda r: -r.number) for s in r.stages if s.key and not s.cached}
    whole = [r for r in records if not any(rung["rung"] == LATENCY for rung in r.rungs)]
    typical = statistics.median([_seconds(r, "latency") for r in whole if _seconds(r, "latency")] or [0.0])
    rungs: dict[str, dict[str, Any]] = {
        name: {"used": 0, "ended": 0, "rows_saved": 0, "latency_s_saved": 0.0, "build_s_saved": 0.0, "shared": []} for name in LADDER
    }
    scored = 0
    for record in records:
        last = next((r for r in record.rungs if r["rung"] == BY_LOOKS and "rows" in r), None)
        measured = any(s.name == "accuracy" for s in record.stages)
        scored += (last["rows"] if last else rows) if measured else 0
        for rung in record.rungs:
            entry = rungs[rung["rung"]]
            entry["used"] += rung.get("repeats", 1)
            entry["ended"] += bool(rung["ended"])
            if rung["rung"] == EQUAL_PREFIX and rung.get("key") in built:
                source, seconds = built[rung["key"]]
                entry["build_s_saved"] += seconds
                entry["shared"].append({"trial": record.id, "slot": rung["slot"], "from": source})
            elif rung["rung"] == EQUAL_BYTES:
                there = by_id.get(rung["measured_as"])
                entry["latency_s_saved"] += _seconds(there, "latency") if there else typical
                entry["rows_saved"] += rows
                entry["shared"].append({"trial": record.id, "from": rung["measured_as"]})
            elif rung["rung"] == BY_LOOKS:
                entry["rows_saved"] += rung["of"] - rung["rows"] if measured and "rows" in rung else 0
            elif rung["rung"] == LATENCY and "seconds" in rung:
                own = _seconds(record, "latency")  # none for one that shares a measurement: counted there
                entry["latency_s_saved"] += max(typical - own, 0.0) if own else 0.0
            elif rung["ended"]:
                entry["rows_saved"] += rows
                entry["latency_s_saved"] += typical if not _seconds(record, "latency") else 0.0
    found = {
        "rungs": rungs, "rows": {"run": scored, "saved": sum(e["rows_saved"] for e in rungs.values())},
        "latency_s": {"spent": sum(_seconds(r, "latency") for r in records), "saved": sum(e["latency_s_saved"] for e in rungs.values())},
        "build_s": {"spent": sum(s for _, s in built.values()), "saved": rungs[EQUAL_PREFIX]["build_s_saved"]},
    }  # fmt: skip
    return {**found, "words": _words(found)}


def _seconds(record: TrialRecord, stage: str) -> float:
    return sum(s.seconds for s in record.stages if s.name == stage)


def _words(found: Mapping[str, Any]) -> str:
    """One line for the report; empty when nothing was saved."""
    rungs, rows = found["rungs"], found["rows"]
    parts = []
    if rows["saved"]:
        parts.append(f"{rows['saved']:,} of {rows['saved'] + rows['run']:,} rows not run")
    for what, key in (("latency", "latency_s"), ("passes", "build_s")):
        if found[key]["saved"] >= 1:
            parts.append(f"{found[key]['saved']:.0f} s of {what} not spent")
    if not parts and not rungs[EQUAL_POINT]["used"]:
        return ""
    how = []
    for name, words in (
        (EQUAL_POINT, "proposals tried before"), (EQUAL_PREFIX, "artifacts shared"), (EQUAL_BYTES, "measurements shared"),
    ):  # fmt: skip
        if rungs[name]["used"]:
            how.append(f"{words}: {rungs[name]['used']}")
    ended = {n: rungs[n]["ended"] for n in LADDER if n not in (EQUAL_POINT, EQUAL_PREFIX, EQUAL_BYTES) and rungs[n]["ended"]}
    how += [f"ended by {name}: {count}" for name, count in ended.items()]
    return f"Saved: {', '.join(parts) or 'nothing measurable'} ({', '.join(how)})"
