"""What the tests of the kinds share: run a pass on a model made here, and compare outputs as they are deployed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from autotune.model import ONNXModelHandler
from autotune.passes.base import AcceleratorSpec
from autotune.passes.onnx_graph import graphs_of
from autotune.passes.registry import get_pass
from autotune.session import SessionSettings, create_session
from tests.failure_kinds.awkward import Arrays

CALIBRATION_METHODS = ("minmax", "moving_average", "distribution", "entropy", "percentile")
FORMATS = ("QDQ", "QOperator")


def saved(folder: Path, proto: onnx.ModelProto) -> ONNXModelHandler:
    """Write a model into a new folder; it is to run in one thread."""
    folder.mkdir(parents=True)
    onnx.save(proto, str(folder / "model.onnx"))
    return ONNXModelHandler.from_folder(folder, session=SessionSettings(intra_op_num_threads=1))


def apply(name: str, model: ONNXModelHandler, folder: Path, rows: Arrays | None = None, **config: Any) -> ONNXModelHandler:
    """Run a pass by name; rows, when given, go where it takes data."""
    pass_class = get_pass(name)
    folder.mkdir(parents=True)
    if rows is not None:
        np.savez(folder.with_suffix(".npz"), **rows)
        config = {parameter: str(folder.with_suffix(".npz")) for parameter in pass_class.contract.data} | config
    result = pass_class(AcceleratorSpec(), config).run(model, folder)
    assert isinstance(result, ONNXModelHandler)
    return result


def outputs(model: ONNXModelHandler, rows: Arrays) -> list[NDArray[Any]]:
    """All outputs on a batch, under the model's own session settings: every optimization is on, as where it is deployed."""
    feed = {spec.name: rows[spec.name] for spec in model.io.inputs}
    return [np.asarray(output) for output in create_session(model.path, model.session).run(None, feed)]


def error(model: ONNXModelHandler, result: ONNXModelHandler, rows: Arrays) -> float:
    """Largest difference of a float output, as a share of its largest magnitude; whole numbers must be equal."""
    largest = 0.0
    for wanted, got in zip(outputs(model, rows), outputs(result, rows), strict=True):
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        if wanted.dtype.kind != "f":
            assert np.array_equal(got, wanted)
            continue
        assert np.isfinite(got).all()
        largest = max(largest, float(np.abs(got - wanted).max()) / float(np.abs(wanted).max()))
    return largest


def weights(model: ONNXModelHandler, *, rank: int = 2) -> dict[str, onnx.TensorProto]:
    """Initializers of this rank and above, those of branches and bodies included."""
    return {t.name: t for graph in graphs_of(model.load().graph) for t in graph.initializer if len(t.dims) >= rank}


def sound(model: ONNXModelHandler) -> None:
    """The checker takes it with full type and shape inference, every name is given once, and it loads at every level."""
    proto = model.load()
    onnx.checker.check_model(proto, full_check=True)
    nodes = [n.name for n in proto.graph.node if n.name]
    values = [name for n in proto.graph.node for name in n.output if name] + [t.name for t in proto.graph.initializer]
    assert len(set(nodes)) == len(nodes)
    assert len(set(values)) == len(values)
    for level in ("disable", "basic", "extended", "all"):
        create_session(model.path, SessionSettings(graph_optimization_level=level, intra_op_num_threads=1))
