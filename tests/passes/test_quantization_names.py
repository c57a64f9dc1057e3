"""Names that quantizers would give themselves are freed, and what the model computes stays."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from autotune.passes.onnx_outputs import run_at
from autotune.passes.quantization_names import free_names, give_names_back


def value(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 2])


def crowded(inputs: list[str], outputs: list[str]) -> onnx.ModelProto:
    """x, x_scale and x_quantized meet in y and y_zero_point; whichever of them is no input is an initializer."""
    nodes = [
        helper.make_node("Add", ["x", "x_scale"], ["y"], "x_QuantizeLinear"),
        helper.make_node("MatMul", ["y", "x_quantized"], ["y_zero_point"], "x_QuantizeLinear_quant"),
    ]
    held = [
        numpy_helper.from_array(np.full((2, 2), number, np.float32), name)
        for number, name in enumerate(("x", "x_scale", "x_quantized"), 1)
        if name not in inputs
    ]
    graph = helper.make_graph(nodes, "crowded", [value(n) for n in inputs], [value(n) for n in outputs], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.parametrize("inputs", [["x"], ["x", "x_scale"], ["x_scale", "x_quantized"], ["x_quantized"]], ids="+".join)
@pytest.mark.parametrize("outputs", [["y_zero_point"], ["y", "y_zero_point"], ["y", "x"], ["y_zero_point", "x_quantized"]], ids="+".join)
def test_inner_names_are_freed_and_the_model_computes_the_same(inputs: list[str], outputs: list[str]) -> None:
    given = crowded(inputs, outputs)
    freed = onnx.ModelProto.FromString(given.SerializeToString())
    feed = {name: np.arange(4, dtype=np.float32).reshape(2, 2) + number for number, name in enumerate(inputs)}

    renamed = free_names(freed)

    onnx.checker.check_model(freed, full_check=True)
    shown = {*inputs, *outputs}
    made = {n for node in freed.graph.node if node.op_type != "Identity" for n in (*node.input, *node.output)}
    names = made | {t.name for t in freed.graph.initializer} | shown | {node.name for node in freed.graph.node}
    in_the_way = {f"{base}{added}" for base in made for added in ("_scale", "_quantized", "_zero_point", "_QuantizeLinear")} & names
    assert not in_the_way
    assert [v.name for v in (*freed.graph.input, *freed.graph.output)] == [*inputs, *outputs]
    for wanted, got in zip(run_at(given, [feed], "all")[0], run_at(freed, [feed], "all")[0], strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert set(renamed.values()) == {"x_QuantizeLinear", "x_QuantizeLinear_quant"}


def test_nodes_get_their_names_back_also_from_a_node_that_was_added_meanwhile() -> None:
    proto = crowded(["x"], ["y"])
    renamed = free_names(proto)
    proto.graph.node.insert(0, helper.make_node("Identity", ["x"], ["added"], "x_QuantizeLinear"))

    give_names_back(proto, renamed)

    assert [node.name for node in proto.graph.node if node.op_type != "Identity"] == ["x_QuantizeLinear", "x_QuantizeLinear_quant"]
    assert len({node.name for node in proto.graph.node}) == len(proto.graph.node)


def test_names_that_are_in_nobody_s_way_stay() -> None:
    nodes = [helper.make_node("Add", ["x", "bn.scale"], ["bn_added"], "bn"), helper.make_node("Relu", ["bn_added"], ["y"], "bn/Relu")]
    graph = helper.make_graph(nodes, "usual", [value("x")], [value("y")], [numpy_helper.from_array(np.ones((2, 2), np.float32), "bn.scale")])
    proto = helper.make_model(graph)
    before = proto.SerializeToString(deterministic=True)

    assert free_names(proto) == {}
    assert proto.SerializeToString(deterministic=True) == before
