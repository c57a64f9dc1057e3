"""Putting the branch that is always taken in the place of its If, so that other tools see what is inside; and dropping dead parts.

A condition is known where it follows from constants, from sizes of axes that are written in the model or can be inferred, or from the number of
axes. Exporters write such an If for a squeeze of an axis that has one element or not, for instance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autotune.passes.onnx_graph import (
    DEFAULT_DOMAINS,
    bodies_of,
    default_opset,
    drop_unused_initializers,
    fresh_name,
    graphs_of,
    name_values_apart,
    quiet,
    value_names,
    weights_aside,
)

if TYPE_CHECKING:
    import onnx

LARGEST = 4096  # elements of a value that is looked at; conditions come from small ones
ROUNDS = 20
RANDOM = frozenset({"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli", "Dropout"})


@dataclass
class Branches:
    """How many Ifs gave way to a branch, and why others stay, by the name of their first output."""

    resolved: int = 0
    left: dict[str, str] = field(default_factory=dict)


def resolve_ifs(proto: onnx.ModelProto) -> Branches:
    """Replace, in place, each If whose condition is known by the nodes of the branch taken, in bodies too. Values keep their names."""
    found = Branches()
    if not any(_ifs(graph) for graph in graphs_of(proto.graph)):
        return found
    name_values_apart(proto)
    for _ in range(ROUNDS):  # a branch that took its place may hold another If, or tell what its condition was made of
        count = _resolve_below(proto.graph, _Known(proto), value_names(proto))
        found.resolved += count
        if not count:
            break
    known = _Known(proto)
    found.left = {node.output[0]: known.why_unknown(node.input[0]) for graph in graphs_of(proto.graph) for node in _ifs(graph)}
    return found


def drop_dead(proto: onnx.ModelProto) -> int:
    """Remove, in place, nodes whose outputs nobody takes and weights that no node takes, in every graph; returns how many nodes."""
    dropped = 0
    while True:
        used = {name for graph in graphs_of(proto.graph) for node in graph.node for name in node.input}
        used |= {v.name for graph in graphs_of(proto.graph) for v in graph.output}
        now = 0
        for graph in graphs_of(proto.graph):
            for index in range(len(graph.node) - 1, -1, -1):
                node = graph.node[index]
                if not used.intersection(n for n in node.output if n):
                    del graph.node[index]
                    now += 1
        dropped += now
        if not now:
            drop_unused_initializers(proto)
            return dropped


def _ifs(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    return [node for node in graph.node if node.op_type == "If" and node.domain in DEFAULT_DOMAINS]


def _resolve_below(graph: onnx.GraphProto, known: _Known, taken: set[str]) -> int:
    """Resolve the Ifs of a graph, then those inside the nodes that are left."""
    count = _resolve_in(graph, known, taken)
    return count + sum(_resolve_below(body, known, taken) for node in graph.node for body in bodies_of(node))


def _resolve_in(graph: onnx.GraphProto, known: _Known, taken: set[str]) -> int:
    """Resolve the Ifs of one graph, not of those inside its nodes."""
    nodes: list[onnx.NodeProto] = []
    resolved = 0
    for node in graph.node:
        condition = known.value(node.input[0]) if node.op_type == "If" and node.domain in DEFAULT_DOMAINS else None
        if condition is None:
            nodes.append(node)
            continue
        wanted = "then_branch" if bool(condition.reshape(-1)[0]) else "else_branch"
        branch = next(a.g for a in node.attribute if a.name == wanted)
        nodes.extend(_inlined(graph, node, branch, taken))
        resolved += 1
    if resolved:
        copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)
    return resolved


def _inlined(graph: onnx.GraphProto, node: onnx.NodeProto, branch: onnx.GraphProto, taken: set[str]) -> Iterator[onnx.NodeProto]:
    """Nodes of a branch under the names of the If's outputs; its weights go to the graph."""
    from onnx import helper

    made = {name for inner in branch.node for name in inner.output if name}
    names: dict[str, str] = {}
    copies: list[tuple[str, str]] = []
    for inside, outside in zip((v.name for v in branch.output), node.output, strict=False):
        if not outside:
            continue
        if inside in made and inside not in names:
            names[inside] = outside
        else:  # a weight, a value from outside, or one that is given back twice
            copies.append((inside, outside))
    _rename(branch, names)
    graph.initializer.extend(branch.initializer)
    graph.sparse_initializer.extend(branch.sparse_initializer)
    have = {v.name for v in (*graph.value_info, *graph.output)}
    graph.value_info.extend(v for v in branch.value_info if v.name not in have)
    yield from branch.node
    for inside, outside in copies:
        name = fresh_name(f"{outside}_from_branch", taken)
        taken.add(name)
        yield helper.make_node("Identity", [names.get(inside, inside)], [outside], name)


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Rename values of a graph and of those inside it; names must be unique in the model."""
    for inner in graphs_of(graph):
        for value in (*inner.value_info, *inner.output):
            value.name = names.get(value.name, value.name)
        for node in inner.node:
            node.input[:] = [names.get(n, n) for n in node.input]
            node.output[:] = [names.get(n, n) for n in node.output]


class _Known:
    """Values of a model that are the same for every input, found when asked for. Names of values must be unique in the model."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        import onnx

        self.opsets = list(proto.opset_import)
        self.opset = default_opset(proto)
        self.ir_version = proto.ir_version
        self.inputs = {v.name for v in proto.graph.input} - {t.name for t in proto.graph.initializer}
        self.inner_inputs = {v.name for graph in list(graphs_of(proto.graph))[1:] for v in graph.input}
        self.constants = {t.name: t for graph in graphs_of(proto.graph) for t in graph.initializer}
        self.producer = {name: node for graph in graphs_of(proto.graph) for node in graph.node for name in node.output if name}
        self.memory: dict[str, NDArray[Any] | None] = {}
        small, _ = weights_aside(proto)
        try:
            inferred = onnx.shape_inference.infer_shapes(small, data_prop=True)
        except Exception:  # an operator that inference trips over: what is written in the model has to do
            inferred = small
        self.dims: dict[str, list[int | None]] = {t.name: list(t.dims) for t in self.constants.values()}
        for graph in graphs_of(inferred.graph):
            for value in (*graph.value_info, *graph.input, *graph.output):
                if value.type.tensor_type.HasField("shape"):
                    dims = value.type.tensor_type.shape.dim
                    self.dims.setdefault(value.name, [d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else None for d in dims])

    def value(self, name: str) -> NDArray[Any] | None:
        """The value, or None where it depends on inputs, is large, or was not found."""
        if name not in self.memory:
            self.memory[name] = None  # a cycle ends here
            self.memory[name] = self._find(name)
        return self.memory[name]

    def _find(self, name: str) -> NDArray[Any] | None:
        from onnx import numpy_helper

        tensor = self.constants.get(name)
        if tensor is not None:
            return np.asarray(numpy_helper.to_array(tensor)) if int(np.prod(tensor.dims)) <= LARGEST and not tensor.external_data else None
        node = self.producer.get(name)
        if node is None or node.domain not in DEFAULT_DOMAINS or node.op_type in RANDOM or any(True for _ in bodies_of(node)):
            return None
        sizes = self._sizes(node)
        if sizes is not None:
            return np.array(sizes, np.int64) if all(s is not None for s in sizes) else None
        if node.op_type == "Size":
            dims = self.dims.get(node.input[0])
            return np.array(int(np.prod([d or 0 for d in dims])), np.int64) if dims is not None and None not in dims else None
        picked = self._picked(node)
        if picked is not None:
            return picked
        inputs = {n: self.value(n) for n in node.input if n}
        if any(v is None for v in inputs.values()):
            return None
        return self._computed(node, {n: v for n, v in inputs.items() if v is not None}, name)

    def _sizes(self, node: onnx.NodeProto | None) -> list[int | None] | None:
        """What a Shape node gives, with None for the sizes that depend on the input; None for another node, or an unknown number of axes."""
        if node is None or node.op_type != "Shape" or node.domain not in DEFAULT_DOMAINS:
            return None
        dims = self.dims.get(node.input[0])
        start, end = (next((a.i for a in node.attribute if a.name == key), None) for key in ("start", "end"))
        return dims[slice(start, end)] if dims is not None else None

    def _picked(self, node: onnx.NodeProto) -> NDArray[Any] | None:
        """Sizes that a Gather takes out of a Shape of which others are unknown."""
        if node.op_type != "Gather":
            return None
        sizes, index = self._sizes(self.producer.get(node.input[0])), self.value(node.input[1])
        if sizes is None or index is None or not all(-len(sizes) <= i < len(sizes) for i in index.reshape(-1)):
            return None
        taken = [sizes[int(i)] for i in index.reshape(-1)]
        return np.array(taken, np.int64).reshape(index.shape) if None not in taken else None

    def _computed(self, node: onnx.NodeProto, inputs: Mapping[str, NDArray[Any]], name: str) -> NDArray[Any] | None:
        """Let ONNX Runtime compute one node."""
        import onnx
        import onnxruntime as ort
        from onnx import helper, numpy_helper

        weights = [numpy_helper.from_array(v, n) for n, v in inputs.items()]
        graph = helper.make_graph([node], "one", [], [onnx.ValueInfoProto(name=name)], weights)
        model = helper.make_model(graph, opset_imports=self.opsets, ir_version=min(self.ir_version, 10) or 10)
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        try:
            with quiet():
                value = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, {})[0]
        except Exception:  # what it can't compute is not known
            return None
        return value if isinstance(value, np.ndarray) and value.size <= LARGEST else None

    def why_unknown(self, name: str) -> str:
        """Name what a condition comes from: inputs, or the sizes of their axes."""
        values, sizes, rest = set[str](), set[str](), set[str]()
        seen: set[tuple[str, bool]] = set()
        todo = [(name, False)]
        while todo:
            one, by_size = todo.pop()
            if not one or (one, by_size) in seen or (not by_size and self.value(one) is not None):
                continue
            seen.add((one, by_size))
            node = self.producer.get(one)
            if one in self.inputs:
                (sizes if by_size else values).add(one)
            elif node is None:
                rest.update([one] if one in self.inner_inputs else [])
            else:
                todo += [(n, by_size or node.op_type in ("Shape", "Size")) for n in node.input]
        parts = [f"input {', '.join(sorted(values))}"] if values else []
        parts += [f"the sizes of input {', '.join(sorted(sizes - values))}"] if sizes - values else []
        parts += ["a value that a loop carries"] if rest else []
        return "its condition depends on " + " and ".join(parts or ["values that are not known"])
