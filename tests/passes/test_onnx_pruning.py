"""Channels whose weights are all zero ("dead") add nothing: pruning exactly those must leave the outputs as they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from autotune.errors import PassConfigError, PassError
from autotune.model import ONNXModelHandler
from autotune.passes.onnx_pruning import OnnxPruning
from autotune.target import AcceleratorSpec
from tests.passes.small_onnx import handler, run

SPEC = AcceleratorSpec()
WIDTH = 12
DEAD = (1, 4, 5, 11)
SHARE = len(DEAD) / WIDTH
IMAGES = ("batch", 3, 8, 8)
RNG = np.random.default_rng(0)
node = helper.make_node


def weight(*shape: int, dead_axis: int | None = None, dead: Sequence[int] = DEAD) -> NDArray[np.float32]:
    """Numbers well away from zero; along `dead_axis` the dead places are zero."""
    values = (RNG.uniform(0.5, 1.0, shape) * RNG.choice([-1.0, 1.0], shape) / np.sqrt(np.prod(shape[1:]) or 1)).astype(np.float32)
    if dead_axis is not None:
        values[(slice(None),) * dead_axis + (list(dead),)] = 0
    return values


@dataclass(frozen=True)
class Network:
    """A graph from x to y, and the shapes that its weights must have once the dead channels are gone."""

    nodes: list[onnx.NodeProto]
    weights: dict[str, NDArray[Any]]
    left: dict[str, tuple[int, ...]]
    x: tuple[str | int, ...] = IMAGES
    y: tuple[str | int | None, ...] = ("batch", 5, None, None)
    sparsity: float = SHARE
    groups: list[int] = field(default_factory=list)


def after(kernel: str = "k", into: str = "h", *, images: bool = True) -> list[onnx.NodeProto]:
    return [node("Conv", [into, kernel], ["y"], "last", kernel_shape=[1, 1])] if images else [node("MatMul", [into, kernel], ["y"], "last")]


def first(name: str = "c", out: str = "a", *, source: str = "x") -> list[onnx.NodeProto]:
    return [node("Conv", [source, f"{name}w", f"{name}b"], [out], name, pads=[1, 1, 1, 1], kernel_shape=[3, 3])]


def conv(name: str = "c", channels: int = 3) -> dict[str, NDArray[Any]]:
    return {f"{name}w": weight(WIDTH, channels, 3, 3, dead_axis=0), f"{name}b": weight(WIDTH, dead_axis=0)}


LAST = {"k": weight(5, WIDTH, 1, 1)}
KEPT = WIDTH - len(DEAD)
FIRST_LEFT = {"cw": (KEPT, 3, 3, 3), "cb": (KEPT,), "k": (5, KEPT, 1, 1)}

NETWORKS: Mapping[str, Network] = {
    "a chain with batch normalization": Network(
        [*first(), node("BatchNormalization", ["a", "s", "b", "m", "v"], ["n"], "bn"), node("Relu", ["n"], ["h"], "r"), *after()],
        {**conv(), **LAST, "s": weight(WIDTH), "b": weight(WIDTH, dead_axis=0), "m": weight(WIDTH, dead_axis=0), "v": np.abs(weight(WIDTH))},
        {**FIRST_LEFT, **dict.fromkeys("sbmv", (KEPT,))},
    ),
    "a residual sum": Network(
        [*first(), node("Relu", ["a"], ["r"], "r"), *first("d", "e", source="r"), node("Add", ["e", "r"], ["z"], "add"),
         node("Relu", ["z"], ["h"], "r2"), *after()],
        {**conv(), **conv("d", WIDTH), **LAST}, {**FIRST_LEFT, "dw": (KEPT, KEPT, 3, 3), "db": (KEPT,)},
    ),
    "a concatenation": Network(
        [*first(), *first("d", "e"), node("Concat", ["a", "e"], ["z"], "cat", axis=1), node("Relu", ["z"], ["h"], "r"), *after()],
        {**conv(), **conv("d"), "k": weight(5, 2 * WIDTH, 1, 1)}, {**FIRST_LEFT, "dw": (KEPT, 3, 3, 3), "k": (5, 2 * KEPT, 1, 1)},
    ),
    "a concatenation with the input": Network(
        [*first(), node("Concat", ["x", "a"], ["z"], "cat", axis=1), node("Relu", ["z"], ["h"], "r"), *after()],
        {**conv(), "k": weight(5, 3 + WIDTH, 1, 1)}, {**FIRST_LEFT, "k": (5, 3 + KEPT, 1, 1)},
    ),
    "a depthwise layer with two channels each": Network(
        [*first(), node("Conv", ["a", "dw", "db"], ["h"], "depth", group=WIDTH, pads=[1, 1, 1, 1]), *after()],
        {**conv(), "dw": weight(2 * WIDTH, 1, 3, 3), "db": np.repeat(conv()["cb"], 2), "k": weight(5, 2 * WIDTH, 1, 1)},
        {"cw": (KEPT, 3, 3, 3), "dw": (2 * KEPT, 1, 3, 3), "db": (2 * KEPT,), "k": (5, 2 * KEPT, 1, 1)}, groups=[KEPT],
    ),
    "a gate of its own": Network(
        [*first(), node("GlobalAveragePool", ["a"], ["p"], "p"), node("Conv", ["p", "gw"], ["g"], "gate"), node("Sigmoid", ["g"], ["s"], "s"),
         node("Mul", ["a", "s"], ["h"], "mul"), *after()],
        {**conv(), **LAST, "gw": weight(WIDTH, WIDTH, 1, 1, dead_axis=0)}, {**FIRST_LEFT, "gw": (KEPT, KEPT, 1, 1)},
    ),
    "scales and slopes for each channel": Network(
        [*first(), node("Mul", ["a", "scale"], ["m"], "mul"), node("PRelu", ["m", "slope"], ["h"], "prelu"), *after()],
        {**conv(), **LAST, "scale": weight(1, WIDTH, 1, 1), "slope": weight(WIDTH, 1, 1)},
        {**FIRST_LEFT, "scale": (1, KEPT, 1, 1), "slope": (KEPT, 1, 1)},
    ),
    "a transposed convolution": Network(
        [*first(), node("ConvTranspose", ["a", "tw", "tb"], ["h"], "up", strides=[2, 2], kernel_shape=[2, 2]), *after()],
        {**conv(), **LAST, "tw": weight(WIDTH, WIDTH, 2, 2, dead_axis=1), "tb": weight(WIDTH, dead_axis=0)},
        {**FIRST_LEFT, "tw": (KEPT, KEPT, 2, 2), "tb": (KEPT,)},
    ),
    "a flattening into a Gemm with transB": Network(
        [*first(), node("MaxPool", ["a"], ["p"], "pool", kernel_shape=[4, 4], strides=[4, 4]), node("Flatten", ["p"], ["f"], "flat"),
         node("Gemm", ["f", "gw", "gb"], ["y"], "gemm", transB=1)],
        {**conv(), "gw": weight(5, 4 * WIDTH), "gb": weight(5)}, {"cw": (KEPT, 3, 3, 3), "gw": (5, 4 * KEPT), "gb": (5,)}, y=("batch", 5),
    ),
    "a reshape with the number of features written out": Network(
        [*first(), node("AveragePool", ["a"], ["p"], "pool", kernel_shape=[4, 4], strides=[4, 4]), node("Reshape", ["p", "shape"], ["f"], "reshape"),
         node("Gemm", ["f", "gw"], ["y"], "gemm")],
        {**conv(), "gw": weight(4 * WIDTH, 5), "shape": np.array([-1, 4 * WIDTH])}, {"cw": (KEPT, 3, 3, 3), "gw": (4 * KEPT, 5)}, y=("batch", 5),
    ),
    "the inside of a feed-forward block": Network(
        [node("MatMul", ["x", "w"], ["m"], "up"), node("Add", ["b", "m"], ["a"], "add"), node("Tanh", ["a"], ["h"], "t"),
         node("MatMul", ["h", "k"], ["d"], "down"), node("Add", ["d", "x"], ["y"], "skip")],
        {"w": weight(16, WIDTH, dead_axis=1), "b": weight(WIDTH, dead_axis=0), "k": weight(WIDTH, 16)},
        {"w": (16, KEPT), "b": (KEPT,), "k": (KEPT, 16)}, x=("batch", 7, 16), y=("batch", 7, 16),
    ),
    "one weight used twice": Network(
        [node("MatMul", ["x", "w"], ["m"], "m"), node("Relu", ["m"], ["a"], "r"), node("MatMul", ["a", "s"], ["n"], "n"),
         node("Relu", ["n"], ["b"], "q"), node("MatMul", ["b", "s"], ["o"], "o"), node("Relu", ["o"], ["h"], "p"), *after(images=False)],
        {"w": weight(16, WIDTH, dead_axis=1), "s": weight(WIDTH, WIDTH, dead_axis=1), "k": weight(WIDTH, 5)},
        {"w": (16, KEPT), "s": (KEPT, KEPT), "k": (KEPT, 5)}, x=("batch", 16), y=("batch", 5),
    ),
}  # fmt: skip


def build(folder: Path, network: Network) -> ONNXModelHandler:
    tensors = [numpy_helper.from_array(np.ascontiguousarray(v), k) for k, v in network.weights.items()]
    return handler(folder, network.nodes, tensors, x=network.x, y=network.y)  # type: ignore[arg-type] # sizes may be unknown


def prune(model: ONNXModelHandler, folder: Path, **config: Any) -> ONNXModelHandler:
    folder.mkdir()
    return OnnxPruning(SPEC, config).run(model, folder)  # type: ignore[return-value] # an ONNX pass gives an ONNX model


def weights_of(model: ONNXModelHandler) -> dict[str, NDArray[Any]]:
    return {t.name: numpy_helper.to_array(t) for t in model.load().graph.initializer}


def inputs_for(network: Network) -> NDArray[np.float32]:
    return np.random.default_rng(1).standard_normal([4 if isinstance(d, str) else d for d in network.x]).astype(np.float32)


@pytest.mark.parametrize("importance", ["l1", "l2", "in_out"])
@pytest.mark.parametrize("name", NETWORKS)
def test_channels_that_add_nothing_go_and_the_outputs_stay(name: str, importance: str, tmp_path: Path) -> None:
    network = NETWORKS[name]
    model = build(tmp_path / "in", network)
    before = model.digest

    result = prune(model, tmp_path / "out", sparsity=network.sparsity, importance=importance, round_to=1)

    after_ = weights_of(result)
    assert {n: after_[n].shape for n in network.left} == network.left
    groups = [a.i for n in result.load().graph.node for a in n.attribute if a.name == "group"]
    assert groups == network.groups
    x = inputs_for(network)
    np.testing.assert_allclose(run(result, x=x), run(model, x=x), rtol=1e-4, atol=1e-5)
    assert result.notes["share_of_weights_removed"] > 0
    assert result.notes["outputs_moved_by"] < 1e-3
    assert ONNXModelHandler.from_folder(model.folder).digest == before


KEEPING = {
    "an output": [*first(), node("Relu", ["a"], ["y"], "r")],
    "Softmax": [*first(), node("Softmax", ["a"], ["h"], "soft", axis=1), *after()],
    "LpNormalization": [*first(), node("LpNormalization", ["a"], ["h"], "norm", axis=1), *after()],
    "Slice": [*first(), node("Slice", ["a", "one", "two", "one"], ["s"], "slice"), node("Concat", ["a", "s"], ["h"], "cat", axis=2), *after()],
    "a sum with the input": [*first(), node("ReduceMax", ["x"], ["m"], "max", axes=[2, 3]), node("Expand", ["m", "wide"], ["e"], "e"),
                             node("Add", ["a", "e"], ["h"], "add"), *after()],
}  # fmt: skip


@pytest.mark.parametrize("name", KEEPING)
def test_channels_that_something_needs_as_they_are_stay(name: str, tmp_path: Path) -> None:
    numbers = {"one": np.array([1]), "two": np.array([2]), "wide": np.array([1, WIDTH, 1, 1])}
    x = ("batch", 1, 8, 8) if name == "a sum with the input" else IMAGES
    network = Network(
        KEEPING[name], {**conv("c", int(x[1])), **LAST, **numbers}, {}, x=x, y=("batch", WIDTH if name == "an output" else 5, None, None)
    )
    model = build(tmp_path / "in", network)

    result = prune(model, tmp_path / "out", sparsity=0.5, round_to=1)

    assert result.digest == model.digest
    assert result.notes["reason"].startswith("every channel is needed as it is: ")


def test_a_weight_that_another_operator_takes_too_stays(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["m"], "m"), node("Relu", ["m"], ["h"], "r"), node("MatMul", ["h", "k"], ["o"], "o"),
        node("ReduceSum", ["w"], ["s"], "sum"), node("Add", ["o", "s"], ["y"], "add"),
    ]  # fmt: skip
    network = Network(nodes, {"w": weight(16, WIDTH), "k": weight(WIDTH, 5)}, {}, x=("batch", 16), y=("batch", 5))

    result = prune(build(tmp_path / "in", network), tmp_path / "out", sparsity=0.5, round_to=1)

    assert "weight used elsewhere" in result.notes["reason"]


def test_the_number_kept_is_rounded_up_to_a_multiple(tmp_path: Path) -> None:
    network = NETWORKS["a chain with batch normalization"]

    result = prune(build(tmp_path / "in", network), tmp_path / "out", sparsity=0.4, round_to=8)

    assert weights_of(result)["cw"].shape[0] == 9  # 7.2 rounded up, to a multiple of a quarter of 12
    assert result.notes["channels_removed"] == 3


def test_layers_out_of_scope_keep_their_channels(tmp_path: Path) -> None:
    network = NETWORKS["a residual sum"]
    model = build(tmp_path / "in", network)

    by_type = prune(model, tmp_path / "types", sparsity=0.5, op_types="Gemm+MatMul")
    by_name = prune(model, tmp_path / "names", sparsity=0.5, nodes_to_exclude=["c"])

    assert "out of scope" in by_type.notes["reason"]
    assert "out of scope" in by_name.notes["reason"]  # d's channels are summed with those of c
    with pytest.raises(PassError, match="Did you mean 'last'"):
        prune(model, tmp_path / "wrong", nodes_to_exclude=["lost"])


def test_single_weights_become_zero_nearest_to_zero_first(tmp_path: Path) -> None:
    network = NETWORKS["one weight used twice"]
    network = Network(network.nodes, {n: weight(*v.shape) for n, v in network.weights.items()}, {}, x=network.x, y=network.y)
    model = build(tmp_path / "in", network)

    result = prune(model, tmp_path / "out", method="unstructured", sparsity=0.25)

    for name, values in weights_of(result).items():
        given = network.weights[name]
        assert (values == 0).sum() == given.size // 4
        assert np.abs(given[values == 0]).max() <= np.abs(given[values != 0]).min()
        np.testing.assert_array_equal(values[values != 0], given[values != 0])
    assert result.notes["tensors_pruned"] == 3
    assert "neither latency nor size" in result.notes["effect"]
    assert result.notes["share_of_weights_removed"] == 0
    assert result.size_bytes == model.size_bytes


def test_two_of_four_stay_along_the_axis_that_sums_run_over(tmp_path: Path) -> None:
    nodes = [
        node("Gemm", ["x", "g", "b"], ["a"], "gemm", transB=1), node("MatMul", ["a", "m"], ["c"], "matmul"), node("MatMul", ["c", "odd"], ["y"], "o"),
    ]  # fmt: skip
    network = Network(nodes, {"g": weight(8, 16), "b": weight(8), "m": weight(8, 6), "odd": weight(6, 5)}, {}, x=("batch", 16), y=("batch", 5))

    result = prune(build(tmp_path / "in", network), tmp_path / "out", method="n_m")

    values = weights_of(result)
    np.testing.assert_array_equal((values["g"].reshape(8, 4, 4) != 0).sum(axis=2), 2)
    np.testing.assert_array_equal((values["m"].T.reshape(6, 2, 4) != 0).sum(axis=2), 2)
    np.testing.assert_array_equal(values["odd"], network.weights["odd"])
    np.testing.assert_array_equal(values["b"], network.weights["b"])
    assert result.notes["tensors_not_divisible"] == ["odd"]


def test_an_output_that_is_finite_no_more_is_refused(tmp_path: Path) -> None:
    network = Network(
        [node("Abs", ["x"], ["p"], "abs"), node("MatMul", ["p", "w"], ["m"], "m"), node("Reciprocal", ["m"], ["y"], "r")],
        {"w": np.array([[1e-3, 1.0]] * 4, np.float32)}, {}, x=("batch", 4), y=("batch", 2),
    )  # fmt: skip

    with pytest.raises(PassError, match="must stay finite"):
        prune(build(tmp_path / "in", network), tmp_path / "out", method="unstructured", sparsity=0.5)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"method": "n_m", "sparsity": 0.5}, "sparsity plays no part"),
        ({"method": "n_m", "pattern": "4:2"}, "kept:of"),
        ({"op_types": "Convolution"}, "Did you mean 'Conv"),
        ({"method": "unstructured", "round_to": 8}, "round_to plays no part"),
    ],
)
def test_values_that_do_not_go_together_are_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(PassConfigError, match=told):
        OnnxPruning(SPEC, config)


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    nodes = [node("QuantizeLinear", ["x", "s"], ["q"], "q"), node("DequantizeLinear", ["q", "s"], ["y"], "d")]
    model = build(tmp_path / "in", Network(nodes, {"s": np.array(0.1, np.float32)}, {}, x=("batch", 4), y=("batch", 4)))

    with pytest.raises(PassError, match="Prune first, then quantize"):
        prune(model, tmp_path / "out")


@pytest.mark.parametrize(("config", "told"), [({"sparsity": 0.0}, "sparsity 0 keeps"), ({"sparsity": 0.01, "round_to": 8}, "removes no channel")])
def test_a_sparsity_that_takes_nothing_says_so(config: dict[str, Any], told: str, tmp_path: Path) -> None:
    model = build(tmp_path / "in", NETWORKS["a residual sum"])

    result = prune(model, tmp_path / "out", **config)

    assert result.digest == model.digest
    assert told in result.notes["reason"]


def test_pruning_is_told_to_the_rules() -> None:
    made = OnnxPruning(SPEC, {})
    kept = OnnxPruning(SPEC, {"sparsity": 0.0})

    assert OnnxPruning.traits(made.config).methods == {"pruning"}
    assert not OnnxPruning.traits(made.config).quantized
    assert not OnnxPruning.traits(kept.config).methods
