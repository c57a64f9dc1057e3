"""The measuring stages of a trial: `check`, `accuracy`, `latency`. Each runs in a child process, takes and returns plain JSON data.

Arrays go into files in the folder `args["out"]`. A candidate's fault is a verdict (`invalid`, with its cause); what a library raises
goes through, for the engine to record.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.benchmarks import statistics
from autotune.benchmarks.accuracy import RunOutputs, compare, load_outputs, run_outputs, save_outputs
from autotune.benchmarks.latency import (
    LatencyProtocol,
    PairedSamples,
    RunOnce,
    measure_paired,
    missing_percentiles,
    relative_width,
    summarize,
    summarize_baseline,
)
from autotune.benchmarks.measurer import Measurer, get_measurer
from autotune.benchmarks.memory import peak_memory
from autotune.benchmarks.metrics import Array, BadOutput, Features, Metric, NotFiniteScore, check_labels, get_metric
from autotune.data import LABELS, Arrays, feeds, load_arrays, plan_feeding
from autotune.digest import dump_json
from autotune.errors import ConfigError
from autotune.model import IoContract, ONNXModelHandler, handler_from_json
from autotune.records import Cause, MetricValue, Status
from autotune.session import SessionSettings, create_session, not_applied, read_back, thread_count

if TYPE_CHECKING:
    import onnx
    import onnxruntime as ort

Json = dict[str, Any]

OUTPUTS_FILE = "outputs.npz"
SCORES_FILE = "scores.npz"
LATENCY_FILE = "latency.npz"
RECORD_PLACEMENT = "session.record_ep_graph_assignment_info"
STOP_SPINNING = "session.force_spinning_stop"
ERROR_LINE = re.compile(r"\[E:onnxruntime:[^\]]*\]\s*(.*?)(?:\x1b\[m|$)", re.MULTILINE)
MOST_LOG_BYTES = 1_000_000
CONSTANT_SPREAD = 0.05  # 12 steps of an 8-bit output


def _invalid(cause: Cause, message: str, **facts: Any) -> Json:
    return _plain({"verdict": str(Status.INVALID), "cause": str(cause), "message": message, **facts})


def _ok(**facts: Any) -> Json:
    return _plain({"verdict": "ok", "cause": None, "message": "", **facts})


def _plain(facts: Json) -> Json:
    """JSON data as it will be read back: a number that JSON can't hold is None."""
    return json.loads(dump_json(facts, indent=None))  # type: ignore[no-any-return]  # a dict goes in


def _onnx_handler(data: Mapping[str, Any]) -> ONNXModelHandler:
    handler = handler_from_json(data)
    if not isinstance(handler, ONNXModelHandler):
        raise ConfigError("measuring", "only an ONNX model can be measured", f"one in {handler.format} format", "End the chain with a conversion.")
    return handler


# check ----------------------------------------------------------------------------------------------------------------------


def check(args: Mapping[str, Any]) -> Json:
    """Find out, on a few rows and before anything is timed, whether a model is fit to be measured.

    `args`: `model` and `baseline` (handlers as JSON; baseline None for the baseline itself), `data` (.npz), `rows`, `batch_size`, `out`.
    The model is opened as deployed. Verdict `invalid`: settings that did not take effect (`not_applied`), no node on the target EP
    (`ep_fallback`), NaN or infinities that the baseline does not have (`not_finite`), other inputs or outputs than the baseline's, or
    the same answer to everything (`bad_output`). A large error alone is a fact, not a fault: accuracy judges it.
    """
    model, out = _onnx_handler(args["model"]), Path(args["out"])
    arrays = load_arrays(Path(args["data"]))
    rows = [int(r) for r in args["rows"]]
    settings = _with_entry(model.session, RECORD_PLACEMENT, "1")
    threads_before = thread_count()
    opened_s = 0.0

    def load_and_run() -> tuple[ort.InferenceSession, RunOutputs]:
        nonlocal opened_s
        began = time.perf_counter()
        session = create_session(model.path, settings)
        opened_s = time.perf_counter() - began
        return session, _run_rows(session, arrays, model.io, int(args["batch_size"]), rows)

    with _error_lines() as complaints:
        (session, got), memory = peak_memory(load_and_run)
    facts: Json = {
        "size_bytes": model.size_bytes, "peak_memory_bytes": memory.growth_bytes, "peak_memory_exact": memory.exact,
        "process_peak_bytes": memory.peak_bytes, "open_s": opened_s, "extra_threads": max(0, thread_count() - threads_before),
        "session": read_back(session, settings), "placement": placement(session), "op_histogram": op_histogram(model.path),
        "checker": _checker_message(model.path), "log_errors": complaints,
        "outputs": {n: {"dtype": str(a.dtype), "shape": list(a.shape)} for n, a in got.arrays.items()},
    }  # fmt: skip
    save_outputs(out / OUTPUTS_FILE, got)
    differing = not_applied(settings, facts["session"])
    del session
    if differing:
        return _invalid(Cause.NOT_APPLIED, "; ".join(differing), **facts)
    target = model.session.execution_provider
    if facts["placement"] and target not in facts["placement"]:
        where = ", ".join(f"{n} on {ep}" for ep, n in facts["placement"].items())
        return _invalid(Cause.EP_FALLBACK, f"no node runs on {target}: {where}", **facts)
    if complaints and args.get("baseline") is not None:
        known = {_without_numbers(line) for line in _complaints_about(_onnx_handler(args["baseline"]))}
        new = [line for line in complaints if _without_numbers(line) not in known]
        if new:
            return _invalid(Cause.NOT_APPLIED, f"ONNX Runtime logged an error and went on: {new[0]}", **facts)
    if args.get("baseline") is None:
        if not got.finite and any(np.isnan(a).any() for a in got.arrays.values() if a.dtype.kind == "f"):
            return _invalid(Cause.NOT_FINITE, f"NaN in output {_first_not_finite(got.arrays)} on {len(rows)} rows", **facts)
        return _ok(**facts)
    return _compared_with_baseline(_onnx_handler(args["baseline"]), model, arrays, rows, int(args["batch_size"]), got, facts)


@contextlib.contextmanager
def _error_lines() -> Iterator[list[str]]:
    """Collect what ONNX Runtime logs as errors without raising them: settings that it could not apply, such as an affinity to no CPU.

    It writes to the process's standard error, so that is where they are read; everything read is written on.
    """
    found: list[str] = []
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield found
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_LOG_BYTES))
            text = file.read()
            with contextlib.suppress(OSError):
                os.write(2, text)
            found += dict.fromkeys(m[1].strip()[:300] for m in ERROR_LINE.finditer(text.decode(errors="replace")))


def _complaints_about(baseline: ONNXModelHandler) -> list[str]:
    """What ONNX Runtime logs as errors of the model as it is: its own affair, and no fault of a candidate's."""
    with _error_lines() as found:
        create_session(baseline.path, baseline.session)
    return found


def _without_numbers(line: str) -> str:
    """A line of a log without what differs from run to run, such as thread numbers."""
    return re.sub(r"\d+", "0", line)


def _compared_with_baseline(
    baseline: ONNXModelHandler, model: ONNXModelHandler, arrays: Arrays, rows: Sequence[int], batch_size: int, got: RunOutputs, facts: Json
) -> Json:
    fault = io_fault(model.io, baseline.io)
    if fault:
        return _invalid(Cause.BAD_OUTPUT, fault, **facts)
    session = create_session(baseline.path, baseline.session)
    wanted = _run_rows(session, arrays, baseline.io, batch_size, rows)
    del session
    facts["error"] = {}
    inputs_axes = {axis for spec in baseline.io.inputs for axis in spec.shape or () if isinstance(axis, str)}
    for spec in baseline.io.outputs:
        fault = shape_fault(spec.name, got.arrays[spec.name], wanted.arrays[spec.name], spec.shape, inputs_axes)
        if fault:
            return _invalid(Cause.BAD_OUTPUT, fault, **facts)
        facts["error"][spec.name] = output_error(got.arrays[spec.name], wanted.arrays[spec.name])
    if not got.finite:
        # The padding of ragged outputs is NaN too, but `finite` was judged before it.
        worse = [n for n, a in got.arrays.items() if _not_finite(a) > _not_finite(wanted.arrays[n])]
        if wanted.finite or worse:
            names = ", ".join(worse) or _first_not_finite(got.arrays)
            return _invalid(Cause.NOT_FINITE, f"NaN or infinite values in output {names}, where the baseline has finite ones", **facts)
    if constant_answer(got.arrays, wanted.arrays):
        return _invalid(Cause.BAD_OUTPUT, f"the same output for all {len(rows)} rows tried, where the baseline's differ", **facts)
    return _ok(**facts)


def _run_rows(session: ort.InferenceSession, arrays: Arrays, io: IoContract, batch_size: int, rows: Sequence[int]) -> RunOutputs:
    return run_outputs(session, arrays, io, plan_feeding(arrays, io, batch_size=batch_size), rows)


def _with_entry(settings: SessionSettings, key: str, value: str) -> SessionSettings:
    """Settings with one more config entry, unless they hold it already."""
    return settings if key in settings.config_entries else settings.with_entries(**{key.replace(".", "__"): value})


def placement(session: ort.InferenceSession) -> dict[str, int]:
    """Count nodes by execution provider, after ONNX Runtime's own graph changes; empty where it does not tell."""
    ask = getattr(session, "get_provider_graph_assignment_info", None)
    if ask is None:
        return {}
    counts: Counter[str] = Counter()
    for part in ask():
        counts[part.ep_name] += len(part.get_nodes())
    return dict(counts)


def op_histogram(path: Path) -> dict[str, int]:
    """Count the operators of a model by type, those in subgraphs and local functions included; other domains stand before a dot."""
    import onnx

    proto = onnx.load(str(path), load_external_data=False)
    counts: Counter[str] = Counter()

    def visit(nodes: Iterator[onnx.NodeProto]) -> None:
        for node in nodes:
            counts[f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type] += 1
            for attribute in node.attribute:
                for graph in [attribute.g, *attribute.graphs]:
                    visit(iter(graph.node))

    visit(iter(proto.graph.node))
    for function in proto.functions:
        visit(iter(function.node))
    return dict(sorted(counts.items()))


def _checker_message(path: Path) -> str:
    """What the ONNX checker objects to, or nothing. Not fatal: ONNX Runtime runs some models that the checker does not know."""
    import onnx

    try:
        onnx.checker.check_model(str(path))
    except Exception as error:  # the checker raises errors of many kinds, and none of them may end a trial that runs
        return str(error).strip().split("\n", 1)[0][:300] or type(error).__name__
    return ""


def io_fault(got: IoContract, wanted: IoContract) -> str:
    """Say how names, order or types of inputs and outputs differ from the baseline's; empty when they are the same."""
    for kind, ours, theirs in (("inputs", got.inputs, wanted.inputs), ("outputs", got.outputs, wanted.outputs)):
        mine, base = [(s.name, s.dtype) for s in ours], [(s.name, s.dtype) for s in theirs]
        if mine != base:
            return f"{kind} must be the baseline's, {_named(base)}; the model has {_named(mine)}"
    return ""


def _named(specs: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {dtype}" for name, dtype in specs) or "none"


def shape_fault(name: str, got: Array, wanted: Array, declared: tuple[int | str | None, ...] | None, input_axes: set[str]) -> str:
    """Say how an output's type or shape is wrong; empty when it is right.

    An axis whose name no input has is one that the data decides (steps of a loop, detections): it may differ from the baseline's.
    """
    if got.dtype != wanted.dtype:
        return f"output {name!r} must be {wanted.dtype}; it is {got.dtype}"
    if got.ndim != wanted.ndim:
        return f"output {name!r} must have shape {list(wanted.shape)}; it has {list(got.shape)}"
    extra = got.ndim - len(declared) if declared is not None else 0  # one axis more when each example is a run
    for axis, (have, want) in enumerate(zip(got.shape, wanted.shape, strict=True)):
        symbol = declared[axis - extra] if declared is not None and 0 <= axis - extra < len(declared) else None
        free = axis > 0 and (symbol not in input_axes if isinstance(symbol, str) else declared is None or (symbol is None and axis >= extra))
        if have != want and not free:
            return f"output {name!r} must have shape {list(wanted.shape)}; it has {list(got.shape)}"
    return ""


def output_error(got: Array, wanted: Array) -> Json:
    """Error of one output against the baseline's: largest difference, cosine, signal to noise in dB; share equal for whole numbers."""
    if got.shape != wanted.shape:
        return {"identical": False, "same_shape": False}
    if got.dtype.kind != "f":
        return {"identical": bool((got == wanted).all()), "share_equal": float(np.mean(got == wanted)) if got.size else 1.0}
    a, b = got.astype(np.float64).ravel(), wanted.astype(np.float64).ravel()
    both = np.isfinite(a) & np.isfinite(b)
    identical = bool(np.array_equal(got, wanted, equal_nan=True))
    a, b = a[both], b[both]
    noise, signal = float(((a - b) ** 2).sum()), float((b * b).sum())
    norm = math.sqrt(float((a * a).sum()) * signal)
    return {
        "identical": identical, "max_abs": float(np.abs(a - b).max()) if a.size else 0.0,
        "cosine": float((a * b).sum()) / norm if norm > 0 else None,
        "sqnr_db": 10 * math.log10(signal / noise) if noise > 0 and signal > 0 else None,
    }  # fmt: skip


def constant_answer(got: Mapping[str, Array], wanted: Mapping[str, Array]) -> bool:
    """Say whether a model gives one and the same answer where the baseline's answers clearly differ.

    Float outputs are looked at (whole numbers where there are none). They must differ by more than 5 % of the larger of 1 and their
    largest value: less than that, the steps of a sound 8-bit output may swallow.
    """
    floats = [n for n, a in wanted.items() if a.dtype.kind == "f"]
    names = floats or [n for n, a in wanted.items() if a.dtype.kind in "iub"]
    varied = 0
    for name in names:
        a, b = got[name], wanted[name]
        if a.ndim == 0 or len(a) < 2 or len(a) != len(b):
            continue
        reference = np.nan_to_num(b.astype(np.float64).reshape(len(b), -1), nan=0.0, posinf=0.0, neginf=0.0)
        if not reference.size or np.ptp(reference, axis=0).max() <= CONSTANT_SPREAD * max(1.0, np.abs(reference).max()):
            continue
        varied += 1
        if any(not np.array_equal(row, a[0], equal_nan=a.dtype.kind == "f") for row in a[1:]):
            return False
    return varied > 0


def _not_finite(array: Array) -> int:
    return int((~np.isfinite(array)).sum()) if array.dtype.kind == "f" else 0


def _first_not_finite(arrays: Mapping[str, Array]) -> str:
    return next((n for n, a in arrays.items() if _not_finite(a)), "")


# accuracy -------------------------------------------------------------------------------------------------------------------


def accuracy(args: Mapping[str, Any]) -> Json:
    """Score a model on rows of the evaluation data, as deployed, and compare it with the baseline on the same rows.

    `args`: `model`, `data`, `metric` (name), `root` (folder of the user's scripts), `rows`, `batch_size`, `out`, `seed` (0) and
    `baseline_outputs`: the `outputs.npz` that this stage wrote for the baseline on the same rows, or None for the baseline itself.
    Writes `outputs.npz` (what the metric reads) and `scores.npz` (scores per example, or the columns that a metric over sets is made
    of). Returns the MetricValue as JSON under `metric`.
    """
    model, out = _onnx_handler(args["model"]), Path(args["out"])
    arrays = load_arrays(Path(args["data"]))
    metric = get_metric(args["metric"], root=Path(args["root"]) if args.get("root") else None)
    check_labels(metric, arrays)
    rows = [int(r) for r in args["rows"]]
    labels = None if metric.reference == "baseline" or LABELS not in arrays else metric.select(arrays[LABELS], rows)
    session = create_session(model.path, model.session)
    began = time.perf_counter()
    outputs = run_outputs(
        session, arrays, model.io, plan_feeding(arrays, model.io, batch_size=int(args["batch_size"])), rows,
        keep=_keeper(metric, arrays), always=metric.used is not None,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    del session
    save_outputs(out / OUTPUTS_FILE, outputs)
    baseline = load_outputs(Path(args["baseline_outputs"])) if args.get("baseline_outputs") else None
    facts: Json = {"metric": None, "metric_name": metric.name, "rows": len(rows), "seconds": seconds, "finite": outputs.finite}
    if not outputs.finite and (baseline is None or baseline.finite):
        return _invalid(Cause.NOT_FINITE, f"NaN or infinite values in the outputs over {len(rows)} rows", **facts)
    try:
        reference: Any = labels if labels is not None else (baseline or outputs).arrays if metric.reference == "baseline" else None
        value = compare(metric, outputs.arrays, baseline.arrays if baseline else None, reference, seed=int(args.get("seed", 0)))
        _save_scores(out / SCORES_FILE, metric.features(outputs.arrays, reference, len(rows)), rows)
    except NotFiniteScore as error:
        return _invalid(Cause.NOT_FINITE, str(error), **facts)
    except BadOutput as error:
        return _invalid(Cause.BAD_OUTPUT, str(error), **facts)
    return _ok(**{**facts, "metric": value.to_json()})


def _keeper(metric: Metric, arrays: Arrays) -> Callable[[Arrays, list[int]], list[str]]:
    """Name the outputs that the metric reads, from the first run's."""

    def keep(first: Arrays, rows: list[int]) -> list[str]:
        return metric.outputs_used(first, arrays[LABELS][rows] if LABELS in arrays else None, len(rows))

    return keep


def _save_scores(path: Path, features: Features, rows: Sequence[int]) -> None:
    columns = {f"column_{i}": column for i, column in enumerate(features.columns)}
    np.savez(path, allow_pickle=False, rows=np.array(rows, np.int64), **columns)


# latency --------------------------------------------------------------------------------------------------------------------


def latency(args: Mapping[str, Any]) -> Json:
    """Time a model beside the baseline, as deployed, in fresh sessions in turns.

    `args`: `model`, `baseline` (None for the baseline itself: two sessions of the same model are timed, and all ratios are 1),
    `data`, `rows` (their feeds are cycled), `batch_size`, `protocol` (fields of LatencyProtocol; defaults for the rest), `seed`, `out`,
    and `measurer` with `root`: a user's function that times in place of this stage (verdict `invalid` where what it returns can't be
    used). Sessions of several threads are told to stop spinning between runs, both alike: two that spin disturb each other. Writes every
    run into `latency.npz` and returns MetricValues as JSON under `metrics`.
    """
    model, out = _onnx_handler(args["model"]), Path(args["out"])
    itself = args.get("baseline") is None
    baseline = model if itself else _onnx_handler(args["baseline"])
    protocol = LatencyProtocol.from_json(args.get("protocol") or {})
    arrays = load_arrays(Path(args["data"]))
    rows = [int(r) for r in args["rows"]]
    spin_stopped = _has_threads(model.session) or _has_threads(baseline.session)
    sides = [_Side(handler, arrays, rows, int(args["batch_size"]), stop_spinning=spin_stopped) for handler in (model, baseline)]
    seed = int(args.get("seed", 0))
    measurer = get_measurer(args["measurer"], root=Path(args["root"])) if args.get("measurer") else None
    try:
        if measurer is None:
            samples = measure_paired(sides[0].open, sides[1].open, protocol, seed=seed)
        else:
            samples = _measured_by(measurer, sides, protocol, seed)
    except NotFiniteScore as error:
        return _invalid(Cause.NOT_FINITE, str(error))
    except BadOutput as error:
        return _invalid(Cause.BAD_OUTPUT, str(error))
    np.savez(
        out / LATENCY_FILE, allow_pickle=False, candidate_ns=samples.candidate_ns, baseline_ns=samples.baseline_ns, session=samples.session,
        candidate_first=samples.candidate_first, candidate_first_ns=samples.candidate_first_ns, baseline_first_ns=samples.baseline_first_ns,
    )  # fmt: skip
    metrics = summarize(samples, examples_a_run=sides[0].examples_a_run, seed=seed, itself=itself)
    in_baseline = summarize_baseline(samples)
    if measurer is not None:
        metrics = {name: _told_by(measurer, value) for name, value in metrics.items()}
        in_baseline = _told_by(measurer, in_baseline)
    measured = samples.ratio()
    return _ok(
        metrics={name: value.to_json() for name, value in metrics.items()},
        baseline_metrics={"latency": in_baseline.to_json()}, measured_ratio=measured.to_json(),
        not_enough_runs=missing_percentiles(samples), noisy=samples.noisy, ratio_width=relative_width(measured),
        foreign_load=samples.foreign_load, rounds=samples.rounds, session_pairs=int(samples.session[-1]) + 1,
        runs_a_block=samples.candidate_ns.shape[1], stopped_by=samples.stopped_by, elapsed_s=samples.elapsed_ns / 1e9,
        spinning_stopped=spin_stopped and measurer is None, confidence=statistics.CONFIDENCE,
        protocol=protocol.to_json() if measurer is None else {"measurer": measurer.name, "rounds": protocol.min_runs},
    )  # fmt: skip


def _measured_by(measurer: Measurer, sides: Sequence[_Side], protocol: LatencyProtocol, seed: int) -> PairedSamples:
    """Ask a user's measurer for as many rounds as the percentiles need where a round is one run."""
    candidate, baseline = sides
    return measurer.measure(
        model=candidate.model.path, baseline=baseline.model.path, session=candidate.model.session.to_json(),
        baseline_session=baseline.model.session.to_json(), inputs=candidate.feeds[0], rounds=protocol.min_runs, seed=seed,
    )  # fmt: skip


def _told_by(measurer: Measurer, value: MetricValue) -> MetricValue:
    return replace(value, method=f"timed by {measurer.name}, each of its rounds taken as a session pair; {value.method}")


def _has_threads(settings: SessionSettings) -> bool:
    return settings.intra_op_num_threads != 1 or (settings.execution_mode == "parallel" and settings.inter_op_num_threads != 1)


class _Side:
    """One of the two models: opens fresh sessions, and goes on with the next feed where the last session left off."""

    def __init__(self, model: ONNXModelHandler, arrays: Arrays, rows: Sequence[int], batch_size: int, *, stop_spinning: bool) -> None:
        self.model = model
        self.settings = _with_entry(model.session, STOP_SPINNING, "1") if stop_spinning else model.session
        feeding = plan_feeding(arrays, model.io, batch_size=batch_size)
        self.examples_a_run = feeding.rows_per_run()
        self.feeds = [feed for feed, _ in feeds(arrays, model.io, feeding, rows)]
        self.position = 0

    def open(self) -> RunOnce:
        run = create_session(self.model.path, self.settings).run
        fed = self.feeds

        def run_once() -> object:
            position = self.position
            self.position = position + 1 if position + 1 < len(fed) else 0
            return run(None, fed[position])

        return run_once
