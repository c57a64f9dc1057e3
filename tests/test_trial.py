"""What a sweep file says of timing gets to the stages, and what they find comes back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from autotune.pipeline import Pipeline
from autotune.records import Cause, Status
from autotune.stages import StageOutcome
from autotune.sweep.result import SweepResult
from autotune.trial import BASELINE_TIMES, TRIAL_FILE, TrialPlan, TrialRunner


def test_a_candidate_above_the_latency_limit_is_timed_shortly_as_the_file_says(
    digits: Path, sweep_of: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    from autotune.sweep.run import run

    sweep = sweep_of(
        digits, constraints=["latency <= 0.001x"], target={"threads": 1, "require_ep": "all"}, budget={"trials": 2},
        measure={"max_time": "3s", "ratio_width": 0.0001, "pattern": "paced", "interval": "1ms", "clock": "cpu"},
        search={"start": [{"quantize": "OnnxQuantization", "quantize.quant_mode": "dynamic"}]},
        chain=[{"slot": "quantize", "pass": "OnnxQuantization", "optional": True, "params": {"quant_mode": ["dynamic", "static"]}}],
    )  # fmt: skip

    result = run(sweep, tmp_path / "out")

    timed = [r for r in result.records if any(s.name == "latency" for s in r.stages)]
    assert timed
    for record in timed:
        facts = next(s.notes for s in record.stages if s.name == "latency")
        assert record.status is Status.INFEASIBLE
        assert (facts["stopped_by"], facts["stopped_why"]) == ("limit", "latency <= 0.001x")
        assert facts["protocol"]["interval_ns"] == 1_000_000
        assert "CPU time" in record.metrics["latency"].method
        assert next(s.notes for s in record.stages if s.name == "check")["no_op"] == ""


@pytest.mark.parametrize(
    ("constraints", "objectives", "limits"),
    [
        (["latency <= 0.5x", "latency <= 5ms", "latency.p99 <= 9ms", "size <= 0.5x"], ["latency", "score"], [("ratio", 0.5), ("ms", 5.0)]),
        (["latency <= baseline * 0.8", "throughput >= 5/s"], ["latency", "score"], [("ratio", 0.8)]),
        (["latency <= 0.5x"], ["latency.p99", "score"], []),  # its runs are wanted of all
        ([], ["latency", "score"], []),
    ],
)
def test_limits_on_the_median_latency_may_end_its_measurement(
    constraints: list[str], objectives: list[str], limits: list[tuple[str, float]], digits: Path, sweep_of: Callable[..., dict[str, Any]]
) -> None:
    from types import SimpleNamespace

    from autotune.config import LoadedSweep, parse_sweep
    from autotune.trial import latency_limits

    loaded = LoadedSweep(parse_sweep(sweep_of(digits, constraints=constraints, objectives=objectives)), digits)
    plan = SimpleNamespace(sweep=loaded, metric_name="accuracy", metric_unit="share", higher_is_better=True)

    found = latency_limits(plan)  # type: ignore[arg-type]  # all that it looks at

    assert [(one["of"], one["limit"]) for one in found] == limits


def test_a_trial_without_children_leaves_a_record_only_at_its_second_attempt(finished: SweepResult, tmp_path: Path) -> None:
    class NoChildren(TrialRunner):
        def stage(self, function: str, args: Mapping[str, Any], folder: Path, **_: Any) -> StageOutcome:
            return StageOutcome(None, Cause.INFRA, "the server of child processes ended or did not answer")

    plan = TrialPlan.load(finished.run)
    pipeline = Pipeline(plan.sweep, plan.facts)
    point = next(r.point for r in finished.records if r.point.get("quantize"))
    found = []
    for attempt in (1, 2):
        with NoChildren(tmp_path, plan.sweep) as runner:
            record = runner.run(plan, pipeline, 7, point, "sampler", attempt=attempt)
        found.append((record.cause, (tmp_path / "trials" / record.id / TRIAL_FILE).exists()))

    assert found == [(Cause.INFRA, False), (Cause.INFRA, True)]


def test_the_record_says_what_share_of_the_model_its_passes_changed_in_time_too(finished: SweepResult) -> None:
    told = [s.notes["coverage"] for r in finished.records for s in r.stages if s.pass_name == "OnnxQuantization"]

    assert told
    for share in told:
        assert 0 < share["operators"] <= share["of_operators"]
        assert 0 < share["weight_bytes"] <= share["of_weight_bytes"]
        assert 0 < share["microseconds"] <= share["of_microseconds"]
    assert len({share["of_microseconds"] for share in told}) == 1  # of one model, found once
    assert len(list((finished.run / "store" / "findings").glob("operator-times-*.json"))) == 1


def test_a_run_folder_that_was_moved_has_its_models_where_it_is_now(finished: SweepResult, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(finished.run, moved)

    plan, before = TrialPlan.load(moved), TrialPlan.load(finished.run)

    assert (plan.baseline.folder, plan.input_model.folder) == (moved / "baseline" / "model",) * 2
    assert plan.baseline.path.exists()
    assert plan.to_json() == before.to_json()


def test_a_measurement_is_told_what_the_baseline_took_before_but_not_by_itself_nor_under_another_evaluation(
    finished: SweepResult, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished.run, run)
    plan = TrialPlan.load(run)
    times = run / BASELINE_TIMES
    lines = times.read_text().split("\n")
    first = json.loads(lines[1])
    assert first["measurement"] == "baseline/latency"

    with TrialRunner(run, plan.sweep) as runner:
        before = runner.baseline_before(run / "trials" / "t-9999" / "latency")
        again = runner.baseline_before(run / "baseline" / "latency")
        times.write_text(json.dumps({**first, "evaluator": "another", "measurement": "x"}) + "\n".join(lines) + '\n{"measurement": "torn')
        torn = runner.baseline_before(run / "trials" / "t-9999" / "latency")
        times.write_text("\n".join(json.dumps({**first, "measurement": f"m-{n}", "ms": n}) for n in range(2000)))
        many = runner.baseline_before(run / "trials" / "t-9999" / "latency")

    assert before[0] == first["ms"]
    assert len(before) == len(lines) - 1
    assert again == before[1:]
    assert torn == before
    assert many == list(map(float, range(2000 - len(many), 2000)))
    assert 100 < len(many) < 400
