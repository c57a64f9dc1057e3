"""OrtTransformersOptimization: fuse attention, layer normalization and GELU into ONNX Runtime's own operators.

Source: ONNX Runtime documentation, "Transformers optimizer" (`onnxruntime.transformers.optimizer`).
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autotune.errors import PassConfigError, PassError
from autotune.model import MODEL_FILE, ONNXModelHandler, save_onnx
from autotune.passes.base import ONNX, AcceleratorSpec, Pass, PassConfigParam, PassContract
from autotune.passes.onnx_graph import (
    fit_domains,
    initializer_names,
    keep_io,
    library_errors,
    load_fixed,
    loads_at_every_level,
    operator_counts,
    quiet,
    rename_new_initializers,
    same_work,
    sort_nodes,
    unchanged,
)
from autotune.passes.registry import register
from autotune.search_spaces.parameters import INACTIVE, Boolean, Categorical, Conditional, ConditionalDefault

if TYPE_CHECKING:
    import onnx

WHO = "OrtTransformersOptimization"
FUSIONS = {
    "attention": "enable_attention", "layer_norm": "enable_layer_norm", "skip_layer_norm": "enable_skip_layer_norm",
    "embed_layer_norm": "enable_embed_layer_norm", "gelu": "enable_gelu", "bias_gelu": "enable_bias_gelu",
    "bias_skip_layer_norm": "enable_bias_skip_layer_norm", "gelu_approximation": "enable_gelu_approximation",
}  # fmt: skip


# What each fusion leaves in the graph when it happens.
MADE_BY: Mapping[str, tuple[str, ...]] = {
    "attention": ("Attention", "MultiHeadAttention", "GroupQueryAttention", "PackedAttention", "PackedMultiHeadAttention"),
    "layer_norm": ("LayerNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
                   "EmbedLayerNormalization"),
    "skip_layer_norm": ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
    "embed_layer_norm": ("EmbedLayerNormalization",),
    "gelu": ("Gelu", "FastGelu", "QuickGelu", "BiasGelu"),
    "bias_gelu": ("BiasGelu", "FastGelu"),
}  # fmt: skip


def _fusing(value: Any) -> ConditionalDefault:
    return ConditionalDefault("only_onnxruntime", {False: value}, default=INACTIVE)


def _fusion(default: bool, description: str, *, searched: bool = False) -> PassConfigParam:
    choices = Boolean() if searched else Categorical([default])
    return PassConfigParam(
        type_=bool, default_value=_fusing(default), search_defaults=Conditional("only_onnxruntime", {False: choices}, default=INACTIVE),
        description=description,
    )  # fmt: skip


@register
class OrtTransformersOptimization(Pass):
    """Fuse the patterns of transformers; the result runs on ONNX Runtime only."""

    contract = PassContract(accepts=ONNX, returns=ONNX, min_opset=11, ep_dependent=True, version=2)

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {
            "model_type": PassConfigParam(
                type_=Literal["bert", "gpt2", "gpt_neox", "t5", "bart", "swin", "vit", "clip", "unet", "vae", "phi", "conformer"],
                default_value="bert", search_defaults=Categorical(["bert"]),
                description="family whose patterns are looked for; bert fits encoders and most models with plain attention",
            ),
            "num_heads": PassConfigParam(
                type_=int, default_value=0, minimum=0, description="attention heads; 0 finds out from the graph"
            ),
            "hidden_size": PassConfigParam(
                type_=int, default_value=0, minimum=0, description="width of all heads together; 0 finds out from the graph"
            ),
            "opt_level": PassConfigParam(
                type_=Literal[0, 1, 2, 99], default_value=0, search_defaults=Categorical([0, 1]),
                description="let ONNX Runtime optimize first: 0 not at all, 1 basic, 2 extended, 99 all. Basic helps some exports and hides the "
                "patterns of others; 2 and 99 make a model for this kind of CPU only",
            ),
            "only_onnxruntime": PassConfigParam(
                type_=bool, default_value=False, description="leave out the pattern fusions, do opt_level only (which must then be above 0)"
            ),
            "attention": _fusion(True, "fuse self-attention into one operator", searched=True),
            "layer_norm": _fusion(True, "fuse layer normalization written out in parts"),
            "skip_layer_norm": _fusion(True, "fuse residual additions into the layer normalization after them"),
            "bias_skip_layer_norm": _fusion(True, "fuse a bias too into SkipLayerNormalization"),
            "embed_layer_norm": _fusion(True, "fuse embedding look-ups with the layer normalization after them", searched=True),
            "gelu": _fusion(True, "fuse GELU written out in parts"),
            "bias_gelu": _fusion(True, "fuse a bias into the GELU after it"),
            "gelu_approximation": _fusion(False, "replace GELU by its tanh form (FastGelu): other results"),
            "use_raw_attention_mask": _fusion(
                True, "keep the mask as it is given; otherwise it is read as a length, which is right only for inputs padded at the end"
            ),
            "use_multi_head_attention": _fusion(False, "write MultiHeadAttention instead of Attention, which merges the three projections"),
            "float16": PassConfigParam(
                type_=bool, default_value=False, description="convert to float16 afterwards, float32 inputs and outputs kept (slower on most CPUs)"
            ),
        }  # fmt: skip

    @classmethod
    def validate_config(cls, config: Mapping[str, Any], accelerator_spec: AcceleratorSpec) -> None:
        """Refuse a config that does nothing, and heads that can't share the width."""
        if config["only_onnxruntime"] and config["opt_level"] == 0:
            raise PassConfigError(
                cls.__name__, "only_onnxruntime needs an opt_level above 0", "opt_level=0", "Set opt_level to 1, or only_onnxruntime to false."
            )
        if config["num_heads"] and config["hidden_size"] % config["num_heads"]:
            raise PassConfigError(
                cls.__name__, "hidden_size must be a multiple of num_heads", f"hidden_size={config['hidden_size']}, num_heads={config['num_heads']}"
            )

    def _run_for_config(self, model: ONNXModelHandler, config: Mapping[str, Any], output_model_path: Path) -> ONNXModelHandler:
        given = load_fixed(model)
        before = operator_counts(given)
        if self.accelerator_spec.accelerator_type == "gpu" and config["opt_level"] > 0:
            self._refuse_missing_provider()
        doing = "Set opt_level to 0 or 1, switch fusions off, or leave this pass out."
        with library_errors(WHO, "the model must be one that ONNX Runtime's transformers optimizer takes", doing), quiet():
            result, fused = self._fuse(given, config)
            keep_io(result, given)
        after = operator_counts(result)
        # The optimizer counts what is there; a model that came with fused operators was not fused by it.
        fused = {name: count for name, count in fused.items() if count > before.get(name, before.get(f"com.microsoft.{name}", 0))}
        notes: dict[str, Any] = {
            "operators_before": before, "operators_after": after, "nodes_before": sum(before.values()), "nodes_after": sum(after.values()),
            "fused": fused, "not_fused": _not_fused(config, after), "portable": config["opt_level"] <= 1,
        }  # fmt: skip
        if same_work(given, result):
            reason = f"no pattern of {config['model_type']} was found in the graph" if not config["only_onnxruntime"] else "nothing to optimize"
            return unchanged(model, output_model_path, reason, notes=notes)
        if self.accelerator_spec.execution_provider == "CPUExecutionProvider":
            with library_errors(WHO, "the fused model must load", doing):
                loads_at_every_level(result)
        return model.written(output_model_path, proto=result, notes={**notes, "changed": True})

    def _refuse_missing_provider(self) -> None:
        import onnxruntime as ort

        wanted = self.accelerator_spec.execution_provider
        if wanted not in ort.get_available_providers():
            raise PassError(WHO, f"opt_level above 0 needs {wanted}", "an ONNX Runtime without it", "Set opt_level to 0.")

    def _fuse(self, given: onnx.ModelProto, config: Mapping[str, Any]) -> tuple[onnx.ModelProto, dict[str, int]]:
        from onnxruntime.transformers.fusion_options import FusionOptions
        from onnxruntime.transformers.optimizer import optimize_model

        options = FusionOptions(config["model_type"])
        for name, attribute in FUSIONS.items():
            if name in config:
                setattr(options, attribute, config[name])
        options.use_multi_head_attention = config.get("use_multi_head_attention", False)
        if config.get("use_raw_attention_mask", True):
            options.use_raw_attention_mask(True)
        heads, width = _heads(given)
        known = initializer_names(given)
        with tempfile.TemporaryDirectory(prefix="autotune-fuse-") as name:
            path = Path(name, MODEL_FILE)
            copied = type(given)()
            copied.CopyFrom(given)
            save_onnx(copied, path)
            fused = optimize_model(
                str(path), model_type=config["model_type"], num_heads=config["num_heads"] or heads,
                hidden_size=config["hidden_size"] or width,
                optimization_options=options, opt_level=config["opt_level"], only_onnxruntime=config["only_onnxruntime"],
                use_gpu=self.accelerator_spec.accelerator_type == "gpu",
            )  # fmt: skip
            counts = {k: int(v) for k, v in fused.get_fused_operator_statistics().items() if v}
            if config["float16"]:
                fused.convert_float_to_float16(keep_io_types=True)
            result: onnx.ModelProto = fused.model
        sort_nodes(result.graph)
        rename_new_initializers(result, known)
        fit_domains(result)
        return result, dict(sorted(counts.items()))


def _not_fused(config: Mapping[str, Any], after: Mapping[str, int]) -> list[str]:
    """Fusions that were asked for and of which the graph holds no trace: its pattern was not there, or not as ONNX Runtime knows it."""
    present = {name.rpartition(".")[2] for name in after}
    return [name for name, made in MADE_BY.items() if config.get(name) and not present.intersection(made)]


def _heads(proto: onnx.ModelProto) -> tuple[int, int]:
    """Number of attention heads and their common width, or zeros: what queries are reshaped to before they meet a Softmax.

    ONNX Runtime's own detection gives up where the shape is put together from dynamic axes, and then fuses no attention. Of several
    answers the most frequent one counts.
    """
    from onnx import numpy_helper

    graph = proto.graph
    producer = {name: node for node in graph.node for name in node.output}
    constants = {t.name: t for t in graph.initializer}
    constants |= {n.output[0]: a.t for n in graph.node if n.op_type == "Constant" for a in n.attribute if a.name == "value"}

    def last_of_shape(name: str) -> list[int]:
        """Heads and head size, the last two numbers of a shape of four, where they are constant; -1 stands for what is left."""
        node = producer.get(name)
        parts = node.input if node is not None and node.op_type == "Concat" else [name]
        values: list[int | None] = []
        for part in parts:
            values += [int(v) for v in numpy_helper.to_array(constants[part]).reshape(-1)] if part in constants else [None]
        return [v for v in values[-2:] if v is not None] if len(values) == 4 else []

    def width_of(name: str) -> int:
        """Columns of the weight that a value was multiplied by."""
        projection = back_to(name, "MatMul", ("Add",))
        weight = constants.get(projection.input[1]) if projection is not None else None
        return int(weight.dims[-1]) if weight is not None and len(weight.dims) == 2 else 0

    def back_to(name: str, wanted: str, through: tuple[str, ...]) -> onnx.NodeProto | None:
        for _ in range(8):
            node = producer.get(name)
            if node is None or node.op_type == wanted:
                return node
            if node.op_type not in through:
                return None
            # A mask or a factor may be either operand: follow the one that is computed from a product.
            name = next((n for n in node.input if n in producer and producer[n].op_type in (wanted, *through)), "")
        return None

    found: Counter[tuple[int, int]] = Counter()
    for softmax in (n for n in graph.node if n.op_type == "Softmax"):
        product = back_to(softmax.input[0], "MatMul", ("Add", "Mul", "Div", "Where", "Cast"))
        query = back_to(product.input[0], "Reshape", ("Transpose", "Mul", "Div", "Cast")) if product is not None else None
        shape = last_of_shape(query.input[1]) if query is not None else []
        if query is None or len(shape) != 2:
            continue
        heads, size = shape
        width = heads * size if heads > 0 and size > 0 else width_of(query.input[0])
        heads = heads if heads > 0 else width // size if size > 0 else 0
        if heads > 0 and width > 0 and width % heads == 0:
            found[(heads, width)] += 1
    return found.most_common(1)[0][0] if found else (0, 0)
