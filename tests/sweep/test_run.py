"""The main job, end to end, on a real network: Ray Tune, child processes, real measurements, a bundle."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.bundle import verify_bundle
from autotune.config import LoadedSweep
from autotune.errors import ConfigError, EnvironmentFault
from autotune.records import Status
from autotune.stages import StageOutcome
from autotune.sweep.result import SweepResult, read_result
from autotune.sweep.run import run
from autotune.trial import TrialPlan, TrialRunner

SweepOf = Callable[..., dict[str, Any]]


def test_a_sweep_delivers_a_bundle_that_verifies(finished: SweepResult) -> None:
    assert finished.status == "delivered"
    assert finished.exit_status == 0
    bundle = finished.bundle()
    assert bundle is not None
    assert [c for c in verify_bundle(bundle) if c.state != "ok"] == []


def test_every_trial_has_a_record_and_the_untouched_model_is_one(finished: SweepResult) -> None:
    assert [r.number for r in finished.records] == list(range(5))
    assert [r.origin for r in finished.records[:2]] == ["default", "untouched"]
    assert finished.records[1].unchanged
    assert len({json.dumps(r.point, sort_keys=True) for r in finished.records}) == 5


def test_the_summary_has_what_machines_read(finished: SweepResult) -> None:
    summary = finished.summary

    assert set(summary) >= {"status", "bundle", "baseline", "best", "front", "trials", "space"}
    assert {"value", "low", "high"} <= set(summary["baseline"]["metrics"]["accuracy"])
    assert {"value", "low", "high"} <= set(summary["best"]["metrics"]["latency"])
    assert set(summary["space"]) >= {"valid", "invalid", "distinct"}
    assert sum(summary["trials"].values()) == 5
    assert summary["front"]
    assert json.loads((finished.run / "result.json").read_text()) == summary


def test_tables_hold_every_trial_and_agree_with_each_other(finished: SweepResult) -> None:
    import pandas as pd

    csv = pd.read_csv(finished.run / "trials.csv")
    parquet = pd.read_parquet(finished.run / "trials.parquet")
    plain = json.loads((finished.run / "trials.json").read_text())

    assert list(csv["id"]) == list(parquet["id"]) == [row["id"] for row in plain] == [r.id for r in finished.records]
    assert np.allclose(csv["metric.latency.ratio"].dropna(), parquet["metric.latency.ratio"].dropna())
    assert set(finished.front["id"]) == set(finished.summary["front"])


def test_each_measured_trial_kept_its_raw_samples(finished: SweepResult) -> None:
    fresh = [r for r in finished.records if r.measured and not r.unchanged and r.shares_with is None]

    assert fresh
    for record in fresh:
        folder = finished.run / "trials" / record.id
        samples = np.load(folder / "latency" / "latency.npz")
        assert samples["candidate_ns"].dtype == np.int64
        assert samples["candidate_ns"].min() > 0
        assert (folder / "accuracy" / "scores.npz").exists()


def test_no_holdout_row_took_part_in_the_search(finished: SweepResult) -> None:
    plan = json.loads((finished.run / "plan.json").read_text())
    search, holdout = set(plan["rows"]["search"]), set(plan["rows"]["holdout"])

    scores = np.load(finished.run / "trials" / "t-0000" / "accuracy" / "scores.npz")

    assert search.isdisjoint(holdout)
    assert len(search) + len(holdout) == 400
    assert set(scores["rows"].tolist()) == search


def test_the_delivered_bytes_are_those_that_were_measured(finished: SweepResult) -> None:
    from autotune.digest import digest_tree

    best, bundle = finished.best, finished.bundle()

    assert best is not None
    assert bundle is not None
    assert digest_tree(bundle / "model") == best.model_digest
    assert json.loads((bundle / "session.json").read_text())["read_back"]["intra_op_num_threads"] == 1


def test_the_best_so_far_is_on_disk_with_its_model_after_each_trial(finished: SweepResult) -> None:
    from autotune.digest import digest_tree

    best = json.loads((finished.run / "best_so_far.json").read_text())
    record = next(r for r in finished.records if r.id == best["best"])

    assert (best["finished"], best["of"]) == (5, 5)
    assert digest_tree(finished.run / best["model"]) == record.model_digest
    assert best["session"] == record.session


def test_the_same_call_resumes_and_runs_nothing_again(finished: SweepResult, digits: Path, sweep_of: SweepOf) -> None:
    stamps = {p: p.stat().st_mtime_ns for p in finished.run.glob("trials/*/trial.json")}

    again = run(sweep_of(digits), finished.run)

    assert {p: p.stat().st_mtime_ns for p in finished.run.glob("trials/*/trial.json")} == stamps
    assert again.summary == finished.summary
    assert again.records == finished.records


def test_another_sweep_in_the_same_folder_is_refused_with_the_difference(finished: SweepResult, digits: Path, sweep_of: SweepOf) -> None:
    with pytest.raises(ConfigError, match=r"sweep\.seed: 0 before, 3 now"):
        run(sweep_of(digits, seed=3), finished.run)


def test_changed_data_under_the_same_name_are_refused(finished: SweepResult, digits: Path, tmp_path: Path, sweep_of: SweepOf) -> None:
    copy = tmp_path / "digits"
    shutil.copytree(digits, copy)
    sweep = sweep_of(copy)
    run_folder = tmp_path / "run"
    shutil.copytree(finished.run, run_folder)
    identity = json.loads((run_folder / "run.json").read_text())
    identity["identity"]["sweep"]["model"]["path"] = str(copy / "model.onnx")
    for key in ("eval", "calibration"):
        identity["identity"]["sweep"]["data"][key] = sweep["data"][key]
    identity["identity"]["data"]["eval"] = "0" * 64
    (run_folder / "run.json").write_text(json.dumps(identity))

    with pytest.raises(ConfigError, match=r"data\.eval: content changed"):
        run(sweep, run_folder)


def test_a_second_sweep_into_the_same_folder_is_refused_by_name(finished: SweepResult, digits: Path, sweep_of: SweepOf) -> None:
    from autotune.sweep.interrupts import one_writer

    with one_writer(finished.run), pytest.raises(EnvironmentFault, match=rf"held by pid {os.getpid()} on \S+ since"):
        run(sweep_of(digits), finished.run)


def test_a_folder_with_other_files_is_never_written_into(digits: Path, tmp_path: Path, sweep_of: SweepOf) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")

    with pytest.raises(ConfigError, match="must be new, empty, or of an earlier run"):
        run(sweep_of(digits), tmp_path, fresh=True)

    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_run_folder_reads_back_as_the_same_result(finished: SweepResult) -> None:
    read = read_result(finished.run)

    assert read.summary == finished.summary
    assert read.records == finished.records
    assert "Baseline" in read.report()


def test_limits_that_nothing_can_meet_end_without_a_bundle_and_name_the_nearest(digits: Path, tmp_path: Path, sweep_of: SweepOf) -> None:
    result = run(sweep_of(digits, constraints=["latency <= 0.001x"], budget={"trials": 2}), tmp_path / "out")

    assert result.status == "none-feasible"
    assert result.exit_status == 4
    assert result.bundle() is None
    assert {r.status for r in result.records} == {Status.INFEASIBLE}
    assert result.summary["near_misses"]
    assert (tmp_path / "out" / "result.json").exists()


@pytest.mark.parametrize(("limit", "runs", "seconds"), [("latency <= 1s", 64, 1.0), ("latency.p99 <= 1s", 662, 662 / 64)])
def test_a_limit_on_p99_gets_the_runs_and_the_time_that_p99_needs(
    finished: SweepResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, runs: int, seconds: float
) -> None:
    plan = TrialPlan.load(finished.run)
    config = plan.sweep.config.model_copy(update={"constraints": [limit]})
    asked: list[dict[str, Any]] = []

    def stage(_self: TrialRunner, _function: str, args: dict[str, Any], _folder: Path, **_more: Any) -> StageOutcome:
        asked.append(args["protocol"])
        return StageOutcome({"metrics": {}, "baseline_metrics": {"latency": {"value": 1.0}}})

    monkeypatch.setattr(TrialRunner, "stage", stage)
    with TrialRunner(tmp_path, LoadedSweep(config, finished.run)) as runner:
        runner.latency(plan.baseline, None, plan.eval_path, plan.rows.search, tmp_path, seed=0)

    assert asked[0]["min_runs"] == runs
    assert asked[0]["max_time_ns"] == int(seconds * 1e9)


def test_a_percentile_that_can_not_be_measured_is_refused_before_any_trial(finished: SweepResult) -> None:
    from autotune.constraints import parse_constraint
    from autotune.selection import Objective
    from autotune.sweep.prepare import check_against_baseline

    baseline = {"latency": next(r for r in finished.records if r.unchanged).metrics["latency"]}
    limit = parse_constraint("latency.p99 <= 5ms", metrics={"latency.p99": "ms"})

    with pytest.raises(ConfigError, match=r"latency\.p99 must be measurable .*Raise measure\.max_time"):
        check_against_baseline([limit], [Objective("latency")], baseline)
    with pytest.raises(ConfigError, match=r"latency\.p95 must be measurable"):
        check_against_baseline([], [Objective("latency.p95")], baseline)


def processes_of(run_folder: Path) -> list[str]:
    """Command lines of live processes that name the run folder or were started by a sweep on it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if b"AUTOTUNE_TEST_MARK=" + str(run_folder).encode() in environment and int(entry.name) != os.getpid():
                found.append(words)
    return found


@pytest.fixture
def started(digits: Path, tmp_path: Path, sweep_of: SweepOf) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    out = tmp_path / "out"
    (tmp_path / "sweep.json").write_text(json.dumps(sweep_of(digits, budget={"trials": 6})))
    process = subprocess.Popen(
        [sys.executable, "-m", "autotune", "run", str(tmp_path / "sweep.json"), "--out", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "AUTOTUNE_TEST_MARK": str(out)}, start_new_session=True,
    )  # fmt: skip
    yield process, out
    if process.poll() is None:
        process.kill()
    process.wait()


def wait_for_trials(out: Path, count: int, *, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while len(list(out.glob("trials/*/trial.json"))) < count:
        assert time.monotonic() < deadline, "the sweep never came that far"
        time.sleep(0.1)


def none_left(out: Path, *, timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while processes_of(out):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


@pytest.mark.long
def test_a_killed_sweep_goes_on_where_it_was(started: tuple[subprocess.Popen[str], Path], digits: Path) -> None:
    process, out = started
    wait_for_trials(out, 2)
    kept = {p: p.read_text() for p in out.glob("trials/*/trial.json")}

    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    gone = none_left(out)
    result = run(json.loads((out.parent / "sweep.json").read_text()), out)

    assert gone, processes_of(out)
    assert len(result.records) == 6
    assert result.status == "delivered"
    for path, text in kept.items():
        assert path.read_text() == text
