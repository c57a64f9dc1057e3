"""Outputs of a model over an evaluation set, and how its score compares with the baseline's on the same examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autotune.benchmarks import statistics
from autotune.benchmarks.metrics import Array, Features, Metric, NotFiniteScore
from autotune.data import Arrays, Feeding, count_rows, feeds
from autotune.errors import AutotuneError
from autotune.model import IoContract
from autotune.records import Interval, MetricValue

if TYPE_CHECKING:
    import onnxruntime as ort

ALL_OUTPUTS_BYTES = 200_000_000  # above, only the outputs that the metric reads are kept
KEPT_OUTPUTS_BYTES = 2_000_000_000  # above, the run is refused
BY_PROPORTIONS = "Wilson; paired difference by Tango"


@dataclass(frozen=True)
class RunOutputs:
    """Outputs stacked over rows, first axis the example; `finite` says that no float in any output was NaN or infinite.

    An output without an example axis (its first axis is not the batch) is stacked by run. One whose other axes differ from run to
    run is padded at their ends: integers with -1, floats with NaN, text with "" (that NaN does not count against `finite`).
    """

    arrays: Arrays
    finite: bool


def run_outputs(
    session: ort.InferenceSession,
    arrays: Mapping[str, Array],
    io: IoContract,
    feeding: Feeding,
    rows: Sequence[int] | NDArray[np.int64] | None = None,
    *,
    keep: Callable[[Arrays, list[int]], Sequence[str]] | None = None,
    always: bool = False,
    looks: Sequence[int] = (),
    stop: Callable[[RunOutputs, int], bool] | None = None,
) -> RunOutputs:
    """Run the rows (all, when None) through a session and stack what comes back, in the order of the rows.

    `keep(first run's outputs, its rows)` names the outputs to hold on to when all together would take more than 200 MB, or always
    with `always`. After as many rows as one of `looks` says, `stop(what came since the last look, rows done)` may end the run: the outputs
    are then those of the rows done. Looks that don't fall between two runs are left out. Raises `AutotuneError` when what is kept would
    take more than 2 GB.
    """
    names = [o.name for o in session.get_outputs()]
    order = list(range(count_rows(arrays)) if rows is None else map(int, rows))
    parts: dict[str, list[Array]] = {}
    batched, finite, done = dict.fromkeys(names, feeding.batched), True, 0
    looked: dict[str, int] = {}
    for feed, real in feeds(arrays, io, feeding, order):
        fed = feeding.rows_per_run()
        results = {n: _as_array(r) for n, r in zip(names, session.run(names, feed), strict=True)}
        for name, result in results.items():
            finite = finite and _finite(result)
            batched[name] = batched[name] and result.ndim > 0 and len(result) == fed
            if batched[name]:
                results[name] = result[:real]
        if done == 0:
            stacked = {n: r if batched[n] else r[None] for n, r in results.items()}
            kept = _chosen(stacked, order[:real], len(order), keep, always)
            parts = {n: [] for n in kept}
        for name, kept_parts in parts.items():
            kept_parts.append(results[name])
        done += real
        if stop is not None and done in looks:
            fresh = RunOutputs({n: _stack(p[looked.get(n, 0) :], batched[n]) for n, p in parts.items()}, finite)
            looked = {n: len(p) for n, p in parts.items()}
            if stop(fresh, done):
                break
    return RunOutputs({n: _stack(p, batched[n]) for n, p in parts.items()}, finite)


def _chosen(first: Arrays, rows: list[int], total: int, keep: Callable[[Arrays, list[int]], Sequence[str]] | None, always: bool) -> list[str]:
    """Names of the outputs to keep, judged by the first run."""
    scale = total / max(len(rows), 1)
    size = {n: a.nbytes * scale for n, a in first.items()}
    names = list(first)
    if keep is not None and (always or sum(size.values()) > ALL_OUTPUTS_BYTES):
        # A metric that finds nothing it can read says so later, with the shapes of all outputs in its message.
        names = list(keep(first, rows)) or names
    needed = sum(size[n] for n in names)
    if needed > KEPT_OUTPUTS_BYTES:
        raise AutotuneError(
            "evaluation", f"the outputs over all {total} rows must fit into {KEPT_OUTPUTS_BYTES / 1e9:.0f} GB",
            ", ".join(f"{n} {size[n] / 1e9:.1f} GB" for n in names), "Use fewer rows, or let the model return less.",
        )  # fmt: skip
    return names


def _as_array(result: Any) -> Array:
    """Turn what a session returns into an array that can be saved without pickles."""
    if isinstance(result, list) and result and isinstance(result[0], Mapping):  # class probabilities of a classifier as one map a row
        keys = list(result[0])
        return np.array([[row[k] for k in keys] for row in result])
    array = np.asarray(result)
    if array.dtype.kind == "O":
        return array.astype(str)
    return array.astype(np.float32) if array.dtype.kind == "V" else array  # bfloat16 and the like have no place in an .npz


def _finite(array: Array) -> bool:
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


def _stack(parts: list[Array], batched: bool) -> Array:
    if batched and len({p.shape[1:] for p in parts}) == 1:
        return np.concatenate(parts)
    if not batched and len({p.shape for p in parts}) == 1:
        return np.stack(parts)
    parts = parts if batched else [p[None] for p in parts]
    if len({p.ndim for p in parts}) > 1:
        raise AutotuneError("evaluation", "an output must have the same rank in every run", ", ".join(sorted({str(p.ndim) for p in parts})))
    shape = tuple(max(p.shape[axis] for p in parts) for axis in range(1, parts[0].ndim))
    kind = parts[0].dtype.kind
    filler: Any = {"f": np.nan, "c": np.nan, "U": ""}.get(kind, -1)
    # Unsigned integers and booleans can't hold the filler.
    dtype = np.dtype(np.int64) if kind in "ub" else np.result_type(*(p.dtype for p in parts))
    whole = np.full((sum(len(p) for p in parts), *shape), filler, dtype)
    start = 0
    for part in parts:
        whole[(slice(start, start + len(part)), *(slice(0, n) for n in part.shape[1:]))] = part
        start += len(part)
    return whole


def save_outputs(path: Path, outputs: RunOutputs) -> None:
    """Write outputs as an .npz without pickles. Their names stand in an array, since a graph may call an output anything."""
    columns = {f"output_{i}": a for i, a in enumerate(outputs.arrays.values())}
    names = np.array(list(outputs.arrays), dtype=np.str_)
    np.savez(path, allow_pickle=False, names=names, finite=np.array(outputs.finite), **columns)


def load_outputs(path: Path) -> RunOutputs:
    """Read what `save_outputs` wrote."""
    with np.load(path, allow_pickle=False) as file:
        return RunOutputs({str(n): file[f"output_{i}"] for i, n in enumerate(file["names"])}, bool(file["finite"]))


def compare_features(metric: Metric, candidate: Features, baseline: Features | None, *, seed: int) -> MetricValue:
    """Score a candidate from its features, with an interval, and compare it with the baseline on the same examples.

    `baseline` is None for the baseline itself: its difference is exactly 0. Raises what the metric raises, and `AutotuneError` for a set
    that can't be resampled.

    Right and wrong answers: Wilson's interval, Tango's for the difference, and the ratio that follows from it for the baseline as measured.
    Other scores per example: Student's t, paired, and Fieller's ratio. One number from a set: paired percentile bootstrap by example.
    """
    scores = metric.per_example(candidate)
    other = None if baseline is None else metric.per_example(baseline)
    if scores is None:
        return _compare_sets(metric, candidate, baseline, seed)
    if len(scores) < 2:
        raise AutotuneError(metric.name, "the evaluation data must hold at least 2 examples", str(len(scores)))
    if not np.isfinite(scores).all():
        raise NotFiniteScore(metric.name, "scores must be finite numbers", f"{int((~np.isfinite(scores)).sum())} of {len(scores)} that are not")
    count = len(scores)
    if metric.right_or_wrong and np.isin(scores, (0, 1)).all() and (other is None or np.isin(other, (0, 1)).all()):
        if other is None:
            return _metric_value(metric, statistics.wilson_interval(float(scores.sum()), count), None, None, count, BY_PROPORTIONS, itself=True)
        gained, lost = int(((scores == 1) & (other == 0)).sum()), int(((scores == 0) & (other == 1)).sum())
        return proportions(metric, right=int(other.sum()), gained=gained, lost=lost, count=count)
    own = statistics.mean_interval(scores)
    bounded = metric.unit == "share" and scores.min() >= 0 and scores.max() <= 1
    if bounded:
        own = Interval(own.value, max(own.low, 0.0), min(own.high, 1.0))
    delta = None if other is None else statistics.paired_mean_interval(scores, other)
    ratio = None if other is None else statistics.ratio_of_means_interval(scores, other)
    return _metric_value(metric, own, delta, ratio, count, "paired t over examples; ratio by Fieller", itself=baseline is None)


def proportions(metric: Metric, *, right: int, gained: int, lost: int, count: int) -> MetricValue:
    """Compare right and wrong answers by their numbers: `right` of the baseline, `gained` and `lost` against it, of `count` examples."""
    own = statistics.wilson_interval(float(right + gained - lost), count)
    delta = statistics.paired_proportion_interval(gained, lost, count)
    share = right / count
    ratio = Interval(*(max(0.0, 1 + d / share) for d in (delta.value, delta.low, delta.high))) if share > 0 else None
    return _metric_value(metric, own, delta, ratio, count, BY_PROPORTIONS, itself=False)


def _compare_sets(metric: Metric, candidate: Features, baseline: Features | None, seed: int) -> MetricValue:
    value = metric.value(candidate)
    if not math.isfinite(value):
        raise NotFiniteScore(metric.name, "the score must be a finite number", str(value))
    base = value if baseline is None else metric.value(baseline)

    def statistic(rows: NDArray[np.int64]) -> tuple[float, float]:
        own = metric.value(candidate, rows)
        return own, own if baseline is None else metric.value(baseline, rows)

    drawn = statistics.bootstrap_replicates(statistic, candidate.examples, seed=seed)
    if len(drawn) < 20:
        raise AutotuneError(
            metric.name, "the score must be a number on most resamples of the examples", f"{len(drawn)} such of {candidate.examples} examples",
            "Use more evaluation examples, or a metric that returns one score per example.",
        )  # fmt: skip
    own = statistics.bootstrap_interval(value, drawn[:, 0])
    delta = ratio = None
    if baseline is not None:
        delta = statistics.bootstrap_interval(value - base, drawn[:, 0] - drawn[:, 1])
        if base != 0 and (np.sign(drawn[:, 1]) == np.sign(base)).all():
            ratio = statistics.bootstrap_interval(value / base, drawn[:, 0] / drawn[:, 1])
    return _metric_value(metric, own, delta, ratio, candidate.examples, f"paired bootstrap, {len(drawn)} resamples", itself=baseline is None)


def _metric_value(
    metric: Metric, own: Interval, delta: Interval | None, ratio: Interval | None, samples: int, method: str, *, itself: bool
) -> MetricValue:
    if itself:
        delta, ratio = Interval.exactly(0.0), Interval.exactly(1.0)
    return MetricValue(own.value, own.low, own.high, unit=metric.unit, ratio=ratio, delta=delta, samples=samples, method=method, units=samples)
