"""Scales for channels: multiply a weight's input channels, divide what comes in by the same, and nothing changes in exact arithmetic.

Activations whose channels differ much in size can be made alike this way before they are quantized (SmoothQuant), and weights that meet
large activations can be made finer (AWQ). The division is folded into constants before it, or made by a node of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autotune.errors import PassError
from autotune.model import IoContract
from autotune.passes.onnx_graph import DEFAULT_DOMAINS, fresh_name, graphs_of, value_names
from autotune.passes.onnx_outputs import NotComparable, compare

if TYPE_CHECKING:
    import onnx

SUFFIX = "_scaled"
# Norms: which inputs are scale and bias. In each, the last axis holds the channels.
NORMS: Mapping[str, tuple[int, ...]] = {
    "LayerNormalization": (1, 2), "SimplifiedLayerNormalization": (1,), "RMSNormalization": (1,), "SkipLayerNormalization": (2, 3),
    "SkipSimplifiedLayerNormalization": (2,),
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A constant input of a node, and the axis of it that holds the channels."""

    node: int
    input: int
    axis: int


@dataclass(frozen=True)
class Group:
    """A value of the main graph, with all products that take it and a constant weight.

    `weights` are the places to multiply; `before` those to divide by the same, or None where the division can't be folded, for `reason`.
    """

    value: str
    channels: int
    weights: tuple[Place, ...]
    before: tuple[Place, ...] | None
    reason: str = ""


def find_groups(proto: onnx.ModelProto) -> list[Group]:
    """Find the values that MatMul and Gemm nodes of the main graph multiply by constant float weights, last ones first.

    In that order each weight is scaled for what comes after it before it is looked at for what it takes.
    """
    return _Finder(proto).groups()


class _Finder:
    def __init__(self, proto: onnx.ModelProto) -> None:
        import onnx

        self.nodes = list(proto.graph.node)
        floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
        self.constants = {t.name: tuple(t.dims) for t in proto.graph.initializer if t.data_type in floats}
        self.maker = {name: i for i, node in enumerate(self.nodes) for name in node.output if name}
        self.uses: Counter[str] = Counter(name for node in self.nodes for name in node.input if name)
        self.uses.update(v.name for v in proto.graph.output)
        for graph in list(graphs_of(proto.graph))[1:]:
            self.uses.update(name for node in graph.node for name in node.input if name)

    def groups(self) -> list[Group]:
        found: dict[str, list[Place]] = {}
        for index, node in enumerate(self.nodes):
            place = self._weight(index, node)
            if place is not None and node.input[0] not in self.constants:
                found.setdefault(node.input[0], []).append(place)
        groups = []
        for value, places in found.items():
            channels = self._size(places[0])
            if any(self._size(p) != channels for p in places) or value not in self.maker:
                continue  # a graph's input belongs to the caller
            if self.uses[value] > len(places):
                before, reason = None, "something else takes the value too"
            else:
                before, reason = self._before(value, channels)
            groups.append(Group(value, channels, tuple(places), before, reason))
        return groups[::-1]

    def _weight(self, index: int, node: onnx.NodeProto) -> Place | None:
        """Where a product's constant weight is, and its axis of input channels."""
        if node.domain not in DEFAULT_DOMAINS or node.op_type not in ("MatMul", "Gemm") or node.input[1] not in self.constants:
            return None
        rank = len(self.constants[node.input[1]])
        if node.op_type == "MatMul":
            return Place(index, 1, rank - 2) if rank >= 2 else None
        return None if _flag(node, "transA") else Place(index, 1, 1 if _flag(node, "transB") else 0)

    def _size(self, place: Place) -> int:
        return int(self.constants[self.nodes[place.node].input[place.input]][place.axis])

    def _before(self, value: str, channels: int) -> tuple[tuple[Place, ...] | None, str]:
        """Constants that scale the last axis of a value, or None and why there are none."""
        index = self.maker.get(value)
        if index is None:
            return None, "the value is an input of the model"
        node = self.nodes[index]
        refused = (None, f"{node.op_type} before it can't take a scale")
        if value != node.output[0]:
            return refused
        if node.op_type in NORMS:
            places = [Place(index, i, 0) for i in NORMS[node.op_type] if i < len(node.input) and node.input[i]]
            fits = all(self.constants.get(node.input[p.input]) == (channels,) for p in places)
            return (tuple(places), "") if fits and places else refused
        if node.domain not in DEFAULT_DOMAINS:
            return refused
        if node.op_type in ("Relu", "LeakyRelu", "Identity") or (node.op_type == "Transpose" and _keeps_last(node)):
            return self._through(node.input[0], channels)
        if node.op_type in ("MatMul", "Gemm"):
            return self._product(index, node, channels, refused)
        if node.op_type in ("Add", "Sub", "Mul", "Div"):
            return self._elementwise(index, node, channels, refused)
        return refused

    def _through(self, value: str, channels: int) -> tuple[tuple[Place, ...] | None, str]:
        return self._before(value, channels) if self.uses[value] == 1 else (None, "something else takes a value before it")

    def _product(self, index: int, node: onnx.NodeProto, channels: int, refused: tuple[None, str]) -> tuple[tuple[Place, ...] | None, str]:
        shape = self.constants.get(node.input[1])
        if shape is None:  # a product of two values: the last axis is that of the right one
            return self._through(node.input[1], channels) if node.op_type == "MatMul" else refused
        if len(shape) < 2:
            return refused
        axis = 0 if node.op_type == "Gemm" and _flag(node, "transB") else len(shape) - 1
        places = [Place(index, 1, axis)]
        if node.op_type == "Gemm" and len(node.input) > 2 and node.input[2]:
            bias = self.constants.get(node.input[2], ())
            if not bias or bias[-1] != channels:
                return refused
            places.append(Place(index, 2, len(bias) - 1))
        return (tuple(places), "") if shape[axis] == channels else refused

    def _elementwise(self, index: int, node: onnx.NodeProto, channels: int, refused: tuple[None, str]) -> tuple[tuple[Place, ...] | None, str]:
        constant = [i for i in (0, 1) if node.input[i] in self.constants]
        if len(constant) == 2:
            return refused
        if not constant:  # of a product either side will do, of a quotient the upper one
            if node.op_type in ("Mul", "Div"):
                for side in (1, 0) if node.op_type == "Mul" else (0,):
                    found = self._through(node.input[side], channels)
                    if found[0] is not None:
                        return found
            return refused
        side = constant[0]
        shape = self.constants[node.input[side]]
        whole = bool(shape) and shape[-1] == channels and int(np.prod(shape)) == channels
        if node.op_type in ("Mul", "Div"):
            if node.op_type == "Mul" and whole:
                return (Place(index, side, len(shape) - 1),), ""
            return self._through(node.input[1 - side], channels) if node.op_type == "Mul" or side == 1 else refused
        rest, reason = self._through(node.input[1 - side], channels) if whole else refused
        return (None, reason) if rest is None else ((Place(index, side, len(shape) - 1), *rest), "")


def _flag(node: onnx.NodeProto, name: str) -> bool:
    return any(a.name == name and a.i for a in node.attribute)


def _keeps_last(node: onnx.NodeProto) -> bool:
    order = next((list(a.ints) for a in node.attribute if a.name == "perm"), [])
    return bool(order) and order[-1] == len(order) - 1


class Scaler:
    """Changes a model in place. Scaled constants are new ones, since others may take the old; unused ones are to be dropped afterwards."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.graph = proto.graph
        self.tensors = {t.name: t for t in proto.graph.initializer}
        self.taken = value_names(proto)
        self.nodes = list(proto.graph.node)  # stays in the order in which groups were found

    def weight(self, place: Place) -> NDArray[Any]:
        """The constant as it is now."""
        from onnx import numpy_helper

        return np.asarray(numpy_helper.to_array(self.tensors[self.nodes[place.node].input[place.input]]))

    def apply(self, group: Group, scales: NDArray[np.floating]) -> None:
        """Multiply the group's weights by `scales`, one a channel, and divide what comes in: by folding, or by a Mul node."""
        scaled: dict[tuple[str, int], str] = {}
        for place in group.weights:
            key = (self.nodes[place.node].input[place.input], place.axis)
            if key in scaled:
                self.nodes[place.node].input[place.input] = scaled[key]
            else:
                scaled[key] = self._scale(place, scales)
        if group.before is None:
            self._insert(group, scales)
            return
        for place in group.before:
            self._scale(place, 1 / scales)

    def _scale(self, place: Place, scales: NDArray[np.floating]) -> str:
        values = self.weight(place)
        shape = [1] * values.ndim
        shape[place.axis] = len(scales)
        stem = self.nodes[place.node].input[place.input].split(SUFFIX)[0] + SUFFIX
        name = self._store((values * scales.reshape(shape)).astype(values.dtype), stem)
        self.nodes[place.node].input[place.input] = name
        return name

    def _store(self, values: NDArray[Any], stem: str) -> str:
        from onnx import numpy_helper

        name = fresh_name(stem, self.taken)
        self.taken.add(name)
        added = self.graph.initializer.add()
        added.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values), name))
        self.tensors[name] = added
        return name

    def _insert(self, group: Group, scales: NDArray[np.floating]) -> None:
        from onnx import helper

        dtype = self.weight(group.weights[0]).dtype
        inverse = self._store((1 / scales).astype(dtype), f"{group.value}_inverse")
        output = fresh_name(group.value + SUFFIX, self.taken)
        self.taken.add(output)
        first = self.nodes[min(p.node for p in group.weights)].output[0]
        position = next(i for i, node in enumerate(self.graph.node) if node.output and node.output[0] == first)
        for place in group.weights:
            self.nodes[place.node].input[0] = output
        node = helper.make_node("Mul", [group.value, inverse], [output], f"{output}_mul")
        self.graph.node.insert(position, node)


def refuse_difference(before: onnx.ModelProto, after: onnx.ModelProto, io: IoContract, data: Path | None, *, who: str) -> float:
    """Largest difference of an output, as a share of its largest value, on real rows.

    Raises `PassError` when it is more than rounding explains, or the models can't be run.
    """
    try:
        comparison = compare(before, after, io, data=data, who=who)
    except NotComparable as obstacle:
        raise PassError(who, "the model must run, so that its outputs can be compared", str(obstacle)) from obstacle
    if comparison.fault:
        raise PassError(who, "scaled channels must leave the float model's outputs as they are", comparison.fault, "Leave this pass out.")
    return comparison.error
