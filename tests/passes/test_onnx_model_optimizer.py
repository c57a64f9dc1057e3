from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from autotune.errors import PassError
from autotune.model import ONNXModelHandler
from autotune.passes.onnx_model_optimizer import OnnxModelOptimizer
from autotune.target import AcceleratorSpec
from tests.passes.small_onnx import handler, operators, random_weight, run

SPEC = AcceleratorSpec()
X = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
OPTIMIZERS = ("onnxslim", "onnxscript", "ort_basic", "ort_extended")
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def optimize(model: ONNXModelHandler, folder: Path, optimizer: str) -> ONNXModelHandler:
    folder.mkdir(parents=True, exist_ok=True)
    return OnnxModelOptimizer(SPEC, {"optimizer": optimizer}).run(model, folder)  # type: ignore[return-value] # an ONNX pass gives an ONNX model


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

    dead = set() if optimizer.startswith("ort_") else {"Exp"}  # ONNX Runtime's session leaves dead nodes in what it saves
    assert not ({"Mul", "Identity", "Constant"} | dead) & set(operators(result))
    assert result.notes["nodes_after"] < result.notes["nodes_before"] == 6
    assert result.notes["portable"] is (optimizer != "ort_extended")
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


def test_the_default_is_portable_and_extended_fusions_are_not_searched() -> None:
    row = OnnxModelOptimizer.default_config(SPEC)["optimizer"]

    assert row.default_value == "onnxslim"
    assert row.search_defaults is not None
    assert "ort_extended" not in getattr(row.search_defaults, "values", ())


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
