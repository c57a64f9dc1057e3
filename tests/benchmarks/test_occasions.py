"""How far the baseline moves from one measurement to the next widens the intervals, and by as much as it must."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autotune.benchmarks.occasions import RATIO_SHARE, USUAL_SD, Occasions, widen_all
from autotune.records import Interval, MetricValue


def latency(value: float, within: float, *, ratio: Interval | None = None, delta: Interval | None = None) -> MetricValue:
    low, high = (value * math.exp(sign * 1.96 * within) for sign in (-1, 1))
    return MetricValue(value, low, high, unit="ms", ratio=ratio, delta=delta, units=10)


@pytest.mark.parametrize("spread", [0.0, 0.005, 0.02, 0.06])
@pytest.mark.parametrize("share", [0.0, 0.35, 0.5])
def test_intervals_hold_what_many_measurements_come_to(spread: float, share: float) -> None:
    rng = np.random.default_rng(int(1000 * spread) + int(100 * share))
    within, held, held_ratio, many = 0.004, 0, 0, 0
    for _ in range(40):
        before: list[float] = []
        for _ in range(25):
            moved = rng.normal() * spread
            own, ratio = (math.exp(part + rng.normal() * within) for part in (moved, share * moved))
            one = latency(own, within, ratio=latency(ratio, within).interval)
            found = Occasions.of(before, [own]).widen(one)
            assert found.ratio is not None
            before.append(own)
            if len(before) > 3:  # until then much rests on what is usual
                held, held_ratio, many = held + (found.low <= 1 <= found.high), held_ratio + (found.ratio.low <= 1 <= found.ratio.high), many + 1

    assert held / many >= 0.94
    assert held_ratio / many >= 0.94


def test_a_baseline_that_two_states_of_the_machine_meet_differently_widens_the_intervals_to_hold_both() -> None:
    states = [1.0] * 20 + [1.08] * 10

    found = Occasions.of(states[:-1], states[-1:])

    assert found.half_width >= math.log(1.08)
    assert Occasions.of(states[-1:] + states[:-2], states[-2:-1]).count == len(states)


def test_one_odd_measurement_is_doubted_itself_and_widens_no_other() -> None:
    calm = [1.0 + 0.001 * (-1) ** n for n in range(20)]

    odd, next_one, undisturbed = Occasions.of(calm, [2.0]), Occasions.of([*calm, 2.0], [1.0]), Occasions.of(calm, [1.0])

    assert odd.half_width >= math.log(1.9)
    assert next_one.half_width == pytest.approx(undisturbed.half_width, rel=0.1)
    assert undisturbed.half_width < USUAL_SD


def test_before_there_is_a_history_a_usual_spread_is_taken() -> None:
    found = Occasions.of([], [3.0])

    assert (found.sd, found.count) == (USUAL_SD, 1)
    assert found.half_width > 2 * USUAL_SD


def test_several_measurements_together_are_doubted_less() -> None:
    alone, together = Occasions.of([1.0, 1.01, 0.99], [1.0]), Occasions.of([], [1.0, 1.01, 0.99, 1.0])

    assert together.half_width == pytest.approx(alone.half_width / 2)


def test_what_is_no_time_or_exactly_the_baseline_stays_as_it_is() -> None:
    score = MetricValue(0.9, 0.8, 0.95, unit="share", delta=Interval(0.0, -0.01, 0.01))
    itself = latency(2.0, 0.01, ratio=Interval.exactly(1.0), delta=Interval.exactly(0.0))

    found = widen_all({"accuracy": score, "latency": itself}, Occasions.of([2.0, 2.2], [2.0]))

    assert found["accuracy"] == score
    assert (found["latency"].ratio, found["latency"].delta) == (itself.ratio, itself.delta)
    assert found["latency"].low < itself.low
    assert found["latency"].high > itself.high


def test_a_difference_is_widened_as_its_ratio_is() -> None:
    value = latency(2.0, 0.0, ratio=Interval(0.5, 0.4999, 0.5001), delta=Interval(-2.0, -2.0001, -1.9999))

    found = Occasions.of([4.0], [4.0]).widen(value)

    half = RATIO_SHARE * Occasions.of([4.0], [4.0]).half_width
    assert found.delta is not None
    assert found.ratio is not None
    assert found.delta.high - found.delta.value == pytest.approx(2.0 * half, rel=0.01)
    assert math.log(found.ratio.high / found.ratio.value) == pytest.approx(half, rel=0.01)


def test_a_limit_at_zero_stays_at_zero() -> None:
    found = Occasions.of([1.0], [1.0]).widen(MetricValue(1.0, 0.0, 2.0, unit="ms"))

    assert found.low == 0
    assert found.high > 2
