"""What share of a model a pass changed, as every pass tells it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from autotune.model import ONNXModelHandler
from autotune.passes.base import AcceleratorSpec, Pass, PassConfigParam
from autotune.passes.coverage import coverage_of, operator_times
from autotune.passes.registry import get_pass
from tests.passes.small_onnx import handler, random_weight

SQUARE = 16 * 16 * 4  # bytes


def apply(name: str, model: ONNXModelHandler, folder: Path, **config: Any) -> dict[str, Any]:
    """The coverage that a pass tells."""
    folder.mkdir()
    told: dict[str, Any] = get_pass(name)(AcceleratorSpec(), config).run(model, folder).notes["coverage"]
    return told


def counted(told: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(told[name] for name in ("operators", "of_operators", "weight_bytes", "of_weight_bytes"))


@pytest.fixture
def model(tmp_path: Path) -> ONNXModelHandler:
    """Two products, a Tanh between them, and a branch with a product by a weight in a Constant and an Abs."""
    value = helper.make_tensor_value_info("t", TensorProto.FLOAT, ["batch", 16])
    inside = [
        helper.make_node("Constant", [], ["c"], value=random_weight("c", 16, 16, seed=2)),
        helper.make_node("MatMul", ["b", "c"], ["t"], "inside"),
    ]
    then = helper.make_graph(inside, "then", [], [value])
    other = helper.make_graph([helper.make_node("Abs", ["b"], ["t"], "abs")], "else", [], [value])
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "first"),
        helper.make_node("Tanh", ["a"], ["h"], "tanh"),
        helper.make_node("MatMul", ["h", "v"], ["b"], "second"),
        helper.make_node("ReduceSum", ["x"], ["sum"], "sum", keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"], "greater"),
        helper.make_node("If", ["positive"], ["y"], "if", then_branch=then, else_branch=other),
    ]
    zero = numpy_helper.from_array(np.float32(0), "zero")
    return handler(tmp_path / "in", nodes, [random_weight("w", 16, 16), random_weight("v", 16, 16, seed=1), zero])


def test_operators_and_weights_of_branches_count(model: ONNXModelHandler, tmp_path: Path) -> None:
    of = (8, 3 * SQUARE + 4)  # operators, Constants not among them; bytes, those of Constants among them

    nothing = counted(apply("OnnxExternalData", model, tmp_path / "nothing"))
    all_products = counted(apply("OnnxDynamicQuantization", model, tmp_path / "all"))
    outside = counted(apply("OnnxDynamicQuantization", model, tmp_path / "outside", nodes_to_exclude=["inside"]))
    blockwise = counted(apply("OnnxBlockwiseQuantization", model, tmp_path / "blocks", bits=8, nodes_to_exclude=["first", "second"], block_size=16))

    assert nothing == (0, of[0], 0, of[1])
    assert all_products == (3, of[0], 3 * SQUARE, of[1])
    assert outside == (2, of[0], 2 * SQUARE, of[1])
    assert blockwise == (1, of[0], SQUARE, of[1])


def test_float16_changes_what_works_on_float16_and_static_quantization_what_takes_dequantized_values(model: ONNXModelHandler, tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", x=np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32))
    rows = {"calibration_data_dir": str(tmp_path / "rows.npz")}

    one = apply("OnnxStaticQuantization", model, tmp_path / "one", nodes_to_quantize=["second"], **rows)
    narrow = apply("OnnxFloatToFloat16", model, tmp_path / "narrow")

    assert counted(one) == (1, 8, SQUARE, 3 * SQUARE + 4)
    assert one["nodes"] == 1
    assert counted(narrow) == (8, 8, 3 * SQUARE + 4, 3 * SQUARE + 4)


def test_names_and_the_field_that_numbers_are_stored_in_do_not_count(tmp_path: Path) -> None:
    weight = random_weight("w", 16, 16)
    values = numpy_helper.to_array(weight)
    listed = helper.make_tensor("other", TensorProto.FLOAT, values.shape, values.reshape(-1).tolist())
    first = handler(tmp_path / "first", [helper.make_node("MatMul", ["x", "w"], ["y"], "m")], [weight])
    second = handler(tmp_path / "second", [helper.make_node("MatMul", ["x", "other"], ["y"], "n")], [listed])

    assert first.digest != second.digest
    assert counted(coverage_of(first, second)) == (0, 1, 0, SQUARE)


def test_a_model_that_comes_from_another_format_is_new_as_a_whole(model: ONNXModelHandler) -> None:
    assert counted(coverage_of(None, model)) == (8, 8, 3 * SQUARE + 4, 3 * SQUARE + 4)


class Telling(Pass):
    """A pass that tells more about its coverage than is counted for it."""

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {}

    def _run_for_config(self, model: ONNXModelHandler, config: Mapping[str, Any], output_model_path: Path) -> ONNXModelHandler:
        return model.written(output_model_path, proto=model.load(), notes={"changed": True, "coverage": {"heads": 2, "of_heads": 8}})


def test_what_a_pass_tells_itself_stands_beside_what_is_counted(model: ONNXModelHandler, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()

    told = Telling(AcceleratorSpec()).run(model, tmp_path / "out").notes["coverage"]

    assert (told["heads"], told["of_heads"]) == (2, 8)
    assert counted(told) == (0, 8, 0, 3 * SQUARE + 4)


def test_time_is_that_of_the_operators_that_changed_in_bodies_too_and_is_not_counted_twice(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("t", TensorProto.FLOAT, ["batch", 256])
    then = helper.make_graph([helper.make_node("MatMul", ["a", "v"], ["t"])], "then", [], [value])
    other = helper.make_graph([helper.make_node("Abs", ["a"], ["t"])], "else", [], [value])
    nodes = [  # without names; the If takes its time for what is in it
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "least"], ["yes"]),
        helper.make_node("If", ["yes"], ["y"], then_branch=then, else_branch=other),
    ]
    least = numpy_helper.from_array(np.float32(-1e9), "least")
    weights = [random_weight("w", 256, 256), random_weight("v", 256, 256, seed=1), least]
    model = handler(tmp_path / "in", nodes, weights, x=["batch", 256], y=["batch", 256])
    times = operator_times(model, {"x": np.ones((1, 256), np.float32)})
    (tmp_path / "out").mkdir()
    work = get_pass("OnnxDynamicQuantization")(AcceleratorSpec(), {})
    work.operator_times = dict.fromkeys(times, 10.0)

    told = work.run(model, tmp_path / "out").notes["coverage"]

    assert len(times) == 4  # two products by other weights, a sum, a comparison; the branch not taken has no time
    assert min(times.values()) > 0
    assert (told["microseconds"], told["of_microseconds"]) == (20, 40)
    assert "microseconds" not in apply("OnnxDynamicQuantization", model, tmp_path / "untimed")
