"""Quantization inside of the bodies of If, Loop and Scan: each is given to the quantizer as a model of its own, and put back.

For quantizers that need nothing but a node's own weight: ranges of what goes into a body's products are found while it runs. ONNX Runtime's own
way into bodies (its option EnableSubgraph) ends, seen with 1.32, at an LSTM whose weights lie outside ("'NoneType' object has no attribute
'dims'"), gives what it adds to several graphs the same names, and knows nothing of what this pass mends around it in the main graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from autotune.passes.onnx_graph import (
    bodies_of,
    drop_unused_initializers,
    fit_domains,
    fresh_name,
    graphs_of,
    initializer_names,
    name_every_node,
    quiet,
    value_names,
    weights_aside,
)
from autotune.passes.quantization_graph import weights_taken
from autotune.passes.quantization_names import rename_values

if TYPE_CHECKING:
    import onnx

    Types = Mapping[str, onnx.TypeProto]

SHARED_BYTES = 1024  # what is smaller may be stored in several bodies


def quantize_bodies(
    proto: onnx.ModelProto, operators: Collection[str], excluded: frozenset[str], quantize: Callable[[onnx.ModelProto], onnx.ModelProto]
) -> None:
    """Quantize, in place, every body that holds a node of these types with a constant weight, of its own or from outside.

    No two graphs of `proto` may define the same name. `quantize` changes the model that it is given. A weight that several bodies take, or a body
    and the main graph, is stored once.
    """
    before = initializer_names(proto)
    types, taken = _types(proto), value_names(proto)

    def enter(graph: onnx.GraphProto, outside: Mapping[str, onnx.TensorProto]) -> None:
        for body in (body for node in graph.node for body in bodies_of(node)):
            # What the quantizer adds to a graph is not for those inside of it.
            scope = {**outside, **{t.name: t for t in body.initializer}}
            chosen = [n for n in body.node if n.op_type in operators and n.name not in excluded]
            weights = {name for n in chosen for name in weights_taken(n, scope)}
            if weights:
                alone = _alone(body, proto, {**types, **_tensor_types(scope)}, {name: outside[name] for name in weights & set(outside)})
                _put_back(body, quantize(alone).graph, outside, taken)
            enter(body, scope)

    enter(proto.graph, {t.name: t for t in proto.graph.initializer if t.name in before})
    drop_unused_initializers(proto)
    _store_once(proto, before)
    name_every_node(proto)
    fit_domains(proto)


def _types(proto: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    """Types of values, in bodies too, as far as they are known or can be inferred."""
    import onnx

    small, large = weights_aside(proto)
    try:
        with quiet():
            inferred = onnx.shape_inference.infer_shapes(small)
    except Exception:  # the quantizer assumes float where it is not told
        inferred = small
    graphs = [*graphs_of(proto.graph), *graphs_of(inferred.graph)]
    found = {v.name: v.type for g in graphs for v in (*g.input, *g.value_info, *g.output) if v.HasField("type")}
    return found | _tensor_types(large)


def _tensor_types(tensors: Mapping[str, onnx.TensorProto]) -> dict[str, onnx.TypeProto]:
    from onnx import helper

    return {name: helper.make_tensor_type_proto(t.data_type, list(t.dims)) for name, t in tensors.items()}


def _alone(body: onnx.GraphProto, proto: onnx.ModelProto, types: Types, weights: Mapping[str, onnx.TensorProto]) -> onnx.ModelProto:
    """The body as a model: what it takes from outside are inputs, but for the weights, which become its own."""
    alone = type(proto)(ir_version=proto.ir_version)
    alone.opset_import.extend(proto.opset_import)
    alone.functions.extend(proto.functions)
    alone.graph.CopyFrom(body)
    alone.graph.initializer.extend(weights.values())
    inner = list(graphs_of(body))
    made = {name for g in inner for n in g.node for name in n.output}
    made |= {v.name for g in inner for v in g.input} | {t.name for g in inner for t in g.initializer}
    wanted = dict.fromkeys(name for g in inner for n in g.node for name in n.input if name)
    wanted.update(dict.fromkeys(v.name for g in inner for v in g.output))
    for name in wanted:
        if name not in made and name not in weights:
            value = alone.graph.input.add(name=name)
            if name in types:
                value.type.CopyFrom(types[name])
    return alone


def _put_back(body: onnx.GraphProto, result: onnx.GraphProto, outside: Mapping[str, onnx.TensorProto], taken: set[str]) -> None:
    """Take nodes and initializers of a quantized body, under names that no other graph has; its interface stays as it is."""
    import onnx

    old = value_names(onnx.ModelProto(graph=body)) | set(outside)
    holder = onnx.ModelProto(graph=result)
    new = value_names(holder) - old - {""}
    names = {}
    for name in sorted(new & taken):
        names[name] = fresh_name(name, taken)
        taken.add(names[name])
    rename_values(holder, names)
    taken |= new
    del body.node[:], body.initializer[:]
    body.node.extend(holder.graph.node)
    body.initializer.extend(t for t in holder.graph.initializer if t.name not in outside)


def _store_once(proto: onnx.ModelProto, before: Collection[str]) -> None:
    """Keep one of several equal initializers that the quantizer has made in different graphs: in the main graph, where all see it."""
    found: dict[str, list[tuple[onnx.GraphProto, onnx.TensorProto]]] = {}
    for graph in graphs_of(proto.graph):
        for tensor in graph.initializer:
            if tensor.name not in before and len(tensor.raw_data) >= SHARED_BYTES:
                facts = f"{tensor.data_type} {list(tensor.dims)}".encode() + hashlib.sha256(tensor.raw_data).digest()
                found.setdefault(hashlib.sha256(facts).hexdigest(), []).append((graph, tensor))
    names = {}
    gone = set()
    for equal in found.values():
        first = equal[0][1]  # the main graph comes first
        if len(equal) > 1 and first.name not in {t.name for t in proto.graph.initializer}:
            proto.graph.initializer.add().CopyFrom(first)
            gone.add(first.name)
        names.update({tensor.name: first.name for _, tensor in equal[1:]})
    for graph in list(graphs_of(proto.graph))[1:]:
        kept = [t for t in graph.initializer if t.name not in gone and t.name not in names]
        if len(kept) < len(graph.initializer):
            del graph.initializer[:]
            graph.initializer.extend(kept)
        for node in graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]
