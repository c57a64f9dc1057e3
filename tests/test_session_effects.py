"""Session entries do what their names say in the runtime that is installed: seen in the graph that it saves, in the outputs, or in CPU time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from autotune.errors import ConfigError
from autotune.session import SessionSettings, create_session, session_options

WEIGHT = numpy_helper.from_array(np.eye(16, dtype=np.float32), "w")
BIAS = numpy_helper.from_array(np.ones(16, np.float32), "b")


def constant(name: str, value: Any) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(value), name)


QDQ = [
    helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
    helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
    helper.make_node("DequantizeLinear", ["wq", "s", "wz"], ["wd"]),
    helper.make_node("MatMul", ["d", "wd"], ["m"]),
    helper.make_node("QuantizeLinear", ["m", "s", "z"], ["q2"]),
    helper.make_node("DequantizeLinear", ["q2", "s", "z"], ["y"]),
]
QDQ_WEIGHTS = [constant("s", np.float32(0.1)), constant("z", np.uint8(128)), constant("wz", np.int8(0)), constant("wq", np.eye(16, dtype=np.int8))]
CASTS = [
    helper.make_node("Cast", ["x"], ["c"], to=TensorProto.FLOAT16),
    helper.make_node("Cast", ["c"], ["k"], to=1),
    helper.make_node("Relu", ["k"], ["y"]),
]
GELU = [helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")]
EXPAND = [helper.make_node("Expand", ["b", "shape"], ["e"]), helper.make_node("Add", ["x", "e"], ["y"])]
ADDED = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Add", ["m", "b"], ["y"])]


def write(path: Path, nodes: Sequence[onnx.NodeProto], weights: Sequence[onnx.TensorProto]) -> Path:
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16]), helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:], weights), opset_imports=domains, ir_version=9), str(path))
    return path


def optimized(path: Path, entries: Mapping[str, str]) -> list[str]:
    """Operators of the graph that a session with these entries runs."""
    options = session_options(SessionSettings(intra_op_num_threads=1, config_entries=entries))
    options.optimized_model_filepath = str(path.with_name("saved.onnx"))
    options.log_severity_level = 4
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]


@pytest.mark.parametrize(
    ("key", "off", "on", "nodes", "weights", "without", "with_it"),
    [
        ("optimization.enable_cast_chain_elimination", "0", "1", CASTS, [], ["Cast", "Cast", "Relu"], ["Relu"]),
        ("optimization.constant_folding_max_output_size_in_bytes", "100000", "16", EXPAND, [BIAS, constant("shape", np.array([64, 16]))],
         ["Add"], ["Expand", "Add"]),
        ("optimization.enable_gelu_approximation", "0", "1", GELU, [], ["Gelu"], ["FastGelu"]),
        ("optimization.disable_specified_optimizers", "NoSuchOptimizer", "MatMulAddFusion", ADDED, [WEIGHT, BIAS], ["Gemm"], ["MatMul", "Add"]),
        ("session.disable_quant_qdq", "0", "1", QDQ, QDQ_WEIGHTS, ["QuantizeLinear", "QLinearMatMul", "DequantizeLinear"],
         ["QuantizeLinear", "DequantizeLinear", "MatMul", "QuantizeLinear", "DequantizeLinear"]),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else "",
)  # fmt: skip
def test_an_entry_changes_the_graph_as_its_name_says(
    key: str, off: str, on: str, nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto], without: list[str], with_it: list[str], tmp_path: Path
) -> None:
    path = write(tmp_path / "model.onnx", nodes, weights)

    assert optimized(path, {key: off}) == without
    assert optimized(path, {key: on}) == with_it


@pytest.mark.parametrize(
    "entry", [{"session.intra_op.allow_spinning": "0"}, {"session.force_spinning_stop": "1"}, {"session.intra_op.spin_duration_us": "50"}], ids=str
)
def test_threads_that_do_not_spin_use_no_cpu_while_they_wait(entry: dict[str, str], tmp_path: Path) -> None:
    path = write(tmp_path / "model.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], [constant("w", np.ones((16, 4096), np.float32))])
    x = np.ones((256, 16), np.float32)

    def cpu_while_waiting(entries: dict[str, str]) -> float:
        session = create_session(path, SessionSettings(intra_op_num_threads=2, config_entries=entries))
        used = 0.0
        for _ in range(8):
            session.run(None, {"x": x})
            before = time.process_time()
            time.sleep(0.05)  # what threads do meanwhile is what is looked at
            used += time.process_time() - before
        return used

    assert cpu_while_waiting(entry) < 0.3 * cpu_while_waiting({})


@pytest.mark.parametrize(
    ("key", "value"),
    [("session.intra_op.spin_duration_us", "banana"), ("session.intra_op.spin_duration_us", "20000"),
     ("optimization.constant_folding_max_output_size_in_bytes", "x")],
)  # fmt: skip
def test_values_that_the_runtime_takes_in_silence_are_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match="must match"):
        SessionSettings(config_entries={key: value})
