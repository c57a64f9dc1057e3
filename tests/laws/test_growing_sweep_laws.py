"""Laws of a sweep that grows: what is kept from one trial to the next never changes what is chosen or told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.constraints import parse_constraint
from autotune.records import Interval, MetricValue, Status, TrialRecord
from autotune.selection import DEFAULT, PICKS, UNTOUCHED, Objective, Selector, compared, measurement_of, select, tolerance, widened
from autotune.sweep.ladder import FrontBoxes

UNITS = {"latency": "ms", "accuracy": "share", "size": "bytes"}
LIMITS = [parse_constraint(text, metrics=UNITS) for text in ("accuracy >= baseline - 1.5pt", "latency <= 1.2x")]
OBJECTIVES = [
    (Objective("latency"), Objective("accuracy", minimize=False)),
    (Objective("latency"),),
    (Objective("size"), Objective("latency"), Objective("accuracy", minimize=False)),
]
BASELINE = {
    "latency": MetricValue(8.0, 8.0, 8.0, "ms", ratio=Interval.exactly(1.0)),
    "accuracy": MetricValue(0.9, 0.9, 0.9, "share", delta=Interval.exactly(0.0)),
    "size": MetricValue(1e5, 1e5, 1e5, "bytes", ratio=Interval.exactly(1.0)),
}
SEEDS = st.integers(0, 10_000)


def stream(seed: int, count: int) -> list[TrialRecord]:
    """A sweep's records: models with coarse figures, so that ties are common; failed and infeasible trials, shared bytes, missing metrics."""
    rng = np.random.default_rng(seed)
    coarse = bool(rng.integers(2))

    def figure(low: float, high: float, step: float) -> float:
        value = float(rng.uniform(low, high))
        return round(value / step) * step if coarse else value

    found = [TrialRecord(0, {"p": None}, Status.OK, UNTOUCHED, metrics=BASELINE, unchanged="nothing was done")]
    for number in range(1, count):
        ratio, spread, size = figure(0.3, 1.3, 0.1), figure(0.0, 0.04, 0.01), figure(0.25, 1.25, 0.25)
        change, doubt = figure(-0.025, 0.01, 0.005), figure(0.0, 0.01, 0.005)
        status = [Status.OK, Status.OK, Status.OK, Status.OK, Status.INFEASIBLE, Status.FAILED][rng.integers(6)]
        metrics = {
            "latency": MetricValue(
                8 * ratio, 8 * ratio, 8 * ratio, "ms", ratio=Interval(ratio, ratio * (1 - spread), ratio * (1 + spread)),
                units=int(rng.choice([0, 6, 12, 40])),
            ),
            "accuracy": MetricValue(
                0.9 + change, 0.8, 1.0, "share", delta=Interval(change, change - doubt, change + doubt), samples=int(rng.choice([50, 600, 5000]))
            ),
            "size": MetricValue(1e5 * size, 1e5 * size, 1e5 * size, "bytes", ratio=Interval.exactly(size)),
        }  # fmt: skip
        if rng.random() < 0.03:
            del metrics["size"]
        found.append(TrialRecord(
            number, {"p": "Q", "p.a": int(rng.integers(3)), "p.b": int(rng.integers(2))}, status, DEFAULT if number == 1 else "sampler",
            metrics={} if status is Status.FAILED else metrics, model_digest=str(rng.integers(20)),
            constraints=({"verdict": ["certain", "met"][rng.integers(2)]},),
        ))  # fmt: skip
    return found


def measured_again(record: TrialRecord, seed: int) -> TrialRecord:
    """The record with another latency, as finalists get it."""
    if "latency" not in record.metrics:
        return record
    ratio = float(np.random.default_rng(seed).uniform(0.4, 1.2))
    latency = replace(record.metrics["latency"], ratio=Interval(ratio, ratio * 0.99, ratio * 1.01))
    return replace(record, metrics={**record.metrics, "latency": latency})


@settings(max_examples=30)
@given(SEEDS)
def test_a_selector_that_saw_the_sweep_grow_chooses_as_one_that_sees_all_at_once(seed: int) -> None:
    records = stream(seed, 30)
    objectives, options = OBJECTIVES[seed % 3], {"pick": PICKS[seed % 5], "strict": seed % 4 == 0}
    kept = Selector(objectives, LIMITS, baseline=BASELINE, score="accuracy", **options)  # type: ignore[arg-type] # of two types

    for count in range(1, len(records) + 1, 3):
        assert kept.select(records[:count], places=False) == fresh(records[:count], objectives, options, places=False)

    last = [measured_again(r, seed) if r.number % 7 == 3 else r for r in records]
    assert kept.select(last, looks=5) == fresh(last, objectives, options, looks=5)
    assert kept.select(records[:12]) == fresh(records[:12], objectives, options)


def fresh(records: list[TrialRecord], objectives: tuple[Objective, ...], options: dict[str, Any], **how: Any) -> Any:
    return select(records[::-1], objectives, LIMITS, baseline=BASELINE, score="accuracy", **options, **how)


@settings(max_examples=30)
@given(SEEDS)
def test_whoever_is_off_the_front_is_beaten_as_the_rule_says_pair_by_pair(seed: int) -> None:
    records, objectives = stream(seed, 25), OBJECTIVES[seed % 3]

    found = select(records, objectives, LIMITS, baseline=BASELINE, score="accuracy")

    feasible = [r for r in records if r.id in found.feasible]
    boxes = boxes_of(feasible, records, objectives)
    eps = [tolerance(o.name, BASELINE[o.name]) for o in objectives]

    def beats(one: TrialRecord, other: TrialRecord) -> bool:
        mine, theirs = boxes[one.id], boxes[other.id]
        no_worse = all(a.value <= b.value for a, b in zip(mine, theirs, strict=True))
        return no_worse and any(a.high < b.low and b.value - a.value > e for a, b, e in zip(mine, theirs, eps, strict=True))

    best_first = sorted(feasible, key=lambda r: (sum(i.value for i in boxes[r.id]), r.number))
    winners = {r.id: next((w.id for w in best_first if beats(w, r)), None) for r in feasible}
    assert dict(found.off_front) == {loser: winner for loser, winner in winners.items() if winner is not None}


def boxes_of(feasible: list[TrialRecord], records: list[TrialRecord], objectives: tuple[Objective, ...]) -> dict[str, list[Interval]]:
    """Intervals that hold together for all that were measured, over all that is looked at where all feasible models have it."""
    looked_at = [*objectives, *(Objective(n) for n in ("latency", "size") if all(o.name != n for o in objectives))]
    axes = [a for a in looked_at if a in objectives or all(a.name in r.metrics for r in feasible)]
    plain = {r.id: [compared(r.metrics[a.name], BASELINE[a.name], minimize=a.minimize) for a in axes] for r in feasible}
    noisy = sum(any(plain[r.id][k].low < plain[r.id][k].high for r in feasible) for k in range(len(axes)))
    family = len({measurement_of(r) for r in records if r.measured and not r.unchanged})
    if not noisy or not family:
        return {i: found[: len(objectives)] for i, found in plain.items()}
    error = 0.05 / (family * noisy)
    return {
        r.id: [widened(i, r.metrics[o.name], error=error) for i, o in zip(plain[r.id], objectives, strict=False)] for r in feasible
    }  # fmt: skip


@settings(max_examples=30)
@given(SEEDS)
def test_what_a_trial_is_told_of_those_before_it_does_not_depend_on_who_was_told_before(seed: int) -> None:
    records = stream(seed, 30)
    kept = told_by(OBJECTIVES[seed % 3])

    for count in (*range(0, 31, 4), 9, 30):  # 9: a trial that runs again
        told = kept.of(records[:count])

        assert told == told_by(OBJECTIVES[seed % 3]).of(records[:count][::-1])
    boxes = [tuple(tuple(i.values()) for i in b["axes"].values()) for b in kept.of(records)["boxes"]]
    assert len(set(boxes)) == len(boxes)  # nobody is told the same twice


def told_by(objectives: tuple[Objective, ...]) -> FrontBoxes:
    return FrontBoxes(objectives, BASELINE, "accuracy", higher_is_better=True, eps_latency=0.03, eps_score=0.003, family=60)
