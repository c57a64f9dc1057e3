"""F23: a hundred restarts of a record of a thousand trials: each is quick, none adds a byte, and numbers and points stay what they are."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.config import LoadedSweep, parse_sweep
from autotune.digest import digest_of, dump_json, write_durably
from autotune.records import Cause, Interval, MetricValue, Status, TrialRecord
from autotune.search_spaces.space import point_key
from autotune.sweep.baseline import Baseline
from autotune.sweep.interrupts import Interrupts
from autotune.sweep.prepare import Prepared, prepare
from autotune.sweep.run import _Sweep
from autotune.sweep.search import JOURNAL_FILE, Asked, Search
from autotune.trial import TrialPlan, TrialRunner
from tests.faults.agreement import disagreements
from tests.faults.harm import harm_sweep, write_case

TRIALS = 1000
PARAMETERS = {"mark": list(range(20)), "threads": list(range(8)), "here": ["", *"abcdefg"]}  # 1280 points; none of them is really run
GENEROUS_S = 3.0  # for a restart; below 1 s where nothing else runs


def evaluate(asked: Asked, plan: TrialPlan, runner: TrialRunner) -> TrialRecord:
    """A made-up record that follows from the point; each twentieth trial fails."""
    if "harm.mark" not in asked.point:
        metrics = dict(plan.baseline_metrics)
        return runner.judged(plan, TrialRecord(asked.number, dict(asked.point), Status.OK, asked.origin, metrics=metrics, unchanged="untouched"))
    digest = digest_of(asked.point)
    seed = int(digest[:8], 16)
    if seed % 20 == 7:
        return TrialRecord(asked.number, asked.point, Status.FAILED, asked.origin, cause=Cause.EXCEPTION, stage="harm", message="no kernel")
    faster, worse = np.random.default_rng(seed).random(2)

    def like(name: str, factor: float, spread: float) -> MetricValue:
        base = plan.baseline_metrics[name]
        ratio = Interval(factor, factor * (1 - spread), factor * (1 + spread))
        return MetricValue(base.value * factor, base.value * ratio.low, base.value * ratio.high, base.unit, ratio=ratio, samples=64)

    metrics = {"latency": like("latency", 0.4 + faster, 0.01), "right": like("right", 1 - worse / 5, 0.02), "size": like("size", 1.0, 0.0)}
    return runner.judged(
        plan, TrialRecord(asked.number, dict(asked.point), Status.OK, asked.origin, metrics=metrics, model_digest=digest_of(asked.point))
    )


@dataclass(frozen=True)
class Long:
    """A run folder with a thousand finished trials and one that was cut off, and all that a restart of its sweep needs."""

    folder: Path
    prepared: Prepared
    plan: TrialPlan
    runner: TrialRunner
    cut_off: Asked

    def restarted(self) -> Search:
        """What a sweep does with the folder before it runs its next trial."""
        sweep = _Sweep(self.prepared, self.folder, lambda _event: None, Interrupts(), extend=False)
        sweep._open_folder()
        sweep.plan = TrialPlan.load(self.folder)
        return sweep._search(sweep.plan, self.runner)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Long]:
    folder = tmp_path_factory.mktemp("long")
    write_case(folder)
    content = harm_sweep(folder, PARAMETERS, budget={"trials": TRIALS + 1}, constraints=["latency <= 1.2x"])
    loaded = LoadedSweep(parse_sweep(content), Path("/"))
    prepared, out = prepare(loaded), folder / "out"
    out.mkdir()
    sweep = _Sweep(prepared, out, lambda _event: None, Interrupts(), extend=False)
    with TrialRunner(out, loaded) as runner:
        sweep._open_folder()
        plan = Baseline(out, sweep.sweep, prepared, runner, lambda _line: None).plan()
        assert isinstance(plan, TrialPlan), plan
        sweep.plan = plan
        search = sweep._search(plan, runner)
        while len(search.records) < TRIALS:
            asked = search.ask()
            assert asked is not None
            record = evaluate(asked, plan, runner)
            (out / "trials" / record.id).mkdir(parents=True)
            write_durably(out / "trials" / record.id / "trial.json", dump_json(record.to_json()))
            search.tell(record)
        cut_off = search.ask()
        assert cut_off is not None
        yield Long(out, prepared, plan, runner, cut_off)


def sizes(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}


def restart(long: Long, count: int, injected: Callable[[str], None]) -> list[tuple[float, float]]:
    """Restart so many times; whatever differs from one restart to the next is an error. Returns what each took: seconds, and those of work."""
    first = long.restarted()
    points = {n: point_key(r.point) for n, r in first.records.items()}
    files = sizes(long.folder)
    took = []
    for _ in range(count):
        injected("F23")
        begun, busy = time.perf_counter(), time.process_time()
        search = long.restarted()
        took.append((time.perf_counter() - begun, time.process_time() - busy))

        assert {n: point_key(r.point) for n, r in search.records.items()} == points
        assert search.repairs == []
        assert search.ask() == long.cut_off  # the trial that was cut off comes next, under its number
        assert sizes(long.folder) == files
    assert sorted(points) == list(range(TRIALS))
    assert disagreements_but_for(long) == []
    assert sizes(long.folder) == files
    return took


def disagreements_but_for(long: Long) -> list[str]:
    """Differences between study and records; the trial that was cut off is told to the study only, and that is right."""
    found: list[Any] = disagreements(long.folder, ["latency", "right"], ["minimize", "maximize"])
    return [f for f in found if not f.startswith(f"the study has {list(range(TRIALS + 1))}, the records are {list(range(TRIALS))}")]


def assert_quick(took: list[tuple[float, float]]) -> None:
    """Print what the restarts took; the limit holds on a crowded machine too."""
    wall, busy = zip(*took, strict=True)
    median = statistics.median(wall)
    print(
        f"\nF23: {len(took)} restarts of {TRIALS} trials: median {median:.2f} s ({statistics.median(busy):.2f} s of work), slowest {max(wall):.2f} s"
    )
    assert median < GENEROUS_S


def test_a_restart_of_a_thousand_trials_is_quick_and_adds_nothing(long: Long, injected: Callable[[str], None]) -> None:
    took = restart(long, 8, injected)

    assert_quick(took)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_restarts_of_a_thousand_trials_are_quick_and_add_nothing(long: Long, injected: Callable[[str], None]) -> None:
    took = restart(long, 100, injected)

    assert_quick(took)


def test_the_record_grows_with_its_trials_and_with_nothing_else(long: Long, injected: Callable[[str], None]) -> None:
    injected("F23")
    long.restarted()

    per_trial = (long.folder / JOURNAL_FILE).stat().st_size / TRIALS
    assert per_trial < 4096
    assert not [p for p in os.listdir(long.folder) if p.endswith(".tmp")]
