"""F14: a metric that gives no number: the trial is invalid with its reason, JSON stays valid, nobody sees a number of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.benchmarks.metrics import get_metric
from autotune.errors import ConfigError
from autotune.records import Cause, Status
from autotune.sweep.result import SweepResult
from autotune.sweep.run import run
from tests.faults.harm import harm_sweep, write_case

# Mark of the candidate: what its metric returns, and how the trial has to end.
RETURNS: dict[int, tuple[str, Status, Cause | None, str]] = {
    1: ("NaN", Status.INVALID, Cause.NOT_FINITE, "nan"),
    2: ("infinity", Status.INVALID, Cause.NOT_FINITE, "inf"),
    3: ("minus infinity", Status.INVALID, Cause.NOT_FINITE, "-inf"),
    4: ("None", Status.INVALID, Cause.BAD_OUTPUT, "None"),
    5: ("text", Status.INVALID, Cause.BAD_OUTPUT, "'0.93'"),
    6: ("a numpy number", Status.OK, None, ""),
    7: ("1e400", Status.INVALID, Cause.NOT_FINITE, "inf"),
    8: ("a whole number beyond floats", Status.INVALID, Cause.NOT_FINITE, "too large"),
    9: ("a complex number", Status.INVALID, Cause.BAD_OUTPUT, "complex"),
    10: ("complex scores", Status.INVALID, Cause.BAD_OUTPUT, "complex"),
    11: ("a matrix", Status.INVALID, Cause.BAD_OUTPUT, "shape [2, "),
    12: ("a score too few", Status.INVALID, Cause.BAD_OUTPUT, "one score for each"),
    13: ("no scores", Status.INVALID, Cause.BAD_OUTPUT, "one score for each"),
    14: ("an empty mapping", Status.INVALID, Cause.BAD_OUTPUT, "{}"),
    15: ("NaN for some", Status.INVALID, Cause.NOT_FINITE, "that are not"),
    16: ("scores as text", Status.INVALID, Cause.BAD_OUTPUT, "type <U"),
    17: ("masked scores", Status.INVALID, Cause.NOT_FINITE, "that are not"),
    18: ("None for each", Status.INVALID, Cause.BAD_OUTPUT, "None"),
    19: ("an object", Status.INVALID, Cause.BAD_OUTPUT, "object"),
    20: ("durations", Status.INVALID, Cause.BAD_OUTPUT, "timedelta64"),
}


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> SweepResult:
    folder = tmp_path_factory.mktemp("odd")
    write_case(folder)
    return run(harm_sweep(folder, {"mark": [0, *RETURNS]}, metric="odd_metric", budget={"trials": 40}), folder / "out")


@pytest.mark.parametrize("mark", RETURNS, ids=[name for name, *_ in RETURNS.values()])
def test_what_is_no_score_makes_the_trial_invalid(odd: SweepResult, injected: Callable[[str], None], mark: int) -> None:
    injected("F14")
    _, status, cause, words = RETURNS[mark]

    record = next(r for r in odd.records if r.point.get("harm.mark") == mark)

    assert (record.status, record.cause) == (status, cause), record.message
    assert words in record.message
    assert record.measured == (status is Status.OK)


def test_every_file_of_such_a_sweep_is_valid_json(odd: SweepResult, injected: Callable[[str], None]) -> None:
    injected("F14")

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    files = [*odd.run.rglob("*.json")]
    for path in files:
        json.loads(path.read_text(), parse_constant=refuse)

    assert len(files) > len(RETURNS)


def test_neither_sampler_nor_front_sees_a_number_of_theirs(odd: SweepResult, injected: Callable[[str], None]) -> None:
    injected("F14")
    import optuna

    from autotune.sweep.search import open_study

    invalid = {r.number for r in odd.records if r.status is Status.INVALID}
    study, _ = open_study(odd.run, None, ["minimize", "maximize"], ["latency", "odd_metric"])

    assert len(invalid) == sum(status is Status.INVALID for _, status, *_ in RETURNS.values())
    assert {study.trials[n].state for n in invalid} == {optuna.trial.TrialState.PRUNED}
    assert all(study.trials[n].values is None for n in invalid)
    assert not {f"t-{n:04d}" for n in invalid} & set(odd.summary["front"])
    assert odd.status == "delivered"


def test_a_metric_that_never_gives_a_number_ends_the_sweep_at_the_baseline(tmp_path: Path, injected: Callable[[str], None]) -> None:
    injected("F14")
    write_case(tmp_path)
    (tmp_path / "mine.py").write_text("def never(outputs, labels):\n    return float('nan')\n")
    sweep = harm_sweep(tmp_path, {"mark": [0]}) | {"metric": f"{tmp_path}/mine.py:never"}

    result = run(sweep, tmp_path / "out")

    assert result.status == "none-feasible"
    assert "invalid: not_finite in stage accuracy" in result.summary["verdict"]


def test_evaluation_data_without_rows_is_refused_before_anything_runs(tmp_path: Path, injected: Callable[[str], None]) -> None:
    injected("F14")
    write_case(tmp_path)
    np.savez(tmp_path / "eval.npz", x=np.zeros((0, 16), np.float32), labels=np.zeros(0, np.int64))

    with pytest.raises(ConfigError, match="at least one example"):
        run(harm_sweep(tmp_path, {"mark": [0]}), tmp_path / "out")

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("returned", "value"), [(np.float32(0.5), 0.5), (np.array(0.25), 0.25), (1, 1.0), (True, 1.0), (np.array([1, 0], np.uint8), 0.5)]
)
def test_numbers_of_any_kind_are_scores(tmp_path: Path, injected: Callable[[str], None], returned: Any, value: float) -> None:
    injected("F14")
    np.save(tmp_path / "returned.npy", returned)
    (tmp_path / "mine.py").write_text(f"import numpy as np\n\ndef mine(outputs, labels):\n    return np.load({str(tmp_path / 'returned.npy')!r})\n")
    metric = get_metric("mine.py:mine", root=tmp_path)

    features = metric.features({"y": np.ones(2)}, np.ones(2), 2)

    assert metric.value(features) == pytest.approx(value)
