from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from autotune.errors import PassConfigError, PassError
from autotune.model import ONNXModelHandler
from autotune.passes.known_branches import resolve_ifs
from autotune.passes.onnx_model_optimizer import OnnxModelOptimizer
from autotune.target import AcceleratorSpec
from tests.passes.small_onnx import handler, operators, random_weight, run

SPEC = AcceleratorSpec()
X = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
OPTIMIZERS = ("onnxslim", "onnxscript", "ort_basic", "ort_extended", "ort_all")
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def optimize(model: ONNXModelHandler, folder: Path, optimizer: str, **config: Any) -> ONNXModelHandler:
    folder.mkdir(parents=True, exist_ok=True)
    made = OnnxModelOptimizer(SPEC, {"optimizer": optimizer, **config})
    return made.run(model, folder)  # type: ignore[return-value] # an ONNX pass gives an ONNX model


@each_optimizer
def test_constants_are_folded_and_outputs_stay(optimizer: str, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Constant", [], ["two"], value=numpy_helper.from_array(np.array(2, np.float32), "t")),
        helper.make_node("Mul", ["w", "two"], ["w2"], "fold"),
        helper.make_node("MatMul", ["x", "w2"], ["m"], "matmul"),
        helper.make_node("Identity", ["m"], ["i"], "identity"),
        helper.make_node("Relu", ["i"], ["y"], "relu"),
        helper.make_node("Exp", ["m"], ["unused"], "dead"),
    ]
    model = handler(tmp_path / "in", nodes, [random_weight("w", 16, 16)])

    result = optimize(model, tmp_path / "out", optimizer)

    assert not {"Mul", "Identity", "Constant", "Exp"} & set(operators(result))
    assert result.notes["nodes_after"] < result.notes["nodes_before"] == 6
    assert result.notes["portable"] is (optimizer not in ("ort_extended", "ort_all"))
    assert ("bound_to" in result.notes) is not result.notes["portable"]
    assert result.notes["error"] <= 1e-6
    np.testing.assert_allclose(run(result, x=X), run(model, x=X), rtol=1e-6)


@each_optimizer
def test_a_model_with_nothing_to_do_comes_back_as_it_was_and_says_why(optimizer: str, tmp_path: Path) -> None:
    model = handler(tmp_path / "in", [helper.make_node("MatMul", ["x", "w"], ["y"], "matmul")], [random_weight("w", 16, 16)])

    result = optimize(model, tmp_path / "out", optimizer)

    assert result.digest == model.digest
    assert result.notes["changed"] is False
    assert result.notes["reason"] == f"{optimizer} found nothing to fold, fuse or drop"


@each_optimizer
def test_branches_that_take_outer_values_survive(optimizer: str, tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("t", 1, ["batch", 16])
    then = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["t"], "m")], "then", [], [value])
    other = helper.make_graph([helper.make_node("Add", ["x", "b"], ["t"], "a")], "else", [], [value])
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], "sum", keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"], "greater"),
        helper.make_node("If", ["positive"], ["r"], "if", then_branch=then, else_branch=other),
        helper.make_node("Identity", ["r"], ["y"], "identity"),
    ]
    zero = numpy_helper.from_array(np.array(0, np.float32), "zero")
    model = handler(tmp_path / "in", nodes, [random_weight("w", 16, 16), random_weight("b", 16), zero])

    result = optimize(model, tmp_path / "out", optimizer)

    for x in (np.abs(X), -np.abs(X)):
        np.testing.assert_allclose(run(result, x=x), run(model, x=x), rtol=1e-6)


@each_optimizer
def test_external_data_and_its_folder_are_read_and_left_alone(optimizer: str, tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"], "matmul"), helper.make_node("Identity", ["m"], ["y"], "identity")]
    plain = handler(tmp_path / "plain", nodes, [random_weight("w", 16, 16)])
    (tmp_path / "in").mkdir()
    onnx.save(plain.load(), str(tmp_path / "in" / "model.onnx"), save_as_external_data=True, location="weights.bin", size_threshold=0)
    model = ONNXModelHandler.from_folder(tmp_path / "in")

    result = optimize(model, tmp_path / "out", optimizer)

    np.testing.assert_allclose(run(result, x=X), run(plain, x=X), rtol=1e-6)
    assert sorted(p.name for p in (tmp_path / "in").iterdir()) == ["model.onnx", "weights.bin"]


def test_the_default_is_portable_and_what_is_made_for_one_machine_is_not_searched() -> None:
    row = OnnxModelOptimizer.default_config(SPEC)["optimizer"]

    assert row.default_value == "onnxslim"
    assert row.search_defaults is not None
    assert not {"ort_extended", "ort_all"} & set(getattr(row.search_defaults, "values", ()))


@pytest.mark.parametrize("optimizer", ["ort_basic", "ort_extended"])
def test_a_model_the_library_can_not_take_is_refused_with_its_message(optimizer: str, tmp_path: Path) -> None:
    node = helper.make_node("SecretSauce", ["x"], ["y"], "sauce", domain="acme.ops")
    model = handler(tmp_path / "in", [node], domains={"acme.ops": 1})

    with pytest.raises(PassError, match=f"{optimizer} takes; got .*SecretSauce.*Choose another optimizer"):
        optimize(model, tmp_path / "out", optimizer)


def test_an_optimized_model_can_be_optimized_again(tmp_path: Path) -> None:
    # a saved graph once failed to load again because the same fusion made a weight of the same name
    nodes = [
        helper.make_node("Reshape", ["x", "flat"], ["f"], "flatten"),
        helper.make_node("MatMul", ["f", "w"], ["m"], "matmul"),
        helper.make_node("Add", ["m", "b"], ["y"], "add"),
    ]
    flat = numpy_helper.from_array(np.array([-1, 16], np.int64), "flat")
    model = handler(tmp_path / "in", nodes, [flat, random_weight("w", 16, 16), random_weight("b", 16)])

    once = optimize(model, tmp_path / "once", "ort_extended")
    twice = optimize(once, tmp_path / "twice", "ort_extended")

    np.testing.assert_allclose(run(twice, x=X), run(model, x=X), rtol=1e-5, atol=1e-6)


@each_optimizer
def test_a_branch_that_is_always_taken_takes_the_place_of_its_if(optimizer: str, tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("t", 1, ["batch", 16])
    then = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["t"], "m")], "then", [], [value])
    other = helper.make_graph([helper.make_node("Add", ["x", "b"], ["t"], "a")], "else", [], [value])
    nodes = [helper.make_node("If", ["always"], ["r"], "if", then_branch=then, else_branch=other), helper.make_node("Relu", ["r"], ["y"], "relu")]
    always = numpy_helper.from_array(np.array(True), "always")
    model = handler(tmp_path / "in", nodes, [random_weight("w", 16, 16), random_weight("b", 16), always])

    result = optimize(model, tmp_path / "out", optimizer)

    assert "If" not in operators(result)
    assert "MatMul" in operators(result)
    np.testing.assert_allclose(run(result, x=X), run(model, x=X), rtol=1e-6)


def number(name: str, value: object, dtype: type = np.int64) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(value, dtype), name)


def branching(folder: Path, condition: list[onnx.NodeProto], weights: list[onnx.TensorProto], **options: Any) -> ONNXModelHandler:
    """If `c`: y = x @ w, else y = x + b, both with values named `t` inside."""
    value = helper.make_tensor_value_info("t", 1, ["batch", 16])
    then = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["t"], "m")], "then", [], [value])
    other = helper.make_graph([helper.make_node("Add", ["x", "b"], ["t"], "a")], "else", [], [value])
    nodes = [*condition, helper.make_node("If", ["c"], ["y"], "if", then_branch=then, else_branch=other)]
    return handler(folder, nodes, [random_weight("w", 16, 16), random_weight("b", 16), *weights], **options)


def node(operator: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs, [output], output, **attributes)


CONDITIONS: dict[str, tuple[list[onnx.NodeProto], str]] = {
    "one size of which others are unknown": (
        [node("Shape", ["x"], "s"), node("Gather", ["s", "one"], "d"), node("Equal", ["d", "sixteen"], "c")], "MatMul",
    ),
    "a part of a shape": ([node("Shape", ["x"], "s", start=1), node("Squeeze", ["s"], "d"), node("Less", ["d", "sixteen"], "c")], "Add"),
    "the number of axes": ([node("Shape", ["x"], "s"), node("Size", ["s"], "n"), node("Equal", ["n", "two"], "c")], "MatMul"),
    "a size behind other operators": (
        [node("Transpose", ["x"], "r", perm=[1, 0]), node("Shape", ["r"], "s"), node("Gather", ["s", "zero"], "d"),
         node("Mod", ["d", "two"], "odd"), node("Cast", ["odd"], "c", to=onnx.TensorProto.BOOL)], "Add",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("condition", "taken"), CONDITIONS.values(), ids=CONDITIONS)
def test_a_condition_on_sizes_that_are_known_is_resolved(condition: list[onnx.NodeProto], taken: str, tmp_path: Path) -> None:
    numbers = [number("zero", 0), number("one", 1), number("two", 2), number("sixteen", 16)]
    model = branching(tmp_path / "in", condition, numbers)

    result = optimize(model, tmp_path / "out", "ort_basic")

    assert operators(result) == [taken]
    assert result.notes["ifs_resolved"] == 1
    assert "ifs_left" not in result.notes
    np.testing.assert_allclose(run(result, x=X), run(model, x=X), rtol=1e-6)


@pytest.mark.parametrize(
    ("condition", "why"),
    [
        ([node("ReduceSum", ["x"], "s", keepdims=0), node("Cast", ["s"], "c", to=onnx.TensorProto.BOOL)], "input x"),
        ([node("Shape", ["x"], "s"), node("Gather", ["s", "zero"], "d"), node("Equal", ["d", "one"], "c")], "the sizes of input x"),
    ],
)
def test_a_condition_that_stays_open_is_told_with_what_it_depends_on(condition: list[onnx.NodeProto], why: str, tmp_path: Path) -> None:
    model = branching(tmp_path / "in", condition, [number("zero", 0), number("one", 1)])

    result = optimize(model, tmp_path / "out", "onnxslim")

    assert result.notes["ifs_left"] == {"y": f"its condition depends on {why}"}
    np.testing.assert_allclose(run(result, x=X), run(model, x=X), rtol=1e-6)


def test_ifs_in_branches_and_outputs_that_come_from_outside_are_resolved_too(tmp_path: Path) -> None:
    # the outer branch gives back a value of its own, one from outside, a weight of its own, and one of them twice
    def out(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, 1, None)

    inner = helper.make_graph([node("Mul", ["t", "own"], "u")], "inner", [], [out("u")], [number("own", [3.0], np.float32)])
    dull = helper.make_graph([node("Identity", ["x"], "u")], "dull", [], [out("u")])
    nodes = [node("Neg", ["x"], "t"), helper.make_node("If", ["yes"], ["v"], "if", then_branch=inner, else_branch=dull)]
    then = helper.make_graph(nodes, "then", [], [out("v"), out("t"), out("x"), out("own"), out("v")], [number("own", [5.0], np.float32)])
    names = ["p", "q", "r", "s", "v"]  # v is a name of the branch too
    alike = helper.make_graph([node("Identity", ["x"], f"e{i}") for i in range(5)], "else", [], [out(f"e{i}") for i in range(5)])
    proto = helper.make_model(
        helper.make_graph(
            [helper.make_node("If", ["yes"], names, "outer", then_branch=then, else_branch=alike), helper.make_node("Sum", names, ["y"], "sum")],
            "g", [helper.make_tensor_value_info("x", 1, [2])], [helper.make_tensor_value_info("y", 1, [2])], [number("yes", True, np.bool_)],
        ),
        opset_imports=[helper.make_opsetid("", 17)], ir_version=9,
    )  # fmt: skip
    x = np.array([1.0, 2.0], np.float32)

    found = resolve_ifs(proto)
    (tmp_path / "out").mkdir()
    onnx.save(proto, str(tmp_path / "out" / "model.onnx"))

    onnx.checker.check_model(proto)
    assert (found.resolved, found.left) == (2, {})
    np.testing.assert_allclose(run(ONNXModelHandler.from_folder(tmp_path / "out"), x=x), -3 * x - x + x + 5 - 3 * x)


def expanding(folder: Path) -> ONNXModelHandler:
    """y = x + expand(w * two), whose factor is 64 bytes and whose sum is 64 kB."""
    nodes = [node("Mul", ["w", "two"], "w2"), node("Expand", ["w2", "shape"], "large"), node("Add", ["x", "large"], "y")]
    weights = [random_weight("w", 16), number("two", 2.0, np.float32), number("shape", [1024, 16])]
    return handler(folder, nodes, weights, x=[1024, 16], y=[1024, 16])


@each_optimizer
def test_constants_are_folded_up_to_a_size_and_not_at_all_when_asked(optimizer: str, tmp_path: Path) -> None:
    model = expanding(tmp_path / "in")
    x = np.ones((1024, 16), np.float32)

    folded = optimize(model, tmp_path / "folded", optimizer)
    small = optimize(model, tmp_path / "small", optimizer, fold_size_limit=1024)
    plain = optimize(model, tmp_path / "plain", optimizer, constant_folding=False)

    assert not {"Expand", "Mul"} & set(operators(folded))
    assert folded.notes["weight_bytes_after"] > 60_000
    assert "Expand" in operators(small)
    assert small.notes["constants_not_folded"] >= 1
    assert small.notes["weight_bytes_after"] < 1000
    assert {"Expand", "Mul"} <= set(operators(plain))
    for result in (folded, small, plain):
        np.testing.assert_allclose(run(result, x=x), run(model, x=x), rtol=1e-6)


@pytest.mark.parametrize("optimizer", ["onnxslim", "onnxscript", "ort_basic"])
def test_weights_that_are_quantized_stay_so(optimizer: str, tmp_path: Path) -> None:
    nodes = [node("DequantizeLinear", ["q", "scale"], "w"), node("MatMul", ["x", "w"], "m"), node("Identity", ["m"], "y")]
    model = handler(tmp_path / "in", nodes, [number("q", np.arange(256).reshape(16, 16) % 100, np.int8), number("scale", 0.1, np.float32)])

    result = optimize(model, tmp_path / "out", optimizer)

    assert operators(result) == ["DequantizeLinear", "MatMul"]
    np.testing.assert_allclose(run(result, x=X), run(model, x=X), rtol=1e-6)


def test_dead_parts_that_the_optimizer_leaves_stay_only_when_asked(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "w"], "m"), node("Relu", ["m"], "y"), node("Exp", ["m"], "e"), node("Neg", ["e"], "unused")]
    model = handler(tmp_path / "in", nodes, [random_weight("w", 16, 16)])

    without = optimize(model, tmp_path / "without", "ort_basic")
    with_them = optimize(model, tmp_path / "with", "ort_basic", dead_code=False)  # which changes nothing else

    assert operators(without) == ["MatMul", "Relu"]
    assert without.notes["dead_nodes_dropped"] == 2
    assert "Exp" in operators(with_them)


def test_an_optimizer_that_changes_outputs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: OnnxModelOptimizer, optimizer: str, given: onnx.ModelProto) -> onnx.ModelProto:
        del given.graph.node[0]
        given.graph.node[0].input[0] = "x"
        return given

    monkeypatch.setattr(OnnxModelOptimizer, "_optimized", wrong)
    model = handler(tmp_path / "in", [node("Neg", ["x"], "n"), node("Exp", ["n"], "y")])

    with pytest.raises(PassError, match=r"must give the same outputs; got output 'y' .* differs .*Choose another optimizer"):
        optimize(model, tmp_path / "out", "onnxslim")


def test_casts_that_a_session_writes_around_float16_are_told(tmp_path: Path) -> None:
    half = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT16, ["batch", 16]) for name in ("x", "y")]
    nodes = [node("MatMul", ["x", "w"], "m"), node("Relu", ["m"], "y")]
    graph = helper.make_graph(nodes, "half", half[:1], half[1:], [numpy_helper.from_array(np.eye(16, dtype=np.float16), "w")])
    (tmp_path / "in").mkdir()
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(tmp_path / "in" / "model.onnx"))
    model = ONNXModelHandler.from_folder(tmp_path / "in")

    result = optimize(model, tmp_path / "out", "ort_basic")

    assert result.notes["casts_added"] == result.notes["operators_after"]["Cast"] > 0
    assert result.notes["portable"] is False
    assert "no 16-bit kernels" in result.notes["bound_to"]


@pytest.mark.parametrize("optimizer", ["onnxslim", "onnxscript", "ort_basic"])
def test_metadata_and_nodes_of_one_name_survive(optimizer: str, tmp_path: Path) -> None:
    nodes = [helper.make_node("Neg", ["x"], ["n"], "same"), helper.make_node("Identity", ["n"], ["i"], "other"), node("Exp", ["i"], "y")]
    plain = handler(tmp_path / "plain", nodes)
    proto = plain.load()
    proto.metadata_props.add(key="labels", value="cat,dog")
    (tmp_path / "in").mkdir()
    onnx.save(proto, str(tmp_path / "in" / "model.onnx"))

    result = optimize(ONNXModelHandler.from_folder(tmp_path / "in"), tmp_path / "out", optimizer)

    assert {p.key: p.value for p in result.load().metadata_props}["labels"] == "cat,dog"
    assert operators(result) == ["Exp", "Neg"]


def test_a_size_for_folding_plays_no_part_without_folding() -> None:
    with pytest.raises(PassConfigError, match="fold_size_limit plays no part"):
        OnnxModelOptimizer(SPEC, {"constant_folding": False, "fold_size_limit": 10})
