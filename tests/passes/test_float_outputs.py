"""`op_types_to_exclude_output_quantization` of OnnxQuantization: products that are computed in 8 bits and give floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper

from autotune.errors import PassConfigError
from autotune.model import ONNXModelHandler
from autotune.passes.onnx_quantization import OnnxQuantization
from autotune.search_spaces.space import compile_space, enumerate_points
from autotune.session import create_session
from autotune.target import AcceleratorSpec
from tests.passes.small_onnx import handler, random_weight, run

SPEC = AcceleratorSpec()
X = np.random.default_rng(5).standard_normal((32, 16)).astype(np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ONNXModelHandler:
    """A block of a transformer in small: products, biases added to them, a normalization over what is added up."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], "first"),
        helper.make_node("Add", ["m", "b"], ["a"], "bias"),
        helper.make_node("Erf", ["a"], ["e"], "curve"),
        helper.make_node("MatMul", ["e", "v"], ["n"], "second"),
        helper.make_node("Add", ["n", "x"], ["s"], "residual"),
        helper.make_node("LayerNormalization", ["s", "g"], ["y"], "norm"),
    ]
    weights = [random_weight("w", 16, 32), random_weight("b", 32, seed=1), random_weight("v", 32, 16, seed=2), random_weight("g", 16, seed=3)]
    return handler(tmp_path_factory.mktemp("block") / "model", nodes, weights)


def quantize(model: ONNXModelHandler, folder: Path, **config: Any) -> ONNXModelHandler:
    folder.mkdir()
    np.savez(folder.parent / "calib.npz", x=X)
    config = {"op_types_to_quantize": "matmul", "calibration_data_dir": str(folder.parent / "calib.npz"), **config}
    return OnnxQuantization(SPEC, config).run(model, folder)  # type: ignore[return-value] # an ONNX pass gives an ONNX model


def runtime_operators(model: ONNXModelHandler, path: Path) -> set[str]:
    """Types of the operators that the runtime makes of a model."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.optimized_model_filepath, options.intra_op_num_threads, options.log_severity_level = str(path), 1, 3
    ort.InferenceSession(str(model.path), options, providers=["CPUExecutionProvider"])
    return {node.op_type for node in onnx.load(path).graph.node}


def error(model: ONNXModelHandler, result: ONNXModelHandler, x: NDArray[np.float32]) -> float:
    wanted = run(model, x=x).astype(np.float64)
    return float(((run(result, x=x) - wanted) ** 2).mean())


def test_products_with_float_results_still_run_in_eight_bits_and_err_less(model: ONNXModelHandler, tmp_path: Path) -> None:
    whole = quantize(model, tmp_path / "whole")
    kept = quantize(model, tmp_path / "kept", op_types_to_exclude_output_quantization="matmul")

    proto = onnx.load(kept.path)
    results = {node.output[0] for node in proto.graph.node if node.op_type == "MatMul"}
    assert not [n for n in proto.graph.node if n.op_type == "QuantizeLinear" and n.input[0] in results]
    assert "MatMul" not in runtime_operators(kept, tmp_path / "kept.onnx")
    assert kept.notes["quantized_nodes"] == whole.notes["quantized_nodes"] == 2
    assert error(model, kept, X) < 0.8 * error(model, whole, X)


def test_the_order_of_harm_knows_of_float_results(model: ONNXModelHandler, tmp_path: Path) -> None:
    result = quantize(model, tmp_path / "out", op_types_to_exclude_output_quantization="MatMul", exclude_top_k=1)

    assert result.notes["quantized_nodes"] == 1
    assert create_session(result.path, result.session).run(None, {"x": X})[0].shape == X.shape


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"op_types_to_exclude_output_quantization": "matmull"}, "no 'matmull': Did you mean 'matmul'"),
        ({"op_types_to_exclude_output_quantization": "none+matmul"}, "none alone"),
        ({"op_types_to_exclude_output_quantization": "matmul", "quant_format": "QOperator"}, "op_types_to_exclude_output_quantization"),
        ({"op_types_to_exclude_output_quantization": "matmul", "quant_mode": "dynamic"}, "op_types_to_exclude_output_quantization"),
    ],
)
def test_what_can_not_be_meant_is_refused(config: dict[str, str], words: str) -> None:
    with pytest.raises(PassConfigError, match=words):
        OnnxQuantization(SPEC, config)


def test_float_results_are_searched_where_products_stand_among_float_operators() -> None:
    space = compile_space(OnnxQuantization.search_space(SPEC))

    searched = {(p["op_types_to_quantize"], p.get("op_types_to_exclude_output_quantization")) for p in enumerate_points(space)}

    assert {kinds for kinds, kept in searched if kept == "matmul"} == {"matmul", "conv+matmul"}
    assert {kinds for kinds, kept in searched if kept == "none"} == {"all", "conv+matmul", "matmul", "conv"}
