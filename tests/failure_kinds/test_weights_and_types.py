"""Kinds B: weights, scales and types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from autotune.errors import PassConfigError
from autotune.model import ONNXModelHandler
from autotune.passes.base import AcceleratorSpec
from autotune.passes.onnx_blockwise_quantization import OnnxBlockwiseQuantization
from autotune.passes.onnx_quantization import OnnxQuantization
from autotune.search_spaces.space import compile_space, draw_points
from tests.failure_kinds.awkward import FLOAT, IMAGE, MODELS, X, Y, detector, flat, images, model, node, normal, spread, tensor, value, weight
from tests.failure_kinds.kinds import CALIBRATION_METHODS, FORMATS, apply, error, outputs, saved, sound, weights

SPEC = AcceleratorSpec()


def pairs(result: ONNXModelHandler) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Scale and zero point by the value that is quantized, weights included; of a QDQ model."""
    proto = result.load()
    held = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    found = {}
    for one in proto.graph.node:
        if one.op_type == "QuantizeLinear" or (one.op_type == "DequantizeLinear" and one.input[0] in held):
            found[one.input[0]] = (held[one.input[1]], held[one.input[2]])
    return found


# 9


@pytest.mark.parametrize("groups", [1, 2])
def test_convtranspose_per_channel_is_no_worse_than_with_one_scale(groups: int, tmp_path: Path) -> None:
    uneven = spread(8, 8 // groups, 3, 3) * np.logspace(-2, 0.3, 8 // groups)[None, :, None, None]
    nodes = [node("ConvTranspose", ["x", "k", "b"], ["y"], "up", group=groups)]
    shapes = [value("x", FLOAT, ["n", 8, 6, 6])], [value("y", FLOAT, ["n", 8, 8, 8])]
    given = saved(tmp_path / "in", model(nodes, *shapes, [tensor("k", uneven), weight("b", 8)]))
    rows = {"x": normal(8, 8, 6, 6)}

    results = {
        per_channel: apply("OnnxStaticQuantization", given, tmp_path / str(per_channel), rows, per_channel=per_channel)
        for per_channel in (True, False)
    }

    wanted = outputs(given, rows)[0]
    errors = {k: np.abs(outputs(result, rows)[0] - wanted).max(axis=(0, 2, 3)) for k, result in results.items()}
    assert results[True].notes["quantized_nodes"] == 1
    assert error(given, results[True], rows) < 0.02
    # Each channel on its own: with the axis wrong, the quietest channels would drown.
    assert (errors[True] <= 1.1 * errors[False] + 1e-6).all()


# 10


@pytest.mark.parametrize("quant_format", FORMATS)
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("weight_type", ["int8", "uint8"])
@pytest.mark.parametrize("activation_type", ["int8", "uint8"])
def test_weights_have_the_type_that_was_asked_for_or_the_config_is_refused(
    activation_type: str, weight_type: str, per_channel: bool, quant_format: str, tmp_path: Path
) -> None:
    nodes = [node("Conv", ["x", "k"], ["c"], "conv"), node("Relu", ["c"], ["y"], "relu")]
    given = saved(tmp_path / "in", model(nodes, [IMAGE], [value("y", FLOAT, ["n", 4, 6, 6])], [weight("k", 4, 4, 3, 3)]))
    config = {"activation_type": activation_type, "weight_type": weight_type, "per_channel": per_channel, "quant_format": quant_format}

    if (activation_type, weight_type) == ("int8", "uint8") or (quant_format == "QOperator" and per_channel and weight_type == "uint8"):
        with pytest.raises(PassConfigError, match=weight_type):
            apply("OnnxStaticQuantization", given, tmp_path / "out", images(), **config)
        return

    result = apply("OnnxStaticQuantization", given, tmp_path / "out", images(), **config)

    wanted = {"int8": TensorProto.INT8, "uint8": TensorProto.UINT8}
    assert [t.data_type for t in weights(result).values()] == [wanted[weight_type]]
    types = {t.data_type for t in result.load().graph.initializer if t.name.startswith(("x_", "y_")) and t.name.endswith("zero_point")}
    assert types == {wanted[activation_type]}
    assert error(given, result, images()) < 0.03


# 11


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("OnnxStaticQuantization", {"quant_format": "QDQ"}),
        ("OnnxStaticQuantization", {"quant_format": "QOperator"}),
        ("OnnxDynamicQuantization", {}),
    ],
)
def test_weights_of_rank_3_run_and_say_that_they_have_one_scale(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    made = MODELS["weight_of_rank_3"]()
    given = saved(tmp_path / "in", made.proto)

    result = apply(name, given, tmp_path / "out", None if name.startswith("OnnxDynamic") else made.rows, per_channel=True, **config)

    assert "rank 3" in result.notes["per_channel"]
    assert error(given, result, made.rows) < 0.05


# 12


@pytest.mark.parametrize("operator", ["Gemm", "Conv"])
@pytest.mark.parametrize("quant_format", FORMATS)
def test_a_bias_beyond_32_bits_is_not_cut_off(quant_format: str, operator: str, tmp_path: Path) -> None:
    bias = tensor("b", np.linspace(-2, 2, 16))
    if operator == "Gemm":
        proto = model([node("Gemm", ["x", "w", "b"], ["y"], "layer")], [X], [Y], [tensor("w", 1e-7 * spread(16, 16)), bias])
        rows = {"x": 1e-3 * flat()["x"]}
    else:
        kernel = tensor("w", 1e-7 * spread(16, 4, 3, 3))
        proto = model([node("Conv", ["x", "w", "b"], ["y"], "layer")], [IMAGE], [value("y", FLOAT, ["n", 16, 6, 6])], [kernel, bias])
        rows = {"x": 1e-3 * images()["x"]}
    given = saved(tmp_path / "in", proto)

    result = apply("OnnxStaticQuantization", given, tmp_path / "out", rows, quant_format=quant_format)

    # Whether the scale of the weight was raised or the node left in float: cut off, the bias would be off by far more than this.
    assert error(given, result, rows) < 0.02
    assert result.notes["changed"] or "its bias needs more than 32 bits" in result.notes["reason"]


# 13


def test_the_conventions_of_zero_points_are_those_that_were_checked(tmp_path: Path) -> None:
    lopsided = np.abs(spread(16, 16))
    given = saved(tmp_path / "in", model([node("MatMul", ["x", "w"], ["y"], "m")], [X], [Y], [tensor("w", lopsided)]))
    rows = {"x": np.abs(flat()["x"])}
    asked = {
        "uint8, weights symmetric": {"weight_type": "uint8", "weight_symmetric": True},
        "uint8, weights with an offset": {"weight_type": "uint8", "weight_symmetric": False},
        "int8": {"weight_type": "int8"},
        "uint8 activations symmetric": {"activation_symmetric": True},
        "int8 activations symmetric": {"activation_type": "int8", "activation_symmetric": True},
    }

    found = {}
    for number, (words, config) in enumerate(asked.items()):
        result = apply("OnnxStaticQuantization", given, tmp_path / f"{number}", rows, per_channel=False, **config)
        scales = pairs(result)
        found[words] = (int(scales["w_quantized"][1]), int(scales["x"][1]))

    assert found == {
        "uint8, weights symmetric": (128, 0),
        "uint8, weights with an offset": (0, 0),
        "int8": (0, 0),
        "uint8 activations symmetric": (0, 128),
        "int8 activations symmetric": (0, 0),
    }


# 14


@pytest.mark.parametrize("method", CALIBRATION_METHODS)
@pytest.mark.parametrize("quant_format", FORMATS)
def test_ranges_of_nothing_have_a_scale(quant_format: str, method: str, tmp_path: Path) -> None:
    made = MODELS["dead_ranges"]()
    given = saved(tmp_path / "in", made.proto)

    result = apply("OnnxStaticQuantization", given, tmp_path / "out", made.rows, quant_format=quant_format, calibrate_method=method)

    scales = [numpy_helper.to_array(t) for t in result.load().graph.initializer if t.name.endswith("_scale")]
    assert scales
    assert all(np.isfinite(s).all() and (s > 0).all() for s in scales)
    assert error(given, result, made.rows) < (0.9 if method in ("moving_average", "distribution") else 0.2)  # these two cut the ends off


@pytest.mark.parametrize("algorithm", ["rtn", "k_quant", "gptq", "awq"])
def test_blocks_of_nothing_have_a_scale(algorithm: str, tmp_path: Path) -> None:
    made = MODELS["dead_ranges"]()
    given = saved(tmp_path / "in", made.proto)

    result = apply("OnnxBlockwiseQuantization", given, tmp_path / "out", made.rows, algorithm=algorithm, bits=8)

    assert error(given, result, made.rows) < 0.05


# 15


def scores_error(given: ONNXModelHandler, result: ONNXModelHandler, rows: dict[str, np.ndarray]) -> float:
    """Largest error of the scores, which go from 0 to 1, beside boxes of hundreds of pixels."""
    return float(np.abs(outputs(result, rows)[0][:, 4:] - outputs(given, rows)[0][:, 4:]).max())


def test_a_detector_keeps_its_scores_where_only_products_or_all_but_the_worst_are_quantized(tmp_path: Path) -> None:
    proto, rows = detector(64)
    given = saved(tmp_path / "in", proto)

    whole = apply("OnnxStaticQuantization", given, tmp_path / "all", rows, op_types_to_quantize="all")
    products = apply("OnnxStaticQuantization", given, tmp_path / "matmul", rows, op_types_to_quantize="matmul")
    spared = apply("OnnxStaticQuantization", given, tmp_path / "spared", rows, op_types_to_quantize="all", exclude_top_k=3)

    assert scores_error(given, whole, rows) > 0.4  # what users see: scores of 0; the score of a sweep sees it too
    assert scores_error(given, products, rows) < 0.05
    assert scores_error(given, spared, rows) < 0.05
    assert ["tail"] in [group["nodes"] for group in spared.notes["excluded_groups"]]
    choices = compile_space(OnnxQuantization.search_space(SPEC, {"calibration_data_dir": "x.npz"}))
    assert any(point["op_types_to_quantize"] == "matmul" for point in draw_points(choices, min(64, choices.valid), seed=0))


# 16


@pytest.mark.parametrize("operator", ["Softmax", "Sigmoid", "Relu", "Clip"])
def test_symmetric_activations_have_no_offset_whatever_the_operator(operator: str, tmp_path: Path) -> None:
    extra = ["zero", "six"] if operator == "Clip" else []
    nodes = [node("MatMul", ["x", "w"], ["a"], "one"), node(operator, ["a", *extra], ["s"], "squash"), node("MatMul", ["s", "v"], ["y"], "two")]
    held = [weight("w", 16, 16), weight("v", 16, 16, seed=1), tensor("zero", 0.0), tensor("six", 6.0)]
    given = saved(tmp_path / "in", model(nodes, [X], [Y], held))

    result = apply("OnnxStaticQuantization", given, tmp_path / "out", flat(), activation_type="int8", activation_symmetric=True)

    assert {name: int(zero.max()) for name, (_, zero) in pairs(result).items() if zero.any()} == {}
    assert error(given, result, flat()) < 0.06


# 17


@pytest.mark.parametrize("name", ["OnnxFloatToFloat16", "OnnxMixedPrecision"])
def test_operands_that_must_be_float32_stay_so_and_the_rest_is_halved(name: str, tmp_path: Path) -> None:
    nodes = [
        node("Conv", ["x", "k"], ["c"], "conv", pads=[1, 1, 1, 1]),
        node("Mul", ["one_four", "twice"], ["scales"], "scales"),  # computed, so that no initializer tells that it must stay
        node("Resize", ["c", "", "scales"], ["r"], "resize", mode="linear"),
        node("Resize", ["r", "", "", "sizes"], ["s"], "back", mode="nearest"),
        node("Flatten", ["s"], ["f"], "flatten"),
        node("MatMul", ["f", "w"], ["y"], "product"),
    ]
    held = [weight("k", 4, 4, 3, 3), weight("w", 256, 4), tensor("one_four", [1, 1, 1, 1]), tensor("twice", [1, 1, 2, 2])]
    sizes = tensor("sizes", [12, 4, 8, 8], np.int64)
    given = saved(tmp_path / "in", model(nodes, [IMAGE], [value("y", FLOAT, ["n", 4])], [*held, sizes]))

    result = apply(name, given, tmp_path / "out", images() if name == "OnnxMixedPrecision" else None)

    sound(result)
    assert {t.data_type for n, t in weights(result).items() if n.startswith(("k", "w"))} == {TensorProto.FLOAT16}
    assert error(given, result, images()) < 0.01


def test_values_beyond_float16_are_told_or_kept_in_float32(tmp_path: Path) -> None:
    made = MODELS["beyond_float16"]()
    given = saved(tmp_path / "in", made.proto)

    blind = apply("OnnxFloatToFloat16", given, tmp_path / "blind")
    screened = apply("OnnxMixedPrecision", given, tmp_path / "screened", made.rows)

    assert blind.notes["weights_cut_at_max"] == 1
    assert error(given, screened, made.rows) < 0.01
    assert TensorProto.FLOAT16 in {t.data_type for t in weights(screened).values()}


# 18


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("OnnxStaticQuantization", {"quant_format": "QDQ"}),
        ("OnnxStaticQuantization", {"quant_format": "QOperator"}),
        ("OnnxDynamicQuantization", {}),
        ("OnnxBlockwiseQuantization", {}),
        ("OnnxFloatToFloat16", {}),
        ("OnnxMixedPrecision", {}),
    ],
)
def test_what_goes_in_and_comes_out_stays_as_it_was(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    made = MODELS["many_inputs_and_outputs"]()
    given = saved(tmp_path / "in", made.proto)
    takes_data = name not in ("OnnxDynamicQuantization", "OnnxFloatToFloat16", "OnnxBlockwiseQuantization")

    result = apply(name, given, tmp_path / "out", made.rows if takes_data else None, **config)

    assert result.notes["changed"]
    assert result.io == given.io


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *(("OnnxModelOptimizer", {"optimizer": one}) for one in ("onnxslim", "onnxscript", "ort_basic", "ort_extended")),
        *(("OrtTransformersOptimization", {"opt_level": level}) for level in (0, 1)),
        ("OnnxStaticQuantization", {}), ("OnnxDynamicQuantization", {}),
    ],
)  # fmt: skip
def test_an_input_that_nobody_takes_stays(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    made = MODELS["unused_input"]()
    given = saved(tmp_path / "in", made.proto)

    result = apply(name, given, tmp_path / "out", made.rows if name == "OnnxStaticQuantization" else None, **config)

    assert result.notes["changed"]
    assert result.io == given.io
    assert error(given, result, made.rows) < 0.05


# 19


def products(size: int, opset: int) -> onnx.ModelProto:
    nodes = [node("MatMul", ["x", "w"], ["a"], "one"), node("Gemm", ["a", "v"], ["y"], "two", transB=1)]
    return model(nodes, [value("x", FLOAT, ["n", size])], [value("y", FLOAT, ["n", 24])], [weight("w", size, 40), weight("v", 24, 40, seed=1)],
                 opset=opset, ir_version=10)  # fmt: skip


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("quant_format", ["QOperator", "QDQ"])
def test_every_block_size_is_right_where_the_model_is_deployed(quant_format: str, block_size: int, bits: int, tmp_path: Path) -> None:
    given = saved(tmp_path / "in", products(512, 21))
    rows = {"x": normal(8, 512)}

    result = apply("OnnxBlockwiseQuantization", given, tmp_path / "out", block_size=block_size, bits=bits, quant_format=quant_format)

    assert result.notes["changed"]
    assert error(given, result, rows) < (0.02 if bits == 8 else 0.3)


@pytest.mark.parametrize("block_size", [8, 100, 512])
def test_block_sizes_that_the_runtime_has_no_kernel_for_are_refused(block_size: int) -> None:
    with pytest.raises(PassConfigError, match="block_size"):
        OnnxBlockwiseQuantization(SPEC, {"block_size": block_size})


# 20


def test_the_accuracy_level_is_searched_and_each_level_is_near_the_float_model(tmp_path: Path) -> None:
    given = saved(tmp_path / "in", products(256, 17))
    rows = {"x": normal(64, 256)}
    space = OnnxBlockwiseQuantization.search_space(SPEC)

    levels = {level: apply("OnnxBlockwiseQuantization", given, tmp_path / str(level), accuracy_level=level) for level in (0, 4)}

    assert "accuracy_level" in space
    wanted = outputs(given, rows)[0]
    got = {level: outputs(result, rows)[0] for level, result in levels.items()}
    assert not np.array_equal(got[0], got[4])  # it does change what is computed
    for values in got.values():
        assert np.abs(values - wanted).max() < 0.3 * np.abs(wanted).max()
        assert (values.argmax(1) == wanted.argmax(1)).mean() > 0.6
