"""F4: another process holds the device's lane for three times the time limit: that is no timeout, and the trial is measured afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from autotune.records import Status
from tests.faults.harm import harm_sweep, trials_of, write_case

LIMIT_S = 1.5
HOLDER = """
import time
from autotune.benchmarks.lane import lane
with lane("CPUExecutionProvider", exclusive=True):
    print("held", flush=True)
    time.sleep(%s)
"""


def test_waiting_for_the_lane_is_no_time_of_the_stage(tmp_path: Path, injected: Callable[[str], None]) -> None:
    injected("F4")
    write_case(tmp_path)
    sweep = harm_sweep(tmp_path, {"mark": [0, 1]}, budget={"trials": 5, "stage_timeout": f"{LIMIT_S}s"})
    with trials_of(sweep, tmp_path / "out") as trials:
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER % (3 * LIMIT_S)], stdout=subprocess.PIPE, text=True, env={**os.environ, "AUTOTUNE_LANES": str(tmp_path)}
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"

        record = trials.run(mark=1)

        holder.wait()
        holder.stdout.close()

    assert record.seconds > 2 * LIMIT_S, "the trial did not wait"
    assert record.status is Status.OK, record.message
    assert record.metrics["latency"].samples >= 64
