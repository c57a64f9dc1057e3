"""Stages in child processes: every kind of ending has its cause, and nothing outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.records import Cause
from autotune.stages import KEPT_OUTPUT_BYTES, LOG_FILE, StageLimits, StageRunner

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def runner() -> Iterator[StageRunner]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(HERE)
    with StageRunner(("numpy", "onnx", "onnxruntime")) as started:
        started.start()
        yield started
    os.environ.pop("PYTHONPATH")
    if before is not None:
        os.environ["PYTHONPATH"] = before


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_stage_returns_what_its_function_returns_and_works_in_its_folder(runner: StageRunner, tmp_path: Path) -> None:
    outcome = runner.run("stage_functions:double", {"x": 21}, folder=tmp_path / "s", limits=StageLimits(30))

    assert outcome.ok
    assert outcome.value is not None
    assert outcome.value["value"] == 42
    assert outcome.value["cwd"] == str(tmp_path / "s")
    assert outcome.peak_rss_bytes > 1_000_000


def test_each_stage_has_a_process_of_its_own(runner: StageRunner, tmp_path: Path) -> None:
    pids = {runner.run("stage_functions:double", {"x": 1}, folder=tmp_path, limits=StageLimits(30)).value["pid"] for _ in range(3)}  # type: ignore[index]

    assert len(pids) == 3
    assert os.getpid() not in pids


def test_the_server_holds_one_thread_so_that_forking_it_is_safe(runner: StageRunner) -> None:
    assert runner.server_threads == 1


@pytest.mark.parametrize(
    ("function", "cause", "words"),
    [
        ("segfault", Cause.SIGNAL, "SIGSEGV"),
        ("abort", Cause.SIGNAL, "SIGABRT"),
        ("leave_at_once", Cause.EXIT, "exit status 7"),
        ("leave", Cause.EXIT, "sys.exit(3)"),
        ("throw", Cause.EXCEPTION, "ValueError: the library says no"),
        ("missing", Cause.EXCEPTION, "missing"),
        ("return_a_set", Cause.EXCEPTION, "object has no JSON form"),
        ("return_a_number", Cause.EXCEPTION, "must return a dictionary; got int"),
    ],
)
def test_an_ending_is_told_by_its_exact_cause(runner: StageRunner, tmp_path: Path, function: str, cause: Cause, words: str) -> None:
    outcome = runner.run(f"stage_functions:{function}", {}, folder=tmp_path, limits=StageLimits(30))

    assert outcome.value is None
    assert outcome.cause is cause
    assert words in outcome.message


def test_a_hanging_stage_is_killed_with_its_grandchildren(runner: StageRunner, tmp_path: Path) -> None:
    started = time.monotonic()
    outcome = runner.run("stage_functions:hang_with_grandchild", {"pid_file": str(tmp_path / "pid")}, folder=tmp_path, limits=StageLimits(1.0))

    assert outcome.cause is Cause.TIMEOUT
    assert time.monotonic() - started < 1.0 + 5.0
    assert not alive(int((tmp_path / "pid").read_text()))


def test_a_stopped_stage_is_killed_at_its_time_limit(runner: StageRunner, tmp_path: Path) -> None:
    outcome = runner.run("stage_functions:stop_itself", {}, folder=tmp_path, limits=StageLimits(1.0))

    assert outcome.cause is Cause.TIMEOUT


def test_a_stage_that_wants_too_much_memory_ends_as_oom(runner: StageRunner, tmp_path: Path) -> None:
    outcome = runner.run("stage_functions:eat_memory", {}, folder=tmp_path, limits=StageLimits(120.0, memory_bytes=600_000_000))

    assert outcome.cause is Cause.OOM


def test_output_is_kept_up_to_a_limit_and_its_end_is_there(runner: StageRunner, tmp_path: Path) -> None:
    outcome = runner.run("stage_functions:print_much", {}, folder=tmp_path, limits=StageLimits(60))

    assert outcome.ok
    assert outcome.output_tail.rstrip().endswith("the last words")
    assert (tmp_path / LOG_FILE).stat().st_size <= KEPT_OUTPUT_BYTES


def test_temporary_files_stay_in_the_stages_folder_and_go_with_it(runner: StageRunner, tmp_path: Path) -> None:
    outcome = runner.run("stage_functions:where_scratch_is", {}, folder=tmp_path / "a", limits=StageLimits(30))
    runner.run("stage_functions:leave_scratch_and_die", {}, folder=tmp_path / "b", limits=StageLimits(30))

    assert outcome.value is not None
    assert Path(outcome.value["folder"]).is_relative_to(tmp_path / "a")
    assert [p for p in tmp_path.rglob("*") if p.name in ("kept", "tmp")] == []


def test_what_a_stage_does_to_its_process_stays_there(runner: StageRunner, tmp_path: Path) -> None:
    runner.run("stage_functions:change_everything", {}, folder=tmp_path, limits=StageLimits(30))

    after = runner.run("stage_functions:double", {"x": 1}, folder=tmp_path, limits=StageLimits(30))
    assert after.value is not None
    assert after.value["cwd"] == str(tmp_path)
    assert "AUTOTUNE_TEST_LEAK" not in os.environ


def test_a_daemon_that_a_stage_leaves_behind_is_gone_with_it(runner: StageRunner, tmp_path: Path) -> None:
    outcome = runner.run("stage_functions:leave_a_daemon", {"pid_file": str(tmp_path / "pid")}, folder=tmp_path, limits=StageLimits(30))

    assert outcome.ok
    assert not alive(int((tmp_path / "pid").read_text()))


def test_threads_and_exit_handlers_that_a_stage_leaves_neither_hold_it_up_nor_run(runner: StageRunner, tmp_path: Path) -> None:
    trace = tmp_path / "trace"

    outcome = runner.run("stage_functions:leave_a_thread_and_a_handler", {"trace": str(trace)}, folder=tmp_path, limits=StageLimits(60))

    assert outcome.ok
    assert outcome.seconds < 30
    assert not trace.exists()


def test_stages_start_from_the_same_random_state_whatever_the_servers_age(
    runner: StageRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(server: StageRunner, seed: int) -> object:
        return server.run("stage_functions:draw", {"seed": seed}, folder=tmp_path, limits=StageLimits(30)).value

    monkeypatch.setenv("PYTHONPATH", str(HERE))
    with StageRunner(("numpy", "numpy.random")) as other, StageRunner(("numpy", "numpy.random")) as third:
        first = drawn(other, 1)

        assert drawn(other, 1) == first
        assert drawn(third, 1) == first
        assert drawn(other, 2) != first


def test_a_child_costs_a_few_milliseconds(runner: StageRunner, tmp_path: Path) -> None:
    took = []
    for _ in range(15):
        started = time.perf_counter()
        runner.run("stage_functions:double", {"x": 1}, folder=tmp_path, limits=StageLimits(30))
        took.append(time.perf_counter() - started)

    assert min(took) < 0.05  # of start and end; the least, since the machine may be busy


def test_signals_that_the_callers_thread_blocks_are_not_blocked_in_a_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    try:
        with StageRunner(()) as runner:
            outcome = runner.run("stage_functions:which_signals", {}, folder=tmp_path, limits=StageLimits(30))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    assert outcome.value == {"ignored": [], "blocked": []}


def test_a_module_that_cannot_be_preloaded_is_the_affair_of_the_stage_that_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    with StageRunner(("no_such_module", "numpy")) as runner:
        outcome = runner.run("stage_functions:double", {"x": 4}, folder=tmp_path, limits=StageLimits(30))
        missing = runner.run("no_such_module:stage", {}, folder=tmp_path, limits=StageLimits(30))

    assert outcome.ok
    assert missing.cause is Cause.EXCEPTION
    assert "No module named 'no_such_module'" in missing.message


def test_a_server_killed_in_the_midst_of_a_stage_takes_it_along_and_the_stage_runs_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    with StageRunner(("numpy",)) as runner:
        found = []
        args = {"pid_file": str(tmp_path / "pid")}
        thread = threading.Thread(target=lambda: found.append(runner.run("stage_functions:wait", args, folder=tmp_path, limits=StageLimits(3.0))))
        thread.start()
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert thread.is_alive()
        first = int((tmp_path / "pid").read_text())
        assert runner._process is not None
        runner._process.kill()
        thread.join()

    assert int((tmp_path / "pid").read_text()) != first, "it did not run again"
    assert found[0].cause is Cause.TIMEOUT
    assert not alive(first)


def test_a_killed_server_is_started_again_and_the_stage_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    with StageRunner(("numpy",)) as runner:
        runner.start()
        assert runner._process is not None
        runner._process.kill()
        runner._process.wait()

        outcome = runner.run("stage_functions:double", {"x": 4}, folder=tmp_path, limits=StageLimits(30))

    assert outcome.value is not None
    assert outcome.value["value"] == 8


def test_closing_the_runner_ends_its_server(tmp_path: Path) -> None:
    runner = StageRunner(())
    runner.start()
    assert runner._process is not None
    pid = runner._process.pid

    runner.close()

    assert not alive(pid)


def test_the_server_outlives_the_thread_that_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    with StageRunner(("numpy",)) as runner:
        thread = threading.Thread(target=runner.start)
        thread.start()
        thread.join()
        assert runner._process is not None
        pid = runner._process.pid
        time.sleep(0.2)

        outcome = runner.run("stage_functions:double", {"x": 4}, folder=tmp_path, limits=StageLimits(30))

        assert outcome.ok
        assert runner._process.pid == pid


def test_a_server_whose_caller_was_killed_ends_with_its_stage(tmp_path: Path) -> None:
    code = (
        "import sys, threading, time\n"
        "from pathlib import Path\n"
        "from autotune.stages import StageLimits, StageRunner\n"
        "runner = StageRunner(())\n"
        "runner.start()\n"
        "print(runner._process.pid, flush=True)\n"
        f"args = {{'pid_file': {str(tmp_path / 'pid')!r}}}\n"
        f"runner.run('stage_functions:hang_with_grandchild', args, folder=Path({str(tmp_path)!r}), limits=StageLimits(600))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    server = int(process.stdout.readline())
    deadline = time.monotonic() + 30
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    grandchild = int((tmp_path / "pid").read_text())

    process.kill()
    process.wait()
    process.stdout.close()

    deadline = time.monotonic() + 5
    while (alive(server) or alive(grandchild)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(server)
    assert not alive(grandchild)
