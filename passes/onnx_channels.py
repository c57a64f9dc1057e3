"""Which channels of an ONNX graph can be taken out, and which go together: units of channels, followed through the graph.

Every axis that is followed, of a value or of a weight, is a list of units, one for each place along it. An operator that works channel by
channel hands units on; one that joins two values (a residual sum) makes their units one; Concat puts lists one after another; a
convolution or matrix product makes new units. What an operator that is not known here takes is frozen, and so are outputs. In the end
each unit that is not frozen can be removed from every axis that holds it.

Source: the idea of grouping by dependency is that of Fang et al., "DepGraph: Towards Any Structural Pruning" (CVPR 2023).
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autotune.passes.onnx_graph import DEFAULT_DOMAINS, graphs_of, quiet, weights_aside

if TYPE_CHECKING:
    import onnx

Units = NDArray[np.int64]
Shape = tuple[int | str | None, ...]

# One value in, one out, place by place; further inputs hold one number each.
PLACEWISE = frozenset({
    "Abs", "Cast", "Ceil", "Celu", "Clip", "Cos", "Dropout", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity", "IsInf",
    "IsNaN", "LeakyRelu", "Log", "Mish", "Neg", "Not", "QuickGelu", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin",
    "Softplus", "Softsign", "Sqrt", "Tanh", "ThresholdedRelu",
})  # fmt: skip
BROADCASTING = frozenset({
    "Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul", "Or", "PRelu", "Pow",
    "Sub", "Sum", "Where", "Xor",
})  # fmt: skip
POOLING = frozenset({"AveragePool", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "LpPool", "MaxPool"})
REDUCING = frozenset({
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare",
})  # fmt: skip
MICROSOFT_PLACEWISE = frozenset({"Gelu", "QuickGelu"})


@dataclass(frozen=True)
class Flow:
    """The axis of a value that is followed, counted from the front, and its units."""

    axis: int
    units: Units


@dataclass
class Producer:
    """A node that makes units, by its weight's axis; `factor` holds what a batch normalization multiplies each channel with."""

    node: str
    op_type: str
    weight: str
    axis: int
    units: Units
    factor: NDArray[np.float64] | None = None


@dataclass
class Channels:
    """What was found: axes of weights with their units, producers and consumers, groups counts and reshapes that follow, who froze what."""

    axes: dict[tuple[str, int], Units] = field(default_factory=dict)
    producers: list[Producer] = field(default_factory=list)
    consumers: list[tuple[str, int, Units]] = field(default_factory=list)
    groups: list[tuple[int, Units]] = field(default_factory=list)  # node index, units: its `group` attribute is the number kept
    reshapes: list[tuple[int, int, Units]] = field(default_factory=list)  # node index, place in its shape, units: the number kept
    frozen_by: Counter[str] = field(default_factory=Counter)
    parents: list[int] = field(default_factory=list)
    frozen: list[bool] = field(default_factory=list)

    def new(self, count: int) -> Units:
        start = len(self.parents)
        self.parents.extend(range(start, start + count))
        self.frozen.extend([False] * count)
        return np.arange(start, start + count, dtype=np.int64)

    def root(self, unit: int) -> int:
        while self.parents[unit] != unit:
            self.parents[unit] = self.parents[self.parents[unit]]
            unit = self.parents[unit]
        return unit

    def roots(self, units: Units) -> Units:
        return np.array([self.root(int(u)) for u in units], dtype=np.int64)

    def join(self, one: Units, other: Units) -> None:
        """Make units one, pair by pair. Lists of different lengths (a broadcast of one channel) are frozen instead."""
        if len(one) != len(other):
            self.freeze(one, "broadcast")
            self.freeze(other, "broadcast")
            return
        for a, b in zip(one, other, strict=True):
            x, y = self.root(int(a)), self.root(int(b))
            if x != y:
                low, high = min(x, y), max(x, y)
                self.parents[high] = low
                self.frozen[low] = self.frozen[low] or self.frozen[high]

    def freeze(self, units: Units, by: str) -> None:
        """Keep these units. `by` says who wants that, for the notes; "" for what nobody expects to go."""
        roots = {self.root(int(u)) for u in units}
        if by and any(not self.frozen[r] for r in roots):
            self.frozen_by[by] += 1
        for r in roots:
            self.frozen[r] = True

    def is_frozen(self, unit: int) -> bool:
        return self.frozen[self.root(unit)]


def follow_channels(proto: onnx.ModelProto, *, may_make: Callable[[onnx.NodeProto], bool]) -> Channels:
    """Follow units through the main graph. Only nodes that `may_make` allows make units that can go; nodes must be in order."""
    return _Follower(proto, may_make).run()


def shapes_of(proto: onnx.ModelProto) -> dict[str, Shape]:
    """Shapes of all values of the main graph that are known; axes as sizes, names, or None."""
    import onnx

    small, _ = weights_aside(proto)
    with quiet(), contextlib.suppress(Exception):  # where inference fails, what is written in the model is known still
        small = onnx.shape_inference.infer_shapes(small, data_prop=True)
    found: dict[str, Shape] = {t.name: tuple(t.dims) for t in proto.graph.initializer}
    for value in (*small.graph.input, *small.graph.value_info, *small.graph.output):
        tensor = value.type.tensor_type
        if value.type.WhichOneof("value") == "tensor_type" and tensor.HasField("shape"):
            found[value.name] = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim)
    return found


class _Follower:
    def __init__(self, proto: onnx.ModelProto, may_make: Callable[[onnx.NodeProto], bool]) -> None:
        self.graph = proto.graph
        self.may_make = may_make
        self.shapes = shapes_of(proto)
        self.weights = {t.name: t for t in proto.graph.initializer}
        self.opset = next((o.version for o in proto.opset_import if o.domain in DEFAULT_DOMAINS), 0)
        self.found = Channels()
        self.flows: dict[str, Flow] = {}
        self.accounted: set[tuple[int, int]] = set()  # node, input: uses of weights that are understood
        self.made_by: dict[str, Producer] = {}
        self.users: Counter[str] = Counter(name for node in proto.graph.node for name in node.input)
        self.takers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in proto.graph.node:
            for name in node.input:
                self.takers[name].append(node)

    def run(self) -> Channels:
        for index, node in enumerate(self.graph.node):
            if any(a.HasField("g") or a.graphs for a in node.attribute):
                self._freeze_captured(node)
                continue
            handler = self._handler(node)
            if handler is None or not handler(index, node):
                self._freeze_inputs(node)
        for value in self.graph.output:
            if value.name in self.flows:
                self.found.freeze(self.flows[value.name].units, "output")
        self._freeze_other_uses()
        return self.found

    def _handler(self, node: onnx.NodeProto) -> Callable[[int, onnx.NodeProto], bool] | None:
        kind = node.op_type
        if node.domain not in DEFAULT_DOMAINS:
            return self._placewise if node.domain == "com.microsoft" and kind in MICROSOFT_PLACEWISE else None
        if kind in PLACEWISE:
            return self._placewise
        if kind in BROADCASTING:
            return self._broadcast
        if kind in POOLING:
            return self._pool
        if kind in REDUCING:
            return self._reduce
        found: Any = getattr(self, f"_{kind.lower()}", None)
        return found if kind in _NAMED else None

    # ------------------------------------------------------------------ helpers

    def _freeze_inputs(self, node: onnx.NodeProto) -> None:
        for name in node.input:
            if name in self.flows:
                self.found.freeze(self.flows[name].units, node.op_type)

    def _freeze_captured(self, node: onnx.NodeProto) -> None:
        self._freeze_inputs(node)
        for attribute in node.attribute:
            for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                for inner in graphs_of(graph):
                    for part in inner.node:
                        self._freeze_inputs(part)

    def _freeze_other_uses(self) -> None:
        """A weight that anyone else takes (a tied embedding, a branch, an output) must stay as it is."""
        elsewhere = {v.name for v in self.graph.output}
        for inner in list(graphs_of(self.graph))[1:]:
            elsewhere.update(name for part in inner.node for name in part.input)
        for index, node in enumerate(self.graph.node):
            elsewhere.update(name for place, name in enumerate(node.input) if (index, place) not in self.accounted)
        for (name, _), units in self.found.axes.items():
            if name in elsewhere:
                self.found.freeze(units, "weight used elsewhere")

    def _rank(self, name: str) -> int | None:
        return len(self.shapes[name]) if name in self.shapes else None

    def _use(self, index: int, place: int, axis: int, units: Units) -> bool:
        """Lay units along an axis of the weight that node `index` takes at `place`; False when it is no weight of that size."""
        name = self.graph.node[index].input[place]
        tensor = self.weights.get(name)
        if tensor is None or axis >= len(tensor.dims) or tensor.dims[axis] != len(units):
            return False
        known = self.found.axes.get((name, axis))
        if known is None:
            self.found.axes[name, axis] = units
        else:
            self.found.join(known, units)
        self.accounted.add((index, place))
        return True

    def _make(self, index: int, node: onnx.NodeProto, place: int, axis: int, count: int) -> Units:
        """New units for what a node makes, along its weight's axis (those that are there, for a shared weight)."""
        units = self.found.new(count)
        if not self.may_make(node):
            self.found.freeze(units, "out of scope")
        self._use(index, place, axis, units)
        producer = Producer(node.name, node.op_type, node.input[place], axis, units)
        self.found.producers.append(producer)
        self.made_by[node.output[0]] = producer
        return units

    def _take(self, index: int, place: int, axis: int, flow: Flow | None) -> bool:
        """Lay the units that come in along the axis of a weight that takes them; where none are followed, that axis stays as it is."""
        name = self.graph.node[index].input[place]
        if flow is not None:
            self.found.consumers.append((name, axis, flow.units))
            return self._use(index, place, axis, flow.units)
        fixed = self.found.new(int(self.weights[name].dims[axis]))
        self.found.freeze(fixed, "")
        return self._use(index, place, axis, fixed)

    def _constant(self, node: onnx.NodeProto, place: int) -> list[Any] | None:
        """Values of a small constant input; None when there is none, or it is computed."""
        from onnx import numpy_helper

        if place >= len(node.input) or not node.input[place] or node.input[place] not in self.weights:
            return None
        values: list[Any] = numpy_helper.to_array(self.weights[node.input[place]]).ravel().tolist()
        return values

    # ------------------------------------------------------------------ operators with weights

    def _conv(self, index: int, node: onnx.NodeProto) -> bool:
        weight = self.weights.get(node.input[1])
        flow = self.flows.get(node.input[0])
        if weight is None or (flow is not None and flow.axis != 1):
            return False
        groups = _attribute(node, "group", 1)
        out, per_group = int(weight.dims[0]), int(weight.dims[1])
        if groups == 1:
            if not self._take(index, 1, 1, flow):
                return False
            units = self._make(index, node, 1, 0, out)
        elif per_group == 1 and flow is not None and len(flow.units) == groups and out % groups == 0:  # depthwise
            units = np.repeat(flow.units, out // groups)
            if not self._use(index, 1, 0, units):
                return False
            if not self.may_make(node):
                self.found.freeze(units, "out of scope")
            self.found.groups.append((index, flow.units))
        else:
            return False
        if len(node.input) > 2 and node.input[2] and not self._use(index, 2, 0, units):
            self.found.freeze(units, "computed bias")
        self.flows[node.output[0]] = Flow(1, units)
        return True

    def _convtranspose(self, index: int, node: onnx.NodeProto) -> bool:
        weight = self.weights.get(node.input[1])
        flow = self.flows.get(node.input[0])
        if weight is None or (flow is not None and flow.axis != 1) or _attribute(node, "group", 1) != 1:
            return False
        if not self._take(index, 1, 0, flow):
            return False
        units = self._make(index, node, 1, 1, int(weight.dims[1]))
        if len(node.input) > 2 and node.input[2] and not self._use(index, 2, 0, units):
            self.found.freeze(units, "computed bias")
        self.flows[node.output[0]] = Flow(1, units)
        return True

    def _gemm(self, index: int, node: onnx.NodeProto) -> bool:
        weight = self.weights.get(node.input[1])
        flow = self.flows.get(node.input[0])
        if weight is None or _attribute(node, "transA", 0) or (flow is not None and flow.axis != 1):
            return False
        taking, making = (1, 0) if _attribute(node, "transB", 0) else (0, 1)
        if not self._take(index, 1, taking, flow):
            return False
        units = self._make(index, node, 1, making, int(weight.dims[making]))
        if len(node.input) > 2 and node.input[2]:
            bias = self.weights.get(node.input[2])
            if bias is not None and (not bias.dims or bias.dims[-1] == 1):
                self.accounted.add((index, 2))
            elif bias is None or not self._use(index, 2, len(bias.dims) - 1, units):
                self.found.freeze(units, "computed bias")
                if node.input[2] in self.flows:
                    self.found.freeze(self.flows[node.input[2]].units, "computed bias")
        self.flows[node.output[0]] = Flow(1, units)
        return True

    def _matmul(self, index: int, node: onnx.NodeProto) -> bool:
        weight = self.weights.get(node.input[1])
        flow, rank = self.flows.get(node.input[0]), self._rank(node.input[0])
        if weight is None or len(weight.dims) != 2 or rank is None or rank < 2:
            return False
        if flow is not None and flow.axis != rank - 1:
            self.found.freeze(flow.units, "MatMul over another axis")
            flow = None
        if not self._take(index, 1, 0, flow):
            return False
        self.flows[node.output[0]] = Flow(rank - 1, self._make(index, node, 1, 1, int(weight.dims[1])))
        return True

    def _batchnormalization(self, index: int, node: onnx.NodeProto) -> bool:
        from onnx import numpy_helper

        flow = self.flows.get(node.input[0])
        if flow is None:
            return True
        if flow.axis != 1 or _attribute(node, "training_mode", 0) or not all(self._use(index, place, 0, flow.units) for place in (1, 2, 3, 4)):
            return False
        producer = self.made_by.get(node.input[0])
        if producer is not None and self.users[node.input[0]] == 1:
            scale, variance = (numpy_helper.to_array(self.weights[node.input[p]]).astype(np.float64) for p in (1, 4))
            producer.factor = np.abs(scale) / np.sqrt(np.maximum(variance, 0) + _attribute(node, "epsilon", 1e-5))
        return self._hand_on(node, flow)

    def _instancenormalization(self, index: int, node: onnx.NodeProto) -> bool:
        flow = self.flows.get(node.input[0])
        if flow is None:
            return True
        return flow.axis == 1 and all(self._use(index, place, 0, flow.units) for place in (1, 2)) and self._hand_on(node, flow)

    # ------------------------------------------------------------------ operators without

    def _hand_on(self, node: onnx.NodeProto, flow: Flow) -> bool:
        self.flows[node.output[0]] = flow
        return True

    def _placewise(self, index: int, node: onnx.NodeProto) -> bool:
        flow = self.flows.get(node.input[0])
        if flow is None:
            return not any(name in self.flows for name in node.input)
        if any(name in self.flows for name in node.input[1:]) or any(self.takers[name] for name in node.output[1:]):
            return False
        return self._hand_on(node, flow)

    def _broadcast(self, index: int, node: onnx.NodeProto) -> bool:
        flows = [self.flows[name] for name in node.input if name in self.flows]
        if not flows:
            return True
        ranks = [self._rank(name) for name in node.input]
        if any(r is None for r in ranks):
            return False
        rank = max(r for r in ranks if r is not None)
        # PRelu stretches its slope only; ranks align from the right like everywhere.
        axes = {self.flows[name].axis + rank - (r or 0) for name, r in zip(node.input, ranks, strict=True) if name in self.flows}
        if len(axes) != 1:
            return False
        axis = axes.pop()
        units = max((f.units for f in flows), key=len)
        for flow in flows:
            self.found.join(units, flow.units)
        for place, (name, r) in enumerate(zip(node.input, ranks, strict=True)):
            own = axis - (rank - (r or 0))
            if name in self.flows:
                continue
            if own < 0 or self.shapes[name][own] == 1:
                if name in self.weights:
                    self.accounted.add((index, place))
            elif not self._use(index, place, own, units):
                return False
        return self._hand_on(node, Flow(axis, units))

    def _pool(self, index: int, node: onnx.NodeProto) -> bool:
        flow = self.flows.get(node.input[0])
        if flow is None:
            return True
        if flow.axis != 1 or (len(node.output) > 1 and self.takers[node.output[1]]):
            return False
        return self._hand_on(node, flow)

    def _reduce(self, index: int, node: onnx.NodeProto) -> bool:
        flow, rank = self.flows.get(node.input[0]), self._rank(node.input[0])
        if flow is None:
            return True
        given = _attribute(node, "axes", None)
        axes = self._axes(given if given is not None else self._constant(node, 1), rank)
        if axes is None or flow.axis in axes:
            return False
        shift = 0 if _attribute(node, "keepdims", 1) else sum(a < flow.axis for a in axes)
        return self._hand_on(node, Flow(flow.axis - shift, flow.units))

    def _axes(self, axes: Iterable[int] | None, rank: int | None) -> list[int] | None:
        """Axes counted from the front; None when they, or the rank, are not known."""
        return None if axes is None or rank is None else [int(a) % rank for a in axes]

    def _squeeze(self, index: int, node: onnx.NodeProto) -> bool:
        flow, rank = self.flows.get(node.input[0]), self._rank(node.input[0])
        if flow is None:
            return True
        given = _attribute(node, "axes", None)
        axes = self._axes(given if given is not None else self._constant(node, 1), rank)
        if axes is None or flow.axis in axes:
            return False
        return self._hand_on(node, Flow(flow.axis - sum(a < flow.axis for a in axes), flow.units))

    def _unsqueeze(self, index: int, node: onnx.NodeProto) -> bool:
        flow, rank = self.flows.get(node.input[0]), self._rank(node.input[0])
        if flow is None:
            return True
        given = _attribute(node, "axes", None)
        given = given if given is not None else self._constant(node, 1)
        if given is None or rank is None:
            return False
        axis = flow.axis
        for added in sorted(int(a) % (rank + len(given)) for a in given):
            axis += added <= axis
        return self._hand_on(node, Flow(axis, flow.units))

    def _transpose(self, index: int, node: onnx.NodeProto) -> bool:
        flow, rank = self.flows.get(node.input[0]), self._rank(node.input[0])
        if flow is None:
            return True
        perm = _attribute(node, "perm", None) or (list(range(rank))[::-1] if rank is not None else None)
        return perm is not None and self._hand_on(node, Flow(list(perm).index(flow.axis), flow.units))

    def _flatten(self, index: int, node: onnx.NodeProto) -> bool:
        flow = self.flows.get(node.input[0])
        if flow is None:
            return True
        inner = self.shapes.get(node.input[0], ())[flow.axis + 1 :]
        if _attribute(node, "axis", 1) != 1 or flow.axis != 1 or node.input[0] not in self.shapes or not all(isinstance(d, int) for d in inner):
            return False
        return self._hand_on(node, Flow(1, np.repeat(flow.units, int(np.prod([int(d or 0) for d in inner])))))

    def _reshape(self, index: int, node: onnx.NodeProto) -> bool:
        """The reshape that is a flattening: (batch, channels, rest) to (batch, channels x rest)."""
        flow, shape = self.flows.get(node.input[0]), self._constant(node, 1)
        if flow is None:
            return True
        given = self.shapes.get(node.input[0])
        if given is None or shape is None or flow.axis != 1 or len(shape) != 2 or _attribute(node, "allowzero", 0):
            return False
        inner = given[2:]
        same_first = shape[0] in (0, given[0]) or (shape[0] == -1 and shape[1] > 0)
        if not same_first or not all(isinstance(d, int) for d in inner):
            return False
        units = np.repeat(flow.units, int(np.prod([int(d or 0) for d in inner])))
        if shape[1] not in (-1, len(units), 0) or (shape[1] == 0 and inner):
            return False
        if shape[1] > 0:
            self.found.reshapes.append((index, 1, units))
        return self._hand_on(node, Flow(1, units))

    def _concat(self, index: int, node: onnx.NodeProto) -> bool:
        flows = [self.flows.get(name) for name in node.input]
        if not any(flows):
            return True
        rank = self._rank(node.output[0])
        if rank is None:
            rank = next((r for r in map(self._rank, node.input) if r is not None), None)
        axes = {f.axis for f in flows if f is not None}
        if rank is None or len(axes) != 1:
            return False
        axis = axes.pop()
        if _attribute(node, "axis", 0) % rank != axis:  # joined along another axis: all must have the same channels
            first = flows[0]
            if first is None or any(f is None for f in flows):
                return False
            for flow in flows[1:]:
                assert flow is not None
                self.found.join(first.units, flow.units)
            return self._hand_on(node, first)
        parts: list[Units] = []
        for name, flow in zip(node.input, flows, strict=True):
            if flow is None:
                size = self.shapes[name][axis] if name in self.shapes else None
                if not isinstance(size, int):
                    return False
                fixed = self.found.new(size)
                self.found.freeze(fixed, "Concat with a value that makes no channels")
                parts.append(fixed)
            else:
                parts.append(flow.units)
        return self._hand_on(node, Flow(axis, np.concatenate(parts)))

    def _resize(self, index: int, node: onnx.NodeProto) -> bool:
        flow = self.flows.get(node.input[0])
        if flow is None:
            return True
        scales = _attribute(node, "scales", None) or self._constant(node, 2 if self.opset >= 11 and node.op_type == "Resize" else 1)
        if (len(node.input) > 3 and node.input[3]) or _attribute(node, "axes", None) is not None or scales is None or len(scales) <= flow.axis:
            return False
        return scales[flow.axis] == 1 and self._hand_on(node, flow)

    _upsample = _resize

    def _pad(self, index: int, node: onnx.NodeProto) -> bool:
        flow = self.flows.get(node.input[0])
        if flow is None:
            return True
        pads = _attribute(node, "pads", None) or self._constant(node, 1)
        if pads is None or (len(node.input) > 3 and node.input[3]):
            return False
        return pads[flow.axis] == 0 == pads[flow.axis + len(pads) // 2] and self._hand_on(node, flow)

    def _softmax(self, index: int, node: onnx.NodeProto) -> bool:
        flow, rank = self.flows.get(node.input[0]), self._rank(node.input[0])
        if flow is None:
            return True
        if self.opset < 13 or rank is None or _attribute(node, "axis", -1) % rank == flow.axis:
            return False
        return self._hand_on(node, flow)

    def _shape(self, index: int, node: onnx.NodeProto) -> bool:
        """Fine where only sizes of other axes are taken from it."""
        flow = self.flows.get(node.input[0])
        if flow is None:
            return True
        if len(node.attribute):
            return False
        for taker in self.takers[node.output[0]]:
            rank = self._rank(node.input[0])
            taken = self._axes(self._constant(taker, 1), rank) if taker.op_type == "Gather" else None
            if taken is None or flow.axis in taken:
                return False
        return node.output[0] not in {v.name for v in self.graph.output}


_NAMED = frozenset({
    "BatchNormalization", "Concat", "Conv", "ConvTranspose", "Flatten", "Gemm", "InstanceNormalization", "MatMul", "Pad", "Reshape", "Resize",
    "Shape", "Softmax", "Squeeze", "Transpose", "Unsqueeze", "Upsample",
})  # fmt: skip


def _attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    from onnx import helper

    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def remove_channels(proto: onnx.ModelProto, channels: Channels, gone: frozenset[int]) -> None:
    """Take the units with these roots out of every weight, group count and reshape. Changes the model; shapes of inner values are dropped."""
    from onnx import helper, numpy_helper

    def kept(units: Units) -> NDArray[np.bool_]:
        return np.array([channels.root(int(u)) not in gone for u in units], dtype=bool)

    by_name: dict[str, list[tuple[int, Units]]] = defaultdict(list)
    for (name, axis), units in channels.axes.items():
        by_name[name].append((axis, units))
    for tensor in proto.graph.initializer:
        cuts: Sequence[tuple[int, Units]] = by_name.get(tensor.name, ())
        masks = [(axis, kept(units)) for axis, units in cuts]
        if all(mask.all() for _, mask in masks):
            continue
        array = numpy_helper.to_array(tensor)
        for axis, mask in masks:
            array = np.compress(mask, array, axis=axis)
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), tensor.name))
    taken = {name for node in proto.graph.node for name in (*node.input, *node.output)} | {t.name for t in proto.graph.initializer}
    for index, units in channels.groups:
        node = proto.graph.node[index]
        for attribute in node.attribute:
            if attribute.name == "group":
                attribute.CopyFrom(helper.make_attribute("group", int(kept(units).sum())))
    for number, (index, place, units) in enumerate(channels.reshapes):
        node = proto.graph.node[index]
        shape = next(numpy_helper.to_array(t).copy() for t in proto.graph.initializer if t.name == node.input[1])
        shape[place] = int(kept(units).sum())
        name = f"pruned_shape_{number}"
        while name in taken:
            name += "_"
        taken.add(name)
        proto.graph.initializer.append(numpy_helper.from_array(shape, name))
        node.input[1] = name
    del proto.graph.value_info[:]


def components(channels: Channels) -> list[Mapping[int, list[tuple[Producer, int]]]]:
    """Sets of layers that decide together: for each, root of every unit that its producers make to (producer, place) pairs."""
    owner: dict[int, int] = {}
    merged = list(range(len(channels.producers)))

    def top(number: int) -> int:
        while merged[number] != number:
            number = merged[number]
        return number

    places: list[dict[int, list[tuple[Producer, int]]]] = []
    for number, producer in enumerate(channels.producers):
        own: dict[int, list[tuple[Producer, int]]] = defaultdict(list)
        for place, unit in enumerate(channels.roots(producer.units)):
            own[int(unit)].append((producer, place))
            if int(unit) in owner:
                a, b = top(owner[int(unit)]), top(number)
                merged[max(a, b)] = min(a, b)
            owner[int(unit)] = number
        places.append(own)
    joined: dict[int, dict[int, list[tuple[Producer, int]]]] = defaultdict(lambda: defaultdict(list))
    for number, own in enumerate(places):
        for unit, pairs in own.items():
            joined[top(number)][unit].extend(pairs)
    return [joined[number] for number in sorted(joined)]
