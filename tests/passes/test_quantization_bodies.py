"""Quantization inside of the bodies of If, Loop and Scan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from autotune.errors import PassError
from autotune.model import ONNXModelHandler
from autotune.passes.base import AcceleratorSpec
from autotune.passes.onnx_graph import graphs_of, operator_counts
from autotune.passes.registry import get_pass
from tests.passes.small_onnx import handler, random_weight, run

node = helper.make_node
POSITIVE = np.abs(np.random.default_rng(0).standard_normal((3, 16))).astype(np.float32)
ZERO = numpy_helper.from_array(np.float32(0), "zero")


def value(name: str, *shape: int | str, type_: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, type_, list(shape))


def quantize(model: ONNXModelHandler, folder: Path, name: str = "OnnxDynamicQuantization", **config: Any) -> ONNXModelHandler:
    folder.mkdir()
    return get_pass(name)(AcceleratorSpec(), config).run(model, folder)  # type: ignore[return-value] # an ONNX pass gives an ONNX model


def branch(output: str, nodes: Sequence[onnx.NodeProto], weights: Sequence[onnx.TensorProto] = ()) -> onnx.GraphProto:
    return helper.make_graph(list(nodes), output, [], [value(output, "batch", 16)], list(weights))


def two_ways(
    folder: Path, then: onnx.GraphProto, other: onnx.GraphProto, weights: Sequence[onnx.TensorProto] = (), *, before: Sequence[onnx.NodeProto] = (),
    opset: int = 17,
) -> ONNXModelHandler:  # fmt: skip
    """A model that takes one branch where the sum of x is positive, and the other one where it is not."""
    total = node("ReduceSum", ["x"], ["sum"], "sum", keepdims=0)
    nodes = [total, node("Greater", ["sum", "zero"], ["positive"], "greater"), *before]
    return handler(folder, [*nodes, node("If", ["positive"], ["y"], "if", then_branch=then, else_branch=other)], [ZERO, *weights], opset=opset)


def errors(model: ONNXModelHandler, result: ONNXModelHandler) -> list[float]:
    """Largest difference as a share of the largest magnitude, on rows for the one and for the other branch."""
    found = []
    for x in (POSITIVE, -POSITIVE):
        wanted, got = run(model, x=x), run(result, x=x)
        assert got.shape == wanted.shape
        found.append(float(np.abs(got - wanted).max() / np.abs(wanted).max()))
    return found


def count(model: ONNXModelHandler, operator: str) -> int:
    return operator_counts(model.load()).get(operator, 0)


@pytest.mark.parametrize("opset", [10, 17])
@pytest.mark.parametrize("per_channel", [False, True])
def test_both_branches_are_quantized_each_with_its_own_weights_under_the_same_names(opset: int, per_channel: bool, tmp_path: Path) -> None:
    if opset == 10 and per_channel:
        pytest.skip("per channel needs opset 13")
    then = branch("r", [node("MatMul", ["x", "w"], ["q"], "one"), node("Relu", ["q"], ["r"])], [random_weight("w", 16, 16)])
    other = branch("r", [node("MatMul", ["x", "w"], ["q"], "two"), node("Abs", ["q"], ["r"])], [random_weight("w", 16, 16, seed=1)])
    model = two_ways(tmp_path / "in", then, other, opset=opset)

    result = quantize(model, tmp_path / "out", per_channel=per_channel)

    assert count(result, "MatMulInteger") == 2
    assert result.notes["coverage"]["nodes_in_bodies"] == result.notes["coverage"]["of_nodes_in_bodies"] == 2
    assert "float_in_bodies" not in result.notes["coverage"]
    assert max(errors(model, result)) < 0.03
    onnx.checker.check_model(result.load(), full_check=True)


def test_a_weight_from_outside_that_both_branches_and_the_main_graph_take_is_stored_once(tmp_path: Path) -> None:
    big = [random_weight("w", 64, 64), random_weight("p", 16, 64, seed=1), random_weight("q", 64, 16, seed=2)]

    def way(name: str, activation: str) -> onnx.GraphProto:
        products = [
            node("MatMul", ["h", "w"], ["m"], f"{name}_hidden"),
            node(activation, ["m"], ["a"]),
            node("MatMul", ["a", "q"], [name], f"{name}_q"),
        ]
        return branch(name, products)

    before = [node("MatMul", ["x", "p"], ["g"], "in"), node("MatMul", ["g", "w"], ["h"], "first")]
    model = two_ways(tmp_path / "in", way("t", "Relu"), way("e", "Tanh"), big, before=before)

    result = quantize(model, tmp_path / "out")

    assert count(result, "MatMulInteger") == 6
    held = [t for g in graphs_of(result.load().graph) for t in g.initializer if t.data_type == TensorProto.INT8 and len(t.dims) == 2]
    assert sorted(tuple(t.dims) for t in held) == [(16, 64), (64, 16), (64, 64)]
    assert not [t for g in graphs_of(result.load().graph) for t in g.initializer if t.data_type == TensorProto.FLOAT and len(t.dims) == 2]
    assert max(errors(model, result)) < 0.05


def loop_with_an_if(folder: Path) -> ONNXModelHandler:
    """Three steps; each multiplies by a weight from outside, and by one of its own where the state's sum is positive."""
    deep = branch("d", [node("MatMul", ["m", "own"], ["d"], "deep")], [random_weight("own", 16, 16, seed=3)])
    flat = branch("f", [node("Neg", ["m"], ["f"], "flat")])
    nodes = [
        node("Gemm", ["h", "w", "b"], ["m"], "step", transB=1, alpha=0.5, beta=2.0),
        node("ReduceSum", ["h"], ["total"], "total", keepdims=0),
        node("Greater", ["total", "zero"], ["up"], "up"),
        node("If", ["up"], ["n"], "inner", then_branch=deep, else_branch=flat),
        node("Tanh", ["n"], ["next"], "tanh"),
        node("Identity", ["go"], ["go_on"], "keep"),
    ]
    flags = [value(n, type_=TensorProto.BOOL) for n in ("go", "go_on")]
    body = helper.make_graph(
        nodes, "body", [value("i", type_=TensorProto.INT64), flags[0], value("h", "batch", 16)], [flags[1], value("next", "batch", 16)]
    )
    held = [random_weight("w", 16, 16), random_weight("b", 16, seed=1), ZERO, numpy_helper.from_array(np.array(3), "three")]
    return handler(folder, [node("Loop", ["three", "", "x"], ["y"], "loop", body=body)], held)


def test_an_if_in_a_loop_and_weights_from_two_graphs_away_are_quantized(tmp_path: Path) -> None:
    model = loop_with_an_if(tmp_path / "in")

    result = quantize(model, tmp_path / "out")

    assert count(result, "MatMulInteger") == 2
    assert result.notes["coverage"]["nodes"] == 2
    assert max(errors(model, result)) < 0.05


def test_nodes_of_bodies_are_excluded_and_chosen_by_name(tmp_path: Path) -> None:
    model = loop_with_an_if(tmp_path / "in")

    without = quantize(model, tmp_path / "without", nodes_to_exclude=["deep"])
    alone = quantize(model, tmp_path / "alone", nodes_to_quantize=["deep"])

    assert without.notes["coverage"]["float_in_bodies"] == {"MatMul": 1}
    assert alone.notes["coverage"]["float_in_bodies"] == {"MatMul": 1}  # what ONNX Runtime makes of every Gemm
    for result in (without, alone):
        assert count(result, "MatMulInteger") == 1
        assert max(errors(model, result)) < 0.05


def test_an_lstm_and_a_table_in_a_body_are_quantized_though_their_weights_lie_outside(tmp_path: Path) -> None:
    weights = [random_weight("W", 1, 64, 16), random_weight("R", 1, 64, 16, seed=1), random_weight("table", 32, 16, seed=2)]
    numbers = [numpy_helper.from_array(np.array(v, np.int64), k) for k, v in {"axis": [0], "rows": [3, 1, 7]}.items()]
    recurrent = [
        node("Unsqueeze", ["x", "axis"], ["u"]),
        node("LSTM", ["u", "W", "R"], ["", "h"], "lstm", hidden_size=16),
        node("Squeeze", ["h", "axis"], ["t"]),
    ]
    looked_up = [node("Gather", ["table", "rows"], ["g"], "look_up"), node("Mul", ["g", "x"], ["e"])]
    model = two_ways(tmp_path / "in", branch("t", recurrent), branch("e", looked_up), [*weights, *numbers])

    result = quantize(model, tmp_path / "out", quant_preprocess=False)  # the optimizer would look the rows up beforehand

    assert count(result, "com.microsoft.DynamicQuantizeLSTM") == 1
    assert result.notes["coverage"]["nodes"] == 2
    assert result.notes["coverage"]["weights"] > 0.9
    assert max(errors(model, result)) < 0.05


def test_static_mode_leaves_bodies_in_float_and_says_why(tmp_path: Path) -> None:
    np.savez(tmp_path / "calibration.npz", x=np.concatenate([POSITIVE, -POSITIVE]))
    data = {"calibration_data_dir": str(tmp_path / "calibration.npz")}
    model = loop_with_an_if(tmp_path / "in")

    result = quantize(model, tmp_path / "out", "OnnxStaticQuantization", nodes_to_exclude=["deep"], **data)

    assert result.notes["changed"] is False
    assert "1 Gemm, 1 MatMul are inside bodies" in result.notes["reason"]
    assert "static ranges are found by looking at values" in result.notes["reason"]
    assert "fixed_inputs" in result.notes["reason"]
    with pytest.raises(PassError, match="must match a node"):
        quantize(model, tmp_path / "in_vain", "OnnxStaticQuantization", nodes_to_quantize=["deep"], **data)


@pytest.mark.parametrize("algorithm", ["rtn", "k_quant"])
def test_blockwise_weights_in_bodies_are_right_where_branches_use_the_same_names_for_other_ranks(algorithm: str, tmp_path: Path) -> None:
    def way(name: str, *shape: int | str, seed: int) -> onnx.GraphProto:
        nodes = [
            node("Reshape", ["x", f"{name}_shape"], ["v"]),
            node("MatMul", ["v", "w"], ["p"], f"{name}_product"),
            node("Reshape", ["p", "back"], ["t"]),
        ]
        made = branch("t", nodes, [random_weight("w", 48, 48, seed=seed)])
        made.value_info.append(value("v", *shape))
        return made

    numbers = {"one_shape": [-1], "two_shape": [1, -1], "back": [3, 16]}
    held = [numpy_helper.from_array(np.array(v, np.int64), k) for k, v in numbers.items()]
    model = two_ways(tmp_path / "in", way("one", 48, seed=1), way("two", 1, 48, seed=2), held)

    result = quantize(model, tmp_path / "out", "OnnxBlockwiseQuantization", bits=8, algorithm=algorithm)

    assert result.notes["quantized_nodes"] == 1
    assert result.notes["left"] == {"MatMul": {"a product with a vector": 1}}
    assert max(errors(model, result)) < 0.03


def test_equal_inputs_give_equal_bytes(tmp_path: Path) -> None:
    model = loop_with_an_if(tmp_path / "in")

    first, second = (quantize(model, tmp_path / name) for name in ("first", "second"))

    assert first.digest == second.digest
