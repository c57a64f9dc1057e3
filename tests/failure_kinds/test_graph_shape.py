"""Kinds A: the shape of graphs and their names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from autotune.errors import PassError
from autotune.passes.onnx_graph import graphs_of
from tests.failure_kinds.awkward import FLOAT, IMAGE, INT64, MODELS, X, Y, flat, images, model, node, tensor, value, weight
from tests.failure_kinds.kinds import FORMATS, apply, error, outputs, saved, sound, weights

QUANTIZERS: list[tuple[str, dict[str, Any]]] = [
    ("OnnxStaticQuantization", {"quant_format": "QDQ"}),
    ("OnnxStaticQuantization", {"quant_format": "QOperator"}),
    ("OnnxDynamicQuantization", {}),
    ("OnnxBlockwiseQuantization", {"bits": 8, "op_types_to_quantize": "all"}),
]
every_quantizer = pytest.mark.parametrize(("name", "config"), QUANTIZERS, ids=["QDQ", "QOperator", "dynamic", "blockwise"])


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("quant_format", FORMATS)
def test_a_bias_that_two_nodes_share_is_right_for_both_and_named_once(quant_format: str, per_channel: bool, tmp_path: Path) -> None:
    made = MODELS["shared_bias"]()
    given = saved(tmp_path / "in", made.proto)

    result = apply("OnnxStaticQuantization", given, tmp_path / "out", made.rows, quant_format=quant_format, per_channel=per_channel)

    sound(result)
    assert result.notes["quantized_nodes"] == 2
    assert error(given, result, made.rows) < 0.05


@every_quantizer
def test_a_weight_that_several_layers_share_is_stored_once_for_each_axis(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    made = MODELS["tied_weight"]()  # v for two products; w as a table, and turned over as the head
    given = saved(tmp_path / "in", made.proto)

    result = apply(name, given, tmp_path / "out", None if name.startswith("OnnxDynamic") else made.rows, **config)

    sound(result)
    if not name.startswith("OnnxBlockwise"):
        held = [t for t in weights(result).values() if t.data_type == TensorProto.INT8]
        assert sorted(tuple(t.dims) for t in held if 24 not in t.dims) == [(16, 16)]
        assert len([t for t in held if 24 in t.dims]) <= 2
    assert error(given, result, made.rows) < 0.05


EXCLUDED: list[tuple[str, dict[str, Any]]] = [*QUANTIZERS[:3], ("OnnxBlockwiseQuantization", {"bits": 8})]


@pytest.mark.parametrize(("name", "config"), EXCLUDED, ids=["QDQ", "QOperator", "dynamic", "blockwise"])
def test_nodes_are_excluded_by_the_names_of_the_input_model_whatever_is_fused_or_rewritten(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    nodes = [
        node("Gemm", ["x", "w", "b"], ["a"], "rewritten", transB=1),  # MatMul and Add to the dynamic quantizer
        node("Relu", ["a"], ["r"], "relu"),
        node("MatMul", ["r", "v"], ["m"], "fused"),  # a Gemm once it is fused with the Add
        node("Add", ["m", "b"], ["s"], "bias"),
        node("MatMul", ["s", "u"], ["y"], "quantized"),
    ]
    held = [weight("w", 16, 16), weight("b", 16), weight("v", 16, 16, seed=1), weight("u", 16, 16, seed=2)]
    given = saved(tmp_path / "in", model(nodes, [X], [Y], held))

    result = apply(
        name, given, tmp_path / "out", None if name.startswith("OnnxDynamic") else flat(), nodes_to_exclude=["rewritten", "fused"], **config
    )

    kept = [t for t in weights(result).values() if t.data_type == TensorProto.FLOAT and list(t.dims) == [16, 16]]
    assert len(kept) == 2
    assert error(given, result, flat()) < 0.05


@every_quantizer
def test_a_name_from_elsewhere_is_refused_with_the_nearest_one(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "w"], ["y"], "/encoder/layer.0/MatMul")]
    given = saved(tmp_path / "in", model(nodes, [X], [Y], [weight("w", 16, 16)]))

    with pytest.raises(PassError, match=re.escape("'encoder.layer.0'")) as caught:
        apply(name, given, tmp_path / "out", flat(), nodes_to_exclude=["encoder.layer.0"], **config)

    assert "nodes_to_exclude" in str(caught.value)
    assert "Did you mean '/encoder/layer.0/MatMul'" in str(caught.value)


@pytest.mark.parametrize("kind", ["names_missing", "names_repeated", "names_of_quantizers", "odd_names"])
@every_quantizer
def test_every_name_is_given_once_afterwards(name: str, config: dict[str, Any], kind: str, tmp_path: Path) -> None:
    made = MODELS[kind]()
    given = saved(tmp_path / "in", made.proto)
    runs = MODELS["names_missing" if kind == "names_repeated" else kind]()  # ONNX Runtime does not take the repeated names; the rest is equal

    result = apply(name, given, tmp_path / "out", None if name.startswith("OnnxDynamic") else made.rows, **config)

    sound(result)
    assert result.notes["changed"]
    assert error(saved(tmp_path / "runs", runs.proto), result, made.rows) < 0.05


@every_quantizer
def test_inputs_outputs_and_nodes_keep_names_that_are_in_a_quantizer_s_way(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    nodes = [
        node("Add", ["x", "x_scale"], ["a"], "x_QuantizeLinear"),
        node("Gemm", ["a", "w", "w_quantized"], ["y"], "gemm"),
        node("Relu", ["y"], ["r"], "gemm_MatMul"),
        node("MatMul", ["r", "v"], ["y_quantized"], "v_DequantizeLinear"),
        node("MatMul", ["y_quantized", "u"], ["z"], "gemm_quant"),
    ]
    held = [weight("w", 16, 16), weight("w_quantized", 16), weight("v", 16, 16, seed=1), weight("u", 16, 16, seed=2)]
    proto = model(nodes, [X, value("x_scale", FLOAT, ["n", 16])], [Y, *(value(n, FLOAT, ["n", 16]) for n in ("y_quantized", "z"))], held)
    given = saved(tmp_path / "in", proto)
    rows = {**flat(), "x_scale": flat()["x"][::-1]}

    result = apply(name, given, tmp_path / "out", None if name.startswith("OnnxDynamic") else rows, nodes_to_exclude=["v_DequantizeLinear"], **config)

    sound(result)
    assert result.io == given.io
    assert error(given, result, rows) < 0.05
    float_ones = [n for n in result.load().graph.node if n.op_type == "MatMul" and n.name == "v_DequantizeLinear"]
    assert [n.input[1] for n in float_ones] == ["v"]


@every_quantizer
def test_names_in_bodies_are_in_nobody_s_way(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    branches = {
        key: helper.make_graph(
            [node("MatMul", ["a", own], ["a_quantized"], "a_QuantizeLinear"), node(op, ["a_quantized"], [key], "w_quant")],
            key, [], [value(key, FLOAT, ["n", 16])], [weight(own, 16, 16, seed=2)],
        )
        for key, op, own in (("then_branch", "Neg", "w_scale"), ("else_branch", "Abs", "w_zero_point"))
    }  # fmt: skip
    nodes = [
        node("MatMul", ["x", "w"], ["a"], "first"),
        node("Squeeze", ["positive"], ["one"], "squeeze"),
        node("If", ["one"], ["z"], "if", **branches),
        node("MatMul", ["a", "v"], ["y"], "second"),
    ]
    inputs = [X, value("positive", int(TensorProto.BOOL), ["n"])]
    given = saved(tmp_path / "in", model(nodes, inputs, [Y, value("z", FLOAT, ["n", 16])], [weight("w", 16, 16), weight("v", 16, 16, seed=1)]))
    rows = {**flat(), "positive": np.arange(12) < 6}

    result = apply(name, given, tmp_path / "out", None if name.startswith("OnnxDynamic") else rows, **config)

    assert result.notes["changed"]
    for row in (0, 11):
        assert error(given, result, {key: array[row : row + 1] for key, array in rows.items()}) < 0.05


def test_the_harm_of_nodes_is_told_by_the_names_of_the_input_model(tmp_path: Path) -> None:
    made = MODELS["names_of_quantizers"]()
    given = saved(tmp_path / "in", made.proto)

    result = apply("OnnxStaticQuantization", given, tmp_path / "out", made.rows, exclude_top_k=1, per_channel=False)

    harms = {n.name for n in made.proto.graph.node}
    assert [set(g["nodes"]) <= harms and g["harm"] > 1e-6 for g in result.notes["excluded_groups"]] == [True]
    assert result.notes["quantized_nodes"] == 1
    assert error(given, result, made.rows) < 0.05


@pytest.mark.parametrize("kind", ["if_with_weights", "if_in_if", "loop_with_outer_weight", "scan_with_weights"])
@every_quantizer
def test_bodies_are_quantized_or_what_is_left_in_them_is_told(name: str, config: dict[str, Any], kind: str, tmp_path: Path) -> None:
    made = MODELS[kind]()
    given = saved(tmp_path / "in", made.proto)
    batch = {"x": made.rows["x"][:1]}

    result = apply(name, given, tmp_path / "out", None if name.startswith("OnnxDynamic") else made.rows, **config)

    assert error(given, result, batch) < 0.05
    inside = sum(n.op_type == "MatMul" for graph in list(graphs_of(given.load().graph))[1:] for n in graph.node)
    if name != "OnnxStaticQuantization":
        assert result.notes["quantized_nodes"] >= inside
        assert not [n for graph in graphs_of(result.load().graph) for n in graph.node if n.op_type == "MatMul"]
        return
    told = str(result.notes.get("coverage", {}).get("float_in_bodies", "")) + str(result.notes.get("reason", ""))
    assert str(inside) in told
    assert "MatMul" in told


@every_quantizer
def test_a_table_s_row_that_only_a_branch_takes_keeps_its_float_form(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    branches = {
        key: helper.make_graph([node(op, ["turned"], [key])], key, [], [value(key, FLOAT, ["m", "n"])])
        for key, op in (("then_branch", "Neg"), ("else_branch", "Abs"))
    }
    nodes = [
        node("Gather", ["table", "ids"], ["row"], "look_up"),
        node("Transpose", ["row"], ["turned"], "turn", perm=[1, 0]),
        node("MatMul", ["row", "w"], ["y"], "product"),
        node("If", ["positive"], ["z"], "if", **branches),
    ]
    inputs = [value("ids", INT64, ["n"]), value("positive", int(TensorProto.BOOL), [])]
    proto = model(nodes, inputs, [Y, value("z", FLOAT, [16, "n"])], [weight("table", 8, 16), weight("w", 16, 16, seed=1)])
    given = saved(tmp_path / "in", proto)
    ids = np.random.default_rng(0).integers(0, 8, (12, 4))
    rows = {"ids": ids, "positive": np.arange(12) < 6}

    result = apply(name, given, tmp_path / "out", None if name.startswith("OnnxDynamic") else rows, **config)

    assert result.notes["changed"]
    for positive in (True, False):
        assert error(given, result, {"ids": ids[0], "positive": np.array(positive)}) < 0.05


BRANCHES = {
    name: helper.make_graph([node(op, ["a"], [name])], name, [], [value(name, FLOAT, ["n", 16])])
    for name, op in (("then_branch", "Neg"), ("else_branch", "Abs"))
}
ALSO_TAKEN: dict[str, list[Any]] = {  # by whom, other than the Relu
    "output": [node("Relu", ["a"], ["r"], "relu")],
    "operator": [node("Sigmoid", ["a"], ["s"], "sigmoid"), node("Relu", ["a"], ["r"], "relu")],
    "where": [
        node("Greater", ["a", "zero"], ["g"], "greater"), node("Where", ["g", "zero", "a"], ["s"], "where"), node("Relu", ["a"], ["r"], "relu"),
    ],
    "branch": [
        node("ReduceSum", ["x"], ["total"], "total", keepdims=0), node("Greater", ["total", "zero"], ["positive"], "positive"),
        node("If", ["positive"], ["s"], "if", **BRANCHES), node("Relu", ["a"], ["r"], "relu"),
    ],
    "nobody, a fixed scale": [node("Softmax", ["a"], ["s"], "softmax"), node("Clip", ["s", "zero", "low"], ["r"], "clip")],
    "nobody, a scale of another": [node("Relu", ["a"], ["s"], "relu"), node("Clip", ["s", "zero", "low"], ["r"], "clip")],
    "nobody": [node("Relu", ["a"], ["r"], "relu")],
}  # fmt: skip


@pytest.mark.parametrize("preprocess", [True, False])
@pytest.mark.parametrize("takers", ALSO_TAKEN)
@pytest.mark.parametrize("quant_format", FORMATS)
def test_what_a_relu_cuts_off_is_cut_off_for_whoever_takes_its_result_and_for_nobody_else(
    quant_format: str, takers: str, preprocess: bool, tmp_path: Path
) -> None:
    made = [node("MatMul", ["x", "w"], ["a"], "first"), *ALSO_TAKEN[takers], node("MatMul", ["r", "v"], ["y"], "last")]
    shown = {"output": "a", "operator": "s", "where": "s", "branch": "s"}.get(takers)
    outs = [Y, value(shown, FLOAT, ["n", 16])] if shown else [Y]
    held = [weight("w", 16, 16), weight("v", 16, 16, seed=1), tensor("zero", 0.0), tensor("low", 0.06)]
    given = saved(tmp_path / "in", model(made, [X], outs, held))

    result = apply("OnnxStaticQuantization", given, tmp_path / "out", flat(), quant_format=quant_format, quant_preprocess=preprocess)

    assert result.notes["quantized_nodes"] == 2
    assert (sum(n.op_type == "Relu" for n in result.load().graph.node) == 0) or takers != "nobody"  # it is left out where that is right
    for row in range(6):
        assert error(given, result, {"x": flat()["x"][row : row + 1]}) < 0.06


@every_quantizer
def test_nodes_out_of_order_come_out_in_order(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    made = MODELS["out_of_order"]()
    given = saved(tmp_path / "in", made.proto)

    result = apply(name, given, tmp_path / "out", None if name.startswith("OnnxDynamic") else made.rows, **config)

    sound(result)
    assert error(given, result, made.rows) < 0.05


@every_quantizer
def test_weights_behind_constants_identity_transpose_and_cast_are_quantized(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    for kind, products in (("weights_in_constants", 1), ("weights_computed", 4)):
        made = MODELS[kind]()
        given = saved(tmp_path / kind, made.proto)
        # Weight-only quantization looks at initializers; folding is the optimizer's work.
        ready = apply("OnnxModelOptimizer", given, tmp_path / f"{kind}-folded") if name == "OnnxBlockwiseQuantization" else given

        result = apply(name, ready, tmp_path / f"{kind}-out", None if name.startswith("OnnxDynamic") else made.rows, **config)

        assert not [t.name for t in weights(result).values() if t.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16) and list(t.dims) == [16, 16]]
        if name != "OnnxBlockwiseQuantization":
            assert result.notes["coverage"]["nodes"] == products
        assert error(given, result, made.rows) < 0.08


@pytest.mark.parametrize("name", ["OnnxStaticQuantization", "OnnxDynamicQuantization", "OnnxFloatToFloat16", "OnnxMixedPrecision"])
def test_whole_numbers_and_truths_amid_floats_stay_what_they_are(name: str, tmp_path: Path) -> None:
    nodes = [
        node("Conv", ["x", "k"], ["c"], "conv", pads=[1, 1, 1, 1]),
        node("Shape", ["c"], ["size"], "shape"),
        node("Reshape", ["c", "rows"], ["f"], "flatten"),
        node("TopK", ["x_flat", "two"], ["best", "where"], "top", axis=1),
        node("Reshape", ["x", "rows"], ["x_flat"], "input_flatten"),
        node("NonZero", ["x_flat"], ["places"], "nonzero"),
        node("MatMul", ["f", "w"], ["y"], "product"),
    ]
    proto = model(
        [nodes[0], nodes[1], nodes[2], nodes[4], nodes[3], nodes[5], nodes[6]],
        [IMAGE],
        [value("y", FLOAT, ["n", 4]), value("where", INT64, ["n", 2]), value("places", INT64, [2, "k"]), value("size", INT64, [4])],
        [weight("k", 4, 4, 3, 3), weight("w", 256, 4), tensor("rows", [0, -1], np.int64), tensor("two", [2], np.int64)],
    )
    rows = {"x": np.round(images()["x"] * 8) / 8}  # float16 holds these, so no order changes
    given = saved(tmp_path / "in", proto)

    result = apply(name, given, tmp_path / "out", None if name in ("OnnxDynamicQuantization", "OnnxFloatToFloat16") else rows)

    assert result.notes["changed"]
    wanted, got = outputs(given, rows), outputs(result, rows)
    for number in (2, 3):
        assert np.array_equal(got[number], wanted[number])
    assert float((got[1] == wanted[1]).mean()) > 0.8  # inputs that 8 bits can't tell apart may change places
    assert np.abs(got[0] - wanted[0]).max() < 0.05 * np.abs(wanted[0]).max()
