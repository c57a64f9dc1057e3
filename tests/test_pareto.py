"""Front, hypervolume and knee on cases worked out by hand, and on many rows."""

from __future__ import annotations

import math
import tracemalloc

import moocore
import numpy as np
import pytest

from autotune.pareto import dominates, hypervolume, knee, pareto_front


def test_dominating_takes_no_worse_everywhere_and_better_somewhere() -> None:
    assert dominates([1, 2], [1, 3])
    assert not dominates([1, 2], [1, 2])
    assert not dominates([1, 3], [2, 2])
    assert not dominates([1, math.nan], [2, 3])


def test_rows_with_nan_are_never_on_the_front_and_push_nobody_off() -> None:
    losses = [[math.nan, 0.0], [1.0, 1.0], [2.0, math.nan]]

    assert pareto_front(losses).tolist() == [False, True, False]


def test_an_infinite_loss_is_just_a_very_bad_one() -> None:
    assert pareto_front([[math.inf, 0.0], [1.0, 1.0], [math.inf, 1.0]]).tolist() == [True, True, False]
    assert pareto_front([[math.inf, math.inf]]).tolist() == [True]


def test_no_rows_make_an_empty_front_without_volume_or_knee() -> None:
    empty = np.empty((0, 2))

    assert pareto_front(empty).shape == (0,)
    assert hypervolume(empty, [1.0, 1.0]) == 0.0
    assert knee(empty) is None


def test_a_table_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="trials, objectives"):
        pareto_front([1.0, 2.0])
    with pytest.raises(ValueError, match="2 finite numbers"):
        hypervolume([[1.0, 2.0]], [3.0])
    with pytest.raises(ValueError, match="finite"):
        hypervolume([[1.0, 2.0]], [3.0, math.inf])
    with pytest.raises(ValueError, match="minus infinity"):
        hypervolume([[-math.inf, 2.0]], [3.0, 3.0])


@pytest.mark.parametrize("objectives", [2, 3])
def test_a_hundred_thousand_rows_are_compared_without_a_square_of_memory(objectives: int) -> None:
    random = np.random.default_rng(0)
    losses = random.random((100_000, objectives))
    losses[:, 0] = np.round(losses[:, 0], 3)  # ties
    losses[50_000:] = 1.5 - losses[50_000:].mean(axis=1, keepdims=True) + losses[50_000:] * 0.01

    tracemalloc.start()
    mask = pareto_front(losses)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak_bytes < 200e6  # 10^10 comparisons at a byte each would be 10 GB
    assert mask.tolist() == moocore.is_nondominated(losses, keep_weakly=True).tolist()


def test_a_front_of_a_hundred_thousand_members_is_found_whole() -> None:
    x = np.linspace(0, 1, 100_000)
    losses = np.stack([x, 1 - x, np.zeros_like(x)], axis=1)

    assert pareto_front(losses).all()


def test_the_hypervolume_of_a_staircase_is_the_sum_of_its_rectangles() -> None:
    losses = [[1.0, 3.0], [2.0, 2.0], [3.0, 1.0], [3.0, 3.0], [9.0, 0.0], [math.nan, 0.0]]

    # Reference (4, 4): 3 x 1 below (1, 3), then 2 x 1 and 1 x 1; (9, 0) lies outside.
    assert hypervolume(losses, [4.0, 4.0]) == pytest.approx(3 + 2 + 1)


def test_the_hypervolume_of_overlapping_boxes_counts_the_overlap_once() -> None:
    losses = [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]

    # Reference (2, 2, 2): boxes 2 x 2 x 1 and 1 x 2 x 2, overlap 1 x 2 x 1.
    assert hypervolume(losses, [2.0, 2.0, 2.0]) == pytest.approx(4 + 4 - 2)


def test_a_point_on_the_reference_adds_nothing() -> None:
    assert hypervolume([[4.0, 1.0]], [4.0, 4.0]) == 0.0


def test_the_knee_is_the_member_farthest_below_the_chord() -> None:
    losses = [[0.0, 1.0], [0.1, 0.6], [0.2, 0.2], [0.6, 0.1], [1.0, 0.0], [0.9, 0.9]]

    assert knee(losses) == 2


def test_a_straight_front_has_no_knee() -> None:
    assert knee([[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]]) is None
    assert knee([[0.0, 1.0], [0.49, 0.49], [1.0, 0.0]]) is None


def test_two_points_have_no_knee_however_often_they_are_there() -> None:
    assert knee([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]) is None


def test_a_front_with_three_objectives_bends_at_its_middle() -> None:
    losses = [[0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0], [0.3, 0.3, 0.3]]

    assert knee(losses) == 3
