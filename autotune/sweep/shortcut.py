"""A sweep from a few words: a sensible chain, starting points and limits for a model and what is known of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.benchmarks.metrics import get_metric
from autotune.config import LoadedSweep, SweepConfig, parse_sweep
from autotune.data import LABELS, load_arrays
from autotune.errors import ConfigError
from autotune.sweep.prepare import count_operators
from autotune.target import SHORT_PROVIDER_NAMES

QUANTIZABLE = ("Conv", "ConvTranspose", "MatMul", "Gemm", "LSTM", "GRU", "Attention", "Gather")
DEFAULT_DROP = "1.0pt"


@dataclass(frozen=True)
class Shortcut:
    """What the command line's short form may say. None: not said, so it is chosen here."""

    model: Path
    eval: Path | None = None
    calibration: Path | None = None
    metric: str | None = None
    constraints: tuple[str, ...] = ()
    objectives: tuple[str, ...] = ()
    trials: int = 30
    time: str | None = None
    seed: int = 0
    threads: int | None = None
    ep: str = "cpu"
    batch_size: int = 1
    pick: str = "fastest"
    strict: bool = False


def sweep_from(short: Shortcut) -> tuple[LoadedSweep, list[str]]:
    """Write out the sweep that a short form stands for, and say in words what was chosen. Raises `ConfigError`."""
    said: list[str] = []
    model, eval_path, calibration, meta = _files(short)
    metric = short.metric or _metric_of(meta, eval_path, said)
    constraints = list(short.constraints)
    if not constraints:
        constraints = _default_constraints(metric, said)
    operators = _operators(model)
    chain, start = _chain(operators, calibrated=calibration is not None)
    if SHORT_PROVIDER_NAMES.get(short.ep.lower(), short.ep) != "CPUExecutionProvider":
        start = []  # these points are known to be good on CPUs; other targets may not run their types at all
    data: dict[str, Any] = {
        "schema": 1, "model": {"path": str(model)}, "data": {"eval": str(eval_path)}, "metric": metric,
        "objectives": list(short.objectives) or ["latency", "score"], "constraints": constraints,
        "target": {"ep": short.ep, "batch_size": short.batch_size}, "chain": chain, "search": {"start": start},
        "budget": {"trials": short.trials}, "seed": short.seed, "pick": short.pick, "strict": short.strict,
    }  # fmt: skip
    if calibration is not None:
        data["data"]["calibration"] = str(calibration)
    else:
        said.append("no calibration data: static quantization is left out of the search")
    if short.threads is not None:
        data["target"]["threads"] = short.threads
    if short.time is not None:
        data["budget"]["time"] = short.time
    config: SweepConfig = parse_sweep(data, source="command line")
    return LoadedSweep(config, Path.cwd(), "command line"), said


def _files(short: Shortcut) -> tuple[Path, Path, Path | None, Mapping[str, Any]]:
    """The model and its data; a folder given as the model may hold them all under their usual names."""
    model = short.model.resolve()
    folder = model if model.is_dir() else model.parent
    if model.is_dir():
        model = model / "model.onnx"
    if model.suffix == ".py":
        raise ConfigError(
            "run", "the short form takes an ONNX model", model.name, "Describe a torch model in a sweep file: model: {script: ..., loader: ...}."
        )
    whole = short.model.is_dir()
    eval_path = short.eval or (folder / "eval.npz" if whole else None)
    if eval_path is None:
        raise ConfigError("run", "evaluation data must be given", "no --eval", "Give --eval FILE.npz with one array per model input and `labels`.")
    calibration = short.calibration
    if calibration is None and whole and (folder / "calib.npz").is_file():
        calibration = folder / "calib.npz"
    meta: Mapping[str, Any] = {}
    if (folder / "meta.json").is_file():
        try:
            meta = json.loads((folder / "meta.json").read_text())
        except ValueError as error:
            raise ConfigError("run", "meta.json beside the model must be JSON", str(error)) from error
    return model, Path(eval_path).resolve(), Path(calibration).resolve() if calibration else None, meta if isinstance(meta, dict) else {}


def _metric_of(meta: Mapping[str, Any], eval_path: Path, said: list[str]) -> str:
    if isinstance(meta.get("metric"), str):
        said.append(f"metric {meta['metric']!r}, from meta.json")
        return str(meta["metric"])
    arrays = load_arrays(eval_path, who="data.eval")
    labels = arrays.get(LABELS)
    if labels is None:
        said.append("no labels: the metric is cosine agreement with the model as it is")
        return "cosine"
    if labels.ndim == 1 and labels.dtype.kind in "iu":
        said.append("metric accuracy, since the labels are whole numbers")
        return "accuracy"
    raise ConfigError(
        "run",
        "the metric must be given for labels of this kind",
        f"{labels.dtype} of shape {list(labels.shape)}",
        "Give --metric, such as mse or script.py:function.",
    )


def _default_constraints(metric_name: str, said: list[str]) -> list[str]:
    metric = get_metric(metric_name, root=Path.cwd())
    sign, sense, factor = ("-", ">=", 0.99) if metric.higher_is_better else ("+", "<=", 1.05)
    text = f"score {sense} baseline {sign} {DEFAULT_DROP}" if metric.unit == "share" else f"score {sense} baseline * {factor}"
    if metric.reference == "baseline":  # agreement with the model as it is: its own is 1
        text = "score >= 0.99"
    said.append(f"no --constraint: `{text}` is taken")
    return [text]


def _operators(model: Path) -> Mapping[str, int]:
    from autotune.model import read_onnx_head

    read_onnx_head(model)  # says in words what is wrong with a file that is no model
    return count_operators(model)


def _chain(operators: Mapping[str, int], *, calibrated: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Slots that can help this model, and points known to be good on CPUs like it."""
    attention = operators.get("Softmax", 0) > 0 and operators.get("MatMul", 0) >= 4 and bool({"Erf", "Tanh", "Gelu"} & set(operators))
    quantizable = any(op in operators for op in QUANTIZABLE)
    chain: list[dict[str, Any]] = []
    if attention:
        chain.append({"slot": "fuse", "pass": "OrtTransformersOptimization", "optional": True})
    chain.append({"slot": "optimize", "pass": "OnnxModelOptimizer", "optional": True, "params": {"optimizer": "SEARCH"}})
    if quantizable:
        chain.append({"slot": "quantize", "pass": "OnnxQuantization", "optional": True})
    # On the models of docs/main-job.md a lower graph level was up to 2.6 times slower and not faster: it would take half of the trials.
    chain.append({"slot": "session", "pass": "OrtPerfTuning", "params": {"graph_optimization_level": "all"}})
    off: dict[str, Any] = {"optimize": None, **({"fuse": None} if attention else {})}
    start: list[dict[str, Any]] = []
    if quantizable:
        static: list[dict[str, Any]] = [
            {"op_types_to_quantize": "all"},
            {"op_types_to_quantize": "all", "calibrate_method": "percentile"},
            {"op_types_to_quantize": "all", "calibrate_method": "entropy"},
            {"op_types_to_quantize": "matmul"},
            {"op_types_to_quantize": "conv+matmul"},
        ]
        dynamic: list[dict[str, Any]] = [{"op_types_to_quantize": "matmul"}]
        if calibrated:
            start += [{**off, **_quantize("static", values)} for values in static]
        start += [{**off, **_quantize("dynamic", values)} for values in dynamic]
        if attention:
            start.append({"optimize": None, "fuse": "OrtTransformersOptimization", **_quantize("dynamic", {"op_types_to_quantize": "matmul"})})
    return chain, start


def _quantize(mode: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"quantize": "OnnxQuantization", "quantize.quant_mode": mode, **{f"quantize.{k}": v for k, v in values.items()}}
