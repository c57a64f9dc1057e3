"""Which nodes are quantized together, and how much each such group harms the output when it alone is quantized."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autotune.passes.onnx_graph import quiet, weights_aside
from autotune.passes.quantization_scales import SUFFIX
from autotune.session import SessionSettings, session_options

if TYPE_CHECKING:
    import onnx

# These only move values about: they are quantized where what they move is, and lose nothing by it.
MOVES = frozenset({
    "Flatten", "GatherElements", "MaxPool", "Pad", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze",
})  # fmt: skip
PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose"})
FOLLOWERS = frozenset({"Relu", "Clip", "LeakyRelu"})  # the runtime makes one kernel of a product and these
CUTS = frozenset({"Clip", "Relu"})  # a scale that begins and ends where these do makes them needless
BROKEN = 1e30  # harm of a group whose outputs are not finite, or can't be had


def groups_of(proto: onnx.ModelProto, operators: Iterable[str], excluded: frozenset[str]) -> list[tuple[str, ...]]:
    """Names of the nodes that are quantized or left together, in the order of the graph.

    A product with what the runtime fuses behind it: a bias added by an Add, an activation; any other operator for itself.
    """
    chosen = set(operators)
    constants = {t.name for t in proto.graph.initializer}
    uses: dict[str, list[onnx.NodeProto]] = {}
    for node in proto.graph.node:
        for name in node.input:
            uses.setdefault(name, []).append(node)
    outputs = {v.name for v in proto.graph.output}
    taken: set[str] = set()
    groups = []
    for node in proto.graph.node:
        moves = node.op_type in MOVES or (node.op_type == "Gather" and not set(node.input[:1]) & constants)
        if node.op_type not in chosen or node.name in excluded or node.name in taken or moves:
            continue
        group, last = [node.name], node
        while node.op_type in PRODUCTS and last.output[0] not in outputs and len(uses.get(last.output[0], [])) == 1:
            follower = uses[last.output[0]][0]
            bias = follower.op_type == "Add" and len(group) == 1 and any(name in constants for name in follower.input)
            if not (bias or follower.op_type in FOLLOWERS) or follower.name in excluded or follower.op_type not in chosen:
                break
            group.append(follower.name)
            last = follower
        taken.update(group)
        groups.append(tuple(group))
    return groups


def lone_cuts(proto: onnx.ModelProto, operators: Iterable[str], excluded: Iterable[str], floats: Iterable[str]) -> set[str]:
    """Names of the Relu and Clip nodes to leave in float, where the quantizer is given both types beside the chosen `operators`.

    Behind a quantized product that nobody else takes, one belongs to it, chosen or not: else the product's scale would have to hold what is cut off,
    and the cut would be an operator of its own. `floats` are operators whose results are not quantized.
    """
    chosen, out = set(operators), set(excluded)
    products = (PRODUCTS & chosen) - set(floats)
    makers = {name: node for node in proto.graph.node for name in node.output}
    uses = Counter(name for node in proto.graph.node for name in node.input)
    outputs = {v.name for v in proto.graph.output}
    found = set()
    for node in proto.graph.node:
        if node.op_type not in CUTS - chosen:
            continue
        taken = node.input[0]
        maker = makers.get(taken)
        belongs = maker is not None and maker.op_type in products and maker.name not in out and uses[taken] == 1 and taken not in outputs
        if not belongs:
            found.add(node.name)
    return found


def by_harm(
    proto: onnx.ModelProto, groups: Sequence[tuple[str, ...]], quantized: onnx.ModelProto, feeds: Sequence[Mapping[str, NDArray[Any]]]
) -> list[dict[str, Any]]:
    """Order groups by the squared error of the outputs, as a share of their square, with only that group quantized; largest first.

    `quantized` is the whole model in QDQ form, whose scales are taken. The graph runs unoptimized in one thread, so that the order is the
    same on every CPU; ties keep the order of the graph. Weights are fed, so that a session for each group costs no copy of the model.
    """
    known = _Scales.of(quantized)
    skeleton, large = weights_aside(proto)
    arrays = {name: numpy_array(tensor) for name, tensor in large.items()}
    wanted = _outputs(skeleton, feeds, arrays)
    found: list[dict[str, Any]] = []
    for group in groups:
        changed, more = known.applied(skeleton, arrays, set(group))
        try:
            harm = _difference(wanted, _outputs(changed, feeds, {**arrays, **more}))
        except Exception:  # the runtime does not say beforehand what it can't do; such a group is the first to go
            harm = BROKEN
        found.append({"nodes": list(group), "harm": float(f"{harm:.6g}")})
    return sorted(found, key=lambda entry: -entry["harm"])


def rows_for(groups: int) -> int:
    """How many examples to run for each group: 16 where there are few groups, no less than 4."""
    return max(4, min(16, 200 // max(groups, 1)))


def numpy_array(tensor: onnx.TensorProto) -> NDArray[Any]:
    """The values of a tensor."""
    from onnx import numpy_helper

    return numpy_helper.to_array(tensor)


@dataclass(frozen=True)
class _Scales:
    """What quantization does to each value of a graph: scale and offset of activations, and initializers as they come back from it."""

    activations: Mapping[str, tuple[onnx.TensorProto, onnx.TensorProto]]
    constants: Mapping[str, NDArray[Any]]

    @classmethod
    def of(cls, quantized: onnx.ModelProto) -> _Scales:
        held = {t.name: t for t in quantized.graph.initializer}
        activations = {}
        constants: dict[str, NDArray[Any]] = {}
        for node in quantized.graph.node:
            if node.op_type == "QuantizeLinear":
                activations[node.input[0].removesuffix("_QuantizeLinear_Input")] = (held[node.input[1]], held[node.input[2]])
            elif node.op_type == "DequantizeLinear" and node.input[0] in held:
                values, scale, zero = (numpy_array(held[n]).astype(np.float32) for n in node.input[:3])
                if scale.size > 1:
                    axis = next((a.i for a in node.attribute if a.name == "axis"), 1) % values.ndim
                    scale, zero = (v.reshape([-1 if i == axis else 1 for i in range(values.ndim)]) for v in (scale, zero))
                constants[node.input[0].removesuffix(SUFFIX)] = np.asarray((values - zero) * scale, np.float32).reshape(values.shape)
        return cls(activations, constants)

    def applied(
        self, skeleton: onnx.ModelProto, arrays: Mapping[str, NDArray[Any]], group: set[str]
    ) -> tuple[onnx.ModelProto, dict[str, NDArray[Any]]]:
        """A copy in which the nodes of a group take and give quantized values, and the weights to feed for it."""
        from onnx import helper, numpy_helper

        changed = type(skeleton)()
        changed.CopyFrom(skeleton)
        graph, more = changed.graph, {}
        nodes = [type(n).FromString(n.SerializeToString()) for n in graph.node]
        small = {t.name for t in graph.initializer}
        made: set[str] = set()
        del graph.node[:]

        def pair(raw: str, result: str, value: str) -> None:
            scale, zero = (type(t).FromString(t.SerializeToString()) for t in self.activations[value])
            scale.name, zero.name = f"{result}/scale", f"{result}/zero"
            graph.initializer.extend([scale, zero])
            graph.node.append(helper.make_node("QuantizeLinear", [raw, scale.name, zero.name], [f"{result}/integers"], f"{result}/quantize"))
            graph.node.append(helper.make_node("DequantizeLinear", [f"{result}/integers", scale.name, zero.name], [result], f"{result}/back"))

        for node in nodes:
            if node.name not in group:
                graph.node.append(node)
                continue
            for index, name in enumerate(node.input):
                other = f"{name}/seen by the group"
                if name in self.constants and name in small | set(arrays):
                    if name in arrays:
                        more[other] = self.constants[name].reshape(arrays[name].shape)
                        if other not in made:
                            graph.input.append(helper.make_tensor_value_info(other, 1, list(more[other].shape)))
                    elif other not in made:
                        graph.initializer.append(numpy_helper.from_array(self.constants[name], other))
                elif name in self.activations and name not in small and name not in arrays:
                    if other not in made:
                        pair(name, other, name)
                else:
                    continue
                made.add(other)
                node.input[index] = other
            graph.node.append(node)
            for index, name in enumerate(node.output):
                if name in self.activations:
                    node.output[index] = f"{name}/raw"
                    graph.node[-1].CopyFrom(node)
                    pair(f"{name}/raw", name, name)
        return changed, more


def _outputs(proto: onnx.ModelProto, feeds: Sequence[Mapping[str, NDArray[Any]]], weights: Mapping[str, NDArray[Any]]) -> list[list[Any]]:
    """Outputs on each feed, unoptimized, in one thread."""
    import onnxruntime as ort

    options = session_options(SessionSettings(graph_optimization_level="disable", intra_op_num_threads=1))
    options.log_severity_level = 4
    with quiet():
        session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        taken = {i.name for i in session.get_inputs()}
        return [session.run(None, {n: a for n, a in {**weights, **feed}.items() if n in taken}) for feed in feeds]


def _difference(wanted: Sequence[Sequence[Any]], got: Sequence[Sequence[Any]]) -> float:
    """Sum over the outputs of their squared error as a share of their square; whole numbers count by the share that differs."""
    total = 0.0
    for outputs in zip(zip(*wanted, strict=True), zip(*got, strict=True), strict=True):
        error = size = 0.0
        for a, b in zip(*outputs, strict=True):
            one, other = np.asarray(a), np.asarray(b)
            if one.shape != other.shape:
                return BROKEN
            if one.dtype.kind in "fV":
                x, y = one.astype(np.float64), other.astype(np.float64)
                kept = np.isfinite(x)
                if not np.isfinite(y[kept]).all():
                    return BROKEN
                error, size = error + float(((x - y)[kept] ** 2).sum()), size + float((x[kept] ** 2).sum())
            else:
                error, size = error + float((one != other).sum()), size + float(one.size)
        total += error / max(size, 1e-30)
    return min(total, BROKEN)


def content_of(proto: onnx.ModelProto) -> str:
    """SHA-256 of the graph and its weights, part by part, since one message ends at 2 GiB."""
    found = hashlib.sha256()
    for part in (*proto.opset_import, *proto.graph.input, *proto.graph.output, *proto.graph.node, *proto.functions, *proto.graph.initializer):
        found.update(hashlib.sha256(part.SerializeToString(deterministic=True)).digest())
    return found.hexdigest()


def content_of_arrays(arrays: Iterable[Mapping[str, Any]]) -> str:
    """SHA-256 of names, types, shapes and values."""
    found = hashlib.sha256()
    for feed in arrays:
        for name, value in sorted(feed.items()):
            array = np.ascontiguousarray(value)
            raw = array.tobytes() if array.dtype.kind != "O" else repr(array.tolist()).encode()
            found.update(f"{name} {array.dtype} {array.shape}".encode() + hashlib.sha256(raw).digest())
    return found.hexdigest()
