from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from autotune.errors import PassConfigError
from autotune.model import ONNXModelHandler
from autotune.passes.ort_transformers_optimization import OrtTransformersOptimization
from autotune.passes.transformer_fusions import DIFFUSION, FUSIONS, UNUSABLE, attention_sites, heads_of, model_types
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

    assert result.notes["not_applied"] == {
        "layer_norm": "the model came with LayerNormalization operators",
        "rotary_embeddings": "its pattern is not there: no Cos or Neg in the model",
    }
    assert set(nothing.notes["not_applied"]) == {"layer_norm", "skip_layer_norm", "embed_layer_norm", "gelu", "rotary_embeddings"}
    assert nothing.notes["not_applied"]["gelu"] == "its pattern is not there: no Erf or Tanh or Sigmoid in the model"


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
    assert half.notes["operators_after"]["com.microsoft.Attention"] == 2
    assert {t.data_type for t in half.load().graph.initializer if len(t.dims) == 2 and t.dims[0] > 2} == {onnx.TensorProto.FLOAT16}
    assert half.notes["error"] < 1e-4 < half.notes["float16_error"] < 2e-2
    assert OrtTransformersOptimization.traits(OrtTransformersOptimization(SPEC, {"float16": True}).config).weight_type == "float16"
    np.testing.assert_allclose(answers(half, 0), answers(encoder, 0), atol=2e-2)


def test_heads_and_width_are_found_in_the_graph(encoder: ONNXModelHandler) -> None:
    assert attention_sites(encoder.load()) == [(HEADS, WIDTH)] * 2


def test_no_heads_are_found_where_there_is_no_attention(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"], "matmul"), helper.make_node("Softmax", ["m"], ["y"], "softmax")]

    sites = attention_sites(handler(tmp_path / "in", nodes, [random_weight("w", 16, 16)]).load())

    assert sites == []
    assert heads_of(sites) == (0, 0)


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


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ONNXModelHandler]:
    """A causal decoder (one product for queries, keys and values) and two image encoders, all of two layers."""
    import torch
    from transformers import CLIPVisionConfig, CLIPVisionModel, GPT2Config, GPT2Model, ViTConfig, ViTModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"image_size": 16, "patch_size": 4, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
                             "intermediate_size": 32, "attn_implementation": "eager"}  # fmt: skip
    gpt2 = GPT2Config(vocab_size=50, n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=32, attn_implementation="eager", use_cache=False)
    modules = {
        "gpt2": GPT2Model(gpt2),
        "vit": ViTModel(ViTConfig(**sizes), add_pooling_layer=False),
        "clip": CLIPVisionModel(CLIPVisionConfig(**sizes)),
    }
    found = {}
    for name, module in modules.items():
        text = name == "gpt2"
        example = torch.ones((2, LENGTH), dtype=torch.int64) if text else torch.rand(2, 3, 16, 16)
        axes = {0: "batch", 1: "length"} if text else {0: "batch"}

        class First(torch.nn.Module):
            def __init__(self, inner: torch.nn.Module) -> None:
                super().__init__()
                self.inner = inner.requires_grad_(False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                mask = {} if x.is_floating_point() else {"attention_mask": torch.ones_like(x)}
                output: torch.Tensor = self.inner(x, **mask)[0]
                return output

        folder = tmp_path_factory.mktemp(name)
        torch.onnx.export(
            First(module).eval(), (example,), str(folder / "model.onnx"), input_names=["x"], output_names=["y"],
            dynamic_axes={"x": axes, "y": axes if text else {0: "batch"}}, opset_version=17, dynamo=False,
        )  # fmt: skip
        found[name] = ONNXModelHandler.from_folder(folder)
    return found


def test_heads_are_found_where_projections_are_split_and_shapes_are_dynamic(others: dict[str, ONNXModelHandler]) -> None:
    for name, model in others.items():
        assert attention_sites(model.load()) == [(HEADS, WIDTH)] * 2, name


def test_the_type_that_fuses_attention_is_found_and_outputs_stay(others: dict[str, ONNXModelHandler], tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).random((3, 3, 16, 16)).astype(np.float32)

    found = fuse(others["clip"], tmp_path / "auto")
    named = fuse(others["clip"], tmp_path / "named", model_type="bert")

    assert (found.notes["model_type"], found.notes["fused"]["Attention"], found.notes["attention_left"]) == ("clip", 2, 0)
    assert "Attention" not in named.notes["fused"]
    assert "none in a form that model type bert knows" in named.notes["not_applied"]["attention"]
    for result in (found, named):
        got, wanted = (create_session(m.path, m.session).run(None, {"x": pixels})[0] for m in (result, others["clip"]))
        np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_attention_in_no_known_form_is_told_and_the_rest_is_fused(others: dict[str, ONNXModelHandler], tmp_path: Path) -> None:
    feeds = {"gpt2": np.arange(12, dtype=np.int64).reshape(2, LENGTH), "vit": np.ones((2, 3, 16, 16), np.float32)}

    for name, feed in feeds.items():
        result = fuse(others[name], tmp_path / name, model_type=name)

        left, before = result.notes["attention_left"], result.notes["attention_before"]
        assert before == 2
        assert (left > 0) is ("attention" in result.notes["not_applied"])
        assert result.notes["fused"]["SkipLayerNormalization"] == 4
        got, wanted = (create_session(m.path, m.session).run(None, {"x": feed})[0] for m in (result, others[name]))
        np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_model_types_and_switches_are_those_of_the_installed_runtime() -> None:
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import MODEL_TYPES

    switches = {name for kind in MODEL_TYPES for name in vars(FusionOptions(kind)) if name.startswith("enable_")}

    assert model_types() == tuple(MODEL_TYPES)
    assert switches == {f.option for f in FUSIONS} | {"enable_shape_inference"}
    assert {kind for kind in MODEL_TYPES if hasattr(FusionOptions(kind), "enable_group_norm")} == set(DIFFUSION)
    for kind in set(MODEL_TYPES) - set(UNUSABLE):
        assert OrtTransformersOptimization(SPEC, {"model_type": kind}).config["model_type"] == kind


def test_types_and_fusions_that_can_not_work_here_are_refused_in_words() -> None:
    with pytest.raises(PassConfigError, match=r"phi.*other inputs and outputs.*Take auto"):
        OrtTransformersOptimization(SPEC, {"model_type": "phi"})
    with pytest.raises(PassConfigError, match="group_norm needs a GPU"):
        OrtTransformersOptimization(SPEC, {"model_type": "unet", "group_norm": True})
    with pytest.raises(PassConfigError, match="group_norm plays no part"):
        OrtTransformersOptimization(SPEC, {"model_type": "bert", "group_norm": True})
    with pytest.raises(PassConfigError, match="given together"):
        OrtTransformersOptimization(SPEC, {"num_heads": 2})
    assert OrtTransformersOptimization(AcceleratorSpec("gpu", "CUDAExecutionProvider"), {"model_type": "unet"}).config["group_norm"] is True


@pytest.mark.parametrize("model_type", ["unet", "sam2", "gpt2", "t5"])
def test_other_types_leave_outputs_as_they_were_and_print_nothing(
    model_type: str, encoder: ONNXModelHandler, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = fuse(encoder, tmp_path / "out", model_type=model_type)

    assert capfd.readouterr() == ("", "")
    assert result.notes["changed"]
    np.testing.assert_allclose(answers(result, 2), answers(encoder, 2), atol=1e-4)


def test_a_mask_that_is_read_as_a_length_is_right_for_rows_without_padding(encoder: ONNXModelHandler, tmp_path: Path) -> None:
    result = fuse(encoder, tmp_path / "out", use_raw_attention_mask=False)

    assert result.notes["fused"]["Attention"] == 2
    np.testing.assert_allclose(answers(result, 0), answers(encoder, 0), atol=1e-4)


def test_the_fusion_that_spoils_outputs_is_left_out_and_named(encoder: ONNXModelHandler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fuse_rightly = OrtTransformersOptimization._fuse

    def spoil_attention(self: OrtTransformersOptimization, *arguments: Any, left_out: frozenset[str] = frozenset()) -> Any:
        fused = fuse_rightly(self, *arguments, left_out=left_out)
        weights = {node.input[1] for node in fused.proto.graph.node if node.op_type == "Attention"}
        for tensor in fused.proto.graph.initializer:
            if tensor.name in weights:
                tensor.CopyFrom(numpy_helper.from_array(3 * numpy_helper.to_array(tensor), tensor.name))
        return fused

    monkeypatch.setattr(OrtTransformersOptimization, "_fuse", spoil_attention)

    result = fuse(encoder, tmp_path / "out")

    assert "Attention" not in result.notes["fused"]
    assert result.notes["fused"]["BiasGelu"] == 2
    assert "left out, since with it output 'y'" in result.notes["not_applied"]["attention"]
    np.testing.assert_allclose(answers(result, 0), answers(encoder, 0), atol=1e-4)


def test_symbolic_shape_inference_is_left_out_where_no_fusion_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # ONNX Runtime's inference with symbols takes minutes on convolutional networks of unknown sizes
    from onnxruntime.transformers.fusion_options import FusionOptions

    made: list[FusionOptions] = []
    original = FusionOptions.__init__

    def keep(self: FusionOptions, model_type: str) -> None:
        original(self, model_type)
        made.append(self)

    monkeypatch.setattr(FusionOptions, "__init__", keep)
    weights = [random_weight("g", 16), random_weight("b", 16)]
    plain = handler(tmp_path / "plain", [helper.make_node("Relu", ["x"], ["y"], "relu")])
    normal = handler(tmp_path / "normal", [helper.make_node("LayerNormalization", ["x", "g", "b"], ["y"], "norm")], weights)

    fuse(plain, tmp_path / "one")
    fuse(normal, tmp_path / "two")

    assert [options.enable_shape_inference for options in made] == [False, True]
