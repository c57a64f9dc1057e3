"""F19: user code that raises, prints a gigabyte, leaves, turns its process upside down or deletes what lies around is contained."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.digest import dump_json
from autotune.records import Status, TrialRecord
from autotune.stages import KEPT_OUTPUT_BYTES, LOG_FILE
from autotune.sweep.result import SweepResult
from autotune.sweep.run import run
from tests.faults.harm import MARKS, MISBEHAVE_PATH, Trials, harm_sweep, trials_of, write_case

Injected = Callable[[str], None]
UNRULY = ("raise", "sys_exit", "upheaval", "delete_all_here", "delete_the_folder")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[SweepResult, SweepResult, dict[str, Any]]:
    """One sweep run twice, of which the user's code behaves the first time and misbehaves the second; and this process before that."""
    folder = tmp_path_factory.mktemp("unruly")
    write_case(folder)
    params = {"here": ["", *UNRULY], "mark": [0, *(MARKS[u] for u in UNRULY)]}
    sweep = harm_sweep(folder, params, metric="harmed_metric", budget={"trials": 12}, seed=7)
    MISBEHAVE_PATH.unlink()
    try:
        quiet = run(sweep, folder / "quiet")
    finally:
        MISBEHAVE_PATH.touch()
    np.random.seed(5)
    before = state()
    return quiet, run(sweep, folder / "unruly"), before


def state() -> dict[str, Any]:
    """What user code could change in this process."""
    umask = os.umask(0o022)
    os.umask(umask)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    numpy_state: Any = np.random.get_state()
    return {
        "cwd": os.getcwd(), "environment": environment, "umask": umask, "handlers": [signal.getsignal(n) for n in numbers],
        "path": list(sys.path), "numpy": numpy_state[1].tolist(),
    }  # fmt: skip


def unruly(record: TrialRecord) -> bool:
    return bool(record.point.get("harm.here") or record.point.get("harm.mark"))


def test_the_sweeps_own_process_is_untouched(both: tuple[SweepResult, SweepResult, dict[str, Any]], injected: Injected) -> None:
    injected("F19")
    _, _, before = both

    after = state()

    assert {k: before[k] for k in before if after[k] != before[k]} == {}


def test_the_same_points_are_tried_whatever_user_code_does(both: tuple[SweepResult, SweepResult, dict[str, Any]], injected: Injected) -> None:
    injected("F19")
    quiet, noisy, _ = both

    assert [dict(r.point) for r in noisy.records] == [dict(r.point) for r in quiet.records]


def test_well_behaved_trials_have_the_same_artifacts_and_results(both: tuple[SweepResult, SweepResult, dict[str, Any]], injected: Injected) -> None:
    injected("F19")
    quiet, noisy, _ = both

    def told(record: TrialRecord) -> str:
        # Of the figures the values: the intervals of times depend on the measurements before, of which the unruly ones make fewer.
        figures = {n: (v.value, v.ratio and v.ratio.value, v.delta and v.delta.value) for n, v in record.metrics.items() if n != "peak_memory"}
        return dump_json([record.status, record.model_digest, figures, [(c["expr"], c["verdict"]) for c in record.constraints]])

    pairs = [(a, b) for a, b in zip(quiet.records, noisy.records, strict=True) if not unruly(a)]
    assert pairs
    assert [told(a) for a, _ in pairs] == [told(b) for _, b in pairs]


def test_each_misbehaviour_has_its_ending(both: tuple[SweepResult, SweepResult, dict[str, Any]], injected: Injected) -> None:
    for _ in UNRULY:
        injected("F19")
    _, noisy, _ = both
    names = {number: name for name, number in MARKS.items()}

    for record in filter(unruly, noisy.records):
        here, mark = record.point["harm.here"], names.get(record.point["harm.mark"], "")
        if here in ("raise", "sys_exit", "delete_the_folder"):
            assert (record.status, record.stage) == (Status.FAILED, "harm"), record.message
        elif mark in ("sys_exit", "delete_the_folder"):
            assert (record.status, record.stage) == (Status.FAILED, "accuracy"), record.message
        elif mark == "raise":
            assert (record.status, record.stage) == (Status.INVALID, "accuracy"), record.message
        else:  # what it did to its own process and folder goes no further
            assert record.status is Status.OK, record.message


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    folder = tmp_path_factory.mktemp("print")
    write_case(folder)
    with trials_of(harm_sweep(folder, {"here": ["", "print"], "mark": [0, MARKS["print"]]}, metric="harmed_metric"), folder / "out") as trials:
        yield trials


@pytest.mark.parametrize(("where", "point"), [("harm", {"here": "print", "mark": 0}), ("accuracy", {"here": "", "mark": MARKS["print"]})])
def test_a_gigabyte_of_output_costs_neither_disk_nor_memory_nor_the_trial(
    talkative: Trials, injected: Injected, where: str, point: dict[str, Any]
) -> None:
    injected("F19")
    record = talkative.run(**point)

    folder = talkative.plan.run / "trials" / record.id
    log = folder / where / LOG_FILE
    server = talkative.runner._onnx._process
    assert server is not None
    peak = int(Path(f"/proc/{server.pid}/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
    assert record.status is Status.OK, record.message
    assert log.read_bytes().endswith(b"the last words\n")
    assert log.stat().st_size <= KEPT_OUTPUT_BYTES
    assert sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) < 5_000_000
    assert peak < 600_000_000
