"""One trial: the passes of a point, checks, accuracy, latency; each in a child process, every ending on record."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from autotune.benchmarks.lane import lane
from autotune.benchmarks.racing import DOMINATED, INFEASIBLE, LEAST_ROWS, OFF_FRONT, Rival, Rules
from autotune.benchmarks.stages import OUTPUTS_FILE
from autotune.benchmarks.statistics import runs_needed
from autotune.config import LoadedSweep, parse_sweep, script_of, seconds, size_bytes
from autotune.constraints import Constraint, Relative, Verdict, feasible, judge_all, parse_constraint, violation
from autotune.data import RANDOM
from autotune.digest import digest_of, digest_tree, dump_json, write_durably
from autotune.disk import fault_in
from autotune.model import HuggingFaceModelHandler, ModelHandler, ONNXModelHandler, PyTorchModelHandler, handler_from_json
from autotune.passes.base import ParamCategory
from autotune.passes.findings import Findings
from autotune.passes.registry import BUILT_IN, get_pass
from autotune.pipeline import InputFacts, Pipeline, Step
from autotune.records import Cause, Interval, MetricValue, StageRecord, Status, TrialRecord
from autotune.selection import DEFAULT, compared, widened
from autotune.stages import StageLimits, StageOutcome, StageRunner
from autotune.store import FILES, Artifact, Store
from autotune.target import engine_versions, library_versions, surroundings

TRIAL_FILE = "trial.json"
PLAN_FILE = "plan.json"
STAGE_FILE = "now.json"
STORE_FOLDER = "store"
BASELINE_TIMES = "measured/baseline.jsonl"
BASELINE_BYTES = 20_000  # some 200 measurements
TIMES, TIMES_STAGE = "operator-times", "autotune.passes.run:time_operators"
PROFILED_BYTES = 1_000_000_000  # a larger model is not profiled for the coverage: it would be held in memory twice
FINDINGS = "findings"  # in the store's folder: what passes found out once for all trials
# Whatever a stage would import anew in each child; `numpy.random` and `numpy.ma` are loaded late by numpy itself. Two servers, since each
# fork pays for what its server holds: with torch and what else passes need, a child costs several times that of a measuring stage.
MEASURE_PRELOAD = ("numpy", "numpy.random", "numpy.ma", "onnx", "onnxruntime", "autotune.benchmarks.stages", "autotune.passes.run")
PASS_PRELOAD = (
    "numpy", "numpy.random", "onnx", "onnxruntime", "onnxruntime.quantization", "onnxruntime.tools.symbolic_shape_infer", "torch",
    "autotune.passes.run", *(f"autotune.passes.{m}" for m in BUILT_IN.values()),
)  # fmt: skip
PASS_STAGE = "autotune.passes.run:run_pass"
CHECK_ROWS = 4
# The ladder: rungs by name, cheapest first. Each may give an answer that spares the trial what comes after it.
EQUAL_POINT, EQUAL_PREFIX, EQUAL_BYTES = "equal point", "equal chain prefix", "equal model bytes"
STATIC_RULE, CHEAP_CHECKS, LATENCY, BY_LOOKS = "static rule", "cheap checks", "latency", "accuracy by looks"
LADDER = (EQUAL_POINT, EQUAL_PREFIX, EQUAL_BYTES, STATIC_RULE, CHEAP_CHECKS, LATENCY, BY_LOOKS)
RUNG_OF = {"rules": STATIC_RULE, "check": CHEAP_CHECKS, "latency": LATENCY, "accuracy": BY_LOOKS}  # by the stage that ended a trial
FRONT_RULES = (DOMINATED, OFF_FRONT)
ROUNDING = 1e-9  # a score so near to the best possible is the best possible
DISK_CAUSES = (Cause.EXCEPTION, Cause.EXIT, Cause.SIGNAL, Cause.INFRA)  # what a stage on a full disk ends as


@dataclass(frozen=True)
class Rows:
    """Which evaluation rows serve the search and which are held out for the last word; disjoint, in one fixed random order."""

    search: tuple[int, ...]
    holdout: tuple[int, ...]

    @property
    def everything(self) -> tuple[int, ...]:
        return (*self.search, *self.holdout)

    def of(self, name: str) -> tuple[int, ...]:
        """The rows by the name that folders and evidence use: search, holdout or all."""
        return {"search": self.search, "holdout": self.holdout, "all": self.everything}[name]


def split_rows(count: int, holdout: float, *, seed: int, contents: Sequence[Hashable] | None = None) -> Rows:
    """Shuffle row numbers and split off the hold-out share; sets too small to split keep all rows for the search.

    Rows of equal `contents` (one value a row) stay together: a group goes to the hold-out while there is room for all of it.
    """
    rng = np.random.default_rng([seed, 1])
    order = [int(i) for i in rng.permutation(count)]
    kept = int(count * holdout)
    if kept < 2 or count - kept < 2:
        return Rows(tuple(order), ())
    twins: dict[Hashable, list[int]] = {}
    for row in order:
        twins.setdefault(contents[row] if contents is not None else row, []).append(row)
    held: set[int] = set()
    for group in twins.values():  # in the order of their first rows
        if len(held) + len(group) <= kept:
            held.update(group)
    search, apart = [r for r in order if r not in held], [r for r in order if r in held]
    if len(twins) < count:  # a group that found no room stands further to the front than the rest: looks need an order that is random again
        search = [search[i] for i in rng.permutation(len(search))]
    return Rows(tuple(search), tuple(apart)) if len(apart) >= 2 else Rows(tuple(order), ())


@dataclass(frozen=True)
class TrialPlan:
    """All that a worker needs to run trials of a sweep; written once to `plan.json` in the run folder."""

    run: Path
    sweep: LoadedSweep
    facts: InputFacts
    input_model: ModelHandler
    baseline: ONNXModelHandler
    baseline_metrics: Mapping[str, MetricValue]
    metric_name: str
    metric_unit: str
    higher_is_better: bool
    rows: Rows
    metric_bounds: tuple[float, float] | None = None  # of the score, where it has some

    def to_json(self) -> dict[str, Any]:
        return {
            "sweep": self.sweep.config.to_json(), "root": str(self.sweep.root),
            "facts": {"format": self.facts.format, "opset": self.facts.opset, "operators": dict(self.facts.operators)},
            "input_model": self._told(self.input_model), "baseline": self._told(self.baseline),
            "baseline_metrics": {k: v.to_json() for k, v in self.baseline_metrics.items()},
            "metric_name": self.metric_name, "metric_unit": self.metric_unit, "higher_is_better": self.higher_is_better,
            "metric_bounds": self.metric_bounds,
            "rows": {"search": list(self.rows.search), "holdout": list(self.rows.holdout)},
        }  # fmt: skip

    def _told(self, model: ModelHandler) -> dict[str, Any]:
        """A model as data; its folder from the run folder on where it lies there, so that a run folder can be moved."""
        inside = model.folder.is_relative_to(self.run)
        return {**model.to_json(), "folder": str(model.folder.relative_to(self.run) if inside else model.folder)}

    @classmethod
    def load(cls, run: Path) -> TrialPlan:
        """Read `plan.json` of a run folder."""
        data = json.loads((run / PLAN_FILE).read_text())
        input_model, baseline = (handler_from_json({**data[n], "folder": run / data[n]["folder"]}) for n in ("input_model", "baseline"))
        assert isinstance(baseline, ONNXModelHandler)
        return cls(
            run=run, sweep=LoadedSweep(parse_sweep(data["sweep"]), Path(data["root"])), facts=InputFacts(**data["facts"]),
            input_model=input_model, baseline=baseline,
            baseline_metrics={k: MetricValue.from_json(v) for k, v in data["baseline_metrics"].items()},
            metric_name=data["metric_name"], metric_unit=data["metric_unit"], higher_is_better=data["higher_is_better"],
            rows=Rows(tuple(data["rows"]["search"]), tuple(data["rows"]["holdout"])),
            metric_bounds=tuple(data["metric_bounds"]) if data.get("metric_bounds") else None,
        )  # fmt: skip

    @property
    def eval_path(self) -> Path:
        return self.sweep.path(self.sweep.config.data.eval)

    @property
    def baseline_folder(self) -> Path:
        return self.run / "baseline"


class StageFailed(Exception):
    """A stage ended the trial; carries the outcome. Never leaves this module."""

    def __init__(self, stage: str, status: Status, cause: Cause | None, message: str, output: str = "") -> None:
        super().__init__(stage, status, cause, message, output)
        self.stage, self.status, self.cause, self.message, self.output = stage, status, cause, message, output


class TrialRunner:
    """Runs stages and trials of one sweep in this process's children. Use as a context manager, or `close` it."""

    def __init__(self, run: Path, sweep: LoadedSweep) -> None:
        self.run_folder = run
        self.sweep = sweep
        self.store = Store(run / STORE_FOLDER)
        budget = sweep.config.budget
        self.limits = StageLimits(seconds(budget.stage_timeout), size_bytes(budget.memory) if budget.memory else 0)
        self._onnx = StageRunner(MEASURE_PRELOAD)
        self._passes = StageRunner(PASS_PRELOAD)
        self._surroundings = surroundings()
        self._data_digests: dict[str, str] = {}
        self._work_s = 0.0  # of the stages since the trial began
        self._rungs: list[dict[str, Any]] = []  # of the trial that runs

    def close(self) -> None:
        """End the servers of child processes."""
        self._onnx.close()
        self._passes.close()

    def watched_by(self, on_wait: Callable[[], None]) -> None:
        """Have a function called every second while a stage runs."""
        self._onnx.on_wait = self._passes.on_wait = on_wait

    def __enter__(self) -> TrialRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ stages

    def stage(self, function: str, args: Mapping[str, Any], folder: Path, *, exclusive: bool = False, needed: int = 0) -> StageOutcome:
        """Run one stage in a child, holding the device's lane: alone to time, together with other builders otherwise.

        Raises `DiskFault` when it is the disk that ended the stage; `needed` is how many bytes it was to write, if that is known.
        """
        runner = self._passes if function == PASS_STAGE else self._onnx
        tell_stage(self.run_folder, folder)
        runner.start()  # before the lane is ours: loading libraries would disturb whoever times
        with lane(self.sweep.target.execution_provider, exclusive=exclusive):
            outcome = runner.run(function, args, folder=folder, limits=self.limits)
        self._work_s += outcome.work_s
        if outcome.cause in DISK_CAUSES:
            fault = fault_in(f"{outcome.message}\n{outcome.output_tail}", self.run_folder, needed=needed)
            if fault is not None:
                raise fault
        return outcome

    def _value(self, name: str, outcome: StageOutcome) -> dict[str, Any]:
        if outcome.value is None:
            assert outcome.cause is not None
            raise StageFailed(name, Status.FAILED, outcome.cause, outcome.message, outcome.output_tail[-2000:])
        if outcome.value.get("verdict") == "invalid":
            raise StageFailed(name, Status.INVALID, Cause(outcome.value["cause"]), outcome.value["message"])
        return outcome.value

    def build(self, step: Step, model: ModelHandler, parent_digest: str, folder: Path) -> tuple[Artifact, StageRecord]:
        """Take a pass's result from the store, or run the pass in a child and put it there. Raises `StageFailed`."""
        started = time.monotonic()
        pass_class = get_pass(step.pass_name)
        if pass_class.contract.session_only and isinstance(model, ONNXModelHandler):
            # The files stay: nothing is stored, and no copy of a large model is kept for each setting.
            place = self.store.place()
            try:
                changed = self._run_pass(step, model, place, folder)
            finally:
                shutil.rmtree(place, ignore_errors=True)
            artifact = Artifact(key="", handler=replace(model.with_session(changed.session), notes=changed.notes), digest=parent_digest, cached=False)
        else:
            artifact = self._stored(step, model, parent_digest, folder)
        record = StageRecord(
            name=step.slot, seconds=time.monotonic() - started, cached=artifact.cached, pass_name=step.pass_name,
            digest=artifact.digest, key=artifact.key, notes={**artifact.handler.notes, **({"inserted": step.inserted} if step.inserted else {})},
        )  # fmt: skip
        return artifact, record

    def _stored(self, step: Step, model: ModelHandler, parent_digest: str, folder: Path) -> Artifact:
        facts = self._key_facts(step, model, parent_digest)
        key = self.store.key(facts)
        artifact = self.store.find(key)
        if artifact is None:
            place = self.store.place()
            begun = time.monotonic()
            try:
                handler = self._run_pass(step, model, place, folder)
                artifact = self.store.publish(key, place, handler, facts=facts, seconds=time.monotonic() - begun)
            finally:
                shutil.rmtree(place, ignore_errors=True)
        return artifact

    def _run_pass(self, step: Step, model: ModelHandler, place: Path, folder: Path) -> ModelHandler:
        """Run a pass in a child, into `place`."""
        contract = get_pass(step.pass_name).contract
        target = self.sweep.target
        args = {
            "pass": step.pass_name, "config": dict(step.config), "model": model.to_json(), "out": str(place / FILES),
            "findings": str(self.store.folder / FINDINGS),
            "operator_times": {} if contract.session_only else self._operator_times(model, folder),
            "accelerator": [target.accelerator_type, target.execution_provider], "script": self._script(), "seed": self.sweep.config.seed,
        }  # fmt: skip
        outcome = self.stage(PASS_STAGE, args, folder, needed=0 if contract.session_only else model.size_bytes)
        return handler_from_json(self._value(step.slot, outcome)["model"])

    def _operator_times(self, model: ModelHandler, folder: Path) -> dict[str, float]:
        """Where the time of a pass's input goes, for its coverage: found once for a model, in a child of its own. Empty where it can't be found."""
        if not isinstance(model, ONNXModelHandler) or model.size_bytes > PROFILED_BYTES:
            return {}
        data = self.sweep.path(self.sweep.config.data.eval)

        def find() -> dict[str, Any]:
            outcome = self.stage(TIMES_STAGE, {"model": model.to_json(), "data": str(data)}, folder)
            if outcome.cause is Cause.INFRA:  # that tells nothing of the model, so it is no finding
                return self._value(TIMES, outcome)
            return outcome.value or {"times": {}, "fault": outcome.message}  # a model that does not run is for the pass and the checks to judge

        with contextlib.suppress(StageFailed):
            times: dict[str, float] = Findings(self.store.folder / FINDINGS).once(TIMES, {"model": model.digest}, find)["times"]
            return times
        return {}

    def _key_facts(self, step: Step, model: ModelHandler, parent_digest: str) -> dict[str, Any]:
        """Everything that can change what a pass makes."""
        pass_class = get_pass(step.pass_name)
        table = pass_class.default_config(self.sweep.target.accelerator)
        config = {name: self._content(table[name].category, value) for name, value in step.config.items()}
        facts = {
            "parent": parent_digest, "session": model.session.to_json(), "pass": step.pass_name, "version": pass_class.contract.version,
            "config": config, "libraries": {**library_versions(), **engine_versions(pass_class.contract.packages)},
            "ort_variables": self._surroundings.ort_variables, "seed": self.sweep.config.seed,
        }  # fmt: skip
        source = getattr(sys.modules[pass_class.__module__], "__file__", None)
        if source is not None and not pass_class.__module__.startswith("autotune."):
            facts["code"] = self._digest(source)  # a pass of the user's own changes without a new version
        if isinstance(model, HuggingFaceModelHandler):
            facts["loader"] = engine_versions(["transformers"])
        elif isinstance(model, PyTorchModelHandler):
            facts["loader"] = [model.loader, self._digest(str(model.script))]
        if pass_class.contract.ep_dependent:
            facts["ep"] = self.sweep.target.execution_provider
            facts["cpu"] = [self._surroundings.cpu_model, *self._surroundings.cpu_flags]
        return facts

    def _content(self, category: ParamCategory, value: Any) -> Any:
        """A config value by what it stands for: files by their bytes, objects by name and the bytes of their script."""
        if category is ParamCategory.DATA and value == RANDOM:
            return {"random": True}
        if value is not None and category in (ParamCategory.DATA, ParamCategory.PATH):
            return {"content": self._digest(str(value))}
        if isinstance(value, str) and category is ParamCategory.OBJECT:
            script = value.rpartition(":")[0] or self._script()
            return {"object": value.rpartition(":")[2], "script": self._digest(script) if script else ""}
        return value

    def _digest(self, path: str) -> str:
        if path not in self._data_digests:
            self._data_digests[path] = digest_tree(Path(path))
        return self._data_digests[path]

    def _script(self) -> str | None:
        return str(self.sweep.path(self.sweep.config.script)) if self.sweep.config.script else None

    def check(self, model: ONNXModelHandler, baseline: ONNXModelHandler | None, rows: Sequence[int], data: Path, folder: Path) -> dict[str, Any]:
        """Run the cheap checks. Raises `StageFailed` for a model that can't be measured."""
        args = {
            "model": model.to_json(), "baseline": baseline.to_json() if baseline else None, "data": str(data),
            "rows": list(rows)[:CHECK_ROWS], "batch_size": self.sweep.target.batch_size, "out": str(folder),
            "require_ep": self.sweep.config.target.require_ep,
        }  # fmt: skip
        return self._value("check", self.stage("autotune.benchmarks.stages:check", args, folder))

    def accuracy(
        self, model: ONNXModelHandler, metric: str, data: Path, rows: Sequence[int], folder: Path, *, baseline_outputs: Path | None
    ) -> MetricValue:
        """Score a model on rows, paired with the baseline's kept outputs. Raises `StageFailed`."""
        return MetricValue.from_json(self._scored(model, metric, data, rows, folder, baseline_outputs=baseline_outputs, race=None)["metric"])

    def _scored(
        self, model: ONNXModelHandler, metric: str, data: Path, rows: Sequence[int], folder: Path, *, baseline_outputs: Path | None,
        race: Mapping[str, Any] | None,
    ) -> dict[str, Any]:  # fmt: skip
        """Run the stage `accuracy`; with `race` it may stop when the outcome is certain. Raises `StageFailed`."""
        args = {
            "model": model.to_json(), "metric": metric, "root": str(self.sweep.root), "data": str(data), "rows": list(rows),
            "batch_size": self.sweep.target.batch_size, "baseline_outputs": str(baseline_outputs) if baseline_outputs else None,
            "seed": self.sweep.config.seed, "out": str(folder), "race": race,
        }  # fmt: skip
        return self._value("accuracy", self.stage("autotune.benchmarks.stages:accuracy", args, folder))

    def latency(
        self,
        model: ONNXModelHandler,
        baseline: ONNXModelHandler | None,
        data: Path,
        rows: Sequence[int],
        folder: Path,
        *,
        seed: int,
        final: bool = False,
        time_s: float | None = None,
        limits: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[dict[str, MetricValue], dict[str, Any]]:
        """Time a model against the baseline, alone on the lane; `limits` end it early, see `StopAbove`. Raises `StageFailed`.

        `time_s`: the time limit, where it is not the sweep's for a trial or, with `final`, for a finalist.
        """
        measure = self.sweep.config.measure
        runs = self._runs_wanted()
        # The time limit is meant for what p90 needs; whoever sets a limit on p99 gets the time for ten times as many runs.
        limit = time_s or seconds(measure.final_time if final else measure.max_time) * runs / runs_needed(0.9)
        protocol = {
            "max_time_ns": int(limit * 1e9), "ratio_width": measure.ratio_width, "min_runs": runs, "pattern": measure.pattern,
            "interval_ns": round(seconds(measure.interval) * 1e9) if measure.interval else 0, "concurrency": measure.concurrency,
            "clock": measure.clock,
        }  # fmt: skip
        args = {
            "model": model.to_json(), "baseline": baseline.to_json() if baseline else None, "data": str(data), "rows": list(rows)[:64],
            "batch_size": self.sweep.target.batch_size, "protocol": protocol, "seed": seed, "out": str(folder),
            "measurer": measure.measurer, "root": str(self.sweep.root), "limits": list(limits), "before": self.baseline_before(folder),
        }  # fmt: skip
        value = self._value("latency", self.stage("autotune.benchmarks.stages:latency", args, folder, exclusive=True))
        self._keep_baseline(folder, value["baseline_metrics"]["latency"]["value"])
        return {k: MetricValue.from_json(v) for k, v in value["metrics"].items()}, value

    def baseline_before(self, *folders: Path) -> list[float]:
        """The baseline's latency in this run's last measurements, ms, but for those whose folders are given: they are made again, or told apart."""
        found: dict[str, float] = {}
        evaluator = digest_of(self._evaluator())[:12]
        with contextlib.suppress(FileNotFoundError), (self.run_folder / BASELINE_TIMES).open("rb") as file:
            file.seek(-min(BASELINE_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)  # no more, so that a long sweep is as quick as a short one
            for line in file.read().split(b"\n"):
                with contextlib.suppress(ValueError, KeyError, TypeError):  # the first may be cut, the last of a killed sweep torn
                    told = json.loads(line)
                    if told["evaluator"] == evaluator:
                        found[told["measurement"]] = float(told["ms"])
        apart = {self._name_of(folder) for folder in folders}
        return [ms for name, ms in found.items() if name not in apart]

    def _keep_baseline(self, folder: Path, ms: float) -> None:
        path = self.run_folder / BASELINE_TIMES
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:  # one write, at the end whoever else writes: trials may end at the same time
            file.write("\n" + json.dumps({"measurement": self._name_of(folder), "ms": ms, "evaluator": digest_of(self._evaluator())[:12]}))

    def _name_of(self, folder: Path) -> str:
        return Path(os.path.relpath(folder, self.run_folder)).as_posix()

    def _runs_wanted(self) -> int:
        """Runs that the percentiles of the sweep's limits and objectives need; what p90 needs at least."""
        texts = [*self.sweep.config.constraints, *self.sweep.config.objectives]
        return max([runs_needed(0.9), *(runs_needed(q) for name, q in (("p95", 0.95), ("p99", 0.99)) if any(name in t for t in texts))])

    # ------------------------------------------------------------------ trials

    def run(
        self, plan: TrialPlan, pipeline: Pipeline, number: int, point: Mapping[str, Any], origin: str, *, attempt: int = 1, repeats: int = 0,
        front: Mapping[str, Any] | None = None,
    ) -> TrialRecord:  # fmt: skip
        """Run a trial to its end and write its record; whatever happens inside ends this trial only.

        `repeats`: points that the sampler proposed in vain before this one. `front`: the finished trials that may put this one off the
        front, as `autotune.sweep.ladder.FrontBoxes` tells of them. But for the disk, `DiskFault` and `OSError`, and for children that could
        not be had at the first attempt: these leave no record, so that the trial runs again.
        """
        started, self._work_s = time.monotonic(), 0.0
        self._rungs = []
        if repeats:
            words = "a point that was" if repeats == 1 else f"{repeats} points that were"
            self._rung(EQUAL_POINT, f"the sampler proposed {words} tried already", repeats=repeats)
        record = TrialRecord(number=number, point=dict(point), status=Status.OK, origin=origin, attempts=attempt)
        folder = self.run_folder / "trials" / record.id
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        stages: list[StageRecord] = []
        try:
            with self.store.in_use():
                record = self._measured(plan, pipeline, record, folder, stages, front or {})
        except StageFailed as end:
            if end.stage in RUNG_OF and end.status in (Status.PRUNED, Status.INVALID):
                self._rung(RUNG_OF[end.stage], end.message, ended=True)
            record = replace(record, status=end.status, cause=end.cause, stage=end.stage, message=end.message, output=end.output)
        record = replace(record, stages=tuple(stages), rungs=tuple(self._rungs), seconds=time.monotonic() - started, work_s=self._work_s)
        if record.cause is Cause.INFRA and attempt == 1:
            return record  # and none on disk, so that it runs again: when a sweep is killed, its servers may die before its worker does
        write_durably(folder / TRIAL_FILE, dump_json(record.to_json()))
        return record

    def _rung(self, name: str, words: str, *, ended: bool = False, **more: Any) -> None:
        self._rungs.append({"rung": name, "ended": ended, "words": words, **more})

    def _measured(
        self, plan: TrialPlan, pipeline: Pipeline, record: TrialRecord, folder: Path, stages: list[StageRecord], front: Mapping[str, Any]
    ) -> TrialRecord:
        if not record.point:  # the untouched model, in a space that has no such point
            record = replace(
                record, model_digest=plan.baseline.digest, session=plan.baseline.session.to_json(), unchanged="nothing was done to the model"
            )
            return self.judged(plan, replace(record, metrics=dict(plan.baseline_metrics)))
        refused = pipeline.refusal(record.point)
        if refused is not None:  # a rule that could not be judged when the space was compiled
            raise StageFailed("rules", Status.PRUNED, None, f"{refused.rule}: {refused.message}")
        model = plan.input_model
        digest = model.digest
        for step in pipeline.steps(record.point):
            artifact, stage = self.build(step, model, digest, folder / step.slot)
            stages.append(stage)
            if stage.cached:
                self._rung(EQUAL_PREFIX, f"{step.slot} was built before", slot=step.slot, key=stage.key)
            model, digest = artifact.handler, artifact.digest
        if not isinstance(model, ONNXModelHandler):
            raise StageFailed("chain", Status.INVALID, Cause.BAD_OUTPUT, f"the chain ends with a model in {model.format} format")
        record = replace(record, model_digest=digest, session=model.session.to_json(), unchanged=self._unchanged(plan, model, digest))

        shared = self._shared(digest, model, record.number)
        stopped: Mapping[str, Any] | None = None
        if record.unchanged:
            metrics = dict(plan.baseline_metrics)
            self._rung(EQUAL_BYTES, record.unchanged, ended=True, measured_as="baseline")
        elif shared is not None:
            metrics = {k: MetricValue.from_json(v) for k, v in shared["metrics"].items()}
            record, stopped = replace(record, shares_with=shared["trial"]), shared.get("stopped")
            source = f"t-{shared['trial']:04d}"
            self._rung(EQUAL_BYTES, f"the bytes and settings of {source}, measured there", ended=True, measured_as=source)
        else:
            metrics, stopped = self._fresh_metrics(plan, record, model, folder, stages, front)
            self._share(digest, model, record.number, metrics, stopped, stages)
        if stopped is not None:
            record = ended_early(replace(record, rungs=tuple(self._rungs)), stopped)
            self._rungs = [dict(r) for r in record.rungs]
        return self.judged(plan, replace(record, metrics=metrics))

    def _fresh_metrics(
        self, plan: TrialPlan, record: TrialRecord, model: ONNXModelHandler, folder: Path, stages: list[StageRecord], front: Mapping[str, Any]
    ) -> tuple[dict[str, MetricValue], dict[str, Any] | None]:
        """Check, time and score a model; the second part says why that was not done to the end, if it was not.

        Timing comes first, unless the score is sure to be had for less: a slow model is timed no longer than it takes to see that it is off the
        front, and this can seldom be known before its score is.
        """

        def timed(name: str, begun: float, notes: Mapping[str, Any]) -> None:
            stages.append(StageRecord(name=name, seconds=time.monotonic() - begun, notes=notes))

        begun = time.monotonic()
        checked = self.check(model, plan.baseline, plan.rows.search, plan.eval_path, folder / "check")
        timed("check", begun, checked)
        sizes = size_metrics(model, checked, plan.baseline_metrics)

        def scored_with(metrics: Mapping[str, MetricValue]) -> dict[str, Any]:
            begun = time.monotonic()
            found = self._scored(
                model, plan.sweep.config.metric, plan.eval_path, plan.rows.search, folder / "accuracy",
                baseline_outputs=plan.baseline_folder / "search" / OUTPUTS_FILE, race=self._race(plan, metrics, front),
            )  # fmt: skip
            timed("accuracy", begun, {k: found[k] for k in ("rows", "of", "looks")})
            return found

        by_front = front if record.origin != DEFAULT and plan.sweep.config.measure.looks is not False else {}
        scored = scored_with(sizes) if self._score_first(plan, record, by_front) else None
        score = {plan.metric_name: MetricValue.from_json(scored["metric"])} if scored and not scored["stopped"] else {}
        best = best_score(plan.metric_bounds, plan.baseline_metrics[plan.metric_name], higher_is_better=plan.higher_is_better)
        begun = time.monotonic()
        times, facts = self.latency(
            model, plan.baseline, plan.eval_path, plan.rows.search, folder / "latency", seed=record.number,
            limits=[*latency_limits(plan), *front_limits(by_front, {**sizes, **score}, plan.baseline_metrics, plan.metric_name, best)],
        )  # fmt: skip
        timed("latency", begun, {k: v for k, v in facts.items() if k != "metrics"})
        scored = scored or scored_with({**times, **sizes})
        stopped = scored["stopped"] and {**scored["stopped"], "rows": scored["rows"], "of": scored["of"]}
        if facts.get("stopped_why"):
            words, cost = _timing_words(facts), {"seconds": facts["elapsed_s"]}
            if stopped is None and facts["stopped_by"] in FRONT_RULES:
                stopped = {"rule": facts["stopped_by"], "words": words, **cost}
            else:
                self._rung(LATENCY, words, **cost)
        return {**times, plan.metric_name: MetricValue.from_json(scored["metric"]), **sizes}, stopped

    def _score_first(self, plan: TrialPlan, record: TrialRecord, front: Mapping[str, Any]) -> bool:
        """Whether the score is had for less than timing: a model of these bytes was scored on all rows, in half the time that it was timed.

        Under other session settings, that is; what they do to a score is little, but it is measured and not taken as known.
        """
        if "latency" not in front.get("objectives", ()) or not front["boxes"]:
            return False
        with contextlib.suppress(OSError, ValueError):
            if record.model_digest == plan.baseline.digest:
                stages = {s["name"]: s["seconds"] for s in json.loads((plan.baseline_folder / "baseline.json").read_text())["stages"]}
                # The baseline was scored on the rows of the search, on those held out, and on all.
                return bool(2 * stages["accuracy"] / (2 if plan.rows.holdout else 1) <= stages["latency"])
            found = json.loads(self._scored_before(record.model_digest).read_text())
            return bool(found["trial"] < record.number and 2 * found["accuracy_s"] <= found["latency_s"])
        return False

    def _race(self, plan: TrialPlan, metrics: Mapping[str, MetricValue], front: Mapping[str, Any]) -> dict[str, Any] | None:
        """By what a candidate's accuracy may stop early, all else measured; None when every row is to be run."""
        looks = plan.sweep.config.measure.looks
        if not (len(plan.rows.search) >= LEAST_ROWS if looks is None else looks):
            return None
        score, baseline = plan.metric_name, plan.baseline_metrics
        rules = race_rules(metrics, front, sweep_constraints(plan), baseline, score, higher_is_better=plan.higher_is_better)
        return {"rules": rules.to_json(), "baseline": baseline[score].to_json()}

    def _unchanged(self, plan: TrialPlan, model: ONNXModelHandler, digest: str) -> str:
        if digest == plan.baseline.digest and model.session == plan.baseline.session:
            return "no byte of the model and no session setting differs from the baseline"
        return ""

    def _evaluator(self) -> dict[str, Any]:
        """Everything but the model that its measurement depends on."""
        config = self.sweep.config.to_json()
        named = (script_of(name or "") for name in (self.sweep.config.metric, self.sweep.config.measure.measurer))
        scripts = [self._digest(str(self.sweep.path(script))) for script in named if script]
        data = self._digest(str(self.sweep.path(self.sweep.config.data.eval)))
        return {
            **{k: config[k] for k in ("metric", "measure", "target", "seed")}, "rows": config["data"]["holdout"], "data": data, "scripts": scripts,
            "surroundings": self._surroundings.to_json(),
        }  # fmt: skip

    def _measurement(self, digest: str, model: ONNXModelHandler) -> Path:
        return self.run_folder / "measured" / f"{digest_of([digest, model.session.to_json(), self._evaluator()])}.json"

    def _scored_before(self, digest: str) -> Path:
        """Where it stands which trial first scored a model of these bytes on all rows, and what that took."""
        return self.run_folder / "measured" / f"scored-{digest_of([digest, self._evaluator()])}.json"

    def _shared(self, digest: str, model: ONNXModelHandler, number: int) -> dict[str, Any] | None:
        """The measurement of an equal model under equal settings by another trial of this run, if there is one."""
        try:
            found: dict[str, Any] = json.loads(self._measurement(digest, model).read_text())
        except (OSError, ValueError):
            return None
        if found["trial"] == number:
            return None  # it left its measurement, but no record: its samples are gone
        return found if found.get("goals") in (None, self._goals()) else None

    def _goals(self) -> str:
        """What a measurement that stopped early was judged by; under other limits or objectives it says too little."""
        config = self.sweep.config
        return digest_of([config.constraints, config.objectives, config.strict, [s.model_dump() for s in config.chain]])

    def _share(
        self, digest: str, model: ONNXModelHandler, number: int, metrics: Mapping[str, MetricValue], stopped: Mapping[str, Any] | None,
        stages: Sequence[StageRecord],
    ) -> None:  # fmt: skip
        path, first = self._measurement(digest, model), self._scored_before(digest)
        path.parent.mkdir(exist_ok=True)
        if (stopped is None or "rows" not in stopped) and not first.exists():
            took = {s.name: s.seconds for s in stages}
            write_durably(first, dump_json({"trial": number, "accuracy_s": took["accuracy"], "latency_s": took["latency"]}))
        content = {"trial": number, "metrics": {k: v.to_json() for k, v in metrics.items()}}
        write_durably(path, dump_json(content if stopped is None else {**content, "stopped": dict(stopped), "goals": self._goals()}))

    def judged(self, plan: TrialPlan, record: TrialRecord) -> TrialRecord:
        """Judge a measured record by the sweep's constraints, see `judge_record`."""
        return judge_record(record, sweep_constraints(plan), plan.baseline_metrics, strict=plan.sweep.config.strict)


def judge_record(
    record: TrialRecord, constraints: Sequence[Constraint], baseline: Mapping[str, MetricValue], *, strict: bool = False
) -> TrialRecord:  # fmt: skip
    """Judge a measured record by constraints: ok, infeasible or undecided, with each verdict.

    How a record ends whose measuring stopped early was decided then.
    """
    judgements = judge_all(constraints, record.metrics, baseline)
    verdicts = {j.verdict for j in judgements}
    status = (
        record.status
        if record.partial
        else Status.INFEASIBLE
        if Verdict.VIOLATED in verdicts
        else Status.OK
        if feasible(judgements, strict=strict)
        else Status.UNDECIDED
    )
    return replace(record, status=status, constraints=tuple({**j.to_json(), "violation": violation(j)} for j in judgements))


def ended_early(record: TrialRecord, stopped: Mapping[str, Any]) -> TrialRecord:
    """A record whose measuring stopped early: `stopped` holds rule and words, and `rows` with `of` for its score or `seconds` for its latency."""
    status = Status.INFEASIBLE if stopped["rule"] == INFEASIBLE else Status.PRUNED
    message = stopped["words"] if status is Status.INFEASIBLE else f"{stopped['rule']}: {stopped['words']}"
    name, stage, cost = (BY_LOOKS, "accuracy", ("rows", "of")) if "rows" in stopped else (LATENCY, "latency", ("seconds",))
    rung = {"rung": name, "ended": True, "words": stopped["words"], "rule": stopped["rule"], **{k: stopped[k] for k in cost}}
    return replace(record, status=status, stage=stage, message=message, rungs=(*record.rungs, rung))


def _timing_words(facts: Mapping[str, Any]) -> str:
    ratio, why = facts["measured_ratio"], facts["stopped_why"]
    return (
        f"timed for {facts['session_pairs']} session pairs only: {why if facts['stopped_by'] in FRONT_RULES else f'`{why}` is violated'} "
        f"(latency {ratio['value']:.3g}x the baseline's, {ratio['low']:.3g} to {ratio['high']:.3g})"
    )


def tell_stage(run: Path, folder: Path) -> None:
    """Write down which stage begins, for whoever watches: by the folder that it works in. No record; never the reason of a failure."""
    kind, *rest = folder.relative_to(run).parts if folder.is_relative_to(run) else (folder.name,)
    what, stage = (rest[0], " ".join(rest[1:])) if kind == "trials" and rest else (kind, " ".join(rest))
    temporary = run / f".{STAGE_FILE}.{os.getpid()}.tmp"
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps({"what": what, "stage": stage, "since": time.monotonic()}))
        temporary.replace(run / STAGE_FILE)


def stage_now(run: Path) -> dict[str, Any] | None:
    """What `tell_stage` wrote last: `what` (a trial's id, or baseline), `stage`, and `since` on this machine's monotonic clock."""
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((run / STAGE_FILE).read_text())
        return found
    return None


def rivals(
    front: Mapping[str, Any], metrics: Mapping[str, MetricValue], baseline: Mapping[str, MetricValue], score: str
) -> tuple[Rival, ...]:  # fmt: skip
    """Those of the front that are no worse than a candidate in everything but its score, which is not known yet."""
    found = []
    for box in front.get("boxes", ()):
        sure = _no_worse(box, front, metrics, baseline, leave_out=score)
        if sure is not None:
            found.append(Rival(box["trial"], Interval.from_json(box["axes"][score]), elsewhere=any(sure), everywhere=all(sure)))
    return tuple(found)


def _no_worse(
    box: Mapping[str, Any], front: Mapping[str, Any], metrics: Mapping[str, MetricValue], baseline: Mapping[str, MetricValue], *, leave_out: str
) -> list[bool] | None:
    """For each objective but one, whether a member of the front is better there than a candidate beyond doubt.

    None where it is worse by estimate in anything but that one, or where that can't be told, the candidate not being measured for it.
    """
    clear: dict[str, bool] = {}
    for name, other in box["axes"].items():
        if name == leave_out:
            continue
        if name not in metrics:
            return None
        theirs, own = Interval.from_json(other), compared(metrics[name], baseline[name], minimize=front["minimize"][name])
        if not theirs.value <= own.value:
            return None
        clear[name] = theirs.high < widened(own, metrics[name], error=front["error"]).low and own.value - theirs.value > front["eps"][name]
    return [clear[name] for name in front["objectives"] if name != leave_out]


def race_rules(
    metrics: Mapping[str, MetricValue], front: Mapping[str, Any], constraints: Sequence[Constraint], baseline: Mapping[str, MetricValue],
    score: str, *, higher_is_better: bool,
) -> Rules:  # fmt: skip
    """By what a candidate's accuracy may stop early, `metrics` being all else that is known of it."""
    others = judge_all([c for c in constraints if c.metric != score], metrics, baseline)
    violated = [j for j in others if j.verdict is Verdict.VIOLATED]
    return Rules(
        constraints=tuple(c for c in constraints if c.metric == score), already=violated[0].constraint.text if violated else "",
        rivals=rivals(front, metrics, baseline, score), higher_is_better=higher_is_better,
        eps=front["eps"][score] if front else 0.0, error=front["error"] if front else 0.05, score_counts=score in front.get("objectives", ()),
    )  # fmt: skip


def front_limits(
    front: Mapping[str, Any], metrics: Mapping[str, MetricValue], baseline: Mapping[str, MetricValue], score: str, best: MetricValue | None = None
) -> list[dict[str, Any]]:
    """The latency above which a finished trial puts a candidate off the front whatever else it is, as the latency stage takes limits.

    `metrics`: what is known of the candidate beforehand. Its score is, when it was scored first; else `best`, which no score exceeds, stands for it:
    then only a trial with the best possible score can tell. None where latency is no objective, or another measure of time is one. The error
    is that of an interval in the choice at the end, whose rule this is.
    """
    if "latency" not in front.get("objectives", ()):
        return []
    known = {**({score: best} if best is not None else {}), **metrics}
    found = []
    for box in front["boxes"]:
        sure = _no_worse(box, front, known, baseline, leave_out="latency")
        if sure is not None:
            theirs = Interval.from_json(box["axes"]["latency"])
            words = "in every objective" if all(sure) else "in latency, and no worse in anything,"
            found.append((max(theirs.high, theirs.value + front["eps"]["latency"]), box["trial"], words, DOMINATED if all(sure) else OFF_FRONT))
    if not found:
        return []
    above, trial, words, rule = min(found)
    return [{"of": "ratio", "limit": math.exp(above), "why": f"{trial} is better {words} beyond doubt", "rule": rule, "error": front["error"]}]


def best_score(bounds: tuple[float, float] | None, baseline: MetricValue, *, higher_is_better: bool) -> MetricValue | None:
    """The score that no model exceeds, where the metric has bounds; a hair below it, so that who has it but for rounding has it."""
    if bounds is None:
        return None
    best = bounds[1] - ROUNDING if higher_is_better else bounds[0] + ROUNDING
    return MetricValue(best, best, best, unit=baseline.unit, delta=Interval.exactly(best - baseline.value), samples=baseline.samples)


def size_metrics(model: ONNXModelHandler, checked: Mapping[str, Any], baseline: Mapping[str, MetricValue]) -> dict[str, MetricValue]:
    """Size on disk and peak memory as metrics; without noise to speak of, so their intervals are points."""
    found = {}
    for name, value in (("size", model.size_bytes), ("peak_memory", checked.get("peak_memory_bytes"))):
        if not value:
            continue
        reference = baseline[name].value if name in baseline else float(value)
        ratio = Interval.exactly(float(value) / reference) if reference else None
        found[name] = MetricValue(
            float(value), float(value), float(value), unit="bytes", ratio=ratio, delta=Interval.exactly(float(value) - reference), samples=1
        )
    return found


METRIC_UNITS = {
    "latency": "ms", "latency.p90": "ms", "latency.p95": "ms", "latency.p99": "ms", "latency.first_run": "ms", "throughput": "/s",
    "size": "bytes", "peak_memory": "bytes",
}  # fmt: skip


def metric_units(plan: TrialPlan) -> dict[str, str]:
    """Unit of every metric that a constraint or an objective may name."""
    return {**METRIC_UNITS, plan.metric_name: plan.metric_unit}


def latency_limits(plan: TrialPlan) -> list[dict[str, Any]]:
    """Limits on the median latency above which a candidate need not be timed to the end, as the latency stage takes them.

    None where an objective is a percentile: its runs are wanted of infeasible candidates too, for the sampler to learn from.
    """
    if any(".p" in objective for objective in plan.sweep.config.objectives):
        return []
    units = {Relative.NONE: "ms", Relative.RATIO: "ratio"}
    return [
        {"of": units[c.relative], "limit": c.limit, "why": c.text}
        for c in sweep_constraints(plan)
        if c.metric == "latency" and c.sense == "<=" and c.relative in units and c.limit > 0
    ]


def sweep_constraints(plan: TrialPlan) -> list[Constraint]:
    """Parse the sweep's constraints; `score` stands for the accuracy metric, whatever its name. Raises `ConfigError`."""
    direction = {plan.metric_name: plan.higher_is_better}
    return [
        parse_constraint(text, metrics=metric_units(plan), score=plan.metric_name, higher_is_better=direction)
        for text in plan.sweep.config.constraints
    ]
