"""The last word: a first choice that does not hold falls, an undecided rival is settled on all rows, the untouched model remains."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.constraints import parse_constraint
from autotune.records import Cause, MetricValue, Status, TrialRecord
from autotune.selection import Objective, Selection, select
from autotune.sweep.finalists import FINALISTS, Finalists, passed_over
from autotune.sweep.result import SweepResult
from autotune.sweep.run import run
from autotune.trial import StageFailed, TrialPlan, TrialRunner

LIMIT = "accuracy >= baseline - 2.0pt"


@pytest.fixture
def plan(finished: SweepResult, tmp_path: Path) -> TrialPlan:
    shutil.copytree(finished.run, tmp_path / "run")  # finalists write into it, and others look at the finished one
    return TrialPlan.load(tmp_path / "run")


class Rows(TrialRunner):
    """A runner whose scores by rows are given; timing and building are real."""

    def __init__(self, plan: TrialPlan, deltas: dict[str, float]) -> None:
        super().__init__(plan.run, plan.sweep)
        self.deltas, self.asked = deltas, list[str]()

    def accuracy(self, model: Any, metric: str, data: Path, rows: Any, folder: Path, *, baseline_outputs: Path | None) -> MetricValue:
        self.asked.append(folder.name)
        delta = self.deltas[folder.name]
        interval = replace(MetricValue(0, 0, 0).interval, value=delta, low=delta - 0.001, high=delta + 0.001)
        base = 0.98
        return MetricValue(base + delta, base + interval.low, base + interval.high, unit="share", delta=interval, samples=len(rows))


def finalists(plan: TrialPlan, runner: TrialRunner) -> Finalists:
    constraint = parse_constraint(LIMIT, metrics={"accuracy": "share"}, score="accuracy")
    objectives = (Objective("latency"), Objective("accuracy", minimize=False))

    def choose(records: list[TrialRecord]) -> Selection:
        return select(records, objectives, [constraint], baseline=plan.baseline_metrics, score="accuracy")

    return Finalists(plan, (constraint,), choose, runner, lambda _line: None)


def candidate(finished: SweepResult) -> TrialRecord:
    return next(r for r in finished.records if r.measured and not r.unchanged and r.shares_with is None)


def test_a_candidate_that_violates_the_limit_on_held_out_rows_falls(finished: SweepResult, plan: TrialPlan) -> None:
    with Rows(plan, {"holdout": -0.30, "all": -0.01}) as runner:
        final, holdout, why = finalists(plan, runner).measure(candidate(finished))

    assert final.status is Status.INFEASIBLE
    assert holdout is not None
    assert why == f"on the held-out rows it violates `{LIMIT}`"


def test_a_candidate_that_misses_the_limit_over_all_rows_falls(finished: SweepResult, plan: TrialPlan) -> None:
    with Rows(plan, {"holdout": -0.01, "all": -0.05}) as runner:
        final, _, why = finalists(plan, runner).measure(candidate(finished))

    assert final.status is Status.INFEASIBLE
    assert why == f"over all rows and fresh runs it does not meet `{LIMIT}`"


def test_a_candidate_that_holds_has_fresh_times_and_the_score_of_all_rows(finished: SweepResult, plan: TrialPlan) -> None:
    record = candidate(finished)
    with Rows(plan, {"holdout": 0.0, "all": -0.004}) as runner:
        final, _, why = finalists(plan, runner).measure(record)

    assert (final.status, why) == (Status.OK, "")
    assert final.metrics["accuracy"].samples == len(plan.rows.everything)
    samples = np.load(plan.run / "trials" / record.id / "final" / "latency" / "latency.npz")
    assert samples["candidate_ns"].size > 0


def test_a_candidate_whose_model_can_not_be_made_again_falls_with_the_digests(finished: SweepResult, plan: TrialPlan) -> None:
    record = replace(candidate(finished), model_digest="0" * 64)
    with Rows(plan, {}) as runner:
        final, _, why = finalists(plan, runner).measure(record)

    assert (final.status, final.cause) == (Status.FAILED, Cause.INFRA)
    assert "could not be made again" in why


def test_an_undecided_candidate_that_would_win_is_settled_on_all_rows(finished: SweepResult, plan: TrialPlan) -> None:
    record = candidate(finished)
    with Rows(plan, {"all": -0.01}) as runner:
        score = record.metrics["accuracy"]
        low = replace(score, delta=replace(score.interval, value=-0.021, low=-0.05, high=0.01), samples=len(plan.rows.search))
        quick = replace(record.metrics["latency"], value=record.metrics["latency"].value / 10)
        open_record = runner.judged(plan, replace(record, metrics={**record.metrics, "accuracy": low, "latency": quick}))
        last = finalists(plan, runner)
        (settled,) = last.settle([open_record])

    assert open_record.status is Status.UNDECIDED
    assert settled.status is Status.OK
    assert runner.asked == ["all"]
    assert last.notes == [f"{record.id} was undecided on {len(plan.rows.search)} rows and is ok on all {len(plan.rows.everything)}"]


def test_a_candidate_that_is_certain_on_the_search_rows_is_not_scored_again(finished: SweepResult, plan: TrialPlan) -> None:
    with Rows(plan, {}) as runner:
        records = finalists(plan, runner).settle(list(finished.records))

    assert records == list(finished.records)
    assert runner.asked == []


def test_a_model_passed_over_can_not_be_chosen_and_says_why(finished: SweepResult) -> None:
    record = candidate(finished)

    assert passed_over(record).status is Status.UNDECIDED
    assert "used up" in passed_over(record).message
    assert FINALISTS >= 2


def test_a_sweep_whose_first_choices_fall_ends_with_one_that_holds(
    digits: Path, sweep_of: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TrialRunner.latency

    def latency(self: TrialRunner, *args: Any, final: bool = False, **more: Any) -> Any:
        if final:
            raise StageFailed("latency", Status.FAILED, Cause.TIMEOUT, "no end after 1 s; killed")
        return real(self, *args, final=final, **more)

    monkeypatch.setattr(TrialRunner, "latency", latency)  # in this process: the trials run in Ray's
    result = run(sweep_of(digits), tmp_path / "out")

    assert result.status == "delivered"
    assert result.best is not None
    assert result.best.unchanged
    assert any("its last measurement ended as timeout" in note for note in result.summary["notes"])


def test_the_choice_stays_among_those_measured_afresh_and_the_trials_keep_their_status(
    digits: Path, sweep_of: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.sweep.run.FINALISTS", 0)

    result = run(sweep_of(digits), tmp_path / "out")

    assert result.best is not None
    assert result.best.unchanged
    assert result.summary["trials"] == {"ok": 5}
    assert len(result.summary["front"]) >= 1
    assert any("0 finalists were measured afresh" in note for note in result.summary["notes"])
