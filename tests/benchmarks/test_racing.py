"""Looks at a part of the rows: what is raced, what ends a candidate, and that one which is not ended is scored as without them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from autotune.benchmarks import stages
from autotune.benchmarks.accuracy import load_outputs
from autotune.benchmarks.metrics import get_metric
from autotune.benchmarks.racing import (
    DOMINATED,
    INFEASIBLE,
    OFF_FRONT,
    BoundedRace,
    ProportionRace,
    Rival,
    Rules,
    Stop,
    look,
    look_sizes,
    race_for,
)
from autotune.constraints import parse_constraint
from autotune.errors import ConfigError
from autotune.model import ONNXModelHandler
from autotune.records import Interval, MetricValue
from autotune.session import SessionSettings

ACCURACY = get_metric("accuracy")
LIMIT = parse_constraint("accuracy >= baseline - 2.0pt", metrics={"accuracy": "share"})
ONE_THREAD = SessionSettings(intra_op_num_threads=1)
RIGHT = np.ones(400)
BASE = MetricValue(1.0, 0.99, 1.0, unit="share", delta=Interval.exactly(0.0), ratio=Interval.exactly(1.0), samples=400)


def test_looks_are_taken_after_whole_batches_and_never_at_the_end() -> None:
    assert look_sizes(1000) == (20, 50, 100, 200, 400)
    assert look_sizes(300, step=8) == (8, 16, 32, 64, 120)
    assert look_sizes(10) == (1, 2, 4)
    assert look_sizes(4, step=8) == ()


def test_only_what_a_part_of_the_rows_can_tell_is_raced(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(o, labels):\n    return o['y']\n\nscore.bounds = (0, 2)\n")
    shares = np.linspace(0, 1, 400)

    assert isinstance(race_for(ACCURACY, RIGHT), ProportionRace)
    assert isinstance(race_for(ACCURACY, shares), BoundedRace)
    assert isinstance(race_for(get_metric("cosine"), RIGHT), BoundedRace)
    assert isinstance(race_for(get_metric("mine.py:score", root=tmp_path), 2 * shares), BoundedRace)
    assert race_for(get_metric("mine.py:score", root=tmp_path), 3 * shares) is None
    assert race_for(get_metric("mse"), shares) is None
    assert race_for(get_metric("roc_auc"), None) is None


@pytest.mark.parametrize("bounds", ["'01'", "(1, 0)", "(0, float('inf'))", "3", "(0, 1, 2)", "('a', 'b')"])
def test_bounds_that_are_none_are_refused(tmp_path: Path, bounds: str) -> None:
    (tmp_path / "mine.py").write_text(f"def score(o, labels):\n    return o['y']\n\nscore.bounds = {bounds}\n")

    with pytest.raises(ConfigError, match=r"score\.bounds must be two finite numbers, the lower one first"):
        get_metric("mine.py:score", root=tmp_path)


def test_rules_come_back_from_json() -> None:
    rules = Rules((LIMIT,), "latency <= 5ms", (Rival("t-0001", Interval(0, -1, 1), elsewhere=True, everywhere=False),), eps=0.01)

    assert Rules.from_json(stages._plain(rules.to_json())) == rules


def ended(candidate: NDArray[np.float64], rules: Rules, *, rows: int) -> Stop | None:
    race = race_for(ACCURACY, RIGHT)
    assert race is not None
    return look(race, candidate[:rows], rules, BASE)


def test_a_gross_failure_ends_as_soon_as_no_outcome_meets_the_limit() -> None:
    wrong = np.zeros(400)

    stop = ended(wrong, Rules((LIMIT,)), rows=20)

    assert stop is not None
    assert stop.rule == INFEASIBLE
    assert stop.words.startswith(
        "stopped after 20 of 400 rows: `accuracy >= baseline - 2.0pt` is violated (accuracy over all rows differs by -100.0 pt"
    )
    assert stop.metric.samples == 20
    assert stop.metric.delta is not None
    assert stop.metric.delta.low == -1.0
    assert "for all 400 rows from the first 20: exact hypergeometric limits" in stop.metric.method


def test_a_candidate_near_the_limit_is_scored_on_all_rows() -> None:
    near = RIGHT.copy()
    near[::40] = 0

    assert not [size for size in look_sizes(400) if ended(near, Rules((LIMIT,)), rows=size)]


def test_a_candidate_that_is_lost_already_is_scored_on_enough_rows_to_speak_of() -> None:
    rules = Rules((LIMIT,), already="latency <= 5ms")

    assert ended(RIGHT, rules, rows=20) is None
    stop = ended(RIGHT, rules, rows=40)
    assert stop is not None
    assert (stop.rule, stop.metric.value) == (INFEASIBLE, 1.0)
    assert "`latency <= 5ms` is violated whatever the score is" in stop.words


@pytest.mark.parametrize(
    ("rival", "rule"),
    [
        (Rival("t-0001", Interval(0.0, -0.01, 0.01), elsewhere=True, everywhere=True), DOMINATED),
        (Rival("t-0001", Interval(0.0, -0.01, 0.01), elsewhere=False, everywhere=False), OFF_FRONT),  # by the score
        (Rival("t-0001", Interval(0.0, -0.01, 0.9), elsewhere=True, everywhere=True), OFF_FRONT),  # its score is in doubt
        (Rival("t-0001", Interval(0.0, -0.01, 0.9), elsewhere=False, everywhere=False), None),
        (Rival("t-0001", Interval(0.9, 0.8, 1.0), elsewhere=True, everywhere=True), None),  # the candidate may be better
    ],
)
def test_a_rival_ends_a_candidate_that_can_no_longer_reach_it(rival: Rival, rule: str | None) -> None:
    half = (np.arange(400) % 2).astype(float)

    stop = ended(half, Rules(rivals=(rival,)), rows=160)

    assert (stop.rule if stop else None) == rule
    assert stop is None or "t-0001" in stop.words


def test_a_score_that_is_no_objective_alone_puts_nobody_off_the_front() -> None:
    rival = Rival("t-0001", Interval(0.0, -0.01, 0.01), elsewhere=False, everywhere=False)

    assert ended(np.zeros(400), Rules(rivals=(rival,), score_counts=False), rows=160) is None


def test_a_score_that_is_not_right_or_wrong_after_all_decides_nothing() -> None:
    assert ended(np.full(400, 0.5), Rules((LIMIT,)), rows=160) is None


# The stage ------------------------------------------------------------------------------------------------------------------


class Bench:
    """Two classifiers of 240 random rows: the first is the baseline, the other as the test wants it."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(0)
        self.folder = folder
        x = rng.normal(size=(240, 4)).astype(np.float32)
        self.weights = rng.normal(size=(4, 3)).astype(np.float32)
        np.savez(folder / "eval.npz", x=x, labels=(x @ self.weights).argmax(1))
        self.rows = [int(i) for i in rng.permutation(240)]

    def model(self, name: str, weights: NDArray[np.float32]) -> ONNXModelHandler:
        graph = helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], ["logits"])], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 3])], [numpy_helper.from_array(weights, "w")],
        )  # fmt: skip
        (self.folder / name).mkdir(exist_ok=True)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(self.folder / name / "model.onnx"))
        return ONNXModelHandler.from_folder(self.folder / name, session=ONE_THREAD)

    def score(
        self, name: str, weights: NDArray[np.float32], *, metric: str = "accuracy", rules: Rules | None = None, batch: int = 1
    ) -> dict[str, Any]:
        first = not (self.folder / "out-baseline" / "outputs.npz").exists()
        base = None if name == "baseline" else self.score("baseline", self.weights, metric=metric) if first else self.base
        out = self.folder / f"out-{name}"
        out.mkdir(exist_ok=True)
        race = {"rules": rules.to_json(), "baseline": base["metric"]} if rules and base else None
        found = stages.accuracy({
            "model": self.model(name, weights).to_json(), "data": str(self.folder / "eval.npz"), "metric": metric, "root": str(self.folder),
            "rows": self.rows, "batch_size": batch, "baseline_outputs": str(self.folder / "out-baseline" / "outputs.npz") if base else None,
            "out": str(out), "race": race,
        })  # fmt: skip
        if name == "baseline":
            self.base: Mapping[str, Any] = found
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.parametrize(("batch", "rows"), [(1, 5), (7, 7)])
def test_the_stage_runs_no_more_rows_than_the_verdict_takes(bench: Bench, batch: int, rows: int) -> None:
    found = bench.score("broken", -bench.weights, rules=Rules((LIMIT,)), batch=batch)

    assert found["verdict"] == "ok"
    assert found["stopped"]["rule"] == INFEASIBLE
    assert found["rows"] <= 24 < found["of"] == 240
    assert found["looks"][0]["rows"] == rows
    assert len(load_outputs(bench.folder / "out-broken" / "outputs.npz").arrays["logits"]) == found["rows"]
    with np.load(bench.folder / "out-broken" / "scores.npz") as kept:
        assert kept["rows"].tolist() == bench.rows[: found["rows"]]
        assert kept["column_0"].mean() < 0.5


@pytest.mark.parametrize("batch", [1, 7])
def test_a_candidate_that_runs_to_the_end_is_scored_as_without_looks(bench: Bench, batch: int) -> None:
    weights = bench.weights + np.float32(0.02)

    plain = bench.score("plain", weights, batch=batch)
    watched = bench.score("watched", weights, rules=Rules((LIMIT,)), batch=batch)

    assert watched["metric"] == plain["metric"]
    assert watched["stopped"] is None
    assert len(watched["looks"]) == 5
    for each in watched["looks"]:
        assert each["low"] <= watched["metric"]["delta"]["value"] <= each["high"]


def test_a_function_whose_scores_hang_together_is_not_raced(bench: Bench) -> None:
    (bench.folder / "mine.py").write_text(
        "import numpy as np\ndef rank(o, labels):\n    own = np.take_along_axis(o['logits'], labels[:, None], 1)[:, 0]\n"
        "    return (own > np.median(own)).astype(float)\n"
    )

    found = bench.score("broken", -bench.weights, metric="mine.py:rank", rules=Rules(already="size <= 1MB"))

    assert found["verdict"] == "ok"
    assert (found["stopped"], found["rows"], found["looks"]) == (None, 240, [])


def test_outputs_that_are_not_finite_end_the_run_at_the_next_look(bench: Bench) -> None:
    found = bench.score("broken", np.full((4, 3), np.nan, np.float32), rules=Rules((LIMIT,)))

    assert (found["verdict"], found["cause"], found["rows"]) == ("invalid", "not_finite", 5)


def test_agreement_with_the_baseline_is_raced_within_its_bounds(bench: Bench) -> None:
    limit = parse_constraint("cosine >= 0.99", metrics={"cosine": "share"})

    found = bench.score("broken", -bench.weights, metric="cosine", rules=Rules((limit,)))

    assert found["stopped"]["rule"] == INFEASIBLE
    assert found["rows"] < 240
    assert found["metric"]["high"] < 0.99
