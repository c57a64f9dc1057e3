from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from autotune.errors import PassConfigError, PassError
from autotune.model import ONNXModelHandler
from autotune.passes.onnx_quantization import DYNAMIC_OPERATORS, QDQ_OPERATORS, QOPERATOR_OPERATORS, OnnxQuantization
from autotune.search_spaces.parameters import INACTIVE, Categorical
from autotune.search_spaces.space import compile_space, enumerate_points
from autotune.session import create_session
from autotune.target import AcceleratorSpec
from tests.passes.small_onnx import handler, operators, random_weight, run

SPEC = AcceleratorSpec()
DYNAMIC = {"quant_mode": "dynamic"}


def quantize(model: ONNXModelHandler, folder: Path, **config: Any) -> ONNXModelHandler:
    folder.mkdir(parents=True, exist_ok=True)
    return OnnxQuantization(SPEC, config).run(model, folder)  # type: ignore[return-value] # an ONNX pass gives an ONNX model


@pytest.fixture
def x() -> NDArray[np.float32]:
    return np.random.default_rng(5).standard_normal((32, 16)).astype(np.float32)


@pytest.fixture
def calib(tmp_path: Path, x: NDArray[np.float32]) -> str:
    np.savez(tmp_path / "calib.npz", x=x)
    return str(tmp_path / "calib.npz")


def two_layers(folder: Path, **options: Any) -> ONNXModelHandler:
    """Gemm (weight transposed), Relu, MatMul, Add."""
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["g"], "/first/Gemm", transB=1),
        helper.make_node("Relu", ["g"], ["r"], "/first/Relu"),
        helper.make_node("MatMul", ["r", "v"], ["m"], "/second/MatMul"),
        helper.make_node("Add", ["m", "c"], ["y"], "/second/Add"),
    ]
    weights = [random_weight("w", 32, 16), random_weight("b", 32, seed=1), random_weight("v", 32, 16, seed=2), random_weight("c", 16, seed=3)]
    return handler(folder, nodes, weights, **options)


@pytest.fixture(scope="module")
def digits_model(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> ONNXModelHandler:
    folder = tmp_path_factory.mktemp("float")
    shutil.copyfile(digits / "model.onnx", folder / "model.onnx")
    return ONNXModelHandler.from_folder(folder)


def accuracy(model: ONNXModelHandler, digits: Path) -> float:
    with np.load(digits / "eval.npz") as data:
        logits = create_session(model.path, model.session).run(None, {"x": data["x"]})[0]
        return float((logits.argmax(-1) == data["labels"]).mean())


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"per_channel": False},
        {"calibrate_method": "entropy"},
        {"calibrate_method": "percentile"},
        {"quant_format": "QOperator"},
        {"weight_type": "uint8"},
        {"activation_type": "int8"},
        {"reduce_range": True},
        {"quant_preprocess": False},
        {"op_types_to_quantize": "conv+matmul"},
    ],
    ids=str,
)
def test_static_quantization_keeps_accuracy_and_quarters_the_weights(
    config: dict[str, Any], digits: Path, digits_model: ONNXModelHandler, tmp_path: Path
) -> None:
    result = quantize(digits_model, tmp_path / "out", calibration_data_dir=str(digits / "calib.npz"), **config)

    assert accuracy(result, digits) >= accuracy(digits_model, digits) - 0.04
    assert result.size_bytes < 0.5 * digits_model.size_bytes
    assert result.notes["changed"] is True
    assert result.notes["quantized_nodes"] == result.notes["quantizable_nodes"] == 4


def test_static_quantization_moves_outputs_by_less_than_the_steps_of_8_bits_explain(tmp_path: Path, calib: str, x: NDArray[np.float32]) -> None:
    model = two_layers(tmp_path / "in")

    result = quantize(model, tmp_path / "out", calibration_data_dir=calib)

    expected = run(model, x=x)
    assert np.abs(run(result, x=x) - expected).max() < 0.05 * np.abs(expected).max()


def test_dynamic_quantization_leaves_conv_alone_unless_it_is_named(digits_model: ONNXModelHandler, tmp_path: Path) -> None:
    usual = quantize(digits_model, tmp_path / "usual", **DYNAMIC)
    named = quantize(digits_model, tmp_path / "named", op_types_to_quantize="all+Conv", **DYNAMIC)

    assert "ConvInteger" not in operators(usual)
    assert operators(usual).count("MatMulInteger") == 1
    assert operators(named).count("ConvInteger") == 3


@pytest.mark.parametrize("weight_type", ["int8", "uint8"])
@pytest.mark.parametrize("per_channel", [True, False])
def test_dynamic_quantization_is_near_to_the_float_model(weight_type: str, per_channel: bool, tmp_path: Path, x: NDArray[np.float32]) -> None:
    model = two_layers(tmp_path / "in")

    result = quantize(model, tmp_path / "out", weight_type=weight_type, per_channel=per_channel, **DYNAMIC)

    expected = run(model, x=x)
    assert operators(result).count("MatMulInteger") == 2
    assert np.abs(run(result, x=x) - expected).max() < 0.05 * np.abs(expected).max()


def test_only_the_named_operators_are_quantized(digits: Path, digits_model: ONNXModelHandler, tmp_path: Path) -> None:
    conv = quantize(digits_model, tmp_path / "conv", op_types_to_quantize="conv", calibration_data_dir=str(digits / "calib.npz"))
    matmul = quantize(digits_model, tmp_path / "matmul", op_types_to_quantize="matmul", calibration_data_dir=str(digits / "calib.npz"))

    assert conv.notes["quantized_nodes"] == 3
    assert matmul.notes["quantized_nodes"] == 1


@pytest.mark.parametrize("mode", ["static", "dynamic"])
@pytest.mark.parametrize("pattern", ["/first/Gemm", "/first/*", "*Gemm"])
def test_excluded_nodes_stay_float_in_every_mode(mode: str, pattern: str, tmp_path: Path, calib: str) -> None:
    model = two_layers(tmp_path / "in")

    result = quantize(model, tmp_path / "out", quant_mode=mode, nodes_to_exclude=[pattern], calibration_data_dir=calib)

    proto = result.load()
    floats = {t.name: tuple(t.dims) for t in proto.graph.initializer if t.data_type == TensorProto.FLOAT}
    assert result.notes["quantized_nodes"] == result.notes["quantizable_nodes"] == 1
    assert (32, 16) in floats.values() or (16, 32) in floats.values()


def test_a_node_whose_name_a_fusion_takes_away_stays_float_too(tmp_path: Path, x: NDArray[np.float32]) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"], "conv"),
        helper.make_node("BatchNormalization", ["c", "s", "o", "m", "v"], ["n"], "norm"),
        helper.make_node("Conv", ["n", "k2"], ["y"], "conv2"),
    ]
    ones = numpy_helper.from_array(np.full(8, 2, np.float32), "v")
    weights = [random_weight("k", 8, 1, 3), random_weight("k2", 4, 8, 3), random_weight("s", 8), random_weight("o", 8), random_weight("m", 8), ones]
    model = handler(tmp_path / "in", nodes, weights, x=("batch", 1, 16), y=("batch", 4, 12))
    np.savez(tmp_path / "rows.npz", x=x[:, None])

    result = quantize(model, tmp_path / "out", nodes_to_exclude=["norm", "conv2"], calibration_data_dir=str(tmp_path / "rows.npz"))

    held = {tuple(t.dims): t.data_type for t in result.load().graph.initializer if len(t.dims) == 3}
    assert held[(4, 8, 3)] == TensorProto.FLOAT
    np.testing.assert_allclose(run(result, x=x[:, None]), run(model, x=x[:, None]), atol=0.2)


def test_an_exclusion_that_matches_nothing_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    model = two_layers(tmp_path / "in")

    with pytest.raises(PassError, match=r"'/first/Gem'.*Did you mean '/first/Gemm'"):
        quantize(model, tmp_path / "out", nodes_to_exclude=["/first/Gem"], **DYNAMIC)


def test_the_config_refuses_what_onnx_runtime_can_not_do() -> None:
    with pytest.raises(PassConfigError, match="int8 activations need int8 weights"):
        OnnxQuantization(SPEC, {"activation_type": "int8", "weight_type": "uint8"})
    with pytest.raises(PassConfigError, match=r"'MatMull'.*Did you mean 'MatMul'"):
        OnnxQuantization(SPEC, {"op_types_to_quantize": "Conv+MatMull"})
    with pytest.raises(PassConfigError, match="operators that dynamic has"):
        OnnxQuantization(SPEC, {"op_types_to_quantize": "Relu", **DYNAMIC})
    with pytest.raises(PassConfigError, match="plays no part"):
        OnnxQuantization(SPEC, {"calibrate_method": "minmax", **DYNAMIC})
    with pytest.raises(PassConfigError, match="percentile"):
        OnnxQuantization(SPEC, {"calibrate_method": "percentile", "percentile": 10.0})
    with pytest.raises(PassConfigError, match="calibration_samples"):
        OnnxQuantization(SPEC, {"calibration_samples": 0})


def test_parameters_of_the_other_mode_are_inactive() -> None:
    dynamic, static = OnnxQuantization(SPEC, DYNAMIC).config, OnnxQuantization(SPEC, {}).config

    assert not {"activation_type", "quant_format", "calibrate_method", "calibration_samples", "percentile"} & set(dynamic)
    assert (static["activation_type"], static["quant_format"], static["calibrate_method"]) == ("uint8", "QDQ", "minmax")
    assert "percentile" not in static
    assert OnnxQuantization(SPEC, {"calibrate_method": "percentile"}).config["calibration_samples"] == 32


def test_the_search_space_leaves_out_what_is_slow_or_impossible() -> None:
    space = compile_space(OnnxQuantization.search_space(SPEC, {"reduce_range": False}))

    points = list(enumerate_points(space))
    # static: 3 methods, per channel or not, and for all, conv, matmul, conv+matmul so many shares left out times products in float or not;
    # dynamic: 2 weight types, 2 sets of operators, per channel or not
    assert len(points) == 3 * 2 * (4 * 1 + 1 * 1 + 1 * 2 + 4 * 2) + 2 * 2 * 2
    assert all(p["weight_type"] == "int8" for p in points if p["quant_mode"] == "static")
    assert all(p.get("activation_type", "uint8") == "uint8" for p in points)
    for point in points:
        OnnxQuantization(SPEC, point)


def test_choices_listed_by_a_user_stay_inactive_where_they_play_no_part() -> None:
    space = OnnxQuantization.search_space(SPEC, {"quant_format": ["QDQ", "QOperator"], "op_types_to_quantize": ["all", "MatMul+Add"]})

    quant_format = space["quant_format"]
    assert not isinstance(quant_format, Categorical)
    assert quant_format.branch(DYNAMIC) is INACTIVE
    assert quant_format.branch({"quant_mode": "static"}) == Categorical(["QDQ", "QOperator"])


def test_the_operators_listed_are_those_that_onnx_runtime_knows() -> None:
    from onnxruntime.quantization import registry

    assert set(registry.IntegerOpsRegistry) | {"Gemm"} == DYNAMIC_OPERATORS
    assert set(registry.QLinearOpsRegistry) == QOPERATOR_OPERATORS
    assert set(registry.QLinearOpsRegistry) | set(registry.QDQRegistry) == QDQ_OPERATORS


def test_per_channel_before_opset_13_is_refused_in_words(tmp_path: Path, calib: str, x: NDArray[np.float32]) -> None:
    model = two_layers(tmp_path / "in", opset=11)

    with pytest.raises(PassError, match="per_channel needs opset 13 or later; got opset 11"):
        quantize(model, tmp_path / "out", calibration_data_dir=calib)
    result = quantize(model, tmp_path / "per_tensor", per_channel=False, calibration_data_dir=calib)

    expected = run(model, x=x)
    assert np.abs(run(result, x=x) - expected).max() < 0.05 * np.abs(expected).max()


def test_a_model_that_is_quantized_already_is_refused(tmp_path: Path) -> None:
    once = quantize(two_layers(tmp_path / "in"), tmp_path / "once", **DYNAMIC)

    with pytest.raises(PassError, match="takes a float model"):
        quantize(once, tmp_path / "twice", **DYNAMIC)


def test_static_mode_without_data_and_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = two_layers(tmp_path / "in")
    wild = model.load()
    held = numpy_helper.to_array(wild.graph.initializer[0]).copy()
    held[0, 0] = np.nan
    wild.graph.initializer[0].CopyFrom(numpy_helper.from_array(held, "w"))
    (tmp_path / "wild").mkdir()
    onnx.save(wild, str(tmp_path / "wild" / "model.onnx"))

    with pytest.raises(PassError, match="static mode needs calibration data"):
        quantize(model, tmp_path / "out")
    with pytest.raises(PassError, match="weights must be finite; got NaN or infinity in 'w'"):
        quantize(ONNXModelHandler.from_folder(tmp_path / "wild"), tmp_path / "out2", **DYNAMIC)


def loop_model(folder: Path) -> ONNXModelHandler:
    """A Loop whose body multiplies by a weight from outside."""
    state = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 16]) for n in ("state", "next")]
    flags = [helper.make_tensor_value_info(n, TensorProto.BOOL, []) for n in ("go", "go_on")]
    count = helper.make_tensor_value_info("i", TensorProto.INT64, [])
    nodes = [helper.make_node("MatMul", ["state", "w"], ["next"], "inner"), helper.make_node("Identity", ["go"], ["go_on"], "keep")]
    body = helper.make_graph(nodes, "body", [count, flags[0], state[0]], [flags[1], state[1]])
    limits = [numpy_helper.from_array(np.array(3, np.int64), "n"), numpy_helper.from_array(np.array(True), "start")]
    return handler(folder, [helper.make_node("Loop", ["n", "start", "x"], ["y"], "loop", body=body)], [random_weight("w", 16, 16), *limits])


def test_a_model_with_everything_inside_a_loop_comes_back_from_static_mode_as_it_was_and_says_why(tmp_path: Path, calib: str) -> None:
    model = loop_model(tmp_path / "in")

    result = quantize(model, tmp_path / "out", calibration_data_dir=calib)

    assert result.digest == model.digest
    assert result.notes["changed"] is False
    assert "1 MatMul are inside bodies of If, Loop, Scan" in result.notes["reason"]
    assert result.notes["quantized_nodes"] == 0


def test_a_shared_bias_is_right_for_both_of_its_nodes(tmp_path: Path, calib: str, x: NDArray[np.float32]) -> None:
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["g"], "one"), helper.make_node("Gemm", ["g", "v", "b"], ["y"], "two")]
    big = numpy_helper.from_array((50 * np.random.default_rng(0).standard_normal((16, 16))).astype(np.float32), "v")
    model = handler(tmp_path / "in", nodes, [random_weight("w", 16, 16), big, random_weight("b", 16)])

    expected = run(model, x=x)
    for number, quant_format in enumerate(("QDQ", "QOperator")):
        result = quantize(model, tmp_path / f"out{number}", quant_format=quant_format, calibration_data_dir=calib)
        assert np.abs(run(result, x=x) - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("shape", [(1, 16), (1,), (16,)])
def test_a_gemm_bias_of_any_shape_is_quantized_per_channel(shape: tuple[int, ...], tmp_path: Path, calib: str, x: NDArray[np.float32]) -> None:
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["y"], "gemm")]
    model = handler(tmp_path / "in", nodes, [random_weight("w", 16, 16), random_weight("b", *shape, seed=1)])

    result = quantize(model, tmp_path / "out", calibration_data_dir=calib)

    expected = run(model, x=x)
    assert result.notes["quantized_nodes"] == 1
    assert np.abs(run(result, x=x) - expected).max() < 0.05 * np.abs(expected).max()


def test_weights_of_rank_3_keep_one_scale_and_the_notes_say_so(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "matmul")]
    model = handler(tmp_path / "in", nodes, [random_weight("w", 2, 16, 4)], x=("batch", 2, 3, 16), y=("batch", 2, 3, 4))
    rows = np.random.default_rng(0).standard_normal((8, 2, 3, 16)).astype(np.float32)
    np.savez(tmp_path / "rows.npz", x=rows)

    result = quantize(model, tmp_path / "out", calibration_data_dir=str(tmp_path / "rows.npz"))

    expected = run(model, x=rows)
    assert "1 weights (rank 3 or more): w" in result.notes["per_channel"]
    assert np.abs(run(result, x=rows) - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("quant_format", ["QDQ", "QOperator"])
def test_a_weight_that_two_nodes_take_along_different_axes_is_right_for_both(
    quant_format: str, tmp_path: Path, calib: str, x: NDArray[np.float32]
) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"], "one"), helper.make_node("Gemm", ["m", "w"], ["y"], "two", transB=1)]
    weight = random_weight("w", 16, 16)
    uneven = numpy_helper.to_array(weight) * np.linspace(0.05, 2, 16, dtype=np.float32)  # so that the axis matters
    model = handler(tmp_path / "in", nodes, [numpy_helper.from_array(uneven, "w")])

    result = quantize(model, tmp_path / "out", quant_format=quant_format, calibration_data_dir=calib)

    expected = run(model, x=x)
    assert np.abs(run(result, x=x) - expected).max() < 0.05 * np.abs(expected).max()


def test_unnamed_nodes_and_weights_in_constants_are_quantized(tmp_path: Path, calib: str) -> None:
    nodes = [
        helper.make_node("Constant", [], ["w"], value=random_weight("anything", 16, 16)),
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Constant", [], ["v"], value=random_weight("other", 16, 16)),
        helper.make_node("MatMul", ["m", "v"], ["y"]),
    ]
    model = handler(tmp_path / "in", nodes)

    for number, preprocess in enumerate((True, False)):
        result = quantize(model, tmp_path / f"out{number}", quant_preprocess=preprocess, calibration_data_dir=calib)
        assert result.notes["quantized_nodes"] == 2


def test_float16_weights_are_left_and_said_to_be(tmp_path: Path, calib: str) -> None:
    half = numpy_helper.from_array(np.ones((16, 16), np.float16), "h")
    nodes = [helper.make_node("Cast", ["h"], ["w"], "cast", to=TensorProto.FLOAT), helper.make_node("MatMul", ["x", "w"], ["y"], "matmul")]
    model = handler(tmp_path / "in", nodes, [half])

    result = quantize(model, tmp_path / "out", quant_preprocess=False, calibration_data_dir=calib)

    assert result.digest == model.digest
    assert "constant float32 weights" in result.notes["reason"]
