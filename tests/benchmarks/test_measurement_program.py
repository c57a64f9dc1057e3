"""The program that holds the measuring against known truths: its rules on numbers with known answers, and a tiny run of the whole."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from autotune.records import Cause, Interval, MetricValue
from autotune.stages import StageOutcome

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "comparisons" / "measurement.py"


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """The program as a module; it stands outside the packages."""
    spec = importlib.util.spec_from_file_location("measurement_program", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up here
    spec.loader.exec_module(module)
    return module


def latency(ratio: float, half: float) -> MetricValue:
    """A latency of `ratio` ms beside a baseline of 1 ms, with the half-width of the ratio's interval."""
    return MetricValue(ratio, ratio - half, ratio + half, "ms", ratio=Interval(ratio, ratio - half, ratio + half), samples=100)


ONE_MS = MetricValue(1.0, 0.99, 1.01, "ms", ratio=Interval.exactly(1.0), samples=100)


# ---- a


@pytest.mark.parametrize(
    ("ratio", "half", "said"),
    [(0.8, 0.01, "faster"), (1.25, 0.01, "slower"), (1.01, 0.001, "tie"), (0.99, 0.001, "tie"), (0.8, 0.3, "tie"), (1.25, 0.3, "tie")],
)
def test_the_choice_calls_faster_or_slower_what_is_so_beyond_doubt_and_tolerance(program: ModuleType, ratio: float, half: float, said: str) -> None:
    assert program.verdict(latency(ratio, half), ONE_MS) == said


# ---- b


def measurement(ratio: Interval, ms: Interval) -> dict[str, Any]:
    facts = {"elapsed_s": 0.5, "measured_ratio": Interval.exactly(ratio.value).to_json(), "occasions": {"sd": 0.02}}
    return {"latency": MetricValue(ms.value, ms.low, ms.high, "ms", ratio=ratio), "facts": facts}


def test_coverage_counts_the_intervals_that_hold_the_median_of_the_long_ones(program: ModuleType) -> None:
    ms = Interval(2.0, 1.9, 2.1)
    long = [measurement(Interval.exactly(value), ms) for value in (0.79, 0.80, 0.95)]
    holds, too_low, meets = Interval(0.81, 0.79, 0.83), Interval(0.70, 0.69, 0.71), Interval(0.85, 0.82, 0.88)

    row = program.coverage([measurement(i, ms) for i in (holds, holds, too_low, meets)], long)

    assert row["ratio"]["reference"]["value"] == 0.80
    assert (row["ratio"]["hold"]["count"], row["ratio"]["hold"]["of"]) == (2, 4)
    assert row["ratio"]["hold"]["low"] < 0.5 < row["ratio"]["hold"]["high"]
    assert row["ratio"]["meet"]["count"] == 4  # three long ones that differ so much say little, and their wide interval shows it
    assert row["p50"]["hold"]["count"] == 4
    assert (row["alone"]["hold"]["count"], row["alone"]["half_width"], row["moved"]) == (0, 0, 0.02)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is no neighbour on one CPU")
def test_the_busy_neighbour_computes_on_its_cpu_and_is_gone_afterwards(program: ModuleType) -> None:
    cpu = max(os.sched_getaffinity(0))

    with program.busy_loop(cpu) as loop:
        assert os.sched_getaffinity(loop.pid) == {cpu}
        assert loop.poll() is None

    assert loop.returncode is not None


def test_the_cpus_of_the_program_are_its_own_again_after_pinned_measuring(program: ModuleType, tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)

    with program.measuring_bench(tmp_path, cpu=max(before)):
        during = os.sched_getaffinity(0)

    assert during == {max(before)}
    assert os.sched_getaffinity(0) == before


# ---- c


def test_errors_are_held_against_the_reference_and_a_way_without_interval_holds_nothing(program: ModuleType) -> None:
    stated = [{"ratio": Interval(1.01, 0.99, 1.03), "seconds": 1.0}, {"ratio": Interval(1.10, 1.09, 1.11), "seconds": 3.0}]
    silent = [{"ratio": Interval(1.02, float("nan"), float("nan")), "seconds": 1.0}]

    row, other = program.against(stated, Interval.exactly(1.0)), program.against(silent, Interval.exactly(1.0))

    assert (row["seconds"], row["hold"]["count"], row["hold"]["of"]) == (2.0, 1, 2)
    assert row["largest_error"] == pytest.approx(0.10)
    assert (other["half_width"], other["hold"]) == (None, None)


# ---- d

# Losses in units of the tolerances: the true front is 0, 1 and 2; 3 is dominated by less than a tolerance, 4 by more.
LOSSES = np.array([[0.0, 0.0], [-10.0, 2.0], [-20.0, 9.0], [-9.5, 2.0], [-8.0, 2.0]])


@pytest.mark.parametrize(
    ("shown", "named", "wrong", "wrong_named", "missed", "missed_named"),
    [
        ([0, 1, 2], [0, 1, 2], 0, 0, 0, 0),
        ([0, 3, 2], [0, 3, 2], 0, 0, 0, 0),  # a front but for the tolerance
        ([0, 4, 2], [0, 4, 2], 1, 1, 1, 1),
        ([0, 4, 2], [0, 1, 2, 4], 1, 1, 1, 0),  # the tie that is named beside it saves the true member
        ([0, 1], [0, 1], 0, 0, 1, 1),
    ],
)
def test_false_and_missed_members_are_counted_beyond_the_tolerance(
    program: ModuleType, shown: list[int], named: list[int], wrong: int, wrong_named: int, missed: int, missed_named: int
) -> None:
    found = program.held_against(LOSSES, shown, named)

    assert (found["wrong"], found["wrong_named"], found["missed"], found["missed_named"]) == (wrong, wrong_named, missed, missed_named)
    assert (found["members"], found["named"], found["true_members"]) == (len(shown), len(named), 3)


def test_who_truly_breaks_the_limit_is_false_beats_nobody_and_is_not_missed(program: ModuleType) -> None:
    room = np.array([3.0, 1.0, -4.0, 1.0, 1.0])  # the fastest breaks the limit by four tolerances

    found = program.held_against(LOSSES, [0, 1, 2], [0, 1, 2], room=room, certain=[1])
    fooled = program.held_against(LOSSES, [0, 2, 4], [0, 2, 4], room=np.where(room < 0, -0.5, room), certain=[4])

    assert (found["wrong"], found["broken"], found["missed"], found["true_members"], found["wrong_certain"]) == (1, 1, 0, 2, 0)
    assert (fooled["broken"], fooled["wrong_certain"], fooled["certain"]) == (0, 1, 1)  # by less than a tolerance is no break


def test_a_replay_ends_the_ruined_early_and_delivers_who_holds_on_rows_held_out(program: ModuleType) -> None:
    rng = np.random.default_rng(5)
    truth = program.make_truth(4, rng)
    right = np.tile(rng.random(program.POPULATION) < 0.9, (5, 1))
    ruined, lucky, sound, slow = 1, 2, 3, 4
    right[ruined] &= rng.random(program.POPULATION) < 0.6
    right[lucky, truth.rows[: program.HOLDOUT]] = False  # right wherever the search looks
    truth = replace(truth, right=right, ratio=np.array([1.0, 0.3, 0.4, 0.6, 1.5]))

    searched, ended = program.chosen_by_autotune(truth, program.Machine(rng), 1.0, seed=7)

    assert searched["early"] == {"infeasible": 1}
    assert searched["delivered"] == lucky
    assert ended["delivered"] == sound
    assert {ruined, slow} & {*searched["front"], *ended["front"]} == set()
    whole = program.ROWS - program.HOLDOUT
    assert 3 * whole < searched["rows"] * 4 <= 3.05 * whole  # of the ruined one next to nothing
    assert ended["rows"] * 4 == searched["rows"] * 4 + 2 * program.HOLDOUT  # two finalists


def test_a_made_up_table_is_as_it_says(program: ModuleType) -> None:
    truth = program.make_truth(60, np.random.default_rng(0))

    assert truth.ratio[0] == 1.0
    assert truth.change()[0] == 0.0
    assert truth.right[0].mean() == pytest.approx(0.9, abs=0.01)
    assert len(set(truth.rows.tolist())) == program.ROWS
    differing = (truth.right[1:] != truth.right[0]).mean(axis=1)
    assert 0.005 < np.median(differing) < 0.03
    assert truth.right[1:][np.argmin(truth.ratio[1:])].mean() < truth.right[0].mean()  # speed has its price


def test_the_machine_that_only_counts_takes_what_the_table_says(program: ModuleType) -> None:
    machine = program.Machine(np.random.default_rng(0))
    taken = []
    for _ in range(200):
        run_once = machine.open(1_000_000)
        for _ in range(20):
            began = machine.clock_ns()
            run_once()
            taken.append(machine.clock_ns() - began)

    assert np.median(taken) == pytest.approx(1_000_000, rel=0.02)
    assert np.std(np.log(taken)) > program.RUN_SPREAD  # drift, sessions and disturbances come on top


def test_the_replay_is_the_same_for_the_same_seed(program: ModuleType) -> None:
    sizes = program.Sizes(tables=1, models=6, replay_s=0.3)

    once, again = program.part_d(sizes, seed=3), program.part_d(sizes, seed=3)
    other = program.part_d(sizes, seed=4)

    assert once == again
    assert once != other


# ---- the whole


def test_a_tiny_run_prints_every_table_and_writes_json(program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = program.Sizes(
        kinds=(program.Kind("tiny", 16, 3, 2, 1),), alike=2, alike_s=0.1, short=2, short_s=0.1, long=2, long_s=0.1, repeats=1, spent_s=(0.1,),
        tables=2, models=8, replay_s=0.3,
    )  # fmt: skip
    out = tmp_path / "new folder" / "figures.json"

    content = program.run_parts("abcd", tiny, out)

    printed = capsys.readouterr().out
    for start in ("a. A model beside its own copy", "b. Short measurements", "c. What a second buys", "d. 2 made-up tables"):
        assert start in printed
    written = json.loads(out.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert set(written["parts"]) == set("abcd")
    assert written["surroundings"]["versions"]["onnxruntime"]
    a, b, c, d = (written["parts"][part] for part in "abcd")
    assert [row["comparisons"] for row in a["rows"]] == [2, 2]
    neighbours = ["quiet", "busy"] if len(os.sched_getaffinity(0)) > 1 else ["quiet"]
    assert [row["neighbour"] for row in b["rows"]] == neighbours
    assert all(row["ratio"]["hold"]["of"] == 2 for row in b["rows"])
    assert {row["method"] for row in c["rows"]} >= {"plain loop, 20 runs", "plain loop, 200 runs", "autotune, 0.1 s"}
    assert any("onnxruntime_perf_test" in note for note in c["notes"])
    assert [row["way"] for row in d["rows"]] == [
        "20 runs, 300 rows", "20 runs, 4,000 rows", "200 runs, 4,000 rows", "autotune, search alone", "autotune",
    ]  # fmt: skip
    assert all(row["tables"] == 2 for row in d["rows"])
    assert all(row["quiet"]["rounds"] >= row["quiet"]["disturbed"] >= 0 < row["quiet"]["measurements"] for row in (a, c, *b["rows"]))
    assert content["parts"].keys() == written["parts"].keys()


def test_a_part_that_fails_is_on_record_and_the_next_one_is_run(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = program.Sizes(kinds=(program.Kind("tiny", 16, 3, 2, 1),), alike=1, tables=1, models=4, replay_s=0.3)
    broken = program.Bench(tmp_path, None)
    broken.runner = Failing()
    monkeypatch.setattr(program, "measuring_bench", lambda _folder: contextlib.nullcontext(broken))

    content = program.run_parts("ad", tiny, tmp_path / "figures.json")

    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["parts"]["a"]["failed"].endswith("it ended 2 times with: killed by signal 9")
    assert written["parts"]["d"]["rows"]
    assert content["parts"].keys() == {"a", "d"}
    assert "a. failed: PartFailed" in capsys.readouterr().out


class Failing:
    """Stands for children that are killed."""

    def run(self, *_: Any, **__: Any) -> StageOutcome:
        return StageOutcome(value=None, cause=Cause.SIGNAL, message="killed by signal 9")


@pytest.mark.parametrize("parts", ["a,x", "", "a,a"])
def test_parts_that_are_not_there_are_refused_in_words(parts: str) -> None:
    done = subprocess.run([sys.executable, str(PROGRAM), "--parts", parts], capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "parts must be some of a, b, c, d" in done.stderr
    assert "Traceback" not in done.stderr
