from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from autotune.errors import PassConfigError, PassError
from autotune.model import ONNXModelHandler
from autotune.passes.onnx_dynamic_to_fixed_shape import OnnxDynamicToFixedShape
from autotune.passes.onnx_static_quantization import OnnxStaticQuantization
from autotune.target import AcceleratorSpec
from tests.passes.small_onnx import handler, random_weight, run

SPEC = AcceleratorSpec()
node = helper.make_node


def fix(model: ONNXModelHandler, folder: Path, **config: Any) -> ONNXModelHandler:
    folder.mkdir()
    return OnnxDynamicToFixedShape(SPEC, config).run(model, folder)  # type: ignore[return-value] # an ONNX pass gives an ONNX model


def two_layers(folder: Path, **more: Any) -> ONNXModelHandler:
    nodes = [node("MatMul", ["x", "w"], ["m"], "matmul"), node("Relu", ["m"], ["y"], "relu")]
    return handler(folder, nodes, [random_weight("w", 16, 16)], **more)


def shapes_inside(model: ONNXModelHandler) -> dict[str, list[int]]:
    return {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.load().graph.value_info}


def test_a_name_gets_its_size_everywhere_and_the_model_computes_the_same(tmp_path: Path) -> None:
    model = two_layers(tmp_path / "in")
    before = model.digest
    x = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)

    result = fix(model, tmp_path / "out", dim_param={"batch": 4})

    assert result.io.inputs[0].shape == (4, 16)
    assert result.io.outputs[0].shape == (4, 16)
    assert shapes_inside(result) == {"m": [4, 16]}
    assert result.notes["share_of_values_with_known_shape_after"] == 1.0 > result.notes["share_of_values_with_known_shape_before"]
    assert result.notes["outputs_still_dynamic"] == {}
    np.testing.assert_array_equal(run(result, x=x), run(model, x=x))
    assert ONNXModelHandler.from_folder(model.folder).digest == before


def test_axes_without_a_name_are_fixed_by_the_whole_shape(tmp_path: Path) -> None:
    model = two_layers(tmp_path / "in", x=(None, "time", 16), y=(None, "time", 16))

    result = fix(model, tmp_path / "out", input_shapes={"x": [3, 5, 16]})

    assert result.io.inputs[0].shape == (3, 5, 16) == result.io.outputs[0].shape
    assert result.notes["fixed"] == {"time": 5}


def test_sums_of_names_follow_their_names(tmp_path: Path) -> None:
    past = helper.make_tensor_value_info("past", TensorProto.FLOAT, ["past_length", 16])
    both = helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["past_length + length", 16])
    nodes = [node("Concat", ["past", "x"], ["c"], "c", axis=0), node("Mul", ["c", "mask"], ["y"], "mul")]
    model = handler(tmp_path / "in", nodes, x=("length", 16), y=("past_length + length", 16), inputs=[past, both])

    result = fix(model, tmp_path / "out", dim_param={"past_length": 3, "length": 2})

    assert [s.shape for s in result.io.inputs] == [(2, 16), (3, 16), (5, 16)]
    assert result.io.outputs[0].shape == (5, 16)


def test_what_is_computed_from_shapes_is_known_afterwards_and_left_to_an_optimizer(tmp_path: Path) -> None:
    nodes = [
        node("Shape", ["x"], ["s"], "shape"), node("Gather", ["s", "zero"], ["b"], "gather"), node("Unsqueeze", ["b", "axes"], ["u"], "unsqueeze"),
        node("Concat", ["u", "rest"], ["target"], "concat", axis=0), node("Reshape", ["x", "target"], ["r"], "reshape"),
        node("Softmax", ["r"], ["y"], "softmax"),
    ]  # fmt: skip
    numbers = {"zero": np.array(0), "axes": np.array([0]), "rest": np.array([2, -1])}
    model = handler(tmp_path / "in", nodes, [numpy_helper.from_array(v.astype(np.int64), k) for k, v in numbers.items()], y=("batch", 2, "rest"))

    result = fix(model, tmp_path / "out", dim_param={"batch": 4})

    assert result.io.outputs[0].shape == (4, 2, 8)
    assert [n.op_type for n in result.load().graph.node] == [n.op_type for n in model.load().graph.node]


def test_shapes_in_branches_follow(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("t", TensorProto.FLOAT, ["batch", 16])
    then, other = (helper.make_graph([node(kind, ["x"], ["t"], kind)], kind, [], [value]) for kind in ("Relu", "Neg"))
    nodes = [
        node("ReduceSum", ["x"], ["sum"], "sum", keepdims=0), node("Greater", ["sum", "zero"], ["positive"], "greater"),
        node("If", ["positive"], ["y"], "if", then_branch=then, else_branch=other),
    ]  # fmt: skip
    model = handler(tmp_path / "in", nodes, [numpy_helper.from_array(np.array(0, np.float32), "zero")])

    result = fix(model, tmp_path / "out", dim_param={"batch": 2})

    inner = [a.g.output[0].type.tensor_type.shape.dim[0].dim_value for n in result.load().graph.node for a in n.attribute if a.HasField("g")]
    assert inner == [2, 2]


def test_large_weights_go_through_untouched(tmp_path: Path) -> None:
    model = handler(tmp_path / "in", [node("MatMul", ["x", "w"], ["y"], "m")], [random_weight("w", 64, 64)], x=("batch", 64), y=("batch", 64))

    result = fix(model, tmp_path / "out", dim_param={"batch": 2})

    proto = result.load()
    assert proto.graph.initializer[0] == model.load().graph.initializer[0]
    assert [v.name for v in proto.graph.input] == ["x"]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"dim_param": {"bach": 4}}, "Did you mean 'batch'"),
        ({"dim_param": {"rows": 4}}, "an output's axis only"),
        ({"input_shapes": {"X": [4, 16]}}, "Did you mean 'x'"),
        ({"input_shapes": {"x": [4, 8]}}, "axis 1 of input 'x' is fixed at 16"),
        ({"input_shapes": {"x": [4]}}, "must have 2 axes"),
        ({"input_shapes": {"x": [4, 16]}, "dim_param": {"batch": 2}}, "axis 'batch' must get one size"),
    ],
)
def test_names_and_shapes_that_the_model_lacks_are_refused(config: dict[str, Any], told: str, tmp_path: Path) -> None:
    model = two_layers(tmp_path / "in", y=("rows", 16))

    with pytest.raises(PassError, match=told):
        fix(model, tmp_path / "out", **config)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"dim_param": {"batch": 0}}, "whole numbers from 1"),
        ({"dim_param": {"batch": True}}, "whole numbers from 1"),
        ({"input_shapes": {"x": [0, 16]}}, "whole numbers from 1"),
        ({"input_shapes": {"x": 16}}, "lists of whole numbers"),
        ({}, "dim_param, input_shapes or fixed_inputs must be given"),
        ({"fixed_inputs": {"x": {"a": 1}}}, "numbers, texts, or lists"),
    ],
)
def test_sizes_that_are_none_are_refused_before_anything_runs(config: dict[str, Any], told: str) -> None:
    with pytest.raises(PassConfigError, match=told):
        OnnxDynamicToFixedShape(SPEC, config)


def test_a_size_that_the_model_cannot_run_with_is_refused_with_the_operator(tmp_path: Path) -> None:
    model = handler(
        tmp_path / "in", [node("Reshape", ["x", "shape"], ["y"], "halves")],
        [numpy_helper.from_array(np.array([2, 2, 16], np.int64), "shape")], y=(2, 2, 16),
    )  # fmt: skip

    with pytest.raises(PassError, match=r"must run on inputs of the fixed shape \(x \[3, 16\]\).*Reshape"):
        fix(model, tmp_path / "out", dim_param={"batch": 3})


def test_shapes_that_are_fixed_already_change_nothing(tmp_path: Path) -> None:
    model = two_layers(tmp_path / "in", x=(4, 16), y=(4, 16))

    result = fix(model, tmp_path / "out", input_shapes={"x": [4, 16]})

    assert result.digest == model.digest
    assert result.notes["reason"] == "the inputs have these shapes already"


def test_sizes_that_only_data_tell_are_named(tmp_path: Path) -> None:
    nodes = [node("NonZero", ["x"], ["n"], "n"), node("Cast", ["n"], ["y"], "c", to=1)]
    model = handler(tmp_path / "in", nodes, y=(2, "found"))

    result = fix(model, tmp_path / "out", dim_param={"batch": 2})

    assert list(result.notes["outputs_still_dynamic"]) == ["y"]
    onnx.checker.check_model(str(result.path), full_check=True)


def two_rates(folder: Path, *, rate: onnx.ValueInfoProto | None = None) -> ONNXModelHandler:
    """A model that multiplies by one weight at a rate of 16000 and by another one else, where an If on the sum of x chooses what comes next."""
    value = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 16]) for n in ("t", "u")]
    inner = {
        key: helper.make_graph([node(kind, ["m"], ["u"], f"{kind}_inside")], key, [], [value[1]])
        for key, kind in (("then_branch", "Tanh"), ("else_branch", "Neg"))
    }
    nodes = [
        node("MatMul", ["x", "w"], ["m"], "fast"), node("ReduceSum", ["x"], ["sum"], "sum", keepdims=0),
        node("Greater", ["sum", "zero"], ["positive"], "greater"), node("If", ["positive"], ["t"], "on_data", **inner),
    ]  # fmt: skip
    then = helper.make_graph(nodes, "then", [], [value[0]], [random_weight("w", 16, 16)])
    other = helper.make_graph([node("MatMul", ["x", "w"], ["t"], "slow")], "else", [], [value[0]], [random_weight("w", 16, 16, seed=1)])
    outer = [
        node("Constant", [], ["known"], "known", value=numpy_helper.from_array(np.array(16000, np.int64))),
        node("Equal", ["rate", "known"], ["same"], "equal"),
        node("If", ["same"], ["y"], "on_rate", then_branch=then, else_branch=other),
    ]
    given = rate or helper.make_tensor_value_info("rate", TensorProto.INT64, [])
    return handler(folder, outer, [numpy_helper.from_array(np.array(0, np.float32), "zero")], inputs=[given])


@pytest.mark.parametrize(("rate", "kept"), [(16000, "fast"), (8000, "slow")])
def test_an_input_with_a_value_settles_the_if_that_hangs_on_it_and_no_other(rate: int, kept: str, tmp_path: Path) -> None:
    model = two_rates(tmp_path / "in")
    x = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)

    result = fix(model, tmp_path / "out", fixed_inputs={"rate": rate})

    nodes = result.load().graph.node
    assert [n.name for n in nodes if n.op_type == "MatMul"] == [kept]
    assert [n.name for n in nodes if n.op_type == "If"] == (["on_data"] if kept == "fast" else [])
    assert (result.notes["fixed_inputs"], result.notes["resolved_ifs"]) == ({"rate": rate}, 1)
    assert result.size_bytes < 0.7 * model.size_bytes
    assert [s.name for s in result.io.inputs] == ["x", "rate"]
    for data in (np.abs(x), -np.abs(x)):
        np.testing.assert_array_equal(run(result, x=data, rate=np.array(0)), run(model, x=data, rate=np.array(rate)))
    onnx.checker.check_model(result.load(), full_check=True)


def test_what_was_inside_of_a_settled_if_can_be_quantized_statically(tmp_path: Path) -> None:
    x = np.abs(np.random.default_rng(0).standard_normal((8, 16))).astype(np.float32)
    np.savez(tmp_path / "rows.npz", x=x[:, None], rate=np.full(8, 16000))
    (tmp_path / "quantized").mkdir()
    model = two_rates(tmp_path / "in")

    fixed = fix(model, tmp_path / "out", fixed_inputs={"rate": 16000}, dim_param={"batch": 1}, compare_data_dir=str(tmp_path / "rows.npz"))
    result = OnnxStaticQuantization(SPEC, {"calibration_data_dir": str(tmp_path / "rows.npz")}).run(fixed, tmp_path / "quantized")

    assert result.notes["coverage"]["nodes"] == 1
    wanted = run(model, x=x[:1], rate=np.array(16000))
    assert np.abs(run(result, x=x[:1], rate=np.array(16000)) - wanted).max() < 0.05 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("rate", "shape", "told"),
    [
        ({"rat": 1}, (), "Did you mean 'rate'"),
        ({"rate": 1.5}, (), "must be int64"),
        ({"rate": "fast"}, (), "must be int64"),
        ({"rate": [1, 2]}, (), r"must have shape \[\]"),
        ({"rate": 1}, (2,), r"must have shape \[2\]"),
    ],
)
def test_values_that_an_input_can_t_have_are_refused(rate: dict[str, Any], shape: tuple[int, ...], told: str, tmp_path: Path) -> None:
    model = two_rates(tmp_path / "in", rate=helper.make_tensor_value_info("rate", TensorProto.INT64, shape))

    with pytest.raises(PassError, match=told):
        fix(model, tmp_path / "out", fixed_inputs=rate)
