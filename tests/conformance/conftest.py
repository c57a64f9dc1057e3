"""Small real models for the conformance suite: a network as torch module and as ONNX file, and data for both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from autotune.model import IoContract, ONNXModelHandler, PyTorchModelHandler, TensorSpec
from autotune.passes.base import ONNX, Pass
from autotune.passes.conformance import Sample

VALUES = {"OnnxDynamicToFixedShape": {"dim_param": {"batch": 4}}}  # of parameters without a default

SCRIPT = """
import torch
from torch import nn


def load() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    ).eval()
"""


def small_network(path: Path) -> None:
    """Write a network with a convolution, a Gemm, a MatMul and what stands between them; input x of shape (batch, 1, 8, 8)."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array((rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32), name)

    nodes = [
        helper.make_node("Conv", ["x", "k", "kb"], ["c"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "w", "b"], ["g"], "gemm", transB=1),
        helper.make_node("Identity", ["g"], ["i"], "identity"),
        helper.make_node("Tanh", ["i"], ["t"], "tanh"),
        helper.make_node("MatMul", ["t", "v"], ["y"], "matmul"),
    ]
    weights = [weight("k", 16, 1, 3, 3), weight("kb", 16), weight("w", 16, 16), weight("b", 16), weight("v", 16, 4)]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sample]:
    """A sample for each model format."""
    folder = tmp_path_factory.mktemp("samples")
    rng = np.random.default_rng(1)
    x = rng.standard_normal((48, 1, 8, 8)).astype(np.float32)
    labels = (x.mean(axis=(1, 2, 3)) > 0).astype(np.int64)
    np.savez(folder / "calibration.npz", x=x)
    np.savez(folder / "train.npz", x=x, labels=labels)
    data = {"calibration": folder / "calibration.npz", "train": folder / "train.npz"}

    (folder / "onnx").mkdir()
    small_network(folder / "onnx" / "model.onnx")
    (folder / "torch").mkdir()
    script = folder / "network.py"
    script.write_text(SCRIPT)
    io = IoContract((TensorSpec("x", "float32", ("batch", 1, 8, 8)),), (TensorSpec("y", "float32", ("batch", 4)),))
    module = PyTorchModelHandler(folder=folder / "torch", io=io, script=script, loader="load")
    return {
        "onnx": Sample(ONNXModelHandler.from_folder(folder / "onnx"), {"x": x}, data=data),
        "pytorch": Sample(module, {"x": x}, data=data, user_script=script),
    }


@pytest.fixture
def sample_for(samples: dict[str, Sample]):
    """Return the sample that a pass accepts."""

    def choose(pass_class: type[Pass]) -> Sample:
        sample = samples["onnx" if pass_class.contract.accepts == ONNX else "pytorch"]
        return replace(sample, values=VALUES.get(pass_class.__name__, {}))

    return choose
