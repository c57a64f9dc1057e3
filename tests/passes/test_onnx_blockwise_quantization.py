from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from autotune.errors import PassConfigError, PassError
from autotune.model import ONNXModelHandler
from autotune.passes import blockwise_weights as bw
from autotune.passes.blockwise_graph import Settings, Site, find_sites, refuse_wrong_kernels, rewrite
from autotune.passes.onnx_blockwise_quantization import OnnxBlockwiseQuantization
from autotune.target import AcceleratorSpec
from tests.passes.small_onnx import handler, operators, random_weight, run

SPEC = AcceleratorSpec()
RNG = np.random.default_rng(0)
X = RNG.standard_normal((8, 64)).astype(np.float32)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def uneven_rows(count: int, seed: int) -> NDArray[np.float32]:
    """Rows whose channels hang together, the first of them large, as those of language models are."""
    mixing = np.random.default_rng(7).standard_normal((12, 64))
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, 12)) @ mixing + 0.1 * rng.standard_normal((count, 64))
    x[:, :4] *= 10
    return x.astype(np.float32)


@pytest.fixture
def data(tmp_path: Path) -> str:
    np.savez(tmp_path / "calibration.npz", x=uneven_rows(512, 1))
    return str(tmp_path / "calibration.npz")


def quantize(model: ONNXModelHandler, folder: Path, **config: Any) -> ONNXModelHandler:
    folder.mkdir(parents=True, exist_ok=True)
    return OnnxBlockwiseQuantization(SPEC, config).run(model, folder)  # type: ignore[return-value] # an ONNX pass gives an ONNX model


def one_product(folder: Path, weight: NDArray[Any] | None = None, **options: Any) -> ONNXModelHandler:
    tensor = random_weight("w", 64, 48) if weight is None else numpy_helper.from_array(weight, "w")
    return handler(folder, [helper.make_node("MatMul", ["x", "w"], ["y"], "product")], [tensor], x=("batch", 64), y=("batch", 48), **options)


def distance(a: NDArray[Any], b: NDArray[Any]) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize(("bits", "limit"), [(4, 0.15), (8, 0.01)])
@pytest.mark.parametrize("quant_format", ["QOperator", "QDQ"])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_weights_shrink_and_the_product_stays_near(bits: int, limit: float, quant_format: str, is_symmetric: bool, tmp_path: Path) -> None:
    model = one_product(tmp_path / "in", opset=21, ir_version=10)

    result = quantize(model, tmp_path / "out", bits=bits, quant_format=quant_format, is_symmetric=is_symmetric)

    assert operators(result) == (["MatMulNBits"] if quant_format == "QOperator" else ["DequantizeLinear", "MatMul"])
    assert 0 < distance(run(result, x=X), run(model, x=X)) < limit
    assert result.notes["weight_bytes_after"] < result.notes["weight_bytes_before"] * bits / 32 * 1.5
    assert result.notes["share_of_weights"] == 1.0


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_to_nearest_gives_what_the_library_gives(bits: int, is_symmetric: bool) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, DefaultWeightOnlyQuantizer

    rows = RNG.standard_normal((10, 96)).astype(np.float32)
    config = DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=is_symmetric, bits=bits)

    packed, scales, zeros = DefaultWeightOnlyQuantizer(config).qbits_block_quant(np.ascontiguousarray(rows.T))
    blocks = bw.round_to_nearest(rows, bits=bits, block_size=32, symmetric=is_symmetric)

    np.testing.assert_allclose(blocks.scales, scales, rtol=1e-5)
    assert (blocks.packed_values() == packed).mean() > 0.99  # halves are rounded either way
    if not is_symmetric:
        np.testing.assert_array_equal(blocks.packed_zeros(), zeros)


def test_gemm_is_rewritten_with_its_alpha_beta_and_transposed_weight(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"], "first", transB=1, alpha=0.5, beta=2.0),
        helper.make_node("Gemm", ["h", "v", "c"], ["y"], "second"),
    ]
    weights = [random_weight("w", 48, 64), random_weight("b", 48), random_weight("v", 48, 32), random_weight("c", 1, 32)]
    model = handler(tmp_path / "in", nodes, weights, x=("batch", 64), y=("batch", 32))

    result = quantize(model, tmp_path / "out", bits=8)

    assert operators(result) == ["Add", "Add", "MatMulNBits", "MatMulNBits"]
    assert distance(run(result, x=X), run(model, x=X)) < 0.02


def test_a_weight_that_several_nodes_take_is_stored_once(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "one"),
        helper.make_node("MatMul", ["a", "w"], ["b"], "two"),
        helper.make_node("Gemm", ["b", "w"], ["y"], "three", transB=1),
    ]
    model = handler(tmp_path / "in", nodes, [random_weight("w", 64, 64)], x=("batch", 64), y=("batch", 64))

    result = quantize(model, tmp_path / "out", bits=8)

    packed = [t for t in result.load().graph.initializer if t.data_type == TensorProto.UINT8]
    assert len(packed) == 2  # as it is, and turned round for the Gemm
    assert result.notes["quantized_weights"] == 2 * 64 * 64
    assert distance(run(result, x=X), run(model, x=X)) < 0.05


@pytest.mark.parametrize("bits", [4, 8])
def test_tables_are_quantized_when_all_is_asked_for(bits: int, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["i"], "cast", to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "i"], ["e"], "embed"),
        helper.make_node("MatMul", ["e", "w"], ["y"], "product"),
    ]
    model = handler(tmp_path / "in", nodes, [random_weight("table", 40, 64), random_weight("w", 64, 48)], x=("batch", 3), y=("batch", 3, 48))
    x = np.array([[0, 1, 39], [5, 5, 7]], np.float32)

    result = quantize(model, tmp_path / "out", bits=bits, op_types_to_quantize="all")
    without = quantize(model, tmp_path / "without", bits=bits)

    assert operators(result) == ["Cast", "GatherBlockQuantized", "MatMulNBits"]
    assert operators(without) == ["Cast", "Gather", "MatMulNBits"]
    assert distance(run(result, x=x), run(model, x=x)) < (0.25 if bits == 4 else 0.02)


@pytest.mark.parametrize("algorithm", ["k_quant", "hqq", "gptq", "awq", "nf4"])
def test_every_algorithm_gives_a_model_near_the_float_one(algorithm: str, data: str, tmp_path: Path) -> None:
    model = one_product(tmp_path / "in")

    result = quantize(model, tmp_path / "out", algorithm=algorithm, calibration_data_dir=data)

    assert operators(result) == ["MatMulBnb4" if algorithm == "nf4" else "MatMulNBits"]
    x = uneven_rows(32, 2)
    assert distance(run(result, x=x), run(model, x=x)) < 0.2


@pytest.mark.parametrize("algorithm", ["gptq", "awq"])
def test_algorithms_that_look_at_data_lose_less_on_such_data(algorithm: str, data: str, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Mul", ["x", "gain"], ["n"], "gain"),
        helper.make_node("MatMul", ["n", "w"], ["y"], "product"),
    ]
    weights = [numpy_helper.from_array(np.ones(64, np.float32), "gain"), random_weight("w", 64, 48)]
    model = handler(tmp_path / "in", nodes, weights, x=("batch", 64), y=("batch", 48))
    x = uneven_rows(64, 3)

    nearest = quantize(model, tmp_path / "rtn")
    result = quantize(model, tmp_path / "out", algorithm=algorithm, calibration_data_dir=data, calibration_samples=512)

    assert distance(run(result, x=x), run(model, x=x)) < 0.8 * distance(run(nearest, x=x), run(model, x=x))
    if algorithm == "awq":
        assert result.notes["scaled_values"] == 1


@pytest.mark.parametrize("find", [bw.k_quant, bw.hqq])
def test_blocks_of_one_sign_or_one_value_are_not_lost(find: Callable[..., bw.Blocks]) -> None:
    """The libraries' code alone makes most of such a weight wrong: it has no whole zero point for it."""
    rows = np.concatenate([np.full((4, 64), 0.3), 1 + 0.05 * RNG.standard_normal((4, 64)), np.zeros((4, 64))]).astype(np.float32)

    blocks = find(rows, bits=4, block_size=32)

    assert distance(blocks.dequantized(64), rows) < 0.05


def test_few_rows_do_not_make_a_model_worse_than_rounding_does(tmp_path: Path) -> None:
    np.savez(tmp_path / "few.npz", x=RNG.standard_normal((8, 64)).astype(np.float32))
    model = one_product(tmp_path / "in")

    nearest = quantize(model, tmp_path / "rtn")
    for algorithm in ("gptq", "awq"):
        result = quantize(model, tmp_path / algorithm, algorithm=algorithm, calibration_data_dir=str(tmp_path / "few.npz"))
        assert distance(run(result, x=X), run(model, x=X)) < 1.5 * distance(run(nearest, x=X), run(model, x=X))


def test_what_lies_in_branches_is_quantized_too(tmp_path: Path) -> None:
    def branch(name: str, seed: int) -> onnx.GraphProto:
        weight = random_weight(f"{name}_w", 64, 48, seed=seed)
        node = helper.make_node("MatMul", ["x", weight.name], [f"{name}_y"], f"{name}_product")
        return helper.make_graph([node], name, [], [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None)], [weight])

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], "sum", keepdims=0),
        helper.make_node("Greater", ["s", "zero"], ["positive"], "greater"),
        helper.make_node("If", ["positive"], ["y"], "if", then_branch=branch("then", 1), else_branch=branch("else", 2)),
    ]
    model = handler(tmp_path / "in", nodes, [numpy_helper.from_array(np.float32(0), "zero")], x=("batch", 64), y=("batch", 48))

    result = quantize(model, tmp_path / "out", bits=8)

    assert result.notes["quantized_by_operator"] == {"MatMul": 2}
    for x in (np.abs(X), -np.abs(X)):
        assert distance(run(result, x=x), run(model, x=x)) < 0.02


def test_batches_of_weights_need_qdq_and_say_so(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "product")]
    model = handler(tmp_path / "in", nodes, [random_weight("w", 3, 64, 48)], x=(3, 8, 64), y=(3, 8, 48), opset=21, ir_version=10)
    x = RNG.standard_normal((3, 8, 64)).astype(np.float32)

    left = quantize(model, tmp_path / "left")
    result = quantize(model, tmp_path / "out", quant_format="QDQ")

    assert left.digest == model.digest
    assert left.notes["reason"] == "no weight to quantize: 1 MatMul (a weight of rank 3, which only QDQ format can hold)"
    assert 0 < distance(run(result, x=x), run(model, x=x)) < 0.15


def test_a_single_batch_counts_as_none(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "product")]
    model = handler(tmp_path / "in", nodes, [random_weight("w", 1, 64, 48)], x=(2, 8, 64), y=(2, 8, 48))
    x = RNG.standard_normal((2, 8, 64)).astype(np.float32)

    result = quantize(model, tmp_path / "out", bits=8)

    assert run(result, x=x).shape == (2, 8, 48)
    assert distance(run(result, x=x), run(model, x=x)) < 0.02


def test_excluded_nodes_stay_and_names_that_match_nothing_are_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], "first"), helper.make_node("MatMul", ["h", "v"], ["y"], "second")]
    model = handler(tmp_path / "in", nodes, [random_weight("w", 64, 64), random_weight("v", 64, 48)], x=("batch", 64), y=("batch", 48))

    result = quantize(model, tmp_path / "out", nodes_to_exclude=["fir*"])

    assert operators(result) == ["MatMul", "MatMulNBits"]
    assert result.notes["left"] == {"MatMul": {"excluded": 1}}
    with pytest.raises(PassError, match=r"'frist'.*Did you mean 'first'"):
        quantize(model, tmp_path / "wrong", nodes_to_exclude=["frist"])


def test_what_can_not_be_quantized_is_named_with_its_reason(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], "turn", perm=[1, 0]),
        helper.make_node("MatMul", ["x", "t"], ["s"], "scores"),
        helper.make_node("MatMul", ["s", "x"], ["a"], "mix"),
        helper.make_node("MatMul", ["a", "narrow"], ["y"], "narrow"),
    ]
    model = handler(tmp_path / "in", nodes, [random_weight("narrow", 64, 3)], x=("batch", 64), y=("batch", 3))
    tiny = handler(
        tmp_path / "tiny", [helper.make_node("MatMul", ["x", "w"], ["y"], "p")], [random_weight("w", 2, 8)], x=("batch", 2), y=("batch", 8)
    )

    result = quantize(model, tmp_path / "out")
    nothing = quantize(tiny, tmp_path / "nothing", block_size=256)

    assert result.notes["left"] == {"MatMul": {"no constant weight": 2}}
    assert nothing.digest == tiny.digest
    assert nothing.notes["reason"] == "no weight to quantize: 1 MatMul (it would be no smaller)"


def test_a_model_without_products_comes_back_as_it_was(tmp_path: Path) -> None:
    model = handler(tmp_path / "in", [helper.make_node("Relu", ["x"], ["y"], "relu")])

    result = quantize(model, tmp_path / "out")

    assert result.digest == model.digest
    assert result.notes["reason"] == "the model has no Gemm/MatMul"


def test_float16_models_are_quantized_in_float16(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], "down", to=TensorProto.FLOAT16),
        helper.make_node("MatMul", ["h", "w"], ["p"], "product"),
        helper.make_node("Cast", ["p"], ["y"], "up", to=TensorProto.FLOAT),
    ]
    weight = numpy_helper.from_array(numpy_helper.to_array(random_weight("w", 64, 48)).astype(np.float16), "w")
    model = handler(tmp_path / "in", nodes, [weight], x=("batch", 64), y=("batch", 48))

    result = quantize(model, tmp_path / "out", bits=8)

    assert distance(run(result, x=X), run(model, x=X)) < 0.02


def test_the_accuracy_level_changes_results_as_much_as_int8_activations_do(tmp_path: Path) -> None:
    model = one_product(tmp_path / "in")

    exact = quantize(model, tmp_path / "exact", accuracy_level=0)
    coarse = quantize(model, tmp_path / "coarse", accuracy_level=4)

    assert 1e-5 < distance(run(coarse, x=X), run(exact, x=X)) < 0.03


def test_qdq_below_opset_21_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PassError, match="QDQ format needs opset 21 or later; got opset 17"):
        quantize(one_product(tmp_path / "in"), tmp_path / "out", quant_format="QDQ")


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    once = quantize(one_product(tmp_path / "in"), tmp_path / "once")

    with pytest.raises(PassError, match="takes a float model"):
        quantize(once, tmp_path / "twice")


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    weight = np.ones((64, 48), np.float32)
    weight[3, 3] = np.nan

    with pytest.raises(PassError, match="weights must be finite; got NaN or infinity in 'w'"):
        quantize(one_product(tmp_path / "in", weight), tmp_path / "out")


def test_calibration_data_is_asked_for_where_it_is_needed(tmp_path: Path) -> None:
    assert OnnxBlockwiseQuantization.needed_data(OnnxBlockwiseQuantization(SPEC, {"algorithm": "awq"}).config) == {"calibration"}
    assert not OnnxBlockwiseQuantization.needed_data(OnnxBlockwiseQuantization(SPEC, {}).config)
    with pytest.raises(PassError, match="gptq needs calibration data"):
        quantize(one_product(tmp_path / "in"), tmp_path / "out", algorithm="gptq")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"block_size": 512}, "one of 16, 32, 64, 128, 256"),
        ({"bits": 3}, "4 or 8"),
        ({"op_types_to_quantize": "MatMull"}, "Did you mean 'MatMul'"),
        ({"algorithm": "nf4", "bits": 8}, "bits plays no part"),
        ({"algorithm": "hqq", "is_symmetric": True}, "is_symmetric plays no part"),
    ],
)
def test_values_without_an_operator_for_them_are_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(PassConfigError, match=told):
        OnnxBlockwiseQuantization(SPEC, config)


def test_an_operator_that_computes_something_else_is_found_out(tmp_path: Path) -> None:
    model = one_product(tmp_path / "in")
    settings = Settings("rtn", 4, 32, True, False, 0, frozenset({"MatMul"}))
    proto = model.load()
    sites, _ = find_sites(proto, settings, frozenset())

    def find(site: Site) -> bw.Blocks:
        return bw.round_to_nearest(site.rows(), bits=4, block_size=32, symmetric=True)

    rewrite(proto, [sites], find, settings)
    refuse_wrong_kernels(sites, settings)
    sites[0].meaning = -1 * sites[0].meaning  # type: ignore[operator] # written by rewrite

    with pytest.raises(PassError, match="must compute what its weight stands for"):
        refuse_wrong_kernels(sites, settings)


def test_an_odd_length_is_filled_up_and_cut_again(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "product")]
    model = handler(tmp_path / "in", nodes, [random_weight("w", 77, 33)], x=("batch", 77), y=("batch", 33), opset=21, ir_version=10)
    x = RNG.standard_normal((5, 77)).astype(np.float32)

    for quant_format in ("QOperator", "QDQ"):
        for is_symmetric in (True, False):
            result = quantize(model, tmp_path / f"{quant_format}{is_symmetric}", quant_format=quant_format, is_symmetric=is_symmetric)
            assert distance(run(result, x=x), run(model, x=x)) < 0.15
