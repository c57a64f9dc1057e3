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

from autotune.data import Arrays, count_rows, feeds, load_arrays, plan_feeding
from autotune.errors import PassError
from autotune.model import LARGE_BYTES, IoContract
from autotune.passes.onnx_graph import quiet
from autotune.session import SessionSettings, session_options
from autotune.target import effective_cpus

if TYPE_CHECKING:
    import onnxruntime as ort
    from onnxruntime.quantization.calibrate import CalibraterBase, TensorsData

PERCENTILE_BINS = 2048
ENTROPY_BINS = 256  # two to one quantized bin: fewer leave the method nothing to choose, more cost seconds a tensor
QUANTIZED_BINS = 128


def calibration_feeds(path: Path, io: IoContract, samples: int, *, who: str) -> Callable[[], Iterator[Arrays]]:
    """Return a function that gives the feeds of one walk over the calibration rows, one example a run; call it for each walk.

    At most `samples` rows, spread evenly over the file, so that data sorted by class is covered. Raises `ConfigError` for data
    that does not fit the model's inputs, `PassError` when there is nothing to take.
    """
    arrays = load_arrays(path, who=who)
    feeding = plan_feeding(arrays, io, who=who)
    count = count_rows(arrays)
    if samples < 1:
        raise PassError(who, "calibration needs at least one sample", f"calibration_samples={samples}")
    rows = np.unique(np.linspace(0, count - 1, min(samples, count)).round().astype(np.int64))

    def walk() -> Iterator[Arrays]:
        for feed, _ in feeds(arrays, io, feeding, rows):
            yield feed

    return walk


class _Reader:
    """What ONNX Runtime calls a calibration data reader: `get_next` gives a feed, then None."""

    def __init__(self, given: Iterable[Arrays]) -> None:
        self._given = iter(given)

    def get_next(self) -> Arrays | None:
        return next(self._given, None)


def activation_ranges(
    model_path: Path, walk: Callable[[], Iterator[Arrays]], *, method: str, percentile: float, op_types: Sequence[str]
) -> TensorsData:
    """Run the model over the calibration feeds and return a range for every float tensor at the given operators.

    `method`: minmax, entropy or percentile (which cuts half of what it leaves out at either end). Raises what ONNX Runtime raises.
    """
    from onnxruntime.quantization import calibrate

    large = model_path.stat().st_size >= LARGE_BYTES or any(model_path.parent.glob(f"{model_path.name}.data"))
    with tempfile.TemporaryDirectory(prefix="autotune-calibrate-") as name, quiet():
        common = {"op_types_to_calibrate": list(op_types), "augmented_model_path": str(Path(name, "ranges.onnx")), "use_external_data_format": large}
        limits = calibrate.MinMaxCalibrater(model_path, **common)
        _open(limits)
        limits.collect_data(_Reader(walk()))
        ranges = limits.compute_data()
        if method == "minmax" or not list(ranges.keys()):
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
        found: TensorsData = histograms.compute_data() if empty else calibrate.TensorsData(ranges.calibration_method, {})
        found.data.update({n: data for n, data in ranges.items() if n not in empty})
        return found


def _open(calibrator: CalibraterBase) -> None:
    """Build the model with its extra outputs and a session for it, on the CPUs that this process may really use."""
    calibrator.augment_graph()
    calibrator.infer_session = _calibration_session(calibrator.augmented_model_path)


def _calibration_session(path: str) -> ort.InferenceSession:
    import onnxruntime as ort

    # Unoptimized, as the ranges belong to the tensors of the graph that will be quantized.
    options = session_options(SessionSettings(graph_optimization_level="disable", intra_op_num_threads=effective_cpus()))
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
