"""Kinds D: opsets, sizes and where weights lie."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from autotune.errors import AutotuneError, PassError
from autotune.model import ONNXModelHandler, ingest_onnx
from autotune.passes.onnx_graph import default_opset, graphs_of
from tests.failure_kinds.awkward import FLOAT, MODELS, X, Y, branch, flat, model, node, normal, tensor, two_layers, value, weight, write_models
from tests.failure_kinds.kinds import apply, error, outputs, saved, sound

# 27


@pytest.mark.parametrize("target", [13, 17, 21])
@pytest.mark.parametrize("kind", ["opset_7", "opset_9_upsample"])
def test_a_raised_opset_computes_the_same_or_is_refused_by_operator(kind: str, target: int, tmp_path: Path) -> None:
    made = MODELS[kind]()
    given = saved(tmp_path / "in", made.proto)

    result = apply("OnnxOpsetUpgrade", given, tmp_path / "out", made.rows, target_opset=target)

    sound(result)
    assert default_opset(result.load()) == target
    assert error(given, result, made.rows) < 1e-5


@pytest.mark.parametrize("name", ["OnnxStaticQuantization", "OnnxDynamicQuantization"])
def test_an_opset_without_the_operators_is_refused_with_the_way_out_and_that_way_leads_there(name: str, tmp_path: Path) -> None:
    made = MODELS["opset_7"]()
    given = saved(tmp_path / "in", made.proto)
    rows = made.rows if name == "OnnxStaticQuantization" else None

    with pytest.raises(PassError, match=r"needs opset 10 or later; got opset 7. Convert the model to a later opset first"):
        apply(name, given, tmp_path / "refused", rows)
    raised = apply("OnnxOpsetUpgrade", given, tmp_path / "raised", made.rows, target_opset=17)
    result = apply(name, raised, tmp_path / "out", rows)

    assert result.notes["changed"]
    assert error(given, result, made.rows) < 0.05


# 28


def recurrent(operator: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    made = MODELS["lstm" if operator == "LSTM" else "gru"]()
    if operator == "RNN":  # a third of a GRU's weights, which has two gates beside the state
        next(n for n in made.proto.graph.node if n.op_type == "GRU").op_type = "RNN"
        for held in made.proto.graph.initializer:
            if held.name in ("w", "r", "b"):
                values = numpy_helper.to_array(held)
                held.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values[:, : values.shape[1] // 3]), held.name))
    made.proto.opset_import[0].version = 13
    return made.proto, made.rows


@pytest.mark.parametrize("operator", ["LSTM", "GRU", "RNN"])
def test_recurrent_operators_convert_and_compute_the_same(operator: str, tmp_path: Path) -> None:
    proto, rows = recurrent(operator)
    given = saved(tmp_path / "in", proto)

    result = apply("OnnxOpsetUpgrade", given, tmp_path / "out", rows, target_opset=21)

    assert default_opset(result.load()) == 21
    assert error(given, result, rows) < 1e-5


def test_an_operator_that_no_converter_knows_is_named_with_its_versions(tmp_path: Path) -> None:
    # Scan had another form before opset 9, and no converter has a rule for it.
    body = onnx.helper.make_graph(
        [node("Add", ["h", "e"], ["next"], "add"), node("Identity", ["next"], ["each"], "each")], "body",
        [value("h", FLOAT, [16]), value("e", FLOAT, [16])], [value("next", FLOAT, [16]), value("each", FLOAT, [16])],
    )  # fmt: skip
    nodes = [
        node("Unsqueeze", ["x"], ["b"], "batch", axes=[0]), node("Scan", ["", "start", "b"], ["last", "all"], "scan", body=body, num_scan_inputs=1),
        node("Squeeze", ["all"], ["y"], "rows", axes=[0]),
    ]  # fmt: skip
    given = saved(tmp_path / "in", model(nodes, [X], [Y], [tensor("start", np.zeros((1, 16)))], opset=8, ir_version=4))

    with pytest.raises(PassError, match=r"Scan") as caught:
        apply("OnnxOpsetUpgrade", given, tmp_path / "out", flat(), target_opset=13)

    assert "from opset 8 to 13" in str(caught.value)


# 29

SPLIT: list[tuple[str, dict[str, Any]]] = [
    ("OnnxOpsetUpgrade", {}), ("OnnxDynamicToFixedShape", {"dim_param": {"n": 12}}), ("OnnxModelOptimizer", {"optimizer": "ort_basic"}),
    ("OnnxFloatToFloat16", {}), ("OnnxMixedPrecision", {}), ("SmoothQuant", {"unfoldable": "insert"}), ("OnnxStaticQuantization", {}),
    ("OnnxDynamicQuantization", {}), ("OnnxBlockwiseQuantization", {"bits": 8}), ("OnnxPruning", {"method": "unstructured", "sparsity": 0.01}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "config"), SPLIT, ids=[name for name, _ in SPLIT])
def test_models_beyond_one_message_go_by_paths_and_come_out_the_same(
    name: str, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = saved(tmp_path / "in", MODELS["dead_parts"]().proto)
    usual = apply(name, given, tmp_path / "usual", flat(), **config)

    for module in [m for n, m in sys.modules.items() if n.startswith("autotune.") and hasattr(m, "LARGE_BYTES")]:
        monkeypatch.setattr(module, "LARGE_BYTES", 1000)  # instead of what one message holds: the same ways, with small models
    large = apply(name, given, tmp_path / "large", flat(), **config)

    assert large.notes["changed"]
    np.testing.assert_allclose(outputs(large, flat())[0], outputs(usual, flat())[0], atol=1e-6)


# 30


def test_large_tensors_in_constant_nodes_go_outside_those_of_branches_too(tmp_path: Path) -> None:
    then = branch("then", [], [node("Constant", [], ["own"], value=weight("own", 16, 16, seed=2)), node("MatMul", ["a", "own"], ["t"])], "t")
    other = branch("else", [], [node("Neg", ["a"], ["e"])], "e")
    nodes = [
        node("Constant", [], ["w"], "w", value=weight("w", 16, 16)), node("MatMul", ["x", "w"], ["a"], "product"),
        node("ReduceSum", ["x"], ["total"], "total", keepdims=0), node("Greater", ["total", "zero"], ["positive"], "positive"),
        node("If", ["positive"], ["y"], "if", then_branch=then, else_branch=other),
    ]  # fmt: skip
    given = saved(tmp_path / "in", model(nodes, [X], [Y], [tensor("zero", 0.0)]))

    result = apply("OnnxExternalData", given, tmp_path / "out", size_threshold=512)

    assert result.notes["constants_lifted"] == 2
    assert result.path.stat().st_size < 1500
    assert (result.folder / "model.onnx.data").stat().st_size >= 2 * 16 * 16 * 4
    assert error(given, result, flat()) == 0


# 31


def test_a_small_model_stays_one_file_and_one_with_data_beside_it_can_be_moved(tmp_path: Path) -> None:
    small = saved(tmp_path / "in", model([node("MatMul", ["x", "w"], ["y"], "m")], [value("x", FLOAT, ["n", 250])], [value("y", FLOAT, ["n", 250])],
                                         [weight("w", 250, 250)]))  # fmt: skip
    rows = {"x": normal(12, 250)}

    for name in ("OnnxStaticQuantization", "OnnxOpsetUpgrade", "OnnxFloatToFloat16"):
        result = apply(name, small, tmp_path / name, rows)
        assert [p.name for p in result.folder.iterdir()] == ["model.onnx"]
    beside = apply("OnnxExternalData", small, tmp_path / "beside")
    wanted = outputs(small, rows)[0]
    shutil.rmtree(small.folder)
    moved = Path(shutil.move(beside.folder, tmp_path / "elsewhere"))

    assert sorted(p.name for p in moved.iterdir()) == ["model.onnx", "model.onnx.data"]
    np.testing.assert_array_equal(outputs(ONNXModelHandler.from_folder(moved), rows)[0], wanted)


@pytest.mark.parametrize(("name", "config"), SPLIT, ids=[name for name, _ in SPLIT])
def test_weights_beside_the_model_are_read_and_left_alone(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    made = write_models(tmp_path / "models", ["data_beside"])["data_beside"]
    (tmp_path / "in").mkdir()
    given = ingest_onnx(tmp_path / "models" / "data_beside.onnx", tmp_path / "in")
    before = given.digest

    result = apply(name, given, tmp_path / "out", made.rows, **config)

    assert ONNXModelHandler.from_folder(given.folder).digest == before
    assert result.notes["changed"] or name == "OnnxModelOptimizer"  # which finds nothing to do
    assert error(given, result, made.rows) < 0.2


# 32


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("OnnxStaticQuantization", "identity_only", "no Conv/ConvTranspose/"),
        ("OnnxStaticQuantization", "float16_throughout", "constant float32 weights"),
        ("OnnxStaticQuantization", "scan_with_weights", "1 MatMul are inside bodies"),
        ("OnnxDynamicQuantization", "shared_bias", "Gemm/LSTM/MatMul with constant float32 weights"),
        ("OnnxBlockwiseQuantization", "weight_of_rank_3", "a weight of rank 3"),
        ("OnnxBlockwiseQuantization", "float64_throughout", "the weight is double"),
        ("OnnxFloatToFloat16", "float16_throughout", "float16 already"),
        ("OnnxMixedPrecision", "whole_numbers", "no float32 weights"),
        ("OnnxExternalData", "identity_only", "no weight has"),
        ("OrtTransformersOptimization", "mobile_block", "no pattern"),
        ("OnnxPruning", "runtime_operators", "makes channels"),
        ("SmoothQuant", "mobile_block", "No MatMul or Gemm"),
    ],
)
def test_a_pass_that_finds_nothing_to_do_gives_the_same_bytes_and_the_reason(name: str, kind: str, words: str, tmp_path: Path) -> None:
    made = MODELS[kind]()
    given = saved(tmp_path / "in", made.proto)

    result = apply(name, given, tmp_path / "out", made.rows)

    assert result.notes["changed"] is False
    assert words.lower() in result.notes["reason"].lower()
    assert result.digest == given.digest
    assert result.size_bytes == given.size_bytes


# 33


@pytest.mark.parametrize(
    "name",
    [
        *("OnnxOpsetUpgrade", "OnnxModelOptimizer", "OnnxFloatToFloat16", "OnnxBlockwiseQuantization", "OnnxExternalData"),
        *("OnnxStaticQuantization", "OnnxDynamicQuantization"),
    ],
)
def test_a_named_axis_keeps_its_name_and_no_axis_becomes_0(name: str, tmp_path: Path) -> None:
    made = MODELS["all_axes_dynamic"]()
    given = saved(tmp_path / "in", made.proto)

    result = apply(name, given, tmp_path / "out", made.rows, **({"size_threshold": 128} if name == "OnnxExternalData" else {}))

    assert result.io.inputs == given.io.inputs
    graphs = list(graphs_of(result.load().graph))
    shown = [v for g in graphs for v in (*g.input, *g.output, *g.value_info)]
    assert not [v.name for v in shown for d in v.type.tensor_type.shape.dim if d.WhichOneof("value") == "dim_value" and d.dim_value == 0]
    for rows in (1, 3, 12):
        part = {"x": made.rows["x"][:rows]}
        assert outputs(result, part)[0].shape == outputs(given, part)[0].shape


@pytest.mark.parametrize("sizes", [{"dim_param": {"n": 0}}, {"input_shapes": {"x": [0, 16]}}], ids=str)
def test_a_size_of_0_is_refused(sizes: dict[str, Any], tmp_path: Path) -> None:
    given = saved(tmp_path / "in", two_layers())

    with pytest.raises(AutotuneError, match=next(iter(sizes))):
        apply("OnnxDynamicToFixedShape", given, tmp_path / "out", flat(), **sizes)
