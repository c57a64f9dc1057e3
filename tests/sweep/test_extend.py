"""`--extend`: what may change under finished trials, what may not, and that nothing of them is lost whatever happens meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest

from autotune.config import LoadedSweep, parse_sweep
from autotune.errors import ConfigError
from autotune.pipeline import InputFacts, Pipeline
from autotune.records import Status, TrialRecord
from autotune.sweep.extend import changes_between, outside_of, refuse
from autotune.sweep.result import SweepResult, read_result
from autotune.sweep.run import run
from autotune.sweep.search import open_study

SweepOf = Callable[..., dict[str, Any]]
FACTS = InputFacts("onnx", 17, {"Conv": 3, "Gemm": 1})


@pytest.fixture
def copy(finished: SweepResult, tmp_path: Path) -> Path:
    """A finished run of its own: five trials of the space's eight points."""
    shutil.copytree(finished.run, tmp_path / "run")
    return tmp_path / "run"


def identity(sweep: dict[str, Any], **data: str) -> dict[str, Any]:
    return {"sweep": json.loads(json.dumps(parse_sweep(sweep).to_json())), "data": data}


def levels(sweep: dict[str, Any], *names: str, **more: Any) -> dict[str, Any]:
    """The sweep with other graph levels to search."""
    chain = json.loads(json.dumps(sweep["chain"]))
    chain[1]["params"]["graph_optimization_level"] = list(names)
    return {**sweep, "chain": chain, **more}


# ---------------------------------------------------------------------------------------------------------------- what may change


def test_budget_constraints_pick_and_chain_may_change_with_extend(digits: Path, sweep_of: SweepOf) -> None:
    before = identity(sweep_of(digits))
    now = identity(levels(sweep_of(digits, constraints=["accuracy >= baseline - 1.0pt"], pick="knee"), "all", budget={"trials": 9}))

    changes = changes_between(before, now)

    refuse(changes, extend=True, finished=5)
    with pytest.raises(ConfigError, match=r"sweep\.budget\.trials: 5 before, 9 now.*--extend to go on with the new one and keep 5 finished trials"):
        refuse(changes, extend=False, finished=5)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"metric": "top-5"}, "sweep.metric"), ({"seed": 3}, "sweep.seed"), ({"target": {"threads": 1, "batch_size": 4}}, "sweep.target.batch_size"),
        ({"measure": {"max_time": "2s"}}, "sweep.measure.max_time"),
    ],
)  # fmt: skip
def test_what_measurements_hang_on_may_not_change_and_is_named(digits: Path, sweep_of: SweepOf, change: dict[str, Any], path: str) -> None:
    changes = changes_between(identity(sweep_of(digits)), identity(sweep_of(digits, **change)))

    with pytest.raises(ConfigError, match=rf"--extend can't keep measurements under another .*{path}") as refused:
        refuse(changes, extend=True, finished=5)

    assert "--fresh" in str(refused.value)


def test_changed_data_may_not_be_extended(digits: Path, sweep_of: SweepOf) -> None:
    changes = changes_between(identity(sweep_of(digits), eval="a"), identity(sweep_of(digits), eval="b"))

    with pytest.raises(ConfigError, match=r"data\.eval: content changed"):
        refuse(changes, extend=True, finished=5)


def test_a_percentile_that_needs_more_runs_than_were_made_is_in_the_way(digits: Path, sweep_of: SweepOf) -> None:
    changes = changes_between(identity(sweep_of(digits)), identity(sweep_of(digits, constraints=["latency.p99 <= 5ms"])))

    with pytest.raises(ConfigError, match=r"p99 needs more runs than the finished trials have"):
        refuse(changes, extend=True, finished=5)


def test_a_point_counts_only_where_it_means_the_same(digits: Path, sweep_of: SweepOf) -> None:
    before = sweep_of(digits)
    now = {**before, "chain": list(reversed(before["chain"]))}  # the same names in another order: other work
    then, pipeline = (Pipeline(LoadedSweep(parse_sweep(s), Path("/")), FACTS) for s in (before, now))
    plain, quantized = then.untouched_point(), then.default_point()
    records = {0: TrialRecord(0, quantized, Status.OK), 1: TrialRecord(1, plain or {}, Status.OK), 2: TrialRecord(2, {}, Status.OK)}

    outside = outside_of(pipeline, FACTS, [{"sweep": identity(before)["sweep"], "trials": 3}], records)

    assert pipeline.space.contains(quantized)
    assert outside == {0}


# ---------------------------------------------------------------------------------------------------------------- a run that is extended


def test_new_limits_judge_the_finished_trials_anew_and_run_none_again(copy: Path, digits: Path, sweep_of: SweepOf, finished: SweepResult) -> None:
    harder = sweep_of(digits, constraints=["accuracy >= baseline - 2.0pt", "latency <= 0.001x"])
    before = {r.id: r for r in _trials(finished.run)}

    with pytest.raises(ConfigError, match="--extend"):
        run(harder, copy)
    result = run(harder, copy, extend=True)

    assert result.status == "none-feasible"
    assert [r.id for r in result.records] == sorted(before)
    assert {r.status for r in result.records} == {Status.INFEASIBLE}
    assert all(r.metrics == before[r.id].metrics and r.point == before[r.id].point and r.seconds == before[r.id].seconds for r in result.records)
    assert read_result(copy).records == result.records
    study, _ = open_study(copy, None, ["minimize", "maximize"], ["latency", "accuracy"])
    assert all("latency <= 0.001x" in t.constraints for t in study.trials if t.state == optuna.trial.TrialState.COMPLETE)
    again = run(harder, copy)  # the same command goes on: nothing is left to do
    assert again.summary == result.summary


@pytest.mark.long
def test_a_changed_chain_keeps_what_is_still_a_point_and_goes_on_with_new_ones(
    copy: Path, digits: Path, sweep_of: SweepOf, finished: SweepResult
) -> None:
    wider = levels(sweep_of(digits), "all", "extended", budget={"trials": 7})  # without `basic`
    gone = {r.number for r in finished.records if r.point["session.graph_optimization_level"] == "basic"}
    events: list[str] = []

    result = run(wider, copy, extend=True, on_event=lambda e: events.append(e["event"]))

    assert gone
    assert [r.number for r in result.records] == list(range(7))
    assert [r.point for r in result.records[:5]] == [r.point for r in finished.records]
    assert {r.point["session.graph_optimization_level"] for r in result.records[5:]} <= {"all", "extended"}
    assert len({json.dumps(r.point, sort_keys=True) for r in result.records}) == 7
    assert not {f"t-{n:04d}" for n in gone} & set(result.summary["front"])
    assert result.best is None or result.best.number not in gone
    assert any("no points of the space as it is now" in note and f"t-{min(gone):04d}" in note for note in result.summary["notes"])
    assert events.count("trial-finished") == 2
    study, _ = open_study(copy, None, ["minimize", "maximize"], ["latency", "accuracy"])
    assert [t.number for t in study.trials] == list(range(7))
    assert {t.number for t in study.trials if "outside the space" in t.user_attrs["status"]} == gone
    history = json.loads((copy / "run.json").read_text())["earlier"]
    assert [(e["trials"], e["sweep"]["budget"]["trials"]) for e in history] == [(5, 5)]


KILLED = """
import json, os, signal, sys
from autotune import digest
from autotune.sweep import extend, finalists, interrupts, result, run, search
left = int(sys.argv[1])
def count(name, real):
    def counted(*args, **more):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **more)
    return counted
for module in (run, search, result, finalists):
    if hasattr(module, "write_durably"):
        module.write_durably = count("write", module.write_durably)
run.shutil.rmtree = count("rmtree", run.shutil.rmtree)
search.Search._start_in_study = count("study", search.Search._start_in_study)
run.run(json.load(open(sys.argv[2])), sys.argv[3], extend=True)
print("whole")
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_kill_at_any_point_of_extending_loses_nothing(digits: Path, sweep_of: SweepOf, finished: SweepResult, tmp_path: Path) -> None:
    easier = sweep_of(digits, constraints=["accuracy >= baseline - 3.0pt"], pick="smallest")
    (tmp_path / "sweep.json").write_text(json.dumps(easier))
    before = [(r.number, r.point, r.metrics["latency"]) for r in _trials(finished.run)]
    kills = 0
    for left in range(1, 40, 3):
        out = tmp_path / f"run-{left}"
        shutil.copytree(finished.run, out)
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(left), str(tmp_path / "sweep.json"), str(out)], capture_output=True, text=True, check=False
        )
        assert done.returncode in (0, -9), done.stderr
        kills += done.returncode == -9

        result = run(easier, out, extend=True)

        assert result.status == "delivered"
        assert [(r.number, r.point, r.metrics["latency"]) for r in _trials(out)] == before
        assert {c["expr"] for r in result.records for c in r.constraints} == {"accuracy >= baseline - 3.0pt"}
        study, _ = open_study(out, None, ["minimize", "maximize"], ["latency", "accuracy"])
        assert [t.number for t in study.trials] == list(range(5))
        assert all(t.state.is_finished() for t in study.trials)
        if done.returncode == 0:
            break
    assert kills >= 3


def _trials(out: Path) -> list[TrialRecord]:
    return [TrialRecord.from_json(json.loads(p.read_text())) for p in sorted(out.glob("trials/*/trial.json"))]


def test_fresh_and_extend_together_are_refused(digits: Path, sweep_of: SweepOf, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--fresh throws finished trials away and --extend keeps them"):
        run(sweep_of(digits), tmp_path / "out", fresh=True, extend=True)

    assert not os.listdir(tmp_path)
