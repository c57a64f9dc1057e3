"""Laws of intervals: the truth lies in them about as often as they say, the estimate always, and more samples never hurt."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.benchmarks import statistics
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
