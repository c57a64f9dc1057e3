"""One trial: the passes of a point, checks, accuracy, latency; each in a child process, every ending on record."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from autotune.benchmarks.lane import lane
from autotune.benchmarks.stages import OUTPUTS_FILE
from autotune.benchmarks.statistics import runs_needed
from autotune.config import LoadedSweep, parse_sweep, seconds, size_bytes
from autotune.constraints import Constraint, Verdict, feasible, judge_all, parse_constraint, violation
from autotune.digest import digest_of, digest_tree, dump_json, write_durably
from autotune.model import PYTORCH, ModelHandler, ONNXModelHandler, PyTorchModelHandler, handler_from_json, load_script
from autotune.passes.base import ParamCategory
from autotune.passes.registry import get_pass
from autotune.pipeline import InputFacts, Pipeline, Step
from autotune.records import Cause, Interval, MetricValue, StageRecord, Status, TrialRecord
from autotune.stages import StageLimits, StageOutcome, StageRunner
from autotune.store import FILES, Artifact, Store
from autotune.target import AcceleratorSpec, library_versions, surroundings

TRIAL_FILE = "trial.json"
PLAN_FILE = "plan.json"
ONNX_PRELOAD = ("numpy", "onnx", "onnxruntime", "onnxruntime.quantization", "onnxruntime.tools.symbolic_shape_infer", "autotune.benchmarks.stages")
TORCH_PRELOAD = ("numpy", "onnx", "onnxruntime", "torch")
CHECK_ROWS = 4


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


def split_rows(count: int, holdout: float, *, seed: int) -> Rows:
    """Shuffle row numbers and split off the hold-out share; sets too small to split keep all rows for the search."""
    order = [int(i) for i in np.random.default_rng([seed, 1]).permutation(count)]
    kept = int(count * holdout)
    return Rows(search=tuple(order[kept:]), holdout=tuple(order[:kept])) if kept >= 2 and count - kept >= 2 else Rows(tuple(order), ())


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

    def to_json(self) -> dict[str, Any]:
        return {
            "sweep": self.sweep.config.to_json(), "root": str(self.sweep.root),
            "facts": {"format": self.facts.format, "opset": self.facts.opset, "operators": dict(self.facts.operators)},
            "input_model": self.input_model.to_json(), "baseline": self.baseline.to_json(),
            "baseline_metrics": {k: v.to_json() for k, v in self.baseline_metrics.items()},
            "metric_name": self.metric_name, "metric_unit": self.metric_unit, "higher_is_better": self.higher_is_better,
            "rows": {"search": list(self.rows.search), "holdout": list(self.rows.holdout)},
        }  # fmt: skip

    @classmethod
    def load(cls, run: Path) -> TrialPlan:
        """Read `plan.json` of a run folder."""
        data = json.loads((run / PLAN_FILE).read_text())
        baseline = handler_from_json(data["baseline"])
        assert isinstance(baseline, ONNXModelHandler)
        return cls(
            run=run, sweep=LoadedSweep(parse_sweep(data["sweep"]), Path(data["root"])), facts=InputFacts(**data["facts"]),
            input_model=handler_from_json(data["input_model"]), baseline=baseline,
            baseline_metrics={k: MetricValue.from_json(v) for k, v in data["baseline_metrics"].items()},
            metric_name=data["metric_name"], metric_unit=data["metric_unit"], higher_is_better=data["higher_is_better"],
            rows=Rows(tuple(data["rows"]["search"]), tuple(data["rows"]["holdout"])),
        )  # fmt: skip

    @property
    def eval_path(self) -> Path:
        return self.sweep.path(self.sweep.config.data.eval)

    @property
    def baseline_folder(self) -> Path:
        return self.run / "baseline"


class StageFailed(Exception):
    """A stage ended the trial; carries the outcome. Never leaves this module."""

    def __init__(self, stage: str, status: Status, cause: Cause | None, message: str) -> None:
        super().__init__(stage, status, cause, message)
        self.stage, self.status, self.cause, self.message = stage, status, cause, message


class TrialRunner:
    """Runs stages and trials of one sweep in this process's children. Use as a context manager, or `close` it."""

    def __init__(self, run: Path, sweep: LoadedSweep) -> None:
        self.run_folder = run
        self.sweep = sweep
        self.store = Store(run / "store")
        budget = sweep.config.budget
        self.limits = StageLimits(seconds(budget.stage_timeout), size_bytes(budget.memory) if budget.memory else 0)
        self._onnx = StageRunner(ONNX_PRELOAD)
        self._torch = StageRunner(TORCH_PRELOAD)
        self._surroundings = surroundings()
        self._data_digests: dict[str, str] = {}

    def close(self) -> None:
        """End the servers of child processes."""
        self._onnx.close()
        self._torch.close()

    def __enter__(self) -> TrialRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ stages

    def stage(self, function: str, args: Mapping[str, Any], folder: Path, *, torch: bool = False, exclusive: bool = False) -> StageOutcome:
        """Run one stage in a child, holding the device's lane: alone to time, together with other builders otherwise."""
        runner = self._torch if torch else self._onnx
        runner.start()  # before the lane is ours: loading libraries would disturb whoever times
        with lane(self.sweep.target.execution_provider, exclusive=exclusive):
            return runner.run(function, args, folder=folder, limits=self.limits)

    def _value(self, name: str, outcome: StageOutcome) -> dict[str, Any]:
        if outcome.value is None:
            assert outcome.cause is not None
            raise StageFailed(name, Status.FAILED, outcome.cause, outcome.message)
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
            digest=artifact.digest, key=artifact.key, notes=dict(artifact.handler.notes),
        )  # fmt: skip
        return artifact, record

    def _stored(self, step: Step, model: ModelHandler, parent_digest: str, folder: Path) -> Artifact:
        facts = self._key_facts(step, model, parent_digest)
        key = self.store.key(facts)
        artifact = self.store.find(key)
        if artifact is None:
            place = self.store.place()
            try:
                artifact = self.store.publish(key, place, self._run_pass(step, model, place, folder), facts=facts)
            finally:
                shutil.rmtree(place, ignore_errors=True)
        return artifact

    def _run_pass(self, step: Step, model: ModelHandler, place: Path, folder: Path) -> ModelHandler:
        """Run a pass in a child, into `place`."""
        contract = get_pass(step.pass_name).contract
        target = self.sweep.target
        args = {
            "pass": step.pass_name, "config": dict(step.config), "model": model.to_json(), "out": str(place / FILES),
            "accelerator": [target.accelerator_type, target.execution_provider], "script": self._script(),
        }  # fmt: skip
        outcome = self.stage("autotune.trial:run_pass", args, folder, torch=PYTORCH in (contract.accepts, contract.returns))
        return handler_from_json(self._value(step.slot, outcome)["model"])

    def _key_facts(self, step: Step, model: ModelHandler, parent_digest: str) -> dict[str, Any]:
        """Everything that can change what a pass makes."""
        pass_class = get_pass(step.pass_name)
        table = pass_class.default_config(self.sweep.target.accelerator)
        config = {name: self._content(table[name].category, value) for name, value in step.config.items()}
        facts = {
            "parent": parent_digest, "session": model.session.to_json(), "pass": step.pass_name, "version": pass_class.contract.version,
            "config": config, "libraries": library_versions(), "ort_variables": self._surroundings.ort_variables, "seed": self.sweep.config.seed,
        }  # fmt: skip
        if isinstance(model, PyTorchModelHandler):
            facts["loader"] = [model.loader, self._digest(str(model.script))]
        if pass_class.contract.ep_dependent:
            facts["ep"] = self.sweep.target.execution_provider
            facts["cpu"] = [self._surroundings.cpu_model, *self._surroundings.cpu_flags]
        return facts

    def _content(self, category: ParamCategory, value: Any) -> Any:
        """A config value by what it stands for: files by their bytes, objects by name and the bytes of their script."""
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
        }  # fmt: skip
        return self._value("check", self.stage("autotune.benchmarks.stages:check", args, folder))

    def accuracy(
        self, model: ONNXModelHandler, metric: str, data: Path, rows: Sequence[int], folder: Path, *, baseline_outputs: Path | None
    ) -> MetricValue:
        """Score a model on rows, paired with the baseline's kept outputs. Raises `StageFailed`."""
        args = {
            "model": model.to_json(), "metric": metric, "root": str(self.sweep.root), "data": str(data), "rows": list(rows),
            "batch_size": self.sweep.target.batch_size, "baseline_outputs": str(baseline_outputs) if baseline_outputs else None,
            "seed": self.sweep.config.seed, "out": str(folder),
        }  # fmt: skip
        value = self._value("accuracy", self.stage("autotune.benchmarks.stages:accuracy", args, folder))
        return MetricValue.from_json(value["metric"])

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
    ) -> tuple[dict[str, MetricValue], dict[str, Any]]:
        """Time a model against the baseline, alone on the lane. Raises `StageFailed`."""
        measure = self.sweep.config.measure
        runs = self._runs_wanted()
        # The time limit is meant for what p90 needs; whoever sets a limit on p99 gets the time for ten times as many runs.
        limit = seconds(measure.final_time if final else measure.max_time) * runs / runs_needed(0.9)
        protocol = {"max_time_ns": int(limit * 1e9), "ratio_width": measure.ratio_width, "min_runs": runs}
        args = {
            "model": model.to_json(), "baseline": baseline.to_json() if baseline else None, "data": str(data), "rows": list(rows)[:64],
            "batch_size": self.sweep.target.batch_size, "protocol": protocol, "seed": seed, "out": str(folder),
        }  # fmt: skip
        value = self._value("latency", self.stage("autotune.benchmarks.stages:latency", args, folder, exclusive=True))
        return {k: MetricValue.from_json(v) for k, v in value["metrics"].items()}, value

    def _runs_wanted(self) -> int:
        """Runs that the percentiles of the sweep's limits and objectives need; what p90 needs at least."""
        texts = [*self.sweep.config.constraints, *self.sweep.config.objectives]
        return max([runs_needed(0.9), *(runs_needed(q) for name, q in (("p95", 0.95), ("p99", 0.99)) if any(name in t for t in texts))])

    # ------------------------------------------------------------------ trials

    def run(self, plan: TrialPlan, pipeline: Pipeline, number: int, point: Mapping[str, Any], origin: str, *, attempt: int = 1) -> TrialRecord:
        """Run a trial to its end and write its record; whatever happens inside ends this trial only."""
        started = time.monotonic()
        record = TrialRecord(number=number, point=dict(point), status=Status.OK, origin=origin, attempts=attempt)
        folder = self.run_folder / "trials" / record.id
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        stages: list[StageRecord] = []
        try:
            record = self._measured(plan, pipeline, record, folder, stages)
        except StageFailed as end:
            record = replace(record, status=end.status, cause=end.cause, stage=end.stage, message=end.message)
        record = replace(record, stages=tuple(stages), seconds=time.monotonic() - started)
        write_durably(folder / TRIAL_FILE, dump_json(record.to_json()))
        return record

    def _measured(self, plan: TrialPlan, pipeline: Pipeline, record: TrialRecord, folder: Path, stages: list[StageRecord]) -> TrialRecord:
        if not record.point:  # the untouched model, in a space that has no such point
            record = replace(
                record, model_digest=plan.baseline.digest, session=plan.baseline.session.to_json(), unchanged="nothing was done to the model"
            )
            return self.judged(plan, replace(record, metrics=dict(plan.baseline_metrics)))
        model = plan.input_model
        digest = model.digest
        for step in pipeline.steps(record.point):
            artifact, stage = self.build(step, model, digest, folder / step.slot)
            stages.append(stage)
            model, digest = artifact.handler, artifact.digest
        if not isinstance(model, ONNXModelHandler):
            raise StageFailed("chain", Status.INVALID, Cause.BAD_OUTPUT, f"the chain ends with a model in {model.format} format")
        record = replace(record, model_digest=digest, session=model.session.to_json(), unchanged=self._unchanged(plan, model, digest))

        shared = self._shared(digest, model)
        if record.unchanged:
            metrics = dict(plan.baseline_metrics)
        elif shared is not None:
            metrics = {k: MetricValue.from_json(v) for k, v in shared["metrics"].items()}
            record = replace(record, shares_with=shared["trial"])
        else:
            metrics = self._fresh_metrics(plan, record, model, folder, stages)
            self._share(digest, model, record.number, metrics)
        return self.judged(plan, replace(record, metrics=metrics))

    def _fresh_metrics(
        self, plan: TrialPlan, record: TrialRecord, model: ONNXModelHandler, folder: Path, stages: list[StageRecord]
    ) -> dict[str, MetricValue]:
        def timed(name: str, begun: float, notes: Mapping[str, Any]) -> None:
            stages.append(StageRecord(name=name, seconds=time.monotonic() - begun, notes=notes))

        begun = time.monotonic()
        checked = self.check(model, plan.baseline, plan.rows.search, plan.eval_path, folder / "check")
        timed("check", begun, checked)
        begun = time.monotonic()
        metric = plan.sweep.config.metric
        kept = plan.baseline_folder / "search" / OUTPUTS_FILE
        score = self.accuracy(model, metric, plan.eval_path, plan.rows.search, folder / "accuracy", baseline_outputs=kept)
        timed("accuracy", begun, {})
        begun = time.monotonic()
        times, facts = self.latency(model, plan.baseline, plan.eval_path, plan.rows.search, folder / "latency", seed=record.number)
        timed("latency", begun, {k: v for k, v in facts.items() if k != "metrics"})
        return {**times, plan.metric_name: score, **size_metrics(model, checked, plan.baseline_metrics)}

    def _unchanged(self, plan: TrialPlan, model: ONNXModelHandler, digest: str) -> str:
        if digest == plan.baseline.digest and model.session == plan.baseline.session:
            return "no byte of the model and no session setting differs from the baseline"
        return ""

    def _measurement(self, digest: str, model: ONNXModelHandler) -> Path:
        return self.run_folder / "measured" / f"{digest_of([digest, model.session.to_json()])}.json"

    def _shared(self, digest: str, model: ONNXModelHandler) -> dict[str, Any] | None:
        """The measurement of an equal model under equal settings in this run, if there is one."""
        try:
            found: dict[str, Any] = json.loads(self._measurement(digest, model).read_text())
        except (OSError, ValueError):
            return None
        return found

    def _share(self, digest: str, model: ONNXModelHandler, number: int, metrics: Mapping[str, MetricValue]) -> None:
        path = self._measurement(digest, model)
        path.parent.mkdir(exist_ok=True)
        write_durably(path, dump_json({"trial": number, "metrics": {k: v.to_json() for k, v in metrics.items()}}))

    def judged(self, plan: TrialPlan, record: TrialRecord) -> TrialRecord:
        """Judge a measured record by the sweep's constraints: ok, infeasible or undecided, with each verdict."""
        judgements = judge_all(sweep_constraints(plan), record.metrics, plan.baseline_metrics)
        verdicts = {j.verdict for j in judgements}
        status = (
            Status.INFEASIBLE
            if Verdict.VIOLATED in verdicts
            else Status.OK
            if feasible(judgements, strict=plan.sweep.config.strict)
            else Status.UNDECIDED
        )
        return replace(record, status=status, constraints=tuple({**j.to_json(), "violation": violation(j)} for j in judgements))


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


def sweep_constraints(plan: TrialPlan) -> list[Constraint]:
    """Parse the sweep's constraints; `score` stands for the accuracy metric, whatever its name. Raises `ConfigError`."""
    direction = {plan.metric_name: plan.higher_is_better}
    return [
        parse_constraint(text, metrics=metric_units(plan), score=plan.metric_name, higher_is_better=direction)
        for text in plan.sweep.config.constraints
    ]


def run_pass(args: Mapping[str, Any]) -> dict[str, Any]:
    """Stage: run one pass in this (child) process. Returns the handler of what it wrote."""
    if args.get("script"):
        load_script(Path(args["script"]), who="script")  # it may register passes of its own
    accelerator = AcceleratorSpec(*args["accelerator"])
    pass_class = get_pass(args["pass"])
    worker = pass_class(accelerator, args["config"], user_script=Path(args["script"]) if args.get("script") else None)
    result = worker.run(handler_from_json(args["model"]), Path(args["out"]))
    return {"model": result.to_json()}
