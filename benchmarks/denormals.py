"""Denormal numbers: so near to 0 that many CPUs take a hundred times as long for them. Pruned and decayed weights hold some; so do
the tails of softmax and sigmoid. ONNX Runtime computes with them unless told to take them for 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autotune.data import Arrays
from autotune.model import ONNXModelHandler

if TYPE_CHECKING:
    import onnx

FLUSH = "session.set_denormal_as_zero"
MOST_BYTES = 64_000_000  # a larger model is not looked into: its copy with every output would crowd the memory
TENSORS_A_RUN = 100
WORTH_A_HINT = 0.001  # share of one tensor's values


def look_for_denormals(model: ONNXModelHandler, feeds: Sequence[Arrays]) -> dict[str, Any]:
    """Count denormal float32 values among a model's weights and among what its nodes give for some feeds.

    Returns `looked` (False with `why` for a model that can't be looked into), counts with `_of` their totals, `worst` (the tensor with the
    largest share) and `hint`, words that are empty where there is nothing to gain.
    """
    if model.size_bytes > MOST_BYTES:
        return {"looked": False, "why": f"the model is larger than {MOST_BYTES // 10**6} MB", "hint": ""}
    try:
        weights, activations = _shares(_weights(model)), _shares(_activations(model, feeds))
    except Exception as error:  # a look is a courtesy: whatever goes wrong in it, the model itself has run
        return {"looked": False, "why": f"{type(error).__name__}: {error}"[:200], "hint": ""}
    both = {**weights, **activations}
    worst = max(both, key=lambda name: both[name][0] / both[name][1], default="")
    share = both[worst][0] / both[worst][1] if worst else 0.0
    flushed = model.session.config_entries.get(FLUSH) == "1"
    hint = ""
    if share > WORTH_A_HINT and not flushed:
        hint = f"{share:.1%} of the values of {worst!r} are denormal, which is slow on many CPUs; try the session's config entry {FLUSH}: '1'"
    return {
        "looked": True, "weights": sum(n for n, _ in weights.values()), "weights_of": sum(n for _, n in weights.values()),
        "activations": sum(n for n, _ in activations.values()), "activations_of": sum(n for _, n in activations.values()),
        "worst": {"tensor": worst, "share": share} if share else None, "hint": hint,
    }  # fmt: skip


def denormal(values: NDArray[np.float32]) -> int:
    """Count values that are neither 0 nor as large as the smallest normal number."""
    size = np.abs(values)
    return int(((size > 0) & (size < np.finfo(np.float32).tiny)).sum())


def _shares(tensors: Iterator[tuple[str, object]]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for name, values in tensors:
        if isinstance(values, np.ndarray) and values.dtype == np.float32 and values.size:
            before = found.get(name, (0, 0))
            found[name] = before[0] + denormal(values), before[1] + values.size
    return found


def _weights(model: ONNXModelHandler) -> Iterator[tuple[str, object]]:
    import onnx

    proto = onnx.load(str(model.path))
    for tensor in proto.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            yield tensor.name, onnx.numpy_helper.to_array(tensor)


def _activations(model: ONNXModelHandler, feeds: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, object]]:
    """What each node of the main graph gives, as the runtime computes it without its own changes to the graph."""
    import onnx
    import onnxruntime as ort

    proto = onnx.load(str(model.path))
    names = _node_outputs(proto.graph)
    known = {output.name for output in proto.graph.output}
    # The type is left out: ONNX Runtime infers it.
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for feed in feeds:
        for start in range(0, len(names), TENSORS_A_RUN):
            part = names[start : start + TENSORS_A_RUN]
            yield from zip(part, session.run(part, feed), strict=True)


def _node_outputs(graph: onnx.GraphProto) -> list[str]:
    return [name for node in graph.node for name in node.output if name]
