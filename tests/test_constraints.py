"""Constraints: what can be written, what is refused and how, and verdicts on intervals."""

from __future__ import annotations

import json
import math
import pickle

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autotune.constraints import (
    Constraint,
    Judgement,
    Relative,
    Verdict,
    check_baseline,
    describe,
    difference_from,
    digits,
    feasible,
    judge,
    judge_all,
    parse_constraint,
    ratio_to,
    relaxed,
    shown,
    shown_difference,
    violation,
)
from autotune.digest import dump_json
from autotune.errors import ConfigError
from autotune.records import Interval, MetricValue

METRICS = {
    "accuracy": "share", "error_rate": "share", "mse": "", "latency": "ms", "latency.p99": "ms", "size": "bytes", "peak_memory": "bytes",
    "throughput": "/s",
}  # fmt: skip
HIGHER = {"accuracy": True, "error_rate": False, "mse": False}


def parsed(text: str) -> Constraint:
    return parse_constraint(text, metrics=METRICS, score="accuracy", higher_is_better=HIGHER)


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(text)
    return str(caught.value)


def share(value: float, low: float, high: float, *, delta: Interval | None = None, samples: int = 600) -> MetricValue:
    return MetricValue(value, low, high, "share", delta=delta, samples=samples)


BASELINE = share(0.98, 0.97, 0.99, delta=Interval.exactly(0.0))


def drop(value: float, low: float, high: float, *, samples: int = 600) -> MetricValue:
    """A score whose paired difference from the baseline is known; its own interval is wide, and must not matter."""
    return share(0.98 + value, 0.5, 1.0, delta=Interval(value, low, high), samples=samples)


# ---- reading


@pytest.mark.parametrize(
    ("text", "metric", "sense", "limit", "relative"),
    [
        ("accuracy >= baseline - 1.0pt", "accuracy", ">=", -0.01, Relative.DELTA),
        ("accuracy>=baseline-1.0 pt", "accuracy", ">=", -0.01, Relative.DELTA),
        ("accuracy >= baseline", "accuracy", ">=", 0.0, Relative.DELTA),
        ("accuracy ≥ 0.95", "accuracy", ">=", 0.95, Relative.NONE),
        ("accuracy >= 0.99x", "accuracy", ">=", 0.99, Relative.RATIO),
        ("score >= baseline * 0.99", "accuracy", ">=", 0.99, Relative.RATIO),
        ("error_rate <= baseline + 0.5pt", "error_rate", "<=", 0.005, Relative.DELTA),
        ("mse <= baseline * 1.1", "mse", "<=", 1.1, Relative.RATIO),
        ("mse <= 1.1 * baseline", "mse", "<=", 1.1, Relative.RATIO),
        ("mse <= baseline + 1e-3", "mse", "<=", 0.001, Relative.DELTA),
        ("mse <= .02", "mse", "<=", 0.02, Relative.NONE),
        ("latency <= 5ms", "latency", "<=", 5.0, Relative.NONE),
        ("latency.p50 <= 250us", "latency", "<=", 0.25, Relative.NONE),
        ("latency.p99 <= 0.005 s", "latency.p99", "<=", 5.0, Relative.NONE),
        ("latency <= 0.5x", "latency", "<=", 0.5, Relative.RATIO),
        ("latency <= baseline + 1ms", "latency", "<=", 1.0, Relative.DELTA),
        ("size <= 100MB", "size", "<=", 100e6, Relative.NONE),
        ("size <= 100MiB", "size", "<=", 100 * 2**20, Relative.NONE),
        ("peak_memory <= 2GB", "peak_memory", "<=", 2e9, Relative.NONE),
        ("throughput >= 200/s", "throughput", ">=", 200.0, Relative.NONE),
        ("throughput >= 600/min", "throughput", ">=", 10.0, Relative.NONE),
    ],
)
def test_a_line_becomes_metric_sense_limit_and_what_it_is_relative_to(text: str, metric: str, sense: str, limit: float, relative: Relative) -> None:
    found = parsed(text)

    assert (found.metric, found.sense, found.relative, found.unit) == (metric, sense, relative, METRICS[metric])
    assert found.limit == pytest.approx(limit)


def test_the_text_is_kept_as_written_but_for_spaces() -> None:
    assert parsed("  latency   <=  5ms ").text == "latency <= 5ms"


def test_percent_on_a_difference_of_shares_is_refused_with_both_readings() -> None:
    message = refusal("accuracy >= baseline - 1%")

    assert "%" in message
    assert "`accuracy >= baseline - 1pt`" in message
    assert "`accuracy >= baseline * 0.99`" in message


def test_percent_on_a_share_is_refused_with_both_readings() -> None:
    message = refusal("accuracy >= 95%")

    assert "`accuracy >= 0.95`" in message
    assert "`accuracy >= baseline * 0.95`" in message


def test_percent_on_latency_is_refused_with_the_multiple_it_must_mean() -> None:
    assert "`latency <= baseline * 1.1`" in refusal("latency <= baseline + 10%")


@pytest.mark.parametrize(
    ("text", "offer"),
    [
        ("latency <= 5", "`latency <= 5ms`"),
        ("latency <= 5", "`latency <= 5x`"),
        ("latency <= 5MB", "`latency <= 5ms`"),
        ("size <= 100", "`size <= 100MB`"),
        ("size <= 5ms", "`size <= 5MB`"),
        ("throughput >= 200", "`throughput >= 200/s`"),
        ("accuracy >= baseline - 0.01", "`accuracy >= baseline - 1pt`"),
        ("accuracy >= baseline - 0.01", "`accuracy >= baseline - 0.01pt`"),
        ("accuracy >= 95pt", "`accuracy >= 0.95`"),
        ("accuracy >= 95", "`accuracy >= 0.95`"),
        ("latency <= baseline + 1", "`latency <= baseline + 1ms`"),
        ("mse <= 5ms", "`mse <= 5`"),
    ],
)
def test_a_missing_or_wrong_unit_is_refused_with_what_is_possible(text: str, offer: str) -> None:
    message = refusal(text)

    assert offer in message
    assert repr(text) in message


def test_what_is_offered_can_be_read() -> None:
    for text in ("latency <= 5", "size <= 5ms", "accuracy >= 95", "accuracy >= baseline - 1%", "mse <= 5ms", "accuracy >= baseline - 0.01"):
        offers = refusal(text).split("`")[1::2]
        assert offers
        for offer in offers:
            parsed(offer)


def test_an_unknown_metric_is_refused_with_the_nearest_name() -> None:
    assert "Did you mean 'accuracy'?" in refusal("acuracy >= 0.9")


def test_score_is_no_name_where_no_score_is_measured() -> None:
    with pytest.raises(ConfigError, match="'score'"):
        parse_constraint("score >= 0.9", metrics={"latency": "ms"})


@pytest.mark.parametrize(
    "text", ["accuracy >= baseline + 101pt", "latency <= 0ms", "latency <= -5ms", "latency <= 0x", "size <= 0 * baseline", "mse <= 1e999"]
)
def test_a_limit_that_makes_no_sense_is_refused(text: str) -> None:
    assert repr(text) in refusal(text)


@pytest.mark.parametrize(
    "text", ["", "fast", "latency", "latency <=", "<= 5ms", "latency <= quick", "latency <= baseline * fast", "latency <= 1,5ms"]
)
def test_what_is_no_constraint_is_refused_with_examples(text: str) -> None:
    message = refusal(text)

    assert repr(text) in message
    assert "accuracy >= baseline - 1.0pt" in message


def test_strict_comparison_and_equality_are_refused() -> None:
    for text in ("latency < 5ms", "latency = 5ms", "accuracy == 0.9"):
        assert "must use >= or <=" in refusal(text)


@pytest.mark.parametrize("text", ["error_rate >= baseline - 1pt", "accuracy <= 0.9", "latency >= 5ms", "throughput <= 5/s", "mse >= 0.1"])
def test_a_limit_on_the_wrong_side_is_refused_since_the_worst_models_would_meet_it(text: str) -> None:
    assert "worst models would meet it" in refusal(text)


def test_something_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="5"):
        parsed(5)  # type: ignore[arg-type] # what a YAML file may hold


# ---- judging


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (drop(-0.004, -0.009, 0.001), Verdict.CERTAIN),
        (drop(-0.004, -0.01, 0.002), Verdict.CERTAIN),
        (drop(-0.004, -0.015, 0.007), Verdict.MET),
        (drop(-0.01, -0.02, 0.0), Verdict.MET),
        (drop(-0.015, -0.024, -0.006), Verdict.UNDECIDED),
        (drop(-0.015, -0.02, -0.01), Verdict.UNDECIDED),
        (drop(-0.03, -0.04, -0.02), Verdict.VIOLATED),
    ],
)
def test_the_verdict_follows_from_the_paired_interval(value: MetricValue, verdict: Verdict) -> None:
    assert judge(parsed("accuracy >= baseline - 1.0pt"), value, BASELINE).verdict is verdict


def test_an_upper_limit_is_judged_the_other_way_round() -> None:
    constraint = parsed("latency <= 5ms")

    def verdict(low: float, value: float, high: float) -> Verdict:
        return judge(constraint, MetricValue(value, low, high, "ms"), None).verdict

    assert verdict(4.0, 4.5, 5.0) is Verdict.CERTAIN
    assert verdict(4.0, 4.5, 5.5) is Verdict.MET
    assert verdict(4.0, 5.1, 5.5) is Verdict.UNDECIDED
    assert verdict(5.1, 5.2, 5.5) is Verdict.VIOLATED


def test_a_ratio_is_judged_on_the_paired_ratio_and_not_on_two_intervals() -> None:
    value = MetricValue(4.0, 1.0, 9.0, "ms", ratio=Interval(0.48, 0.47, 0.49))
    baseline = MetricValue(8.0, 3.0, 20.0, "ms")

    found = judge(parsed("latency <= 0.5x"), value, baseline)

    assert found.verdict is Verdict.CERTAIN
    assert found.amount == pytest.approx(0.02)


def test_without_pairs_the_widest_comparison_the_intervals_allow_is_used() -> None:
    value, baseline = MetricValue(4.0, 3.0, 5.0, "ms"), MetricValue(8.0, 6.0, 10.0, "ms")

    assert ratio_to(value, baseline) == Interval(0.5, 0.3, 5 / 6)
    assert difference_from(value, baseline) == Interval(-4.0, -7.0, -1.0)


def test_exact_values_give_exact_comparisons() -> None:
    value, baseline = MetricValue(25.0, 25.0, 25.0, "bytes"), MetricValue(100.0, 100.0, 100.0, "bytes")

    assert ratio_to(value, baseline) == Interval.exactly(0.25)
    assert judge(parsed("size <= 0.25x"), value, baseline).verdict is Verdict.CERTAIN


def test_a_loss_of_exactly_the_points_allowed_meets_the_limit_in_spite_of_rounding() -> None:
    value = share(0.97, 0.97, 0.97, delta=Interval.exactly(0.97 - 0.98))  # -0.010000000000000009

    assert judge(parsed("accuracy >= baseline - 1.0pt"), value, BASELINE).verdict is Verdict.CERTAIN


def test_rounding_of_equal_scores_does_not_put_a_model_behind_its_baseline() -> None:
    value = share(0.98, 0.97, 0.99, delta=Interval.exactly(-1.1e-16))

    assert judge(parsed("accuracy >= baseline"), value, BASELINE).verdict is Verdict.CERTAIN


def test_the_baseline_itself_is_certain_not_to_fall_behind_itself() -> None:
    assert judge(parsed("accuracy >= baseline"), BASELINE, BASELINE).verdict is Verdict.CERTAIN


@pytest.mark.parametrize("value", [0.0, -0.2, math.nan])
def test_a_multiple_of_a_baseline_that_is_not_above_zero_is_refused(value: float) -> None:
    constraint = parsed("mse <= 1.1x")
    baseline = MetricValue(value, value, value)

    with pytest.raises(ConfigError, match="needs a baseline above 0"):
        check_baseline(constraint, baseline)
    with pytest.raises(ConfigError, match=r"baseline \+"):
        judge(constraint, MetricValue(0.1, 0.1, 0.1), baseline)


def test_what_was_not_measured_is_undecided_and_says_so() -> None:
    found = judge(parsed("latency.p99 <= 5ms"), None, None)

    assert found.verdict is Verdict.UNDECIDED
    assert found.needed == "latency.p99 was not measured"
    assert math.isnan(found.amount)
    assert violation(found) > 0


def test_a_value_that_is_no_number_violates_and_limits_that_are_none_leave_doubt() -> None:
    constraint = parsed("latency <= 5ms")

    assert judge(constraint, MetricValue(math.nan, 1.0, 2.0, "ms"), None).verdict is Verdict.VIOLATED
    assert judge(constraint, MetricValue(4.0, math.nan, math.nan, "ms"), None).verdict is Verdict.MET
    assert judge(constraint, MetricValue(6.0, math.nan, math.nan, "ms"), None).verdict is Verdict.UNDECIDED


def test_a_drop_of_twice_the_half_width_too_little_needs_eight_times_the_rows() -> None:
    # Room 0.5 pt, half-width 1.0 pt: the half-width must fall by 2, so the rows must grow by 4; by 1.43 squared more, to be likely enough.
    found = judge(parsed("accuracy >= baseline - 1.0pt"), drop(-0.005, -0.015, 0.005, samples=600), BASELINE)

    assert found.verdict is Verdict.MET
    assert found.needed == "about 4,400 more rows would settle it"


def test_an_undecided_latency_says_how_many_runs_and_seconds_would_settle_it() -> None:
    baseline = MetricValue(5.0, 5.0, 5.0, "ms")
    value = MetricValue(5.0, 4.0, 6.0, "ms", ratio=Interval(0.52, 0.48, 0.56), samples=100)

    found = judge(parsed("latency <= 0.5x"), value, baseline)

    assert found.verdict is Verdict.UNDECIDED
    assert found.needed == "about 720 more runs would settle it (about 7.2 s)"


def test_an_estimate_on_the_limit_can_be_settled_by_no_number_of_rows() -> None:
    found = judge(parsed("accuracy >= baseline - 1.0pt"), drop(-0.01, -0.02, 0.0), BASELINE)

    assert "no practical number of rows" in found.needed


def test_certain_and_violated_need_nothing_more() -> None:
    constraint = parsed("accuracy >= baseline - 1.0pt")

    assert judge(constraint, drop(0.0, -0.001, 0.001), BASELINE).needed == ""
    assert judge(constraint, drop(-0.1, -0.11, -0.09), BASELINE).needed == ""


def test_met_is_feasible_unless_strict() -> None:
    constraint = parsed("accuracy >= baseline - 1.0pt")
    met = judge(constraint, drop(-0.004, -0.015, 0.007), BASELINE)
    certain = judge(constraint, drop(0.0, -0.001, 0.001), BASELINE)

    assert feasible([certain, met])
    assert not feasible([certain, met], strict=True)
    assert feasible([certain], strict=True)
    assert feasible([])
    assert violation(met) <= 0 < violation(met, strict=True)


def test_violations_of_different_constraints_are_in_units_of_their_limits() -> None:
    two_points_down = judge(parsed("accuracy >= baseline - 1.0pt"), drop(-0.02, -0.03, -0.012), BASELINE)
    ten_ms = judge(parsed("latency <= 5ms"), MetricValue(10.0, 9.0, 11.0, "ms"), None)

    assert violation(two_points_down) == pytest.approx(1.0)
    assert violation(ten_ms) == pytest.approx(1.0)


@given(
    st.sampled_from(["accuracy >= baseline - 1.0pt", "accuracy >= 0.9", "accuracy >= 0.99x"]),
    st.floats(-1, 1), st.floats(0, 1), st.floats(0, 1), st.booleans(),
)  # fmt: skip
def test_violation_is_finite_and_at_most_zero_exactly_where_it_is_feasible(text: str, value: float, below: float, above: float, strict: bool) -> None:
    metric = MetricValue(value, value - below, value + above, "share", samples=10)

    found = judge(parsed(text), metric, BASELINE)

    assert math.isfinite(violation(found, strict=strict))
    assert (violation(found, strict=strict) <= 0) == feasible([found], strict=strict)


@given(st.floats(-0.5, 0.5), st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0, 0.2))
def test_a_better_model_never_gets_a_worse_verdict(value: float, below: float, above: float, gain: float) -> None:
    order = [Verdict.VIOLATED, Verdict.UNDECIDED, Verdict.MET, Verdict.CERTAIN]
    constraint = parsed("accuracy >= baseline - 1.0pt")

    before = judge(constraint, drop(value, value - below, value + above), BASELINE)
    after = judge(constraint, drop(value + gain, value + gain - below, value + gain + above), BASELINE)

    assert order.index(after.verdict) >= order.index(before.verdict)


# ---- travelling and words


def test_constraints_and_judgements_travel_to_workers() -> None:
    found = judge(parsed("latency <= 5ms"), MetricValue(4.0, 3.0, 6.0, "ms", samples=9), None)

    assert pickle.loads(pickle.dumps(found)) == found


def test_a_judgement_in_json_holds_what_a_report_needs() -> None:
    (found,) = judge_all([parsed("accuracy >= baseline - 1.0pt")], {"accuracy": drop(-0.004, -0.009, 0.001)}, {"accuracy": BASELINE})

    data = json.loads(dump_json(found.to_json()))

    assert data["expr"] == "accuracy >= baseline - 1.0pt"
    assert data["verdict"] == "certain"
    assert data["amount"] == pytest.approx(0.006)
    assert data["value"]["low"] == pytest.approx(-0.009)
    assert (data["unit"], data["relative"], data["needed"]) == ("share", "delta", "")


def test_a_judgement_is_said_in_the_units_of_its_constraint() -> None:
    def said(text: str, value: MetricValue, baseline: MetricValue | None) -> str:
        return describe(judge(parsed(text), value, baseline))

    paired = drop(-0.004, -0.015, 0.001)
    assert said("accuracy >= baseline - 1.0pt", paired, BASELINE) == "accuracy -0.4 pt of -1.0 pt allowed (met; interval -1.5 to +0.1 pt)"
    half = MetricValue(4.0, 3.9, 4.1, "ms", ratio=Interval(0.4, 0.39, 0.41))
    assert said("latency <= 0.5x", half, MetricValue(10.0, 10.0, 10.0, "ms")) == "latency 0.400x of 0.500x allowed (certain)"
    assert said("latency <= 5ms", half, None) == "latency 4.00 ms of 5.00 ms allowed (certain)"
    assert said("accuracy >= 0.95", share(0.96, 0.955, 0.97), None) == "accuracy 0.9600 of 0.9500 asked (certain)"


def test_a_relaxed_constraint_is_the_next_round_one_that_the_model_meets() -> None:
    cases: list[tuple[str, MetricValue, MetricValue | None, str]] = [
        ("accuracy >= baseline - 1.0pt", drop(-0.0213, -0.03, -0.012), BASELINE, "accuracy >= baseline - 2.2pt"),
        ("latency <= 5ms", MetricValue(7.123, 7.0, 7.2, "ms"), None, "latency <= 7.13ms"),
        ("accuracy >= 0.95", share(0.9377, 0.93, 0.94), None, "accuracy >= 0.937"),
        ("size <= 0.1x", MetricValue(25.5, 25.5, 25.5, "bytes"), MetricValue(100.0, 100.0, 100.0, "bytes"), "size <= 0.26x"),
    ]
    for text, value, baseline, expected in cases:
        easier = relaxed(judge(parsed(text), value, baseline))
        assert easier == expected
        assert judge(parsed(easier), value, baseline).verdict in (Verdict.MET, Verdict.CERTAIN)


@given(st.floats(-0.9, 0.9))
@example(-1.3e-10)
def test_every_drop_meets_its_own_relaxed_constraint(value: float) -> None:
    found: Judgement = judge(parsed("accuracy >= baseline - 1.0pt"), drop(value, value, value), BASELINE)

    assert feasible([judge(parsed(relaxed(found)), drop(value, value, value), BASELINE)])


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (3.6123, "ms", "3.61 ms"), (0.05, "ms", "50.0 µs"), (2500.0, "ms", "2.50 s"), (1234.0, "bytes", "1.23 kB"), (97.2e6, "bytes", "97.2 MB"),
        (212.3, "/s", "212/s"), (0.98, "share", "0.9800"), (0.0123456, "", "0.01235"), (3.2e-7, "", "3.200e-07"), (math.nan, "ms", "not known"),
    ],
)  # fmt: skip
def test_values_are_written_with_three_digits_and_a_fitting_unit(number: float, unit: str, text: str) -> None:
    assert shown(number, unit) == text


def test_differences_carry_their_sign_and_shares_are_in_points() -> None:
    assert shown_difference(-0.004, "share") == "-0.4 pt"
    assert shown_difference(0.00167, "share") == "+0.17 pt"
    assert shown_difference(0.0, "share") == "0.0 pt"
    assert shown_difference(-1e-9, "share") == "0.0 pt"
    assert shown_difference(0.3, "ms") == "+300 µs"


def test_rounding_up_to_the_next_power_of_ten_keeps_the_digits() -> None:
    assert digits(9.996) == "10.0"
    assert digits(999.96) == "1,000"
    assert digits(0.0) == "0"
