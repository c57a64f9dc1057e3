"""What share of a model a pass changed: operators and bytes of weights, those inside of bodies and of the model's own functions included."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from autotune.model import ONNXModelHandler
from autotune.passes.onnx_graph import DEFAULT_DOMAINS, bodies_of, graphs_of, quiet, weights_aside

if TYPE_CHECKING:
    import onnx

Weight = tuple[str, int]  # digest of type, shape and values; bytes


def coverage_of(before: ONNXModelHandler | None, after: ONNXModelHandler) -> dict[str, int]:
    """Count operators and bytes of weights of the model before a pass, and how many of them are not in the model after it.

    An operator is there still where one with the same attributes works on the same constants, and on values of the same kind: float16 and
    bfloat16 are other kinds than the rest, and so is what comes out of a DequantizeLinear. Whatever became of the others, they were changed:
    quantized, fused, folded or dropped. Without a model before (a conversion), all that there is was made anew.
    """
    if before is None:
        operators, weights = _contents(after.load())
        total, size = operators.total(), _bytes(weights)
        return {"operators": total, "of_operators": total, "weight_bytes": size, "of_weight_bytes": size}
    operators, weights = _contents(before.load())
    if before.digest == after.digest:
        return {"operators": 0, "of_operators": operators.total(), "weight_bytes": 0, "of_weight_bytes": _bytes(weights)}
    operators_after, weights_after = _contents(after.load())
    return {
        "operators": (operators - operators_after).total(), "of_operators": operators.total(),
        "weight_bytes": _bytes(weights - weights_after), "of_weight_bytes": _bytes(weights),
    }  # fmt: skip


def _bytes(weights: Counter[Weight]) -> int:
    return sum(size * count for (_, size), count in weights.items())


def _contents(proto: onnx.ModelProto) -> tuple[Counter[str], Counter[Weight]]:
    """Operators by what they are and work on, and weights by what they hold. A Constant is a weight, and no operator."""
    weights: Counter[Weight] = Counter()
    operators: Counter[str] = Counter()
    narrow = _narrow_values(proto)

    def look(nodes: Any, initializers: Any, outside: Mapping[str, str]) -> None:
        known = dict(outside)
        for name, tensor in (*((t.name, t) for t in initializers), *_constants(nodes)):
            weight = _weight(tensor)
            weights[weight] += 1
            known[name] = weight[0]
        for node in nodes:
            if node.op_type == "DequantizeLinear":
                known[node.output[0]] = "dequantized"
            elif node.op_type != "Constant":
                known.update(dict.fromkeys(narrow.intersection(node.output), "narrow"))
        for node in nodes:
            if node.op_type != "Constant" or node.domain not in DEFAULT_DOMAINS:
                operators[_kind(node, known)] += 1
            for body in bodies_of(node):
                look(body.node, body.initializer, known)

    given = {v.name: "narrow" for v in proto.graph.input if v.name in narrow}
    look(proto.graph.node, proto.graph.initializer, given)
    for function in proto.functions:
        look(function.node, (), {})
    return operators, weights


def _kind(node: onnx.NodeProto, known: Mapping[str, str]) -> str:
    """What a node is, whatever it and its values are called."""
    plain = sorted(a.SerializeToString(deterministic=True) for a in node.attribute if not a.HasField("g") and not a.graphs)
    facts = [node.domain if node.domain not in DEFAULT_DOMAINS else "", node.op_type, *(known.get(n, "value" if n else "") for n in node.input)]
    facts += [known.get(n, "") for n in node.output]
    return hashlib.sha256("\n".join(facts).encode() + b"\n".join(plain)).hexdigest()


def _constants(nodes: Any) -> Iterator[tuple[str, onnx.TensorProto]]:
    for node in nodes:
        if node.op_type == "Constant" and node.domain in DEFAULT_DOMAINS:
            yield from ((node.output[0], a.t) for a in node.attribute if a.name == "value")


def _weight(tensor: onnx.TensorProto) -> Weight:
    from onnx import TensorProto, numpy_helper

    if tensor.data_type == TensorProto.STRING:
        content = b"\0".join(tensor.string_data)
    else:
        content = tensor.raw_data or numpy_helper.to_array(tensor).tobytes()  # a tool that saves a model may store equal numbers in another field
    facts = f"{tensor.data_type} {list(tensor.dims)}".encode()
    return hashlib.sha256(facts + hashlib.sha256(content).digest()).hexdigest(), len(content)


def _narrow_values(proto: onnx.ModelProto) -> set[str]:
    """Names of values in float16 or bfloat16, as far as types are written or can be inferred."""
    import onnx

    narrow = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    small, _ = weights_aside(proto)
    try:
        with quiet():
            inferred = onnx.shape_inference.infer_shapes(small)
    except Exception:  # then what is written has to do
        inferred = small
    values = (v for g in graphs_of(inferred.graph) for v in (*g.input, *g.value_info, *g.output))
    return {v.name for v in values if v.type.tensor_type.elem_type in narrow}
