"""What share of a model a pass changed: operators, bytes of weights and time, those inside of bodies and of the model's own functions included."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from autotune.data import feeds, plan_feeding
from autotune.model import ONNXModelHandler
from autotune.passes.onnx_graph import DEFAULT_DOMAINS, bodies_of, graphs_of, quiet, weights_aside

if TYPE_CHECKING:
    import onnx

Weight = tuple[str, int]  # digest of type, shape and values; bytes
TIMED_RUNS = 3  # after a first one


def coverage_of(before: ONNXModelHandler | None, after: ONNXModelHandler, times: Mapping[str, float] | None = None) -> dict[str, int]:
    """Count operators and bytes of weights of the model before a pass, and how many of them are not in the model after it.

    `times` (see `operator_times`) adds `microseconds`: those that the changed operators took of a run before.

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
        operators_after, weights_after = operators, weights
    else:
        operators_after, weights_after = _contents(after.load())
    changed = operators - operators_after
    found = {
        "operators": changed.total(), "of_operators": operators.total(),
        "weight_bytes": _bytes(weights - weights_after), "of_weight_bytes": _bytes(weights),
    }  # fmt: skip
    if times:
        found |= {"microseconds": _microseconds(times, changed, operators), "of_microseconds": _microseconds(times, operators, operators)}
    return found


def operator_times(model: ONNXModelHandler, arrays: Mapping[str, NDArray[Any]]) -> dict[str, float]:
    """Microseconds of a run that a model's operators take, by what `coverage_of` tells them apart by; equal ones are added up.

    By ONNX Runtime's profile of a few runs on rows of `arrays`, without its graph optimizations, which merge operators: it shows where time goes,
    and is no measurement. What runs in the model's own functions is not told apart, and left out. Raises what the runtime raises.
    """
    import onnxruntime as ort

    proto = model.load()
    of_nodes: list[tuple[onnx.NodeProto, str]] = []
    _contents(proto, of_nodes)
    kinds = {}
    for number, (node, kind) in enumerate(of_nodes):
        node.name = f"{number}:{node.op_type}"  # names may be missing, or repeat themselves
        if not any(True for _ in bodies_of(node)):  # the time of a body is that of its nodes
            kinds[node.name] = kind
    given = [feed for feed, _ in feeds(arrays, model.io, plan_feeding(arrays, model.io), range(1))]
    with tempfile.TemporaryDirectory(prefix="autotune-profile-") as folder:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4
        options.enable_profiling, options.profile_file_prefix = True, str(Path(folder, "profile"))
        session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        for _ in range(TIMED_RUNS + 1):
            session.run(None, dict(given[0]))
        events = json.loads(Path(session.end_profiling()).read_text())
    runs: dict[str, list[float]] = {}
    for event in events:
        name = str(event.get("name", "")).removesuffix("_kernel_time")
        if event.get("cat") == "Node" and name in kinds and name != event["name"]:
            runs.setdefault(name, []).append(float(event["dur"]))
    found: Counter[str] = Counter()
    for name, durations in runs.items():  # a node of a Loop runs often: all of its runs but those of the first run of the model
        counted = durations[len(durations) // (TIMED_RUNS + 1) :]
        found[kinds[name]] += sum(counted) / TIMED_RUNS  # type: ignore[assignment] # Counter counts in any unit
    return dict(found)


def _microseconds(times: Mapping[str, float], some: Counter[str], of_all: Counter[str]) -> int:
    """What some of the operators take, where the time is known for equal ones together."""
    return round(sum(times.get(kind, 0.0) * count / of_all[kind] for kind, count in some.items()))


def _bytes(weights: Counter[Weight]) -> int:
    return sum(size * count for (_, size), count in weights.items())


def _contents(proto: onnx.ModelProto, of_nodes: list[tuple[onnx.NodeProto, str]] | None = None) -> tuple[Counter[str], Counter[Weight]]:
    """Operators by what they are and work on, and weights by what they hold. A Constant is a weight, and no operator.

    `of_nodes` is filled with the nodes behind the operators, but for those of functions.
    """
    weights: Counter[Weight] = Counter()
    operators: Counter[str] = Counter()
    narrow = _narrow_values(proto)

    def look(nodes: Any, initializers: Any, outside: Mapping[str, str], in_function: bool = False) -> None:
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
                kind = _kind(node, known)
                operators[kind] += 1
                if of_nodes is not None and not in_function:
                    of_nodes.append((node, kind))
            for body in bodies_of(node):
                look(body.node, body.initializer, known, in_function)

    given = {v.name: "narrow" for v in proto.graph.input if v.name in narrow}
    look(proto.graph.node, proto.graph.initializer, given)
    for function in proto.functions:
        look(function.node, (), {}, in_function=True)
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
