from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from autotune.errors import PassConfigError
from autotune.model import ONNXModelHandler
from autotune.passes.ort_transformers_optimization import OrtTransformersOptimization, _heads
from autotune.search_spaces.parameters import INACTIVE
from autotune.session import create_session
from autotune.target import AcceleratorSpec
from tests.passes.small_onnx import handler, random_weight

SPEC = AcceleratorSpec()
HEADS, WIDTH, LENGTH = 2, 16, 6


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ONNXModelHandler:
    """A BERT encoder of two layers with random weights, exported by tracing."""
    import torch
    from transformers import BertConfig, BertModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=32,
        max_position_embeddings=32, attn_implementation="eager",
    )  # fmt: skip
    bert = BertModel(config, add_pooling_layer=False).eval()

    bert.requires_grad_(False)

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.bert(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids).last_hidden_state
            return output

    folder = tmp_path_factory.mktemp("encoder")
    ids = torch.ones((2, LENGTH), dtype=torch.int64)
    axes = {0: "batch", 1: "length"}
    names = ["input_ids", "attention_mask", "token_type_ids"]
    torch.onnx.export(
        Encoder().eval(), (ids, ids, ids), str(folder / "model.onnx"), input_names=names, output_names=["y"],
        dynamic_axes=dict.fromkeys([*names, "y"], axes), opset_version=17, dynamo=False,
    )  # fmt: skip
    return ONNXModelHandler.from_folder(folder)


def fuse(model: ONNXModelHandler, folder: Path, **config: Any) -> ONNXModelHandler:
    folder.mkdir(parents=True, exist_ok=True)
    return OrtTransformersOptimization(SPEC, config).run(model, folder)  # type: ignore[return-value] # an ONNX pass gives an ONNX model


def answers(model: ONNXModelHandler, padding: int) -> np.ndarray:
    """Outputs where a token counts; `padding` tokens at the front of each row don't."""
    ids = np.random.default_rng(0).integers(1, 50, (3, LENGTH))
    mask = np.ones_like(ids)
    mask[:, :padding] = 0
    feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    output = create_session(model.path, model.session).run(None, feed)[0]
    return np.asarray(output[:, padding:])


@pytest.mark.parametrize("config", [{}, {"opt_level": 1}, {"use_multi_head_attention": True}], ids=str)
def test_attention_is_fused_and_outputs_stay(config: dict[str, Any], encoder: ONNXModelHandler, tmp_path: Path) -> None:
    result = fuse(encoder, tmp_path / "out", **config)

    fused = result.notes["fused"]
    assert fused["MultiHeadAttention" if "use_multi_head_attention" in config else "Attention"] == 2
    assert result.notes["nodes_after"] < 0.5 * result.notes["nodes_before"]
    np.testing.assert_allclose(answers(result, 0), answers(encoder, 0), atol=1e-4)


def test_the_mask_counts_wherever_the_padding_is(encoder: ONNXModelHandler, tmp_path: Path) -> None:
    result = fuse(encoder, tmp_path / "out")

    np.testing.assert_allclose(answers(result, 2), answers(encoder, 2), atol=1e-4)


def test_a_fusion_that_is_switched_off_does_not_happen(encoder: ONNXModelHandler, tmp_path: Path) -> None:
    result = fuse(encoder, tmp_path / "out", attention=False, bias_gelu=False)

    assert not {"Attention", "MultiHeadAttention", "BiasGelu"} & set(result.notes["fused"])
    np.testing.assert_allclose(answers(result, 0), answers(encoder, 0), atol=1e-4)


def test_fusions_that_did_not_happen_are_named(encoder: ONNXModelHandler, tmp_path: Path) -> None:
    result = fuse(encoder, tmp_path / "out", embed_layer_norm=False)
    nothing = fuse(handler(tmp_path / "in", [helper.make_node("Relu", ["x"], ["y"], "relu")]), tmp_path / "none", attention=False)

    assert result.notes["not_fused"] == []
    assert nothing.notes["not_fused"] == ["layer_norm", "skip_layer_norm", "embed_layer_norm", "gelu", "bias_gelu"]


def test_onnx_runtime_alone_can_be_asked_for(encoder: ONNXModelHandler, tmp_path: Path) -> None:
    result = fuse(encoder, tmp_path / "out", only_onnxruntime=True, opt_level=1)

    assert not {"Attention", "SkipLayerNormalization"} & set(result.notes["fused"])
    assert result.notes["nodes_after"] < result.notes["nodes_before"]
    np.testing.assert_allclose(answers(result, 0), answers(encoder, 0), atol=1e-4)


def test_float16_halves_the_weights_and_keeps_inputs_and_outputs(encoder: ONNXModelHandler, tmp_path: Path) -> None:
    single = fuse(encoder, tmp_path / "single")
    half = fuse(encoder, tmp_path / "half", float16=True)

    assert half.io == single.io
    assert half.notes["operators_after"]["Cast"] > single.notes["operators_after"].get("Cast", 0)
    np.testing.assert_allclose(answers(half, 0), answers(encoder, 0), atol=2e-2)


def test_heads_and_width_are_found_in_the_graph(encoder: ONNXModelHandler) -> None:
    assert _heads(encoder.load()) == (HEADS, WIDTH)


def test_no_heads_are_found_where_there_is_no_attention(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"], "matmul"), helper.make_node("Softmax", ["m"], ["y"], "softmax")]

    assert _heads(handler(tmp_path / "in", nodes, [random_weight("w", 16, 16)]).load()) == (0, 0)


def test_a_model_without_such_patterns_comes_back_as_it_was_and_says_why(tmp_path: Path) -> None:
    model = handler(tmp_path / "in", [helper.make_node("MatMul", ["x", "w"], ["y"], "matmul")], [random_weight("w", 16, 16)])

    result = fuse(model, tmp_path / "out")

    assert result.digest == model.digest
    assert result.notes["reason"] == "no pattern of bert was found in the graph"


def test_a_fused_model_is_fused_no_further(encoder: ONNXModelHandler, tmp_path: Path) -> None:
    once = fuse(encoder, tmp_path / "once")

    twice = fuse(once, tmp_path / "twice")

    assert twice.notes["fused"] == {}
    np.testing.assert_allclose(answers(twice, 0), answers(encoder, 0), atol=1e-4)


def test_a_config_that_does_nothing_or_contradicts_itself_is_refused() -> None:
    with pytest.raises(PassConfigError, match="only_onnxruntime needs an opt_level above 0"):
        OrtTransformersOptimization(SPEC, {"only_onnxruntime": True})
    with pytest.raises(PassConfigError, match="multiple of num_heads"):
        OrtTransformersOptimization(SPEC, {"num_heads": 3, "hidden_size": 16})
    with pytest.raises(PassConfigError, match="attention plays no part"):
        OrtTransformersOptimization(SPEC, {"only_onnxruntime": True, "opt_level": 1, "attention": True})
    with pytest.raises(PassConfigError, match="Did you mean 'bert'"):
        OrtTransformersOptimization(SPEC, {"model_type": "bertt"})


def test_fusion_switches_play_no_part_without_fusions() -> None:
    space = OrtTransformersOptimization.search_space(SPEC)

    attention = OrtTransformersOptimization.default_config(SPEC)["attention"].search_defaults
    assert "attention" in space
    assert attention is not None
    assert attention.branch({"only_onnxruntime": True}) is INACTIVE  # type: ignore[union-attr] # a Conditional by the table


def test_the_result_is_a_model_that_the_checker_of_onnx_accepts(encoder: ONNXModelHandler, tmp_path: Path) -> None:
    onnx.checker.check_model(fuse(encoder, tmp_path / "out").load())
