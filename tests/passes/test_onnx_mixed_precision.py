from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from autotune.errors import PassError
from autotune.model import ONNXModelHandler
from autotune.passes.onnx_float_to_float16 import OnnxFloatToFloat16
from autotune.passes.onnx_mixed_precision import OnnxMixedPrecision
from autotune.target import AcceleratorSpec
from tests.passes.small_onnx import handler, operators, random_weight, run

SPEC = AcceleratorSpec()
X = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)


@pytest.fixture
def data(tmp_path: Path) -> str:
    np.savez(tmp_path / "calibration.npz", x=np.random.default_rng(1).standard_normal((32, 16)).astype(np.float32))
    return str(tmp_path / "calibration.npz")


def convert(model: ONNXModelHandler, folder: Path, **config: Any) -> ONNXModelHandler:
    folder.mkdir(parents=True, exist_ok=True)
    return OnnxMixedPrecision(SPEC, config).run(model, folder)  # type: ignore[return-value] # an ONNX pass gives an ONNX model


def large_inside(folder: Path) -> ONNXModelHandler:
    """Two products; between them values go up to some 300,000 and come down again."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "first"),
        helper.make_node("Mul", ["a", "up"], ["b"], "grow"),
        helper.make_node("Tanh", ["a"], ["t"], "aside"),
        helper.make_node("Mul", ["b", "down"], ["c"], "shrink"),
        helper.make_node("Add", ["c", "t"], ["d"], "add"),
        helper.make_node("MatMul", ["d", "v"], ["y"], "second"),
    ]
    weights = [
        random_weight("w", 16, 16), random_weight("v", 16, 16, seed=2), numpy_helper.from_array(np.float32(1e5), "up"),
        numpy_helper.from_array(np.float32(1e-5), "down"),
    ]  # fmt: skip
    return handler(folder, nodes, weights)


def types_of(model: ONNXModelHandler) -> dict[str, str]:
    return {t.name: TensorProto.DataType.Name(t.data_type) for t in model.load().graph.initializer}


def test_nodes_with_values_beyond_float16_stay_float32_and_the_rest_is_halved(data: str, tmp_path: Path) -> None:
    model = large_inside(tmp_path / "in")

    result = convert(model, tmp_path / "out", calibration_data_dir=data)

    assert result.notes["kept_nodes"] == ["grow", "shrink"]
    assert result.notes["kept_float32"] == {"values beyond 65504": 2}
    assert types_of(result) == {"w": "FLOAT16", "v": "FLOAT16", "up": "FLOAT", "down": "FLOAT"}
    assert (result.io.inputs, result.io.outputs) == (model.io.inputs, model.io.outputs)
    np.testing.assert_allclose(run(result, x=X), run(model, x=X), atol=1e-2)


def test_values_between_two_float32_nodes_never_pass_through_float16(data: str, tmp_path: Path) -> None:
    """Left alone, the library's converter casts to float16 and back between them, where these values become infinite."""
    model = large_inside(tmp_path / "in")
    (tmp_path / "blocked").mkdir()

    blocked = OnnxFloatToFloat16(SPEC, {"node_block_list": ["grow", "shrink"]}).run(model, tmp_path / "blocked")

    nodes = {n.name: n for n in blocked.load().graph.node}  # type: ignore[attr-defined] # ONNX in, ONNX out
    assert nodes["shrink"].input[0] == nodes["grow"].output[0]
    assert np.isfinite(run(blocked, x=X)).all()  # type: ignore[arg-type] # as above


def test_a_large_output_stays_whole(data: str, tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"], "product"), helper.make_node("Mul", ["a", "up"], ["y"], "grow")]
    model = handler(tmp_path / "in", nodes, [random_weight("w", 16, 16), numpy_helper.from_array(np.float32(1e6), "up")])

    result = convert(model, tmp_path / "out", calibration_data_dir=data)

    np.testing.assert_allclose(run(result, x=X), run(model, x=X), rtol=1e-2, atol=5e3)


def test_a_lower_limit_keeps_more_nodes(data: str, tmp_path: Path) -> None:
    model = large_inside(tmp_path / "in")

    result = convert(model, tmp_path / "out", calibration_data_dir=data, max_activation=2.0)

    assert set(result.notes["kept_nodes"]) > {"grow", "shrink"}


def test_deep_sums_stay_float32(data: str, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "shallow"),
        helper.make_node("MatMul", ["a", "v"], ["b"], "deep"),
        helper.make_node("ReduceMean", ["b"], ["m"], "mean", axes=[1], keepdims=1),
        helper.make_node("Softmax", ["b"], ["s"], "soft"),
        helper.make_node("Add", ["s", "m"], ["y"], "add"),
    ]
    model = handler(tmp_path / "in", nodes, [random_weight("w", 16, 600), random_weight("v", 600, 16)])

    result = convert(model, tmp_path / "out", calibration_data_dir=data, max_reduction=512)
    all_deep = convert(model, tmp_path / "all", calibration_data_dir=data, max_reduction=8)

    assert result.notes["kept_nodes"] == ["deep"]
    assert types_of(result)["v"] == "FLOAT"
    assert all_deep.notes["reason"] == "every node with weights has to stay in float32"


def test_blocked_values_keep_the_nodes_that_touch_them(tmp_path: Path) -> None:
    model = large_inside(tmp_path / "in")

    result = convert(model, tmp_path / "out", range_screen=False, value_block_list=["b", "v*"])

    assert result.notes["kept_nodes"] == ["grow", "second", "shrink"]
    assert types_of(result)["v"] == "FLOAT"
    with pytest.raises(PassError, match="each entry of value_block_list must match a value of the model; got 'nothing'"):
        convert(model, tmp_path / "wrong", range_screen=False, value_block_list=["nothing"])


def test_blocked_operators_and_nodes_stay_float32(tmp_path: Path) -> None:
    model = large_inside(tmp_path / "in")

    result = convert(model, tmp_path / "out", range_screen=False, op_block_list=["Mul"], node_block_list=["sec*"])

    assert types_of(result) == {"w": "FLOAT16", "v": "FLOAT", "up": "FLOAT", "down": "FLOAT"}
    with pytest.raises(PassError, match=r"'Mull'.*Did you mean 'Mul'"):
        convert(model, tmp_path / "wrong", range_screen=False, op_block_list=["Mull"])


def test_a_weight_of_nodes_of_both_kinds_keeps_its_exact_values_in_float32(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "narrow"),
        helper.make_node("MatMul", ["x", "w"], ["b"], "wide"),
        helper.make_node("Sub", ["b", "a"], ["y"], "difference"),
    ]
    model = handler(tmp_path / "in", nodes, [random_weight("w", 16, 16)])

    result = convert(model, tmp_path / "out", range_screen=False, node_block_list=["wide"])

    proto = result.load()
    taken = next(n.input[1] for n in proto.graph.node if n.name == "wide")
    kept = numpy_helper.to_array(next(t for t in proto.graph.initializer if t.name == taken))
    np.testing.assert_array_equal(kept, numpy_helper.to_array(random_weight("w", 16, 16)))


def test_branches_stay_float32_and_get_what_they_take_from_outside(data: str, tmp_path: Path) -> None:
    def branch(name: str, operator: str) -> onnx.GraphProto:
        nodes = [
            helper.make_node(operator, ["a"], [f"{name}_o"], f"{name}_op"),
            helper.make_node("Add", [f"{name}_o", "k"], [f"{name}_y"], f"{name}_a"),
        ]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None)])

    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "product"),
        helper.make_node("Mul", ["a", "k"], ["m"], "mul"),
        helper.make_node("ReduceSum", ["m"], ["s"], "sum", keepdims=0),
        helper.make_node("Greater", ["s", "zero"], ["positive"], "greater"),
        helper.make_node("If", ["positive"], ["y"], "if", then_branch=branch("then", "Relu"), else_branch=branch("else", "Tanh")),
    ]
    weights = [random_weight("w", 16, 16), random_weight("k", 16, seed=1), numpy_helper.from_array(np.float32(0), "zero")]
    model = handler(tmp_path / "in", nodes, weights)

    result = convert(model, tmp_path / "out", calibration_data_dir=data)

    assert result.notes["kept_float32"] == {"has branches or a body": 1}
    assert types_of(result)["w"] == "FLOAT16"
    for x in (X, -X):
        np.testing.assert_allclose(run(result, x=x), run(model, x=x), atol=1e-2)


def test_bfloat16_is_refused_on_the_cpu_in_words(data: str, tmp_path: Path) -> None:
    with pytest.raises(PassError, match=r"the bfloat16 model must load.*Could not find an implementation.*choose float16"):
        convert(large_inside(tmp_path / "in"), tmp_path / "out", calibration_data_dir=data, precision="bfloat16")


def test_bfloat16_weights_are_rounded_from_the_float32_ones(tmp_path: Path) -> None:
    """Elsewhere the model is made: its range is that of float32, so that nothing is cut and no node has to stay."""
    values = np.array([[1e6, 1e-9], [1.0, -3.14159]], np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "product")]
    model = handler(tmp_path / "in", nodes, [numpy_helper.from_array(values, "w")], x=("batch", 2), y=("batch", 2))
    (tmp_path / "out").mkdir()
    gpu = AcceleratorSpec("gpu", "CUDAExecutionProvider")

    result = OnnxMixedPrecision(gpu, {"precision": "bfloat16", "range_screen": False}).run(model, tmp_path / "out")

    proto = result.load()  # type: ignore[attr-defined] # ONNX in, ONNX out
    onnx.checker.check_model(proto, full_check=True)
    weight = next(t for t in proto.graph.initializer if t.name == "w")
    assert weight.data_type == TensorProto.BFLOAT16
    np.testing.assert_array_equal(numpy_helper.to_array(weight).astype(np.float32), values.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert [n.op_type for n in proto.graph.node] == ["Cast", "MatMul", "Cast"]


def test_bfloat16_is_searched_where_it_may_run() -> None:
    on_cpu = OnnxMixedPrecision.search_space(SPEC)["precision"]
    on_gpu = OnnxMixedPrecision.search_space(AcceleratorSpec("gpu", "CUDAExecutionProvider"))["precision"]

    assert (on_cpu.values, on_gpu.values) == (("float16",), ("float16", "bfloat16"))  # type: ignore[union-attr] # both are Categorical


def test_the_screen_needs_data(tmp_path: Path) -> None:
    assert OnnxMixedPrecision.needed_data(OnnxMixedPrecision(SPEC, {}).config) == {"calibration"}
    assert not OnnxMixedPrecision.needed_data(OnnxMixedPrecision(SPEC, {"range_screen": False}).config)
    with pytest.raises(PassError, match="the range screen needs calibration data"):
        convert(large_inside(tmp_path / "in"), tmp_path / "out")


def test_numbers_lost_without_the_screen_are_found_where_there_is_data(data: str, tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"], "product"), helper.make_node("Mul", ["a", "up"], ["y"], "grow")]
    model = handler(tmp_path / "in", nodes, [random_weight("w", 16, 16), numpy_helper.from_array(np.float32(6e4), "up")])

    with pytest.raises(PassError, match="must give finite numbers where the float32 model does"):
        convert(model, tmp_path / "out", range_screen=False, calibration_data_dir=data, keep_io_types=False)


def test_a_float16_model_comes_back_as_it_was(data: str, tmp_path: Path) -> None:
    once = convert(large_inside(tmp_path / "in"), tmp_path / "once", range_screen=False, keep_io_types=False)

    twice = convert(once, tmp_path / "twice", range_screen=False)

    assert twice.digest == once.digest
    assert twice.notes["reason"] == "the model is float16 already"
    assert "Cast" not in operators(once)
