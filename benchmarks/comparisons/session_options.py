"""Which options of ONNX Runtime do what their names say, on the runtime that is installed: each is set, and what it should change is looked at.

    python benchmarks/comparisons/session_options.py [--only NAME ...] [--json FILE]

Every option is looked at three times, each in a process of its own: as it is without, with the value, and, for options that are named by text, with
a misspelt name, which ONNX Runtime takes as well. An option is `seen` when what is looked at differs from both of the others. What is looked at:

    read_back  what a live session says of itself        graph    the model that the runtime saves after its own graph changes
    threads    the threads of the process                profile  the runtime's own profile of a run
    effect     outputs, memory, CPU time, or a refusal

The exit status is 1 when an option that the table of this runtime calls live is not seen, or one that it calls dead or unproven is. Linux only.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import json
import operator
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from autotune.runtime_options import ENTRY, RUN_ENTRY, options_of

CPU = "CPUExecutionProvider"
MEGABYTE = 1e6
WAITS, WAIT_S = 6, 0.05
M_MMAP_THRESHOLD = -3  # of malloc.h
node = helper.make_node


@dataclass(frozen=True)
class Setting:
    """Options as given to ONNX Runtime itself, past every check of ours."""

    attributes: Mapping[str, Any] = field(default_factory=dict)
    entries: Mapping[str, str] = field(default_factory=dict)
    run_entries: Mapping[str, str] = field(default_factory=dict)
    providers: Sequence[str] = (CPU,)

    def options(self) -> ort.SessionOptions:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        for name, value in self.attributes.items():
            setattr(options, name, value)
        for key, value in self.entries.items():
            options.add_session_config_entry(key, value)
        return options

    def run_options(self) -> ort.RunOptions:
        options = ort.RunOptions()
        for key, value in self.run_entries.items():
            options.add_run_config_entry(key, value)
        return options

    def open(self, model: Path, options: ort.SessionOptions | None = None) -> ort.InferenceSession:
        return ort.InferenceSession(str(model), options or self.options(), providers=list(self.providers))


Look = Callable[[Setting], Any]
Differs = Callable[[Any, Any], bool]


@dataclass(frozen=True)
class Probe:
    """One option, the two settings that differ in it alone, and what is looked at. `control` has the option's name misspelt."""

    option: str
    value: str
    look: Look
    off: Setting
    on: Setting
    control: Setting | None = None
    differs: Differs = operator.ne


@dataclass(frozen=True)
class Finding:
    """What came out for one option, beside what the table of the installed runtime says of it."""

    option: str
    value: str
    proof: str
    status: str
    seen: bool
    without: Any
    with_it: Any
    misspelt: Any


# models ---------------------------------------------------------------------------------------------------------------------


def constant(name: str, value: Any, dtype: Any = None) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(value, dtype), name)


@cache
def folder() -> Path:
    made = Path(tempfile.mkdtemp(prefix="autotune-session-options-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)  # the processes that look end without it
    return made


def written(
    name: str, nodes: Sequence[onnx.NodeProto], weights: Sequence[onnx.TensorProto] = (), *, shape: Sequence[Any] = ("n", 16), **more: Any
) -> Path:
    """A model with the input x and the output y, written once."""
    path = folder() / f"{name}.onnx"
    ends = helper.make_tensor_value_info("x", TensorProto.FLOAT, list(shape)), helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [ends[0]], [ends[1]], list(weights), value_info=more.get("inner", []))
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("own", 1)]
    onnx.save(helper.make_model(graph, opset_imports=domains, ir_version=10, functions=more.get("functions", [])), str(path))
    return path


SCALE, ZERO, ZERO_S8 = constant("s", np.float32(0.1)), constant("z", np.uint8(128)), constant("zs", np.int8(0))


def quantized(zero: str, weight: int) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """A MatMul between QuantizeLinear and DequantizeLinear, with activations of the type of `zero`."""
    nodes = [
        node("QuantizeLinear", ["x", "s", zero], ["q"]), node("DequantizeLinear", ["q", "s", zero], ["d"]),
        node("DequantizeLinear", ["wq", "s", "zs"], ["wd"]), node("MatMul", ["d", "wd"], ["m"]),
        node("QuantizeLinear", ["m", "s", zero], ["q2"]), node("DequantizeLinear", ["q2", "s", zero], ["y"]),
    ]  # fmt: skip
    return nodes, [SCALE, *([ZERO] if zero == "z" else []), ZERO_S8, constant("wq", np.full((16, 16), weight), np.int8)]


def four_bits(shape: Sequence[int], kind: int) -> onnx.TensorProto:
    return helper.make_tensor("w4", kind, shape, [v % 7 for v in range(int(np.prod(shape)))])


def packed_matmul(bits: int) -> Path:
    """A MatMul with weights of a few bits in blocks of 32, computed in 8 bits."""
    rng = np.random.default_rng(0)
    weights = [constant("b", rng.integers(0, 256, (128, 8, 4 * bits)), np.uint8), constant("s", rng.random((128, 8)) * 0.1, np.float32)]
    attributes: dict[str, Any] = {"K": 256, "N": 128, "bits": bits, "block_size": 32, "accuracy_level": 4}
    nodes = [node("MatMulNBits", ["x", "b", "s"], ["y"], domain="com.microsoft", **attributes)]
    return written(f"packed{bits}", nodes, weights, shape=("n", 256))


# looks ----------------------------------------------------------------------------------------------------------------------


def status_field(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1])


def resident() -> float:
    return status_field("VmRSS") * 1024 / MEGABYTE


def tasks() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def read_back(attribute: str) -> Look:
    def look(setting: Setting) -> str:
        return str(getattr(setting.open(IDENTITY).get_session_options(), attribute))

    return look


def graph(model: Path, *attributes: str, weights: bool = False) -> Look:
    """Operators of the graph that a session runs, with these attributes; `weights`: names of types of the initializers too."""

    def look(setting: Setting) -> list[str]:
        options = setting.options()
        options.optimized_model_filepath = str(folder() / f"{os.getpid()}.onnx")
        setting.open(model, options)
        saved = onnx.load(options.optimized_model_filepath).graph
        operators = [
            " ".join([n.op_type, *(f"{a.name}={helper.get_attribute_value(a)}" for a in n.attribute if a.name in attributes)]) for n in saved.node
        ]
        return operators + ([TensorProto.DataType.Name(i.data_type) for i in saved.initializer] if weights else [])

    return look


def more_threads(setting: Setting) -> int:
    before = tasks()
    session = setting.open(IDENTITY)
    count = len(tasks() - before)
    del session
    return count


def pinned_to(setting: Setting) -> list[str]:
    before = tasks()
    session = setting.open(IDENTITY)
    texts = [Path(f"/proc/self/task/{task}/status").read_text() for task in tasks() - before]
    del session
    return sorted(re.findall(r"Cpus_allowed_list:\s+(\S+)", "\n".join(texts)))


def idle_cpu_ms(model: Path) -> Look:
    """CPU time, in ms, that threads take while they wait between runs."""

    def look(setting: Setting) -> float:
        session, x, used = setting.open(model), np.ones((256, 16), np.float32), 0.0
        for _ in range(WAITS):
            session.run(None, {"x": x})
            before = time.process_time()
            time.sleep(WAIT_S)
            used += time.process_time() - before
        return round(used * 1e3, 2)

    return look


def helpers_cpu_ms(setting: Setting) -> float:
    """CPU time, in ms, that the session's own threads took while it was opened."""
    before = tasks()
    session = setting.open(STACK)
    used = sum(int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[0]) for task in tasks() - before)
    del session
    return round(used / 1e6, 2)


def kept_mb(setting: Setting) -> int:
    """Memory that is held after a run that needed a large intermediate value."""
    session, rows = setting.open(LARGE), np.ones((8192, 16), np.float32)
    session.run(None, {"x": rows[:8]})
    before = resident()
    session.run(None, {"x": rows}, setting.run_options())
    return round(resident() - before)


def pages() -> int:
    """Pages that this process touched for the first time, or took again after they were given back."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def pages_of_opening(setting: Setting) -> int:
    """Pages that opening a session with large weights takes."""
    Setting().open(IDENTITY)  # what the runtime itself takes when it is used for the first time
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)  # or the C library would use some of what was given back again, and some not
    before = pages()
    session = setting.open(STACK)
    taken = pages() - before
    del session
    return taken


def held_by_weights_mb(setting: Setting) -> int:
    Setting().open(IDENTITY)  # what the runtime itself takes when it is used for the first time
    before = resident()
    session = setting.open(STACK)
    held = round(resident() - before)
    del session
    return held


def peak_mb(setting: Setting) -> int:
    session = setting.open(BRANCHES)
    before = resident()
    session.run(None, {"x": np.ones((4096, 16), np.float32)})
    return round(status_field("VmHWM") * 1024 / MEGABYTE - before)


def pages_of_the_second_run(setting: Setting) -> int:
    """Pages touched for the first time: memory planned from what the first run needed is taken in the second."""
    session, x = setting.open(BRANCHES), np.ones((1024, 16), np.float32)
    session.run(None, {"x": x})
    before = pages()
    session.run(None, {"x": x})
    return pages() - before


def outputs(model: Path, x: NDArray[np.float32]) -> Look:
    def look(setting: Setting) -> list[float]:
        got = np.asarray(setting.open(model).run(None, {"x": x}, setting.run_options())[0])
        return [float(v) for v in got.ravel()[:4]]

    return look


def opens(model: Path) -> Look:
    """`opens`, or the start of the words with which the runtime refuses."""

    def look(setting: Setting) -> str:
        try:
            setting.open(model)
        except Exception as error:  # ONNX Runtime raises errors of its own kinds
            return f"refused: {str(error).rsplit(' : ', 1)[-1][:90]}"
        return "opens"

    return look


def profiled(setting: Setting, model: Path, rows: int) -> list[dict[str, Any]]:
    """Node events of the last of two runs, from the runtime's own profile."""
    options = setting.options()
    options.enable_profiling = True
    options.profile_file_prefix = str(folder() / f"profile-{os.getpid()}")
    session = setting.open(model, options)
    for _ in range(2):
        session.run(None, {"x": np.ones((rows, 16), np.float32)})
    events = json.loads(Path(session.end_profiling()).read_text())
    nodes = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    return nodes[len(nodes) // 2 :]


def order_of_nodes(setting: Setting) -> list[str]:
    return [e["args"]["op_name"] for e in profiled(setting, TWO_PATHS, 2)]


def block_sizes(setting: Setting) -> list[int]:
    return list(profiled(setting, ELEMENTWISE, 8192)[-1]["args"]["thread_scheduling_stats"]["main_thread"]["block_size"])


def profile_files(setting: Setting) -> int:
    options = setting.options()
    options.profile_file_prefix = str(folder() / f"written-{os.getpid()}")
    setting.open(IDENTITY, options)
    return len(list(folder().glob(f"written-{os.getpid()}*.json")))


def placement_told(setting: Setting) -> str:
    try:
        return ", ".join(part.ep_name for part in setting.open(IDENTITY).get_provider_graph_assignment_info())
    except Exception as error:  # ONNX Runtime raises errors of its own kinds
        return f"refused: {str(error).rsplit(' : ', 1)[-1][:90]}"


def much_less(without: float, with_it: float) -> bool:
    return with_it < 0.3 * without


def at_least_5_more(without: float, with_it: float) -> bool:
    return with_it > without + 5


# probes ---------------------------------------------------------------------------------------------------------------------

W16, B16 = constant("w", np.eye(16), np.float32), constant("b", np.ones(16), np.float32)
IDENTITY = written("identity", [node("Relu", ["x"], ["y"])])
WIDE = written("wide", [node("MatMul", ["x", "w"], ["y"])], [constant("w", np.ones((16, 4096)), np.float32)])
PAIR = written(
    "pair", [node("MatMul", ["x", "w"], ["a"]), node("MatMul", ["x", "v"], ["b"]), node("Add", ["a", "b"], ["y"])],
    [constant("w", np.ones((16, 4096)), np.float32), constant("v", np.full((16, 4096), 2), np.float32)],
)  # fmt: skip
STACK = written(
    "stack", [node("MatMul", ["x" if i == 0 else f"a{i}", f"w{i}"], [f"a{i + 1}" if i < 3 else "y"]) for i in range(4)],
    [constant(f"w{i}", np.random.default_rng(i).random((1536, 1536)), np.float32) for i in range(4)], shape=("n", 1536),
)  # fmt: skip
LARGE = written(
    "large", [node("MatMul", ["x", "w"], ["a"]), node("Relu", ["a"], ["b"]), node("ReduceSum", ["b"], ["y"])],
    [constant("w", np.ones((16, 4096)), np.float32)],
)  # fmt: skip
BRANCHES = written(
    "branches",
    [node("MatMul", ["x", "w"], ["a"]), node("Softmax", ["a"], ["b"]), node("Add", ["b", "a"], ["c"]), node("Softmax", ["c"], ["d"]),
     node("Add", ["d", "c"], ["e"]), node("ReduceSum", ["e"], ["y"])],
    [constant("w", np.ones((16, 2048)), np.float32)],
)  # fmt: skip
ELEMENTWISE = written("elementwise", [node("Exp", ["x"], ["y"])])
TWO_PATHS = written(
    "two_paths",
    [node("Relu", ["x"], ["a"]), node("Exp", ["a"], ["b"]), node("Shape", ["x"], ["s"]), node("Cast", ["s"], ["t"], to=1),
     node("ReduceSum", ["t"], ["u"]), node("Add", ["b", "u"], ["y"])],
)  # fmt: skip
CONV = written(
    "conv", [node("Conv", ["x", "w"], ["a"]), node("Relu", ["a"], ["b"]), node("Identity", ["b"], ["c"]), node("Conv", ["c", "v"], ["y"])],
    [constant("w", np.ones((16, 16, 1, 1)), np.float32), constant("v", np.ones((16, 16, 1, 1)), np.float32)], shape=("n", 16, 4, 4),
)  # fmt: skip
HALF_CONV = written(
    "half_conv", [node("Cast", ["x"], ["h"], to=10), node("Conv", ["h", "w"], ["a"]), node("Cast", ["a"], ["y"], to=1)],
    [constant("w", np.ones((16, 16, 1, 1)), np.float16)], shape=("n", 16, 4, 4),
)  # fmt: skip
POINTWISE = written(
    "pointwise", [node("Conv", ["x", "w"], ["y"])], [constant("w", np.random.default_rng(0).normal(size=(64, 512, 1, 1)), np.float32)],
    shape=("n", 512, 8, 8),
)  # fmt: skip
DEPTHWISE = written(
    "depthwise", [node("Conv", ["x", "w"], ["y"], group=64, pads=[1, 1, 1, 1])],
    [constant("w", np.random.default_rng(0).normal(size=(64, 1, 3, 3)), np.float32)], shape=("n", 64, 8, 8),
)  # fmt: skip
TINY = written("tiny", [node("Mul", ["x", "w"], ["y"])], [constant("w", np.full(16, 1e-20), np.float32)])
QDQ = written("qdq", *quantized("z", 1))
QDQ_S8 = written("qdq_s8", *quantized("zs", 1))
QDQ_FULL_RANGE = written("qdq_full_range", *quantized("z", -127))
LEFT_OVER = written(
    "left_over", [node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["d"]), node("Sin", ["d"], ["y"])],
    [SCALE, ZERO],
)  # fmt: skip
TWICE = written(
    "twice",
    [node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["d"]),
     node("QuantizeLinear", ["d", "r", "z"], ["p"]), node("DequantizeLinear", ["p", "r", "z"], ["e"]), node("Sin", ["e"], ["y"])],
    [SCALE, ZERO, constant("r", np.float32(0.3))],
)  # fmt: skip
BLOCKWISE = written(
    "blockwise", [node("DequantizeLinear", ["w4", "s"], ["w"], axis=0, block_size=32), node("MatMul", ["x", "w"], ["y"])],
    [four_bits((64, 32), TensorProto.INT4), constant("s", np.full((2, 32), 0.05), np.float32)], shape=("n", 64),
)  # fmt: skip
CHANNELWISE = written(
    "channelwise", [node("DequantizeLinear", ["w4", "s"], ["w"], axis=1), node("MatMul", ["x", "w"], ["y"])],
    [four_bits((128, 32), TensorProto.INT4), constant("s", np.full(32, 0.05), np.float32)], shape=("n", 128),
)  # fmt: skip
RESHAPED = written(
    "reshaped",
    [node("DequantizeLinear", ["w4", "s", "o"], ["d"], axis=2, block_size=32), node("Reshape", ["d", "shape"], ["r"]),
     node("Transpose", ["r"], ["t"], perm=[1, 0]), node("MatMul", ["x", "t"], ["y"])],
    [four_bits((32, 2, 32), TensorProto.UINT4), helper.make_tensor("o", TensorProto.UINT4, (32, 2, 1), [0] * 64),
     constant("s", np.full((32, 2, 1), 0.05), np.float32), constant("shape", [32, 64], np.int64)],
    shape=("n", 64),
)  # fmt: skip
CASTS = written("casts", [node("Cast", ["x"], ["c"], to=10), node("Cast", ["c"], ["k"], to=1), node("Relu", ["k"], ["y"])])
EXPAND = written(
    "expand", [node("Expand", ["b", "shape"], ["e"]), node("Add", ["x", "e"], ["y"])], [B16, constant("shape", [64, 16], np.int64)]
)  # fmt: skip
GELU = written("gelu", [node("Gelu", ["x"], ["y"], domain="com.microsoft")])
ADDED = written("added", [node("MatMul", ["x", "w"], ["m"]), node("Add", ["m", "b"], ["y"])], [W16, B16])
GEMM_RELU = written("gemm_relu", [node("Gemm", ["x", "w", "b"], ["m"]), node("Relu", ["m"], ["y"])], [W16, B16])
TWICE_FUNCTION = helper.make_function(
    "own", "Twice", ["a"], ["r"],
    [node("Constant", [], ["k"], value=constant("", np.float32(1))), node("Add", ["k", "k"], ["two"]), node("Mul", ["a", "two"], ["r"])],
    [helper.make_opsetid("", 21)],
)  # fmt: skip
FUNCTIONS = written(
    "functions", [node("Twice", ["x"], ["u"], domain="own"), node("Twice", ["u"], ["y"], domain="own")], functions=[TWICE_FUNCTION]
)  # fmt: skip
WRONG_SHAPE = written(
    "wrong_shape", [node("Relu", ["x"], ["a"]), node("Relu", ["a"], ["y"])],
    inner=[helper.make_tensor_value_info("a", TensorProto.FLOAT, ["n", 17])],
)  # fmt: skip


def attribute(name: str, off: Any, on: Any, look: Look, differs: Differs | None = None, **base: Any) -> Probe:
    return Probe(name, str(on), look, Setting({**base, name: off}), Setting({**base, name: on}), differs=differs or operator.ne)


def entry(
    key: str, value: str, look: Look, differs: Differs | None = None, *, beside: Mapping[str, str] | None = None,
    providers: Sequence[str] = (CPU,), **attributes: Any,
) -> Probe:  # fmt: skip
    def setting(own: Mapping[str, str]) -> Setting:
        return Setting(attributes, {**(beside or {}), **own}, providers=providers)

    return Probe(key, value, look, setting({}), setting({key: value}), setting({f"{key}_": value}), differs or operator.ne)


def run_entry(key: str, value: str, look: Look, differs: Differs) -> Probe:
    return Probe(key, value, look, Setting(), Setting(run_entries={key: value}), Setting(run_entries={f"{key}_": value}), differs)


def probes() -> list[Probe]:
    level, mode, order = ort.GraphOptimizationLevel, ort.ExecutionMode, ort.ExecutionOrder
    parallel: dict[str, Any] = {"execution_mode": mode.ORT_PARALLEL, "inter_op_num_threads": 2}
    rng = np.random.default_rng(1)
    few_rows, image = rng.normal(size=(4, 256)).astype(np.float32), rng.normal(size=(1, 512, 8, 8)).astype(np.float32)
    unfused = {"session.disable_quant_qdq": "1"}
    blocking = {"session.intra_op.allow_spinning": "0"}
    return [
        attribute("intra_op_num_threads", 1, 3, more_threads),
        attribute("inter_op_num_threads", 2, 4, more_threads, execution_mode=mode.ORT_PARALLEL),
        attribute("execution_mode", mode.ORT_SEQUENTIAL, mode.ORT_PARALLEL, more_threads, inter_op_num_threads=3),
        attribute("execution_order", order.DEFAULT, order.PRIORITY_BASED, order_of_nodes),
        attribute("graph_optimization_level", level.ORT_DISABLE_ALL, level.ORT_ENABLE_BASIC, graph(CONV)),
        attribute("graph_optimization_level", level.ORT_ENABLE_BASIC, level.ORT_ENABLE_EXTENDED, graph(CONV)),
        attribute("graph_optimization_level", level.ORT_ENABLE_EXTENDED, level.ORT_ENABLE_LAYOUT, graph(CONV)),
        attribute("graph_optimization_level", level.ORT_ENABLE_LAYOUT, level.ORT_ENABLE_ALL, graph(HALF_CONV)),
        attribute("enable_cpu_mem_arena", True, False, kept_mb, much_less),
        attribute("enable_mem_pattern", True, False, pages_of_the_second_run, much_less),
        attribute("enable_mem_reuse", True, False, peak_mb, at_least_5_more),
        attribute("enable_profiling", False, True, profile_files),
        attribute("use_deterministic_compute", False, True, outputs(POINTWISE, image)),
        entry("session.intra_op.allow_spinning", "0", idle_cpu_ms(WIDE), much_less, intra_op_num_threads=2),
        entry("session.intra_op.spin_duration_us", "50", idle_cpu_ms(WIDE), much_less, intra_op_num_threads=2),
        entry("session.intra_op.spin_backoff_max", "64", idle_cpu_ms(WIDE), much_less, intra_op_num_threads=2),
        entry("session.inter_op.allow_spinning", "0", idle_cpu_ms(PAIR), much_less, **parallel),
        entry("session.inter_op.spin_duration_us", "50", idle_cpu_ms(PAIR), much_less, **parallel),
        entry("session.inter_op.spin_backoff_max", "64", idle_cpu_ms(PAIR), much_less, **parallel),
        entry("session.force_spinning_stop", "1", idle_cpu_ms(WIDE), much_less, intra_op_num_threads=2),
        entry("session.intra_op_thread_affinities", "1;2", pinned_to, intra_op_num_threads=3),
        entry("session.dynamic_block_base", "16", block_sizes, intra_op_num_threads=2),
        entry("session.set_denormal_as_zero", "1", outputs(TINY, np.full((1, 16), 1e-20, np.float32))),
        entry("session.disable_prepacking", "1", pages_of_opening, lambda without, with_it: without - with_it > 2000),
        entry("session.prepack.enable_parallel", "1", helpers_cpu_ms, lambda without, with_it: with_it > 5 + without, beside=blocking,
              intra_op_num_threads=2),
        entry("session.use_device_allocator_for_initializers", "1", held_by_weights_mb, lambda without, with_it: abs(without - with_it) > 15),
        entry("session.disable_quant_qdq", "1", graph(QDQ)),
        entry("session.disable_qdq_constant_folding", "1", graph(QDQ), beside=unfused),
        entry("session.disable_double_qdq_remover", "1", graph(TWICE)),
        entry("session.enable_quant_qdq_cleanup", "1", graph(LEFT_OVER)),
        entry("session.qdqisint8allowed", "1", graph(QDQ_S8, weights=True)),
        entry("session.x64quantprecision", "1", graph(QDQ_FULL_RANGE, weights=True)),
        entry("session.enable_dq_matmulnbits_fusion", "1", graph(RESHAPED)),
        entry("session.qdq_matmulnbits_accuracy_level", "1", graph(BLOCKWISE, "accuracy_level")),
        entry("session.qdq_matmulnbits_block_size", "64", graph(CHANNELWISE, "block_size")),
        entry("session.graph_optimizations_loop_level", "0", graph(HALF_CONV)),
        entry("session.disable_aot_function_inlining", "1", graph(FUNCTIONS)),
        entry("session.function_expansion_node_limit", "2", opens(FUNCTIONS)),
        entry("session.function_expansion_byte_limit", "10", opens(FUNCTIONS)),
        entry("session.strict_shape_type_inference", "1", opens(WRONG_SHAPE)),
        entry("session.disable_cpu_ep_fallback", "1", opens(ADDED), providers=("AzureExecutionProvider",)),
        entry("session.record_ep_graph_assignment_info", "1", placement_told),
        entry("session.strict_workspace_verification", "1", outputs(WIDE, np.ones((2, 16), np.float32))),
        entry("optimization.enable_cast_chain_elimination", "1", graph(CASTS)),
        entry("optimization.constant_folding_max_output_size_in_bytes", "16", graph(EXPAND)),
        entry("optimization.enable_gelu_approximation", "1", graph(GELU)),
        entry("optimization.disable_specified_optimizers", "MatMulAddFusion", graph(ADDED)),
        entry("optimization.minimal_build_optimizations", "apply", graph(GEMM_RELU)),
        entry("mlas.qnbit.force_fp32", "1", outputs(packed_matmul(4), few_rows)),
        entry("mlas.use_lut_gemm", "1", outputs(packed_matmul(2), few_rows)),
        entry("mlas.nchwc_pointwise_conv_max_input_channel_batch", "16", outputs(POINTWISE, image)),
        entry("mlas.nchwc_depthwise_sliding", "1", outputs(DEPTHWISE, image[:, :64].copy())),
        entry("session.intra_op_num_threads", "3", more_threads),
        entry("session.inter_op_num_threads", "4", more_threads, **parallel),
        entry("session.execution_mode", "parallel", more_threads, inter_op_num_threads=3),
        entry("session.graph_optimization_level", "disable_all", graph(CONV)),
        entry("session.enable_cpu_mem_arena", "0", kept_mb, much_less),
        entry("session.enable_mem_pattern", "0", pages_of_the_second_run, much_less),
        entry("session.enable_profiling", "1", profile_files),
        entry("session.enable_quant_qdq", "0", graph(QDQ)),
        entry("session.intra_op_thread_count", "3", more_threads),
        run_entry("memory.enable_memory_arena_shrinkage", "cpu:0", kept_mb, much_less),
    ]  # fmt: skip


# looking --------------------------------------------------------------------------------------------------------------------


def alone(look: Look, setting: Setting) -> Any:
    """What is seen in a process that has opened no session before; the words of the error where there was one."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        try:
            seen = look(setting)
        except Exception as error:  # ONNX Runtime raises errors of its own kinds, and the table says what happened
            seen = f"error: {type(error).__name__}: {str(error)[:200]}"
        os.write(writer, json.dumps(seen).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else "the process died"


def examine(probe: Probe) -> tuple[bool, Any, Any, Any]:
    """Whether the option was seen to do something; what was seen without it, with it, and with its name misspelt."""
    without, with_it = alone(probe.look, probe.off), alone(probe.look, probe.on)
    misspelt = None if probe.control is None else alone(probe.look, probe.control)
    broken = any(isinstance(seen, str) and seen.startswith(("error", "the process")) for seen in (without, with_it))
    seen = not broken and all(probe.differs(other, with_it) for other in (without, misspelt) if other is not None)
    return seen, without, with_it, misspelt


def findings(only: Sequence[str] = ()) -> list[Finding]:
    known = options_of(ort.__version__).options
    found = []
    for probe in probes():
        if only and probe.option not in only:
            continue
        row = known.get(probe.option)
        seen, *values = examine(probe)
        found.append(Finding(probe.option, probe.value, row.proof if row else "", row.status if row else "not in the table", seen, *values))
    return found


def wrong(found: Finding) -> bool:
    """Whether the table says something else of the option than what was seen."""
    return found.seen != (found.status == "live")


def table(rows: Sequence[Finding]) -> str:
    lines = [f"ONNX Runtime {ort.__version__}, {platform.machine()}", ""]
    form = "{:<58} {:<34} {:<10} {:<16} {}"
    lines.append(form.format("option", "value", "proof", "table", "seen"))
    for row in rows:
        seen = f"{'seen' if row.seen else 'not seen'}{' <- the table says something else' if wrong(row) else ''}"
        lines.append(form.format(row.option, row.value, row.proof or "-", row.status, seen))
    return "\n".join(lines)


def unlooked() -> list[str]:
    """Options that the table calls live and that no probe looks at."""
    here = platform.machine()
    looked = {probe.option for probe in probes()}
    return [
        name for name, option in options_of(ort.__version__).options.items()
        if option.status == "live" and option.kind in ("attribute", ENTRY, RUN_ENTRY) and name not in looked
        and (not option.machines or here in option.machines)
    ]  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="options to look at")
    parser.add_argument("--json", type=Path, help="write what was seen")
    given = parser.parse_args(arguments)
    unknown = set(given.only) - {probe.option for probe in probes()}
    if unknown:
        parser.error(f"no probe for {', '.join(sorted(unknown))}")
    rows = findings(given.only)
    print(table(rows))
    missing = [] if given.only else unlooked()
    if missing:
        print(f"\nlive in the table, and nothing looks at: {', '.join(missing)}")
    if given.json:
        given.json.write_text(json.dumps({"onnxruntime": ort.__version__, "machine": platform.machine(), "options": [asdict(r) for r in rows]}))
    return int(bool(missing) or any(wrong(row) for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
