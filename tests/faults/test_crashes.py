"""Crashes end their own trial only: the cause is on record, the rest of the sweep is intact."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from autotune.records import Cause, Status
from autotune.sweep.result import SweepResult
from autotune.sweep.run import run

SCRIPT = '''
"""A pass that harms the model in the way it is asked to."""

import os
import time

import onnx
from onnx import helper

from autotune.passes.base import ONNX, Pass, PassConfigParam, PassContract
from autotune.passes.registry import register
from autotune.search_spaces.parameters import Categorical

HARMS = ["none", "abort_in_pass", "exit_in_pass", "raise_in_pass", "hang_in_pass", "not_a_number", "constant", "shape", "crash_when_run"]


@register
class Harm(Pass):
    """Harm the model."""

    contract = PassContract(accepts=ONNX, returns=ONNX)

    @classmethod
    def _default_config(cls, accelerator_spec):
        return {"how": PassConfigParam(type_=str, default_value="none", search_defaults=Categorical(HARMS))}

    def _run_for_config(self, model, config, output_model_path):
        how = config["how"]
        if how == "abort_in_pass":
            os.abort()
        if how == "exit_in_pass":
            os._exit(7)
        if how == "raise_in_pass":
            raise ValueError("no kernel for this")
        if how == "hang_in_pass":
            time.sleep(600)
        proto = model.load()
        output = proto.graph.output[0].name
        last = next(n for n in proto.graph.node if output in n.output)
        last.output[list(last.output).index(output)] = "kept_inside"
        if how == "not_a_number":
            proto.graph.node.append(helper.make_node("Log", ["minus"], ["nan"]))
            proto.graph.initializer.append(helper.make_tensor("minus", 1, [1], [-1.0]))
            proto.graph.node.append(helper.make_node("Add", ["kept_inside", "nan"], [output]))
        elif how == "constant":
            proto.graph.initializer.append(helper.make_tensor("zero", 1, [1], [0.0]))
            proto.graph.node.append(helper.make_node("Mul", ["kept_inside", "zero"], [output]))
        elif how == "shape":
            proto.graph.node.append(helper.make_node("Concat", ["kept_inside", "kept_inside"], [output], axis=1))
            del proto.graph.output[0].type.tensor_type.shape.dim[:]
            proto.graph.output[0].type.tensor_type.ClearField("shape")
        elif how == "crash_when_run":
            # A Loop with an unnamed state output is valid, and ONNX Runtime 1.32 dies of it when it runs.
            body = helper.make_graph(
                [helper.make_node("Tanh", ["h"], ["h_out"]), helper.make_node("Identity", ["go"], ["go_out"]),
                 helper.make_node("Identity", ["h_out"], ["each"])], "body",
                [helper.make_tensor_value_info("i", 7, []), helper.make_tensor_value_info("go", 9, []),
                 helper.make_tensor_value_info("h", 1, ["batch", 10])],
                [helper.make_tensor_value_info("go_out", 9, []), helper.make_tensor_value_info("h_out", 1, ["batch", 10]),
                 helper.make_tensor_value_info("each", 1, ["batch", 10])])
            proto.graph.initializer.append(helper.make_tensor("count", 7, [], [1]))
            proto.graph.initializer.append(helper.make_tensor("first", 7, [1], [0]))
            proto.graph.node.append(helper.make_node("Loop", ["count", "", "kept_inside"], ["", "steps"], body=body))
            proto.graph.node.append(helper.make_node("Squeeze", ["steps", "first"], [output]))
        else:
            proto.graph.node.append(helper.make_node("Identity", ["kept_inside"], [output]))
        return model.written(output_model_path, proto=proto)
'''

EXPECTED = {
    "none": (Status.OK, None, ""),
    "abort_in_pass": (Status.FAILED, Cause.SIGNAL, "SIGABRT"),
    "exit_in_pass": (Status.FAILED, Cause.EXIT, "exit status 7"),
    "raise_in_pass": (Status.FAILED, Cause.EXCEPTION, "no kernel for this"),
    "hang_in_pass": (Status.FAILED, Cause.TIMEOUT, "no end after 8 s"),
    "not_a_number": (Status.INVALID, Cause.NOT_FINITE, "NaN"),
    "constant": (Status.INVALID, Cause.BAD_OUTPUT, "the same output"),
    "shape": (Status.INVALID, Cause.BAD_OUTPUT, "shape"),
    "crash_when_run": (Status.FAILED, Cause.SIGNAL, "SIGSEGV"),
}


@pytest.fixture(scope="module")
def harmed(digits: Path, sweep_of: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> SweepResult:
    folder = tmp_path_factory.mktemp("harm")
    (folder / "harm.py").write_text(SCRIPT)
    chain = [
        {"slot": "harm", "pass": "Harm", "optional": True},
        {"slot": "session", "pass": "OrtPerfTuning", "params": {"graph_optimization_level": "all"}},
    ]
    sweep = sweep_of(digits, chain=chain, script=str(folder / "harm.py"), budget={"trials": 20, "stage_timeout": "8s"})
    return run(sweep, folder / "out")


@pytest.mark.parametrize("how", EXPECTED)
def test_each_harm_ends_its_own_trial_with_its_cause(harmed: SweepResult, how: str) -> None:
    status, cause, words = EXPECTED[how]

    record = next(r for r in harmed.records if r.point.get("harm.how") == how)

    assert (record.status, record.cause) == (status, cause), record.message
    assert words in record.message
    assert record.measured == (how == "none")


def test_the_rest_of_the_sweep_is_intact_and_delivers(harmed: SweepResult) -> None:
    assert len(harmed.records) == len(EXPECTED) + 1
    assert harmed.status == "delivered"
    assert harmed.summary["trials"] == {"ok": 2, "failed": 5, "invalid": 3}


def test_no_number_of_a_failed_or_invalid_trial_reaches_the_front_or_the_sampler(harmed: SweepResult) -> None:
    import optuna

    from autotune.sweep.search import open_study

    bad = {r.number for r in harmed.records if not r.measured}
    study, _ = open_study(harmed.run, None, ["minimize", "maximize"], ["latency", "accuracy"])

    assert {study.trials[n].state for n in bad} == {optuna.trial.TrialState.PRUNED}
    assert not {f"t-{n:04d}" for n in bad} & set(harmed.summary["front"])


def crashing_model() -> onnx.ModelProto:
    body = helper.make_graph(
        [helper.make_node("MatMul", ["h", "square"], ["p"]), helper.make_node("Tanh", ["p"], ["h_out"]),
         helper.make_node("Identity", ["go"], ["go_out"]), helper.make_node("Identity", ["h_out"], ["each"])],
        "body",
        [helper.make_tensor_value_info("i", TensorProto.INT64, []), helper.make_tensor_value_info("go", TensorProto.BOOL, []),
         helper.make_tensor_value_info("h", TensorProto.FLOAT, ["batch", 16])],
        [helper.make_tensor_value_info("go_out", TensorProto.BOOL, []), helper.make_tensor_value_info("h_out", TensorProto.FLOAT, ["batch", 16]),
         helper.make_tensor_value_info("each", TensorProto.FLOAT, ["batch", 16])],
    )  # fmt: skip
    graph = helper.make_graph(
        [helper.make_node("Loop", ["count", "", "x"], ["", "steps"], body=body)], "crash",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 16])],
        [helper.make_tensor_value_info("steps", TensorProto.FLOAT, [3, "batch", 16])],
        [numpy_helper.from_array(np.eye(16, dtype=np.float32), "square"), numpy_helper.from_array(np.array(3), "count")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_model_that_crashes_by_itself_ends_as_a_failed_trial_and_exit_status_4(tmp_path: Path) -> None:
    onnx.save(crashing_model(), str(tmp_path / "model.onnx"))
    np.savez(tmp_path / "eval.npz", x=np.random.default_rng(0).normal(size=(12, 16)).astype(np.float32))

    done = subprocess.run(
        [sys.executable, "-m", "autotune", "run", "--model", tmp_path / "model.onnx", "--eval", tmp_path / "eval.npz", "--metric", "cosine",
         "--threads", "1", "--trials", "3", "--out", tmp_path / "out", "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    result = json.loads(done.stdout.splitlines()[-1])
    record = json.loads((tmp_path / "out" / "trials" / "t-0000" / "trial.json").read_text())
    assert done.returncode == 4
    assert "Traceback" not in done.stderr
    assert (result["status"], result["trials"]) == ("none-feasible", {"failed": 1})
    assert (record["status"], record["cause"]) == ("failed", "signal")
    assert "SIGSEGV" in record["message"]
