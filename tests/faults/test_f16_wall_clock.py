"""F16: the wall clock jumps back an hour, ahead a day, and through summer time: durations, budgets and order stay what they are."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.sweeps import sweeping

# Found by every Python process of the sweep, Ray's too, before anything else runs in it.
JUMPING = '''
import os, time

_began, _time, _time_ns, _monotonic = float(os.environ["JUMPING_SINCE"]), time.time, time.time_ns, time.monotonic


def _jump():
    """Seconds that the wall clock is off: none, an hour back, a day ahead, and so on; another every second and a half."""
    return (0, -3600, 86400, -86400)[int((_monotonic() - _began) / 1.5) % 4]


time.time = lambda: _time() + _jump()
time.time_ns = lambda: _time_ns() + _jump() * 10**9
'''


@pytest.mark.timeout(600)
def test_a_wall_clock_that_jumps_changes_no_duration_no_budget_and_no_order(
    deterministic: Callable[..., dict[str, Any]], injected: Callable[[str], None], tmp_path: Path
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(JUMPING)
    env = {"PYTHONPATH": str(site), "JUMPING_SINCE": repr(time.monotonic()), "TZ": "Europe/Berlin"}
    began = time.monotonic()
    content = deterministic(tmp_path, budget={"trials": 4, "time": "30m", "stage_timeout": "10m"})

    for _ in ("back an hour", "ahead a day", "back two days"):
        injected("F16")
    with sweeping(content, tmp_path, "--json-lines", env=env) as sweep:
        status = sweep.ended()
        took = time.monotonic() - began
        assert sweep.nothing_left(), sweep.members()

    events = [json.loads(line) for line in sweep.output.splitlines()]
    trials = [e for e in events if e["event"] == "trial-finished"]
    assert status == 0, sweep.output
    assert [e["trial"] for e in trials] == [f"t-{n:04d}" for n in range(len(trials))]
    assert len(trials) == 4
    assert [e["seconds"] for e in events] == sorted(e["seconds"] for e in events)
    assert all(0 <= e["trial_seconds"] <= took and e["eta_seconds"] <= 5 * took for e in trials)
    summary = events[-1]["summary"]
    assert 0 < summary["seconds"] <= took
    assert not [n for n in summary["notes"] if "time budget" in n]
    for path in sweep.out.glob("trials/*/trial.json"):
        assert all(s["seconds"] >= 0 for s in json.loads(path.read_text())["stages"])
