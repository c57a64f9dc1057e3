"""Blockwise-quantized operators in a graph: which nodes can have them, how their weights are stored, and whether they compute what they say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autotune.errors import PassError
from autotune.passes.blockwise_weights import Blocks
from autotune.passes.onnx_graph import (
    DEFAULT_DOMAINS,
    drop_unused_initializers,
    fit_domains,
    fresh_name,
    graphs_of,
    library_errors,
    quiet,
    value_names,
)
from autotune.session import SessionSettings, session_options

if TYPE_CHECKING:
    import onnx

WHO = "OnnxBlockwiseQuantization"
FLOAT16 = 10  # TensorProto.FLOAT16


@dataclass(frozen=True)
class Settings:
    """What to make of weights, and of which operators'."""

    algorithm: str
    bits: int
    block_size: int
    symmetric: bool
    qdq: bool
    accuracy_level: int
    operators: frozenset[str]

    @classmethod
    def of(cls, config: Mapping[str, Any], operators: frozenset[str]) -> Settings:
        """Read a resolved config; what plays no part in it gets the value that it stands for."""
        return cls(
            algorithm=config["algorithm"], bits=config.get("bits", 4), block_size=config["block_size"],
            symmetric=config.get("is_symmetric", False), qdq=config.get("quant_format") == "QDQ", accuracy_level=config.get("accuracy_level", 0),
            operators=operators,
        )  # fmt: skip


@dataclass
class Site:
    """A node whose weight is to be quantized, and afterwards what took its place."""

    graph: onnx.GraphProto
    node: onnx.NodeProto
    weight: onnx.TensorProto
    owner: onnx.GraphProto
    key: tuple[Any, ...]  # equal for nodes that can share the quantized weight
    main: bool
    bias: onnx.TensorProto | None = None  # of a Gemm, where it is constant
    product: list[onnx.NodeProto] = field(default_factory=list)
    meaning: NDArray[np.float32] | None = None  # the rows that the quantized weight stands for

    @property
    def size(self) -> int:
        return int(np.prod(self.weight.dims))

    def rows(self) -> NDArray[Any]:
        """The weight as (outputs, inputs), those of all batches one below the other; of a Gather the table as it is."""
        from onnx import numpy_helper

        values = np.asarray(numpy_helper.to_array(self.weight))
        if self.node.op_type == "Gather":
            return values
        if self.node.op_type == "Gemm":
            turned = values if _attribute(self.node, "transB", 0) else values.T
            return np.asarray(turned * turned.dtype.type(_attribute(self.node, "alpha", 1.0)))
        return np.ascontiguousarray(np.swapaxes(values, -1, -2)).reshape(-1, values.shape[-2])


def _attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    import onnx

    return next((onnx.helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def find_sites(proto: onnx.ModelProto, settings: Settings, excluded: frozenset[str]) -> tuple[list[Site], Counter[tuple[str, str]]]:
    """Find the nodes with weights to quantize, in the main graph and in branches and bodies, and count the others by operator and reason."""
    ranks = _ranks(proto)
    left: Counter[tuple[str, str]] = Counter()
    sites: list[Site] = []
    numbers: dict[str, int] = {}

    def look(graph: onnx.GraphProto, outer: Mapping[str, tuple[onnx.TensorProto, onnx.GraphProto, int]], main: bool) -> None:
        number = numbers["graphs"] = numbers.get("graphs", -1) + 1
        scope = {**outer, **{t.name: (t, graph, number) for t in graph.initializer}}
        for node in graph.node:
            for attribute in node.attribute:
                for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                    look(inner, scope, False)
            if node.op_type not in settings.operators or node.domain not in DEFAULT_DOMAINS:
                continue
            reason = "excluded" if node.name in excluded else _obstacle(node, scope, ranks, settings)
            if reason:
                left[node.op_type, reason] += 1
                continue
            weight, owner, place = scope[node.input[0 if node.op_type == "Gather" else 1]]
            way = (_attribute(node, "transB", 0), _attribute(node, "alpha", 1.0)) if node.op_type == "Gemm" else (0, 1.0)
            bias = scope.get(node.input[2]) if node.op_type == "Gemm" and len(node.input) > 2 else None
            key = (place, weight.name, node.op_type == "Gather", *way)
            sites.append(Site(graph, node, weight, owner, key, main, bias[0] if bias else None))

    look(proto.graph, {}, True)
    inside = Counter(n.op_type for f in proto.functions for n in f.node if n.op_type in settings.operators)
    left.update({(name, "in a function of the model's own"): count for name, count in inside.items()})
    return sites, left


def _ranks(proto: onnx.ModelProto) -> dict[str, int]:
    """Ranks of values where inference finds them."""
    import onnx

    try:
        inferred = onnx.shape_inference.infer_shapes(proto)
    except Exception:  # ranks are asked for by rare weights only
        inferred = proto
    values = [v for g in graphs_of(inferred.graph) for v in (*g.input, *g.value_info, *g.output)]
    return {v.name: len(v.type.tensor_type.shape.dim) for v in values if v.type.tensor_type.HasField("shape")}


def _obstacle(
    node: onnx.NodeProto, scope: Mapping[str, tuple[onnx.TensorProto, onnx.GraphProto, int]], ranks: Mapping[str, int], settings: Settings
) -> str:
    """Say why a node's weight can't be quantized; empty when it can."""
    import onnx

    gather = node.op_type == "Gather"
    name = node.input[0 if gather else 1]
    if name not in scope:
        left_side = scope.get(node.input[0]) if not gather else None
        return "the constant is on the left" if left_side is not None and len(left_side[0].dims) > 1 else "no constant weight"
    weight = scope[name][0]
    floats: dict[int, int] = {onnx.TensorProto.FLOAT: 4, onnx.TensorProto.FLOAT16: 2}
    if weight.data_type not in floats:
        return f"the weight is {onnx.TensorProto.DataType.Name(weight.data_type).lower()}"
    if len(weight.dims) < 2 or not all(weight.dims):
        return f"the weight is of rank {len(weight.dims)}" if len(weight.dims) < 2 else "the weight is empty"
    return (_gather_obstacle if gather else _product_obstacle)(node, weight, scope, ranks, settings) or _size_obstacle(
        node, weight, floats[weight.data_type], settings
    )


def _gather_obstacle(node: onnx.NodeProto, weight: onnx.TensorProto, scope: Any, ranks: Any, settings: Settings) -> str:
    if settings.qdq:
        return "as QDQ the whole table would be expanded in each run"
    if settings.algorithm == "nf4":
        return "nf4 has no such operator"
    if len(weight.dims) != 2 or _attribute(node, "axis", 0) not in (0, -2):
        return "only rows of tables of rank 2 can be gathered"
    return "rows of an odd length" if settings.bits == 4 and weight.dims[1] % 2 else ""


def _product_obstacle(node: onnx.NodeProto, weight: onnx.TensorProto, scope: Any, ranks: Mapping[str, int], settings: Settings) -> str:
    if node.op_type == "Gemm":
        if _attribute(node, "transA", 0):
            return "transA is set"
        third = node.input[2] if len(node.input) > 2 else ""
        return "a computed bias is scaled by beta" if third and third not in scope and _attribute(node, "beta", 1.0) != 1.0 else ""
    if len(weight.dims) > 2 and not settings.qdq:
        if any(d != 1 for d in weight.dims[:-2]):
            return f"a weight of rank {len(weight.dims)}, which only QDQ format can hold"
        if ranks.get(node.input[0], 0) < len(weight.dims):
            return "the weight has more axes than what it is multiplied with"
    return "a product with a vector" if ranks.get(node.input[0]) == 1 else ""


def _size_obstacle(node: onnx.NodeProto, weight: onnx.TensorProto, item: int, settings: Settings) -> str:
    """Padding and scales can make a narrow weight no smaller."""
    count = int(np.prod(weight.dims))
    if settings.algorithm == "nf4":
        packed = count / 2 + -(-count // settings.block_size) * item
        return "" if packed < count * item else "it would be no smaller"
    across = weight.dims[1] if node.op_type == "Gather" or _attribute(node, "transB", 0) else weight.dims[-2]
    blocks = -(-across // settings.block_size)
    zeros = 0.0 if settings.symmetric else blocks * settings.bits / 8
    kept = across if settings.qdq or node.op_type == "Gather" else blocks * settings.block_size
    packed = count // across * (kept * settings.bits / 8 + blocks * item + zeros)
    return "" if packed < count * item else "it would be no smaller"


def has_activations(site: Site) -> bool:
    """Activations can be looked at in the main graph; GPTQ and AWQ round the others to nearest, and tables of a Gather."""
    return site.main and site.node.op_type != "Gather" and len(site.weight.dims) == 2


def float_weights(proto: onnx.ModelProto) -> int:
    """Count float weights of rank 2 and more, everywhere in the model."""
    import onnx

    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
    return sum(int(np.prod(t.dims)) for g in graphs_of(proto.graph) for t in g.initializer if t.data_type in floats and len(t.dims) > 1)


def counted(left: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """Counts by operator, then by reason, for the notes."""
    found: dict[str, dict[str, int]] = {}
    for (name, reason), count in sorted(left.items()):
        found.setdefault(name, {})[reason] = count
    return found


def in_words(left: Counter[tuple[str, str]]) -> str:
    """Return the counts as one phrase."""
    return ", ".join(f"{count} {name} ({reason})" for (name, reason), count in sorted(left.items()))


@dataclass
class _Stored:
    """Names of a quantized weight's tensors, and the rows that it stands for."""

    inputs: list[str]
    shape: tuple[int, ...]  # of the float weight, (outputs, inputs) for products
    meaning: NDArray[np.float32]


def rewrite(proto: onnx.ModelProto, parts: Iterable[Sequence[Site]], find: Callable[[Site], Blocks], settings: Settings) -> None:
    """Put the quantized operators in the places of the sites' nodes; a weight that several take is stored once.

    `find` gives the numbers of a site's weight; `parts` are taken one after the other, so that it may look at data for each.
    """
    taken = value_names(proto)
    stored: dict[tuple[Any, ...], _Stored] = {}
    for part in parts:
        for site in part:
            if site.key not in stored:
                stored[site.key] = _store(site, find, settings, taken)
            _replace(site, stored[site.key], settings, taken)


def _store(site: Site, find: Callable[[Site], Blocks], settings: Settings, taken: set[str]) -> _Stored:
    from onnx import TensorProto, helper, numpy_helper

    rows = site.rows()

    def keep(suffix: str, values: NDArray[Any] | None = None, tensor: onnx.TensorProto | None = None) -> str:
        name = fresh_name(f"{site.weight.name}_{suffix}", taken)
        taken.add(name)
        added = site.owner.initializer.add()
        added.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values), name) if tensor is None else tensor)
        added.name = name
        return name

    if settings.algorithm == "nf4":
        packed, largest = _nf4(rows.T, settings.block_size)
        return _Stored([keep("nf4", packed), keep("nf4_absmax", largest)], rows.shape, rows.astype(np.float32))
    blocks = find(site)
    meaning = blocks.dequantized(rows.shape[1])
    scales = blocks.scales.astype(rows.dtype)
    bits = settings.bits
    if not settings.qdq:
        packed = blocks.packed_values()
        if site.node.op_type == "Gather":
            packed = packed.reshape(len(rows), -1)[:, : rows.shape[1] * bits // 8]
        names = [keep(f"Q{bits}", packed), keep(f"Q{bits}_scales", scales)]
        return _Stored(names if settings.symmetric else [*names, keep(f"Q{bits}_zeros", blocks.packed_zeros())], rows.shape, meaning)

    batch = tuple(site.weight.dims[:-2]) if site.node.op_type == "MatMul" else ()
    types = {(4, True): TensorProto.INT4, (4, False): TensorProto.UINT4, (8, True): TensorProto.INT8, (8, False): TensorProto.UINT8}
    type_ = types[bits, settings.symmetric]

    def turned(values: NDArray[Any]) -> NDArray[Any]:
        return np.ascontiguousarray(np.swapaxes(values.reshape(*batch, -1, values.shape[-1]), -1, -2))

    def whole(values: NDArray[np.uint8]) -> onnx.TensorProto:
        signed = turned(values).astype(np.int16) - (2 ** (bits - 1) if settings.symmetric else 0)
        raw = (signed & (2**bits - 1)).astype(np.uint8).reshape(-1)
        if bits == 4:
            raw = np.pad(raw, (0, raw.size % 2))
            raw = raw[::2] | raw[1::2] << 4
        return helper.make_tensor("", type_, signed.shape, raw.tobytes(), raw=True)

    values = blocks.values.reshape(len(rows), -1)[:, : rows.shape[1]]
    names = [keep(f"Q{bits}", tensor=whole(values)), keep(f"Q{bits}_scales", turned(scales))]
    return _Stored(names if settings.symmetric else [*names, keep(f"Q{bits}_zeros", tensor=whole(blocks.zeros))], rows.shape, meaning)


def _nf4(weight: NDArray[Any], block_size: int) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    import onnx
    from onnxruntime.quantization.matmul_bnb4_quantizer import MatMulBnb4Quantizer

    quantizer = MatMulBnb4Quantizer(onnx.ModelProto(), MatMulBnb4Quantizer.NF4, block_size)
    found: tuple[NDArray[np.uint8], NDArray[Any]] = quantizer.bnb4_block_quant(weight)
    return found


def _replace(site: Site, stored: _Stored, settings: Settings, taken: set[str]) -> None:
    """Write the new nodes into the graph in the place of the old one."""
    from onnx import helper

    node, old = site.node, type(site.node)()
    old.CopyFrom(site.node)
    site.meaning = stored.meaning
    bias = old.input[2] if old.op_type == "Gemm" and len(old.input) > 2 and old.input[2] else ""
    output = fresh_name(f"{old.output[0]}_product", taken) if bias else old.output[0]
    taken.add(output)
    size: dict[str, Any] = {"K": stored.shape[1], "N": stored.shape[0], "block_size": settings.block_size}
    named = f"{old.name}_Q{settings.bits}"
    if old.op_type == "Gather":
        made = [helper.make_node(
            "GatherBlockQuantized", [stored.inputs[0], old.input[1], *stored.inputs[1:]], [output], named, domain="com.microsoft",
            gather_axis=0, quantize_axis=1, block_size=settings.block_size, bits=settings.bits,
        )]  # fmt: skip
    elif settings.algorithm == "nf4":
        size["quant_type"] = 1  # NF4
        made = [helper.make_node("MatMulBnb4", [old.input[0], *stored.inputs], [output], named, domain="com.microsoft", **size)]
    elif settings.qdq:
        weight = fresh_name(f"{site.weight.name}_dequantized", taken)
        taken.add(weight)
        axis = len(site.weight.dims) - 2
        made = [
            helper.make_node("DequantizeLinear", stored.inputs, [weight], f"{named}_DQ", axis=axis, block_size=settings.block_size),
            helper.make_node("MatMul", [old.input[0], weight], [output], named),
        ]
    else:
        size["bits"] = settings.bits
        if settings.accuracy_level:  # the attribute is left out at 0: not every execution provider knows it
            size["accuracy_level"] = settings.accuracy_level
        made = [helper.make_node("MatMulNBits", [old.input[0], *stored.inputs], [output], named, domain="com.microsoft", **size)]
    site.product = list(made)
    if bias:
        made.append(helper.make_node("Add", [output, _bias(site, old, bias, taken)], list(old.output), f"{old.name}_Add"))
    position = next(i for i, n in enumerate(site.graph.node) if n.output and n.output[0] == old.output[0])
    site.node = old
    node.CopyFrom(made[0])
    for offset, added in enumerate(made[1:], 1):
        site.graph.node.insert(position + offset, added)


def _bias(site: Site, node: onnx.NodeProto, bias: str, taken: set[str]) -> str:
    """Name of a Gemm's third input, scaled by beta."""
    from onnx import numpy_helper

    beta = _attribute(node, "beta", 1.0)
    if beta == 1.0 or site.bias is None:
        return bias
    name = fresh_name(f"{bias}_scaled", taken)
    taken.add(name)
    values = numpy_helper.to_array(site.bias)
    site.graph.initializer.append(numpy_helper.from_array(np.asarray(values * values.dtype.type(beta)), name))
    return name


def clean(proto: onnx.ModelProto, settings: Settings) -> None:
    """Drop float weights that nothing takes any more, and import what is used."""
    drop_unused_initializers(proto)
    fit_domains(proto)
    if settings.qdq and settings.bits == 4:
        proto.ir_version = max(proto.ir_version, 10)  # the first that knows 4-bit types


TOLERANCES = {"float32": 1e-3, "float16": 1e-2, "int8": 3e-2, "nf4": 0.3}  # of a result's length


def refuse_wrong_kernels(sites: Sequence[Site], settings: Settings) -> None:
    """Run one quantized operator of each shape by itself, optimized as in deployment, against what its stored weight stands for.

    Such operators have returned zeros or nonsense, without a word, at block sizes and types that a kernel did not have. Raises `PassError`
    for one that does.
    """
    seen = set()
    for site in sites:
        kind = (site.node.op_type == "Gather", tuple(site.weight.dims), site.weight.data_type)
        if kind in seen:
            continue
        seen.add(kind)
        told = f"{site.node.op_type} node {site.node.name!r}"
        do = "Choose another block_size or quant_format, or exclude the node."
        with library_errors(WHO, f"ONNX Runtime must run the quantized form of {told}", do):
            error = _kernel_error(site)
        exact = "float16" if site.weight.data_type == FLOAT16 else "float32"
        if site.node.op_type != "Gather":
            exact = "nf4" if settings.algorithm == "nf4" else "int8" if settings.qdq or settings.accuracy_level == 4 else exact
        if not error <= TOLERANCES[exact]:
            must = f"the quantized form of {told} must compute what its weight stands for when ONNX Runtime runs it"
            raise PassError(WHO, must, f"a difference of {error:.2g} of the result's length", do)


def _kernel_error(site: Site) -> float:
    """Distance of a site's operator from its meaning on random input, as a share of the result's length."""
    import onnxruntime as ort
    from onnx import TensorProto, helper

    rng = np.random.default_rng(0)
    rows = site.meaning
    assert rows is not None, "written by _replace"
    gather = site.node.op_type == "Gather"
    dtype = np.float16 if site.weight.data_type == FLOAT16 else np.float32
    name = site.product[0].input[1] if gather else site.node.input[0]
    if gather:
        x = rng.integers(0, len(rows), 8)
        wanted = rows[x]
    else:
        batch = tuple(site.weight.dims[:-2])
        x = rng.standard_normal((*batch, 3, rows.shape[1])).astype(dtype)
        wanted = np.matmul(x.astype(np.float32), np.swapaxes(rows.reshape(*batch, -1, rows.shape[1]), -1, -2))
    held = {n for node in site.product for n in node.input}
    float_type = TensorProto.FLOAT16 if dtype == np.float16 else TensorProto.FLOAT
    graph = helper.make_graph(
        site.product, "product", [helper.make_tensor_value_info(name, TensorProto.INT64 if gather else float_type, x.shape)],
        [helper.make_tensor_value_info(site.product[-1].output[0], float_type, None)], [t for t in site.owner.initializer if t.name in held],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = session_options(SessionSettings(intra_op_num_threads=1))
    options.log_severity_level = 4
    with quiet():
        session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        got = session.run(None, {name: x})[0].astype(np.float32)
    if got.shape != wanted.shape or not np.isfinite(got).all():
        return float("inf")
    return float(np.linalg.norm(got - wanted) / max(float(np.linalg.norm(wanted)), 1e-20))
