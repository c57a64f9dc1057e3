"""Intervals: what the samples allow to say of a quantile, a ratio, a proportion, a mean or any other number. Limits are 95 % limits.

Sources: order statistics for quantiles, H. A. David, "Order Statistics", section 7.1; E. B. Wilson, JASA 22 (1927) 209-212;
T. Tango, Statistics in Medicine 17 (1998) 891-908, for paired proportions; E. C. Fieller, J. R. Stat. Soc. B 16 (1954) 175-185, for
ratios of means; K. K. G. Lan and D. L. DeMets, Biometrika 70 (1983) 659-663, for errors spent over looks; B. Efron and
R. J. Tibshirani, "An Introduction to the Bootstrap", chapter 13; Student's t by M. Abramowitz and
I. A. Stegun, "Handbook of Mathematical Functions", 26.7.3, 26.7.4 and 26.7.5; totals of a finite set by the hypergeometric law as
T. Wright, "Exact Confidence Bounds when Sampling from Small Finite Universes" (1991); means of a finite set by R. Bardenet and
O.-A. Maillard, Bernoulli 21 (2015) 1361-1385.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autotune.records import Interval

CONFIDENCE = 0.95
LEAST_FOR_ORDER_INTERVAL = 6  # 1 - 2 / 2**6 = .969: from 6 values on, the extremes are limits of the median
LEAST_FOR_A_LOOK = 8  # pairs: with fewer, whoever may stop on what he sees stops on luck too often
LOOK_GROWTH = 1.4
STOPPING_CONFIDENCE = 0.97
FEW_REPLICATES = 200  # below, the spread of the replicates is used and not their 2.5 % tails


@cache
def normal_quantile(share: float) -> float:
    """Quantile of the standard normal distribution."""
    return NormalDist().inv_cdf(share)


@cache
def student_t_quantile(share: float, degrees: int) -> float:
    """Quantile (`share` in (0.5, 1)) of Student's t with whole degrees of freedom from 1.

    Up to 30 degrees by bisection of the exact finite series, above by four terms of the normal expansion (error below 1e-6).
    """
    z = normal_quantile(share)
    if degrees > 30:
        z3, z5, z7, z9 = z**3, z**5, z**7, z**9
        return (
            z
            + (z3 + z) / (4 * degrees)
            + (5 * z5 + 16 * z3 + 3 * z) / (96 * degrees**2)
            + (3 * z7 + 19 * z5 + 17 * z3 - 15 * z) / (384 * degrees**3)
            + (79 * z9 + 776 * z7 + 1482 * z5 - 1920 * z3 - 945 * z) / (92160 * degrees**4)
        )
    low, high = 0.0, 1.0
    while _student_t_central(high, degrees) < 2 * share - 1:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if _student_t_central(middle, degrees) < 2 * share - 1:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _student_t_central(t: float, degrees: int) -> float:
    """Probability that a t variable lies within ±t."""
    angle = math.atan2(t, math.sqrt(degrees))
    cosine_squared = math.cos(angle) ** 2
    term = total = 1.0
    if degrees % 2 == 0:
        for k in range(1, degrees // 2):
            term *= (2 * k - 1) / (2 * k) * cosine_squared
            total += term
        return math.sin(angle) * total
    if degrees == 1:
        return 2 * angle / math.pi
    for k in range(1, (degrees - 1) // 2):
        term *= (2 * k) / (2 * k + 1) * cosine_squared
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)


def binomial_cdf(trials: int, share: float) -> NDArray[np.float64]:
    """Probabilities of at most 0, 1, ... `trials` successes, shape (trials + 1,); `share` in (0, 1)."""
    k = np.arange(trials + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1)))])
    log_pmf: NDArray[np.float64] = log_factorial[-1] - log_factorial - log_factorial[::-1] + k * math.log(share) + (trials - k) * math.log1p(-share)
    at_most: NDArray[np.float64] = np.minimum(np.cumsum(np.exp(log_pmf)), 1.0)
    return at_most


@cache
def runs_needed(quantile: float, *, confidence: float = 0.99, beyond: int = 2) -> int:
    """Count the runs after which `beyond` of them lie past the quantile, in the farther tail, with the given confidence.

    With two beyond, the largest run can be an accident and the second largest still is an upper limit of the quantile: 11 runs for
    p50, 64 for p90, 130 for p95, 662 for p99 (the counts that MLPerf's load generator asks for, found here from the binomial law).
    """
    share = max(quantile, 1 - quantile)
    count = beyond
    while True:
        fewer = sum(math.comb(count, k) * (1 - share) ** k * share ** (count - k) for k in range(beyond))
        if fewer <= 1 - confidence:
            return count
        count += 1


def quantile_of(samples: ArrayLike, quantile: float) -> float:
    """Sample quantile; the usual median at 0.5."""
    return float(np.quantile(np.asarray(samples, np.float64), quantile, method="hazen"))


def quantile_interval(samples: ArrayLike, quantile: float) -> Interval | None:
    """Order-statistic interval of a quantile of independent samples, exact for any distribution.

    None when there are fewer than `runs_needed(quantile)`: no honest number can be given.
    """
    ordered = np.sort(np.asarray(samples, np.float64))
    if len(ordered) < runs_needed(quantile):
        return None
    ranks = _ranks(len(ordered), quantile)
    if ranks is None:
        return None
    low, high = float(ordered[ranks[0]]), float(ordered[ranks[1]])
    return Interval(min(max(quantile_of(ordered, quantile), low), high), low, high)


def _ranks(count: int, quantile: float, confidence: float = CONFIDENCE) -> tuple[int, int] | None:
    """Indices, from 0, of the two order statistics that hold the quantile between them with that confidence, half the error each side."""
    tail = (1 - confidence) / 2
    at_most = binomial_cdf(count, quantile)
    below = np.flatnonzero(at_most[:count] <= tail)  # P(fewer than i + 1 samples under the quantile), i from 0
    above = np.flatnonzero(1 - at_most[:count] <= tail)
    if not len(below) or not len(above):
        return None
    return int(below[-1]), int(above[0])


def median_interval(values: ArrayLike) -> Interval:
    """Median of independent values with the limits of the sign test; from 2 to 5 values, Student's t limits widened to hold the median.

    The sign test's limits need no normal law, and one disturbed value in seven does not move them far. Raises `ValueError` below 2.
    """
    ordered = np.sort(np.asarray(values, np.float64))
    median = float(np.median(ordered))
    if len(ordered) < 2:
        raise ValueError("an interval needs at least 2 values")
    if len(ordered) < LEAST_FOR_ORDER_INTERVAL:
        by_t = mean_interval(ordered)
        return Interval(median, min(by_t.low, median), max(by_t.high, median))
    ranks = _ranks(len(ordered), 0.5)
    assert ranks is not None
    return Interval(median, float(ordered[ranks[0]]), float(ordered[ranks[1]]))


def narrow_enough(logs: ArrayLike, width: float) -> bool:
    """Say whether a ratio is known well enough to stop at this look: its interval, of logs from 8 on, is `width` of the ratio or less.

    97 % limits are looked at, not the 95 % ones that are stated then: whoever stops as soon as an interval is narrow stops when it
    happens to be too narrow. So the stated ones hold the truth in 95 % of the measurements (.948 to .986 in simulations of normal, heavy-tailed and
    disturbed sessions with 8,000 repeats each; .924 to .967 with a look after each pair at the 95 % limits).
    """
    ordered = np.sort(np.asarray(logs, np.float64))
    ranks = _ranks(len(ordered), 0.5, STOPPING_CONFIDENCE)
    if ranks is None:
        return False
    median = float(np.median(ordered))
    return math.exp(ordered[ranks[1]] - median) - math.exp(ordered[ranks[0]] - median) <= width


class Looks:
    """When to look at a growing number of values: first at `first`, then each time there are 1.4 times as many. `made` counts them.

    Whoever looks after each value and stops at the first pleasing interval has one that holds the truth too seldom: see `narrow_enough`.
    A verdict that ends a measurement spends its error over the looks by `error_at_look`.
    """

    def __init__(self, first: int) -> None:
        self.next, self.made = first, 0

    def due(self, count: int) -> bool:
        """Say whether to look now, with `count` values, and if so plan the next look."""
        if count < self.next:
            return False
        self.made, self.next = self.made + 1, math.ceil(count * LOOK_GROWTH)
        return True


def error_at_look(look: int, total: float) -> float:
    """Error that the look number `look`, from 1, may spend: `total` / (look * (look + 1)), `total` over all looks however many come.

    A spending function in the sense of Lan and DeMets for looks without end; by the union bound it needs no law of the values.
    """
    return total / (look * (look + 1))


def median_above(values: ArrayLike, limit: float, *, error: float) -> bool:
    """Say whether the median of independent values lies above a limit, by the one-sided sign test; wrongly with at most `error`."""
    array = np.asarray(values, np.float64)
    at_most = int((array <= limit).sum())
    return len(array) > 0 and float(binomial_cdf(len(array), 0.5)[at_most]) <= error


def widening(units: int, error: float) -> float:
    """Factor from the 95 % limits of a median of so many values to limits that are wrong, both together, with at most `error`.

    The ratio of Student's t quantiles, since the sign test's own limits move too little; the degrees of freedom are those for which simulated
    medians, of values with heavier tails than the normal law's too, keep the promise. A count that is not told (0) is taken as large.
    """
    if units > 1:
        degrees = min(units - 1, max(9, units // 2))
        return student_t_quantile(1 - error / 2, degrees) / student_t_quantile((1 + CONFIDENCE) / 2, degrees)
    return normal_quantile(1 - error / 2) / normal_quantile((1 + CONFIDENCE) / 2)


def median_far_above(values: ArrayLike, limit: float, *, error: float) -> bool:
    """Say whether the median of independent values lies above a limit by more than its widened interval, wrongly with at most `error`.

    For errors so small that the sign test (`median_above`) would need dozens of values however far away the limit is. It takes the values as
    about normal; see `widening`. Raises `ValueError` below 2 values.
    """
    found = median_interval(values)
    half = widening(int(np.size(values)), error) * max(found.value - found.low, found.high - found.value)
    return found.value - half > limit


def ratio_interval(candidate: ArrayLike, baseline: ArrayLike) -> Interval:
    """Median of the paired ratios `candidate[i] / baseline[i]` (positive numbers, one pair a session), limits by `median_interval` on logs."""
    logs = np.log(np.asarray(candidate, np.float64)) - np.log(np.asarray(baseline, np.float64))
    found = median_interval(logs)
    return Interval(math.exp(found.value), math.exp(found.low), math.exp(found.high))


def wilson_interval(successes: float, count: int) -> Interval:
    """Wilson's score interval of a proportion; sensible at 0 and at 1 too."""
    z = normal_quantile((1 + CONFIDENCE) / 2)
    share = successes / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return Interval(share, max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half)))


def paired_proportion_interval(gained: int, lost: int, count: int) -> Interval:
    """Difference of two proportions on the same examples, limits by Tango's score interval.

    `gained`: examples that the candidate alone has right; `lost`: those the baseline alone has right; `count`: all. With neither,
    the difference is 0 and the limits are ±z²/(count + z²): agreement on 100 examples does not prove agreement on all.
    """
    z = normal_quantile((1 + CONFIDENCE) / 2)
    estimate = (gained - lost) / count

    def score(delta: float) -> float:
        linear = -gained - lost + (2 * count - gained + lost) * delta
        constant = -lost * delta * (1 - delta)
        lost_share = (math.sqrt(max(linear * linear - 8 * count * constant, 0.0)) - linear) / (4 * count)
        variance = count * (2 * lost_share + delta * (1 - delta))
        distance = gained - lost - count * delta
        if variance <= 0:
            return 0.0 if abs(distance) < 1e-12 else math.copysign(math.inf, distance)
        return distance / math.sqrt(variance)

    def limit(inner: float, outer: float, bound: float) -> float:
        for _ in range(100):
            middle = (inner + outer) / 2
            if abs(score(middle)) <= bound:
                inner = middle
            else:
                outer = middle
        return (inner + outer) / 2

    return Interval(estimate, min(limit(estimate, -1.0, z), estimate), max(limit(estimate, 1.0, z), estimate))


def mean_interval(values: ArrayLike) -> Interval:
    """Mean of independent values with Student's t limits. Raises `ValueError` below 2 values."""
    array = np.asarray(values, np.float64)
    if len(array) < 2:
        raise ValueError("an interval needs at least 2 values")
    mean = float(array.mean())
    half = student_t_quantile((1 + CONFIDENCE) / 2, len(array) - 1) * float(array.std(ddof=1)) / math.sqrt(len(array))
    return Interval(mean, mean - half, mean + half)


def paired_mean_interval(candidate: ArrayLike, baseline: ArrayLike) -> Interval:
    """Mean of the differences `candidate[i] - baseline[i]` with Student's t limits."""
    return mean_interval(np.asarray(candidate, np.float64) - np.asarray(baseline, np.float64))


def ratio_of_means_interval(candidate: ArrayLike, baseline: ArrayLike) -> Interval | None:
    """Ratio of the means of paired values, limits by Fieller's theorem; None when the baseline's mean is not clearly off 0."""
    x, y = np.asarray(candidate, np.float64), np.asarray(baseline, np.float64)
    count = len(x)
    mean_x, mean_y = float(x.mean()), float(y.mean())
    t = student_t_quantile((1 + CONFIDENCE) / 2, count - 1)
    covariance = np.cov(x, y, ddof=1) * t * t / count
    a = mean_y**2 - float(covariance[1, 1])
    b = mean_x * mean_y - float(covariance[0, 1])
    c = mean_x**2 - float(covariance[0, 0])
    if a <= 0 or mean_y == 0:
        return None
    root = math.sqrt(max(b * b - a * c, 0.0))
    ratio = mean_x / mean_y
    return Interval(ratio, min((b - root) / a, ratio), max((b + root) / a, ratio))


def bootstrap_replicates(
    statistic: Callable[[NDArray[np.int64]], Sequence[float]],
    examples: int,
    *,
    seed: int,
    resamples: int = 1000,
    least: int = 40,
    max_time_s: float = 15.0,
    clock: Callable[[], float] = time.perf_counter,
) -> NDArray[np.float64]:
    """Evaluate `statistic` on resamples of the examples (indices drawn with replacement); shape (replicates, numbers it returns).

    The resamples are the same for the same seed. A slow statistic gets fewer, but at least `least`. Replicates with a number that is
    not finite (one class only in a resample, say) are left out.
    """
    rng = np.random.default_rng(seed)
    began, kept = clock(), []
    for done in range(resamples):
        if done >= least and clock() - began > max_time_s:
            break
        numbers = np.asarray(statistic(rng.integers(0, examples, examples)), np.float64)
        if np.isfinite(numbers).all():
            kept.append(numbers)
    return np.stack(kept) if kept else np.empty((0, 0))


def bootstrap_interval(estimate: float, replicates: NDArray[np.float64]) -> Interval:
    """Percentile interval from replicates of shape (replicates,); with fewer than 200, the estimate ± t standard deviations.

    Raises `ValueError` below 20 replicates.
    """
    if len(replicates) < 20:
        raise ValueError("a bootstrap interval needs at least 20 replicates")
    if len(replicates) < FEW_REPLICATES:
        half = student_t_quantile((1 + CONFIDENCE) / 2, len(replicates) - 1) * float(replicates.std(ddof=1))
        return Interval(estimate, estimate - half, estimate + half)
    low, high = np.quantile(replicates, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(estimate, min(float(low), estimate), max(float(high), estimate))


# Finite sets: some rows are seen, drawn without replacement; limits are for all rows -----------------------------------------


@cache
def _log_factorials(largest: int) -> NDArray[np.float64]:
    """Logarithms of 0!, 1!, ... `largest`!."""
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, largest + 1, dtype=np.float64)))])


def _hypergeometric_at_most(count: int, drawn: int, marked: int, population: int) -> float:
    """Probability that at most `count` of `drawn` rows are marked, when `marked` of `population` are."""
    least, most = max(0, drawn - (population - marked)), min(drawn, marked)
    if count < least:
        return 0.0
    if count >= most:
        return 1.0
    log = _log_factorials(population)
    k = np.arange(least, count + 1)
    ways = log[marked] - log[k] - log[marked - k] + log[population - marked] - log[drawn - k] - log[population - marked - drawn + k]
    return float(min(1.0, np.exp(ways - (log[population] - log[drawn] - log[population - drawn])).sum()))


def hypergeometric_limits(count: int, drawn: int, population: int, error: float) -> tuple[int, int]:
    """Limits of how many of `population` rows are marked, after `count` of `drawn` were, drawn without replacement.

    Exact: each limit is wrong with a probability of at most `error`, whatever the truth; they meet when every row is drawn. The upper one is
    the largest total under which so few marked rows (`count`) are not rarer than `error`, the lower one its mirror image.
    """
    if drawn == 0:
        return 0, population

    def highest(seen: int) -> int:
        inside, outside = seen, population - drawn + seen + 1  # the most that is possible is one less than `outside`
        while outside - inside > 1:
            middle = (inside + outside) // 2
            if _hypergeometric_at_most(seen, drawn, middle, population) > error:
                inside = middle
            else:
                outside = middle
        return inside

    return population - highest(drawn - count), highest(count)


def finite_mean_limits(values: ArrayLike, population: int, span: float, error: float) -> tuple[float, float]:
    """Limits of the mean over `population` rows, from the values of some drawn without replacement.

    The empirical Bernstein-Serfling inequality of Bardenet and Maillard (theorem 4.3): all rows must lie within a range of width `span`;
    each limit is wrong with a probability of at most `error`. Not exact when all rows are seen: the caller knows the mean then.
    """
    seen = np.asarray(values, np.float64)
    n = len(seen)
    if n == 0:
        return -math.inf, math.inf
    left = 1 - (n - 1) / population if n <= population / 2 else (1 - n / population) * (1 + 1 / n)
    log = math.log(5 / error)  # the inequality holds but for five times the probability in its logarithm
    half = float(seen.std()) * math.sqrt(2 * left * log / n) + (7 / 3 + 3 / math.sqrt(2)) * span * log / n
    mean = float(seen.mean())
    return mean - half, mean + half
