"""The model as it is: brought into the run folder, measured, and written into the plan that every trial is held against."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autotune.config import LoadedSweep
from autotune.data import load_arrays
from autotune.digest import dump_json, write_durably
from autotune.model import ONNX, PYTORCH, WEIGHTS_FILE, ModelHandler, ONNXModelHandler, PyTorchModelHandler, ingest_onnx, ingest_torch
from autotune.passes.registry import get_pass
from autotune.passes.torch_sources import example_rows
from autotune.pipeline import Step
from autotune.records import MetricValue, StageRecord, Status, TrialRecord
from autotune.sweep.prepare import Prepared
from autotune.torch_files import kind_of
from autotune.trial import PLAN_FILE, TRIAL_FILE, StageFailed, TrialPlan, TrialRunner, size_metrics


@dataclass(frozen=True)
class Baseline:
    """Measures the baseline of a sweep into its run folder, once."""

    run: Path
    sweep: LoadedSweep
    prepared: Prepared
    runner: TrialRunner
    say: Callable[[str], None]

    def plan(self) -> TrialPlan | TrialRecord:
        """Return the plan; on first use ingest the model and measure it as it is.

        A model that can't be measured comes back as the record of its failure.
        """
        if (self.run / PLAN_FILE).exists():
            return TrialPlan.load(self.run)
        self.say("baseline: measuring the model as it is")
        folder = self.run / "baseline"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        started = time.monotonic()
        stages: list[StageRecord] = []
        try:
            source, model = self._ingest(folder, stages)
            metrics = self._measure(model, folder, stages)
        except StageFailed as end:
            record = TrialRecord(
                number=0, point={}, status=end.status, origin="untouched", cause=end.cause, stage=end.stage, message=end.message,
                stages=tuple(stages), seconds=time.monotonic() - started,
            )  # fmt: skip
            trial = self.run / "trials" / record.id
            trial.mkdir(parents=True, exist_ok=True)
            write_durably(trial / TRIAL_FILE, dump_json(record.to_json()))
            return record
        metric = self.prepared.metric
        plan = TrialPlan(
            run=self.run, sweep=self.sweep, facts=self.prepared.facts, input_model=source, baseline=model, baseline_metrics=metrics,
            metric_name=metric.name, metric_unit=metric.unit, higher_is_better=metric.higher_is_better, rows=self.prepared.rows,
            metric_bounds=metric.bounds,
        )  # fmt: skip
        write_durably(self.run / PLAN_FILE, dump_json(plan.to_json()))
        return TrialPlan.load(self.run)

    def _ingest(self, folder: Path, stages: list[StageRecord]) -> tuple[ModelHandler, ONNXModelHandler]:
        """Bring the input model into the run folder; a torch module is converted as the chain's untouched point says."""
        begun = time.monotonic()
        target = folder / "model"
        target.mkdir()
        if self.prepared.facts.format == ONNX:
            named = self.sweep.config.model.path
            assert named is not None
            model = ingest_onnx(self.sweep.path(named), target).with_session(self.prepared.settings)
            stages.append(StageRecord("ingest", time.monotonic() - begun, digest=model.digest))
            return model, model
        place = self.run / "input"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        source = self._torch_model(place)
        artifact, stage = self.runner.build(self._conversion(), source, source.digest, folder / "convert")
        stages.append(stage)
        for path in artifact.handler.folder.iterdir():
            shutil.copyfile(path, target / path.name)
        return source, ONNXModelHandler.from_folder(target, session=self.prepared.settings)

    def _torch_model(self, place: Path) -> ModelHandler:
        """The input model of torch, brought into a folder."""
        section, io, settings = self.sweep.config.model, self.prepared.io, self.prepared.settings
        if section.path is not None:
            examples = example_rows(io, load_arrays(self.sweep.path(self.sweep.config.data.eval), who="data.eval"))
            path = self.sweep.path(section.path)
            return ingest_torch(path, kind_of(path), place, io=io, session=settings, examples=examples)
        assert section.script is not None
        if section.weights is not None:
            shutil.copyfile(self.sweep.path(section.weights), place / WEIGHTS_FILE)
        return PyTorchModelHandler(place, io, settings, {}, script=self.sweep.path(section.script), loader=section.loader)

    def _conversion(self) -> Step:
        """How the untouched torch module becomes ONNX: as the chain's own conversion does by default."""
        pipeline = self.prepared.pipeline
        point = pipeline.untouched_point() or pipeline.default_point()
        for step in pipeline.steps(point):
            contract = pipeline.classes[step.pass_name].contract
            if contract.accepts == PYTORCH and contract.returns != PYTORCH:
                return step
        accelerator = self.sweep.target.accelerator
        return Step("convert", "OnnxConversion", get_pass("OnnxConversion").resolve(accelerator, {}))

    def _measure(self, model: ONNXModelHandler, folder: Path, stages: list[StageRecord]) -> dict[str, MetricValue]:
        data, rows = self.sweep.path(self.sweep.config.data.eval), self.prepared.rows
        begun = time.monotonic()
        checked = self.runner.check(model, None, rows.search, data, folder / "check")
        stages.append(StageRecord("check", time.monotonic() - begun, notes=checked))
        begun = time.monotonic()
        scores = {name: self.runner.accuracy(model, self.sweep.config.metric, data, rows.of(name), folder / name, baseline_outputs=None)
                  for name in ("search", "holdout", "all") if rows.of(name)}  # fmt: skip
        write_durably(folder / "scores.json", dump_json({k: v.to_json() for k, v in scores.items()}))
        stages.append(StageRecord("accuracy", time.monotonic() - begun))
        begun = time.monotonic()
        times, facts = self.runner.latency(model, None, data, rows.search, folder / "latency", seed=self.sweep.config.seed)
        stages.append(StageRecord("latency", time.monotonic() - begun, notes={k: v for k, v in facts.items() if k != "metrics"}))
        metrics = {**times, self.prepared.metric.name: scores["search"], **size_metrics(model, checked, {})}
        record = TrialRecord(
            number=0, point={}, status=Status.OK, origin="untouched", stages=tuple(stages), metrics=metrics, model_digest=model.digest
        )
        document = {**record.to_json(), "id": "baseline"}
        write_durably(folder / "baseline.json", dump_json(document))
        return metrics
