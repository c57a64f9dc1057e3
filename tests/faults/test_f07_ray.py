"""F7: Ray's processes are killed in the middle of a trial: it runs again, on another Ray if need be; or the sweep ends with the way on."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.sweep.result import read_result
from tests.faults.sweeps import SweepProcess, sweeping

Sweep = Callable[..., dict[str, Any]]
Injected = Callable[[str], None]
WORKER, NODE_MANAGER, CONTROL_STORE = "ray::ImplicitFunc", "raylet/raylet", "gcs/gcs_server"


def kill_during(sweep: SweepProcess, number: int, victim: str) -> None:
    """Kill one of Ray's processes as soon as a trial runs."""
    sweep.wait_for_stage(f"t-{number:04d}", "")
    sweep.kill(victim)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_trial_whose_ray_died_runs_once_more_and_the_sweep_goes_on(deterministic: Sweep, injected: Injected, tmp_path: Path) -> None:
    with sweeping(deterministic(tmp_path, budget={"trials": 6}), tmp_path) as sweep:
        for number, victim in ((0, WORKER), (2, CONTROL_STORE), (4, NODE_MANAGER)):
            injected("F7")
            kill_during(sweep, number, victim)
        status = sweep.ended()

        assert status == 0, sweep.output
        assert sweep.nothing_left(), sweep.members()
    result = read_result(sweep.out)
    assert [r.number for r in result.records] == list(range(6))
    assert {str(r.status) for r in result.records} <= {"ok", "infeasible", "undecided"}
    assert max(r.attempts for r in result.records) <= 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_ray_that_keeps_dying_ends_the_sweep_with_status_3_and_the_way_on(deterministic: Sweep, injected: Injected, tmp_path: Path) -> None:
    content = deterministic(tmp_path, budget={"trials": 3})
    with sweeping(content, tmp_path) as sweep:
        sweep.wait_for_trials(1)
        killed: set[int] = set()

        def killed_another() -> bool:
            for pid, line in sweep.members().items():
                if CONTROL_STORE in line and pid not in killed:
                    injected("F7")
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
            return sweep.process.poll() is not None

        while not killed_another():
            time.sleep(0.02)
        status = sweep.ended()

        assert status == 3
        assert "ray: Ray must start and keep running; got " in sweep.output
        assert ", 3 times in a row. Finished trials are saved" in sweep.output
        assert "Resume with the same command" in sweep.output
        assert "Traceback" not in sweep.output
        assert sweep.nothing_left(), sweep.members()
    kept = {p: p.read_text() for p in sweep.out.glob("trials/*/trial.json")}
    assert json.loads((sweep.out / "result.json").read_text())["status"] == "interrupted"
    with sweeping(content, tmp_path) as again:
        assert again.ended() == 0, again.output
    assert {p: p.read_text() for p in kept} == kept


def test_nothing_outlives_a_sweep_that_is_killed(deterministic: Sweep, injected: Injected, tmp_path: Path) -> None:
    with sweeping(deterministic(tmp_path, budget={"trials": 4}), tmp_path) as sweep:
        sweep.wait_for_stage("t-0001", "")
        assert len(sweep.members()) > 5  # Ray's and ours

        injected("F7")
        os.kill(sweep.process.pid, signal.SIGKILL)
        sweep.ended()

        assert sweep.nothing_left(within_s=10.0), sweep.members()  # two seconds on a machine that is not crowded
