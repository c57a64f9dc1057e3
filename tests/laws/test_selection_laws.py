"""Laws of the front: what it calls certain is, in simulations with a known truth, as often as it says; order and names don't matter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from autotune.benchmarks import statistics
from autotune.benchmarks.accuracy import compare_features
from autotune.benchmarks.metrics import Features, get_metric
from autotune.constraints import Verdict, judge, parse_constraint
from autotune.pareto import dominates, pareto_front
from autotune.records import Interval, MetricValue, Status, TrialRecord
from autotune.selection import UNTOUCHED, Objective, Selection, State, select, widened

Floats = NDArray[np.float64]

EPS_LATENCY, EPS_SCORE = 0.03, 0.003
OBJECTIVES = (Objective("latency"), Objective("error", minimize=True))
BASELINE = {
    "latency": MetricValue(8.0, 8.0, 8.0, "ms", ratio=Interval.exactly(1.0), delta=Interval.exactly(0.0)),
    "error": MetricValue(0.1, 0.1, 0.1, "share", ratio=Interval.exactly(1.0), delta=Interval.exactly(0.0)),
}
LIMIT = parse_constraint("error <= baseline + 1.0pt", metrics={"error": "share"})


def latency_of(log_ratios: Floats) -> MetricValue:
    """What is measured from the log ratios of session pairs."""
    found = statistics.median_interval(log_ratios)
    ratio = Interval(*(float(np.exp(v)) for v in (found.value, found.low, found.high)))
    own = [8.0 * v for v in (ratio.value, ratio.low, ratio.high)]
    return MetricValue(own[0], own[1], own[2], "ms", ratio=ratio, samples=10 * len(log_ratios), units=len(log_ratios))


def error_of(gained: int, lost: int, rows: int) -> MetricValue:
    """The change of an error rate over `rows` of which so many were gained and lost."""
    delta = statistics.paired_proportion_interval(gained, lost, rows)
    value = 0.1 + delta.value
    return MetricValue(value, value - 0.03, value + 0.03, "share", delta=delta, samples=rows, units=rows)


def record(number: int, latency: MetricValue, error: MetricValue) -> TrialRecord:
    return TrialRecord(number, {"pass": f"P{number}"}, Status.OK, metrics={"latency": latency, "error": error})


def untouched() -> TrialRecord:
    return TrialRecord(0, {"pass": None}, Status.OK, UNTOUCHED, metrics=BASELINE, unchanged="nothing was done")


def choose(records: list[TrialRecord]) -> Selection:
    return select(records, OBJECTIVES, (), baseline=BASELINE, score="error", eps_latency=EPS_LATENCY, eps_score=EPS_SCORE)


class World:
    """Models with known truth: many near the front, so that noise has something to spoil."""

    def __init__(self, rng: np.random.Generator, models: int) -> None:
        self.rng = rng
        bold = rng.uniform(0, 1, models)
        self.log_ratio = np.concatenate([[0.0], -bold + 0.05 * rng.normal(size=models)])
        self.gains = np.concatenate([[0.0], rng.uniform(0, 0.01, models)])
        self.losses = np.concatenate([[0.0], 0.02 * bold**2 + self.gains[1:] * rng.uniform(0, 1, models)])

    @property
    def truth(self) -> Floats:
        return np.stack([self.log_ratio, self.gains - self.losses], axis=1) * [1, -1]

    def records(self, sessions: int, rows: int) -> list[TrialRecord]:
        found = [untouched()]
        for i in range(1, len(self.log_ratio)):
            logs = self.log_ratio[i] + 0.01 * self.rng.standard_t(6, size=sessions)
            lost, gained, _ = self.rng.multinomial(rows, [self.losses[i], self.gains[i], 1 - self.losses[i] - self.gains[i]])
            found.append(record(i, latency_of(logs), error_of(int(lost), int(gained), rows)))
        return found


def truly_beaten(truth: Floats, i: int, factor: float) -> bool:
    """Whether another model is truly no worse in both and better by more than so many tolerances in one."""
    eps = factor * np.array([np.log1p(EPS_LATENCY), EPS_SCORE])
    return bool((np.all(truth <= truth[i], axis=1) & np.any(truth[i] - truth > eps, axis=1)).any())


@pytest.mark.parametrize(("sessions", "rows"), [(6, 400), (40, 20_000)])
def test_with_95_percent_no_true_member_is_excluded_and_no_certain_one_is_beaten_by_more_than_the_tolerance(sessions: int, rows: int) -> None:
    rng = np.random.default_rng(21)
    wrong, sweeps, excluded, certain = 0, 100, 0, 0
    for _ in range(sweeps):
        world = World(rng, 20)
        places = choose(world.records(sessions, rows)).membership
        states = [places[f"t-{i:04d}"].state for i in range(21)]
        truly = pareto_front(world.truth)
        lost = any(state is State.EXCLUDED and truly[i] for i, state in enumerate(states))
        beaten = any(
            (state is State.CERTAIN and truly_beaten(world.truth, i, 1.0)) or (state is State.TIED and truly_beaten(world.truth, i, 2.0))
            for i, state in enumerate(states)
        )
        wrong += lost or beaten
        excluded += states.count(State.EXCLUDED)
        certain += states.count(State.CERTAIN)

    assert wrong <= 0.05 * sweeps
    # The law does not hold by saying nothing; few rows say little.
    assert certain >= (10 if rows == 400 else sweeps), (certain, excluded)
    assert excluded >= (0 if rows == 400 else sweeps), (certain, excluded)


def test_more_samples_settle_more_and_bring_the_certain_closer_to_the_truth() -> None:
    rng = np.random.default_rng(22)
    worlds = [World(rng, 12) for _ in range(25)]

    def open_share(sessions: int, rows: int) -> float:
        places = [m.state for w in worlds for m in choose(w.records(sessions, rows)).membership.values()]
        return places.count(State.AMBIGUOUS) / len(places)

    few, some, many = open_share(6, 300), open_share(12, 3000), open_share(60, 100_000)

    assert few > some > many
    assert many < 0.35


def test_a_certain_member_of_the_true_front_is_hardly_ever_excluded_by_more_samples() -> None:
    rng = np.random.default_rng(23)
    turned = seen = 0
    for _ in range(60):
        world = World(rng, 12)
        before, after = (choose(world.records(*size)).membership for size in ((20, 2000), (40, 40_000)))
        certain = [i for i, m in before.items() if m.state is State.CERTAIN]
        seen += len(certain)
        turned += sum(after[i].state is State.EXCLUDED and truly_beaten(world.truth, int(i[2:]), 1.0) for i in certain)

    assert seen > 30, seen
    assert turned <= 0.05 * 60


def test_a_front_of_intervals_holds_all_that_the_estimates_call_the_front_or_someone_who_ties_with_it() -> None:
    found = choose(World(np.random.default_rng(24), 15).records(8, 500))

    assert all(found.membership[i].layer == 1 or found.membership[i].state is not State.EXCLUDED for i in found.front)
    for i, place in found.membership.items():
        if place.state is State.EXCLUDED:
            assert i not in found.front


@settings(max_examples=25)
@given(st.randoms(use_true_random=False), st.integers(0, 10_000))
def test_the_order_of_records_changes_nothing(shuffler: object, seed: int) -> None:
    records = World(np.random.default_rng(seed), 8).records(6, 300)
    mixed = list(records)
    shuffler.shuffle(mixed)  # type: ignore[attr-defined] # a random.Random

    first, again = choose(records), choose(mixed)

    assert again == first


@settings(max_examples=40)
@given(st.integers(0, 10_000))
def test_whoever_is_excluded_is_dominated_by_estimate_and_by_every_corner_of_the_boxes(seed: int) -> None:
    world = World(np.random.default_rng(seed), 10)
    records = world.records(6, 2000)
    places = choose(records).membership
    losses = {}
    for r in records:
        ratio, delta = r.metrics["latency"].ratio, r.metrics["error"].delta
        assert ratio is not None
        assert delta is not None
        losses[r.id] = (ratio, delta)
    for i, place in places.items():
        if place.state is State.EXCLUDED:
            (winner, winner_error), (loser, loser_error) = losses[place.rivals[0]], losses[i]
            assert dominates([winner.high, winner_error.high], [loser.low, loser_error.low])


@pytest.mark.parametrize("sessions", [3, 5, 6, 7, 9, 12, 20, 40])
@pytest.mark.parametrize("error", [1e-2, 1e-3])
def test_widened_limits_of_medians_are_wrong_no_oftener_than_asked(sessions: int, error: float) -> None:
    rng = np.random.default_rng(25)
    wrong, draws = 0, 6000
    for logs in rng.standard_t(8, size=(draws, sessions)) * 0.01:
        log = statistics.median_interval(logs)
        wide = widened(log, MetricValue(1.0, 1.0, 1.0, "ms", units=sessions), error=error)
        wrong += not wide.low <= 0 <= wide.high

    assert wrong <= error * draws + 3 * np.sqrt(error * draws)


@pytest.mark.parametrize(("gained", "lost", "rows"), [(0, 0, 100), (0, 1, 400), (5, 12, 500), (40, 90, 3000), (0, 30, 300), (200, 200, 1000)])
@pytest.mark.parametrize("error", [1e-2, 1e-3, 1e-4])
def test_widened_limits_of_proportions_are_at_least_those_of_tango(
    gained: int, lost: int, rows: int, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = error_of(lost, gained, rows)
    assert value.delta is not None
    monkeypatch.setattr(statistics, "CONFIDENCE", 1 - error)
    exact = statistics.paired_proportion_interval(lost, gained, rows)
    monkeypatch.undo()

    wide = widened(value.delta, value, error=error)

    assert wide.low <= exact.low + 1e-9
    assert wide.high >= exact.high - 1e-9
    assert wide.high - wide.low <= 1.5 * (exact.high - exact.low)


def test_scores_that_are_not_right_or_wrong_are_widened_as_students_t() -> None:
    scores = np.random.default_rng(26).normal(0.999, 1e-4, 50)
    metric = replace(get_metric("cosine"), reference="labels")
    value = compare_features(metric, Features((scores,)), Features((scores[::-1].copy(),)), seed=0)
    assert value.delta is not None

    wide = widened(value.delta, value, error=0.001)

    assert wide.high - wide.low < 3 * (value.delta.high - value.delta.low)


@pytest.mark.parametrize(("gain", "loss", "rows"), [(0.002, 0.008, 800), (0.005, 0.02, 1500)])
def test_the_rows_that_would_settle_a_verdict_do_so_in_about_four_of_five_cases(gain: float, loss: float, rows: int) -> None:
    """The truth is what was estimated; with the rows asked for, most new measurements settle the verdict, and with a third of them few."""
    rng = np.random.default_rng(27)
    found = judge(LIMIT, error_of(round(loss * rows), round(gain * rows), rows), BASELINE["error"])
    assert found.verdict in (Verdict.MET, Verdict.UNDECIDED)
    more = int(found.needed.split()[1].replace(",", ""))
    gain, loss = round(gain * rows) / rows, round(loss * rows) / rows

    def settled(count: int) -> float:
        verdicts = []
        for _ in range(150):
            lost, gained, _ = rng.multinomial(count, [loss, gain, 1 - loss - gain])
            verdicts.append(judge(LIMIT, error_of(int(lost), int(gained), count), BASELINE["error"]).verdict)
        return sum(v in (Verdict.CERTAIN, Verdict.VIOLATED) for v in verdicts) / len(verdicts)

    assert 0.68 <= settled(rows + more) <= 0.95
    assert settled((rows + more) // 3) < 0.6


@pytest.mark.parametrize("excess", [-0.02, -0.005, 0.0, 0.005, 0.02])
def test_certain_and_violated_are_wrong_in_at_most_one_case_of_twenty(excess: float) -> None:
    rng = np.random.default_rng(28)
    rows, loss = 600, 0.03
    gain = loss - (0.01 + excess) if excess < 0.02 else 0.0
    wrong = 0
    for _ in range(300):
        lost, gained, _ = rng.multinomial(rows, [loss, gain, 1 - loss - gain])
        verdict = judge(LIMIT, error_of(int(lost), int(gained), rows), BASELINE["error"]).verdict
        kept = loss - gain <= 0.01 + 1e-12
        wrong += (verdict is Verdict.CERTAIN and not kept) or (verdict is Verdict.VIOLATED and kept)

    assert wrong <= 0.05 * 300 + 3 * np.sqrt(0.05 * 300)
