"""F17: busy cores, a measurement that is stopped for two seconds, a candidate that slows down: never silently met."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.benchmarks.latency import LatencyProtocol, measure_paired
from autotune.benchmarks.stages import LATENCY_FILE
from autotune.records import MetricValue, Status
from autotune.target import effective_cpus
from tests.faults.harm import Trials, harm_sweep, trials_of, write_case

Injected = Callable[[str], None]
HALF = "latency <= 0.5x"  # no candidate here is faster than the baseline at all: it adds one node to it


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    """Trials timed for real, three seconds each: no ratio becomes so narrow that they end sooner."""
    folder = tmp_path_factory.mktemp("noise")
    write_case(folder)
    with trials_of(
        harm_sweep(folder, {"mark": [0, 1, 2]}, measure={"max_time": "3s", "ratio_width": 1e-4}, constraints=[HALF]), folder / "out"
    ) as trials:
        yield trials


@contextmanager
def busy_cores() -> Iterator[None]:
    """A busy loop on every core that this process may use."""
    loops = []
    for cpu in sorted(os.sched_getaffinity(0)):
        code = f"import os; os.sched_setaffinity(0, {{{cpu}}}); print('on', flush=True)\nwhile True: pass"
        loops.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True))
    try:
        for loop in loops:
            assert loop.stdout is not None
            assert loop.stdout.readline() == "on\n"
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
            assert loop.stdout is not None
            loop.stdout.close()


def assert_not_met(status: Status, ratio: Any, constraints: Any) -> None:
    assert status in (Status.INFEASIBLE, Status.UNDECIDED)
    assert {c["verdict"] for c in constraints} <= {"violated", "undecided"}
    assert ratio.high > 0.5


def test_busy_cores_are_on_record_and_make_no_limit_met(timed: Trials, injected: Injected) -> None:
    for _ in range(effective_cpus()):
        injected("F17")
    with busy_cores():
        record = timed.run(mark=1)

    facts = next(s for s in record.stages if s.name == "latency").notes
    latency = record.metrics["latency"]
    assert_not_met(record.status, latency.ratio, record.constraints)
    assert facts["foreign_load"] > 0.3  # of all cores' time
    assert facts["noisy"] == (facts["ratio_width"] > 0.1)
    assert latency.low <= latency.value <= latency.high


def test_a_measurement_that_is_stopped_for_two_seconds_keeps_its_median_and_its_record_shows_the_time(timed: Trials, injected: Injected) -> None:
    injected("F17")
    plan, runner = timed.plan, timed.runner
    folder = plan.run / "stopped"
    found: list[tuple[dict[str, MetricValue], dict[str, Any]]] = []
    thread = threading.Thread(
        target=lambda: found.append(runner.latency(plan.baseline, plan.baseline, plan.eval_path, plan.rows.search, folder, seed=1))
    )
    thread.start()
    assert runner._onnx._process is not None
    child = working_child(runner._onnx._process.pid, thread)
    os.kill(child, signal.SIGSTOP)
    try:
        time.sleep(2.0)  # the fault itself
    finally:
        os.kill(child, signal.SIGCONT)
    thread.join()

    metrics, facts = found[0]
    with np.load(folder / LATENCY_FILE) as kept:
        runs = np.concatenate([kept[n].ravel() for n in ("candidate_ns", "baseline_ns", "candidate_first_ns", "baseline_first_ns")])
    stopped = runs >= 1_900_000_000
    assert np.count_nonzero(stopped) <= 1  # the stop met one run, or the time between two
    assert runs[~stopped].sum() <= (facts["elapsed_s"] - 2.0) * 1e9  # and no other run holds any of it
    assert metrics["latency"].value < 100.0
    assert metrics["latency"].ratio is not None
    assert metrics["latency"].ratio.low <= 1.25
    assert metrics["latency"].ratio.high >= 0.8  # the same model on both sides: no gain is made up


def working_child(parent: int, thread: threading.Thread) -> int:
    """The child of a server, once it has computed for a third of a second: it is in the midst of its runs."""
    while thread.is_alive():
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                if int(fields[1]) == parent and int(fields[11]) + int(fields[12]) > 0.3 * os.sysconf("SC_CLK_TCK"):
                    return int(entry.name)
    raise AssertionError("the measurement ended before it could be stopped")


def test_a_candidate_that_slows_down_with_each_call_has_a_wide_interval_and_is_called_noisy(injected: Injected) -> None:
    injected("F17")
    clock = {"now": 0}
    step = {"candidate": 0}

    def candidate() -> None:
        step["candidate"] += 1
        clock["now"] += 400_000 + 20_000 * step["candidate"]  # at first it is faster than half the baseline

    def baseline() -> None:
        clock["now"] += 1_000_000

    samples = measure_paired(lambda: candidate, lambda: baseline, LatencyProtocol(max_time_ns=2_000_000_000), seed=0, clock_ns=lambda: clock["now"])

    ratio = samples.ratio()
    assert samples.noisy
    assert samples.stopped_by != "ratio_width"
    assert ratio.high > 2 * ratio.low
    assert ratio.value > 0.5


def test_drift_that_meets_both_alike_leaves_the_ratio_as_it_is(injected: Injected) -> None:
    injected("F17")
    clock = {"now": 0}

    def run(nominal: int) -> Callable[[], None]:
        def once() -> None:
            clock["now"] += int(nominal * (1 + clock["now"] / 2e9))  # a machine that gets hot: 100 % slower after 2 s

        return once

    samples = measure_paired(
        lambda: run(900_000), lambda: run(1_000_000), LatencyProtocol(max_time_ns=3_000_000_000), seed=0, clock_ns=lambda: clock["now"]
    )

    ratio = samples.ratio()
    assert ratio.low <= 0.9 * 1.02
    assert ratio.high >= 0.9 * 0.98
    assert samples.candidate_ns.max() > 1.2 * samples.candidate_ns.min()
