"""Ranges of activations from calibration data, in bounded memory, by ONNX Runtime's own calibration code.

ONNX Runtime's entropy and percentile methods keep every activation of every sample until the end (microsoft/onnxruntime#10503).
Here a first pass finds each tensor's minimum and maximum; a second one fills histograms of that width, one sample at a time.
The histograms are those which all samples at once would give, and only one sample's activations are held.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autotune.data import RANDOM, Arrays, count_rows, feeds, load_arrays, plan_feeding
from autotune.errors import PassError
from autotune.model import LARGE_BYTES, MODEL_FILE, IoContract, save_onnx
from autotune.passes.onnx_graph import quiet
from autotune.session import SessionSettings, session_options
from autotune.target import effective_cpus

if TYPE_CHECKING:
    import onnx
    import onnxruntime as ort
    from onnxruntime.quantization.calibrate import CalibraterBase, TensorsData

PERCENTILE_BINS = 2048
ENTROPY_BINS = 256  # two to one quantized bin: fewer leave the method nothing to choose, more cost seconds a tensor
QUANTIZED_BINS = 128
RANDOM_AXIS_SIZE = 16


def calibration_feeds(path: Path, io: IoContract, samples: int, *, who: str) -> Callable[[], Iterator[Arrays]]:
    """Return a function that gives the feeds of one walk over the calibration rows, one example a run; call it for each walk.

    At most `samples` rows, spread evenly over the file, so that data sorted by class is covered. Raises `ConfigError` for data
    that does not fit the model's inputs, `PassError` when there is nothing to take. The path `random` asks for random rows.
    """
    if samples < 1:
        raise PassError(who, "calibration needs at least one sample", f"calibration_samples={samples}")
    if str(path) == RANDOM:
        return lambda: random_feeds(io, samples, who=who)
    arrays = load_arrays(path, who=who)
    feeding = plan_feeding(arrays, io, who=who)
    count = count_rows(arrays)
    rows = np.unique(np.linspace(0, count - 1, min(samples, count)).round().astype(np.int64))

    def walk() -> Iterator[Arrays]:
        for feed, _ in feeds(arrays, io, feeding, rows):
            yield feed

    return walk


def random_feeds(io: IoContract, samples: int, *, who: str, seed: int = 0) -> Iterator[Arrays]:
    """Yield feeds of random numbers, the same for the same seed: standard normal floats, whole numbers 0 or 1 (any table of tokens has these two).

    First axes without a fixed size get 1, others 16. Raises `PassError` for an input whose shape or dtype is not known.
    """
    rng = np.random.default_rng(seed)
    for _ in range(samples):
        feed: Arrays = {}
        for spec in io.inputs:
            if spec.shape is None or spec.dtype in ("string", "bfloat16", "other"):
                raise PassError(
                    who, f"input {spec.name!r} must have a known shape and a numeric dtype for random calibration data", f"{spec.dtype} {spec.shape}",
                    "Give real calibration data.",
                )  # fmt: skip
            shape = [d if isinstance(d, int) and d > 0 else (1 if axis == 0 else RANDOM_AXIS_SIZE) for axis, d in enumerate(spec.shape)]
            dtype = np.dtype(spec.dtype)
            feed[spec.name] = (rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(0, 2, shape)).astype(dtype)
        yield feed


class _Reader:
    """What ONNX Runtime calls a calibration data reader: `get_next` gives a feed, then None."""

    def __init__(self, given: Iterable[Arrays]) -> None:
        self._given = iter(given)

    def get_next(self) -> Arrays | None:
        return next(self._given, None)


def activation_ranges(
    model_path: Path, walk: Callable[[], Iterator[Arrays]], *, method: str, percentile: float, op_types: Sequence[str], deviations: float = 0.0
) -> TensorsData:
    """Run the model over the calibration feeds and return a range for every float tensor at the given operators.

    `method`: minmax; moving_average (the mean of the runs' minima and maxima); distribution (`deviations` standard deviations to either side of
    the mean, no further than minimum and maximum: ONNX Runtime's own method of this name is made for 8-bit floats, and wrecks whole numbers);
    entropy; percentile (which cuts half of what it leaves out at either end). A tensor that was empty in every run has the range NaN to NaN.
    Raises what ONNX Runtime raises.
    """
    from onnxruntime.quantization import calibrate

    large = model_path.stat().st_size >= LARGE_BYTES or any(model_path.parent.glob(f"{model_path.name}.data"))
    with tempfile.TemporaryDirectory(prefix="autotune-calibrate-") as name, quiet():
        common = {"op_types_to_calibrate": list(op_types), "augmented_model_path": str(Path(name, "ranges.onnx")), "use_external_data_format": large}
        selector = calibrate.MinMaxCalibrater(model_path, **common)
        seen = {tensor: _Seen() for tensor in sorted(selector.select_tensors_to_calibrate(selector.model)[0])}
        visit_activations(selector.model, walk, list(seen), lambda tensor, array: seen[tensor].add(array, moments=method == "distribution"))
        found = {tensor: values.ends(method, deviations) for tensor, values in seen.items()}
        ranges = calibrate.TensorsData(calibrate.CalibrationMethod.MinMax, found)
        if method not in ("entropy", "percentile") or not found:
            return ranges

        bins = PERCENTILE_BINS if method == "percentile" else ENTROPY_BINS
        common["augmented_model_path"] = str(Path(name, "histograms.onnx"))
        settings = {"symmetric": False, "num_bins": bins, "num_quantized_bins": QUANTIZED_BINS, "percentile": percentile}
        maker = calibrate.PercentileCalibrater if method == "percentile" else calibrate.EntropyCalibrater
        wanted = settings if method == "entropy" else {k: v for k, v in settings.items() if k != "num_quantized_bins"}
        wanted = {k: v for k, v in wanted.items() if k != "percentile" or method == "percentile"}
        histograms = maker(model_path, **common, **wanted)
        _open(histograms)
        collector = calibrate.HistogramCollector(method=method, scenario="same", **settings)
        empty = _empty_histograms(ranges, bins)
        collector.histogram_dict.update(empty)
        collect = collector.collect
        collector.collect = lambda arrays: collect({n: a for n, a in arrays.items() if n in empty})
        histograms.collector = collector
        for feed in walk():
            histograms.collect_data(_Reader([feed]))
        cut: TensorsData = histograms.compute_data() if empty else calibrate.TensorsData(ranges.calibration_method, {})
        cut.data.update({n: data for n, data in ranges.items() if n not in empty})
        return cut


class _Seen:
    """What is kept of a tensor's values over the runs: ends, the runs' ends summed up, and the moments when they are asked for."""

    def __init__(self) -> None:
        self.dtype: np.dtype[Any] = np.dtype(np.float32)
        self.low, self.high = np.nan, np.nan
        self.sum_low = self.sum_high = self.total = self.squares = 0.0
        self.runs = self.count = 0

    def add(self, array: NDArray[Any], *, moments: bool) -> None:
        self.dtype = array.dtype
        low, high = float(array.min()), float(array.max())
        # NaN stays NaN: a range that was not finite once is none.
        self.low, self.high = (low, high) if not self.runs else (float(np.minimum(self.low, low)), float(np.maximum(self.high, high)))
        self.sum_low, self.sum_high, self.runs = self.sum_low + low, self.sum_high + high, self.runs + 1
        if moments:
            wide = array.astype(np.float64)
            self.total, self.squares, self.count = self.total + float(wide.sum()), self.squares + float((wide**2).sum()), self.count + array.size

    def ends(self, method: str, deviations: float) -> tuple[NDArray[Any], NDArray[Any]]:
        """Lowest and highest value of the range, in the tensor's type."""
        low, high = self.low, self.high
        if method == "moving_average" and self.runs:
            low, high = self.sum_low / self.runs, self.sum_high / self.runs
        elif method == "distribution" and self.count:
            mean = self.total / self.count
            reach = deviations * max(self.squares / self.count - mean**2, 0.0) ** 0.5
            low, high = max(low, mean - reach), min(high, mean + reach)
        return np.array(low, self.dtype), np.array(high, self.dtype)


MOST_ACTIVATION_BYTES = 256_000_000  # of activations that one run gives out


def visit_activations(
    proto: onnx.ModelProto, walk: Callable[[], Iterator[Arrays]], names: Sequence[str], visit: Callable[[str, NDArray[Any]], None]
) -> None:
    """Run the model over the calibration feeds and hand every float value of these names to `visit`, empty ones left out.

    The values are those of the graph as it is, unoptimized. As many are taken from one run as fit into `MOST_ACTIVATION_BYTES`; the others
    from further runs of the same feed. Raises what ONNX Runtime raises.
    """
    inputs = {v.name for v in proto.graph.input}
    made = {name for node in proto.graph.node for name in node.output if name}
    inner = [n for n in dict.fromkeys(names) if n in made]
    with tempfile.TemporaryDirectory(prefix="autotune-activations-") as folder, quiet():
        copied = type(proto)()
        copied.CopyFrom(proto)
        del copied.graph.output[:]
        for name in inner:
            copied.graph.output.add().name = name  # the type is inferred when it loads
        if not inner:
            copied.graph.output.extend(proto.graph.output)
        path = Path(folder, MODEL_FILE)
        save_onnx(copied, path)
        session = _calibration_session(str(path), spinning=False)  # between two runs the visitor wants the CPUs
        floats = [o.name for o in session.get_outputs() if o.type in ("tensor(float)", "tensor(float16)", "tensor(double)") and o.name in made]
        parts: list[list[str]] = []
        for feed in walk():
            for name in names:
                if name in inputs and feed[name].dtype.kind == "f" and feed[name].size:
                    visit(name, feed[name])
            sizes: dict[str, int] = {}
            for part in parts or [floats[i : i + 8] for i in range(0, len(floats), 8)]:
                for name, array in zip(part, session.run(part, feed), strict=True):
                    sizes[name] = array.nbytes
                    if array.size:
                        visit(name, array)
            parts = parts or _filled(sizes, MOST_ACTIVATION_BYTES)


def _filled(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Split the names, in order, into parts whose sizes sum up to the limit at most; a larger one has a part of its own."""
    parts: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not parts or size > room:
            parts.append([])
            room = limit
        parts[-1].append(name)
        room -= size
    return parts


def _open(calibrator: CalibraterBase) -> None:
    """Build the model with its extra outputs and a session for it, on the CPUs that this process may really use."""
    calibrator.augment_graph()
    calibrator.infer_session = _calibration_session(calibrator.augmented_model_path)


def _calibration_session(path: str, *, spinning: bool = True) -> ort.InferenceSession:
    import onnxruntime as ort

    # Unoptimized, as the ranges belong to the tensors of the graph that will be quantized.
    options = session_options(SessionSettings(graph_optimization_level="disable", intra_op_num_threads=effective_cpus()))
    if not spinning:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _empty_histograms(ranges: TensorsData, bins: int) -> dict[str, tuple[Any, ...]]:
    """Histograms that hold nothing yet, as wide as each tensor's range.

    Tensors whose range can't be cut into bins of its type (an attention mask that reaches the lowest float, values that are not finite) have
    none, and keep their minimum and maximum.
    """
    empty = {}
    for name, data in ranges.items():
        low, high = (np.asarray(v).reshape(-1) for v in data.range_value)
        if not low.size or not np.isfinite(low).all() or not np.isfinite(high).all():
            continue
        threshold = np.array(max(abs(low[0]), abs(high[0])), dtype=low.dtype)
        try:
            with np.errstate(all="ignore"):
                counts, edges = np.histogram(np.empty(0, low.dtype), bins, range=(-threshold, threshold))  # type: ignore[arg-type] # floats of the data's type: the library's own edges
        except ValueError:
            continue
        empty[name] = (counts, edges, low[0], high[0], threshold)
    return empty
