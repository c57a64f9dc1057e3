"""What must hold of looks at a part of the rows, whatever the candidate: coverage, wrong decisions, the end at all rows."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from autotune.benchmarks import racing
from autotune.benchmarks.accuracy import compare_features
from autotune.benchmarks.metrics import BUILT_IN, Features, Metric
from autotune.benchmarks.racing import BoundedRace, ProportionRace, Rival, Rules, look, look_sizes, race_for
from autotune.benchmarks.statistics import finite_mean_limits, hypergeometric_limits
from autotune.constraints import Verdict, judge, parse_constraint
from autotune.records import Interval, MetricValue
from autotune.selection import compared, widened

ACCURACY = BUILT_IN["accuracy"]
COSINE = BUILT_IN["cosine"]
Scores = NDArray[np.float64]


def at_most(count: int, drawn: int, marked: int, population: int) -> float:
    """The hypergeometric law from binomial coefficients, the other way to it."""
    fitting = range(max(0, drawn - (population - marked)), min(count, marked, drawn) + 1)
    return sum(comb(marked, k) * comb(population - marked, drawn - k) for k in fitting) / comb(population, drawn)


def value_over_all(metric: Metric, candidate: Scores, baseline: Scores) -> MetricValue:
    return compare_features(metric, Features((candidate,)), Features((baseline,)), seed=0)


# Limits of totals and means -------------------------------------------------------------------------------------------------


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(0, n))), st.sampled_from([0.2, 0.05, 0.0025]))
def test_each_limit_of_a_total_is_wrong_no_more_often_than_allowed_for_any_truth(case: tuple[int, int, int], error: float) -> None:
    population, marked, drawn = case
    above = below = 0.0

    for count in range(max(0, drawn - (population - marked)), min(drawn, marked) + 1):
        share = at_most(count, drawn, marked, population) - (at_most(count - 1, drawn, marked, population) if count else 0.0)
        low, high = hypergeometric_limits(count, drawn, population, error)
        above += share * (marked > high)
        below += share * (marked < low)
        assert count <= low <= high <= population - drawn + count

    assert above <= error * (1 + 1e-9)
    assert below <= error * (1 + 1e-9)


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), st.sampled_from([0.05, 0.0025]))
def test_more_marked_rows_never_lower_a_limit(case: tuple[int, int], error: float) -> None:
    population, drawn = case

    limits = [hypergeometric_limits(count, drawn, population, error) for count in range(drawn + 1)]

    assert limits == sorted(limits)
    assert [high for _, high in limits] == sorted(high for _, high in limits)


@given(st.integers(0, 200).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), st.sampled_from([0.05, 0.0025]))
def test_limits_of_a_total_meet_when_every_row_is_seen(case: tuple[int, int], error: float) -> None:
    population, count = case

    assert hypergeometric_limits(count, population, population, error) == (count, count)


@pytest.mark.parametrize("shape", ["two values", "rare", "even", "skewed"])
@pytest.mark.parametrize("drawn", [30, 200, 380])
def test_limits_of_a_mean_hold_as_often_as_they_promise(shape: str, drawn: int) -> None:
    rng = np.random.default_rng([drawn, len(shape)])
    population = {
        "two values": (rng.random(400) < 0.5).astype(float), "rare": (rng.random(400) < 0.01).astype(float),
        "even": rng.random(400), "skewed": rng.beta(0.2, 5.0, 400),
    }[shape]  # fmt: skip
    error, missed = 0.05, 0

    for _ in range(2000):
        low, high = finite_mean_limits(rng.permutation(population)[:drawn], 400, 1.0, error)
        missed += not low <= population.mean() <= high

    assert missed / 2000 <= 2 * error  # two limits


# Whole races ----------------------------------------------------------------------------------------------------------------


def pairs(rng: np.random.Generator, count: int, lost: float, gained: float) -> tuple[Scores, Scores]:
    """Baseline and candidate of right and wrong answers, with shares of changes among those that can change."""
    baseline = (rng.random(count) < 0.85).astype(float)
    flip = rng.random(count) < np.where(baseline == 1, lost, gained)
    return baseline, np.where(flip, 1 - baseline, baseline)


@pytest.mark.parametrize(("lost", "gained"), [(0.0, 0.0), (0.02, 0.05), (0.1, 0.1), (0.5, 0.2)])
@pytest.mark.parametrize("count", [200, 1000])
def test_all_looks_of_a_race_hold_the_difference_over_all_rows_together(count: int, lost: float, gained: float) -> None:
    rng = np.random.default_rng([count, int(100 * lost)])
    baseline, candidate = pairs(rng, count, lost, gained)
    truth, missed, races = float((candidate - baseline).mean()), 0, 400

    for _ in range(races):
        order = rng.permutation(count)
        race = race_for(ACCURACY, baseline[order])
        assert race is not None
        found = [race.difference(candidate[order][:size]) for size in look_sizes(count)]
        missed += any(d is None or not d.low - 1e-12 <= truth <= d.high + 1e-12 for d in found)

    assert missed / races <= 0.05


def test_scores_within_bounds_hold_the_difference_over_all_rows_together() -> None:
    rng = np.random.default_rng(7)
    baseline = np.ones(600)
    missed, races = 0, 300

    for spread in (0.5, 5.0, 50.0):
        candidate = 1 - 2 * rng.beta(0.3, spread, 600)
        truth = float((candidate - baseline).mean())
        for _ in range(races):
            order = rng.permutation(600)
            race = race_for(COSINE, baseline)
            assert isinstance(race, BoundedRace)
            found = [race.difference(candidate[order][:size]) for size in look_sizes(600)]
            missed += any(d is None or not d.low - 1e-12 <= truth <= d.high + 1e-12 for d in found)

    assert missed / (3 * races) <= 0.05


@pytest.mark.parametrize("lost", [0.0, 0.02, 0.04, 0.06, 0.15, 0.6])
def test_a_candidate_is_stopped_as_infeasible_only_when_all_rows_would_say_so(lost: float) -> None:
    rng = np.random.default_rng(int(1000 * lost))
    limit = parse_constraint("accuracy >= baseline - 2.0pt", metrics={"accuracy": "share"})
    wrong = stopped = 0

    for _ in range(60):
        baseline, candidate = pairs(rng, 800, lost, 0.02)
        whole = value_over_all(ACCURACY, candidate, baseline)
        base = value_over_all(ACCURACY, baseline, baseline)
        race = race_for(ACCURACY, baseline)
        assert race is not None
        ended = next((e for size in look_sizes(800) if (e := look(race, candidate[:size], Rules((limit,)), base))), None)
        stopped += ended is not None
        wrong += ended is not None and judge(limit, whole, base).verdict is not Verdict.VIOLATED

    assert wrong <= 3
    assert lost < 0.6 or stopped == 60


@pytest.mark.parametrize("lost", [0.0, 0.03, 0.1, 0.4])
def test_a_candidate_is_put_off_the_front_only_when_all_rows_would_put_it_off(lost: float) -> None:
    rng = np.random.default_rng(int(1000 * lost))
    rival = Rival("t-0001", Interval(0.01, -0.005, 0.025), elsewhere=True, everywhere=True)
    rules = Rules(rivals=(rival,), error=0.0002)
    wrong = stopped = 0

    for _ in range(60):
        baseline, candidate = pairs(rng, 800, lost, 0.05)
        base = value_over_all(ACCURACY, baseline, baseline)
        race = race_for(ACCURACY, baseline)
        assert race is not None
        ended = next((e for size in look_sizes(800) if (e := look(race, candidate[:size], rules, base))), None)
        whole = value_over_all(ACCURACY, candidate, baseline).delta
        assert whole is not None
        stopped += ended is not None
        wrong += ended is not None and -whole.value < rival.score.value
        box = widened(Interval(-whole.value, -whole.high, -whole.low), value_over_all(ACCURACY, candidate, baseline), error=rules.error)
        wrong += ended is not None and ended.rule == "dominated" and not (rival.score.high < box.low and box.value - 0.01 > rules.eps)

    assert wrong <= 3
    assert lost < 0.4 or stopped == 60


CHANGES = st.lists(st.sampled_from([(1.0, 1.0), (1.0, 0.0), (0.0, 0.0), (0.0, 1.0)]), min_size=10, max_size=60)


@given(CHANGES, st.floats(0.05, 1.0))
def test_whatever_is_possible_lies_between_the_corners(changes: list[tuple[float, float]], share: float) -> None:
    baseline, candidate = (np.array(column) for column in zip(*changes, strict=True))
    race = ProportionRace(ACCURACY, baseline, 0.0025)
    seen = candidate[: max(1, int(share * len(changes)))]

    corners = race.possible(seen)
    limits = race.limits(seen)

    assert limits is not None
    right = int(baseline.sum())
    for gained in range(limits[0][0], limits[0][1] + 1, 3):
        for lost in range(limits[1][0], limits[1][1] + 1, 3):
            inside = value_between(right, gained, lost, len(changes))
            for part in ("interval", "delta", "ratio"):
                ours = getattr(inside, part)
                outer = [getattr(c, part) for c in corners]
                if ours is not None:
                    assert min(o.low for o in outer) - 1e-9 <= ours.low
                    assert ours.high <= max(o.high for o in outer) + 1e-9


def value_between(right: int, gained: int, lost: int, count: int) -> MetricValue:
    baseline = np.repeat([1.0, 0.0], [right, count - right])
    candidate = baseline.copy()
    candidate[:lost] = 0
    candidate[right : right + gained] = 1
    return value_over_all(ACCURACY, candidate, baseline)


@given(CHANGES)
def test_at_all_rows_nothing_is_open_but_whether_other_rows_would_agree(changes: list[tuple[float, float]]) -> None:
    baseline, candidate = (np.array(column) for column in zip(*changes, strict=True))

    for race in (ProportionRace(ACCURACY, baseline, 0.0025), BoundedRace(ACCURACY, baseline, 0.005)):
        difference = race.difference(candidate)
        assert difference is not None
        assert difference.low == pytest.approx(difference.high, abs=1e-12)
        assert difference.value == pytest.approx(float((candidate - baseline).mean()), abs=1e-12)
    whole = value_over_all(ACCURACY, candidate, baseline)
    assert {c.delta for c in ProportionRace(ACCURACY, baseline, 0.0025).possible(candidate)} == {whole.delta}
    assert whole.delta is not None
    assert whole.delta.low < whole.delta.high  # of the rows that there might be


@given(CHANGES, st.integers(0, 59))
def test_a_row_that_is_right_after_all_never_makes_the_difference_worse(changes: list[tuple[float, float]], place: int) -> None:
    baseline, candidate = (np.array(column) for column in zip(*changes, strict=True))
    size = max(1, len(changes) // 2)
    better = candidate.copy()
    better[place % size] = 1.0

    race = ProportionRace(ACCURACY, baseline, 0.0025)
    before, after = race.difference(candidate[:size]), race.difference(better[:size])
    assert before is not None
    assert after is not None
    assert before.low <= after.low
    assert before.high <= after.high


def test_a_bounded_outcome_is_never_narrower_than_the_interval_that_comes_of_it() -> None:
    rng = np.random.default_rng(3)
    for _ in range(40):
        baseline, candidate = np.ones(240), 1 - 2 * rng.beta(*rng.uniform(0.2, 3, 2), 240)
        race = BoundedRace(COSINE, baseline, 0.005)
        whole = value_over_all(COSINE, candidate, baseline).delta
        size = int(rng.integers(5, 240))
        outcomes = [o.delta for o in race.possible(candidate[:size]) if o.delta is not None]

        assert whole is not None
        near = min(outcomes, key=lambda o: abs(o.value - whole.value))
        assert near.high - near.low >= (whole.high - whole.low) * 0.98  # of the grid's nearest outcome


@given(st.integers(60, 400), st.floats(0, 0.5), st.floats(0, 0.5), st.floats(1e-7, 0.04), st.booleans(), st.booleans())
def test_a_candidates_box_is_at_least_as_wide_as_the_one_of_the_choice(
    count: int, lost: float, gained: float, error: float, higher_is_better: bool, halves: bool
) -> None:
    baseline, candidate = pairs(np.random.default_rng(count), count, lost, gained)
    value = value_over_all(ACCURACY, candidate / 2 + 0.1, baseline) if halves else value_over_all(ACCURACY, candidate, baseline)

    ours = racing._loss(value, Rules(error=error, higher_is_better=higher_is_better))
    theirs = widened(compared(value, value_over_all(ACCURACY, baseline, baseline), minimize=not higher_is_better), value, error=error)

    assert ours.value == theirs.value
    assert ours.low <= theirs.low + 1e-12
    assert ours.high >= theirs.high - 1e-12
