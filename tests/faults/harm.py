"""Passes, metrics and models that do harm in the way they are asked to, and trials run on them without a whole sweep around.

A pass marks a candidate by adding 100 times a number to all scores: the best class stays what it was, and the metric, which sees outputs
only, knows by the mark what it shall do.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from autotune.benchmarks.lane import FOLDER_VARIABLE
from autotune.config import LoadedSweep, parse_sweep
from autotune.pipeline import Pipeline
from autotune.records import TrialRecord
from autotune.search_spaces.space import enumerate_points
from autotune.sweep.baseline import Baseline
from autotune.sweep.prepare import prepare
from autotune.trial import TrialPlan, TrialRunner

SCRIPT = '''
"""Harm of every kind."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from onnx import helper, numpy_helper

from autotune.passes.base import ONNX, Pass, PassConfigParam, PassContract
from autotune.passes.onnx_conversion import OnnxConversion
from autotune.passes.registry import register

PIDS = Path(__file__).with_name("pids.txt")
MISBEHAVE = Path(__file__).with_name("misbehave")  # without this file nothing in here does any harm


def grandchildren():
    """One in our group, one in a session of its own that has left its parent as well."""
    first = subprocess.Popen(["sleep", "600"])
    with PIDS.open("a") as file:
        file.write(f"{first.pid}\\n")
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with PIDS.open("a") as file:
                file.write(f"{os.getpid()}\\n")
            time.sleep(600)
        os._exit(0)
    while len(PIDS.read_text().splitlines()) % 2:
        time.sleep(0.01)


def do(how):
    """Harm this process."""
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "abort":
        os.abort()
    if how == "exit":
        os._exit(7)
    if how == "exit_0":
        os._exit(0)
    if how == "sys_exit":
        sys.exit("enough")
    if how == "raise":
        raise ValueError("no kernel for this")
    if how == "recursion":
        do(how)
    if how == "unspeakable":
        class Unspeakable(Exception):
            def __str__(self):
                raise RuntimeError("not even that")
        raise Unspeakable
    if how == "memory":
        kept = []
        while True:
            kept.append(np.empty(4_000_000))  # reserved is enough for the limit
    if how == "hang":
        time.sleep(600)
    if how == "hang_with_grandchildren":
        grandchildren()
        time.sleep(600)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "print":
        line = "x" * 10_000_000 + "\\n"
        for _ in range(100):
            sys.stdout.write(line)
        sys.stdout.write("the last words\\n")
    if how == "upheaval":
        os.environ["PATH"] = "/nowhere"
        os.environ["ORT_INTRA_OP_NUM_THREADS"] = "99"
        random.seed(99)
        np.random.seed(99)
        np.ones(1).tofile("left_here.bin")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        os.umask(0o777)
        sys.path.clear()
        os.chdir("/")
    if how == "delete_all_here":
        for path in Path.cwd().iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if how == "delete_the_folder":
        shutil.rmtree(Path.cwd())


def appended(proto, *nodes, constants=()):
    """Put nodes between what the model computes, `inside`, and its output."""
    output = proto.graph.output[0].name
    last = next(n for n in proto.graph.node if output in n.output)
    last.output[list(last.output).index(output)] = "inside"
    proto.graph.node.extend(nodes)
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), n) for n, v in constants)
    return proto


def changed(proto, what, config):
    out = proto.graph.output[0].name
    node, f32 = helper.make_node, np.float32
    value = helper.make_tensor_value_info
    if what == "mark":
        return appended(proto, node("Add", ["inside", "mark"], [out]), constants=[("mark", f32(100 * config["mark"]))])
    if what == "nan":
        return appended(proto, node("Log", ["minus"], ["nan"]), node("Add", ["inside", "nan"], [out]), constants=[("minus", f32([-1]))])
    if what == "infinite":
        return appended(proto, node("Div", ["one", "zero"], ["inf"]), node("Add", ["inside", "inf"], [out]),
                        constants=[("one", f32([1])), ("zero", f32([0]))])
    if what == "constant":
        return appended(proto, node("Mul", ["inside", "zero"], [out]), constants=[("zero", f32([0]))])
    if what == "wider":
        proto.graph.output[0].type.tensor_type.ClearField("shape")
        return appended(proto, node("Concat", ["inside", "inside"], [out], axis=1))
    if what == "fewer_rows":
        proto.graph.output[0].type.tensor_type.ClearField("shape")
        return appended(proto, node("ReduceMean", ["inside"], [out], axes=[0], keepdims=1))
    if what == "dtype":
        proto.graph.output[0].type.tensor_type.elem_type = 11
        return appended(proto, node("Cast", ["inside"], [out], to=11))
    if what == "renamed":
        proto = appended(proto, node("Identity", ["inside"], ["renamed"]))
        proto.graph.output[0].name = "renamed"
        return proto
    if what == "second":
        proto = appended(proto, node("Identity", ["inside"], [out]))
        proto.graph.output.append(value("second", 1, None))
        proto.graph.node.append(node("Identity", ["inside"], ["second"]))
        return proto
    if what == "runs_forever":
        body = helper.make_graph(
            [node("Tanh", ["h"], ["h_out"]), node("Identity", ["go"], ["go_out"])], "body",
            [value("i", 7, []), value("go", 9, []), value("h", 1, None)], [value("go_out", 9, []), value("h_out", 1, None)])
        return appended(proto, node("Loop", ["", "yes", "inside"], [out], body=body), constants=[("yes", np.array(True))])
    if what == "crashes_when_run":
        # A Loop with an unnamed state output is valid, and ONNX Runtime 1.32 dies of it when it runs.
        body = helper.make_graph(
            [node("Tanh", ["h"], ["h_out"]), node("Identity", ["go"], ["go_out"]), node("Identity", ["h_out"], ["each"])], "body",
            [value("i", 7, []), value("go", 9, []), value("h", 1, ["batch", 4])],
            [value("go_out", 9, []), value("h_out", 1, ["batch", 4]), value("each", 1, ["batch", 4])])
        return appended(proto, node("Loop", ["count", "", "inside"], ["", "steps"], body=body), node("Squeeze", ["steps", "first"], [out]),
                        constants=[("count", np.array([1])), ("first", np.array([0]))])
    if what == "eats_memory_when_run":
        return appended(proto, node("ConstantOfShape", ["huge"], ["ones"]), node("ReduceSum", ["ones"], ["sum"], keepdims=0),
                        node("Add", ["inside", "sum"], [out]), constants=[("huge", np.array([200_000, 200_000]))])
    raise AssertionError(what)


@register
class Harm(Pass):
    """Harm this process (`here`), or the model (`model`); `mark` tells the metric what to do."""

    contract = PassContract(accepts=ONNX, returns=ONNX)

    @classmethod
    def _default_config(cls, accelerator_spec):
        return {
            "here": PassConfigParam(type_=str, default_value=""),
            "model": PassConfigParam(type_=str, default_value="mark"),
            "mark": PassConfigParam(type_=int, default_value=0),
            "threads": PassConfigParam(type_=int, default_value=0),
        }

    def _run_for_config(self, model, config, output_model_path):
        do(config["here"] if MISBEHAVE.exists() else "")
        written = model.written(output_model_path, proto=changed(model.load(), config["model"], config))
        if config["threads"]:
            written = written.with_session(replace(written.session, intra_op_num_threads=config["threads"]))
        return written


@register
class HarmfulConversion(OnnxConversion):
    """The real conversion, after some harm."""

    @classmethod
    def _default_config(cls, accelerator_spec):
        return {**super()._default_config(accelerator_spec), "here": PassConfigParam(type_=str, default_value="")}

    def _run_for_config(self, model, config, output_model_path):
        do(config["here"] if MISBEHAVE.exists() else "")
        return super()._run_for_config(model, {k: v for k, v in config.items() if k != "here"}, output_model_path)


def right(outputs, labels):
    scores = next(iter(outputs.values()))
    return (scores.argmax(-1) == labels).astype(float)


def marked(outputs):
    return int(round(float(np.mean(next(iter(outputs.values())))) / 100))


HARMS = @MARKS@


def harmed_metric(outputs, labels):
    """Right answers; harm for the marks that ask for it."""
    do(HARMS.get(marked(outputs), "") if MISBEHAVE.exists() else "")
    return right(outputs, labels)


class Odd(dict):
    pass


RETURNED = {
    1: lambda s: float("nan"), 2: lambda s: float("inf"), 3: lambda s: float("-inf"), 4: lambda s: None, 5: lambda s: "0.93",
    6: lambda s: np.float32(s.mean()), 7: lambda s: 1e400, 8: lambda s: 10**400, 9: lambda s: 0.9 + 0j, 10: lambda s: s + 0j,
    11: lambda s: np.tile(s, (2, 1)), 12: lambda s: s[:-1], 13: lambda s: s[:0], 14: lambda s: Odd(), 15: lambda s: np.where(s == 1, np.nan, s),
    16: lambda s: s.astype(str), 17: lambda s: np.ma.masked_equal(s, 1.0), 18: lambda s: [None] * len(s), 19: lambda s: object(),
    20: lambda s: s.astype("timedelta64[s]"),
}


def odd_metric(outputs, labels):
    """Right answers; something odd for the marks above."""
    scores = right(outputs, labels)
    return RETURNED.get(marked(outputs), lambda s: s)(scores)


def latency(*, model, baseline, session, baseline_session, inputs, rounds, seed):
    """The smaller the faster; harmed models are the fastest of all."""
    wobble = np.random.default_rng(seed).integers(0, 20, (2, rounds))
    quick = 1000 if model != baseline else 100_000
    return {"candidate": quick + wobble[0], "baseline": 100_000 + wobble[1]}
'''


HARMS = (
    "segfault", "abort", "exit", "exit_0", "sys_exit", "raise", "recursion", "unspeakable", "memory", "hang", "hang_with_grandchildren",
    "stop", "print", "upheaval", "delete_all_here", "delete_the_folder",
)  # fmt: skip
MARKS = {harm: number for number, harm in enumerate(HARMS, 101)}  # below are the marks of `odd_metric`
_folder = tempfile.TemporaryDirectory(prefix="harm-")  # one for the process: pass names are unique in it
SCRIPT_PATH = Path(_folder.name, "harm.py")
SCRIPT_PATH.write_text(SCRIPT.replace("@MARKS@", repr({number: harm for harm, number in MARKS.items()})))
PIDS_PATH, MISBEHAVE_PATH = SCRIPT_PATH.with_name("pids.txt"), SCRIPT_PATH.with_name("misbehave")
MISBEHAVE_PATH.touch()


def write_case(folder: Path) -> None:
    """A linear classifier of 16 numbers into 4 classes, and 60 rows."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(16, 4)).astype(np.float32)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", size]) for n, size in (("x", 16), ("logits", 4)))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["logits"])], "linear", [x], [y], [numpy_helper.from_array(weights, "w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(folder / "model.onnx"))
    rows = rng.normal(size=(60, 16)).astype(np.float32)
    np.savez(folder / "eval.npz", x=rows, labels=(rows @ weights).argmax(1))


def harm_sweep(folder: Path, params: Mapping[str, Sequence[Any]], *, metric: str = "right", **more: Any) -> dict[str, Any]:
    """A sweep over harms, timed by a measurer that prefers the harmed. `params` lists what each parameter of the pass may be."""
    return {
        "model": {"path": str(folder / "model.onnx")}, "data": {"eval": str(folder / "eval.npz")}, "metric": f"{SCRIPT_PATH}:{metric}",
        "target": {"threads": 1}, "script": str(SCRIPT_PATH), "measure": {"measurer": f"{SCRIPT_PATH}:latency"},
        "chain": [{"slot": "harm", "pass": "Harm", "optional": True, "params": {k: list(v) for k, v in params.items()}}],
        "search": {"sampler": "random"}, **more,
    }  # fmt: skip


def harmful_graph(source: Path, what: str) -> onnx.ModelProto:
    """A model changed as the pass does it."""
    names: dict[str, Any] = {"__file__": str(SCRIPT_PATH)}
    exec(SCRIPT_PATH.read_text().partition("@register")[0], names)
    changed: onnx.ModelProto = names["changed"](onnx.load(source), what, {})
    return changed


@dataclass(frozen=True)
class Trials:
    """Trials of a sweep, one by one and without Ray: plan, pipeline and the servers of stages."""

    plan: TrialPlan
    pipeline: Pipeline
    runner: TrialRunner

    def run(self, **parameters: Any) -> TrialRecord:
        """Run the trial whose point has these parameters of the slot `harm`; its number is its place among the points."""
        for number, point in enumerate(enumerate_points(self.pipeline.space)):
            if all(point.get(f"harm.{name}") == value for name, value in parameters.items()):
                return self.runner.run(self.plan, self.pipeline, number, point, "enumeration")
        raise AssertionError(f"no point with {parameters}")


@contextlib.contextmanager
def trials_of(sweep: dict[str, Any], folder: Path) -> Iterator[Trials]:
    """Measure the baseline of a sweep into a new run folder, start the servers, and be ready for trials, on a lane of their own."""
    loaded = LoadedSweep(parse_sweep(sweep), Path("/"))
    prepared = prepare(loaded)
    folder.mkdir(parents=True)
    before = os.environ.get(FOLDER_VARIABLE)
    os.environ[FOLDER_VARIABLE] = str(folder.parent)  # where the lane's lock lies: no other sweep on this machine is waited for
    try:
        with TrialRunner(folder, loaded) as runner:
            plan = Baseline(folder, loaded, prepared, runner, lambda _line: None).plan()
            assert isinstance(plan, TrialPlan), plan
            runner._passes.start()
            yield Trials(plan, prepared.pipeline, runner)
    finally:
        os.environ.pop(FOLDER_VARIABLE)
        if before is not None:
            os.environ[FOLDER_VARIABLE] = before


def alive(pid: int) -> bool:
    """Whether a process is there and is not a mere zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
