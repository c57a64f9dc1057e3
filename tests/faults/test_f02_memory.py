"""F2: a stage that eats the memory ends as `oom`, by our own limit or by the kernel's; the sweep goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from autotune.model import ingest_onnx
from autotune.records import Cause, Status
from autotune.stages import StageLimits, StageOutcome, StageRunner
from tests.faults.harm import MARKS, Trials, harm_sweep, trials_of, write_case

Injected = Callable[[str], None]
LIMIT = {"trials": 10, "memory": "1500MB"}
FUNCTIONS = str(Path(__file__).parents[1])


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    folder = tmp_path_factory.mktemp("memory")
    write_case(folder)
    params = {"here": ["", "memory"], "model": ["mark", "eats_memory_when_run"], "mark": [0, MARKS["memory"]]}
    with trials_of(harm_sweep(folder, params, metric="harmed_metric", budget=LIMIT), folder / "out") as trials:
        yield trials


@pytest.mark.parametrize(
    ("stage", "point"),
    [
        ("harm", {"here": "memory", "model": "mark", "mark": 0}),
        ("check", {"here": "", "model": "eats_memory_when_run", "mark": 0}),
        ("accuracy", {"here": "", "model": "mark", "mark": MARKS["memory"]}),
    ],
)
def test_a_pass_a_run_or_a_metric_that_eats_the_memory_ends_as_oom(
    limited: Trials, injected: Injected, stage: str, point: dict[str, str | int]
) -> None:
    injected("F2")
    record = limited.run(**point)

    assert (record.status, record.cause, record.stage) == (Status.FAILED, Cause.OOM, stage), record.message


def test_the_next_trial_is_measured(limited: Trials, injected: Injected) -> None:
    injected("F2")
    limited.run(here="memory", model="mark", mark=0)

    record = limited.run(here="", model="mark", mark=0)

    assert record.status is Status.OK, record.message


def test_a_conversion_that_eats_the_memory_ends_as_oom(digits: Path, tmp_path: Path, injected: Injected) -> None:
    injected("F2")
    chain = [{"slot": "harm", "pass": "HarmfulConversion", "params": {"here": ["", "memory"]}}]
    model = {"script": str(digits / "net.py"), "weights": str(digits / "weights.pt"), "outputs": ["logits"]}
    sweep = harm_sweep(tmp_path, {}, chain=chain, model=model, data={"eval": str(digits / "eval.npz")}, budget={"trials": 5, "memory": "2500MB"})

    with trials_of(sweep, tmp_path / "out") as trials:
        record = trials.run(here="memory")

    assert (record.status, record.cause, record.stage) == (Status.FAILED, Cause.OOM, "harm"), record.message


def test_a_session_that_wants_more_than_the_limit_ends_as_oom(tmp_path: Path, injected: Injected) -> None:
    injected("F2")
    size = 5000  # 100 MB of weights, and as much again while they are packed
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", size]) for n in "xy")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "large", [x], [y], [numpy_helper.from_array(np.ones((size, size), np.float32), "w")]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    np.savez(tmp_path / "eval.npz", x=np.ones((2, size), np.float32))
    (tmp_path / "model").mkdir()
    model = ingest_onnx(tmp_path / "m.onnx", tmp_path / "model")
    args = {
        "model": model.to_json(), "baseline": None, "data": str(tmp_path / "eval.npz"), "rows": [0], "batch_size": 1, "out": str(tmp_path / "s"),
    }  # fmt: skip

    with StageRunner(("numpy", "onnx", "onnxruntime", "autotune.benchmarks.stages")) as runner:
        runner.start()
        assert runner._process is not None
        status = Path(f"/proc/{runner._process.pid}/status").read_text()
        held = int(status.partition("VmData:")[2].split()[0]) * 1024
        outcome = runner.run(
            "autotune.benchmarks.stages:check", args, folder=tmp_path / "s", limits=StageLimits(60.0, memory_bytes=held + 60_000_000)
        )
        enough = runner.run(
            "autotune.benchmarks.stages:check", args, folder=tmp_path / "s", limits=StageLimits(60.0, memory_bytes=held + 1_500_000_000)
        )

    assert outcome.cause is Cause.OOM, outcome.message
    assert enough.ok, enough.message


def test_a_library_that_aborts_for_want_of_memory_is_oom_and_not_a_mere_signal(
    tmp_path: Path, injected: Injected, monkeypatch: pytest.MonkeyPatch
) -> None:
    injected("F2")
    monkeypatch.setenv("PYTHONPATH", FUNCTIONS)
    with StageRunner(("numpy",)) as runner:
        outcome = runner.run("stage_functions:abort_like_bad_alloc", {}, folder=tmp_path, limits=StageLimits(30.0, memory_bytes=2_000_000_000))

    assert outcome.cause is Cause.OOM
    assert "SIGABRT" in outcome.message
    assert "bad_alloc" in outcome.message
    assert "limit 2000 MB" in outcome.message


def test_a_kill_from_outside_is_no_oom_when_little_memory_was_held(tmp_path: Path, injected: Injected, monkeypatch: pytest.MonkeyPatch) -> None:
    injected("F2")
    monkeypatch.setenv("PYTHONPATH", FUNCTIONS)
    with StageRunner(("numpy",)) as runner:
        found: list[StageOutcome] = []
        work = {"function": "stage_functions:wait", "args": {"pid_file": str(tmp_path / "pid")}, "folder": tmp_path, "limits": StageLimits(60.0)}
        thread = threading.Thread(target=lambda: found.append(runner.run(**work)))  # type: ignore[arg-type] # a mapping of arguments
        thread.start()
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert thread.is_alive()
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        thread.join()

    assert found[0].cause is Cause.SIGNAL
    assert "SIGKILL from outside, at a peak of" in found[0].message


MEMORY_CONTROLLER = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group of 500 MB for one process and its children, where this machine lets us make one."""
    group = MEMORY_CONTROLLER / f"autotune-test-{uuid.uuid4().hex[:8]}"
    unified = Path("/sys/fs/cgroup", group.name)
    try:
        if MEMORY_CONTROLLER.is_dir():
            group.mkdir()
            (group / "memory.limit_in_bytes").write_text("500000000")
        else:
            group = unified
            group.mkdir()
            (group / "memory.max").write_text("500000000")
            (group / "memory.swap.max").write_text("0")
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    group.rmdir()


def test_the_kernels_own_killer_is_told_apart_from_other_kills(memory_group: Path, tmp_path: Path, injected: Injected) -> None:
    injected("F2")
    code = (
        "import os, sys, json\n"
        "from pathlib import Path\n"
        f"Path({str(memory_group / 'cgroup.procs')!r}).write_text(str(os.getpid()))\n"
        "from autotune.stages import StageLimits, StageRunner\n"
        "with StageRunner(('numpy',)) as runner:\n"
        f"    first = runner.run('stage_functions:eat_memory', {{}}, folder=Path({str(tmp_path)!r}), limits=StageLimits(60))\n"
        f"    second = runner.run('stage_functions:double', {{'x': 2}}, folder=Path({str(tmp_path)!r}), limits=StageLimits(60))\n"
        "print(json.dumps([str(first.cause), first.message, second.value['value']]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": FUNCTIONS}, capture_output=True, text=True, check=False, timeout=120
    )

    assert done.returncode == 0, done.stderr
    cause, message, value = json.loads(done.stdout)
    assert cause == "oom"
    assert "killed by the kernel for want of memory" in message
    assert value == 4
