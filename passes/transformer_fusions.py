"""What ONNX Runtime's transformers optimizer can fuse, as rows of a table; attention found in a graph; what fusing has left in it.

Sources: the installed `onnxruntime.transformers` (`optimizer.MODEL_TYPES`, `fusion_options.FusionOptions`) and its documentation.
"""

from __future__ import annotations

import ast
import importlib.util
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.passes.onnx_graph import DEFAULT_DOMAINS, weights_aside

if TYPE_CHECKING:
    import onnx

MICROSOFT = "com.microsoft"
DIFFUSION = ("unet", "vae", "clip")  # types whose options have switches of their own
# The type phi puts the inputs and outputs of ONNX Runtime's own generation loop in the place of the model's, and takes exports that keep
# each module as a function, which PyTorch makes no more.
UNUSABLE: Mapping[str, str] = {
    "phi": "it makes a model with other inputs and outputs, from exports with a function for each module, which PyTorch no longer makes",
}
# Types that are tried in turn when none is named, each at the price of a fusion. The others differ from these by exporter, or are for speech
# and for parts of image generators.
TRIED = ("bert", "gpt2", "bart", "t5", "clip")


@dataclass(frozen=True)
class Fusion:
    """A switch of the optimizer. `makes`: operators that stand in the graph when it happened; `types`: for these model types only."""

    name: str
    option: str
    description: str
    makes: tuple[str, ...]
    default: bool = True
    searched: bool = False
    gpu: bool = False  # its operators run on CUDA (or ROCm) only
    types: tuple[str, ...] = ()


FUSIONS: tuple[Fusion, ...] = (
    Fusion("attention", "enable_attention", "fuse attention (projections, scores, Softmax, sum) into one operator",
           ("Attention", "MultiHeadAttention", "GroupQueryAttention"), searched=True),
    Fusion("layer_norm", "enable_layer_norm", "fuse layer normalization written out in parts",
           ("LayerNormalization", "SimplifiedLayerNormalization")),
    Fusion("skip_layer_norm", "enable_skip_layer_norm", "fuse residual additions into the layer normalization after them",
           ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")),
    Fusion("bias_skip_layer_norm", "enable_bias_skip_layer_norm", "fuse a bias too into SkipLayerNormalization", ()),
    Fusion("embed_layer_norm", "enable_embed_layer_norm", "fuse embedding look-ups with the layer normalization after them",
           ("EmbedLayerNormalization",), searched=True),
    Fusion("gelu", "enable_gelu", "fuse GELU written out in parts, in its tanh and sigmoid forms too", ("Gelu", "FastGelu", "QuickGelu", "BiasGelu")),
    Fusion("bias_gelu", "enable_bias_gelu", "fuse a bias into the GELU after it", ()),
    Fusion("gelu_approximation", "enable_gelu_approximation", "replace GELU by its tanh form (FastGelu): other results", ("FastGelu",),
           default=False),
    Fusion("rotary_embeddings", "enable_rotary_embeddings", "fuse rotary position embeddings", ("RotaryEmbedding",)),
    Fusion("qordered_matmul", "enable_qordered_matmul", "fuse quantized products for CUDA's column order",
           ("QOrderedMatMul", "QOrderedAttention", "QOrderedGelu", "QOrderedLayerNormalization"), gpu=True),
    Fusion("gemm_fast_gelu", "enable_gemm_fast_gelu", "fuse a product with the FastGelu after it (ROCm)", ("GemmFastGelu",), default=False, gpu=True),
    Fusion("group_norm", "enable_group_norm", "fuse group normalization", ("GroupNorm",), gpu=True, types=DIFFUSION),
    Fusion("skip_group_norm", "enable_skip_group_norm", "fuse residual additions into the group normalization after them", ("SkipGroupNorm",),
           gpu=True, types=DIFFUSION),
    Fusion("nhwc_conv", "enable_nhwc_conv", "convolutions with channels last", ("NhwcConv",), gpu=True, types=DIFFUSION),
    Fusion("bias_split_gelu", "enable_bias_splitgelu", "fuse a bias, a split and GELU", ("BiasSplitGelu",), gpu=True, types=DIFFUSION),
    Fusion("bias_add", "enable_bias_add", "fuse a bias and a residual addition", ("BiasAdd",), gpu=True, types=DIFFUSION),
    Fusion("packed_qkv", "enable_packed_qkv", "one product for queries, keys and values of self-attention", (), gpu=True, types=DIFFUSION),
    Fusion("packed_kv", "enable_packed_kv", "one product for keys and values of cross-attention", (), gpu=True, types=DIFFUSION),
)  # fmt: skip
# A fusion that goes further with what another one made leaves none of the first one's operators.
FURTHER: Mapping[str, tuple[str, ...]] = {
    "layer_norm": ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "EmbedLayerNormalization"),
}
# Why a fusion may have found nothing, by the operators that its pattern can't be without.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "attention": ("Softmax",), "gelu": ("Erf", "Tanh", "Sigmoid"), "embed_layer_norm": ("Gather",), "layer_norm": ("ReduceMean",),
    "skip_layer_norm": ("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization", "ReduceMean"),
    "rotary_embeddings": ("Cos", "Neg"), "gelu_approximation": ("Erf", "Gelu"),
    "group_norm": ("InstanceNormalization", "GroupNormalization"), "skip_group_norm": ("InstanceNormalization", "GroupNormalization"),
    "nhwc_conv": ("Conv",), "bias_split_gelu": ("Erf",), "bias_add": ("Add",),
}  # fmt: skip
MADE_OPERATORS = frozenset(name for fusion in FUSIONS for name in fusion.makes)


@cache
def model_types() -> tuple[str, ...]:
    """Model types of the installed ONNX Runtime, in its order; read from its source, since importing the module takes half a second."""
    found = importlib.util.find_spec("onnxruntime")
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        path = Path(folder, "transformers", "optimizer.py")
        if not path.is_file():
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and [getattr(t, "id", "") for t in node.targets] == ["MODEL_TYPES"] and isinstance(node.value, ast.Dict):
                return tuple(k.value for k in node.value.keys if isinstance(k, ast.Constant) and isinstance(k.value, str))
    from onnxruntime.transformers.optimizer import MODEL_TYPES  # an installation without sources

    return tuple(MODEL_TYPES)


def operators_made(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """How many more of each fused operator a graph has than before; counts as by `operator_counts`, names without domain."""
    old, new = _bare(before), _bare(after)
    return {name: new[name] - old[name] for name in sorted(MADE_OPERATORS) if new[name] > old[name]}


def not_applied(asked: Iterable[str], before: Mapping[str, int], after: Mapping[str, int], model_type: str) -> dict[str, str]:
    """Fusions that were asked for and did nothing, each with why. `bias_gelu` and the like show in no operator of their own."""
    made, old, new = operators_made(before, after), _bare(before), _bare(after)
    found: dict[str, str] = {}
    for fusion in FUSIONS:
        if fusion.name not in asked or not fusion.makes or any(name in made for name in fusion.makes):
            continue
        if any(new[name] > old[name] for name in FURTHER.get(fusion.name, ())) and not any(old[name] for name in fusion.makes):
            continue
        there = [name for name in fusion.makes if old[name]]
        parts = [name for name in NEEDS.get(fusion.name, ()) if old[name]]
        if there:
            found[fusion.name] = f"the model came with {there[0]} operators"
        elif not parts:
            found[fusion.name] = "its pattern is not there: no " + " or ".join(NEEDS.get(fusion.name, fusion.makes)) + " in the model"
        else:
            found[fusion.name] = f"the model has {old[parts[0]]} {parts[0]}, none in a form that model type {model_type} knows"
            if fusion.name == "attention":
                found[fusion.name] += "; exports by tracing (dynamo=False) with eager attention are fused most often"
    return found


def _bare(counts: Mapping[str, int]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, count in counts.items():
        found[name.rpartition(".")[2]] += count
    return found


def without_kernel(proto: onnx.ModelProto, execution_provider: str) -> list[str]:
    """ONNX Runtime's own operators in a model that it can't run on an EP; empty where this build does not know the EP."""
    import onnxruntime.capi.onnxruntime_pybind11_state as native

    kernels = {k.op_name for k in native.get_all_opkernel_def() if k.domain == MICROSOFT and k.provider == execution_provider}
    return sorted({n.op_type for n in proto.graph.node if n.domain == MICROSOFT} - kernels) if kernels else []


def attention_sites(proto: onnx.ModelProto) -> list[tuple[int, int]]:
    """Heads and their common width of each attention in the main graph, in order; 0 for what can't be told.

    An attention is a Softmax over a product, maybe scaled and masked. Its heads stand in the inferred shape of the queries, [batch, heads,
    length, size], also where the axes before and between are dynamic; or in the shape that queries are reshaped to. ONNX Runtime's own
    detection gives up where that shape is put together from dynamic axes, and then fuses no attention.
    """
    import onnx

    graph = proto.graph
    producer = {name: node for node in graph.node for name in node.output if name}
    small, large = weights_aside(proto)
    try:
        inferred = onnx.shape_inference.infer_shapes(small, data_prop=True).graph
    except Exception:  # an operator that inference trips over leaves the patterns to tell
        inferred = small.graph
    shapes = {v.name: v.type.tensor_type.shape.dim for v in (*inferred.value_info, *inferred.input) if v.type.tensor_type.HasField("shape")}
    walk = _Walk(producer, _constants(graph), {n: tuple(t.dims) for n, t in large.items()})
    sites: list[tuple[int, int]] = []
    for softmax in (n for n in graph.node if n.op_type == "Softmax" and n.domain in DEFAULT_DOMAINS):
        product = walk.back_to(softmax.input[0], ("MatMul",), ("Add", "Mul", "Div", "Where", "Cast", "Reshape", "Max", "Clip"))
        if product is None or product.input[0] not in producer or product.input[1] not in producer:
            continue
        dims = shapes.get(product.input[0], ())
        if len(dims) == 4 and dims[1].dim_value > 0 and dims[3].dim_value > 0:
            sites.append((dims[1].dim_value, dims[1].dim_value * dims[3].dim_value))
        else:
            sites.append(walk.reshaped(product.input[0]))
    return sites


def heads_of(sites: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The most frequent of several answers, or zeros."""
    found = Counter(site for site in sites if all(site))
    return found.most_common(1)[0][0] if found else (0, 0)


def _constants(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    constants = {t.name: t for t in graph.initializer}
    return constants | {n.output[0]: a.t for n in graph.node if n.op_type == "Constant" for a in n.attribute if a.name == "value"}


class _Walk:
    """Follows values of a graph back to where they come from."""

    def __init__(
        self, producer: Mapping[str, onnx.NodeProto], constants: Mapping[str, onnx.TensorProto], large: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.producer, self.constants, self.large = producer, constants, large

    def back_to(self, name: str, wanted: tuple[str, ...], through: tuple[str, ...]) -> onnx.NodeProto | None:
        for _ in range(12):
            node = self.producer.get(name)
            if node is None or node.op_type in wanted:
                return node
            if node.op_type not in through:
                return None
            # A mask or a factor may be either operand: follow the one that is computed from a product.
            name = next((n for n in node.input if n in self.producer and self.producer[n].op_type in (*wanted, *through)), "")
        return None

    def reshaped(self, queries: str) -> tuple[int, int]:
        """Heads and width by the shape that queries are reshaped to: the last two numbers of four or five; -1 stands for what is left."""
        reshape = self.back_to(queries, ("Reshape",), ("Transpose", "Mul", "Div", "Cast", "Gather", "Squeeze", "Split", "Add"))
        shape = self._last_of_shape(reshape.input[1]) if reshape is not None else []
        if reshape is None or len(shape) != 2:
            return 0, 0
        heads, size = shape
        width = heads * size if heads > 0 and size > 0 else self._width_of(reshape.input[0])
        heads = heads if heads > 0 else width // size if size > 0 else 0
        return (heads, width) if heads > 0 and width > 0 and width % heads == 0 else (0, 0)

    def _last_of_shape(self, name: str) -> list[int]:
        from onnx import numpy_helper

        node = self.producer.get(name)
        parts: list[str] = list(node.input) if node is not None and node.op_type == "Concat" else [name]
        values: list[int | None] = []
        for part in parts:
            values += [int(v) for v in numpy_helper.to_array(self.constants[part]).reshape(-1)] if part in self.constants else [None]
        return [v for v in values[-2:] if v is not None] if len(values) in (4, 5) else []

    def _width_of(self, name: str) -> int:
        """Columns of the weight that a value was multiplied by, shared out where the product is split."""
        split = self.back_to(name, ("Split", "MatMul", "Gemm"), ("Add", "Reshape"))
        parts = len(split.output) if split is not None and split.op_type == "Split" else 1
        projection = self.back_to(split.input[0], ("MatMul", "Gemm"), ("Add", "Reshape")) if split is not None and parts > 1 else split
        if projection is None or projection.op_type not in ("MatMul", "Gemm"):
            return 0
        weight = self.constants.get(projection.input[1])
        dims = tuple(weight.dims) if weight is not None else self.large.get(projection.input[1], ())
        transposed = any(a.name == "transB" and a.i for a in projection.attribute)
        return int(dims[0 if transposed else 1]) // parts if len(dims) == 2 else 0


def option_values(config: Mapping[str, Any], left_out: Iterable[str] = ()) -> dict[str, bool]:
    """Values for the runtime's options by attribute name; fusions that play no part are left as the runtime has them."""
    return {f.option: bool(config[f.name]) and f.name not in left_out for f in FUSIONS if f.name in config}
