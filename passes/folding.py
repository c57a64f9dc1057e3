"""Keeping an optimizer from folding what makes a file large: nodes are put aside before it runs, and back afterwards.

ConstantOfShape, Expand, Tile and the like make large tensors of a few numbers, and Cast may make four bytes of one. Each optimizer has its own
limits or none; this way one limit holds for all. A DequantizeLinear of weights is always put aside: folding it undoes a quantization.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autotune.passes.known_branches import RANDOM
from autotune.passes.onnx_graph import DEFAULT_DOMAINS, bodies_of, fresh_name, graphs_of, value_names, weights_aside

if TYPE_CHECKING:
    import onnx


@dataclass
class Aside:
    """Nodes that were taken out of a graph, with those before them and the weights that all of them take; and which are the ones meant."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, onnx.TensorProto] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)


def put_aside(proto: onnx.ModelProto, most_bytes: int | None) -> Aside:
    """Take constant nodes out of the main graph, in place, so that the results of the others are together larger than what they are computed
    from by `most_bytes` at most; those that grow least stay. None takes out every constant node but Constant itself.

    Results of the nodes taken out become inputs until `put_back`.
    """
    import onnx

    constant = _constant_nodes(proto.graph)
    if not constant:
        return Aside()
    small, _ = weights_aside(proto)
    try:
        inferred = onnx.shape_inference.infer_shapes(small, data_prop=True).graph
    except Exception:  # an operator that inference trips over: without sizes nothing can be judged
        return Aside()
    types = {v.name: v for v in (*inferred.value_info, *inferred.input, *inferred.output)}
    sizes = {n: _bytes(v) for n, v in types.items()} | {t.name: t.ByteSize() for t in proto.graph.initializer}
    outputs = {v.name for v in proto.graph.output}
    meant: list[int] = []
    growing: list[tuple[int, int]] = []
    for index in dict.fromkeys(constant.values()):
        node = proto.graph.node[index]
        made = [n for n in node.output if n]
        if node.op_type == "Constant" or outputs.intersection(made) or any(sizes.get(n) is None for n in made):
            continue
        growth = sum(sizes[n] or 0 for n in made) - sum(sizes.get(n) or 0 for n in node.input if n)
        if most_bytes is None or node.op_type == "DequantizeLinear":
            meant.append(index)
        elif growth > 0:
            growing.append((growth, index))
    total = 0
    for growth, index in sorted(growing):
        total += growth
        if most_bytes is not None and total > most_bytes:
            meant.append(index)
    meant.sort()
    return _taken_out(proto.graph, meant, constant, types) if meant else Aside()


def put_back(proto: onnx.ModelProto, aside: Aside) -> int:
    """Undo `put_aside`, in place, on what an optimizer made, as far as it is still used; returns how many nodes come back.

    Whoever calls sets inputs and the order of nodes right.
    """
    needed = {n for graph in graphs_of(proto.graph) for node in graph.node for n in node.input} & set(aside.names)
    nodes: list[onnx.NodeProto] = []
    for node in reversed(aside.nodes):
        if needed.intersection(node.output):
            nodes.append(node)
            needed.update(n for n in node.input if n)
    taken = value_names(proto)
    weights = {t.name: t for t in proto.graph.initializer}
    renamed: dict[str, str] = {}
    for name, tensor in aside.weights.items():
        if name not in needed or (name in weights and _equal(weights[name], tensor)):
            continue
        renamed[name] = fresh_name(name, taken)
        taken.add(renamed[name])
        added = proto.graph.initializer.add()
        added.CopyFrom(tensor)
        added.name = renamed[name]
    for node in nodes:
        for name in node.output:
            if name and name not in aside.names:
                renamed[name] = fresh_name(f"{name}_aside", taken)
                taken.add(renamed[name])
    for node in nodes:
        node.input[:] = [renamed.get(n, n) for n in node.input]
        node.output[:] = [renamed.get(n, n) for n in node.output]
        proto.graph.node.insert(0, node)
    return len(nodes)


def _constant_nodes(graph: onnx.GraphProto) -> dict[str, int]:
    """Nodes that give the same for every input: places by the names of their outputs, in order."""
    known = {t.name for t in graph.initializer}
    found: dict[str, int] = {}
    for index, node in enumerate(graph.node):
        if node.domain not in DEFAULT_DOMAINS or node.op_type in RANDOM or any(True for _ in bodies_of(node)):
            continue
        if all(not n or n in known for n in node.input) and (node.op_type == "Constant" or any(node.input)):
            known.update(n for n in node.output if n)
            found.update(dict.fromkeys((n for n in node.output if n), index))
    return found


def _equal(one: onnx.TensorProto, other: onnx.TensorProto) -> bool:
    from onnx import numpy_helper

    if one.data_type != other.data_type or list(one.dims) != list(other.dims):
        return False
    return bool(numpy_helper.to_array(one).tobytes() == numpy_helper.to_array(other).tobytes())  # also where the bytes are kept elsewhere


def _bytes(value: onnx.ValueInfoProto) -> int | None:
    from onnx import helper

    tensor = value.type.tensor_type
    if not tensor.HasField("shape") or not tensor.elem_type or not all(d.HasField("dim_value") for d in tensor.shape.dim):
        return None
    try:
        width = int(helper.tensor_dtype_to_np_dtype(tensor.elem_type).itemsize)
    except KeyError:
        return None
    return int(math.prod(d.dim_value for d in tensor.shape.dim)) * width


def _taken_out(graph: onnx.GraphProto, meant: Sequence[int], constant: Mapping[str, int], types: Mapping[str, onnx.ValueInfoProto]) -> Aside:
    wanted: set[int] = set()
    todo = list(meant)
    while todo:  # the nodes before them too, which others may take as well
        index = todo.pop()
        if index not in wanted:
            wanted.add(index)
            todo += [constant[n] for n in graph.node[index].input if n in constant]
    nodes = [type(graph.node[i]).FromString(graph.node[i].SerializeToString()) for i in sorted(wanted)]
    taken = {n for node in nodes for n in node.input}
    weights = {t.name: type(t).FromString(t.SerializeToString()) for t in graph.initializer if t.name in taken}
    names = [n for i in meant for n in graph.node[i].output if n]
    for index in sorted(meant, reverse=True):
        del graph.node[index]
    used = {n for inner in graphs_of(graph) for node in inner.node for n in node.input}
    graph.input.extend(types[n] for n in names if n in used)
    return Aside(nodes, weights, names)
