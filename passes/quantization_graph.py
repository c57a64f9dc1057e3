"""What quantization needs of a graph before and after ONNX Runtime's quantizers: names kept, weights and biases of a node's own, coverage.

Failures that are met here on purpose were each seen with ONNX Runtime 1.32.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.errors import PassError
from autotune.model import LARGE_BYTES, message_bytes
from autotune.passes.onnx_graph import (
    bodies_of,
    default_opset,
    fresh_name,
    graphs_of,
    initializer_names,
    keep_io,
    lift_constants,
    name_every_node,
    name_values_apart,
    optimize_by_session,
    quiet,
    rename_new_initializers,
    short_message,
    value_names,
)
from autotune.passes.quantization_fusions import fuse_composites, pool_means
from autotune.passes.quantization_names import free_names, fresh_stem

if TYPE_CHECKING:
    import onnx

# Where weights sit: operator to the inputs that hold them. Without one of these a quantized model has nothing to gain.
WEIGHTED: Mapping[str, tuple[int, ...]] = {
    "MatMul": (0, 1), "Gemm": (0, 1), "Conv": (1,), "ConvTranspose": (1,), "Attention": (1,), "LSTM": (1, 2), "Gather": (0,),
    "EmbedLayerNormalization": (2, 3, 4),
}  # fmt: skip
# Whose results have a scale of their own in QOperator format; the others pass on their input's, or have a fixed one.
SCALED = frozenset({"Add", "AveragePool", "Concat", "Conv", "Gemm", "GlobalAveragePool", "LeakyRelu", "MatMul", "Mul"})


@dataclass(frozen=True)
class Prepared:
    """A model ready for the quantizers: named, folded, with known shapes; and the nodes to leave alone, by their names there.

    `renamed` are the nodes whose names there are not the user's, which it gives.
    """

    proto: onnx.ModelProto
    excluded: frozenset[str] = frozenset()
    notes: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)


def prepare(
    named: onnx.ModelProto,
    *,
    optimize: bool,
    excluded: Sequence[onnx.NodeProto],
    only: Sequence[onnx.NodeProto] | None,
    operators: Iterable[str],
    bodies: bool,
    composites: bool = False,
) -> Prepared:
    """Fold and fuse by ONNX Runtime's basic level, infer shapes, lift constants, and give weights and biases that need it a copy each.

    With `composites`, what the runtime could no longer fuse afterwards is fused too, and means over images become pools.

    Nodes to exclude, and the `only` ones to quantize, are looked up again afterwards: fusions rename nodes. Where one that would be quantized
    can't be found, nothing is fused. With `bodies`, those of If, Loop and Scan are made ready too, and no two graphs define the same name.
    """
    notes: dict[str, Any] = {}
    proto = named
    if optimize:
        known = initializer_names(named)
        try:
            proto = optimize_by_session(named, "basic")
        except Exception as error:  # the quantizer may still take what a session would not
            notes["preprocess"] = f"not optimized first: {short_message(error)}"
            optimize = False
        rename_new_initializers(proto, known)
    out, lost = _find_again(proto, excluded)
    kept, missed = _find_again(proto, only or ())
    chosen, weights = set(operators), initializer_names(named)
    lost = [n.name for n in excluded if n.name in lost and n.op_type in chosen]
    lost += [n.name for n in only or () if n.name in missed and n.op_type in chosen and weights & set(n.input)]
    if lost and optimize:
        notes["preprocess"] = f"not optimized first: fusions would have hidden nodes that are named ({', '.join(lost[:3])})"
        proto = named
        out = frozenset(node.name for node in excluded)
        kept = frozenset(node.name for node in only or ())
    if optimize and composites:
        proto = fuse_composites(proto, out | kept, notes)
    if optimize or default_opset(proto) <= 10:
        proto, problem = _with_shapes(proto)
        keep_io(proto, named)
        if problem:
            notes["shape_inference"] = problem
    else:
        copied = type(proto)()
        copied.CopyFrom(proto)
        proto = copied
    name_every_node(proto)
    lift_constants(proto)
    if optimize and composites:
        pooled = pool_means(proto)
        notes.update({"means_pooled": pooled} if pooled else {})
    if bodies:
        name_values_apart(proto)
    entered = list(graphs_of(proto.graph)) if bodies else [proto.graph]
    _fold_factors(proto, entered)
    _own_biases(proto)
    _own_weights(proto, entered)
    if only is not None:
        out |= {node.name for graph in entered for node in graph.node if node.name not in kept}
    renamed = free_names(proto)
    new_names = {old: new for new, old in renamed.items()}
    return Prepared(proto, frozenset(new_names.get(name, name) for name in out), notes, renamed)


def _fold_factors(proto: onnx.ModelProto, entered: Sequence[onnx.GraphProto]) -> None:
    """Multiply the factors of a Gemm into its constant weight and bias, in the graphs that are to be quantized.

    ONNX Runtime's quantizers lose `beta` (the bias is added as it stands), and the dynamic one leaves a Gemm with factors in float.
    """
    from onnx import numpy_helper

    initializers = {t.name: t for graph in entered for t in graph.initializer}
    taken = value_names(proto)
    for node in (node for graph in entered for node in graph.node):
        if node.op_type != "Gemm" or not (len(node.input) > 1 and node.input[1] in initializers):
            continue
        for attribute, index in (("alpha", 1), ("beta", 2)):
            factor = next((a for a in node.attribute if a.name == attribute), None)
            constant = initializers.get(node.input[index]) if index < len(node.input) else None
            if factor is None or factor.f == 1.0 or constant is None:
                continue
            values = numpy_helper.to_array(constant)
            own = numpy_helper.from_array(
                (values * np.array(factor.f, values.dtype)).astype(values.dtype), fresh_name(f"{constant.name}_scaled", taken)
            )
            taken.add(own.name)
            initializers[own.name] = own
            proto.graph.initializer.append(own)
            node.input[index] = own.name
            factor.f = 1.0


def _find_again(proto: onnx.ModelProto, excluded: Sequence[onnx.NodeProto]) -> tuple[frozenset[str], list[str]]:
    """Names in `proto` of nodes that came from another model, and the names of those that can't be told.

    A node is the same if it has the name, or gives the same output, or multiplies by the same weight.
    """
    nodes = [node for graph in graphs_of(proto.graph) for node in graph.node]
    present = {node.name for node in nodes}
    weights = initializer_names(proto)
    names, lost = set(), []
    for node in excluded:
        same = [node.name] if node.name in present else []
        same = same or [n.name for n in nodes if set(n.output) & set(node.output)]
        held = set(node.input) & weights
        same = same or [n.name for n in nodes if held & set(n.input)]
        names.update(same)
        if not same:
            lost.append(node.name)
    return frozenset(names), lost


def _with_shapes(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    """Infer symbolic, then plain shapes; Upsample becomes Resize below opset 11. The second value says what did not work."""
    import onnx
    from onnxruntime.quantization.shape_inference import quant_pre_process

    problem = ""
    with tempfile.TemporaryDirectory(prefix="autotune-shapes-") as name:
        target = Path(name, "shapes.onnx")
        for symbolic in (True, False):
            copied = type(proto)()
            copied.CopyFrom(proto)
            try:
                with quiet():
                    quant_pre_process(
                        copied, str(target), skip_optimization=True, skip_symbolic_shape=not symbolic, auto_merge=True,
                        save_as_external_data=message_bytes(proto) >= LARGE_BYTES, all_tensors_to_one_file=True,
                    )  # fmt: skip
                return onnx.load(str(target)), problem
            except Exception as error:  # symbolic inference fails on many dynamic shapes; plain inference is second best
                problem = f"{'symbolic' if symbolic else 'plain'} shape inference failed: {short_message(error)}"
    copied = type(proto)()
    copied.CopyFrom(proto)
    return copied, problem


def _own_biases(proto: onnx.ModelProto) -> None:
    """Give each Conv and Gemm a bias of its own, of rank 1.

    A shared one would be quantized for one of them and be wrong for the other; on the rank 2 that Gemm allows, quantization per
    channel stops with "The truth value of an array with more than one element is ambiguous".
    """
    from onnx import numpy_helper

    initializers = {t.name: t for t in proto.graph.initializer}
    taken = value_names(proto)
    uses = Counter(name for graph in graphs_of(proto.graph) for node in graph.node for name in node.input)
    for node in proto.graph.node:
        if node.op_type not in ("Conv", "ConvTranspose", "Gemm") or len(node.input) < 3 or not node.input[2]:
            continue
        bias = initializers.get(node.input[2])
        weight = initializers.get(node.input[1])
        if bias is None or weight is None:
            continue
        values = numpy_helper.to_array(bias)
        if node.op_type == "Gemm" and len(weight.dims) == 2:
            transposed = any(a.name == "transB" and a.i for a in node.attribute)
            channels = weight.dims[0] if transposed else weight.dims[1]
            if values.size == 1:
                values = np.full(channels, values.reshape(-1)[0], values.dtype)
            elif values.size == channels and values.shape[-1] == channels:
                values = values.reshape(channels)
        if uses[bias.name] < 2 and values.shape == tuple(bias.dims):
            continue
        uses[bias.name] -= 1
        own = numpy_helper.from_array(np.ascontiguousarray(values), fresh_name(f"{bias.name}_own", taken))
        taken.add(own.name)
        proto.graph.initializer.append(own)
        node.input[2] = own.name


def _own_weights(proto: onnx.ModelProto, entered: Sequence[onnx.GraphProto]) -> None:
    """Give nodes that take a weight along different axes a copy each, in the graphs that are to be quantized.

    Quantized per channel once, for the axis of the first node, a weight is silently wrong for a Gemm that takes it transposed.
    """
    initializers = {t.name: t for graph in entered for t in graph.initializer}
    taken = value_names(proto)
    copies: dict[tuple[str, str], str] = {}
    first: dict[str, str] = {}
    for node in (node for graph in entered for node in graph.node):
        for index in WEIGHTED.get(node.op_type, ()):
            name = node.input[index] if index < len(node.input) else ""
            if name not in initializers or len(initializers[name].dims) < 2:
                continue
            axis = f"{node.op_type} {index}"
            if node.op_type in ("MatMul", "Gemm"):
                transposed = any(a.name == ("transA", "transB")[index] and a.i for a in node.attribute)
                axis = f"product {index != transposed}"
            if first.setdefault(name, axis) == axis:
                continue
            if (name, axis) not in copies:
                own = proto.graph.initializer.add()
                own.CopyFrom(initializers[name])
                own.name = copies[name, axis] = fresh_name(f"{name}_own", taken)
                taken.add(own.name)
            node.input[index] = copies[name, axis]


NOT_OBSERVED = "static ranges are found by looking at values while the model runs, and those inside of bodies can't be looked at"
SETTLE = "OnnxDynamicToFixedShape settles an If that inputs or shapes decide (fixed_inputs), and OnnxModelOptimizer one that constants do"
NOT_CONSTANT = "excluded, of a type that is not quantized, or without a constant weight"


@dataclass(frozen=True)
class Quantizable:
    """How many nodes of the chosen types hold constant weights, and why it is none; how many of them are inside of bodies."""

    nodes: int
    reason: str
    in_bodies: int = 0


def quantizable(proto: onnx.ModelProto, operators: Iterable[str], excluded: frozenset[str], *, bodies: bool) -> Quantizable:
    """Count what the quantizers can quantize in the main graph and, with `bodies`, in those of If, Loop and Scan."""
    wanted = set(operators)
    entered = list(graphs_of(proto.graph)) if bodies else [proto.graph]
    weights = {t.name for graph in entered for t in graph.initializer if t.data_type == float_type()}
    chosen = [[n for n in graph.node if n.op_type in wanted] for graph in entered]
    kept = [[n for n in nodes if n.name not in excluded] for nodes in chosen]
    counts = [sum(bool(weights_taken(n, weights)) for n in nodes) for nodes in kept]
    reason = ""
    if any(chosen) and not any(kept):
        reason = "every node of the chosen types is excluded"
    elif not sum(counts):
        heavy = sorted(set(WEIGHTED) & wanted) or sorted(wanted)
        reason = f"no {'/'.join(heavy)} with constant float32 weights{'' if bodies else ' in the main graph'}"
        left = float_in_bodies(proto)
        if left:
            listed = ", ".join(f"{number} {name}" for name, number in left.items())
            reason += f"; {listed} are inside bodies of If, Loop, Scan or of the model's own functions, which stay float"
            reason += f": {NOT_CONSTANT if bodies else f'{NOT_OBSERVED}. {SETTLE}'}"
    return Quantizable(sum(counts), reason, sum(counts[1:]))


def weights_taken(node: onnx.NodeProto, weights: Container[str]) -> list[str]:
    """Names of the constants that a node takes where its operator has its weights."""
    return [node.input[i] for i in WEIGHTED.get(node.op_type, ()) if i < len(node.input) and node.input[i] in weights]


def float_in_bodies(proto: onnx.ModelProto) -> dict[str, int]:
    """Count, by operator, the nodes of types that can hold weights and are float, in bodies and in the model's own functions.

    A Gather counts where it looks up rows of a constant table: most of the others pick sizes from shapes.
    """
    tables = {t.name for graph in graphs_of(proto.graph) for t in graph.initializer if len(t.dims) > 1 and t.data_type in _floats()}
    bodies = [*(graph.node for graph in list(graphs_of(proto.graph))[1:]), *(f.node for f in proto.functions)]
    float_ones = (n for nodes in bodies for n in nodes if n.op_type in WEIGHTED and (n.op_type != "Gather" or n.input[0] in tables))
    return dict(sorted(Counter(n.op_type for n in float_ones).items()))


def coverage(possible: Quantizable, result: onnx.ModelProto, *, bodies: bool) -> dict[str, Any]:
    """Tell what share was quantized: nodes that hold weights, and elements of weights (rank 2 and more); and what bodies keep in float."""
    elements: Counter[bool] = Counter()
    for graph in graphs_of(result.graph):
        for tensor in graph.initializer:
            if len(tensor.dims) > 1 and (tensor.data_type in _floats() or tensor.data_type in _small_integers()):
                elements[tensor.data_type in _small_integers()] += int(np.prod(tensor.dims))
    share = elements[True] / max(elements.total(), 1)
    nodes = list(map(_quantized_nodes(result), graphs_of(result.graph) if bodies else [result.graph]))
    found: dict[str, Any] = {"nodes": sum(nodes), "of_nodes": possible.nodes, "weights": round(share, 4)}
    if possible.in_bodies:
        found.update(nodes_in_bodies=sum(nodes[1:]), of_nodes_in_bodies=possible.in_bodies)
    left = float_in_bodies(result)
    if left:
        found.update(float_in_bodies=left, float_in_bodies_because=NOT_CONSTANT if bodies else NOT_OBSERVED)
    return found


def wrongly_removed(proto: onnx.ModelProto, operators: Iterable[str], *, by_operators: bool) -> list[str]:
    """Name each Relu and Clip that the static quantizer would leave out, or cut its input's range for, where that makes outputs wrong.

    It trusts that quantizing the input cuts off what the node would have cut off. That takes an input that nobody else takes: the model's
    outputs and bodies are overlooked in either format. In QOperator format it also takes a scale of the input's own: the node is left out
    behind whatever is quantized, with the scale that it happens to have.
    """
    outputs, chosen = {v.name for v in proto.graph.output}, set(operators)
    uses = Counter(name for node in proto.graph.node for name in node.input)
    seen_inside = {name for node in proto.graph.node for name in _names_inside(node)}
    makers = {name: node.op_type for node in proto.graph.node for name in node.output}
    found = []
    for node in proto.graph.node:
        if node.op_type not in ("Relu", "Clip") or node.op_type not in chosen:
            continue
        taken = node.input[0]
        shared = by_operators and (uses[taken] > 1 or makers.get(taken) not in SCALED)
        if shared or taken in outputs or taken in seen_inside:
            found.append(node.name)
    return found


def _names_inside(node: onnx.NodeProto) -> Iterator[str]:
    """Names that the bodies of a node take, or give back, whether they are their own or from outside."""
    for body in bodies_of(node):
        for graph in graphs_of(body):
            yield from (name for part in graph.node for name in part.input)
            yield from (v.name for v in graph.output)


def hold_floats(proto: onnx.ModelProto) -> list[str]:
    """Append a node, in place, for each value that a Where, or a body from outside, takes; return the names of these nodes.

    The quantizer of QOperator and dynamic models gives a value back its float form before a node that it knows nothing of. It knows Where and
    leaves it alone, and does not look into bodies. The nodes are Identities whose results nobody takes: to be dropped afterwards.
    """
    from onnx import helper

    made = {name for node in proto.graph.node for name in node.output if name}
    wanted: dict[str, None] = {}
    for node in proto.graph.node:
        wanted.update(dict.fromkeys(node.input if node.op_type == "Where" else ()))
        wanted.update(dict.fromkeys(_names_inside(node)))
    stem = fresh_stem("held", value_names(proto) | {n.name for graph in graphs_of(proto.graph) for n in graph.node})
    held = [helper.make_node("Identity", [name], [f"{stem}_{i}"], f"{stem}_{i}") for i, name in enumerate(n for n in wanted if n in made)]
    proto.graph.node.extend(held)
    return [node.name for node in held]


def drop_nodes(proto: onnx.ModelProto, names: Iterable[str]) -> None:
    """Remove nodes of the main graph by name."""
    gone = set(names)
    for index in range(len(proto.graph.node) - 1, -1, -1):
        if proto.graph.node[index].name in gone:
            del proto.graph.node[index]


def refuse_wild_weights(proto: onnx.ModelProto, *, who: str) -> None:
    """Raise `PassError` for weights that are not finite: no scale can be found for them, and the quantizer would not say so."""
    from onnx import numpy_helper

    for tensor in (t for graph in graphs_of(proto.graph) for t in graph.initializer):
        if tensor.data_type == float_type() and len(tensor.dims) > 1 and not np.isfinite(numpy_helper.to_array(tensor)).all():
            raise PassError(who, "weights must be finite", f"NaN or infinity in {tensor.name!r}", "Mend the model, or exclude what it feeds.")


def one_scale(proto: onnx.ModelProto, operators: Iterable[str], notes: dict[str, Any], *, bodies: bool) -> list[str]:
    """Name the weights that keep one scale where others have one a channel, and say so in the notes.

    MatMul weights of rank 3 and more: the quantizer fails on them, or the model fails to run. Grouped ConvTranspose: its weight has fewer
    channels than its bias, and the quantizer stops at that. Weights on the left of a MatMul: their columns are no channels of the output.
    """
    chosen = set(operators)
    entered = list(graphs_of(proto.graph)) if bodies else [proto.graph]
    ranks = {t.name: len(t.dims) for graph in entered for t in graph.initializer}
    found: dict[str, set[str]] = {}
    for node in (node for graph in entered for node in graph.node):
        if node.op_type not in chosen:
            continue
        if node.op_type == "MatMul":
            found.setdefault("rank 3 or more", set()).update(n for n in node.input if ranks.get(n, 0) > 2)
            found.setdefault("left of a MatMul", set()).update(n for n in node.input[:1] if ranks.get(n, 0) == 2)
        elif node.op_type == "ConvTranspose" and node.input[1] in ranks and any(a.name == "group" and a.i > 1 for a in node.attribute):
            found.setdefault("grouped ConvTranspose", set()).add(node.input[1])
    told = [f"{len(names)} weights ({what}): {', '.join(sorted(names)[:5])}" for what, names in found.items() if names]
    if told:
        notes["per_channel"] = f"one scale where ONNX Runtime has no per-channel form for {'; '.join(told)}"
    return sorted(set().union(*found.values()))


def float_type() -> int:
    """Type to assume where inference found none, as behind operators of other domains; without it the quantizer gives up."""
    import onnx

    return int(onnx.TensorProto.FLOAT)


def _floats() -> tuple[int, ...]:
    import onnx

    return (int(onnx.TensorProto.FLOAT), int(onnx.TensorProto.FLOAT16), int(onnx.TensorProto.DOUBLE), int(onnx.TensorProto.BFLOAT16))


def _small_integers() -> tuple[int, ...]:
    import onnx

    return (int(onnx.TensorProto.INT8), int(onnx.TensorProto.UINT8), int(onnx.TensorProto.INT4), int(onnx.TensorProto.UINT4))


def _quantized_nodes(proto: onnx.ModelProto) -> Callable[[onnx.GraphProto], int]:
    """Count the nodes of a graph of the model that work with weights of 8 bits or fewer.

    These are integer forms of operators that hold weights, and float ones behind a DequantizeLinear. A weight is told from a zero point by its
    rank, 2 or more.
    """
    nodes = [node for graph in graphs_of(proto.graph) for node in graph.node]
    small = {t.name for graph in graphs_of(proto.graph) for t in graph.initializer if t.data_type in _small_integers() and len(t.dims) > 1}
    quantized = small | {name for n in nodes if n.op_type == "DequantizeLinear" and n.input[0] in small for name in n.output}

    def count(graph: onnx.GraphProto) -> int:
        holders = (n for n in graph.node if any(name in n.op_type for name in WEIGHTED))  # MatMulInteger, QLinearConv, QGemm ...
        return sum(not quantized.isdisjoint(n.input) for n in holders)

    return count
