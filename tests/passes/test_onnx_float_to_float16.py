from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from autotune.errors import PassConfigError, PassError
from autotune.model import ONNXModelHandler
from autotune.passes.onnx_float_to_float16 import OnnxFloatToFloat16
from autotune.target import AcceleratorSpec
from tests.passes.small_onnx import handler, random_weight, run

SPEC = AcceleratorSpec()
X = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)


def convert(model: ONNXModelHandler, folder: Path, **config: Any) -> ONNXModelHandler:
    folder.mkdir(parents=True, exist_ok=True)
    return OnnxFloatToFloat16(SPEC, config).run(model, folder)  # type: ignore[return-value] # an ONNX pass gives an ONNX model


def two_layers(folder: Path, **options: Any) -> ONNXModelHandler:
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["g"], "first"),
        helper.make_node("Softmax", ["g"], ["s"], "soft"),
        helper.make_node("MatMul", ["s", "v"], ["y"], "second"),
    ]
    weights = [random_weight("w", 16, 32), random_weight("b", 32, seed=1), random_weight("v", 32, 16, seed=2)]
    return handler(folder, nodes, weights, **options)


def test_weights_are_halved_and_inputs_and_outputs_stay_float32(tmp_path: Path) -> None:
    model = two_layers(tmp_path / "in")

    result = convert(model, tmp_path / "out")

    assert (result.io.inputs, result.io.outputs) == (model.io.inputs, model.io.outputs)
    assert {t.data_type for t in result.load().graph.initializer} == {TensorProto.FLOAT16}
    assert result.notes["float32_weights_left"] == 0
    np.testing.assert_allclose(run(result, x=X), run(model, x=X), atol=2e-3)


def test_inputs_and_outputs_become_float16_when_asked(tmp_path: Path) -> None:
    model = two_layers(tmp_path / "in")

    result = convert(model, tmp_path / "out", keep_io_types=False)

    assert [s.dtype for s in (*result.io.inputs, *result.io.outputs)] == ["float16", "float16"]
    np.testing.assert_allclose(run(result, x=X.astype(np.float16)), run(model, x=X), atol=4e-3)


def test_blocked_operators_and_nodes_stay_float32(tmp_path: Path) -> None:
    model = two_layers(tmp_path / "in")

    by_operator = convert(model, tmp_path / "a", op_block_list=["Gemm"])
    by_name = convert(model, tmp_path / "b", node_block_list=["sec*"])

    assert {t.name: t.data_type for t in by_operator.load().graph.initializer} == {
        "w": TensorProto.FLOAT, "b": TensorProto.FLOAT, "v": TensorProto.FLOAT16,
    }  # fmt: skip
    assert {t.name: t.data_type for t in by_name.load().graph.initializer}["v"] == TensorProto.FLOAT
    assert by_operator.notes["float32_weights_left"] == 2


def test_a_block_list_that_matches_nothing_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    model = two_layers(tmp_path / "in")

    with pytest.raises(PassError, match=r"'Softmaks'.*Did you mean 'Softmax'"):
        convert(model, tmp_path / "a", op_block_list=["Softmaks"])
    with pytest.raises(PassError, match=r"'frist'.*Did you mean 'first'"):
        convert(model, tmp_path / "b", node_block_list=["frist"])


def test_operands_that_must_be_float32_survive(tmp_path: Path) -> None:
    scales = numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales")
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Resize", ["c", "", "scales"], ["y"], "resize"),
    ]
    model = handler(tmp_path / "in", nodes, [random_weight("k", 2, 2, 3, 3), scales], x=(1, 2, 4, 4), y=(1, 2, 8, 8))
    x = X.reshape(-1)[:32].reshape(1, 2, 4, 4)

    result = convert(model, tmp_path / "out")

    np.testing.assert_allclose(run(result, x=x), run(model, x=x), atol=5e-3)


def test_weights_that_float16_can_not_hold_are_counted(tmp_path: Path) -> None:
    values = np.ones((16, 16), np.float32)
    values[0, :3] = 1e6
    values[1, :2] = 1e-9
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "matmul")]
    model = handler(tmp_path / "in", nodes, [numpy_helper.from_array(values, "w")])

    result = convert(model, tmp_path / "out")

    assert (result.notes["weights_cut_at_max"], result.notes["weights_raised_to_min"]) == (3, 2)


def test_a_float16_model_comes_back_as_it_was_and_says_why(tmp_path: Path) -> None:
    once = convert(two_layers(tmp_path / "in"), tmp_path / "once")

    twice = convert(once, tmp_path / "twice")

    assert twice.digest == once.digest
    assert (twice.notes["changed"], twice.notes["reason"]) == (False, "the model is float16 already")


def test_a_model_without_weights_comes_back_as_it_was(tmp_path: Path) -> None:
    model = handler(tmp_path / "in", [helper.make_node("Relu", ["x"], ["y"], "relu")])

    result = convert(model, tmp_path / "out")

    assert result.digest == model.digest
    assert result.notes["reason"] == "the model holds no float32 weights"


def test_a_result_that_no_longer_type_checks_is_refused(tmp_path: Path) -> None:
    zero = numpy_helper.from_array(np.array(0, np.uint8), "zero")
    scale = numpy_helper.from_array(np.array(0.1, np.float32), "scale")
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], "q"),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"], "dq"),
    ]
    model = handler(tmp_path / "in", nodes, [scale, zero])

    with pytest.raises(PassError, match="must still type-check"):
        convert(model, tmp_path / "out")


def test_limits_that_leave_nothing_between_them_are_refused() -> None:
    with pytest.raises(PassConfigError, match="must be below max_finite_val"):
        OnnxFloatToFloat16(SPEC, {"min_positive_val": 1.0, "max_finite_val": 1.0})
    with pytest.raises(PassConfigError, match="max_finite_val"):
        OnnxFloatToFloat16(SPEC, {"max_finite_val": 1e6})
