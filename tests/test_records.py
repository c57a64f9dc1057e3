"""Records: JSON both ways, what counts as measured, closed lists."""

from __future__ import annotations

import json
import math
import pickle

import pytest

from autotune.digest import dump_json
from autotune.records import Cause, Interval, MetricValue, StageRecord, Status, TrialRecord

LATENCY = MetricValue(4.0, 3.9, 4.2, "ms", ratio=Interval(0.5, 0.48, 0.53), samples=320, method="median of block ratios")
SCORE = MetricValue(0.97, 0.95, 0.98, "share", delta=Interval(-0.004, -0.009, 0.001), samples=600)
FULL = TrialRecord(
    number=42, point={"quantize": "OnnxQuantization", "quantize.op_types": ["MatMul"], "session.threads": 1, "prune": None},
    status=Status.OK, origin="default", metrics={"latency": LATENCY, "accuracy": SCORE},
    constraints=({"expr": "latency <= 5ms", "verdict": "certain", "amount": 1.0, "needed": ""},),
    stages=(StageRecord("quantize", 1.25, cached=True, pass_name="OnnxQuantization", digest="ab", notes={"nodes": 3}), StageRecord("check", 0.1)),
    model_digest="cd", session={"intra_op_num_threads": 1}, seconds=3.5, attempts=2,
)  # fmt: skip
BROKEN = TrialRecord(number=7, point={}, status=Status.FAILED, cause=Cause.SIGNAL, stage="quantize", message="killed by signal 11")


@pytest.mark.parametrize("record", [FULL, BROKEN, TrialRecord(number=3, point={}, status=Status.OK, unchanged="no node to quantize", shares_with=0)])
def test_a_record_comes_back_from_json_as_it_was(record: TrialRecord) -> None:
    assert TrialRecord.from_json(json.loads(dump_json(record.to_json()))) == record


def test_records_travel_to_workers() -> None:
    assert pickle.loads(pickle.dumps(FULL)) == FULL


def test_numbers_that_json_lacks_come_back_as_no_number() -> None:
    value = MetricValue(math.nan, -math.inf, math.inf, ratio=Interval(1.0, 0.5, math.inf))

    back = MetricValue.from_json(json.loads(dump_json(value.to_json())))

    assert math.isnan(back.value)
    assert math.isnan(back.low)
    assert back.ratio is not None
    assert (back.ratio.low, math.isnan(back.ratio.high)) == (0.5, True)
    assert back.delta is None


def test_ids_sort_as_numbers_do() -> None:
    assert (FULL.id, BROKEN.id) == ("t-0042", "t-0007")


def test_measured_are_those_with_metrics_whatever_the_constraints_said() -> None:
    assert FULL.measured
    assert not BROKEN.measured
    assert not TrialRecord(1, {}, Status.OK).measured
    assert TrialRecord(1, {}, Status.INFEASIBLE, metrics={"latency": LATENCY}).measured
    assert not TrialRecord(1, {}, Status.INVALID, metrics={"latency": LATENCY}).measured


def test_the_reason_is_status_and_cause() -> None:
    assert BROKEN.reason == "failed: signal"
    assert FULL.reason == "ok"


def test_an_unknown_status_is_refused() -> None:
    with pytest.raises(ValueError, match="splendid"):
        TrialRecord.from_json({**FULL.to_json(), "status": "splendid"})


def test_statuses_and_causes_are_those_of_the_record_format() -> None:
    assert {str(s) for s in Status} == {"ok", "invalid", "failed", "pruned", "infeasible", "undecided", "cancelled"}
    assert {str(c) for c in Cause} == {
        "not_finite", "bad_output", "ep_fallback", "not_applied", "exception", "signal", "exit", "timeout", "oom", "infra",
    }  # fmt: skip


def test_an_exact_interval_has_no_width() -> None:
    assert Interval.exactly(2.0) == Interval(2.0, 2.0, 2.0)
    assert LATENCY.interval == Interval(4.0, 3.9, 4.2)
