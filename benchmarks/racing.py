"""Accuracy by looks: when a candidate's outcome over all rows is certain after some of them, the rest need not be run.

All candidates are scored on the same rows in the same random order. After 2, 5, 10, 20 and 40 % of them a look is taken: what may the
comparison with the baseline over *all* these rows still become? The baseline is known on all of them, so only the differences are open. A
candidate stops when every outcome that is still possible ends the same way: it violates a constraint, or a finished trial puts it off the
front. At 100 % nothing is open any more: the difference over these rows is exact, and what is left is the doubt whether other rows of
the same kind would agree. That is told by the intervals that every finished trial has (Tango's and Student's).

Error: all limits of one trial, over all its looks, hold together with a probability of at least 95 %, whatever the candidate: 5 % are split
evenly over the looks before the last and over the limits of a look (Bonferroni). So at most one candidate in twenty is stopped wrongly;
the limits being exact or conservative, far fewer are.

* Right and wrong answers: rows gained are among those that the baseline has wrong, rows lost among those that it has right; of both the seen
  ones are drawn without replacement, which gives exact hypergeometric limits of both totals (four limits a look).
* Scores within known bounds: the empirical Bernstein-Serfling limits of the mean difference (two limits a look), and never beyond what the
  bounds allow for the rows that are not seen.
* Other scores, and metrics over sets, have no sound limits from a part of the rows: they are run whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.benchmarks import statistics
from autotune.benchmarks.accuracy import proportions
from autotune.benchmarks.metrics import Metric
from autotune.constraints import Constraint, Relative, Verdict, judge, shown_difference
from autotune.records import Interval, MetricValue

LOOKS = (0.02, 0.05, 0.10, 0.20, 0.40)
ERROR = 0.05  # of one trial, over all looks and limits
LEAST_ROWS = 200  # below, looks are off unless asked for: the first ones would hold a handful of rows, and the whole costs little
ROWS_FOR_WORDS = 30  # a candidate whose fate is sealed already is still scored on so many, for the near misses
INFEASIBLE, DOMINATED, OFF_FRONT = "infeasible", "dominated", "off-front"
GRID = 33  # outcomes tried between the limits where the final interval is no simple function of them

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Rival:
    """A finished trial that is no worse than the candidate in everything but the score, and so may put it off the front.

    `score` is its loss: the difference from the baseline, turned so that less is better. `elsewhere`: it is better beyond doubt in another
    objective; `everywhere`: in all others.
    """

    trial: str
    score: Interval
    elsewhere: bool
    everywhere: bool


@dataclass(frozen=True)
class Rules:
    """What ends a candidate's accuracy early. `already` says which limit it violates whatever its score is, if any.

    `eps` is the difference in score that is worth nothing; `error` the probability with which the interval of one model in one objective
    may be wrong where the choice at the end compares them; `score_counts` says whether the score is an objective.
    """

    constraints: tuple[Constraint, ...] = ()  # on the score
    already: str = ""
    rivals: tuple[Rival, ...] = ()
    higher_is_better: bool = True
    eps: float = 0.003
    error: float = 1 - statistics.CONFIDENCE
    score_counts: bool = True

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Rules:
        constraints = tuple(Constraint(**{**c, "relative": Relative(c["relative"])}) for c in data["constraints"])
        rivals = tuple(Rival(**{**r, "score": Interval.from_json(r["score"])}) for r in data["rivals"])
        return cls(**{**data, "constraints": constraints, "rivals": rivals})


@dataclass(frozen=True)
class Stop:
    """Why a candidate's accuracy ended early: the rule, in words, and what is known of its score."""

    rule: str
    words: str
    metric: MetricValue


def look_sizes(rows: int, *, step: int = 1) -> tuple[int, ...]:
    """Numbers of rows after which a look is taken, the whole not among them; whole runs of `step` rows each."""
    sizes = {max(step, round(share * rows / step) * step) for share in LOOKS}
    return tuple(sorted(s for s in sizes if s < rows))


def race_for(metric: Metric, baseline: Scores | None, *, error: float = ERROR, looks: int = len(LOOKS)) -> ProportionRace | BoundedRace | None:
    """Return how a metric's candidates can be raced, None when it can't be done soundly. `baseline`: its scores on all rows, if it has such."""
    if baseline is None or len(baseline) < 2 or looks < 1 or not np.isfinite(baseline).all():
        return None
    if metric.right_or_wrong and np.isin(baseline, (0, 1)).all():
        return ProportionRace(metric, baseline, error / (4 * looks))
    if metric.bounds is not None and baseline.min() >= metric.bounds[0] and baseline.max() <= metric.bounds[1]:
        return BoundedRace(metric, baseline, error / (2 * looks))
    return None


@dataclass(frozen=True)
class ProportionRace:
    """Scores of 0 and 1. `error` is the probability that one limit may be wrong."""

    metric: Metric
    baseline: Scores
    error: float

    def limits(self, seen: Scores) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """Limits of the rows gained and of those lost, over all rows; None for scores that are not 0 or 1."""
        if not np.isin(seen, (0, 1)).all():
            return None
        base = self.baseline[: len(seen)]
        right = int(self.baseline.sum())
        gained, lost = int(((seen == 1) & (base == 0)).sum()), int(((seen == 0) & (base == 1)).sum())
        seen_right = int(base.sum())
        return (
            statistics.hypergeometric_limits(gained, len(seen) - seen_right, len(self.baseline) - right, self.error),
            statistics.hypergeometric_limits(lost, seen_right, right, self.error),
        )

    def difference(self, seen: Scores) -> Interval | None:
        """The difference from the baseline over all rows: an estimate and its limits."""
        found = self.limits(seen)
        if found is None:
            return None
        (least_gained, most_gained), (least_lost, most_lost) = found
        count = len(self.baseline)
        low, high = (least_gained - most_lost) / count, (most_gained - least_lost) / count
        return _within(float((seen - self.baseline[: len(seen)]).mean()), low, high)

    def possible(self, seen: Scores) -> list[MetricValue]:
        """What the metric over all rows may become: the corners of the limits, between which its intervals move one way."""
        found = self.limits(seen)
        if found is None:
            return []
        gained, lost = found
        right, count = int(self.baseline.sum()), len(self.baseline)
        return [proportions(self.metric, right=right, gained=g, lost=miss, count=count) for g in sorted({*gained}) for miss in sorted({*lost})]

    @property
    def method(self) -> str:
        return "exact hypergeometric limits"


@dataclass(frozen=True)
class BoundedRace:
    """Scores within the bounds of the metric. `error` is the probability that one limit may be wrong."""

    metric: Metric
    baseline: Scores
    error: float

    @property
    def bounds(self) -> tuple[float, float]:
        assert self.metric.bounds is not None
        return self.metric.bounds

    def difference(self, seen: Scores) -> Interval | None:
        """The mean difference from the baseline over all rows: an estimate and its limits; None for scores out of bounds."""
        (least, most), count = self.bounds, len(self.baseline)
        if seen.min() < least or seen.max() > most:
            return None
        differences = seen - self.baseline[: len(seen)]
        rest, total = self.baseline[len(seen) :], float(differences.sum())
        low, high = (total + float((bound - rest).sum()) for bound in (least, most))
        low, high = low / count, high / count
        if len(rest):
            span = (most - float(self.baseline.min())) - (least - float(self.baseline.max()))
            by_sample = statistics.finite_mean_limits(differences, count, span, self.error)
            low, high = max(low, by_sample[0]), min(high, by_sample[1])
        return _within(float(differences.mean()), low, high)

    def possible(self, seen: Scores) -> list[MetricValue]:
        """What the metric over all rows may become, each with the widest interval that it may have then."""
        found = self.difference(seen)
        if found is None:
            return []
        least, most = self.bounds
        mean, count = float(self.baseline.mean()), len(self.baseline)
        low, high = least - float(self.baseline.max()), most - float(self.baseline.min())  # of one row's difference
        t = statistics.student_t_quantile((1 + statistics.CONFIDENCE) / 2, count - 1)
        outcomes = []
        for change in np.linspace(found.low, found.high, GRID).tolist():
            own = Interval(mean + change, *self._around(mean + change, seen, least, most, t))
            delta = Interval(change, *self._around(change, seen - self.baseline[: len(seen)], low, high, t))
            outcomes.append(MetricValue(own.value, own.low, own.high, unit=self.metric.unit, delta=delta, samples=count))
        return outcomes

    def _around(self, mean: float, seen: Scores, least: float, most: float, t: float) -> tuple[float, float]:
        """The widest t limits of a mean over all rows, given what is seen and where the rest must lie.

        The variance of values within bounds is largest when they lie on them (R. Bhatia and C. Davis, Amer. Math. Monthly 107 (2000) 353-357).
        """
        count, left = len(self.baseline), len(self.baseline) - len(seen)
        squares = float(((seen - mean) ** 2).sum())
        if left:
            rest = min(max((count * mean - float(seen.sum())) / left, least), most)
            squares += left * ((most - rest) * (rest - least) + (rest - mean) ** 2)
        half = t * math.sqrt(squares / (count - 1) / count)
        return mean - half, mean + half

    @property
    def method(self) -> str:
        return "empirical Bernstein-Serfling limits"


def _within(estimate: float, low: float, high: float) -> Interval:
    return Interval(min(max(estimate, low), high), low, high)


def look(race: ProportionRace | BoundedRace, seen: Scores, rules: Rules, baseline: MetricValue) -> Stop | None:
    """Decide after some rows whether the candidate's outcome is certain. `seen`: its scores on the first of the rows."""
    outcomes, difference = race.possible(seen), race.difference(seen)
    if not outcomes or difference is None:
        return None
    found = _ended(outcomes, rules, baseline, len(seen))
    if found is None:
        return None
    rule, why = found
    metric = partial_value(race, seen, difference)
    low, high = (shown_difference(v, metric.unit) for v in (difference.low, difference.high))
    words = f"stopped after {len(seen)} of {len(race.baseline)} rows: {why} ({race.metric.name} over all rows differs by {low} to {high})"
    return Stop(rule, words, metric)


def partial_value(race: ProportionRace | BoundedRace, seen: Scores, difference: Interval) -> MetricValue:
    """What is known of the metric over all rows after some: the baseline's value is known, the difference within limits."""
    mean = float(race.baseline.mean())
    ratio = None
    if mean > 0:
        ratio = Interval(*(max(0.0, 1 + d / mean) for d in (difference.value, difference.low, difference.high)))
    return MetricValue(
        mean + difference.value, mean + difference.low, mean + difference.high, unit=race.metric.unit, ratio=ratio, delta=difference,
        samples=len(seen), method=f"for all {len(race.baseline)} rows from the first {len(seen)}: {race.method}, all looks together 95 %",
    )  # fmt: skip


def _ended(outcomes: Sequence[MetricValue], rules: Rules, baseline: MetricValue, seen: int) -> tuple[str, str] | None:
    for constraint in rules.constraints:
        if all(judge(constraint, v, baseline).verdict is Verdict.VIOLATED for v in outcomes):
            return INFEASIBLE, f"`{constraint.text}` is violated"
    if rules.already and seen >= ROWS_FOR_WORDS:
        return INFEASIBLE, f"`{rules.already}` is violated whatever the score is"
    losses = [_loss(v, rules) for v in outcomes]
    weaker: tuple[str, str] | None = None
    for rival in rules.rivals:
        if not all(rival.score.value <= loss.value for loss in losses):
            continue
        clear = all(rival.score.high < loss.low and loss.value - rival.score.value > rules.eps for loss in losses)
        if rival.everywhere and (clear or not rules.score_counts):
            return DOMINATED, f"{rival.trial} is better in every objective beyond doubt"
        if rival.elsewhere or (clear and rules.score_counts):
            weaker = weaker or (OFF_FRONT, f"{rival.trial} is no worse in anything and better in one objective beyond doubt")
    return weaker


def _loss(value: MetricValue, rules: Rules) -> Interval:
    """The loss that a difference makes, with an interval at least as wide as the one that the choice will see.

    From one confidence to a higher one, a score interval grows by no more than the square of the ratio of the normal quantiles (and the share
    that its own shrinkage makes of it), a t interval over so many rows by less.
    """
    assert value.delta is not None
    d = value.delta
    z = statistics.normal_quantile((1 + statistics.CONFIDENCE) / 2)
    factor = max(1.0, statistics.normal_quantile(1 - rules.error / 2) / z) ** 2 * (1 + z * z / value.samples)
    below, above = factor * (d.value - d.low), factor * (d.high - d.value)
    return Interval(-d.value, -d.value - above, -d.value + below) if rules.higher_is_better else Interval(d.value, d.value - below, d.value + above)
