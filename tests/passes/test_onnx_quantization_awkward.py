"""OnnxQuantization on graphs that break quantizers: each ends in a model that computes the same, or says what it left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from autotune.model import ONNXModelHandler
from autotune.passes.onnx_quantization import OnnxQuantization
from autotune.target import AcceleratorSpec
from tests.passes.small_onnx import handler, random_weight, run

SPEC = AcceleratorSpec()
X = np.random.default_rng(5).standard_normal((32, 16)).astype(np.float32)
METHODS = ("minmax", "moving_average", "distribution", "entropy", "percentile")
FORMATS = ("QDQ", "QOperator")


def quantize(model: ONNXModelHandler, folder: Path, x: NDArray[Any] = X, **config: Any) -> ONNXModelHandler:
    folder.mkdir()
    np.savez(folder.with_suffix(".npz"), x=x)
    data = {} if config.get("quant_mode") == "dynamic" else {"calibration_data_dir": str(folder.with_suffix(".npz"))}
    return OnnxQuantization(SPEC, {**data, **config}).run(model, folder)  # type: ignore[return-value] # an ONNX pass gives an ONNX model


def error(model: ONNXModelHandler, result: ONNXModelHandler, x: NDArray[Any] = X) -> float:
    expected = run(model, x=x)
    return float(np.abs(run(result, x=x) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("config", [{"quant_format": "QDQ"}, {"quant_format": "QOperator"}, {"quant_mode": "dynamic"}], ids=str)
def test_the_factors_of_a_gemm_count(config: dict[str, Any], tmp_path: Path) -> None:
    bias = numpy_helper.from_array(np.linspace(-2, 2, 16, dtype=np.float32), "b")
    model = handler(tmp_path / "in", [helper.make_node("Gemm", ["x", "w", "b"], ["y"], "g", alpha=0.5, beta=3.0)], [random_weight("w", 16, 16), bias])

    result = quantize(model, tmp_path / "out", **config)

    assert result.notes["quantized_nodes"] == 1
    assert error(model, result) < 0.03


@pytest.mark.parametrize("weight_type", ["int8", "uint8", "int4"])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("quant_format", FORMATS)
def test_a_bias_that_32_bits_can_not_hold_is_not_cut_off(weight_type: str, per_channel: bool, quant_format: str, tmp_path: Path) -> None:
    if quant_format == "QOperator" and (weight_type == "int4" or (weight_type, per_channel) == ("uint8", True)):
        pytest.skip("refused beforehand")
    tiny = numpy_helper.from_array(numpy_helper.to_array(random_weight("w", 16, 16)) * np.float32(1e-7), "w")
    bias = numpy_helper.from_array(np.linspace(-2, 2, 16, dtype=np.float32), "b")
    model = handler(tmp_path / "in", [helper.make_node("Gemm", ["x", "w", "b"], ["y"], "g")], [tiny, bias], opset=21)
    small = X * np.float32(1e-3)

    result = quantize(model, tmp_path / "out", small, weight_type=weight_type, per_channel=per_channel, quant_format=quant_format)

    assert error(model, result, small) < 0.02
    if result.notes["changed"] is False:
        assert "its bias needs more than 32 bits" in result.notes["reason"]


@pytest.mark.parametrize("groups", [1, 2])
def test_convtranspose_is_right_per_channel_and_in_groups(groups: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    uneven = rng.standard_normal((8, 6 // groups, 3, 3)) * np.linspace(0.05, 2, 6 // groups)[None, :, None, None]
    weights = [numpy_helper.from_array(uneven.astype(np.float32), "w"), random_weight("b", 6)]
    model = handler(
        tmp_path / "in", [helper.make_node("ConvTranspose", ["x", "w", "b"], ["y"], "up", group=groups)], weights, x=("n", 8, 6, 6), y=("n", 6, 8, 8)
    )
    x = rng.standard_normal((4, 8, 6, 6)).astype(np.float32)

    result = quantize(model, tmp_path / "out", x)

    scales = next(t for t in result.load().graph.initializer if t.name == "w_scale")
    assert list(scales.dims) == ([6] if groups == 1 else [])
    assert ("grouped ConvTranspose" in result.notes.get("per_channel", "")) is (groups == 2)
    assert error(model, result, x) < 0.03


@pytest.mark.parametrize("quant_format", FORMATS)
def test_a_weight_on_the_left_of_a_product_is_right(quant_format: str, tmp_path: Path) -> None:
    uneven = numpy_helper.to_array(random_weight("w", 16, 16)) * np.linspace(0.05, 2, 16, dtype=np.float32)
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], "turn", perm=[1, 0]),
        helper.make_node("MatMul", ["w", "t"], ["m"], "left"),
        helper.make_node("Transpose", ["m"], ["y"], "back", perm=[1, 0]),
    ]
    model = handler(tmp_path / "in", nodes, [numpy_helper.from_array(uneven, "w")])

    result = quantize(model, tmp_path / "out", quant_format=quant_format)

    assert error(model, result) < 0.05


@pytest.mark.parametrize("method", METHODS)
def test_tensors_that_are_empty_on_some_data_are_skipped(method: str, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Greater", ["x", "limit"], ["over"], "over"),
        helper.make_node("NonZero", ["over"], ["where"], "where"),
        helper.make_node("Transpose", ["where"], ["places"], "places", perm=[1, 0]),
        helper.make_node("Cast", ["places"], ["boxes"], "boxes", to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["boxes", "w"], ["scored"], "score"),
        helper.make_node("ReduceSum", ["scored"], ["sum"], "sum", keepdims=0),
        helper.make_node("MatMul", ["x", "v"], ["product"], "product"),
        helper.make_node("Add", ["product", "sum"], ["y"], "add"),
    ]
    limit = numpy_helper.from_array(np.float32(100), "limit")
    model = handler(tmp_path / "in", nodes, [random_weight("w", 2, 4), random_weight("v", 16, 16), limit])

    result = quantize(model, tmp_path / "out", calibrate_method=method)

    assert result.notes["quantized_nodes"] == 1
    assert "score: values without bounds, or none at all" in result.notes["left_in_float"]
    assert error(model, result) < (0.03 if method not in ("moving_average", "distribution") else 0.6)  # both cut the ends off


@pytest.mark.parametrize("method", METHODS)
def test_values_that_are_not_finite_keep_their_nodes_in_float(method: str, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Sqrt", ["x"], ["root"], "root"),  # NaN below zero
        helper.make_node("MatMul", ["root", "w"], ["a"], "wild"),
        helper.make_node("IsNaN", ["a"], ["nan"], "nan"),
        helper.make_node("MatMul", ["x", "v"], ["b"], "tame"),
        helper.make_node("Where", ["nan", "b", "a"], ["y"], "choose"),
    ]
    model = handler(tmp_path / "in", nodes, [random_weight("w", 16, 16), random_weight("v", 16, 16)])

    result = quantize(model, tmp_path / "out", calibrate_method=method)

    assert "wild: values without bounds" in result.notes["left_in_float"]
    assert result.notes["quantized_nodes"] == 1
    assert np.isfinite(run(result, x=X)).all()


def test_a_mask_of_the_lowest_float_does_not_wipe_out_what_it_is_added_to(tmp_path: Path) -> None:
    lowest = float(np.finfo(np.float32).min)
    nodes = [
        helper.make_node("MatMul", ["x", "v"], ["scores"], "scores"),
        helper.make_node("Greater", ["x", "one"], ["hidden"], "hidden"),
        helper.make_node("Where", ["hidden", "low", "zero"], ["mask"], "mask"),
        helper.make_node("Add", ["scores", "mask"], ["masked"], "add"),
        helper.make_node("Softmax", ["masked"], ["shares"], "softmax"),
        helper.make_node("MatMul", ["shares", "w"], ["y"], "values"),
    ]
    numbers = [numpy_helper.from_array(np.float32(v), n) for n, v in (("one", 1.0), ("low", lowest), ("zero", 0.0))]
    model = handler(tmp_path / "in", nodes, [random_weight("v", 16, 16), random_weight("w", 16, 16, seed=1), *numbers])

    result = quantize(model, tmp_path / "out")

    assert result.notes["quantized_nodes"] >= 1
    assert error(model, result) < 0.05


@pytest.mark.parametrize("quant_format", FORMATS)
def test_constant_and_dead_ranges_have_a_scale(quant_format: str, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Mul", ["x", "zeros"], ["dead"], "kill"),
        helper.make_node("MatMul", ["dead", "w"], ["m"], "matmul"),
        helper.make_node("MatMul", ["x", "nothing"], ["n"], "nothing"),
        helper.make_node("Add", ["m", "n"], ["s"], "sum"),
        helper.make_node("Add", ["s", "x"], ["y"], "add"),
    ]
    zeros = [numpy_helper.from_array(np.zeros(shape, np.float32), name) for name, shape in (("zeros", (16,)), ("nothing", (16, 16)))]
    model = handler(tmp_path / "in", nodes, [random_weight("w", 16, 16), *zeros])

    result = quantize(model, tmp_path / "out", quant_format=quant_format)

    scales = [numpy_helper.to_array(t) for t in result.load().graph.initializer if t.name.endswith("_scale")]
    assert all(np.isfinite(s).all() and (s > 0).all() for s in scales)
    assert error(model, result) < 0.03


@pytest.mark.parametrize("quant_format", FORMATS)
def test_a_tied_weight_is_quantized_once(quant_format: str, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "one"),
        helper.make_node("Relu", ["a"], ["r"], "relu"),
        helper.make_node("MatMul", ["r", "w"], ["y"], "two"),
    ]
    model = handler(tmp_path / "in", nodes, [random_weight("w", 16, 16)])

    result = quantize(model, tmp_path / "out", quant_format=quant_format)

    weights = [t for t in result.load().graph.initializer if len(t.dims) == 2]
    assert [t.data_type for t in weights] == [TensorProto.INT8]
    assert result.notes["quantized_nodes"] == 2
    assert error(model, result) < 0.05


def test_names_that_occur_twice_are_told_apart_and_the_result_passes_the_checker(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "twice"),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("MatMul", ["r", "v"], ["y"]),
    ]
    model = handler(tmp_path / "in", nodes, [random_weight("w", 16, 16), random_weight("v", 16, 16)])

    result = quantize(model, tmp_path / "out", quant_preprocess=False)

    names = [n.name for n in result.load().graph.node]
    assert len(set(names)) == len(names)
    assert all(names)
    onnx.checker.check_model(result.load(), full_check=True)


def test_static_mode_counts_weights_inside_of_a_branch_as_left_and_says_why(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("t", TensorProto.FLOAT, ["batch", 16])
    then = helper.make_graph([helper.make_node("MatMul", ["m", "inner"], ["t"], "inside")], "then", [], [value])
    other = helper.make_graph([helper.make_node("Neg", ["m"], ["t"], "neg")], "else", [], [value])
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], "outside"),
        helper.make_node("ReduceSum", ["x"], ["sum"], "sum", keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"], "greater"),
        helper.make_node("If", ["positive"], ["y"], "if", then_branch=then, else_branch=other),
    ]
    numbers = [numpy_helper.from_array(np.float32(0), "zero")]
    model = handler(tmp_path / "in", nodes, [random_weight("w", 16, 16), random_weight("inner", 16, 16), *numbers])

    result = quantize(model, tmp_path / "out")

    covered = result.notes["coverage"]
    assert {"nodes": 1, "of_nodes": 1, "weights": 0.5, "float_in_bodies": {"MatMul": 1}}.items() <= covered.items()
    assert "static ranges" in covered["float_in_bodies_because"]
    assert error(model, result) < 0.05
