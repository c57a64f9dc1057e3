"""F15: fast and small but wrong: the output check makes it invalid, whatever its latency and size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.records import Cause, Status
from autotune.sweep.result import SweepResult
from autotune.sweep.run import run
from tests.faults.harm import harm_sweep, write_case

WRONG = {
    "nan": (Cause.NOT_FINITE, "NaN or infinite values in output logits"),
    "infinite": (Cause.NOT_FINITE, "NaN or infinite values in output logits"),
    "constant": (Cause.BAD_OUTPUT, "the same output for all"),
    "wider": (Cause.BAD_OUTPUT, "must have shape [4, 4]; it has [4, 8]"),
    "fewer_rows": (Cause.BAD_OUTPUT, "must have shape"),
    "dtype": (Cause.BAD_OUTPUT, "outputs must be the baseline's, logits float32; the model has logits float64"),
    "renamed": (Cause.BAD_OUTPUT, "outputs must be the baseline's, logits float32; the model has renamed float32"),
    "second": (Cause.BAD_OUTPUT, "the model has logits float32, second float32"),
}


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> SweepResult:
    folder = tmp_path_factory.mktemp("wrong")
    write_case(folder)
    sweep = harm_sweep(folder, {"model": ["mark", *WRONG]}, target={"threads": 1, "batch_size": 4}, budget={"trials": 20})
    return run(sweep, folder / "out")


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_model_is_invalid_before_it_is_timed(wrong: SweepResult, injected: Callable[[str], None], what: str) -> None:
    injected("F15")
    cause, words = WRONG[what]

    record = next(r for r in wrong.records if r.point.get("harm.model") == what)

    assert (record.status, record.cause, record.stage) == (Status.INVALID, cause, "check"), record.message
    assert words in record.message
    assert not record.metrics
    assert not list((wrong.run / "trials" / record.id).rglob("latency.npz"))


def test_the_right_one_is_delivered_and_the_wrong_ones_are_on_no_front(wrong: SweepResult, injected: Callable[[str], None]) -> None:
    injected("F15")
    sound = next(r for r in wrong.records if r.point.get("harm.model") == "mark")

    assert wrong.status == "delivered"
    assert wrong.summary["best"]["id"] == sound.id
    assert sound.id in wrong.summary["front"]
    assert wrong.summary["trials"] == {"ok": 2, "invalid": len(WRONG)}


def test_a_baseline_whose_outputs_are_nan_is_told_before_any_trial(tmp_path: Path, injected: Callable[[str], None]) -> None:
    injected("F15")
    import onnx

    from tests.faults.harm import harmful_graph

    write_case(tmp_path)
    onnx.save(harmful_graph(tmp_path / "model.onnx", "nan"), str(tmp_path / "model.onnx"))

    result = run(harm_sweep(tmp_path, {"mark": [0, 1]}), tmp_path / "out")

    assert result.status == "none-feasible"
    assert "NaN in output logits" in result.summary["verdict"]
