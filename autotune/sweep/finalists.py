"""The last word on those who may win: fresh runs, in turns, where the front is not settled; all rows for the undecided; fresh runs and
held-out rows for the chosen; and the bytes of the bundle once more. See docs/decisions/0005 and 0007.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.benchmarks import statistics
from autotune.benchmarks.occasions import Occasions
from autotune.benchmarks.stages import LATENCY_FILE, OUTPUTS_FILE, SCORES_FILE
from autotune.bundle import Proof
from autotune.config import percent, seconds
from autotune.constraints import Constraint, Verdict, difference_from, judge_all, ratio_to, shown, shown_difference
from autotune.digest import dump_json, write_durably
from autotune.model import ModelHandler, ONNXModelHandler
from autotune.pipeline import Pipeline
from autotune.records import Cause, Interval, MetricValue, Status, TrialRecord
from autotune.selection import Selection, compared, measurement_of, widened
from autotune.trial import TRIAL_FILE, StageFailed, TrialPlan, TrialRunner

FINALISTS = 4  # candidates that may be measured afresh before the choice is among them and the untouched model
FINAL_SEED = 1_000_000  # away from the seeds of the trials
LOOKS = 4  # turns at most, after each of which the front is looked at; and once more for the choice
TURN_SEED, DELIVERY_SEED = 100_000, 2_000_000
DELIVERY_ERROR = 0.01  # of each of two intervals that must not overlap, twice in a row, for a model that is not as it was measured
NO_FINALIST = "better finalists used up the measurements at the end"
MET = (Verdict.CERTAIN, Verdict.MET)


@dataclass
class Finalists:
    """Measures finalists of a sweep and keeps what it found worth a note. See docs/decisions/0005 and 0007."""

    plan: TrialPlan
    constraints: tuple[Constraint, ...]
    select: Callable[[list[TrialRecord]], Selection]
    runner: TrialRunner
    say: Callable[[str], None]
    notes: list[str] = field(default_factory=list)
    resolution: dict[str, Any] | None = None  # what was timed again to settle the front
    settled: set[str] = field(default_factory=set)  # candidates whose verdict needed the held-out rows

    def settle(self, records: list[TrialRecord]) -> list[TrialRecord]:
        """Score undecided candidates that would win over all rows before they are given up; see `settle_undecided`.

        A few search rows can leave a verdict open that the held-out rows settle; a note says that they were used so.
        """
        plan = self.plan
        limits = [c.text for c in self.constraints if c.metric == plan.metric_name]
        if not (plan.rows.holdout and limits):
            return records

        def score_all(rival: TrialRecord) -> TrialRecord:
            self.say(f"{rival.id}: undecided on the search rows, so it is scored on all rows")
            self.settled.add(rival.id)
            try:
                score = self._score(self.model_of(rival), rival, "all")
            except StageFailed as end:
                settled = _fallen(rival, end)
            else:
                settled = self.runner.judged(plan, replace(rival, metrics={**rival.metrics, plan.metric_name: score}))
                few, many = len(plan.rows.search), len(plan.rows.everything)
                self.notes.append(f"{rival.id} was undecided on {few} rows and is {settled.status} on all {many}")
            self._write(settled)
            return settled

        return settle_undecided(
            records, self.select, score_all, metric=plan.metric_name, limits=limits, rows=len(plan.rows.search),
            eps_latency=percent(plan.sweep.config.measure.eps.latency),
        )  # fmt: skip

    def resolve(self, records: list[TrialRecord]) -> list[TrialRecord]:
        """Time again those whose place on the front is not settled, and their rivals, each beside the baseline; see `resolve_front`.

        A model gets at most `final_time`, all together `final_budget`. The fresh runs, all turns pooled, stand in place of those of the search.
        """
        plan, measure = self.plan, self.plan.sweep.config.measure
        taken: dict[str, list[Path]] = {}

        def take_turn(records: list[TrialRecord], record: TrialRecord, look: int, time_s: float) -> tuple[list[TrialRecord], float | None]:
            folder = self._folder(record) / f"turn-{look}"
            try:
                _, facts = self.runner.latency(
                    self.model_of(record), plan.baseline, plan.eval_path, plan.rows.search, folder,
                    seed=FINAL_SEED + look * TURN_SEED + record.number, time_s=time_s,
                )  # fmt: skip
            except StageFailed as end:
                fallen = _fallen(record, end)
                self._write(fallen)
                return [fallen if r.id == record.id else r for r in records], None
            turns = taken.setdefault(record.id, [])
            turns.append(folder / LATENCY_FILE)
            before = self.runner.baseline_before(*(path.parent for path in turns))
            return self._with_latency(records, record, pooled(turns, before)), float(facts.get("elapsed_s", 0.0))

        records, self.resolution = resolve_front(
            records, self.select, take_turn, each_s=seconds(measure.final_time), budget_s=seconds(measure.final_budget),
            seed=plan.sweep.config.seed, say=self.say,
        )  # fmt: skip
        return records

    def _with_latency(self, records: list[TrialRecord], timed: TrialRecord, latency: MetricValue) -> list[TrialRecord]:
        """The records with a fresh latency, for all that share the measurement. Percentiles stay those of the search: turns are short."""
        found = {}
        for record in records:
            if record.measured and measurement_of(record) == measurement_of(timed):
                fresh = self.runner.judged(self.plan, replace(record, metrics={**record.metrics, "latency": latency}))
                self._write(fresh)
                found[record.id] = fresh
        return [found.get(r.id, r) for r in records]

    def measure(self, record: TrialRecord) -> tuple[TrialRecord, MetricValue | None, str]:
        """Measure a finalist in fresh sessions and on the held-out rows. Returns its new record, the hold-out score, and why it falls."""
        if record.unchanged:
            kept = json.loads((self.plan.baseline_folder / "scores.json").read_text())
            score = MetricValue.from_json(kept["holdout"]) if "holdout" in kept else None
            return record, score, ""
        self.say(f"{record.id}: measuring the finalist afresh")
        plan, metrics, holdout = self.plan, dict(record.metrics), None
        try:
            model = self.model_of(record)
            if plan.rows.holdout:
                holdout = self._score(model, record, "holdout")
                metrics[plan.metric_name] = self._score(model, record, "all")
            seed = FINAL_SEED + record.number
            times, _ = self.runner.latency(
                model, plan.baseline, plan.eval_path, plan.rows.search, self._folder(record) / "latency", seed=seed, final=True
            )
        except StageFailed as end:
            return _fallen(record, end), holdout, f"its last measurement ended as {end.cause}: {end.message}"
        final = self.runner.judged(plan, replace(record, metrics={**metrics, **times}))
        why = self._why_it_falls(final, holdout)
        if why and final.status is Status.OK:
            final = replace(final, status=Status.INFEASIBLE, message=why)
        self._write(final, holdout)
        return final, holdout, why

    def prove(self, final: TrialRecord, model: ONNXModelHandler) -> Proof:
        """Score and time the bundle's own bytes once more; a difference beyond both intervals, seen twice, is one."""
        plan, name = self.plan, self.plan.metric_name
        self.say(f"{final.id}: measuring the delivered files once more")
        folder = self._folder(final) / "delivered"
        limits = [c for c in self.constraints if c.metric == name or c.metric.startswith("latency")]
        facts: dict[str, MetricValue] = {}
        try:
            kept = plan.baseline_folder / "all" / OUTPUTS_FILE
            score = facts[name] = self.runner.accuracy(
                model, plan.sweep.config.metric, plan.eval_path, plan.rows.of("all"), folder / "all", baseline_outputs=kept
            )
            differs = self._score_differs(final, score)
            if not final.unchanged:  # the untouched model beside itself would tell nothing
                for attempt in range(2):
                    times, _ = self.runner.latency(
                        model, plan.baseline, plan.eval_path, plan.rows.search, folder / "latency",
                        seed=DELIVERY_SEED + final.number + attempt * FINAL_SEED, final=True,
                    )  # fmt: skip
                    facts |= times
                    found = self._times_differ(final, times, limits)
                    if not found:
                        break
                differs += found
        except StageFailed as end:
            differs = [f"the delivered files ended as {end.cause or end.status} in {end.stage}: {end.message}"]
        evidence = {f"delivered/{p.relative_to(folder).as_posix()}": p for p in (folder / "latency" / LATENCY_FILE, folder / "all" / SCORES_FILE)}
        metrics = {k: v.to_json() for k, v in facts.items()}
        return Proof(tuple(differs), {"metrics": metrics}, {k: p for k, p in evidence.items() if p.exists()})

    def _score_differs(self, final: TrialRecord, now: MetricValue) -> list[str]:
        kept = json.loads((self.plan.baseline_folder / "scores.json").read_text())
        base = MetricValue.from_json(kept["all"])
        before = base if final.unchanged else final.metrics[self.plan.metric_name]
        was, found = difference_from(before, base), difference_from(now, base)
        slack = 1e-9 * max(1.0, abs(base.value))
        if was.low - slack <= found.value <= was.high + slack:
            return []
        words = [shown_difference(v, now.unit) for v in (found.value, was.value)]
        return [f"{self.plan.metric_name} of the delivered files differs from the baseline's by {words[0]}, it was measured as {words[1]}"]

    def _times_differ(self, final: TrialRecord, times: Mapping[str, MetricValue], limits: Sequence[Constraint]) -> list[str]:
        base = self.plan.baseline_metrics
        both = (final.metrics["latency"], times["latency"])
        was, now = (widened(compared(v, base["latency"], minimize=True), v, error=DELIVERY_ERROR) for v in both)
        eps = math.log1p(percent(self.plan.sweep.config.measure.eps.latency))
        if (now.high < was.low or was.high < now.low) and abs(now.value - was.value) > eps:
            ratios = [f"{r.value:.3f}x" for r in (ratio_to(v, base["latency"]) or Interval.exactly(math.nan) for v in reversed(both))]
            return [f"latency of the delivered files is {ratios[0]} of the baseline's ({shown(both[1].value, 'ms')}), it was measured as {ratios[1]}"]
        judged = judge_all([c for c in limits if c.metric in times], times, base)
        return [f"`{j.constraint.text}` is violated by the delivered files" for j in judged if j.verdict is Verdict.VIOLATED]

    def _folder(self, record: TrialRecord) -> Path:
        return self.plan.run / "trials" / record.id / "final"

    def _write(self, record: TrialRecord, holdout: MetricValue | None = None) -> None:
        folder = self._folder(record)
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / TRIAL_FILE, dump_json({**record.to_json(), "holdout": holdout.to_json() if holdout else None}))

    def _score(self, model: ONNXModelHandler, record: TrialRecord, rows: str) -> MetricValue:
        """Score on the rows of that name, beside what the baseline gave on them."""
        plan = self.plan
        kept = plan.baseline_folder / rows / OUTPUTS_FILE
        folder = self._folder(record) / rows
        return self.runner.accuracy(model, plan.sweep.config.metric, plan.eval_path, plan.rows.of(rows), folder, baseline_outputs=kept)

    def _why_it_falls(self, final: TrialRecord, holdout: MetricValue | None) -> str:
        if holdout is None:
            return why_it_falls(final)
        kept = json.loads((self.plan.baseline_folder / "scores.json").read_text())
        limits = [c for c in self.constraints if c.metric == self.plan.metric_name]
        return why_it_falls(final, holdout, MetricValue.from_json(kept["holdout"]), limits)

    def model_of(self, record: TrialRecord) -> ONNXModelHandler:
        """The artifact of a trial, from the store (built again if it was damaged)."""
        model: ModelHandler = self.plan.input_model
        digest = model.digest
        pipeline = Pipeline(self.plan.sweep, self.plan.facts)
        for step in pipeline.steps(record.point):
            artifact, _ = self.runner.build(step, model, digest, self.plan.run / "trials" / record.id / "final" / step.slot)
            model, digest = artifact.handler, artifact.digest
        if digest != record.model_digest or not isinstance(model, ONNXModelHandler):
            message = f"its model could not be made again: digest {digest[:12]}, measured {record.model_digest[:12]}"
            raise StageFailed("rebuild", Status.FAILED, Cause.INFRA, message)
        return model


# The procedure, without the machine: records in, records out, and whatever is to be measured by a function of the caller's -------------

Select = Callable[[list[TrialRecord]], Selection]


def settle_undecided(
    records: list[TrialRecord], select: Select, score_all: Callable[[TrialRecord], TrialRecord], *, metric: str, limits: Sequence[str], rows: int,
    eps_latency: float, most: int = FINALISTS,
) -> list[TrialRecord]:  # fmt: skip
    """Have undecided candidates that would win scored on all rows, the nearest misses first, at most `most`; returns the records then.

    `score_all` returns a record as it is judged over all rows. Undecided are those whose open verdicts are all on the score (`limits`, of
    `metric`) over the `rows` of the search; one would win that is faster than the best by more than `eps_latency`.
    """
    for _ in range(most):
        selection = select(records)
        best = next((r for r in records if r.id == selection.best), None)
        rivals = [
            r for r in records
            if _is_open(r, metric, limits, rows)
            and (best is None or r.metrics["latency"].value < (1 - eps_latency) * best.metrics["latency"].value)
        ]  # fmt: skip
        if not rivals:
            break
        rival = min(rivals, key=lambda r: (sum(max(0.0, float(c["violation"])) for c in r.constraints), r.metrics["latency"].value))
        settled = score_all(rival)
        records = [settled if r.id == rival.id else r for r in records]
    return records


def _is_open(record: TrialRecord, metric: str, limits: Sequence[str], rows: int) -> bool:
    """An undecided record whose only open verdicts are on the score, over the search rows."""
    missed = [c for c in record.constraints if c["verdict"] not in MET]
    on_search_rows = record.measured and record.metrics[metric].samples == rows
    return record.status is Status.UNDECIDED and on_search_rows and all(c["expr"] in limits for c in missed)


def resolve_front(
    records: list[TrialRecord], select: Select,
    take_turn: Callable[[list[TrialRecord], TrialRecord, int, float], tuple[list[TrialRecord], float | None]], *,
    each_s: float, budget_s: float, seed: int, clock: Callable[[], float] = time.monotonic, say: Callable[[str], None] = lambda _line: None,
) -> tuple[list[TrialRecord], dict[str, Any] | None]:  # fmt: skip
    """Have those timed again whose place on the front is not settled, and their rivals, in turns, in random order (seeded).

    After every turn the front is looked at, and whoever is settled drops out; while time is short the widest go first. A model gets at most
    `each_s`, all together `budget_s` on the `clock`. `take_turn(records, record, look, time_s)` times a model once; it returns the records with
    the fresh latency and the seconds that were timed, or with a record that fell and None. Returns the records and what was done: `seconds`,
    `budget_s`, `turns` by trial, and who is still not resolved; None where nothing was to be done.
    """
    rng = np.random.default_rng([seed, FINAL_SEED])
    spent: dict[str, float] = {}
    turns: dict[str, int] = {}
    began = clock()
    for look in range(1, LOOKS + 1):
        selection = select(records)
        left = budget_s - (clock() - began)
        waiting = [i for i in selection.to_measure if spent.get(i, 0.0) < each_s]
        if left <= 0 or not waiting or all(o.name != "latency" for o in selection.objectives):
            break
        share = each_s / LOOKS
        turn = waiting[: max(1, math.floor(left / share))]
        say(f"the front is not settled: timing {', '.join(turn)} again")
        for name in rng.permutation(turn):
            if clock() - began >= budget_s:
                break
            record = next(r for r in records if r.id == name)
            records, took = take_turn(records, record, look, min(share, left))
            if took is not None:
                turns[record.id] = turns.get(record.id, 0) + 1
                spent[record.id] = spent.get(record.id, 0.0) + took
    if not turns:
        return records, None
    return records, {
        "seconds": clock() - began, "budget_s": budget_s, "turns": turns, "not_resolved": list(select(records).not_resolved),
    }  # fmt: skip


@dataclass(frozen=True)
class LastChoice:
    """Who is chosen, with figures that are fresh. `final` is None, and so is `holdout`, when nobody is feasible."""

    selection: Selection
    records: list[TrialRecord]
    final: TrialRecord | None = None
    holdout: MetricValue | None = None


def choose_afresh(
    records: list[TrialRecord], select: Select, measure: Callable[[TrialRecord], tuple[TrialRecord, MetricValue | None, str]], *,
    most: int = FINALISTS, note: Callable[[str], None] = lambda _line: None, say: Callable[[str], None] = lambda _line: None,
) -> LastChoice:  # fmt: skip
    """Go on choosing until the first choice has fresh figures and holds.

    `measure` measures a model afresh and on held-out rows: it returns its record then, the score on those rows, and why it falls, if it does. After
    `most` finalists the choice is among them and the untouched model.
    """
    finals: dict[str, tuple[TrialRecord, MetricValue | None]] = {}
    while True:
        selection = select(records)
        if selection.best is not None and selection.best not in finals and len(finals) == most:
            # The choice goes on among those whose figures are fresh; the untouched model is always one of them.
            note(f"{most} finalists were measured afresh; the choice is among them and the untouched model")
            finals |= {r.id: (r, measure(r)[1]) for r in records if r.unchanged}
            fresh = [r if r.id in finals else passed_over(r) for r in records]
            selection = replace(selection, best=select(fresh).best)
        if selection.best is None:
            return LastChoice(selection, records)
        if selection.best in finals:
            final, holdout = finals[selection.best]
            return LastChoice(selection, records, final, holdout)
        final, holdout, why = measure(next(r for r in records if r.id == selection.best))
        finals[final.id] = (final, holdout)
        records = [final if r.id == final.id else r for r in records]
        if why:
            note(f"{final.id} was first choice, but {why}")
            say(f"{final.id} does not hold: {why}")


def why_it_falls(
    final: TrialRecord, holdout: MetricValue | None = None, baseline_holdout: MetricValue | None = None, limits: Sequence[Constraint] = ()
) -> str:
    """Say why a finalist is not delivered, judged over all rows and fresh runs (`final`) and on the held-out rows; empty when it holds."""
    if final.status is not Status.OK:
        missed = [str(c["expr"]) for c in final.constraints if c["verdict"] not in MET]
        return f"over all rows and fresh runs it does not meet `{'`, `'.join(missed)}`" if missed else f"it ended as {final.reason}"
    if holdout is not None and baseline_holdout is not None:
        for judgement in judge_all(limits, {c.metric: holdout for c in limits}, {c.metric: baseline_holdout for c in limits}):
            if judgement.verdict is Verdict.VIOLATED:
                return f"on the held-out rows it violates `{judgement.constraint.text}`"
    return ""


def pooled(paths: Sequence[Path], before: Sequence[float] = ()) -> MetricValue:
    """Latency from the raw samples of several measurements of one model beside the baseline: all their session pairs together.

    `before`: the baseline's latencies in other measurements, ms; how far it moved among all of them widens the intervals.
    """
    turns = []
    for path in paths:
        with np.load(path, allow_pickle=False) as file:
            turns.append({name: file[name] for name in ("candidate_ns", "baseline_ns", "session", "used")})
    return pooled_turns(turns, before)


def pooled_turns(turns: Sequence[Mapping[str, NDArray[Any]]], before: Sequence[float] = ()) -> MetricValue:
    """The same from arrays: `candidate_ns` and `baseline_ns`, shape (rounds, runs), `session` and `used`, shape (rounds,), as `PairedSamples` has."""
    candidate: list[float] = []
    baseline: list[float] = []
    logs: list[float] = []
    in_turns: list[float] = []
    runs = 0
    for turn in turns:
        used, session = turn["used"], turn["session"]
        sides = [np.maximum(np.median(turn[f"{side}_ns"], axis=1), 1) for side in ("candidate", "baseline")]
        runs += int(used.sum()) * turn["candidate_ns"].shape[1]
        for number in np.unique(session[used]):
            here = used & (session == number)
            candidate.append(float(np.median(sides[0][here])) / 1e6)
            baseline.append(float(np.median(sides[1][here])) / 1e6)
            logs.append(float(np.median(np.log(sides[0][here]) - np.log(sides[1][here]))))
        in_turns.append(float(np.median(sides[1][used])) / 1e6)
    own, log = statistics.median_interval(candidate), statistics.median_interval(logs)
    found = MetricValue(
        own.value, max(own.low, 0.0), own.high, unit="ms", ratio=Interval(*(math.exp(v) for v in (log.value, log.low, log.high))),
        delta=statistics.median_interval(np.subtract(candidate, baseline)), samples=runs, units=len(logs),
        method=f"median of {len(logs)} session pairs in {len(turns)} turns at the end, sign-test limits",
    )  # fmt: skip
    return Occasions.of(before, in_turns).widen(found)


def _fallen(record: TrialRecord, end: StageFailed) -> TrialRecord:
    return replace(record, status=end.status, cause=end.cause, stage=f"final {end.stage}", message=end.message)


def passed_over(record: TrialRecord) -> TrialRecord:
    """The record of a feasible model that was not measured afresh, as the choice at the end has to see it: not to be chosen."""
    status = Status.UNDECIDED if record.status is Status.OK else record.status
    return replace(record, status=status, message=record.message or NO_FINALIST)
