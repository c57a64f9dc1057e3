"""Small ONNX graphs for the tests of the passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from autotune.model import ONNXModelHandler
from autotune.session import create_session


def random_weight(name: str, *shape: int, seed: int = 0) -> onnx.TensorProto:
    """Float32 weights whose products stay near 1."""
    values = np.random.default_rng(seed).standard_normal(shape) / np.sqrt(max(shape[-1], 1))
    return numpy_helper.from_array(values.astype(np.float32), name)


def handler(
    folder: Path,
    nodes: Sequence[onnx.NodeProto],
    weights: Sequence[onnx.TensorProto] = (),
    *,
    x: Sequence[int | str] = ("batch", 16),
    y: Sequence[int | str] = ("batch", 16),
    opset: int = 17,
    ir_version: int = 9,
    inputs: Sequence[onnx.ValueInfoProto] = (),
    domains: Mapping[str, int] | None = None,
) -> ONNXModelHandler:
    """Save a graph with the float input x and the float output y (and more inputs) as `model.onnx` in a new folder."""
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(x)), *inputs]
    graph = helper.make_graph(nodes, "small", given, [helper.make_tensor_value_info("y", TensorProto.FLOAT, list(y))], list(weights))
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, v) for d, v in (domains or {}).items())]
    folder.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=ir_version), str(folder / "model.onnx"))
    return ONNXModelHandler.from_folder(folder)


def run(model: ONNXModelHandler, **feed: NDArray[Any]) -> NDArray[Any]:
    """First output of one run under the model's own session settings."""
    output: NDArray[Any] = create_session(model.path, model.session).run(None, feed)[0]
    return output


def operators(model: ONNXModelHandler) -> list[str]:
    """Operator types of the main graph, sorted."""
    return sorted(node.op_type for node in model.load().graph.node)
