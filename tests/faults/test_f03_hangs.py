"""F3: a stage that hangs, in native code too, or is stopped: killed at its time limit, with all that it started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotune.records import Cause, Status
from tests.faults.harm import MARKS, PIDS_PATH, Trials, alive, harm_sweep, trials_of, write_case

Injected = Callable[[str], None]
LIMIT_S = 3
HANGS = ("hang", "hang_with_grandchildren", "stop")


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    folder = tmp_path_factory.mktemp("hang")
    write_case(folder)
    params = {
        "here": ["", *HANGS], "model": ["mark", "runs_forever"], "mark": [0, *(MARKS[h] for h in HANGS)], "threads": [0, 1000],
    }  # fmt: skip
    sweep = harm_sweep(folder, params, metric="harmed_metric", budget={"trials": 10, "stage_timeout": f"{LIMIT_S}s"})
    with trials_of(sweep, folder / "out") as trials:
        yield trials


@pytest.mark.parametrize(
    ("stage", "point"),
    [
        *(("harm", {"here": h}) for h in HANGS),
        *(("accuracy", {"mark": MARKS[h]}) for h in HANGS),
        ("check", {"model": "runs_forever"}),  # inside a run
        ("check", {"threads": 1000}),  # while the session opens
    ],
)
def test_a_hang_ends_at_the_time_limit_and_leaves_nobody_behind(hanging: Trials, injected: Injected, stage: str, point: dict[str, str | int]) -> None:
    injected("F3")
    PIDS_PATH.unlink(missing_ok=True)
    grandchildren = "hang_with_grandchildren" in point.values() or MARKS["hang_with_grandchildren"] in point.values()

    record = hanging.run(**{"here": "", "model": "mark", "mark": 0, "threads": 0, **point})

    assert (record.status, record.cause, record.stage) == (Status.FAILED, Cause.TIMEOUT, stage), record.message
    assert f"no end after {LIMIT_S} s" in record.message
    assert LIMIT_S <= record.seconds < LIMIT_S + 5
    pids = [int(line) for line in PIDS_PATH.read_text().split()] if PIDS_PATH.exists() else []
    assert len(pids) == (2 if grandchildren else 0)
    assert not [pid for pid in pids if alive(pid)]


def test_the_next_trial_is_measured(hanging: Trials, injected: Injected) -> None:
    injected("F3")
    hanging.run(here="stop", model="mark", mark=0, threads=0)

    record = hanging.run(here="", model="mark", mark=0, threads=0)

    assert record.status is Status.OK, record.message


def test_a_conversion_that_hangs_ends_at_the_time_limit(digits: Path, tmp_path: Path, injected: Injected) -> None:
    injected("F3")
    chain = [{"slot": "harm", "pass": "HarmfulConversion", "params": {"here": ["", "hang_with_grandchildren"]}}]
    model = {"script": str(digits / "net.py"), "weights": str(digits / "weights.pt"), "outputs": ["logits"]}
    budget = {"trials": 5, "stage_timeout": "10s"}
    sweep = harm_sweep(tmp_path, {}, chain=chain, model=model, data={"eval": str(digits / "eval.npz")}, budget=budget)
    PIDS_PATH.unlink(missing_ok=True)

    with trials_of(sweep, tmp_path / "out") as trials:
        record = trials.run(here="hang_with_grandchildren")
        pids = [int(line) for line in PIDS_PATH.read_text().split()]

        assert (record.status, record.cause, record.stage) == (Status.FAILED, Cause.TIMEOUT, "harm"), record.message
        assert len(pids) == 2
        assert not [pid for pid in pids if alive(pid)]
