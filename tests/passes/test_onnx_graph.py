from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from autotune.model import ONNXModelHandler
from autotune.passes import onnx_graph

FLOAT = TensorProto.FLOAT


def value(name: str, *shape: int | str, type_: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, type_, list(shape))


def model_of(nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto] | None = None, **options: object) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", [value("x", 2)], [value("y", 2)], weights or [])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9, **options)


def pair(name: str) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array([1.0, 2.0], np.float32), name)


def model_with_branches() -> onnx.ModelProto:
    """If whose one branch takes `w` from outside and whose other one owns `v`."""
    taken = helper.make_graph([helper.make_node("Add", ["x", "w"], ["t"])], "then", [], [value("t", 2)])
    owned = helper.make_graph([helper.make_node("Mul", ["x", "v"], ["e"])], "else", [], [value("e", 2)], [pair("v")])
    true = numpy_helper.from_array(np.array(True), "c")
    return model_of([helper.make_node("If", ["c"], ["y"], then_branch=taken, else_branch=owned)], [pair("w"), true])


def test_operators_are_counted_in_branches_too() -> None:
    counts = onnx_graph.operator_counts(model_with_branches())

    assert counts == {"Add": 1, "If": 1, "Mul": 1}


def test_no_two_graphs_define_the_same_name_when_values_are_named_apart() -> None:
    inner = helper.make_graph([helper.make_node("Neg", ["t"], ["u"])], "inner", [], [value("u", 2)])
    same = helper.make_graph([helper.make_node("Abs", ["t"], ["u"])], "same", [], [value("u", 2)])
    taking = [helper.make_node("Add", ["x", "v"], ["t"]), helper.make_node("If", ["c"], ["z"], then_branch=inner, else_branch=same)]
    then = helper.make_graph(taking, "then", [], [value("z", 2)], [pair("v")])
    other = helper.make_graph([helper.make_node("Mul", ["x", "v"], ["t"])], "else", [], [value("t", 2)], [pair("v")])
    true = numpy_helper.from_array(np.array(True), "c")
    proto = model_of([helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other)], [true])

    onnx_graph.name_values_apart(proto)

    graphs = list(onnx_graph.graphs_of(proto.graph))
    defined = [name for g in graphs for name in (*(t.name for t in g.initializer), *(o for n in g.node for o in n.output))]
    assert sorted(defined) == ["c", "t", "t_1", "u", "u_1", "v", "v_1", "y", "z"]
    assert [list(n.input) for g in graphs for n in g.node] == [["c"], ["x", "v"], ["x", "v_1"], ["c"], ["t_1"], ["t_1"]]
    assert [v.name for g in graphs for v in g.output] == ["y", "t", "z", "u", "u_1"]  # else before then
    onnx.checker.check_model(proto, full_check=True)


def test_operators_of_other_domains_carry_their_domain() -> None:
    proto = model_of([helper.make_node("FusedThing", ["x"], ["y"], domain="acme.ops")])

    assert onnx_graph.operator_counts(proto) == {"acme.ops.FusedThing": 1}


def test_initializers_that_are_new_get_other_names_wherever_they_are_used() -> None:
    proto = model_with_branches()

    onnx_graph.rename_new_initializers(proto, known={"c"})

    assert onnx_graph.initializer_names(proto) == {"c", "folded_0", "folded_1"}
    onnx.checker.check_model(proto)
    then = next(a.g for a in proto.graph.node[0].attribute if a.name == "then_branch")
    assert "w" not in {name for graph in onnx_graph.graphs_of(proto.graph) for node in graph.node for name in node.input}
    assert then.node[0].input[1] in {t.name for t in proto.graph.initializer}


def test_known_initializers_keep_their_names() -> None:
    proto = model_with_branches()
    before = proto.SerializeToString()

    onnx_graph.rename_new_initializers(proto, known=onnx_graph.initializer_names(proto))

    assert proto.SerializeToString() == before


def test_unnamed_and_repeated_nodes_get_names_of_their_own() -> None:
    nodes = [
        helper.make_node("Add", ["x", "w"], ["a"], name="n"),
        helper.make_node("Add", ["a", "w"], ["b"], name="n"),
        helper.make_node("Relu", ["b"], ["y"]),
    ]
    proto = model_of(nodes, [pair("w")])

    onnx_graph.name_every_node(proto)

    names = [node.name for node in proto.graph.node]
    assert names[0] == "n"
    assert len(set(names)) == 3
    assert all(names)


def test_constants_become_initializers_of_the_same_name() -> None:
    nodes = [helper.make_node("Constant", [], ["w"], value=pair("anything")), helper.make_node("Add", ["x", "w"], ["y"])]
    proto = model_of(nodes)

    lifted = onnx_graph.lift_constants(proto)

    assert lifted == 1
    assert [t.name for t in proto.graph.initializer] == ["w"]
    assert [n.op_type for n in proto.graph.node] == ["Add"]
    onnx.checker.check_model(proto)


def test_a_constant_that_is_an_output_stays_a_node() -> None:
    proto = model_of([helper.make_node("Constant", [], ["y"], value=pair("anything"))])

    assert onnx_graph.lift_constants(proto) == 0


def test_nodes_are_sorted_after_what_they_and_their_branches_take() -> None:
    branch = helper.make_graph([helper.make_node("Relu", ["late"], ["r"])], "b", [], [value("r", 2)])
    nodes = [
        helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch),
        helper.make_node("Neg", ["x"], ["late"]),
    ]
    proto = model_of(nodes, [numpy_helper.from_array(np.array(True), "c")])

    onnx_graph.sort_nodes(proto.graph)

    assert [n.op_type for n in proto.graph.node] == ["Neg", "If"]


def test_a_graph_in_order_keeps_its_order_and_a_cycle_is_refused() -> None:
    ordered = model_of([helper.make_node("Neg", ["x"], ["a"]), helper.make_node("Abs", ["x"], ["b"]), helper.make_node("Add", ["a", "b"], ["y"])])
    cycle = model_of([helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Neg", ["a"], ["b"]), helper.make_node("Neg", ["b"], ["y"])])
    before = ordered.SerializeToString()

    onnx_graph.sort_nodes(ordered.graph)

    assert ordered.SerializeToString() == before
    with pytest.raises(ValueError, match="cycle"):
        onnx_graph.sort_nodes(cycle.graph)


def test_weights_that_are_listed_as_inputs_are_inputs_no_more(tmp_path: Path) -> None:
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", [value("x", 2), value("w", 2)], [value("y", 2)], [pair("w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)], ir_version=3), str(tmp_path / "model.onnx"))

    proto = onnx_graph.load_fixed(ONNXModelHandler.from_folder(tmp_path))

    assert [v.name for v in proto.graph.input] == ["x"]
    onnx.checker.check_model(proto)


def test_a_folded_weight_leaves_no_input_behind(tmp_path: Path) -> None:
    # ConstantOfShape of a weight that is an input too: ONNX Runtime folds the weight away and would keep the input
    shape = numpy_helper.from_array(np.array([2], np.int64), "s")
    nodes = [helper.make_node("ConstantOfShape", ["s"], ["z"]), helper.make_node("Add", ["x", "z"], ["y"])]
    graph = helper.make_graph(nodes, "g", [value("x", 2), value("s", 1, type_=TensorProto.INT64)], [value("y", 2)], [shape])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)], ir_version=3), str(tmp_path / "model.onnx"))

    saved = onnx_graph.optimize_by_session(onnx_graph.load_fixed(ONNXModelHandler.from_folder(tmp_path)), "basic")

    assert [v.name for v in saved.graph.input] == ["x"]
    assert "ConstantOfShape" not in onnx_graph.operator_counts(saved)


def test_libraries_are_kept_quiet_and_logging_is_as_before(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    before = logging.root.manager.disable

    with onnx_graph.quiet():
        print("a library talks")
        logging.getLogger("library").error("and logs")

    assert capsys.readouterr().out == ""
    assert not caplog.records
    assert logging.root.manager.disable == before


def test_patterns_match_whole_names_and_brackets_stand_for_themselves() -> None:
    assert onnx_graph.glob_like("/layer.*/MatMul").fullmatch("/layer.3/MatMul")
    assert onnx_graph.glob_like("a[0]").fullmatch("a[0]")
    assert not onnx_graph.glob_like("a?c").fullmatch("abbc")
