"""Folders of real models, as the programs here take them, and how a model of one is scored and timed beside the float one.

A folder holds `model.onnx`, `eval.npz` (one array per input, and `labels`), `calib.npz` (inputs only) and `meta.json` (its `metric`, and `task`:
what kind of model it is).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.benchmarks.lane import lane
from autotune.benchmarks.metrics import Metric, get_metric
from autotune.data import count_rows, load_arrays
from autotune.model import ONNXModelHandler
from autotune.records import Cause
from autotune.stages import StageLimits, StageRunner

HERE = Path(__file__).resolve().parent
LIMITS = StageLimits(600.0)
FILES = ("model.onnx", "eval.npz", "calib.npz", "meta.json")
# Metrics of such folders that are none of the built-in ones, by their words in meta.json.
OWN_METRICS = {"share of lines without error": "lines_right", "perplexity": "token_loss"}
TIMED_ROWS = 64


@dataclass(frozen=True)
class ModelFolder:
    """A model with its data; `metric` as a metric is named, with `root` for a script's path."""

    path: Path
    task: str
    metric: str
    root: Path

    @classmethod
    def open(cls, path: Path) -> ModelFolder:
        """Read `meta.json`. Raises what reading a missing or damaged file raises."""
        meta = json.loads((path / "meta.json").read_text())
        own = OWN_METRICS.get(meta["metric"])
        return cls(path, meta.get("task", path.name), f"model_scores.py:{own}" if own else meta["metric"], HERE if own else path)

    @property
    def name(self) -> str:
        return self.path.name

    def row_count(self) -> int:
        return count_rows(load_arrays(self.path / "eval.npz"))

    def metric_facts(self) -> Metric:
        return get_metric(self.metric, root=self.root)


def folders_in(place: Path, only: Sequence[str] = ()) -> list[ModelFolder]:
    """The folders of models in a folder, by name."""
    return [ModelFolder.open(p) for p in sorted(place.iterdir()) if all((p / f).is_file() for f in FILES) and (not only or p.name in only)]


@dataclass(frozen=True)
class Measured:
    """What a stage returned, or None; then `status` (invalid or failed), `cause` and `message` say why."""

    value: dict[str, Any] | None
    status: str = "ok"
    cause: Cause | None = None
    message: str = ""


def run_stage(runner: StageRunner, name: str, args: Mapping[str, Any], where: Path, *, limits: StageLimits = LIMITS, alone: bool = False) -> Measured:
    """Run a measuring stage in a child, with the device's lane held as a sweep holds it: alone to time, with other builders otherwise."""
    where.mkdir(parents=True, exist_ok=True)
    runner.start()  # before the lane is ours: loading libraries would disturb whoever times
    with lane("CPUExecutionProvider", exclusive=alone):
        outcome = runner.run(f"autotune.benchmarks.stages:{name}", {**args, "out": str(where)}, folder=where, limits=limits)
    if outcome.value is None:
        return Measured(None, "failed", outcome.cause, outcome.message)
    if outcome.value.get("verdict") == "invalid":
        return Measured(None, "invalid", Cause(outcome.value["cause"]), outcome.value["message"])
    return Measured(outcome.value)


def check_model(
    runner: StageRunner, model: ONNXModelHandler, base: ONNXModelHandler | None, folder: ModelFolder, where: Path, *, rows: int = 4
) -> Measured:
    """Find out whether a model is fit to be measured, as a sweep does."""
    args = {
        "model": model.to_json(),
        "baseline": base.to_json() if base else None,
        "data": str(folder.path / "eval.npz"),
        "rows": list(range(min(rows, folder.row_count()))),
        "batch_size": 1,
    }
    return run_stage(runner, "check", args, where)


def score_model(runner: StageRunner, model: ONNXModelHandler, folder: ModelFolder, where: Path, *, baseline: Path | None) -> Measured:
    """Score a model over all evaluation rows, paired with the outputs that this kept of the float model, or None for the float model itself."""
    args = {
        "model": model.to_json(),
        "data": str(folder.path / "eval.npz"),
        "batch_size": 1,
        "rows": list(range(folder.row_count())),
        "metric": folder.metric,
        "root": str(folder.root),
        "baseline_outputs": str(baseline) if baseline else None,
        "seed": 0,
    }
    return run_stage(runner, "accuracy", args, where)


def time_model(
    runner: StageRunner, model: ONNXModelHandler, base: ONNXModelHandler | None, data: Path, where: Path, *, seconds: float,
    before: Sequence[float] = (),
) -> Measured:  # fmt: skip
    """Time a model beside the float model (None: the float model itself) on rows of `data`, for about `seconds` at most.

    `before`: what the float model took in earlier measurements, ms.
    """
    args = {
        "model": model.to_json(),
        "baseline": base.to_json() if base else None,
        "data": str(data),
        "batch_size": 1,
        "rows": list(range(min(TIMED_ROWS, count_rows(load_arrays(data))))),
        "protocol": {"max_time_ns": round(seconds * 1e9)},
        "seed": 0,
        "before": list(before),
    }
    return run_stage(runner, "latency", args, where, alone=True)
