"""OnnxQuantization: types, symmetry, powers of two, calibration methods, and the chosen nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from autotune.errors import PassConfigError, PassError
from autotune.model import ONNXModelHandler
from autotune.passes.calibration import activation_ranges, calibration_feeds
from autotune.passes.onnx_quantization import OnnxQuantization
from autotune.target import AcceleratorSpec
from tests.passes.small_onnx import handler, random_weight, run

SPEC = AcceleratorSpec()
X = np.random.default_rng(5).standard_normal((32, 16)).astype(np.float32)


@pytest.fixture
def calib(tmp_path: Path) -> str:
    np.savez(tmp_path / "calib.npz", x=X)
    return str(tmp_path / "calib.npz")


def quantize(model: ONNXModelHandler, folder: Path, pass_class: type[OnnxQuantization] = OnnxQuantization, **config: Any) -> ONNXModelHandler:
    folder.mkdir()
    return pass_class(SPEC, config).run(model, folder)  # type: ignore[return-value] # an ONNX pass gives an ONNX model


def two_layers(folder: Path, *, opset: int = 21) -> ONNXModelHandler:
    """Gemm (weight transposed, with bias), Relu, MatMul."""
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["g"], "/first/Gemm", transB=1),
        helper.make_node("Relu", ["g"], ["r"], "/first/Relu"),
        helper.make_node("MatMul", ["r", "v"], ["y"], "/second/MatMul"),
    ]
    return handler(folder, nodes, [random_weight("w", 32, 16), random_weight("b", 32, seed=1), random_weight("v", 32, 16, seed=2)], opset=opset)


def types_of(model: ONNXModelHandler) -> dict[str, int]:
    return {t.name: t.data_type for t in model.load().graph.initializer}


def error(model: ONNXModelHandler, result: ONNXModelHandler) -> float:
    expected = run(model, x=X)
    return float(np.abs(run(result, x=X) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(("weight_type", "steps"), [("int8", 255), ("uint8", 255), ("int4", 15), ("uint4", 15)])
@pytest.mark.parametrize("activation_type", ["uint8", "uint16", "int16"])
@pytest.mark.parametrize("per_channel", [True, False])
def test_weights_and_activations_have_the_types_asked_for_and_outputs_move_by_a_few_steps(
    weight_type: str, steps: int, activation_type: str, per_channel: bool, tmp_path: Path, calib: str
) -> None:
    model = two_layers(tmp_path / "in")

    result = quantize(
        model, tmp_path / "out", calibration_data_dir=calib, weight_type=weight_type, activation_type=activation_type, per_channel=per_channel
    )

    types = types_of(result)
    assert types["w_quantized"] == types["v_quantized"] == TensorProto.DataType.Value(weight_type.upper())
    assert types["x_zero_point"] == TensorProto.DataType.Value(activation_type.upper())
    assert error(model, result) < 8 / steps
    assert {"nodes": 2, "of_nodes": 2, "weights": 1.0}.items() <= result.notes["coverage"].items()


@pytest.mark.parametrize("config", [{"weight_type": "int4"}, {"activation_type": "uint16"}], ids=str)
def test_types_of_4_and_16_bits_need_opset_21_and_say_so(config: dict[str, Any], tmp_path: Path, calib: str) -> None:
    model = two_layers(tmp_path / "in", opset=17)

    with pytest.raises(PassError, match="need opset 21 or later; got opset 17"):
        quantize(model, tmp_path / "out", calibration_data_dir=calib, **config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_mode": "dynamic", "weight_type": "int4"}, "dynamic mode has weights of 8 bits"),
        ({"quant_format": "QOperator", "activation_type": "int16"}, "QOperator has types of 8 bits only"),
        ({"quant_format": "QOperator", "weight_type": "uint8"}, "QOperator per channel writes int8 weights"),
        ({"weight_symmetric": False}, "symmetric per channel in static mode"),
        ({"weight_type": "uint4", "reduce_range": True}, "reduce_range is for weights of 8 bits"),
        ({"power_of_two_scales": True}, "needs QDQ with symmetric weights and activations"),
        ({"calibrate_method": "minmax", "standard_deviations": 4.0}, "plays no part"),
    ],
    ids=str,
)
def test_what_the_runtime_has_no_form_of_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(PassConfigError, match=words):
        OnnxQuantization(SPEC, config)


@pytest.mark.parametrize("types", [("int8", "int8"), ("uint8", "uint8"), ("int4", "int16")])
@pytest.mark.parametrize("per_channel", [True, False])
def test_scales_are_powers_of_two_without_offsets_where_that_is_asked(types: tuple[str, str], per_channel: bool, tmp_path: Path, calib: str) -> None:
    model = two_layers(tmp_path / "in")
    weight_type, activation_type = types

    symmetric = {"activation_symmetric": True, "weight_symmetric": True, "per_channel": per_channel}
    config = {"weight_type": weight_type, "activation_type": activation_type, "power_of_two_scales": True, **symmetric}
    result = quantize(model, tmp_path / "out", calibration_data_dir=calib, **config)

    held = {t.name: numpy_helper.to_array(t) for t in result.load().graph.initializer}
    linear = [n for n in result.load().graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    exponents = np.log2(np.concatenate([held[n.input[1]].reshape(-1) for n in linear]).astype(np.float64))
    offsets = {int(z) for n in linear for z in held[n.input[2]].reshape(-1)}
    assert (exponents == np.round(exponents)).all()
    assert len({float(e) for e in exponents}) > 1
    assert offsets <= {0, 128}
    assert error(model, result) < (8 / 15 if weight_type == "int4" else 8 / 255)
    traits = OnnxQuantization.traits(OnnxQuantization(SPEC, config).config)
    assert (traits.power_of_two, traits.symmetric_weights, traits.symmetric_activations) == (True, True, True)


def test_the_bias_of_a_power_of_two_model_has_the_product_of_its_input_and_weight_scales(tmp_path: Path, calib: str) -> None:
    config = {"activation_type": "int8", "activation_symmetric": True, "power_of_two_scales": True}

    result = quantize(two_layers(tmp_path / "in"), tmp_path / "out", calibration_data_dir=calib, **config)

    held = {t.name: numpy_helper.to_array(t) for t in result.load().graph.initializer}
    np.testing.assert_array_equal(held["b_quantized_scale"], held["x_scale"] * held["w_scale"])
    bias = numpy_helper.to_array(random_weight("b", 32, seed=1))
    np.testing.assert_allclose(held["b_quantized"] * held["b_quantized_scale"], bias, atol=float(held["b_quantized_scale"].max()))


@pytest.mark.parametrize(("config", "offset"), [({"weight_symmetric": True, "weight_type": "uint8"}, True), ({"weight_symmetric": False}, False)])
def test_weights_are_symmetric_when_that_is_asked_and_the_traits_say_so(config: dict[str, Any], offset: bool, tmp_path: Path, calib: str) -> None:
    uneven = handler(
        tmp_path / "in", [helper.make_node("MatMul", ["x", "w"], ["y"], "m")], [numpy_helper.from_array(np.abs(np.eye(16, dtype=np.float32)), "w")]
    )

    result = quantize(uneven, tmp_path / "out", calibration_data_dir=calib, per_channel=False, **config)

    zero_point = next(int(numpy_helper.to_array(t)) for t in result.load().graph.initializer if t.name == "w_zero_point")
    middle = 128 if config.get("weight_type") == "uint8" else 0
    assert (zero_point == middle) is offset
    assert OnnxQuantization.traits(OnnxQuantization(SPEC, {"per_channel": False, **config}).config).symmetric_weights is offset


def test_calibration_methods_give_the_ranges_that_their_names_say(tmp_path: Path, calib: str) -> None:
    model = two_layers(tmp_path / "in")
    walk = calibration_feeds(Path(calib), model.io, 100, who="test")

    def range_of(method: str, **more: float) -> tuple[float, float]:
        found = activation_ranges(model.path, walk, method=method, percentile=100.0, op_types=["Gemm"], **more)["x"].range_value
        return float(found[0]), float(found[1])

    assert range_of("minmax") == (float(X.min()), float(X.max()))
    np.testing.assert_allclose(range_of("moving_average"), (X.min(axis=1).mean(), X.max(axis=1).mean()), rtol=1e-5)
    reach = 2 * X.astype(np.float64).std()
    np.testing.assert_allclose(range_of("distribution", deviations=2.0), (X.mean() - reach, X.mean() + reach), rtol=1e-4)
    assert range_of("distribution", deviations=50.0) == range_of("minmax")


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_only_the_named_nodes_are_quantized(mode: str, tmp_path: Path, calib: str) -> None:
    model = two_layers(tmp_path / "in")

    result = quantize(model, tmp_path / "out", quant_mode=mode, nodes_to_quantize=["/second/*"], calibration_data_dir=calib)

    assert result.notes["quantized_nodes"] == result.notes["quantizable_nodes"] == 1
    assert result.notes["coverage"]["weights"] == 0.5
    assert "v" not in types_of(result)


def test_nodes_to_quantize_that_match_nothing_are_refused_with_the_nearest_name(tmp_path: Path, calib: str) -> None:
    with pytest.raises(PassError, match=r"nodes_to_quantize must match .* '/second/MatMull'. Did you mean '/second/MatMul'"):
        quantize(two_layers(tmp_path / "in"), tmp_path / "out", nodes_to_quantize=["/second/MatMull"], calibration_data_dir=calib)
