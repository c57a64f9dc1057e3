"""The last word on those who may win: all rows for the undecided, fresh runs and held-out rows for the chosen."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from autotune.benchmarks.stages import OUTPUTS_FILE
from autotune.constraints import Constraint, Verdict, judge_all
from autotune.digest import dump_json, write_durably
from autotune.model import ModelHandler, ONNXModelHandler
from autotune.pipeline import Pipeline
from autotune.records import Cause, MetricValue, Status, TrialRecord
from autotune.selection import Selection
from autotune.trial import TRIAL_FILE, StageFailed, TrialPlan, TrialRunner

EPS_LATENCY = 0.03  # of the choice, as in `select`
FINALISTS = 4  # candidates that may be measured afresh before the choice is among them and the untouched model
FINAL_SEED = 1_000_000  # away from the seeds of the trials
NO_FINALIST = "better finalists used up the measurements at the end"
MET = (Verdict.CERTAIN, Verdict.MET)


@dataclass
class Finalists:
    """Measures finalists of a sweep and keeps what it found worth a note. See docs/decisions/0005."""

    plan: TrialPlan
    constraints: tuple[Constraint, ...]
    select: Callable[[list[TrialRecord]], Selection]
    runner: TrialRunner
    say: Callable[[str], None]
    notes: list[str] = field(default_factory=list)
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
            rivals = [r for r in records if self._is_open(r, limits) and (best is None or _faster(r, best))]
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

    def _folder(self, record: TrialRecord) -> Path:
        return self.plan.run / "trials" / record.id / "final"

    def _write(self, record: TrialRecord, holdout: MetricValue | None = None) -> None:
        folder = self._folder(record)
        folder.mkdir(exist_ok=True)
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


def _faster(a: TrialRecord, b: TrialRecord) -> bool:
    """Whether a's latency is below b's by more than the tolerance of the choice."""
    return a.metrics["latency"].value < (1 - EPS_LATENCY) * b.metrics["latency"].value


def _fallen(record: TrialRecord, end: StageFailed) -> TrialRecord:
    return replace(record, status=end.status, cause=end.cause, stage=f"final {end.stage}", message=end.message)


def passed_over(record: TrialRecord) -> TrialRecord:
    """The record of a feasible model that was not measured afresh, as the choice at the end has to see it: not to be chosen."""
    status = Status.UNDECIDED if record.status is Status.OK else record.status
    return replace(record, status=status, message=record.message or NO_FINALIST)
