"""Laws of intervals: the truth lies in them about as often as they say, the estimate always, and more samples never hurt."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from autotune.benchmarks import statistics
from autotune.benchmarks.latency import LatencyProtocol, measure_paired
from autotune.records import Interval

COUNTS = st.integers(1, 400)
VALUES = st.lists(st.integers(-5, 5), min_size=2, max_size=60)  # small whole numbers, so that ties are common


def coverage(hits: list[bool]) -> float:
    return sum(hits) / len(hits)


def holds(interval: Interval | None, truth: float) -> bool:
    return interval is not None and interval.low <= truth <= interval.high


@pytest.mark.parametrize(("quantile", "count"), [(0.5, 15), (0.9, 64), (0.95, 200), (0.99, 700)])
def test_quantile_intervals_hold_the_truth_at_least_as_often_as_they_say(quantile: float, count: int) -> None:
    rng = np.random.default_rng(11)
    truth = -math.log(1 - quantile)  # of the exponential distribution

    hits = [holds(statistics.quantile_interval(rng.exponential(size=count), quantile), truth) for _ in range(600)]

    assert coverage(hits) >= 0.93  # 0.95 less two standard errors


@pytest.mark.parametrize("count", [3, 5, 6, 7, 12, 30])
def test_ratio_intervals_over_session_pairs_hold_the_true_ratio(count: int) -> None:
    rng = np.random.default_rng(12)
    hits = []
    for _ in range(500):
        drift = rng.lognormal(0, 0.5, count)
        ratios = 0.6 * np.exp(rng.normal(0, 0.02, count))
        hits.append(holds(statistics.ratio_interval(drift * ratios, drift), 0.6))

    assert coverage(hits) >= 0.93


def test_a_ratio_interval_survives_rounds_that_something_disturbed() -> None:
    rng = np.random.default_rng(13)
    hits, widths = [], []
    for _ in range(300):
        ratios = 0.6 * np.exp(rng.normal(0, 0.01, 20))
        ratios[rng.random(20) < 0.1] *= 3.0
        interval = statistics.ratio_interval(ratios, np.ones(20))
        hits.append(holds(interval, 0.6))
        widths.append(interval.high - interval.low)

    assert coverage(hits) >= 0.90
    assert np.median(widths) < 0.02


@pytest.mark.parametrize(("share", "count"), [(0.5, 20), (0.9, 100), (0.98, 200)])
def test_wilson_intervals_hold_the_true_share(share: float, count: int) -> None:
    rng = np.random.default_rng(14)

    hits = [holds(statistics.wilson_interval(int(rng.binomial(count, share)), count), share) for _ in range(1500)]

    assert 0.925 <= coverage(hits) <= 0.99


@pytest.mark.parametrize(("gained", "lost", "count"), [(0.02, 0.03, 100), (0.005, 0.01, 500), (0.1, 0.1, 50)])
def test_paired_proportion_intervals_hold_the_true_difference(gained: float, lost: float, count: int) -> None:
    rng = np.random.default_rng(15)
    hits = []
    for _ in range(800):
        up, down, _ = rng.multinomial(count, [gained, lost, 1 - gained - lost])
        hits.append(holds(statistics.paired_proportion_interval(int(up), int(down), count), gained - lost))

    assert coverage(hits) >= 0.925


def test_mean_and_fieller_intervals_hold_the_truth() -> None:
    rng = np.random.default_rng(16)
    means, ratios = [], []
    for _ in range(800):
        y = rng.normal(2.0, 0.5, 12)
        x = 0.8 * y + rng.normal(0, 0.2, 12)
        means.append(holds(statistics.paired_mean_interval(x, y), -0.4))
        ratios.append(holds(statistics.ratio_of_means_interval(x, y), 0.8))

    assert 0.93 <= coverage(means) <= 0.97
    assert 0.93 <= coverage(ratios) <= 0.97


def test_bootstrap_intervals_hold_the_truth() -> None:
    rng = np.random.default_rng(17)
    hits = []
    for seed in range(400):
        values = rng.normal(1.0, 1.0, 80)
        replicates = statistics.bootstrap_replicates(lambda rows, v=values: (float(v[rows].mean()),), 80, seed=seed, resamples=200)
        hits.append(holds(statistics.bootstrap_interval(float(values.mean()), replicates[:, 0]), 1.0))

    # Percentile limits of 80 examples hold it .937 of the time (2,000 repeats); less 2.6 standard errors of 400 repeats.
    assert coverage(hits) >= 0.905


@given(VALUES)
def test_the_estimate_lies_between_its_limits(values: list[int]) -> None:
    samples = np.array(values, float)
    positive = np.exp(samples)

    for interval in (
        statistics.median_interval(samples), statistics.mean_interval(samples), statistics.quantile_interval(samples, 0.5),
        statistics.ratio_interval(positive, positive[::-1]), statistics.ratio_of_means_interval(positive, positive[::-1]),
    ):  # fmt: skip
        assert interval is None or interval.low <= interval.value <= interval.high


@given(COUNTS, st.data())
def test_limits_of_proportions_hold_the_estimate_and_stay_in_range(count: int, data: st.DataObject) -> None:
    gained = data.draw(st.integers(0, count))
    lost = data.draw(st.integers(0, count - gained))

    share = statistics.wilson_interval(gained, count)
    difference = statistics.paired_proportion_interval(gained, lost, count)

    assert 0 <= share.low <= share.value <= share.high <= 1
    assert -1 <= difference.low <= difference.value <= difference.high <= 1


@given(COUNTS, st.data())
def test_swapping_candidate_and_baseline_mirrors_the_difference(count: int, data: st.DataObject) -> None:
    gained = data.draw(st.integers(0, count))
    lost = data.draw(st.integers(0, count - gained))

    one, other = statistics.paired_proportion_interval(gained, lost, count), statistics.paired_proportion_interval(lost, gained, count)

    assert (one.low, one.high) == (pytest.approx(-other.high, abs=1e-9), pytest.approx(-other.low, abs=1e-9))


@given(st.integers(2, 50), st.integers(0, 10), st.integers(0, 10))
@settings(max_examples=50)
def test_intervals_of_the_same_shares_narrow_as_examples_grow(tens: int, gained: int, lost: int) -> None:
    def widths(times: int) -> tuple[float, float]:
        count = 10 * tens * times
        share = statistics.wilson_interval(gained * times, count)
        difference = statistics.paired_proportion_interval(gained * times, lost * times, count)
        return share.high - share.low, difference.high - difference.low

    assert all(more < fewer for fewer, more in zip(widths(1), widths(4), strict=True))


@given(st.floats(0.5, 0.995))
def test_a_farther_percentile_never_needs_fewer_runs(quantile: float) -> None:
    assert statistics.runs_needed(quantile) <= statistics.runs_needed(min(quantile + 0.004, 0.999))


# Measurements that end by what they see ------------------------------------------------------------------------------------

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]
SESSIONS: dict[str, Draw] = {
    "normal": lambda rng, count: rng.normal(size=count),
    "heavy-tailed": lambda rng, count: rng.standard_t(2, count),
    "disturbed": lambda rng, count: rng.normal(size=count) * np.where(rng.random(count) < 0.1, 10, 1),
}
MOST_PAIRS = 120


def stopped_at(logs: NDArray[np.float64], width: float) -> int:
    """After how many session pairs a measurement ends."""
    looks = statistics.Looks(statistics.LEAST_FOR_A_LOOK)
    return next((n for n in range(1, len(logs) + 1) if looks.due(n) and statistics.narrow_enough(logs[:n], width)), len(logs))


@pytest.mark.parametrize("law", SESSIONS)
@pytest.mark.parametrize("spread", [0.003, 0.01, 0.014])  # between sessions; the least ends at the first look, the most after some 80 pairs
def test_intervals_that_end_as_soon_as_they_are_narrow_hold_the_truth(law: str, spread: float) -> None:
    rng = np.random.default_rng(18)
    hits = []
    for _ in range(800):
        logs = spread * SESSIONS[law](rng, MOST_PAIRS)
        hits.append(holds(statistics.median_interval(logs[: stopped_at(logs, 0.01)]), 0.0))

    assert coverage(hits) >= 0.935  # 0.95 less two standard errors; looking after each pair gives .924 to .93 at the larger spreads


@pytest.mark.parametrize("law", SESSIONS)
@pytest.mark.parametrize("count", [2, 3, 5, 6, 7])
def test_intervals_of_the_few_pairs_of_a_slow_model_hold_the_truth(law: str, count: int) -> None:
    rng = np.random.default_rng(19)

    hits = [holds(statistics.median_interval(SESSIONS[law](rng, count)), 0.0) for _ in range(3000)]

    assert coverage(hits) >= 0.942  # 0.95 less two standard errors


@pytest.mark.parametrize("law", SESSIONS)
def test_a_limit_that_is_just_met_seldom_ends_a_measurement_however_often_it_is_looked_at(law: str) -> None:
    rng = np.random.default_rng(20)
    ended = 0
    for _ in range(800):
        logs, looks = SESSIONS[law](rng, 400), statistics.Looks(statistics.LEAST_FOR_A_LOOK)
        ended += any(
            looks.due(n) and statistics.median_above(logs[:n], 0.0, error=statistics.error_at_look(looks.made, 0.025)) for n in range(1, 401)
        )

    assert ended / 800 <= 0.036  # 0.025 and two standard errors


@pytest.mark.parametrize("law", SESSIONS)
@pytest.mark.parametrize("error", [0.02, 0.002])
def test_a_rival_that_is_just_equalled_seldom_ends_a_measurement_however_small_the_error(law: str, error: float) -> None:
    rng = np.random.default_rng(23)
    ended, repeats = 0, 1500
    for _ in range(repeats):
        logs, looks = SESSIONS[law](rng, 120), statistics.Looks(statistics.LEAST_FOR_A_LOOK)
        ended += any(
            looks.due(n) and statistics.median_far_above(logs[:n], 0.0, error=statistics.error_at_look(looks.made, error)) for n in range(1, 121)
        )

    assert ended / repeats <= error + 3 * np.sqrt(error / repeats)


def test_eight_pairs_tell_a_median_far_above_where_the_sign_test_would_need_twenty() -> None:
    logs = 0.2 + 0.01 * np.random.default_rng(24).normal(size=8)

    assert statistics.median_far_above(logs, 0.05, error=1e-6)
    assert not statistics.median_above(logs, 0.05, error=1e-6)
    assert not statistics.median_far_above(logs, 0.195, error=1e-6)


def test_errors_of_all_looks_add_up_to_the_whole() -> None:
    assert sum(statistics.error_at_look(look, 0.05) for look in range(1, 100_000)) == pytest.approx(0.05, rel=1e-4)


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=40), st.integers(-6, 6), st.sampled_from([0.05, 0.01, 0.001]))
def test_a_median_that_is_certainly_above_has_most_values_above_and_not_below_too(values: list[int], limit: int, error: float) -> None:
    samples = np.array(values, float)
    if statistics.median_above(samples, limit, error=error):
        assert np.median(samples) > limit
        assert not statistics.median_above(-samples, -limit, error=error)
        assert statistics.median_above(samples, limit - 1, error=error)


@pytest.mark.parametrize("law", SESSIONS)
def test_measured_pairs_hold_the_true_ratio_through_sessions_drift_and_noise(law: str) -> None:
    rng, hits = np.random.default_rng(21), []
    protocol = LatencyProtocol(
        fresh_sessions_every=1, block_time_ns=2_000_000, min_runs=0, min_rounds=0, warmup_runs=1, max_rounds=60, max_time_ns=10**15, ratio_width=0.03
    )
    for seed in range(120):
        clock = [0]

        def session(nominal: float, clock: list[int] = clock) -> Callable[[], None]:
            takes = (nominal * np.exp(0.01 * SESSIONS[law](rng, 1) + rng.normal(0, 0.02, 40))).tolist()

            def run_once() -> None:
                clock[0] += int(takes.pop() * (1 + 0.1 * math.sin(clock[0] / 7e8)))

            return run_once

        samples = measure_paired(
            partial(session, 600_000), partial(session, 1_000_000), protocol, seed=seed, clock_ns=lambda clock=clock: clock[0]
        )  # fmt: skip
        hits.append(holds(samples.ratio(), 0.6))

    assert coverage(hits) >= 0.91  # 0.95 less two standard errors
