"""What static quantization for CPUs does so that quantized models are fast and precise: composites fused first, means pooled, ends in float."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from autotune.model import ONNXModelHandler
from autotune.passes.onnx_quantization import OnnxQuantization
from autotune.passes.quantization_fusions import COMPOSITES, free_outputs, last_shares, pool_means
from autotune.session import create_session
from autotune.target import AcceleratorSpec
from tests.passes.small_onnx import handler, random_weight

SPEC = AcceleratorSpec()
IMAGE = [2, 8, 12, 12]
CLASSES = 400


def constant(name: str, *values: float) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, np.float32).reshape(() if len(values) == 1 else -1), name)


def convolution(name: str, given: str, result: str) -> onnx.NodeProto:
    return helper.make_node("Conv", [given, f"{name}_w"], [result], name, pads=[1, 1, 1, 1])


GELU = [
    helper.make_node("Div", ["c", "root"], ["d"], "scaled"),
    helper.make_node("Erf", ["d"], ["e"], "curve"),
    helper.make_node("Add", ["e", "one"], ["f"], "raised"),
    helper.make_node("Mul", ["c", "f"], ["g"], "gated"),
    helper.make_node("Mul", ["g", "half"], ["h"], "halved"),
]
SILU = [helper.make_node("Sigmoid", ["c"], ["s"], "gate"), helper.make_node("Mul", ["c", "s"], ["h"], "gated")]
CURVES = {"Gelu": GELU, "QuickGelu": SILU}


def curved(folder: Path, curve: Sequence[onnx.NodeProto]) -> ONNXModelHandler:
    """A convolution, a curve that takes its result twice, and another convolution."""
    nodes = [convolution("first", "x", "c"), *curve, convolution("last", "h", "y")]
    weights = [random_weight("first_w", 8, 8, 3, 3), random_weight("last_w", 8, 8, 3, 3, seed=1)]
    return handler(folder, nodes, [*weights, constant("root", 2**0.5), constant("one", 1), constant("half", 0.5)], x=IMAGE, y=IMAGE)


def rows(*shape: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"x": np.random.default_rng(3).standard_normal((16, *shape)).astype(np.float32)}


def quantize(model: ONNXModelHandler, folder: Path, data: dict[str, np.ndarray[Any, Any]], **config: Any) -> ONNXModelHandler:
    folder.mkdir()
    np.savez(folder.parent / "calib.npz", **data)  # type: ignore[arg-type] # arrays by name
    result = OnnxQuantization(SPEC, {"calibration_data_dir": str(folder.parent / "calib.npz"), **config}).run(model, folder)
    assert isinstance(result, ONNXModelHandler)
    return result


def runtime_operators(model: ONNXModelHandler, path: Path) -> set[str]:
    """Types of the operators that the runtime makes of a model."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.optimized_model_filepath, options.intra_op_num_threads, options.log_severity_level = str(path), 1, 3
    ort.InferenceSession(str(model.path), options, providers=["CPUExecutionProvider"])
    return {node.op_type for node in onnx.load(path).graph.node}


def first_output(model: ONNXModelHandler, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    result: np.ndarray[Any, Any] = create_session(model.path, model.session).run(None, {"x": x})[0]
    return result


@pytest.mark.parametrize("kinds", ["all", "conv+matmul"])
@pytest.mark.parametrize("kernel", CURVES)
def test_a_curve_that_takes_a_value_twice_is_one_kernel_between_quantized_convolutions(kernel: str, kinds: str, tmp_path: Path) -> None:
    model, data = curved(tmp_path / "model", CURVES[kernel]), rows(8, 12, 12)

    result = quantize(model, tmp_path / "out", data, op_types_to_quantize=kinds)
    apart = quantize(model, tmp_path / "apart", data, op_types_to_quantize=kinds, nodes_to_exclude=["gated"])

    assert result.notes["composites"] == {kernel: 1}
    made = runtime_operators(result, tmp_path / "optimized.onnx")
    assert {kernel, "QLinearConv"} <= made
    assert not made & {"Erf", "Sigmoid", "Mul", "QLinearSigmoid", "QLinearMul", "Conv"}
    wanted, got = (first_output(m, data["x"][:2]) for m in (model, result))
    assert np.abs(wanted - got).max() < 0.05 * np.abs(wanted).max()
    assert "gated" in apart.notes["composites"]  # what is named must be found
    assert "gated" in {node.name for node in onnx.load(apart.path).graph.node}


def test_every_composite_has_a_kernel_on_the_cpu() -> None:
    import onnxruntime.capi.onnxruntime_pybind11_state as native

    kernels = {k.op_name for k in native.get_all_opkernel_def() if k.provider == "CPUExecutionProvider"}

    assert kernels >= COMPOSITES


def test_layer_normalization_written_out_in_parts_is_fused_before_its_input_is_quantized(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], "first"),
        helper.make_node("ReduceMean", ["m"], ["mean"], "mean", axes=[-1]),
        helper.make_node("Sub", ["m", "mean"], ["d"], "centred"),
        helper.make_node("Pow", ["d", "two"], ["p"], "squared"),
        helper.make_node("ReduceMean", ["p"], ["v"], "variance", axes=[-1]),
        helper.make_node("Add", ["v", "little"], ["u"], "raised"),
        helper.make_node("Sqrt", ["u"], ["r"], "deviation"),
        helper.make_node("Div", ["d", "r"], ["q"], "normal"),
        helper.make_node("Mul", ["q", "g"], ["z"], "scaled"),
        helper.make_node("Add", ["z", "b"], ["n"], "shifted"),
        helper.make_node("MatMul", ["n", "v_w"], ["y"], "second"),
    ]
    weights = [random_weight("w", 16, 16), random_weight("v_w", 16, 16, seed=1), random_weight("g", 16, seed=2), random_weight("b", 16, seed=3)]
    model = handler(tmp_path / "model", nodes, [*weights, constant("two", 2), constant("little", 1e-5)], opset=13)

    result = quantize(model, tmp_path / "out", rows(16), op_types_to_quantize="matmul")

    assert result.notes["composites"] == {"LayerNormalization": 1}
    assert runtime_operators(result, tmp_path / "optimized.onnx") & {"Sub", "Pow", "Sqrt", "MatMul"} == set()


def test_a_mean_over_an_image_becomes_a_pool_in_whole_numbers(tmp_path: Path) -> None:
    nodes = [
        convolution("first", "x", "c"),
        helper.make_node("ReduceMean", ["c"], ["m"], "mean", axes=[3, -2]),
        helper.make_node("Conv", ["m", "gate_w"], ["s"], "gate"),
        helper.make_node("Mul", ["c", "s"], ["h"], "gated"),
        convolution("last", "h", "y"),
    ]
    weights = [random_weight("first_w", 8, 8, 3, 3), random_weight("gate_w", 8, 8, 1, 1), random_weight("last_w", 8, 8, 3, 3, seed=1)]
    model, data = handler(tmp_path / "model", nodes, weights, x=IMAGE, y=IMAGE), rows(8, 12, 12)

    result = quantize(model, tmp_path / "out", data)

    assert result.notes["means_pooled"] == 1
    assert "QLinearGlobalAveragePool" in runtime_operators(result, tmp_path / "optimized.onnx")
    wanted, got = (first_output(m, data["x"][:2]) for m in (model, result))
    assert np.abs(wanted - got).max() < 0.05 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("rank", "attributes", "pooled"),
    [
        (3, {"axes": [2]}, 1),
        (5, {"axes": [2, 3, 4]}, 1),
        (4, {"axes": [2, 3], "keepdims": 0}, 0),
        (4, {"axes": [3]}, 0),
        (4, {"axes": [1, 2]}, 0),
        (4, {}, 0),
        (2, {"axes": [1]}, 0),
    ],
)
def test_only_a_mean_over_all_that_is_behind_the_channels_is_a_pool(rank: int, attributes: dict[str, Any], pooled: int) -> None:
    shape = [2, 3, 4, 5, 6][:rank]
    graph = helper.make_graph(
        [helper.make_node("ReduceMean", ["x"], ["y"], "mean", **attributes)], "means",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    before = onnx.ModelProto.FromString(proto.SerializeToString())

    assert pool_means(proto) == pooled

    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    wanted, got = (onnx.reference.ReferenceEvaluator(p).run(None, {"x": x})[0] for p in (before, proto))
    assert np.allclose(wanted, got, atol=1e-6)


def classifier(folder: Path, *, last: str = "Softmax") -> ONNXModelHandler:
    """A product, its result under another shape, and shares of it over the classes."""
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["logits"], "product"),
        helper.make_node("Reshape", ["logits", "shape"], ["seen"], "view"),
        helper.make_node(last, ["seen"], ["y"], "shares"),
    ]
    weights = [random_weight("w", 16, CLASSES), random_weight("b", CLASSES), numpy_helper.from_array(np.array([-1, 2, CLASSES // 2]), "shape")]
    return handler(folder, nodes, weights, y=["batch", 2, CLASSES // 2])


@pytest.mark.parametrize("last", ["Softmax", "Sigmoid"])
def test_shares_that_the_model_gives_are_made_in_float_of_a_product_in_whole_numbers(last: str, tmp_path: Path) -> None:
    model, data = classifier(tmp_path / "model", last=last), rows(16)

    result = quantize(model, tmp_path / "out", data)
    rounded = quantize(model, tmp_path / "rounded", data, outputs_in_float=False)
    named = quantize(model, tmp_path / "named", data, op_types_to_quantize=f"all+{last}")

    made = runtime_operators(result, tmp_path / "optimized.onnx")
    assert {"QGemm", last} <= made
    assert f"QLinear{last}" not in made
    assert "shares: it gives 'y'" in result.notes["left_in_float"]
    wanted, got, coarse = (first_output(m, data["x"]).astype(np.float64) for m in (model, result, rounded))
    assert ((wanted - got) ** 2).mean() < 0.5 * ((wanted - coarse) ** 2).mean()
    for other, name in ((rounded, "rounded"), (named, "named")):
        assert f"QLinear{last}" in runtime_operators(other, tmp_path / f"{name}.onnx")


@pytest.mark.parametrize("kinds", ["all", "matmul"])
def test_a_product_that_is_an_output_is_not_rounded_and_one_that_others_take_in_whole_numbers_is(kinds: str, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["inner"], "first"),
        helper.make_node("MatMul", ["inner", "v"], ["y"], "second"),
    ]
    weights = [random_weight("w", 16, 16), random_weight("v", 16, 16, seed=1)]
    model, data = handler(tmp_path / "model", nodes, weights), rows(16)

    result = quantize(model, tmp_path / "out", data, op_types_to_quantize=kinds)
    rounded = quantize(model, tmp_path / "rounded", data, op_types_to_quantize=kinds, outputs_in_float=False)

    proto = onnx.load(result.path)
    assert {node.output[0] for node in proto.graph.node if node.op_type == "MatMul"} >= {"y"}
    assert "inner" in {name.removesuffix("_QuantizeLinear_Input") for n in proto.graph.node if n.op_type == "QuantizeLinear" for name in n.input}
    assert "y_scale" not in {t.name for t in proto.graph.initializer}
    assert "MatMul" not in runtime_operators(result, tmp_path / "optimized.onnx")
    wanted, got, coarse = (first_output(m, data["x"]).astype(np.float64) for m in (model, result, rounded))
    assert ((wanted - got) ** 2).mean() < ((wanted - coarse) ** 2).mean()


def test_an_output_that_is_taken_inside_too_keeps_its_scale(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"], "first"), helper.make_node("MatMul", ["a", "v"], ["y"], "second")]
    made = handler(tmp_path / "model", nodes, [random_weight("w", 16, 16), random_weight("v", 16, 16, seed=1)])
    proto = made.load()
    proto.graph.output.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, ["batch", 16]))
    onnx.save(proto, str(made.path))

    result = quantize(ONNXModelHandler.from_folder(made.path.parent), tmp_path / "out", rows(16)).load()

    assert {t.name for t in result.graph.initializer} >= {"a_scale"}
    assert free_outputs(result) == 0  # and what was freed once has nothing left to free


def test_shares_inside_of_the_model_and_convolutions_at_its_end_are_quantized_as_others_are(tmp_path: Path) -> None:
    nodes = [convolution("first", "x", "c"), helper.make_node("Softmax", ["c"], ["s"], "inside"), convolution("last", "s", "y")]
    weights = [random_weight("first_w", 8, 8, 3, 3), random_weight("last_w", 8, 8, 3, 3, seed=1)]
    model = handler(tmp_path / "model", nodes, weights, x=IMAGE, y=IMAGE)

    result = quantize(model, tmp_path / "out", rows(8, 12, 12))

    assert last_shares(model.load()) == {}
    assert "Conv" not in runtime_operators(result, tmp_path / "optimized.onnx")


def test_other_targets_get_graphs_that_are_quantized_to_the_end() -> None:
    elsewhere = AcceleratorSpec("npu", "QNNExecutionProvider")

    defaults = [OnnxQuantization.resolve(spec, {"calibration_data_dir": "random"})["outputs_in_float"] for spec in (SPEC, elsewhere)]

    assert defaults == [True, False]


DEEP = [2, 8, 12, 12]


def depthwise(folder: Path) -> ONNXModelHandler:
    """Convolutions with a cut behind each; the channels of the middle one, each for itself, differ much in size."""
    nodes = [
        convolution("first", "x", "a"), helper.make_node("Clip", ["a", "zero", "six"], ["b"], "first_cut"),
        helper.make_node("Conv", ["b", "each_w", "each_b"], ["c"], "each", group=8, pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["d"], "each_cut"),
        convolution("last", "d", "e"), helper.make_node("Relu", ["e"], ["y"], "last_cut"),
    ]  # fmt: skip
    each = np.random.default_rng(7).standard_normal((8, 1, 3, 3)).astype(np.float32) * np.logspace(-3, 1, 8).astype(np.float32).reshape(8, 1, 1, 1)
    last = numpy_helper.to_array(random_weight("last_w", 8, 8, 3, 3, seed=1)) / np.logspace(-3, 1, 8).astype(np.float32).reshape(1, 8, 1, 1)
    weights = [
        numpy_helper.from_array(3 * numpy_helper.to_array(random_weight("w", 8, 8, 3, 3)), "first_w"), numpy_helper.from_array(each, "each_w"),
        random_weight("each_b", 8, seed=2), numpy_helper.from_array(last, "last_w"), constant("zero", 0), constant("six", 6),
    ]  # fmt: skip
    return handler(folder, nodes, weights, x=DEEP, y=DEEP)


def share_of_error(model: ONNXModelHandler, result: ONNXModelHandler, x: np.ndarray[Any, Any]) -> float:
    wanted, got = (first_output(m, x).astype(np.float64) for m in (model, result))
    return float(((wanted - got) ** 2).sum() / (wanted**2).sum())


def test_what_is_left_in_float_stays_so_in_a_session(tmp_path: Path) -> None:
    model, data = depthwise(tmp_path / "model"), rows(8, 12, 12)

    result = quantize(model, tmp_path / "out", data, nodes_to_exclude=["each"])

    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL, 3
    plain = ort.InferenceSession(str(result.path), options, providers=["CPUExecutionProvider"]).run(None, {"x": data["x"][:2]})[0]
    optimized = first_output(result, data["x"][:2])
    made = runtime_operators(result, tmp_path / "optimized.onnx")
    assert {"QLinearConv"} <= made
    assert made & {"Conv", "FusedConv"}  # the one that was named
    assert np.abs(plain - optimized).max() < 0.02 * np.abs(plain).max()


@pytest.mark.parametrize("kinds", ["conv", "conv+matmul"])
def test_a_cut_goes_with_the_convolution_before_it(kinds: str, tmp_path: Path) -> None:
    model, data = depthwise(tmp_path / "model"), rows(8, 12, 12)

    chosen = quantize(model, tmp_path / "chosen", data, op_types_to_quantize=kinds)
    whole = quantize(model, tmp_path / "whole", data)

    assert not {"Relu", "Clip"} & {node.op_type for node in onnx.load(chosen.path).graph.node}
    assert share_of_error(model, chosen, data["x"][:2]) == pytest.approx(share_of_error(model, whole, data["x"][:2]), rel=1e-3)


def test_a_cut_that_others_see_through_or_that_is_no_product_s_stays_in_float(tmp_path: Path) -> None:
    nodes = [
        convolution("first", "x", "a"), helper.make_node("Relu", ["a"], ["b"], "seen"), helper.make_node("Sub", ["b", "a"], ["c"], "rest"),
        helper.make_node("Relu", ["c"], ["d"], "of_a_sum"), convolution("last", "d", "y"),
    ]  # fmt: skip
    weights = [random_weight("first_w", 8, 8, 3, 3), random_weight("last_w", 8, 8, 3, 3, seed=1)]
    model, data = handler(tmp_path / "model", nodes, weights, x=IMAGE, y=IMAGE), rows(8, 12, 12)

    result = quantize(model, tmp_path / "out", data, op_types_to_quantize="conv")

    left = onnx.load(result.path).graph.node
    assert [node.name for node in left if node.op_type == "Relu"] == ["seen", "of_a_sum"]
    assert not {"b", "c"} & {name for node in left if node.op_type == "QuantizeLinear" for name in node.input}
