"""F1: a stage dies in convert, a pass, the opening of a session, a run, the user's metric: that trial ends, with the exact cause."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from autotune.model import ingest_onnx
from autotune.records import Cause, Status
from autotune.stages import StageLimits, StageOutcome, StageRunner
from autotune.sweep.run import run
from tests.faults.harm import MARKS, Trials, harm_sweep, harmful_graph, trials_of, write_case

Injected = Callable[[str], None]

DEATHS = {
    "segfault": (Cause.SIGNAL, "SIGSEGV"),
    "abort": (Cause.SIGNAL, "SIGABRT"),
    "exit": (Cause.EXIT, "exit status 7"),
    "exit_0": (Cause.EXIT, "exit status 0 and no result"),
    "sys_exit": (Cause.EXIT, "sys.exit('enough')"),
    "raise": (Cause.EXCEPTION, "no kernel for this"),
    "recursion": (Cause.EXCEPTION, "RecursionError"),
    "unspeakable": (Cause.EXCEPTION, "Unspeakable, whose text can't be had"),
}


@pytest.fixture(scope="module")
def in_pass(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    folder = tmp_path_factory.mktemp("pass")
    write_case(folder)
    params = {"here": ["", *DEATHS], "model": ["mark", "crashes_when_run"]}
    with trials_of(harm_sweep(folder, params), folder / "out") as trials:
        yield trials


@pytest.mark.parametrize("death", DEATHS)
def test_a_pass_that_dies_ends_its_trial_with_the_exact_cause(in_pass: Trials, injected: Injected, death: str) -> None:
    injected("F1")
    cause, words = DEATHS[death]

    record = in_pass.run(here=death, model="mark")

    assert (record.status, record.cause, record.stage) == (Status.FAILED, cause, "harm")
    assert words in record.message
    assert not record.metrics


def test_a_run_that_dies_ends_its_trial_and_the_next_one_is_measured(in_pass: Trials, injected: Injected) -> None:
    injected("F1")
    dead = in_pass.run(here="", model="crashes_when_run")
    alive = in_pass.run(here="", model="mark")

    assert (dead.status, dead.cause, dead.stage) == (Status.FAILED, Cause.SIGNAL, "check")
    assert "SIGSEGV" in dead.message
    assert alive.status is Status.OK


def test_the_record_keeps_the_last_lines_that_the_stage_printed(in_pass: Trials, injected: Injected) -> None:
    injected("F1")
    record = in_pass.run(here="raise", model="mark")

    assert record.output.rstrip().endswith("ValueError: no kernel for this")
    assert "Traceback" in record.output


def test_a_conversion_that_dies_ends_its_trial(digits: Path, tmp_path: Path, injected: Injected) -> None:
    injected("F1")
    write_case(tmp_path)
    chain = [{"slot": "harm", "pass": "HarmfulConversion", "params": {"here": ["", "segfault"]}}]
    model = {"script": str(digits / "net.py"), "weights": str(digits / "weights.pt"), "outputs": ["logits"]}
    sweep = harm_sweep(tmp_path, {}, chain=chain, model=model, data={"eval": str(digits / "eval.npz")})

    with trials_of(sweep, tmp_path / "out") as trials:
        dead = trials.run(here="segfault")
        alive = trials.run(here="")

    assert (dead.status, dead.cause, dead.stage) == (Status.FAILED, Cause.SIGNAL, "harm")
    assert "SIGSEGV" in dead.message
    assert alive.status is Status.OK, alive.message


@pytest.fixture(scope="module")
def in_metric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    folder = tmp_path_factory.mktemp("metric")
    write_case(folder)
    with trials_of(harm_sweep(folder, {"mark": [0, *(MARKS[d] for d in DEATHS)]}, metric="harmed_metric"), folder / "out") as trials:
        yield trials


@pytest.mark.parametrize("death", DEATHS)
def test_a_metric_that_dies_ends_its_trial(in_metric: Trials, injected: Injected, death: str) -> None:
    injected("F1")
    cause, words = DEATHS[death]

    dead = in_metric.run(mark=MARKS[death])
    alive = in_metric.run(mark=0)

    assert dead.stage == "accuracy"
    # What a metric raises is a verdict on what it was given; a death is a failure.
    expected = (Status.INVALID, Cause.BAD_OUTPUT) if cause is Cause.EXCEPTION else (Status.FAILED, cause)
    assert (dead.status, dead.cause) == expected
    assert words in dead.message
    assert alive.status is Status.OK, alive.message


def test_a_session_that_dies_while_it_opens_is_told_by_its_signal(tmp_path: Path, injected: Injected) -> None:
    injected("F1")
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 4]) for n in "xy")
    count = 100_000  # seconds to open
    nodes = [helper.make_node("Relu", [f"v{i}" if i else "x"], [f"v{i + 1}" if i + 1 < count else "y"]) for i in range(count)]
    onnx.save(
        helper.make_model(helper.make_graph(nodes, "long", [x], [y]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx"
    )
    np.savez(tmp_path / "eval.npz", x=np.ones((4, 4), np.float32))
    (tmp_path / "model").mkdir()
    model = ingest_onnx(tmp_path / "m.onnx", tmp_path / "model")
    args = {
        "model": model.to_json(), "baseline": None, "data": str(tmp_path / "eval.npz"), "rows": [0, 1], "batch_size": 1, "out": str(tmp_path / "s"),
    }  # fmt: skip

    with StageRunner(("numpy", "onnx", "onnxruntime", "autotune.benchmarks.stages")) as runner:
        runner.start()
        assert runner._process is not None
        found: list[StageOutcome] = []
        work = {"function": "autotune.benchmarks.stages:check", "args": args, "folder": tmp_path / "s", "limits": StageLimits(60.0)}
        thread = threading.Thread(target=lambda: found.append(runner.run(**work)))
        thread.start()
        child = child_at_work(runner._process.pid, thread, seconds=1.5)
        os.kill(child, signal.SIGSEGV)
        thread.join()

    assert found[0].cause is Cause.SIGNAL
    assert "SIGSEGV" in found[0].message


def child_at_work(parent: int, thread: threading.Thread, *, seconds: float) -> int:
    """The first child of a process, once it has computed for so long: reading and checking the graph takes the first second."""
    while thread.is_alive():
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent and (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") > seconds:
                return int(entry.name)
    raise AssertionError("the stage ended before it could be killed")


@pytest.fixture(scope="module")
def whole_sweep(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("sweep")
    write_case(folder)
    sweep = harm_sweep(folder, {"here": ["", *DEATHS], "model": ["mark"]}, budget={"trials": 30})
    return run(sweep, folder / "out")


def test_the_rest_of_the_sweep_is_intact_and_delivers(whole_sweep: Any, injected: Injected) -> None:
    injected("F1")

    assert whole_sweep.status == "delivered"
    assert len(whole_sweep.records) == len(DEATHS) + 2
    assert whole_sweep.summary["trials"] == {"ok": 2, "failed": len(DEATHS)}


def test_no_point_that_died_is_run_twice(whole_sweep: Any, injected: Injected) -> None:
    injected("F1")
    points = [json.dumps(dict(r.point), sort_keys=True) for r in whole_sweep.records]

    assert len(set(points)) == len(points)
    assert {r.attempts for r in whole_sweep.records} == {1}


def test_no_number_of_a_dead_trial_reaches_the_front_or_the_sampler(whole_sweep: Any, injected: Injected) -> None:
    injected("F1")
    import optuna

    from autotune.sweep.search import open_study

    dead = {r.number for r in whole_sweep.records if not r.measured}
    study, _ = open_study(whole_sweep.run, None, ["minimize", "maximize"], ["latency", "right"])

    assert {study.trials[n].state for n in dead} == {optuna.trial.TrialState.PRUNED}
    assert not {f"t-{n:04d}" for n in dead} & set(whole_sweep.summary["front"])


def test_a_model_that_crashes_by_itself_ends_as_a_failed_trial_and_exit_status_4(tmp_path: Path, injected: Injected) -> None:
    injected("F1")
    write_case(tmp_path)
    onnx.save(harmful_graph(tmp_path / "model.onnx", "crashes_when_run"), tmp_path / "model.onnx")

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
