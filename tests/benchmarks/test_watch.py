"""What is seen of the machine in a round, and which rounds it spoilt."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autotune.benchmarks.watch import Load, Reading, between

START = Reading(
    wall_s=100.0, boot_s=100.0, own_s=10.0, waiting_s=1.0, busy_s=50.0, stolen_s=2.0, throttled_s=0.0, hot=3.0, mhz=2600.0, cpus=2
)  # fmt: skip
QUIET = {"wall_s": 1.0, "boot_s": 1.0, "own_s": 1.0, "busy_s": 1.0}  # one thread computed all the time on one of two CPUs


def later(before: Reading, **passed: float) -> Reading:
    changes: dict[str, Any] = {name: getattr(before, name) + amount for name, amount in passed.items()}
    return replace(before, **changes)


def load_of(*rounds: dict[str, float]) -> Load:
    return Load.of([between(START, later(START, **{**QUIET, **one})) for one in rounds])


def test_what_others_took_is_what_the_cpus_did_besides_this_process() -> None:
    load = load_of({"busy_s": 1.6}, {"busy_s": 1.0})

    assert load.foreign_s == pytest.approx([0.6, 0.0])
    assert load.foreign_share() == pytest.approx(0.6 / 4)


def test_a_share_is_none_where_the_system_does_not_tell_and_never_below_0() -> None:
    nothing_known = replace(START, busy_s=np.nan)

    assert load_of({"busy_s": 0.9}).foreign_share() == 0.0
    assert Load.of([between(nothing_known, later(nothing_known, wall_s=1.0))]).foreign_share() is None


@pytest.mark.parametrize(
    "trouble",
    [
        {"busy_s": 1.5}, {"busy_s": 1.1, "stolen_s": 0.1}, {"waiting_s": 0.05, "own_s": 0.95}, {"own_s": 0.8}, {"throttled_s": 0.05}, {"hot": 1},
        {"boot_s": 3.0}, {"cpus": -1},
    ],
)  # fmt: skip
def test_a_round_that_something_disturbed_is_flagged_among_quiet_ones(trouble: dict[str, float]) -> None:
    load = load_of({}, {}, {}, trouble, {})

    assert load.disturbed().tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("always", [{"busy_s": 1.9}, {"stolen_s": 0.3}, {"waiting_s": 0.4, "own_s": 0.6}, {"own_s": 0.5}, {"throttled_s": 0.2}])
def test_what_is_always_there_disturbs_no_round(always: dict[str, float]) -> None:
    assert not load_of(*[always] * 6).disturbed().any()


def test_a_stop_makes_no_other_round_look_busy() -> None:
    busy, stopped = {"waiting_s": 0.5, "own_s": 0.5}, {"wall_s": 5.0, "boot_s": 5.0, "waiting_s": 0.5, "own_s": 0.5, "busy_s": 3.0}

    load = load_of(busy, stopped, stopped, busy, {"waiting_s": 0.55, "own_s": 0.45}, {"waiting_s": 0.8, "own_s": 0.2})

    assert load.disturbed().tolist() == [False, True, True, False, False, True]


def test_the_kernels_ticks_alone_flag_nothing() -> None:
    short = {"wall_s": 0.06, "boot_s": 0.06, "own_s": 0.06, "busy_s": 0.06}

    load = load_of(*[{**short, "busy_s": 0.06 + 0.01 * ticks} for ticks in (-1, 0, 1, 0, 1, -1)])

    assert not load.disturbed().any()


def test_pauses_between_paced_runs_are_no_stops() -> None:
    idle = {**QUIET, "own_s": 0.1, "busy_s": 0.1}
    seen = [between(START, later(START, **idle), pause_s=pause) for pause in (0.9, 0.9, 0.0)]

    load = Load.of(seen)

    assert load.off_cpu_s == pytest.approx([0.0, 0.0, 0.9])
    assert load.disturbed().tolist() == [False, False, True]


def test_what_the_system_does_not_tell_flags_nothing_and_is_none_in_the_summary() -> None:
    silent = Reading(**{**vars(START), **dict.fromkeys(("boot_s", "waiting_s", "busy_s", "stolen_s", "throttled_s", "hot", "mhz"), np.nan)})
    load = Load.of([between(silent, later(silent, wall_s=1.0, own_s=1.0))] * 3)

    summary = load.summary()

    assert not load.disturbed().any()
    assert {k for k, v in summary.items() if v is None} == {"foreign_share", "stolen_s", "waiting_s", "asleep_s", "throttled_s", "hot", "mhz"}
    assert summary["cpus"] == 2


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="needs a proc file system")
def test_this_machine_tells_of_itself() -> None:
    before = Reading.now()
    total = sum(i * i for i in range(300_000))
    after = Reading.now()

    load = Load.of([between(before, after)])
    assert total > 0
    assert after.own_s - before.own_s > 0
    assert load.wall_s[0] > 0
    assert before.cpus == len(os.sched_getaffinity(0))
    assert before.busy_s > 0


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="this kernel keeps no account of waiting")
def test_waiting_for_a_cpu_that_another_process_keeps_busy_is_seen() -> None:
    cpu = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nprint(flush=True)\nwhile True:\n    pass"
    before_cpus = os.sched_getaffinity(0)
    busy = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert busy.stdout is not None
        busy.stdout.readline()
        os.sched_setaffinity(0, {cpu})
        before = Reading.now()
        while Reading.now().own_s - before.own_s < 0.2:
            pass
        load = Load.of([between(before, Reading.now())])
    finally:
        os.sched_setaffinity(0, before_cpus)
        busy.kill()
        busy.communicate()

    assert load.waiting_s[0] > 0.05
    assert load.foreign_share() == pytest.approx(load.waiting_s[0] / load.wall_s[0], abs=0.25)
