"""Laws of front, hypervolume and knee, and their agreement with moocore. Small whole numbers, so that ties are common."""

from __future__ import annotations

import math

import moocore
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from autotune.pareto import dominates, hypervolume, knee, pareto_front

WHOLE = st.integers(0, 4).map(float)
AWKWARD = st.sampled_from([0.0, -0.0, 1.0, 2.0, 3.0, math.inf, -math.inf, math.nan])
Losses = NDArray[np.float64]


def losses(elements: st.SearchStrategy[float] = WHOLE, *, least: int = 0) -> st.SearchStrategy[Losses]:
    shape = st.tuples(st.integers(least, 24), st.integers(1, 5))
    return shape.flatmap(lambda s: arrays(np.float64, s, elements=elements))


@given(losses(least=1))
def test_the_front_is_that_of_moocore(table: Losses) -> None:
    expected = moocore.is_nondominated(table, keep_weakly=True)

    assert pareto_front(table).tolist() == expected.tolist()


@given(losses(AWKWARD))
def test_the_front_is_what_pairwise_comparison_says(table: Losses) -> None:
    sound = [not np.isnan(row).any() for row in table]
    expected = [ok and not any(dominates(other, row) for other in table) for ok, row in zip(sound, table, strict=True)]

    assert pareto_front(table).tolist() == expected


@given(losses(AWKWARD))
def test_whoever_is_off_the_front_is_dominated_by_someone_on_it(table: Losses) -> None:
    on_front = pareto_front(table)

    for row in table[~on_front]:
        assert np.isnan(row).any() or any(dominates(member, row) for member in table[on_front])


@given(losses(least=1), st.randoms(use_true_random=False))
def test_the_order_of_the_rows_changes_nothing(table: Losses, random: object) -> None:
    order = np.random.default_rng(random.randrange(1000)).permutation(len(table))  # type: ignore[attr-defined] # a random.Random

    assert pareto_front(table[order]).tolist() == pareto_front(table)[order].tolist()
    assert hypervolume(table[order], [5.0] * table.shape[1]) == pytest.approx(hypervolume(table, [5.0] * table.shape[1]))


@given(losses(least=1))
def test_equal_rows_are_on_or_off_the_front_together(table: Losses) -> None:
    twice = np.concatenate([table, table])

    mask = pareto_front(twice)

    assert mask[: len(table)].tolist() == mask[len(table) :].tolist() == pareto_front(table).tolist()


@given(losses(least=1))
def test_the_hypervolume_is_that_of_moocore(table: Losses) -> None:
    reference = [3.5] * table.shape[1]
    inside = table[np.all(table < 3.5, axis=1)]
    expected = 0.0
    if len(inside):  # moocore starts at two objectives
        expected = 3.5 - inside.min() if table.shape[1] == 1 else moocore.hypervolume(inside, reference)

    assert hypervolume(table, reference) == pytest.approx(expected, abs=1e-9)


@given(losses(least=1), st.data())
def test_one_more_row_never_shrinks_the_hypervolume(table: Losses, data: st.DataObject) -> None:
    more = data.draw(arrays(np.float64, (1, table.shape[1]), elements=WHOLE))
    reference = [4.5] * table.shape[1]

    before, after = hypervolume(table, reference), hypervolume(np.concatenate([table, more]), reference)

    assert after >= before - 1e-9
    if any(np.all(row <= more[0]) for row in table):
        assert after == pytest.approx(before)


@given(losses(AWKWARD))
def test_a_knee_is_a_finite_member_of_the_front(table: Losses) -> None:
    found = knee(table)

    assert found is None or (pareto_front(table)[found] and np.isfinite(table[found]).all())


@given(losses(least=3), st.floats(0.01, 100), st.floats(-5, 5))
@settings(max_examples=50)
def test_the_knee_does_not_depend_on_units(table: Losses, factor: float, offset: float) -> None:
    moved = table * factor + offset

    first, second = knee(table), knee(moved)

    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert _bulge(table, first) == pytest.approx(_bulge(table, second), abs=1e-6)


def _bulge(table: Losses, row: int) -> float:
    """Sum of the scaled losses of one front member."""
    front = table[pareto_front(table)]
    span = front.max(axis=0) - front.min(axis=0)
    return float(((table[row] - front.min(axis=0)) / np.where(span > 0, span, 1)).sum())
