"""Names that ONNX Runtime's quantizers would give themselves: freed in the model before they begin, and given back to its nodes afterwards.

They make names of a value's or a node's by adding words to it, and take whatever has such a name already for their own: seen with 1.32, that
ends in KeyErrors, in IndexErrors, or in an initializer that is an input too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from autotune.passes.onnx_graph import fresh_name, graphs_of, value_names

if TYPE_CHECKING:
    import onnx

# What they add: to values (scales, zero points, results), to nodes, and both when a Gemm becomes MatMul and Add or a bias is added apart.
_ADDED = re.compile(
    r"(?=_?(?:output_quantized|quantized|quant_scaled_output|quant|scale|zero_point|QuantizeLinear|DequantizeLinear|Quantize|Dequantize|ReduceMin"
    r"|ReduceMax|Abs_Max|bias_reshape|bias_add|Transposed?|MatMul|Add|Cast)(?:[_:\d]|$))"
)
_FIXED = frozenset({"fixed_quantization_range_uint8", "fixed_quantization_range_int8", "fixed_zero", "fixed_zero_zp"})


def free_names(proto: onnx.ModelProto) -> dict[str, str]:
    """Rename, in place, what has a name that a quantizer could make of another name; return nodes' old names by their new ones.

    Inputs and outputs of the model keep their names: where one would be in the way, the value of whose name it could be made is renamed, behind
    an Identity if that is an input or output itself.
    """
    values, nodes = value_names(proto) - {""}, {n.name for graph in graphs_of(proto.graph) for n in graph.node if n.name}
    fixed = {v.name for v in (*proto.graph.input, *proto.graph.output)}
    known = values | nodes
    of_values, of_nodes = set(), set()
    for name in known:
        bases = _bases(name, known)
        if name in nodes and bases:
            of_nodes.add(name)
        if name in values - fixed and (bases or name in _FIXED):
            of_values.add(name)
        elif name in fixed:
            of_values |= bases & values
            of_nodes |= bases & nodes
    stem = fresh_stem("inner", known)
    numbered = {old: f"{stem}_{number}" for number, old in enumerate(sorted(of_values))}
    _pass_on(proto, {old: new for old, new in numbered.items() if old in fixed})
    rename_values(proto, {old: new for old, new in numbered.items() if old not in fixed})
    renamed = {old: f"{stem}_node_{number}" for number, old in enumerate(sorted(of_nodes))}
    for graph in graphs_of(proto.graph):
        for node in graph.node:
            node.name = renamed.get(node.name, node.name)
    return {new: old for old, new in renamed.items()}


def give_names_back(proto: onnx.ModelProto, renamed: Mapping[str, str]) -> None:
    """Undo what `free_names` did to nodes; nodes of the quantizer that have taken such a name get another one."""
    taken = {node.name for graph in graphs_of(proto.graph) for node in graph.node} | set(renamed.values())
    theirs = set(renamed.values())
    for graph in graphs_of(proto.graph):
        for node in graph.node:
            if node.name in renamed:
                node.name = renamed[node.name]
            elif node.name in theirs:
                node.name = fresh_name(node.name, taken)
                taken.add(node.name)


def fresh_stem(stem: str, taken: Iterable[str]) -> str:
    """`stem`, or `stem_1`, `stem_2` ...: the first with which no name begins."""
    names, found, number = list(taken), stem, 0
    while any(name.startswith(found) for name in names):
        number += 1
        found = f"{stem}_{number}"
    return found


def _bases(name: str, known: set[str]) -> set[str]:
    """Names of the model of which a quantizer could make this one."""
    return {name[: match.start()] for match in _ADDED.finditer(name) if match.start()} & known


def rename_values(proto: onnx.ModelProto, names: Mapping[str, str]) -> None:
    """Rename values wherever they are made, taken or described, bodies included."""
    if not names:
        return
    for graph in graphs_of(proto.graph):
        for held in (graph.initializer, graph.value_info, graph.input, graph.output, [t.values for t in graph.sparse_initializer]):
            for value in held:
                value.name = names.get(value.name, value.name)
        for node in graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]


def _pass_on(proto: onnx.ModelProto, names: Mapping[str, str]) -> None:
    """Put an Identity between inputs or outputs and the rest of the graph, which knows them by the new names."""
    if not names:
        return
    from onnx import helper

    kept = {v.name: v for v in (*proto.graph.input, *proto.graph.output)}
    made = {name for node in proto.graph.node for name in node.output}
    for old, new in names.items():
        added = proto.graph.value_info.add()
        added.CopyFrom(kept[old])
        added.name = new
    for graph in graphs_of(proto.graph):
        for node in graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]
        for value in graph.output if graph is not proto.graph else ():
            value.name = names.get(value.name, value.name)
    for old, new in names.items():
        if old in made:
            proto.graph.node.append(helper.make_node("Identity", [new], [old], f"{new}_made"))
        else:
            proto.graph.node.insert(0, helper.make_node("Identity", [old], [new], f"{new}_given"))
