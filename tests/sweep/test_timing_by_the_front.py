"""A candidate that a finished trial puts off the front is timed no longer than it takes to know that, and the record says so."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.pipeline import Pipeline
from autotune.records import Interval, MetricValue, StageRecord, Status, TrialRecord
from autotune.sweep.ladder import ledger
from autotune.sweep.result import SweepResult
from autotune.trial import TrialPlan, TrialRunner, best_score, front_limits, judge_record

BASELINE = {
    "latency": MetricValue(10, 9, 11, unit="ms"), "accuracy": MetricValue(0.9, 0.88, 0.92, unit="share"),
    "size": MetricValue(100, 100, 100, unit="bytes"),
}  # fmt: skip
BOUNDS = (0.0, 1.0)


def exactly(value: float) -> dict[str, float]:
    return Interval.exactly(value).to_json()


def front(*boxes: tuple[float, float, float], objectives: tuple[str, ...] = ("latency", "accuracy"), doubt: float = 0.0) -> dict[str, Any]:
    """What a trial is told of finished ones, each given by its latency ratio, the points that it lost, and its size ratio."""
    return {
        "objectives": list(objectives), "minimize": {"latency": True, "accuracy": False, "size": True}, "error": 1e-5,
        "eps": {"latency": math.log(1.03), "accuracy": 0.003, "size": 0.005},
        "boxes": [
            {"trial": f"t-{n:04d}", "axes": {"latency": {"value": math.log(ratio), "low": -9.0, "high": math.log(ratio) + doubt},
                                             "accuracy": exactly(lost / 100), "size": exactly(math.log(size))}}
            for n, (ratio, lost, size) in enumerate(boxes, start=1)
        ],
    }  # fmt: skip


def known(lost: float | None, size: float = 1.0) -> dict[str, MetricValue]:
    """What is known of a candidate before it is timed: its size, and its score (points lost) where that came first."""
    found = {"size": MetricValue(100 * size, 100 * size, 100 * size, unit="bytes", ratio=Interval.exactly(size))}
    if lost is not None:
        delta = -lost / 100
        found["accuracy"] = MetricValue(0.9 + delta, 0.8, 1.0, unit="share", delta=Interval(delta, delta - 0.01, delta + 0.01), samples=300)
    return found


def limits_of(told: Mapping[str, Any], metrics: Mapping[str, MetricValue]) -> list[dict[str, Any]]:
    best = best_score(BOUNDS, BASELINE["accuracy"], higher_is_better=True)
    return front_limits(told, metrics, BASELINE, "accuracy", best)


# What may end a timing ------------------------------------------------------------------------------------------------------


def test_whoever_is_no_worse_in_all_that_is_known_ends_a_timing_and_the_fastest_of_them_soonest() -> None:
    told = front((0.8, 1.0, 1.0), (0.5, 1.0, 1.0), (0.3, 2.0, 1.0), (0.2, 0.0, 1.5))  # the last two are less accurate, and larger

    (limit,) = limits_of(told, known(1.0))

    assert limit["limit"] == pytest.approx(0.5 * 1.03)  # the tolerance on top
    assert (limit["rule"], limit["error"]) == ("off-front", 1e-5)
    assert limit["why"] == "t-0002 is better in latency, and no worse in anything, beyond doubt"


def test_the_doubt_about_the_rival_is_the_candidates_benefit() -> None:
    (limit,) = limits_of(front((0.5, 1.0, 1.0), doubt=0.2), known(1.0))

    assert limit["limit"] == pytest.approx(0.5 * math.exp(0.2))


def test_a_rival_that_is_better_in_every_objective_dominates() -> None:
    (limit,) = limits_of(front((0.5, 0.0, 1.0)), known(8.0))

    assert (limit["rule"], limit["why"]) == ("dominated", "t-0001 is better in every objective beyond doubt")


@pytest.mark.parametrize(
    ("told", "metrics"),
    [
        (front((0.5, 1.0, 1.0)), known(None)),  # it may prove the most accurate of all
        (front((0.5, 1.0, 1.0)), known(0.5)),
        (front((0.5, 1.0, 1.0)), known(1.0, size=0.9)),  # the smallest so far: a pick may take it
        (front((0.5, 1.0, 1.0), objectives=("accuracy", "size")), known(1.0)),  # nobody asked for speed
        (front(), known(1.0)),
        ({}, known(1.0)),
    ],
)
def test_whoever_may_still_be_on_the_front_is_timed_to_the_end(told: dict[str, Any], metrics: dict[str, MetricValue]) -> None:
    assert limits_of(told, metrics) == []


def test_another_measure_of_time_as_objective_leaves_every_place_open() -> None:
    told = front((0.5, 1.0, 1.0), objectives=("latency", "accuracy", "throughput"))
    for box in told["boxes"]:
        box["axes"]["throughput"] = exactly(-5.0)

    assert limits_of(told, known(1.0)) == []


def test_a_score_that_nothing_exceeds_ends_timings_before_the_score_is_known() -> None:
    perfect = front((0.5, -10.0, 1.0))  # ten points above the baseline's 90 %

    assert [limit["rule"] for limit in limits_of(perfect, known(None))] == ["off-front"]
    assert front_limits(perfect, known(None), BASELINE, "accuracy", None) == []  # a score without bounds
    assert best_score(None, BASELINE["accuracy"], higher_is_better=True) is None


# In a trial -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(finished: SweepResult, tmp_path: Path) -> Path:
    """The folder of a finished sweep, for one more trial; by its record the baseline was scored in no time."""
    folder = tmp_path / "run"
    shutil.copytree(finished.run, folder, ignore=shutil.ignore_patterns("measured"))
    path = folder / "baseline" / "baseline.json"
    data = json.loads(path.read_text())
    for stage in data["stages"]:
        stage["seconds"] = {"accuracy": 0.01, "latency": 10.0}.get(stage["name"], stage["seconds"])
    path.write_text(json.dumps(data))
    return folder


def told_by(rival_lost: float) -> dict[str, Any]:
    return front((1e-3, rival_lost, 1e-3))


def one_more(folder: Path, point: dict[str, Any], origin: str, told: dict[str, Any], **measure: Any) -> TrialRecord:
    plan = TrialPlan.load(folder)
    sweep = plan.sweep.changed({("constraints",): [], **{("measure", name): value for name, value in {"looks": True, **measure}.items()}})
    with TrialRunner(folder, sweep) as runner:
        return runner.run(replace(plan, sweep=sweep), Pipeline(sweep, plan.facts), 90, point, origin, front=told)


def session_alone(folder: Path) -> dict[str, Any]:
    """A point that leaves the model's bytes as they are."""
    point = Pipeline(TrialPlan.load(folder).sweep, TrialPlan.load(folder).facts).default_point()
    return {"quantize": None, **{k: v for k, v in point.items() if k.startswith("session")}, "session.graph_optimization_level": "basic"}


def test_a_model_of_known_bytes_is_scored_first_and_timed_until_it_is_certainly_off_the_front(copied: Path) -> None:
    record = one_more(copied, session_alone(copied), "sampler", told_by(0.0), max_time="60s", ratio_width=1e-9)

    latency, last = record.metrics["latency"], record.rungs[-1]
    assert [s.name for s in record.stages][-3:] == ["check", "accuracy", "latency"]
    assert (record.status, record.stage, record.partial, record.measured) == (Status.PRUNED, "latency", True, False)
    assert record.message.startswith(f"off-front: timed for {latency.units} session pairs only: t-0001 is better in latency, and no worse")
    assert (last["rung"], last["rule"], last["ended"]) == ("latency", "off-front", True)
    assert last["seconds"] < 30
    assert record.metrics["accuracy"].samples == 300  # all of the search
    assert record == TrialRecord.from_json(json.loads(json.dumps(record.to_json())))
    assert judge_record(record, (), BASELINE).status is Status.PRUNED  # whatever limits come later


@pytest.mark.parametrize(("origin", "looks"), [("default", True), ("sampler", False)])
def test_the_default_configuration_is_timed_to_the_end_and_every_one_without_looks(origin: str, looks: bool, copied: Path) -> None:
    record = one_more(copied, session_alone(copied), origin, told_by(0.0), looks=looks)

    assert [s.name for s in record.stages][-3:] == ["check", "latency", "accuracy"]
    assert record.stages[-2].notes["stopped_by"] in ("ratio_width", "max_time", "max_rounds")


def test_beside_the_best_possible_score_a_slow_candidate_ends_twice_early(copied: Path) -> None:
    base = TrialPlan.load(copied).baseline_metrics["accuracy"].value
    point = Pipeline(TrialPlan.load(copied).sweep, TrialPlan.load(copied).facts).default_point()
    perfect = told_by(-100 * (1 - base) - 1e-6)

    record = one_more(copied, point, "sampler", perfect, max_time="60s", ratio_width=1e-9)

    assert (record.status, record.stage) == (Status.PRUNED, "accuracy")
    assert [(r["rung"], r["ended"]) for r in record.rungs][-2:] == [("latency", False), ("accuracy by looks", True)]
    assert record.metrics["accuracy"].samples < 300
    assert record.metrics["latency"].ratio is not None


# What it saved --------------------------------------------------------------------------------------------------------------


def test_the_ledger_counts_the_time_that_a_timing_cut_short_left_over() -> None:
    whole = TrialRecord(0, {}, Status.OK, stages=(StageRecord("check", 0.1), StageRecord("latency", 3.0), StageRecord("accuracy", 1.0)))
    rung = {"rung": "latency", "ended": True, "words": "", "rule": "off-front", "seconds": 0.9}
    cut = replace(whole, number=1, status=Status.PRUNED, stages=(StageRecord("accuracy", 1.0), StageRecord("latency", 1.0)), rungs=(rung,))
    shares = replace(cut, number=2, stages=(), rungs=({"rung": "equal model bytes", "ended": True, "words": "", "measured_as": "t-0001"}, rung))

    found = ledger([whole, cut, shares], rows=300)

    assert found["latency_s"] == {"spent": 4.0, "saved": (3.0 - 1.0) + 1.0}
    assert found["rungs"]["latency"]["ended"] == 2
    assert found["rows"] == {"run": 600, "saved": 300}
