"""The last word: a first choice that does not hold falls, an undecided rival is settled on all rows, the untouched model remains."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.benchmarks.latency import PairedSamples, summarize
from autotune.benchmarks.occasions import Occasions
from autotune.bundle import NOT_REPRODUCED, VERIFIED, verify_bundle
from autotune.constraints import parse_constraint
from autotune.records import Cause, Interval, MetricValue, Status, TrialRecord
from autotune.selection import Objective, Selection, State, select
from autotune.sweep.finalists import FINALISTS, LOOKS, Finalists, passed_over, pooled
from autotune.sweep.result import SweepResult, read_result
from autotune.sweep.run import run
from autotune.trial import StageFailed, TrialPlan, TrialRunner
from tests.faults.deterministic import deterministic_sweep

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


@pytest.mark.long
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


@pytest.mark.long
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


# ---------------------------------------------------------------------------------------------------------------- a front that is not settled


class Clock(TrialRunner):
    """A runner whose timing is given: log ratios by trial, five session pairs a turn, with the spread of a real machine."""

    def __init__(self, plan: TrialPlan, ratios: dict[str, float]) -> None:
        super().__init__(plan.run, plan.sweep)
        self.ratios, self.turns = ratios, list[tuple[str, str]]()

    def latency(self, model: Any, baseline: Any, data: Path, rows: Any, folder: Path, *, seed: int, **more: Any) -> Any:
        trial = folder.relative_to(self.run_folder / "trials").parts[0]
        self.turns.append((trial, folder.name))
        rng = np.random.default_rng(seed)
        folder.mkdir(parents=True, exist_ok=True)
        session = np.repeat(np.arange(5), 2)
        factor = 1 + 0.004 * rng.normal(size=(5,))[session, None]
        ns = (1e6 * self.ratios[trial] * factor * np.ones((10, 7))).astype(np.int64)
        save_samples(folder / "latency.npz", ns, np.full((10, 7), 1_000_000), session)
        return {}, {}

    def baseline_before(self, *_: Path) -> list[float]:
        return [1.0] * 10  # that machine stays as it is


def save_samples(path: Path, candidate: Any, baseline: Any, session: Any) -> None:
    np.savez(path, candidate_ns=candidate, baseline_ns=baseline, session=session, used=np.ones(len(session), bool))


def near(finished: SweepResult, number: int, ratio: float, accuracy: float, half: float) -> TrialRecord:
    """A trial of the run under another number, with other figures; `half` is the doubt of the ratio."""
    record = candidate(finished)
    latency = MetricValue(ratio, ratio - half, ratio + half, "ms", ratio=Interval(ratio, ratio - half, ratio + half), samples=99, units=6)
    score = MetricValue(0.98 + accuracy, 0.9, 1.0, "share", delta=Interval.exactly(accuracy), samples=300, units=300)
    return replace(
        record,
        number=number,
        metrics={**record.metrics, "latency": latency, "accuracy": score},
        model_digest=f"{number:064d}",
        shares_with=None,
    )


def ready(plan: TrialPlan, runner: TrialRunner, monkeypatch: pytest.MonkeyPatch) -> Finalists:
    last = finalists(plan, runner)
    monkeypatch.setattr(last, "model_of", lambda _record: plan.baseline)
    return last


def test_an_open_place_on_the_front_is_settled_by_fresh_runs_in_turns(
    finished: SweepResult, plan: TrialPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By the numbers of the search the first is faster, and may or may not be; in truth it is clearly slower, and less accurate.
    records = [near(finished, 11, 0.50, -0.004, 0.05), near(finished, 12, 0.52, 0.0, 0.05), near(finished, 13, 0.99, -0.01, 0.001)]
    with Clock(plan, {"t-0011": 0.60, "t-0012": 0.50}) as runner:
        last = ready(plan, runner, monkeypatch)
        before = last.select(records)
        after_records = last.resolve(records)
        after = last.select(after_records)

    assert before.membership["t-0011"].state is State.AMBIGUOUS
    assert set(before.to_measure) == {"t-0011", "t-0012"}
    assert after.membership["t-0011"].state in (State.EXCLUDED, State.COVERED)
    assert after.best == "t-0012"
    assert after_records[0].metrics["latency"].ratio is not None
    assert after_records[0].metrics["latency"].ratio.value == pytest.approx(0.60, rel=0.02)  # fresh runs, not a mean with the lucky one
    assert after_records[2] == records[2]
    assert last.resolution is not None
    assert last.resolution["not_resolved"] == list(after.not_resolved)


def test_every_turn_times_each_open_model_once_and_ends_when_nothing_is_open(
    finished: SweepResult, plan: TrialPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [near(finished, n, 0.50 + 0.001 * n, -0.015 + 0.001 * n, 0.04) for n in range(11, 15)]
    runner = Clock(plan, {f"t-{n:04d}": 0.5 for n in range(11, 15)})
    with runner:
        last = ready(plan, runner, monkeypatch)
        last.resolve(records)

    by_turn = [[trial for trial, turn in runner.turns if turn == f"turn-{k}"] for k in range(1, LOOKS + 1)]
    assert len(by_turn[0]) == 4
    assert all(len(set(turn)) == len(turn) for turn in by_turn)
    assert all(set(a) >= set(b) for a, b in itertools.pairwise(by_turn))


def test_nothing_is_timed_again_where_only_more_rows_could_tell(finished: SweepResult, plan: TrialPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = near(finished, 11, 0.50, -0.001, 0.001), near(finished, 12, 0.80, 0.0, 0.001)
    doubt = replace(fast.metrics["accuracy"], delta=Interval(-0.001, -0.02, 0.018))
    records = [fast, replace(slow, metrics={**slow.metrics, "accuracy": replace(doubt, delta=Interval(0.0, -0.02, 0.02))})]
    records[0] = replace(fast, metrics={**fast.metrics, "accuracy": doubt})
    runner = Clock(plan, {})
    with runner:
        last = ready(plan, runner, monkeypatch)
        settled = last.resolve(records)
        found = last.select(records)

    assert runner.turns == []
    assert settled == records
    assert last.resolution is None
    assert found.membership["t-0012"].open == ("accuracy",)
    assert found.not_resolved == ("t-0012",)


def test_a_model_that_fails_in_its_turn_falls_and_the_others_go_on(finished: SweepResult, plan: TrialPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [near(finished, 11, 0.50, -0.004, 0.05), near(finished, 12, 0.52, 0.0, 0.05)]

    class Failing(Clock):
        def latency(self, *args: Any, **more: Any) -> Any:
            if args[4].parent.parent.name == "t-0011":
                raise StageFailed("latency", Status.FAILED, Cause.TIMEOUT, "no end after 1 s; killed")
            return super().latency(*args, **more)

    with Failing(plan, {"t-0012": 0.5}) as runner:
        after = ready(plan, runner, monkeypatch).resolve(records)

    assert (after[0].status, after[0].stage) == (Status.FAILED, "final latency")
    assert after[1].status is Status.OK


def test_turns_pooled_are_the_session_pairs_of_one_long_measurement(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    runs = [(rng.integers(900_000, 1_100_000, (12, 5)), rng.integers(1_900_000, 2_100_000, (12, 5))) for _ in range(2)]
    session = np.repeat(np.arange(6), 2)
    for k, (candidate_ns, baseline_ns) in enumerate(runs):
        save_samples(tmp_path / f"{k}.npz", candidate_ns, baseline_ns, session)
    whole = PairedSamples(
        candidate_ns=np.concatenate([c for c, _ in runs]), baseline_ns=np.concatenate([b for _, b in runs]),
        session=np.concatenate([session, session + 6]), candidate_first=np.zeros(24, bool), candidate_first_ns=np.ones(12, np.int64),
        baseline_first_ns=np.ones(12, np.int64), elapsed_ns=1, stopped_by="max_time",
    )  # fmt: skip

    in_turns = [float(np.median(np.median(b, axis=1))) / 1e6 for _, b in runs]

    found, expected = pooled([tmp_path / "0.npz", tmp_path / "1.npz"]), Occasions.of([], in_turns).widen(summarize(whole)["latency"])

    assert (found.samples, found.units) == (120, 12)
    assert found.ratio is not None
    assert expected.ratio is not None
    for a, b in ((found.interval, expected.interval), (found.ratio, expected.ratio)):
        assert [a.value, a.low, a.high] == pytest.approx([b.value, b.low, b.high])


# ---------------------------------------------------------------------------------------------------------------- delivered is measured


class Delivering(TrialRunner):
    """A runner whose last figures, those of the delivered files, are given."""

    def __init__(self, plan: TrialPlan, *, accuracy: float, ratios: list[float]) -> None:
        super().__init__(plan.run, plan.sweep)
        self.delta, self.ratios = accuracy, ratios

    def accuracy(self, *args: Any, **more: Any) -> MetricValue:
        return MetricValue(0.98 + self.delta, 0.9, 1.0, "share", delta=Interval(self.delta, self.delta - 0.01, self.delta + 0.01), samples=400)

    def latency(self, *args: Any, **more: Any) -> Any:
        ratio = self.ratios.pop(0)
        return {"latency": MetricValue(ratio, ratio * 0.99, ratio * 1.01, "ms", ratio=Interval(ratio, ratio * 0.99, ratio * 1.01), units=9)}, {}


def finalist(finished: SweepResult) -> TrialRecord:
    record = near(finished, 11, 0.50, -0.004, 0.005)
    score = replace(record.metrics["accuracy"], delta=Interval(-0.004, -0.012, 0.004))
    return replace(record, metrics={**record.metrics, "accuracy": score})


@pytest.mark.parametrize(
    ("accuracy", "ratios", "words"),
    [
        (-0.004, [0.505], ""),
        (-0.004, [0.60, 0.50], ""),  # once may be an accident
        (-0.004, [0.60, 0.61], "it was measured as 0.500x"),
        (-0.004, [0.40, 0.41], "it was measured as 0.500x"),
        (-0.05, [0.50], "accuracy of the delivered files differs from the baseline's by -5.0 pt, it was measured as -0.4 pt"),
    ],
)
def test_delivered_files_that_are_not_as_measured_are_said_to_be_so(
    finished: SweepResult, plan: TrialPlan, accuracy: float, ratios: list[float], words: str
) -> None:
    with Delivering(plan, accuracy=accuracy, ratios=ratios) as runner:
        proof = finalists(plan, runner).prove(finalist(finished), plan.baseline)

    assert proof.to_json()["status"] == (NOT_REPRODUCED if words else VERIFIED)
    assert words in "; ".join(proof.differs)
    assert ratios == []
    assert proof.facts["metrics"]["accuracy"]["delta"]["value"] == accuracy


def test_a_delivered_model_was_scored_and_timed_again_from_its_bundle(finished: SweepResult) -> None:
    bundle = finished.bundle()
    assert bundle is not None
    delivery = finished.summary["best"]["delivery"]

    assert (finished.status, delivery["status"], delivery["differs"]) == ("delivered", VERIFIED, [])
    assert delivery["metrics"]["accuracy"]["samples"] == 400
    assert ("delivery", "ok") in [(c.name, c.state) for c in verify_bundle(bundle)]
    if not finished.summary["best"]["unchanged"]:
        assert np.load(bundle / "evidence" / "delivered" / "latency" / "latency.npz")["candidate_ns"].size > 0


@pytest.mark.long
def test_a_model_that_is_not_as_measured_ends_as_not_reproduced_is_kept_and_is_checked_again_by_the_same_command(
    digits: Path, sweep_of: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    sweep = deterministic_sweep(sweep_of, digits, tmp_path, budget={"trials": 4})
    real = TrialRunner.accuracy

    def accuracy(self: TrialRunner, model: Any, metric: str, data: Path, rows: Any, folder: Path, **more: Any) -> MetricValue:
        found = real(self, model, metric, data, rows, folder, **more)
        if "delivered" not in folder.parts:
            return found
        return replace(found, value=found.value - 0.5, delta=Interval(-0.5, -0.6, -0.4))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrialRunner, "accuracy", accuracy)  # in this process: the trials run in Ray's
        first = run(sweep, tmp_path / "out")
    bundle = first.bundle()
    assert bundle is not None
    checks = {c.name: c for c in verify_bundle(bundle)}
    readme = (bundle / "README.md").read_text()
    read = read_result(tmp_path / "out")

    again = run(sweep, tmp_path / "out")
    (again.run / "best.bundle" / "model" / "model.onnx").write_bytes(b"not what it was")
    mended = run(sweep, tmp_path / "out")
    card, verdict = (mended.run / "best.bundle" / "MODEL_CARD.md").read_text(), mended.summary["verdict"]

    assert (first.status, first.exit_status, read.status) == ("not-reproduced", 5, "not-reproduced")
    assert first.summary["verdict"].startswith("Not reproduced, so the bundle is kept but not verified: accuracy of the delivered files")
    assert checks["delivery"].state == "failed"
    assert "Not verified; do not deploy it." in readme
    assert (again.status, again.exit_status) == ("delivered", 0)
    assert mended.status == "delivered"
    assert any("was made again: model/model.onnx has changed" in note for note in mended.summary["notes"])
    assert all(c.state != "failed" for c in verify_bundle(mended.run / "best.bundle"))
    # The rows that no choice was made on come first.
    assert 0 < verdict.index("on 100 held-out rows") < verdict.index("allowed")
    assert card.index("accuracy, 100 held-out rows") < card.index("| latency |")


def test_a_turn_with_real_timing_leaves_raw_samples_and_a_record_of_fresh_runs_alone(finished: SweepResult, plan: TrialPlan) -> None:
    record = candidate(finished)
    waiting = iter([(record.id,), (record.id,), (), ()])
    with TrialRunner(plan.run, plan.sweep) as runner:
        before = runner.baseline_before()
        last = finalists(plan, runner)
        last.select = lambda _records: Selection((Objective("latency"),), to_measure=next(waiting))
        (after,) = last.resolve([record])

    kept = [plan.run / "trials" / record.id / "final" / f"turn-{k}" / "latency.npz" for k in (1, 2)]
    latency = after.metrics["latency"]
    assert before
    assert latency == pooled(kept, before)
    assert latency.units >= 6
    assert "in 2 turns" in latency.method
    assert latency.ratio is not None
    assert 0.2 < latency.ratio.value < 5
    assert after.metrics["accuracy"] == record.metrics["accuracy"]
