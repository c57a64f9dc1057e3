from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from autotune.benchmarks import statistics


@pytest.mark.parametrize(("quantile", "runs"), [(0.5, 11), (0.9, 64), (0.95, 130), (0.99, 662)])
def test_the_second_largest_run_is_past_the_percentile_with_99_percent_confidence_and_not_one_run_earlier(quantile: float, runs: int) -> None:
    assert statistics.runs_needed(quantile) == runs
    assert stats.binom.cdf(1, runs, 1 - quantile) <= 0.01 < stats.binom.cdf(1, runs - 1, 1 - quantile)


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.95, 0.99])
def test_a_percentile_is_refused_when_one_run_is_missing(quantile: float) -> None:
    needed = statistics.runs_needed(quantile)
    samples = np.arange(needed, dtype=float)

    assert statistics.quantile_interval(samples, quantile) is not None
    assert statistics.quantile_interval(samples[:-1], quantile) is None


@pytest.mark.parametrize(("count", "quantile"), [(11, 0.5), (40, 0.5), (64, 0.9), (150, 0.95), (662, 0.99)])
def test_limits_of_a_quantile_are_the_tightest_order_statistics_with_half_the_error_on_each_side(count: int, quantile: float) -> None:
    interval = statistics.quantile_interval(np.arange(1.0, count + 1), quantile)

    assert interval is not None
    low, high = int(interval.low), int(interval.high)  # ranks from 1, since the samples are their own ranks
    assert stats.binom.cdf(low - 1, count, quantile) <= 0.025 < stats.binom.cdf(low, count, quantile)
    assert stats.binom.sf(high - 1, count, quantile) <= 0.025 < stats.binom.sf(high - 2, count, quantile)


def test_the_median_interval_of_ten_values_runs_from_the_second_to_the_ninth() -> None:
    interval = statistics.median_interval([5, 3, 1, 2, 4, 10, 9, 8, 7, 6])

    assert (interval.low, interval.value, interval.high) == (2, 5.5, 9)


def test_with_few_values_the_median_has_student_limits() -> None:
    interval = statistics.median_interval([1.0, 2.0, 3.0])

    half = stats.t.ppf(0.975, 2) / math.sqrt(3)
    assert (interval.low, interval.high) == (pytest.approx(2 - half), pytest.approx(2 + half))


def test_one_value_has_no_interval() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        statistics.median_interval([1.0])
    with pytest.raises(ValueError, match="at least 2"):
        statistics.mean_interval([1.0])


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 10, 29, 30, 31, 60, 1000])
def test_student_quantiles_are_those_of_scipy(degrees: int) -> None:
    for share in (0.75, 0.95, 0.975, 0.995):
        assert statistics.student_t_quantile(share, degrees) == pytest.approx(stats.t.ppf(share, degrees), rel=1e-6)


def test_binomial_probabilities_are_those_of_scipy() -> None:
    assert statistics.binomial_cdf(300, 0.93) == pytest.approx(stats.binom.cdf(np.arange(301), 300, 0.93), abs=1e-12)


def test_wilson_interval_is_the_published_example() -> None:
    interval = statistics.wilson_interval(81, 263)  # R. G. Newcombe, Statistics in Medicine 17 (1998) 857-872, table I

    assert (round(interval.low, 4), round(interval.high, 4)) == (0.2553, 0.3662)


def test_wilson_interval_of_all_right_does_not_claim_certainty() -> None:
    interval = statistics.wilson_interval(100, 100)

    assert interval.high == 1.0
    assert interval.low == pytest.approx(100 / (100 + 1.959964**2), abs=1e-6)


def test_agreement_on_every_example_still_leaves_a_difference_that_the_count_allows() -> None:
    z2 = statistics.normal_quantile(0.975) ** 2

    interval = statistics.paired_proportion_interval(0, 0, 100)

    assert interval.value == 0
    assert interval.high == pytest.approx(z2 / (100 + z2))
    assert interval.low == pytest.approx(-interval.high)


@pytest.mark.parametrize(("gained", "lost", "count"), [(12, 2, 50), (0, 1, 44), (9, 31, 1500), (14, 0, 14), (3, 3, 20)])
def test_paired_proportion_limits_are_where_the_score_test_is_at_its_bound(gained: int, lost: int, count: int) -> None:
    def z_of(delta: float) -> float:
        # A second implementation: the constrained maximum of the likelihood, found on a fine grid.
        least, most = max(0.0, -delta), (1 - delta) / 2
        lost_share = np.linspace(least, most, 400_001)[1:-1]
        with np.errstate(divide="ignore", invalid="ignore"):
            likelihood = (
                (gained * np.log(lost_share + delta) if gained else 0)
                + (lost * np.log(lost_share) if lost else 0)
                + ((count - gained - lost) * np.log(1 - 2 * lost_share - delta) if count > gained + lost else 0)
            )
        best = lost_share[int(np.nanargmax(likelihood))]
        return float((gained - lost - count * delta) / math.sqrt(count * (2 * best + delta - delta * delta)))

    interval = statistics.paired_proportion_interval(gained, lost, count)

    assert interval.value == (gained - lost) / count
    for limit, bound in ((interval.low, 1.96), (interval.high, -1.96)):
        if abs(limit) < 1 - 1e-9:
            assert z_of(limit) == pytest.approx(bound, abs=0.01)


def test_paired_mean_interval_is_the_paired_t_test() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(1.0, 1.0, 25), rng.normal(0.8, 1.0, 25)

    interval = statistics.paired_mean_interval(x, y)

    expected = stats.ttest_rel(x, y).confidence_interval(0.95)
    assert (interval.low, interval.high) == (pytest.approx(expected.low), pytest.approx(expected.high))


def test_fieller_limits_are_the_ratios_that_a_paired_t_test_does_not_reject() -> None:
    rng = np.random.default_rng(1)
    y = rng.uniform(1, 2, 30)
    x = 0.7 * y + rng.normal(0, 0.1, 30)

    interval = statistics.ratio_of_means_interval(x, y)

    assert interval is not None
    assert interval.value == pytest.approx(x.mean() / y.mean())
    for limit in (interval.low, interval.high):
        assert stats.ttest_1samp(x - limit * y, 0.0).pvalue == pytest.approx(0.05, abs=1e-6)


def test_a_ratio_to_a_mean_that_may_be_zero_is_not_given() -> None:
    assert statistics.ratio_of_means_interval([1.0, 2.0, 3.0], [-1.0, 0.0, 1.1]) is None


def test_a_ratio_of_latencies_is_the_median_of_the_paired_ratios() -> None:
    baseline = np.array([10.0, 20.0, 40.0, 10.0, 20.0, 40.0, 30.0])

    interval = statistics.ratio_interval(baseline * 0.5, baseline)

    assert (interval.low, interval.value, interval.high) == (pytest.approx(0.5), pytest.approx(0.5), pytest.approx(0.5))


def test_the_same_seed_draws_the_same_resamples_and_another_does_not() -> None:
    values = np.random.default_rng(0).normal(size=50)

    def mean_of(seed: int) -> np.ndarray:
        return statistics.bootstrap_replicates(lambda rows: (float(values[rows].mean()),), 50, seed=seed, resamples=100)

    assert np.array_equal(mean_of(3), mean_of(3))
    assert not np.array_equal(mean_of(3), mean_of(4))


def test_a_slow_statistic_gets_the_least_number_of_resamples_and_no_more() -> None:
    seconds = itertools.count(step=10)

    replicates = statistics.bootstrap_replicates(
        lambda rows: (float(rows[0]),), 9, seed=0, least=25, max_time_s=3, clock=lambda: float(next(seconds))
    )

    assert len(replicates) == 25


def test_resamples_without_a_number_are_left_out() -> None:
    replicates = statistics.bootstrap_replicates(lambda rows: (float(rows[0]) if rows[0] else math.nan,), 4, seed=0, resamples=400)

    assert 200 < len(replicates) < 400
    assert np.isfinite(replicates).all()


def test_too_few_replicates_give_no_interval() -> None:
    with pytest.raises(ValueError, match="at least 20"):
        statistics.bootstrap_interval(0.0, np.zeros(19))


def test_a_bootstrap_of_the_mean_agrees_with_the_t_interval() -> None:
    values = np.random.default_rng(5).normal(3.0, 1.0, 200)
    expected = statistics.mean_interval(values)

    many = statistics.bootstrap_replicates(lambda rows: (float(values[rows].mean()),), 200, seed=0)[:, 0]

    for replicates in (many, many[:60]):
        interval = statistics.bootstrap_interval(float(values.mean()), replicates)
        assert interval.low == pytest.approx(expected.low, abs=0.05)
        assert interval.high == pytest.approx(expected.high, abs=0.05)
