"""The ladder of cheaper answers over a whole sweep: who is told of whom, where trials end, what that saved, and what an extension undoes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.pipeline import Pipeline
from autotune.records import Interval, MetricValue, StageRecord, Status, TrialRecord
from autotune.report import render_report
from autotune.selection import UNTOUCHED, Objective
from autotune.sweep.ladder import FrontBoxes, ledger
from autotune.sweep.result import SweepResult
from autotune.sweep.run import run
from autotune.trial import TrialPlan, TrialRunner, rivals, split_rows
from tests.faults.deterministic import deterministic_sweep

OBJECTIVES = (Objective("latency"), Objective("accuracy", minimize=False))
BASELINE = {"latency": MetricValue(10, 9, 11, unit="ms"), "accuracy": MetricValue(0.9, 0.88, 0.92, unit="share"),
            "size": MetricValue(100, 100, 100, unit="bytes")}  # fmt: skip


def measured(number: int, latency: float, drop: float, size: float = 1.0, **more: Any) -> TrialRecord:
    metrics = {
        "latency": MetricValue(10 * latency, 9, 11, unit="ms", ratio=Interval(latency, latency * 0.99, latency * 1.01)),
        "accuracy": MetricValue(0.9 - drop, 0.8, 0.9, unit="share", delta=Interval(-drop, -drop - 0.01, -drop + 0.01)),
        "size": MetricValue(100 * size, 100 * size, 100 * size, unit="bytes", ratio=Interval.exactly(size)),
    }
    return TrialRecord(number, {"a": number}, **{"status": Status.OK, "metrics": metrics, "constraints": ({"verdict": "certain"},), **more})


def front_boxes() -> FrontBoxes:
    return FrontBoxes(OBJECTIVES, BASELINE, "accuracy", higher_is_better=True, eps_latency=0.03, eps_score=0.003, family=12)


def boxes(records: list[TrialRecord]) -> dict[str, Any]:
    return front_boxes().of(records)


# What a trial is told -------------------------------------------------------------------------------------------------------


def test_a_trial_is_told_of_those_that_are_sure_of_their_place() -> None:
    records = [
        measured(0, 1.0, 0.0, origin=UNTOUCHED, constraints=({"verdict": "met"},)),
        measured(1, 0.5, 0.01),
        measured(2, 0.6, 0.02),  # beaten by the one before
        measured(3, 0.4, 0.03, constraints=({"verdict": "met"},)),  # may fall on other rows
        measured(4, 0.3, 0.3, status=Status.INFEASIBLE),
        measured(5, 0.6, 0.02, size=0.5),  # beaten in the objectives, but the smallest: a pick may take it
        measured(6, 0.2, 0.0, status=Status.PRUNED, rungs=({"rung": "accuracy by looks", "ended": True, "words": "", "rows": 5, "of": 100},)),
    ]

    told = boxes(records)

    assert [b["trial"] for b in told["boxes"]] == ["t-0000", "t-0001", "t-0005"]
    assert told["objectives"] == ["latency", "accuracy"]
    assert told == json.loads(json.dumps(told)) == boxes(records[::-1])


def test_without_a_trial_there_is_nobody_to_be_told_of() -> None:
    assert boxes([])["boxes"] == []


def test_a_rival_is_no_worse_in_all_that_is_known_of_a_candidate() -> None:
    front = boxes([measured(0, 1.0, 0.0, origin=UNTOUCHED), measured(1, 0.5, 0.01, size=0.3)])

    def named(candidate: TrialRecord) -> dict[str, tuple[bool, bool]]:
        found = rivals(front, {n: m for n, m in candidate.metrics.items() if n != "accuracy"}, BASELINE, "accuracy")
        return {r.trial: (r.elsewhere, r.everywhere) for r in found}

    assert named(measured(2, 2.0, 0.0)) == {"t-0000": (True, True), "t-0001": (True, True)}
    assert named(measured(2, 0.505, 0.0)) == {"t-0001": (False, False)}  # as fast within noise
    assert named(measured(2, 0.4, 0.0)) == {}
    assert named(measured(2, 2.0, 0.0, size=0.2)) == {}  # the smallest so far
    assert rivals(front, {}, BASELINE, "accuracy") == ()  # nothing is known


# What was saved -------------------------------------------------------------------------------------------------------------


def stage(name: str, seconds: float, **more: Any) -> StageRecord:
    return StageRecord(name, seconds, **more)


def test_the_ledger_says_where_each_saving_came_from() -> None:
    full = measured(0, 0.5, 0.0, stages=(stage("quantize", 8.0, key="k"), stage("check", 0.1), stage("latency", 3.0), stage("accuracy", 1.0)))
    records = [
        full,
        measured(1, 0.5, 0.0, stages=(stage("quantize", 0.1, key="k", cached=True), stage("latency", 1.0), stage("accuracy", 0.1)), rungs=(
            {"rung": "equal chain prefix", "ended": False, "words": "", "slot": "quantize", "key": "k"},
            {"rung": "accuracy by looks", "ended": True, "words": "", "rule": "infeasible", "rows": 30, "of": 300})),
        measured(2, 0.5, 0.0, rungs=({"rung": "equal model bytes", "ended": True, "words": "", "measured_as": "t-0000"},)),
        measured(3, 0.5, 0.0, status=Status.INVALID, metrics={}, stages=(stage("check", 0.1),),
                 rungs=({"rung": "cheap checks", "ended": True, "words": ""},)),
        measured(4, 0.5, 0.0, rungs=({"rung": "equal point", "ended": False, "words": "", "repeats": 3},), stages=full.stages[1:]),
    ]  # fmt: skip

    found = ledger(records, rows=300)

    assert found["rows"] == {"run": 630, "saved": 270 + 300 + 300}
    assert found["latency_s"] == {"spent": 7.0, "saved": 3.0 + 3.0}  # of t-0000, whose measurement it is; the median
    assert found["build_s"] == {"spent": 8.0, "saved": 8.0}
    assert found["rungs"]["equal chain prefix"]["shared"] == [{"trial": "t-0001", "slot": "quantize", "from": "t-0000"}]
    assert found["rungs"]["equal model bytes"]["shared"] == [{"trial": "t-0002", "from": "t-0000"}]
    assert found["words"] == (
        "Saved: 870 of 1,500 rows not run, 6 s of latency not spent, 8 s of passes not spent "
        "(proposals tried before: 3, artifacts shared: 1, measurements shared: 1, ended by cheap checks: 1, ended by accuracy by looks: 1)"
    )


def test_a_sweep_that_saved_nothing_says_nothing() -> None:
    assert ledger([], rows=0)["words"] == ""


# Rows of the same content ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [2, 5, 60])
def test_rows_of_the_same_content_are_never_on_both_sides(copies: int) -> None:
    contents = [str(i // copies) for i in range(120)]

    rows = split_rows(120, 0.25, seed=3, contents=contents)

    assert {contents[r] for r in rows.search} & {contents[r] for r in rows.holdout} == set()
    assert sorted(rows.everything) == list(range(120))
    assert len(rows.holdout) == (30 if copies < 60 else 0)


def test_rows_that_all_differ_are_split_as_without_contents() -> None:
    assert split_rows(100, 0.25, seed=3, contents=range(100)) == split_rows(100, 0.25, seed=3)


def test_the_order_of_the_searched_rows_tells_nothing_of_their_content() -> None:
    contents = [0] * 40 + list(range(1, 61))  # a group that the hold-out has no room for
    first = [contents[split_rows(100, 0.25, seed=seed, contents=contents).search[0]] == 0 for seed in range(400)]

    assert np.mean(first) == pytest.approx(40 / 75, abs=0.09)


# In a sweep -----------------------------------------------------------------------------------------------------------------


Sweeps = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def strict_run(digits: Path, sweep_of: Sweeps, tmp_path_factory: pytest.TempPathFactory) -> tuple[SweepResult, Callable[..., dict[str, Any]]]:
    """A sweep whose limit nobody can meet, and a function that writes it with other parts."""
    folder = tmp_path_factory.mktemp("ladder")
    chain = [{"slot": "half", "pass": "OnnxFloatToFloat16", "optional": True}, {"slot": "session", "pass": "OrtPerfTuning",
             "params": {"graph_optimization_level": ["all", "basic"]}}]  # fmt: skip

    def sweep(**more: Any) -> dict[str, Any]:
        return deterministic_sweep(sweep_of, digits, folder, **{"budget": {"trials": 4}, "chain": chain, "constraints": ["accuracy >= 0.99"], **more})

    result = run(sweep(), folder / "out")
    shutil.copytree(result.run, folder / "kept")  # the last test goes on in the folder itself
    return result, sweep


@pytest.fixture
def again(strict_run: tuple[SweepResult, Any], tmp_path: Path) -> Iterator[tuple[TrialPlan, Pipeline, TrialRunner]]:
    """The parts that run one more trial of that sweep, in a copy of its folder that remembers no measurement."""
    folder = tmp_path / "out"
    shutil.copytree(strict_run[0].run.with_name("kept"), folder, ignore=shutil.ignore_patterns("measured"))
    plan = TrialPlan.load(folder)
    with TrialRunner(folder, plan.sweep) as runner:
        yield plan, Pipeline(plan.sweep, plan.facts), runner


def stopped(result: SweepResult) -> list[TrialRecord]:
    return [r for r in result.records if r.partial]


def test_a_trial_that_no_row_could_save_ends_at_a_look_and_says_so(strict_run: tuple[SweepResult, Any]) -> None:
    result, _ = strict_run

    assert result.status == "none-feasible"
    assert stopped(result)
    for record in stopped(result):
        last = record.rungs[-1]
        assert (record.status, last["rung"], last["rule"], last["ended"]) == (Status.INFEASIBLE, "accuracy by looks", "infeasible", True)
        assert record.message == last["words"]
        assert f"stopped after {last['rows']} of {last['of']} rows: `accuracy >= 0.99` is violated" in record.message
        assert record.metrics["accuracy"].samples == last["rows"] < last["of"] == 300
        assert record.constraints[0]["verdict"] == "violated"
        assert [s.name for s in record.stages][-3:] == ["check", "latency", "accuracy"]
        assert record == TrialRecord.from_json(json.loads(json.dumps(record.to_json())))


def test_the_report_and_the_result_say_what_the_ladder_saved(strict_run: tuple[SweepResult, Any]) -> None:
    result, _ = strict_run
    found = result.summary["ledger"]

    saved = sum(r.rungs[-1]["of"] - r.rungs[-1]["rows"] for r in stopped(result))

    assert found["rungs"]["accuracy by looks"]["rows_saved"] == saved > 0
    assert "Saved: " in " ".join(render_report(dict(result.summary), result.records).split())


def test_a_run_that_goes_on_tells_the_same_of_its_stopped_trials(strict_run: tuple[SweepResult, Any], tmp_path: Path) -> None:
    result, sweep = strict_run
    folder = tmp_path / "out"
    shutil.copytree(result.run.with_name("kept"), folder, ignore=shutil.ignore_patterns("measured"))
    gone = stopped(result)[-1]
    shutil.rmtree(folder / "trials" / gone.id)
    (folder / "result.json").unlink()

    resumed = run(sweep(), folder)

    after = next(r for r in resumed.records if r.id == gone.id)
    assert (after.status, after.metrics["accuracy"], after.rungs[-1]) == (gone.status, gone.metrics["accuracy"], gone.rungs[-1])


def test_a_trial_that_is_dominated_is_pruned_and_never_chosen(again: tuple[TrialPlan, Pipeline, TrialRunner]) -> None:
    plan, pipeline, runner = again
    out_of_reach = {"value": -5.0, "low": -5.0, "high": -5.0}
    front = {
        "objectives": ["latency", "accuracy"], "minimize": {"latency": True, "accuracy": False, "size": True},
        "error": 1e-4, "eps": {"latency": 0.03, "accuracy": 0.003, "size": 0.005},
        "boxes": [{"trial": "t-0001", "axes": dict.fromkeys(("latency", "accuracy", "size"), out_of_reach)}],
    }  # fmt: skip
    lenient = replace(plan, sweep=plan.sweep.changed({("constraints",): []}))

    record = runner.run(lenient, pipeline, 90, pipeline.default_point(), "sampler", front=front, repeats=2)

    assert (record.status, record.stage, record.cause, record.measured) == (Status.PRUNED, "accuracy", None, False)
    assert record.message.startswith("dominated: stopped after 6 of 300 rows: t-0001 is better in every objective beyond doubt")
    assert record.metrics["accuracy"].samples == 6
    assert [r["rung"] for r in record.rungs] == ["equal point", "equal chain prefix", "accuracy by looks"]


@pytest.mark.parametrize("looks", [None, False])
def test_looks_are_off_when_the_file_says_so_or_there_are_few_rows(again: tuple[TrialPlan, Pipeline, TrialRunner], looks: bool | None) -> None:
    plan, _, runner = again
    few = plan if looks is False else replace(plan, rows=replace(plan.rows, search=plan.rows.search[:199]))

    race = runner._race(replace(few, sweep=plan.sweep.changed({("measure", "looks"): looks})), {}, {})

    assert race is None


def test_trials_that_were_stopped_run_again_under_other_limits(strict_run: tuple[SweepResult, Any]) -> None:
    result, sweep = strict_run

    extended = run(sweep(constraints=["accuracy >= 0.5"]), result.run, extend=True)

    assert extended.status == "delivered"
    assert stopped(extended) == []
    for record in stopped(result):
        after = next(r for r in extended.records if r.id == record.id)
        assert (after.status, after.point) == (Status.OK, record.point)
        assert after.metrics["accuracy"].samples >= 300
