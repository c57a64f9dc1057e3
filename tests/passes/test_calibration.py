from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnxruntime.quantization import calibrate

from autotune.errors import ConfigError, PassError
from autotune.model import IoContract, ONNXModelHandler, TensorSpec
from autotune.passes.calibration import ENTROPY_BINS, PERCENTILE_BINS, QUANTIZED_BINS, activation_ranges, calibration_feeds
from autotune.passes.onnx_graph import quiet
from autotune.passes.onnx_quantization import OnnxQuantization
from autotune.target import AcceleratorSpec
from tests.passes.small_onnx import handler, random_weight

OPERATORS = ["MatMul", "Relu"]


@pytest.fixture
def model(tmp_path: Path) -> ONNXModelHandler:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], "first"), helper.make_node("Relu", ["h"], ["y"], "relu")]
    return handler(tmp_path / "model", nodes, [random_weight("w", 16, 16)])


@pytest.fixture
def rows(tmp_path: Path) -> tuple[Path, NDArray[np.float32]]:
    """Rows that grow, so that a histogram begun at the first row would have to grow too."""
    x = (np.random.default_rng(0).standard_normal((20, 16)) * np.linspace(0.01, 10, 20)[:, None]).astype(np.float32)
    np.savez(tmp_path / "rows.npz", x=x)
    return tmp_path / "rows.npz", x


def feeds_of(x: NDArray[np.float32]) -> calibrate.CalibrationDataReader:
    class Reader(calibrate.CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter([{"x": row[None]} for row in x])

        def get_next(self) -> dict[str, NDArray[np.float32]] | None:
            return next(self.left, None)

    return Reader()


def test_minmax_ranges_are_those_of_the_values(model: ONNXModelHandler, rows: tuple[Path, NDArray[np.float32]]) -> None:
    path, x = rows
    walk = calibration_feeds(path, model.io, 100, who="test")

    ranges = activation_ranges(model.path, walk, method="minmax", percentile=100.0, op_types=OPERATORS)

    low, high = ranges["x"].range_value
    assert (float(low.item()), float(high.item())) == (float(x.min()), float(x.max()))
    assert set(ranges.keys()) == {"x", "h", "y"}


@pytest.mark.parametrize("method", ["percentile", "entropy"])
def test_histograms_filled_row_by_row_are_those_of_all_rows_at_once(
    method: str, model: ONNXModelHandler, rows: tuple[Path, NDArray[np.float32]], tmp_path: Path
) -> None:
    path, x = rows
    maker = calibrate.PercentileCalibrater if method == "percentile" else calibrate.EntropyCalibrater
    bins = (
        {"num_bins": PERCENTILE_BINS, "percentile": 99.0}
        if method == "percentile"
        else {"num_bins": ENTROPY_BINS, "num_quantized_bins": QUANTIZED_BINS}
    )
    with quiet():
        at_once = maker(model.path, OPERATORS, str(tmp_path / "augmented.onnx"), symmetric=False, **bins)
        at_once.augment_graph()
        at_once.create_inference_session()
        at_once.collect_data(feeds_of(x))
        expected = at_once.compute_data()

    ranges = activation_ranges(model.path, calibration_feeds(path, model.io, 100, who="test"), method=method, percentile=99.0, op_types=OPERATORS)

    assert set(ranges.keys()) == set(expected.keys())
    for name in expected:
        np.testing.assert_array_equal(ranges[name].range_value, expected[name].range_value)


@pytest.mark.parametrize("method", ["percentile", "entropy"])
def test_a_tensor_that_reaches_the_lowest_float_keeps_its_minimum_and_maximum(
    method: str, rows: tuple[Path, NDArray[np.float32]], tmp_path: Path
) -> None:
    lowest = np.finfo(np.float32).min
    nodes = [
        helper.make_node("Mul", ["x", "lowest"], ["scaled"], "scale"),
        helper.make_node("Clip", ["scaled", "lowest", "zero"], ["mask"], "mask"),  # as attention masks are made
        helper.make_node("Relu", ["x"], ["kept"], "relu"),
        helper.make_node("Max", ["mask", "kept"], ["y"], "both"),
    ]
    constants = [numpy_helper.from_array(np.array(v, np.float32), n) for n, v in (("lowest", lowest), ("zero", 0.0))]
    masked = handler(tmp_path / "masked", nodes, constants)
    walk = calibration_feeds(rows[0], masked.io, 100, who="test")

    ranges = activation_ranges(masked.path, walk, method=method, percentile=99.0, op_types=["Relu", "Max"])

    low, high = (float(np.asarray(v).item()) for v in ranges["mask"].range_value)
    assert (low, high) == (float(lowest), 0.0)
    assert set(ranges.keys()) == {"x", "kept", "mask", "y"}


def test_a_percentile_cuts_what_lies_far_out(model: ONNXModelHandler, rows: tuple[Path, NDArray[np.float32]]) -> None:
    path, x = rows
    walk = calibration_feeds(path, model.io, 100, who="test")

    ranges = activation_ranges(model.path, walk, method="percentile", percentile=90.0, op_types=OPERATORS)

    low, high = (float(v) for v in ranges["x"].range_value)
    bin_width = 2 * float(np.abs(x).max()) / PERCENTILE_BINS
    for share, inside in ((0.05, x < low), (0.05, x > high)):
        assert abs(float(inside.mean()) - share) <= 1 / x.size + float((np.abs(x - low) < bin_width).mean() + (np.abs(x - high) < bin_width).mean())


def test_samples_are_spread_over_the_whole_file(model: ONNXModelHandler, rows: tuple[Path, NDArray[np.float32]]) -> None:
    path, x = rows

    fed = [feed["x"] for feed in calibration_feeds(path, model.io, 3, who="test")()]

    np.testing.assert_array_equal(np.concatenate(fed), x[[0, 10, 19]])


def test_more_samples_than_rows_takes_each_row_once_and_can_be_walked_again(model: ONNXModelHandler, rows: tuple[Path, NDArray[np.float32]]) -> None:
    path, x = rows
    walk = calibration_feeds(path, model.io, 1000, who="test")

    first, second = ([feed["x"] for feed in walk()] for _ in range(2))

    np.testing.assert_array_equal(np.concatenate(first), x)
    np.testing.assert_array_equal(np.concatenate(second), x)


def test_data_that_does_not_fit_the_model_is_refused(model: ONNXModelHandler, tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", z=np.zeros((4, 16), np.float32))

    with pytest.raises(ConfigError, match="array for each model input"):
        calibration_feeds(tmp_path / "other.npz", model.io, 10, who="test")


def test_no_samples_is_an_error(model: ONNXModelHandler, rows: tuple[Path, NDArray[np.float32]]) -> None:
    with pytest.raises(PassError, match="at least one sample"):
        calibration_feeds(rows[0], model.io, 0, who="test")


def test_random_rows_are_asked_for_by_name_and_are_the_same_each_time(model: ONNXModelHandler) -> None:
    first, again = ([f["x"] for f in calibration_feeds(Path("random"), model.io, 5, who="test")()] for _ in range(2))

    assert [x.shape for x in first] == [(1, 16)] * 5
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert len({x.tobytes() for x in first}) == 5
    assert 0.5 < np.std(first) < 1.5


def test_random_rows_fit_every_kind_of_input_that_has_a_shape() -> None:
    io = IoContract((TensorSpec("ids", "int64", ("batch", "length")), TensorSpec("mask", "bool", (2, None)), TensorSpec("x", "float16", (3,))))

    (feed,) = calibration_feeds(Path("random"), io, 1, who="test")()

    assert {n: (a.shape, a.dtype.name) for n, a in feed.items()} == {
        "ids": ((1, 16), "int64"), "mask": ((2, 16), "bool"), "x": ((3,), "float16"),
    }  # fmt: skip
    assert set(np.unique(feed["ids"])) <= {0, 1}


@pytest.mark.parametrize("spec", [TensorSpec("t", "string", (1,)), TensorSpec("t", "float32", None)])
def test_random_rows_need_a_known_shape_and_numbers(spec: TensorSpec) -> None:
    with pytest.raises(PassError, match="known shape and a numeric dtype"):
        next(calibration_feeds(Path("random"), IoContract((spec,)), 1, who="test")())


def test_a_model_calibrated_with_random_data_says_so(model: ONNXModelHandler, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    quantize = OnnxQuantization(AcceleratorSpec(), {"quant_mode": "static", "calibration_data_dir": "random", "calibration_samples": 4})

    result = quantize.run(model, tmp_path / "out")

    assert result.notes["changed"]
    assert "random data" in result.notes["calibration"]
