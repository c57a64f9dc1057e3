"""What `plan` says is what `run` does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.config import LoadedSweep, parse_sweep
from autotune.sweep.plan import describe_plan, render_plan
from autotune.sweep.prepare import Prepared, prepare
from autotune.sweep.result import SweepResult

Sweep = Callable[..., dict[str, Any]]


def prepared(sweep: dict[str, Any]) -> Prepared:
    return prepare(LoadedSweep(parse_sweep(sweep), Path.cwd()))


def test_plan_and_run_agree_to_the_digit(digits: Path, sweep_of: Sweep, finished: SweepResult) -> None:
    content = describe_plan(prepared(sweep_of(digits)), [])

    assert content["space"] == finished.summary["space"]
    assert content["budget"]["trials"] == len(finished.records)
    first = [(f["origin"], f["point"]) for f in content["first"]]
    assert first == [(r.origin, dict(r.point)) for r in finished.records[: len(first)]]
    assert {r.origin for r in finished.records[len(first) :]} <= {"sampler", "enumeration", "random"}


def test_each_fixed_parameter_says_who_fixed_it(digits: Path, sweep_of: Sweep) -> None:
    content = describe_plan(prepared(sweep_of(digits)), [])
    fixed = {row["name"]: (row["values"], row["why"]) for row in content["fixed"]}

    assert fixed["quantize.per_channel"] == ([True], "given in the sweep file")
    assert fixed["session.intra_op_num_threads"] == ([1], "target.threads")
    assert fixed["quantize.activation_type"] == (["uint8"], "the pass's default")
    assert "quantize.quant_mode" not in fixed  # it is searched


def test_with_search_off_the_defaults_are_said_to_hold(digits: Path, sweep_of: Sweep) -> None:
    chain = [{"slot": "quantize", "pass": "OnnxQuantization"}]
    content = describe_plan(prepared(sweep_of(digits, chain=chain, search={"enabled": False})), [])
    fixed = {row["name"]: row["why"] for row in content["fixed"]}

    assert content["space"]["valid"] == 1
    assert fixed["quantize.quant_mode"] == "search is off: the pass's default"


def test_a_rule_that_refuses_points_is_told_with_its_count_and_an_example(digits: Path, sweep_of: Sweep) -> None:
    sweep = sweep_of(digits)
    del sweep["data"]["calibration"]
    content = describe_plan(prepared(sweep), [])
    (rule,) = [r for r in content["rules"] if r["rule"] == "data-needed"]

    assert rule["refused"] == content["space"]["invalid_by_rule"]["data-needed"] > 0
    assert content["space"]["declared"] == content["space"]["valid"] + sum(r["refused"] for r in content["rules"])
    assert (rule["example"]["quantize"], rule["example"]["quantize.quant_mode"]) == ("OnnxQuantization", "static")
    assert "data.calibration" in rule["message"]
    assert "data-needed" in render_plan(content)


def test_the_text_says_what_the_sampler_will_do(digits: Path, sweep_of: Sweep) -> None:
    small = describe_plan(prepared(sweep_of(digits)), [])
    few = describe_plan(prepared(sweep_of(digits, budget={"trials": 3, "time": "20m"}, seed=7)), [])
    uniform = describe_plan(prepared(sweep_of(digits, budget={"trials": 3}, search={"sampler": "random"})), [])

    assert small["search"] == ("enumerate" if small["space"]["valid"] <= 5 else "tpe")
    assert "3, chosen by tpe (seed 7) after the first ones; none twice; the search ends after 20m" in render_plan(few)
    assert "3, drawn uniformly without repeats (seed 0) after the first ones" in render_plan(uniform)
    assert all(len(line) <= 120 for line in render_plan(few).splitlines() if not line.startswith("model"))


def test_the_time_rests_on_a_run_of_the_model_or_on_an_earlier_sweep(digits: Path, sweep_of: Sweep, finished: SweepResult) -> None:
    anew = describe_plan(prepared(sweep_of(digits)), [])["estimate"]["time"]
    known = describe_plan(prepared(sweep_of(digits)), [], run=finished.run)["estimate"]["time"]
    took = [r.seconds for r in finished.records if r.measured and not r.unchanged]

    assert "ms a run of the model, seen just now" in anew["basis"]
    assert f"{len(took)} trials of this model" in known["basis"]
    assert known["seconds"] == pytest.approx(np.mean(took) * 5 + (5 + 4 + 1) * 1.0)  # five trials, the turns at the end, four finalists, the bundle


def test_an_earlier_sweep_of_another_target_is_no_basis(digits: Path, sweep_of: Sweep, finished: SweepResult) -> None:
    other = describe_plan(prepared(sweep_of(digits, target={"threads": 1, "batch_size": 2})), [], run=finished.run)

    assert "seen just now" in other["estimate"]["time"]["basis"]


def test_the_time_budget_bounds_the_estimate(digits: Path, sweep_of: Sweep) -> None:
    content = describe_plan(prepared(sweep_of(digits, budget={"trials": 5, "time": "2s"})), [])

    assert content["estimate"]["time"]["seconds"] == 2.0


def test_disk_is_bounded_from_the_size_of_the_model(digits: Path, sweep_of: Sweep, finished: SweepResult) -> None:
    disk = describe_plan(prepared(sweep_of(digits)), [])["estimate"]["disk"]
    used = sum(f.stat().st_size for part in ("store", "best.bundle", "baseline/model") for f in (finished.run / part).rglob("*") if f.is_file())

    assert (digits / "model.onnx").stat().st_size * 7 < disk["at_most_bytes"]  # five trials, one slot that changes files, two copies
    assert used < disk["at_most_bytes"] < disk["free_bytes"]
