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

from autotune.benchmarks import statistics
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
        """Score undecided candidates that would win over all rows before they are given up, the nearest misses first.

        A few search rows can leave a verdict open that the held-out rows settle; a note says that they were used so.
        """
        plan = self.plan
        limits = [c.text for c in self.constraints if c.metric == plan.metric_name]
        for _ in range(FINALISTS if plan.rows.holdout and limits else 0):
            selection = self.select(records)
            best = next((r for r in records if r.id == selection.best), None)
            rivals = [r for r in records if self._is_open(r, limits) and (best is None or self._faster(r, best))]
            if not rivals:
                break
            rival = min(rivals, key=lambda r: (sum(max(0.0, float(c["violation"])) for c in r.constraints), r.metrics["latency"].value))
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
            records = [settled if r.id == rival.id else r for r in records]
        return records

    def resolve(self, records: list[TrialRecord]) -> list[TrialRecord]:
        """Time again those whose place on the front is not settled, and their rivals, in turns, each beside the baseline, in random order.

        After every turn the front is looked at, and whoever is settled drops out; while time is short the widest go first. A model gets at
        most `final_time`, all together `final_budget`. The fresh runs, all turns pooled, stand in place of those of the search.
        """
        plan, measure = self.plan, self.plan.sweep.config.measure
        each, budget = seconds(measure.final_time), seconds(measure.final_budget)
        rng = np.random.default_rng([plan.sweep.config.seed, FINAL_SEED])
        spent: dict[str, float] = {}
        taken: dict[str, list[Path]] = {}
        began = time.monotonic()
        for look in range(1, LOOKS + 1):
            selection = self.select(records)
            left = budget - (time.monotonic() - began)
            waiting = [i for i in selection.to_measure if spent.get(i, 0.0) < each]
            if left <= 0 or not waiting or all(o.name != "latency" for o in selection.objectives):
                break
            share = each / LOOKS
            turn = waiting[: max(1, math.floor(left / share))]
            self.say(f"the front is not settled: timing {', '.join(turn)} again")
            for name in rng.permutation(turn):
                if time.monotonic() - began >= budget:
                    break
                record = next(r for r in records if r.id == name)
                folder = self._folder(record) / f"turn-{look}"
                try:
                    _, facts = self.runner.latency(
                        self.model_of(record), plan.baseline, plan.eval_path, plan.rows.search, folder,
                        seed=FINAL_SEED + look * TURN_SEED + record.number, time_s=min(share, left),
                    )  # fmt: skip
                except StageFailed as end:
                    fallen = _fallen(record, end)
                    self._write(fallen)
                    records = [fallen if r.id == record.id else r for r in records]
                else:
                    taken.setdefault(record.id, []).append(folder / LATENCY_FILE)
                    records = self._with_latency(records, record, pooled(taken[record.id]))
                    spent[record.id] = spent.get(record.id, 0.0) + float(facts.get("elapsed_s", 0.0))
        if taken:
            self.resolution = {
                "seconds": time.monotonic() - began, "budget_s": budget, "turns": {i: len(paths) for i, paths in taken.items()},
                "not_resolved": list(self.select(records).not_resolved),
            }  # fmt: skip
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

    def _faster(self, a: TrialRecord, b: TrialRecord) -> bool:
        """Whether a's latency is below b's by more than the tolerance of the choice."""
        eps = percent(self.plan.sweep.config.measure.eps.latency)
        return a.metrics["latency"].value < (1 - eps) * b.metrics["latency"].value

    def _is_open(self, record: TrialRecord, limits: list[str]) -> bool:
        """An undecided record whose only open verdicts are on the score, over the search rows."""
        missed = [c for c in record.constraints if c["verdict"] not in MET]
        on_search_rows = record.measured and record.metrics[self.plan.metric_name].samples == len(self.plan.rows.search)
        return record.status is Status.UNDECIDED and on_search_rows and all(c["expr"] in limits for c in missed)

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
        if final.status is not Status.OK:
            missed = [str(c["expr"]) for c in final.constraints if c["verdict"] not in MET]
            return f"over all rows and fresh runs it does not meet `{'`, `'.join(missed)}`" if missed else f"it ended as {final.reason}"
        if holdout is not None:
            limits = [c for c in self.constraints if c.metric == self.plan.metric_name]
            kept = json.loads((self.plan.baseline_folder / "scores.json").read_text())
            base = {self.plan.metric_name: MetricValue.from_json(kept["holdout"])}
            for judgement in judge_all(limits, {self.plan.metric_name: holdout}, base):
                if judgement.verdict is Verdict.VIOLATED:
                    return f"on the held-out rows it violates `{judgement.constraint.text}`"
        return ""

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


def pooled(paths: Sequence[Path]) -> MetricValue:
    """Latency from the raw samples of several measurements of one model beside the baseline: all their session pairs together."""
    candidate: list[float] = []
    baseline: list[float] = []
    logs: list[float] = []
    runs = 0
    for path in paths:
        with np.load(path, allow_pickle=False) as file:
            used, session = file["used"], file["session"]
            sides = [np.maximum(np.median(file[f"{side}_ns"], axis=1), 1) for side in ("candidate", "baseline")]
            runs += int(used.sum()) * file["candidate_ns"].shape[1]
        for number in np.unique(session[used]):
            here = used & (session == number)
            candidate.append(float(np.median(sides[0][here])) / 1e6)
            baseline.append(float(np.median(sides[1][here])) / 1e6)
            logs.append(float(np.median(np.log(sides[0][here]) - np.log(sides[1][here]))))
    own, log = statistics.median_interval(candidate), statistics.median_interval(logs)
    return MetricValue(
        own.value, max(own.low, 0.0), own.high, unit="ms", ratio=Interval(*(math.exp(v) for v in (log.value, log.low, log.high))),
        delta=statistics.median_interval(np.subtract(candidate, baseline)), samples=runs, units=len(logs),
        method=f"median of {len(logs)} session pairs in {len(paths)} turns at the end, sign-test limits",
    )  # fmt: skip


def _fallen(record: TrialRecord, end: StageFailed) -> TrialRecord:
    return replace(record, status=end.status, cause=end.cause, stage=f"final {end.stage}", message=end.message)


def passed_over(record: TrialRecord) -> TrialRecord:
    """The record of a feasible model that was not measured afresh, as the choice at the end has to see it: not to be chosen."""
    status = Status.UNDECIDED if record.status is Status.OK else record.status
    return replace(record, status=status, message=record.message or NO_FINALIST)
