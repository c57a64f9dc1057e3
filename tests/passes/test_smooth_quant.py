from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from autotune.errors import PassError
from autotune.model import ONNXModelHandler
from autotune.passes.onnx_quantization import OnnxQuantization
from autotune.passes.smooth_quant import SmoothQuant
from autotune.target import AcceleratorSpec
from tests.passes.small_onnx import handler, operators, random_weight, run

SPEC = AcceleratorSpec()
WIDTH = 32


def constant(name: str, values: NDArray[Any]) -> Any:
    return numpy_helper.from_array(np.asarray(values, np.float32), name)


def rows(count: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)


def outlier_gain() -> NDArray[np.float32]:
    """A layer norm's gain that makes two channels a hundred times larger than the others."""
    gain = np.ones(WIDTH, np.float32)
    gain[[3, 17]] = 100.0
    return gain


@pytest.fixture
def data(tmp_path: Path) -> str:
    np.savez(tmp_path / "calibration.npz", x=rows(64, seed=1))
    return str(tmp_path / "calibration.npz")


def smooth(model: ONNXModelHandler, folder: Path, data: str, **config: Any) -> ONNXModelHandler:
    folder.mkdir(parents=True, exist_ok=True)
    given = {"calibration_data_dir": data, **config}
    return SmoothQuant(SPEC, given).run(model, folder)  # type: ignore[return-value] # an ONNX pass gives an ONNX model


def norm_and_product(folder: Path, *, residual: bool = False) -> ONNXModelHandler:
    """A layer norm with outlier channels before a MatMul; with `residual`, its output goes round the product too."""
    nodes = [
        helper.make_node("LayerNormalization", ["x", "gain", "bias"], ["n"], "norm"),
        helper.make_node("MatMul", ["n", "w"], ["p"], "product"),
        helper.make_node("Add", ["p", "n" if residual else "c"], ["y"], "add"),
    ]
    weights = [constant("gain", outlier_gain()), random_weight("bias", WIDTH, seed=1), random_weight("w", WIDTH, WIDTH, seed=2)]
    return handler(folder, nodes, [*weights, random_weight("c", WIDTH, seed=3)], x=("batch", WIDTH), y=("batch", WIDTH))


def weight_of(model: ONNXModelHandler, operator: str, index: int) -> NDArray[Any]:
    proto = model.load()
    name = next(n.input[index] for n in proto.graph.node if n.op_type == operator)
    return numpy_helper.to_array(next(t for t in proto.graph.initializer if t.name == name))


def test_scales_move_from_the_norm_into_the_weight_and_outputs_stay(data: str, tmp_path: Path) -> None:
    model = norm_and_product(tmp_path / "in")

    result = smooth(model, tmp_path / "out", data)

    assert operators(result) == operators(model)
    gain, weight = weight_of(result, "LayerNormalization", 1), weight_of(result, "MatMul", 1)
    assert gain.max() / np.median(gain) < 30  # 100 before
    np.testing.assert_allclose(gain[:, None] * weight, outlier_gain()[:, None] * weight_of(model, "MatMul", 1), rtol=1e-5)
    np.testing.assert_allclose(run(result, x=rows(8)), run(model, x=rows(8)), rtol=1e-4, atol=1e-4)
    pair = result.notes["pairs"][0]
    assert (pair["value"], pair["products"], pair["folded"]) == ("n", ["product"], True)
    assert pair["spread_after"] < pair["spread_before"] / 3


def test_scales_are_those_of_the_formula(data: str, tmp_path: Path) -> None:
    model = norm_and_product(tmp_path / "in")
    x = np.load(data)["x"]
    normed = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    largest = np.abs(normed * outlier_gain() + weight_of(model, "LayerNormalization", 2)).max(0)
    expected = largest**0.7 / np.abs(weight_of(model, "MatMul", 1)).max(1) ** 0.3

    result = smooth(model, tmp_path / "out", data, alpha=0.7)

    scales = weight_of(result, "MatMul", 1)[:, 0] / weight_of(model, "MatMul", 1)[:, 0]
    np.testing.assert_allclose(scales / scales[0], expected / expected[0], rtol=1e-3)


def test_static_quantization_loses_less_afterwards(data: str, tmp_path: Path) -> None:
    model = norm_and_product(tmp_path / "in")
    smoothed = smooth(model, tmp_path / "smooth", data)
    config = {"quant_mode": "static", "calibration_data_dir": data, "op_types_to_quantize": "matmul", "per_channel": True}

    def error(given: ONNXModelHandler, name: str) -> float:
        (tmp_path / name).mkdir()
        quantized = OnnxQuantization(SPEC, config).run(given, tmp_path / name)
        wanted = run(model, x=rows(64, seed=5))
        return float(np.linalg.norm(run(quantized, x=rows(64, seed=5)) - wanted) / np.linalg.norm(wanted))  # type: ignore[arg-type] # ONNX in, ONNX out

    assert error(smoothed, "a") < error(model, "b")


def test_where_a_residual_branches_off_nothing_is_folded_and_a_mul_is_inserted_when_asked(data: str, tmp_path: Path) -> None:
    model = norm_and_product(tmp_path / "in", residual=True)

    left = smooth(model, tmp_path / "left", data)
    inserted = smooth(model, tmp_path / "inserted", data, unfoldable="insert")

    assert left.digest == model.digest
    assert left.notes["reason"] == "nothing to scale: something else takes the value too (1 times)"
    assert operators(inserted) == sorted([*operators(model), "Mul"])
    assert inserted.notes["folded"] == 0
    np.testing.assert_allclose(run(inserted, x=rows(8)), run(model, x=rows(8)), rtol=1e-4, atol=1e-3)


def test_scales_are_folded_through_what_is_linear_and_into_what_is_before(data: str, tmp_path: Path) -> None:
    """Two products with a rectifier between them, a gated product, and a norm written out in single operators."""
    nodes = [
        helper.make_node("Gemm", ["x", "a", "ab"], ["h0"], "gemm", transB=1),
        helper.make_node("Relu", ["h0"], ["h1"], "relu"),
        helper.make_node("MatMul", ["h1", "up"], ["u"], "up"),
        helper.make_node("MatMul", ["h1", "gate"], ["g0"], "gate"),
        helper.make_node("Sigmoid", ["g0"], ["g1"], "sigmoid"),
        helper.make_node("Mul", ["g1", "u"], ["gated"], "gated"),
        helper.make_node("MatMul", ["gated", "down"], ["d"], "down"),
        helper.make_node("ReduceMean", ["d"], ["m"], "mean", axes=[1], keepdims=1),
        helper.make_node("Sub", ["d", "m"], ["s"], "sub"),
        helper.make_node("Mul", ["s", "gain"], ["n0"], "scale"),
        helper.make_node("Add", ["n0", "shift"], ["n1"], "shift"),
        helper.make_node("MatMul", ["n1", "last"], ["y"], "last"),
    ]
    names = ("a", "up", "gate", "down", "last")
    weights = [random_weight(n, WIDTH, WIDTH, seed=i) for i, n in enumerate(names)]
    weights += [random_weight("ab", WIDTH, seed=7), random_weight("shift", WIDTH, seed=8), constant("gain", outlier_gain())]
    model = handler(tmp_path / "in", nodes, weights, x=("batch", WIDTH), y=("batch", WIDTH))

    result = smooth(model, tmp_path / "out", data)

    assert result.notes["left"] == {}
    assert [p["value"] for p in result.notes["pairs"]] == ["h1", "gated", "n1"]
    assert result.notes["folded"] == 3
    assert operators(result) == operators(model)
    np.testing.assert_allclose(run(result, x=rows(8)), run(model, x=rows(8)), rtol=1e-3, atol=1e-3)


def test_a_weight_that_others_take_too_is_copied(data: str, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("LayerNormalization", ["x", "gain", "bias"], ["n"], "norm"),
        helper.make_node("MatMul", ["n", "w"], ["p"], "product"),
        helper.make_node("Tanh", ["p"], ["t"], "tanh"),
        helper.make_node("MatMul", ["t", "w"], ["y"], "again"),
    ]
    weights = [constant("gain", outlier_gain()), random_weight("bias", WIDTH, seed=1), random_weight("w", WIDTH, WIDTH, seed=2)]
    model = handler(tmp_path / "in", nodes, weights, x=("batch", WIDTH), y=("batch", WIDTH))

    result = smooth(model, tmp_path / "out", data)

    taken = {n.name: n.input[-1] for n in result.load().graph.node}
    assert taken["again"] == "w"
    assert taken["product"] != "w"
    np.testing.assert_allclose(run(result, x=rows(8)), run(model, x=rows(8)), rtol=1e-4, atol=1e-4)


def test_channels_that_are_never_touched_keep_their_size(data: str, tmp_path: Path) -> None:
    gain = outlier_gain()
    gain[5] = 0.0
    model = norm_and_product(tmp_path / "in")
    proto = model.load()
    for name, values in (("gain", gain), ("bias", np.zeros(WIDTH, np.float32))):
        tensor = next(t for t in proto.graph.initializer if t.name == name)
        tensor.CopyFrom(constant(name, values))
    (tmp_path / "dead").mkdir()
    dead = model.written(tmp_path / "dead", proto=proto)

    result = smooth(dead, tmp_path / "out", data)

    np.testing.assert_array_equal(weight_of(result, "MatMul", 1)[5], weight_of(model, "MatMul", 1)[5])
    assert np.isfinite(run(result, x=rows(8))).all()


def test_excluded_products_stay_and_names_that_match_nothing_are_refused(data: str, tmp_path: Path) -> None:
    model = norm_and_product(tmp_path / "in")

    result = smooth(model, tmp_path / "out", data, nodes_to_exclude=["prod*"])

    assert result.digest == model.digest
    assert result.notes["reason"] == "nothing to scale: excluded (1 times)"
    with pytest.raises(PassError, match=r"'produkt'.*Did you mean 'product'"):
        smooth(model, tmp_path / "wrong", data, nodes_to_exclude=["produkt"])


def test_a_model_without_products_comes_back_as_it_was(data: str, tmp_path: Path) -> None:
    model = handler(tmp_path / "in", [helper.make_node("Relu", ["x"], ["y"], "relu")], x=("batch", WIDTH), y=("batch", WIDTH))

    result = smooth(model, tmp_path / "out", data)

    assert result.digest == model.digest
    assert result.notes["reason"] == "no MatMul or Gemm multiplies an inner value by constant weights"


def test_a_change_of_outputs_is_refused(data: str, tmp_path: Path) -> None:
    """A comparison at the point of rounding: the last digits of a value decide whether an output is 0 or 1."""
    nodes = [
        helper.make_node("LayerNormalization", ["x", "gain", "bias"], ["n"], "norm"),
        helper.make_node("MatMul", ["n", "w"], ["p"], "product"),
        helper.make_node("Mul", ["p", "huge"], ["h"], "huge"),
        helper.make_node("Sin", ["h"], ["y"], "sine"),
    ]
    weights = [constant("gain", outlier_gain()), random_weight("bias", WIDTH, seed=1), random_weight("w", WIDTH, WIDTH, seed=2)]
    model = handler(tmp_path / "in", nodes, [*weights, constant("huge", np.array(1e7))], x=("batch", WIDTH), y=("batch", WIDTH))

    with pytest.raises(PassError, match="must leave the float model's outputs as they are; got output 'y'"):
        smooth(model, tmp_path / "out", data)


def test_calibration_data_is_always_needed(tmp_path: Path) -> None:
    assert SmoothQuant.needed_data(SmoothQuant(SPEC, {}).config) == {"calibration"}
    with pytest.raises(PassError, match="needs calibration data"):
        SmoothQuant(SPEC, {}).run(norm_and_product(tmp_path / "in"), tmp_path)


def test_float16_weights_keep_their_type(data: str, tmp_path: Path) -> None:
    half = [
        numpy_helper.from_array(numpy_helper.to_array(t).astype(np.float16), t.name)
        for t in (constant("gain", outlier_gain()), random_weight("bias", WIDTH, seed=1), random_weight("w", WIDTH, WIDTH, seed=2))
    ]
    nodes = [
        helper.make_node("Cast", ["x"], ["x16"], "down", to=TensorProto.FLOAT16),
        helper.make_node("LayerNormalization", ["x16", "gain", "bias"], ["n"], "norm"),
        helper.make_node("MatMul", ["n", "w"], ["p"], "product"),
        helper.make_node("Cast", ["p"], ["y"], "up", to=TensorProto.FLOAT),
    ]
    model = handler(tmp_path / "in", nodes, half, x=("batch", WIDTH), y=("batch", WIDTH))

    result = smooth(model, tmp_path / "out", data)

    assert {t.data_type for t in result.load().graph.initializer} == {TensorProto.FLOAT16}
