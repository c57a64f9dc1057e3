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
from autotune.benchmarks.accuracy import RunOutputs, compare_features, load_outputs, run_outputs, save_outputs
from autotune.benchmarks.denormals import look_for_denormals
from autotune.benchmarks.latency import (
    LatencyProtocol,
    PairedSamples,
    RunOnce,
    StopAbove,
    measure_paired,
    missing_percentiles,
    relative_width,
    summarize,
    summarize_baseline,
)
from autotune.benchmarks.measurer import Measurer, get_measurer
from autotune.benchmarks.memory import peak_memory
from autotune.benchmarks.metrics import Array, BadOutput, Features, Labels, Metric, NotFiniteScore, check_labels, get_metric
from autotune.benchmarks.occasions import Occasions, widen_all
from autotune.benchmarks.racing import Rules, Stop, look, look_sizes, race_for
from autotune.benchmarks.watch import Reading
from autotune.data import LABELS, Arrays, feeds, load_arrays, plan_feeding
from autotune.digest import dump_json
from autotune.errors import AutotuneError, ConfigError
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
ERROR_LINE = re.compile(r"\[[EF]:onnxruntime:[^\]]*\]\s*(.*?)(?:\x1b\[m|$)", re.MULTILINE)
MOST_LOG_BYTES = 1_000_000
CONSTANT_SPREAD = 0.05  # 12 steps of an 8-bit output
DENORMAL_ROWS = 2
EVERY_NODE, SOME_NODE = "all", "primary"
CLOCK_STEP_NS = 100_000  # a clock that moves in larger steps can't time single runs


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

    `args`: `model` and `baseline` (handlers as JSON; baseline None for the baseline itself), `data` (.npz), `rows`, `batch_size`, `out`,
    and `require_ep`: `primary` (some node runs on the target EP), `all`, or the share of nodes that must.
    The model is opened as deployed. Verdict `invalid`: settings that did not take effect, threads that were not started, or an error that
    the runtime only logged (`not_applied`), too few nodes on the target EP (`ep_fallback`), NaN or infinities that the baseline does not have
    (`not_finite`), other inputs or outputs than the baseline's, or the same answer to everything (`bad_output`). Facts and no faults: a
    large error, which accuracy judges; `denormals`, which cost time; `no_op`, what a chain left as it was.
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
        "denormals": look_for_denormals(model, _single_feeds(arrays, model.io, rows[:DENORMAL_ROWS])),
        "outputs": {n: {"dtype": str(a.dtype), "shape": list(a.shape)} for n, a in got.arrays.items()},
    }  # fmt: skip
    save_outputs(out / OUTPUTS_FILE, got)
    differing = [*not_applied(settings, facts["session"]), *threads_not_started(model.session, facts["extra_threads"])]
    del session
    if differing:
        return _invalid(Cause.NOT_APPLIED, "; ".join(differing), **facts)
    fault = placement_fault(facts["placement"], model.session.execution_provider, args.get("require_ep", SOME_NODE))
    if fault:
        return _invalid(Cause.EP_FALLBACK, fault, **facts)
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
    facts["no_op"] = ""
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
    facts["no_op"] = no_op(model, baseline, facts, identical=all(e["identical"] for e in facts["error"].values()))
    return _ok(**facts)


def no_op(model: ONNXModelHandler, baseline: ONNXModelHandler, facts: Mapping[str, Any], *, identical: bool) -> str:
    """Say what a chain left as it was; empty where it clearly did something to the model. Session settings are no part of this."""
    if model.size_bytes == baseline.size_bytes and model.digest == baseline.digest:
        return "the model's bytes are the baseline's"
    if facts["op_histogram"] != op_histogram(baseline.path) or weight_counts(model.path) != weight_counts(baseline.path):
        return ""
    return f"the model has the baseline's operators{', and on the rows tried its outputs to the last bit' if identical else ''}"


def _run_rows(session: ort.InferenceSession, arrays: Arrays, io: IoContract, batch_size: int, rows: Sequence[int]) -> RunOutputs:
    return run_outputs(session, arrays, io, plan_feeding(arrays, io, batch_size=batch_size), rows)


def _single_feeds(arrays: Arrays, io: IoContract, rows: Sequence[int]) -> list[Arrays]:
    return [feed for feed, _ in feeds(arrays, io, plan_feeding(arrays, io, batch_size=1), rows)]


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


def placement_fault(placed: Mapping[str, int], target: str, required: str | float) -> str:
    """Say how the placement of nodes misses what is required of the target EP; empty when it does not.

    `required`: `primary` (some node runs there), `all`, or a share of the nodes in (0, 1]. Where ONNX Runtime doesn't tell the placement,
    only `primary` can be met, by the session that names the EP.
    """
    where = ", ".join(f"{n} on {ep}" for ep, n in placed.items()) or "this ONNX Runtime does not tell where nodes run"
    here, count = placed.get(target, 0), sum(placed.values())
    if required == SOME_NODE:
        return f"no node runs on {target}: {where}" if placed and not here else ""
    least = 1.0 if required == EVERY_NODE else float(required)
    if count and here >= least * count - 1e-9:
        return ""
    return f"{'every node' if least == 1 else f'{least:.0%} of the nodes'} must run on {target}: {where}"


def threads_not_started(asked: SessionSettings, seen: int) -> list[str]:
    """Say, in words, that a session has started fewer threads of its own than asked; the caller's thread is the first of them."""
    wanted = asked.intra_op_num_threads - 1
    if wanted <= 0 or seen >= wanted or not thread_count():
        return []
    return [f"intra_op_num_threads: asked {asked.intra_op_num_threads}, the session started {seen} beside the caller's"]


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


def weight_counts(path: Path) -> dict[int, int]:
    """Numbers among a model's weights, those in subgraphs included, by their type (as in `onnx.TensorProto`): fewer where channels were pruned."""
    import onnx

    proto = onnx.load(str(path), load_external_data=False)
    counts: Counter[int] = Counter()

    def visit(graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            counts[tensor.data_type] += math.prod(tensor.dims)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    counts[attribute.t.data_type] += math.prod(attribute.t.dims)
                for inner in [attribute.g, *attribute.graphs]:
                    visit(inner)

    visit(proto.graph)
    return dict(counts)


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

    `args`: `model`, `data`, `metric` (name), `root` (folder of the user's scripts), `rows`, `batch_size`, `out`, `seed` (0),
    `baseline_outputs`: the `outputs.npz` that this stage wrote for the baseline on the same rows, or None for the baseline itself, and
    `race`: None, or the `rules` and the `baseline` (its MetricValue) by which it may stop at a look; see `autotune.benchmarks.racing`. Writes
    `outputs.npz` (what the metric reads) and `scores.npz` (scores per example, or the columns that a metric over sets is made of). Returns
    the MetricValue as JSON under `metric`, the number of rows run under `rows`, and under `stopped` why the rest was not: rule and words.
    """
    model, out = _onnx_handler(args["model"]), Path(args["out"])
    arrays = load_arrays(Path(args["data"]))
    metric = get_metric(args["metric"], root=Path(args["root"]) if args.get("root") else None)
    check_labels(metric, arrays)
    rows = [int(r) for r in args["rows"]]
    labels = None if metric.reference == "baseline" or LABELS not in arrays else metric.select(arrays[LABELS], rows)
    baseline = load_outputs(Path(args["baseline_outputs"])) if args.get("baseline_outputs") else None
    feeding = plan_feeding(arrays, model.io, batch_size=int(args["batch_size"]))
    looks = look_sizes(len(rows), step=feeding.rows_per_run())
    watch = _Watch(metric, labels, baseline, len(rows), args["race"], len(looks)) if baseline is not None and args.get("race") else None
    session = create_session(model.path, model.session)
    began = time.perf_counter()
    outputs = run_outputs(
        session, arrays, model.io, feeding, rows, keep=_keeper(metric, arrays), always=metric.used is not None,
        looks=looks if watch else (), stop=watch.stop if watch else None,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    del session
    save_outputs(out / OUTPUTS_FILE, outputs)
    ended = watch.found if watch else None
    done = watch.done if watch and (ended or not outputs.finite) and watch.done else len(rows)
    facts: Json = {
        "metric": None, "metric_name": metric.name, "rows": done, "of": len(rows), "seconds": seconds, "finite": outputs.finite,
        "looks": watch.looks if watch else [], "stopped": {"rule": ended.rule, "words": ended.words} if ended else None,
    }  # fmt: skip
    if not outputs.finite and (baseline is None or baseline.finite):
        return _invalid(Cause.NOT_FINITE, f"NaN or infinite values in the outputs over {done} rows", **facts)
    try:
        reference = _reference(metric, labels, baseline or outputs)
        if ended is not None:
            features, value = metric.features(outputs.arrays, _rows_of(reference, slice(done), len(rows)), done), ended.metric
        else:
            features = metric.features(outputs.arrays, reference, len(rows))
            others = metric.features(baseline.arrays, reference, len(rows)) if baseline else None
            value = compare_features(metric, features, others, seed=int(args.get("seed", 0)))
        _save_scores(out / SCORES_FILE, features, rows[:done])
    except NotFiniteScore as error:
        return _invalid(Cause.NOT_FINITE, str(error), **facts)
    except BadOutput as error:
        return _invalid(Cause.BAD_OUTPUT, str(error), **facts)
    return _ok(**{**facts, "metric": value.to_json()})


def _reference(metric: Metric, labels: Array | None, baseline: RunOutputs) -> Labels:
    """What outputs are compared with: labels, or for a metric of agreement the baseline's outputs."""
    return labels if labels is not None else baseline.arrays if metric.reference == "baseline" else None


def _rows_of(reference: Labels, part: slice, count: int) -> Labels:
    """Some of the `count` rows of labels, or of each output that has a row per example."""
    if isinstance(reference, Mapping):
        return {n: a[part] if a.ndim and len(a) == count else a for n, a in reference.items()}
    return None if reference is None else reference[part]


class _Watch:
    """Looks at a candidate's scores while it runs, and says when its outcome is certain."""

    def __init__(self, metric: Metric, labels: Array | None, baseline: RunOutputs, count: int, race: Mapping[str, Any], looks: int) -> None:
        self.metric, self.baseline, self.count = metric, baseline, count
        self.reference = _reference(metric, labels, baseline)
        self.rules, self.value = Rules.from_json(race["rules"]), MetricValue.from_json(race["baseline"])
        self.done = 0
        self.seen = np.empty(0)
        self.looks: list[Json] = []
        self.found: Stop | None = None
        scores = None
        if metric.kind != "set":
            with contextlib.suppress(AutotuneError):  # what is wrong is said when all rows are scored
                scores = metric.per_example(metric.features(baseline.arrays, self.reference, count))
        self.race = race_for(metric, scores, looks=looks)

    def stop(self, fresh: RunOutputs, done: int) -> bool:
        """Take in the rows since the last look."""
        part = slice(self.done, done)
        self.done = done
        if not fresh.finite and self.baseline.finite:
            return True
        if self.race is None:
            return False
        scores = self._scores(fresh.arrays, part)
        base = self._scores(_rows_of(self.baseline.arrays, part, self.count), part)
        if scores is None or base is None or not np.array_equal(base, self.race.baseline[part]):
            self.race = None  # a function whose score of an example depends on the others: a part of the rows says nothing
            return False
        self.seen = np.concatenate([self.seen, scores])
        difference = self.race.difference(self.seen)
        if difference is not None:
            self.looks.append({"rows": done, **difference.to_json()})
        self.found = look(self.race, self.seen, self.rules, self.value)
        return self.found is not None

    def _scores(self, outputs: Any, part: slice) -> Array | None:
        rows = part.stop - part.start
        with contextlib.suppress(AutotuneError):
            scores = self.metric.per_example(self.metric.features(outputs, _rows_of(self.reference, part, self.count), rows))
            if scores is not None and len(scores) == rows and np.isfinite(scores).all():
                return scores.astype(np.float64)
        return None


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
    `limits` (fields of StopAbove: to end early once the candidate is certainly above one), `before` (the baseline's latencies in earlier
    measurements, ms: the intervals tell how far it moved from one to the next, see `autotune.benchmarks.occasions`),
    and `measurer` with `root`: a user's function that times in place of this stage (verdict `invalid` where what it returns can't be
    used). Sessions of several threads are told to stop spinning between runs, both alike: two that spin disturb each other. Writes every
    run into `latency.npz`, with what was seen of the machine in each round, and returns MetricValues as JSON under `metrics`.
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
    before = [float(ms) for ms in args.get("before") or ()]
    measurer = get_measurer(args["measurer"], root=Path(args["root"])) if args.get("measurer") else None
    try:
        if measurer is None:
            if protocol.clock == "cpu":
                _cpu_clock_fits(model.session, baseline.session)
            limits = [_beyond_doubt(StopAbove(**limit), before) for limit in args.get("limits") or () if not itself]
            samples = measure_paired(sides[0].open, sides[1].open, protocol, seed=seed, limits=limits, watch=Reading.now)
        else:
            samples = _measured_by(measurer, sides, protocol, seed)
    except NotFiniteScore as error:
        return _invalid(Cause.NOT_FINITE, str(error))
    except BadOutput as error:
        return _invalid(Cause.BAD_OUTPUT, str(error))
    _save_runs(out / LATENCY_FILE, samples)
    metrics = summarize(samples, examples_a_run=sides[0].examples_a_run, seed=seed, itself=itself)
    in_baseline = summarize_baseline(samples)
    occasions = Occasions.of(before, [in_baseline.value])
    metrics, in_baseline = widen_all(metrics, occasions), occasions.widen(in_baseline)
    if measurer is not None:
        metrics = {name: _told_by(measurer, value) for name, value in metrics.items()}
        in_baseline = _told_by(measurer, in_baseline)
    measured = samples.ratio()
    return _ok(
        metrics={name: value.to_json() for name, value in metrics.items()},
        baseline_metrics={"latency": in_baseline.to_json()}, measured_ratio=measured.to_json(),
        not_enough_runs=missing_percentiles(samples), noisy=samples.noisy, ratio_width=relative_width(measured),
        foreign_load=samples.foreign_load, machine=samples.load.summary() if samples.load else None, rounds=samples.rounds,
        rounds_disturbed=int(samples.disturbed.sum()) if samples.disturbed is not None else None, rounds_used=int(samples.used.sum()),
        session_pairs=samples.session_pairs, runs_a_block=samples.candidate_ns.shape[1], stopped_by=samples.stopped_by, stopped_why=samples.why,
        occasions=occasions.to_json(), late_runs=samples.late, elapsed_s=samples.elapsed_ns / 1e9, spinning_stopped=spin_stopped and measurer is None,
        confidence=statistics.CONFIDENCE,
        protocol=protocol.to_json() if measurer is None else {"measurer": measurer.name, "rounds": protocol.min_runs},
    )  # fmt: skip


def _beyond_doubt(limit: StopAbove, before: Sequence[float]) -> StopAbove:
    """The limit with the doubt that lies between measurements added: whoever is above it now might be below it at another time."""
    usual = Occasions.of(before, [float(np.median(before)) if before else 1.0])
    half = usual.ratio_half_width if limit.of == "ratio" else usual.half_width
    return replace(limit, limit=limit.limit * math.exp(half * (statistics.widening(0, limit.error) if limit.error is not None else 1.0)))


def _save_runs(path: Path, samples: PairedSamples) -> None:
    """Keep every run; `used` marks the rounds that estimates count, arrays named `load_...` say what was seen of the machine in each."""
    seen = {f"load_{name}": values for name, values in vars(samples.load).items()} if samples.load else {}
    disturbed = samples.disturbed if samples.disturbed is not None else np.zeros(samples.rounds, np.bool_)
    np.savez(
        path, allow_pickle=False, candidate_ns=samples.candidate_ns, baseline_ns=samples.baseline_ns, session=samples.session,
        candidate_first=samples.candidate_first, candidate_first_ns=samples.candidate_first_ns, baseline_first_ns=samples.baseline_first_ns,
        candidate_crowd_ns=samples.candidate_crowd_ns, baseline_crowd_ns=samples.baseline_crowd_ns, crowd_runs=np.array(samples.crowd_runs),
        used=samples.used, disturbed=disturbed, **seen,
    )  # fmt: skip


def _cpu_clock_fits(*settings: SessionSettings) -> None:
    """Make sure that CPU time can stand for the time of a run. Raises `ConfigError`."""
    who, do = "measure.clock", "Write `clock: wall`, or `target: {ep: cpu, threads: 1}`."
    for one in settings:
        if one.execution_provider != "CPUExecutionProvider":
            raise ConfigError(who, "CPU time counts runs on CPUExecutionProvider only", one.execution_provider, do)
        if _has_threads(one):
            raise ConfigError(who, "CPU time counts runs on one thread only", f"{one.intra_op_num_threads} threads, {one.execution_mode}", do)
    began = now = time.process_time_ns()
    while now == began:
        now = time.process_time_ns()
    if now - began > CLOCK_STEP_NS:
        raise ConfigError(who, "this system's clock of CPU time must count in steps below 0.1 ms", f"{(now - began) / 1e6:g} ms", do)


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
