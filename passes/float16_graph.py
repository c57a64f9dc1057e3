"""What the passes to 16 bits share: their block lists, and a conversion by ONNX Runtime's converter with what it gets wrong mended.

Source: `onnxruntime.transformers.float16`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from autotune.errors import PassError, nearest
from autotune.model import MODEL_FILE, save_onnx
from autotune.passes.base import PassConfigParam
from autotune.passes.onnx_graph import (
    DEFAULT_DOMAINS,
    check_types,
    fit_domains,
    fresh_name,
    graphs_of,
    library_errors,
    operator_counts,
    quiet,
    sort_nodes,
    value_names,
)

if TYPE_CHECKING:
    import onnx

SMALLEST = 5.96e-08  # the smallest subnormal float16
LARGEST = 65504.0
ADVICE = "Name the operators in its message in op_block_list, or leave this pass out."


def block_list_rows() -> dict[str, PassConfigParam]:
    """Rows of a pass's table that name what has to stay in float32, by operator and by node."""
    return {
        "op_block_list": PassConfigParam(
            type_=list[str],
            description="operator types to leave in float32, besides those that ONNX Runtime's converter leaves; one that the model lacks "
            "is refused",
        ),
        "node_block_list": PassConfigParam(
            type_=list[str], description="names of nodes to leave in float32; * and ? match any text. A name that matches nothing is refused",
        ),
    }  # fmt: skip


def why_not_float32(proto: onnx.ModelProto) -> str:
    """Say why there is nothing to convert; empty where there are float32 weights."""
    if count_weights(proto, "FLOAT"):
        return ""
    for name in ("FLOAT16", "BFLOAT16"):
        if count_weights(proto, name):
            return f"the model is {name.lower()} already"
    return "the model holds no float32 weights"


def convert(
    given: onnx.ModelProto, *, who: str, keep_io_types: bool, operators: Sequence[str], nodes: Sequence[str], limits: tuple[float, float]
) -> onnx.ModelProto:
    """Let ONNX Runtime convert a model with known shapes to float16, except for these operator types and nodes, and mend what it leaves.

    `limits`: the smallest and the largest size of a weight. Raises `PassError` where the converter fails, or its result no longer type-checks
    though the model did.
    """
    from onnxruntime.transformers import float16

    stay = {*float16.DEFAULT_OP_BLOCK_LIST, *operators}
    sound = _type_checks(given)
    own_weights(given, stay, set(nodes))
    with library_errors(who, "the model must be one that ONNX Runtime's float16 converter takes"), quiet():
        converted: onnx.ModelProto = float16.convert_float_to_float16(
            given, min_positive_val=limits[0], max_finite_val=limits[1], keep_io_types=keep_io_types, disable_shape_infer=True,
            op_block_list=sorted(stay), node_block_list=list(nodes),
        )  # fmt: skip
        _cast_for_bodies(converted, stay, set(nodes))
        sort_nodes(converted.graph)  # the converter puts its casts at the end
        _bypass_round_trips(converted)
        fit_domains(converted)
    if sound:
        with library_errors(who, "the converted model must still type-check", ADVICE):
            check_types(converted)
    return converted


def own_weights(proto: onnx.ModelProto, operators: Set[str], nodes: Set[str]) -> None:
    """Give nodes that stay in float32 weights of their own, where others take them too: the converter would give all of them float16."""

    def stays(node: onnx.NodeProto) -> bool:
        return node.op_type in operators or node.name in nodes

    weights = {t.name: t for t in proto.graph.initializer if t.data_type == _tensor_type("FLOAT")}
    others = {n for g in graphs_of(proto.graph) for node in g.node if not stays(node) for n in node.input if n in weights}
    taken = value_names(proto)
    copies: dict[str, str] = {}
    for node in proto.graph.node:
        if not stays(node):
            continue
        for index, name in enumerate(node.input):
            if name not in others:
                continue
            if name not in copies:
                copies[name] = fresh_name(f"{name}_float32", taken)
                taken.add(copies[name])
                added = proto.graph.initializer.add()
                added.CopyFrom(weights[name])
                added.name = copies[name]
            node.input[index] = copies[name]


def _cast_for_bodies(proto: onnx.ModelProto, operators: Set[str], nodes: Set[str]) -> None:
    """Cast what the branches and bodies of nodes that stay in float32 take from outside: the converter looks at a node's inputs only."""
    from onnx import helper

    half = {v.name for v in (*proto.graph.value_info, *proto.graph.input) if v.type.tensor_type.elem_type == _tensor_type("FLOAT16")}
    half |= {t.name for t in proto.graph.initializer if t.data_type == _tensor_type("FLOAT16")}
    taken = value_names(proto)
    casts: dict[str, str] = {}
    for node in list(proto.graph.node):
        if node.op_type not in operators and node.name not in nodes:
            continue
        for inner in [g for a in node.attribute for top in ([a.g] if a.HasField("g") else a.graphs) for g in graphs_of(top)]:
            for part in inner.node:
                for index, name in enumerate(part.input):
                    if name not in half:
                        continue
                    if name not in casts:
                        casts[name] = fresh_name(f"{name}_in_body", taken)
                        taken.add(casts[name])
                        proto.graph.node.append(helper.make_node("Cast", [name], [casts[name]], f"{casts[name]}_cast", to=_tensor_type("FLOAT")))
                    part.input[index] = casts[name]


def _bypass_round_trips(proto: onnx.ModelProto) -> None:
    """Join float32 values directly that pass through float16 only on the way from one float32 node, or the rim, to another.

    The converter casts behind each node that stays in float32 and back before the next, so that a value beyond 65504 became infinite
    between two nodes that were kept in float32 on its account.
    """
    graph = proto.graph
    cast_to = {
        n.output[0]: (n, next(a.i for a in n.attribute if a.name == "to")) for n in graph.node if n.op_type == "Cast" and n.domain in DEFAULT_DOMAINS
    }
    float32, float16 = _tensor_type("FLOAT"), _tensor_type("FLOAT16")
    casts = [n for n in graph.node if n.op_type == "Cast"]
    own = {n.output[0] for n in casts if n.name.endswith("_cast_to_fp16_node") or n.name.startswith("graph_input_cast")}
    outputs = {v.name for v in graph.output}
    replaced: dict[str, str] = {}
    for name, (node, type_) in cast_to.items():
        first, first_type = cast_to.get(node.input[0], (None, 0))
        if type_ != float32 or first is None or first_type != float16 or node.input[0] not in own:
            continue
        if name in outputs:
            node.CopyFrom(type(node)(op_type="Identity", input=[first.input[0]], output=[name], name=node.name))
        else:
            replaced[name] = first.input[0]
    for inner in graphs_of(graph):
        for node in inner.node:
            for index, name in enumerate(node.input):
                node.input[index] = replaced.get(name, name)
    while True:
        used = {name for inner in graphs_of(graph) for node in inner.node for name in node.input} | outputs
        unused = {*own, *replaced} - used
        dead = [i for i, n in enumerate(graph.node) if n.output and n.output[0] in unused]
        if not dead:
            return
        for index in reversed(dead):
            del graph.node[index]


def _tensor_type(name: str) -> int:
    import onnx

    return int(getattr(onnx.TensorProto, name))


def count_weights(proto: onnx.ModelProto, type_name: str) -> int:
    """Initializers and constants of a tensor type, everywhere in the model."""
    count, type_ = 0, _tensor_type(type_name)
    for graph in graphs_of(proto.graph):
        count += sum(t.data_type == type_ for t in graph.initializer)
        count += sum(a.HasField("t") and a.t.data_type == type_ for n in graph.node for a in n.attribute)
    return count


def with_shapes(proto: onnx.ModelProto, *, who: str) -> onnx.ModelProto:
    """A copy with the types of inner values, which tell the converter where a cast is due. Works for models beyond 2 GB."""
    import onnx

    with tempfile.TemporaryDirectory(prefix="autotune-float16-") as name, library_errors(who, "the model's types must be inferable"):
        path = Path(name, MODEL_FILE)
        save_onnx(proto, path)
        onnx.shape_inference.infer_shapes_path(str(path), str(path.with_name("inferred.onnx")))
        return onnx.load(str(path.with_name("inferred.onnx")))


def known_operators(proto: onnx.ModelProto, names: Iterable[str], *, who: str) -> list[str]:
    """Return the names. Raises `PassError` for an operator that the model lacks, with the nearest one."""
    present = {name.rpartition(".")[2] for name in operator_counts(proto)}
    for name in names:
        if name not in present:
            raise PassError(who, "each entry of op_block_list must be an operator of the model", repr(name), nearest(name, present))
    return list(names)


def clipped_weights(proto: onnx.ModelProto, smallest: float, largest: float) -> dict[str, int]:
    """Count the float32 weights that float16 can't hold: those cut at the top and those raised at the bottom."""
    from onnx import numpy_helper

    above = below = 0
    for graph in graphs_of(proto.graph):
        for tensor in graph.initializer:
            if tensor.data_type == _tensor_type("FLOAT"):
                size = np.abs(numpy_helper.to_array(tensor))
                above += int(((size > largest) & np.isfinite(size)).sum())
                below += int(((size > 0) & (size < smallest)).sum())
    return {"weights_cut_at_max": above, "weights_raised_to_min": below}


def _type_checks(proto: onnx.ModelProto) -> bool:
    """Whether strict inference accepts the model as it came; where it does not, its opinion of the result tells nothing."""
    try:
        check_types(proto)
    except Exception:  # any complaint will do
        return False
    return True
