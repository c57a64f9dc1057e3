"""Pareto front, hypervolume and knee of a table of losses, one row a trial, one column an objective, all minimized.

Pure functions of finished numbers; noise is the caller's business. Rows that hold NaN take part in nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def dominates(a: ArrayLike, b: ArrayLike) -> bool:
    """Say whether loss vector `a` is at most `b` everywhere and below it somewhere. False as soon as NaN is in either."""
    first, second = np.asarray(a, float), np.asarray(b, float)
    return bool(np.all(first <= second) and np.any(first < second))


def pareto_front(losses: ArrayLike) -> NDArray[np.bool_]:
    """Mark the rows of `losses`, shape (trials, objectives), that no other row dominates. Equal rows are all kept.

    O(n log n) for up to 3 objectives (sweep; sweep with a staircase), O(n x front) beyond; memory is linear in n.
    """
    table = _table(losses)
    on_front = np.zeros(len(table), bool)
    sound = np.flatnonzero(~np.isnan(table).any(axis=1))
    if len(sound) == 0:
        return on_front
    # Distinct rows in lexicographic order: now only an earlier row can dominate a later one, and equality plays no part.
    distinct, where = np.unique(table[sound] + 0.0, axis=0, return_inverse=True)
    on_front[sound] = _front_of_sorted(distinct)[where.reshape(-1)]
    return on_front


def _front_of_sorted(rows: NDArray[np.float64]) -> NDArray[np.bool_]:
    """The front of distinct rows that are sorted by first, then second, ... column."""
    count, objectives = rows.shape
    if objectives == 1:
        return _only_first(count)
    if objectives == 2:
        best_before = np.concatenate([[np.inf], np.minimum.accumulate(rows[:-1, 1])])
        better: NDArray[np.bool_] = rows[:, 1] < best_before
        return better | _only_first(count)  # whose second loss may be infinite
    if objectives == 3:
        return _front_by_staircase(rows)
    kept: list[int] = []
    front = np.empty_like(rows)
    for i, row in enumerate(rows):
        if not np.any(np.all(front[: len(kept)] <= row, axis=1)):
            front[len(kept)] = row
            kept.append(i)
    mask = np.zeros(count, bool)
    mask[kept] = True
    return mask


def _only_first(count: int) -> NDArray[np.bool_]:
    mask = np.zeros(count, bool)
    mask[0] = True
    return mask


def _front_by_staircase(rows: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Sweep along the first loss and keep the front of the other two as steps: `second` rising, `third` falling.

    Source: H. T. Kung, F. Luccio, F. P. Preparata, "On finding the maxima of a set of vectors", 1975.
    """
    mask = np.zeros(len(rows), bool)
    second: list[float] = []
    third: list[float] = []
    for i, (_, y, z) in enumerate(rows.tolist()):
        step = bisect_right(second, y) - 1
        if step >= 0 and third[step] <= z:
            continue
        mask[i] = True
        start = end = bisect_left(second, y)
        while end < len(second) and third[end] >= z:
            end += 1
        second[start:end] = [y]
        third[start:end] = [z]
    return mask


def hypervolume(losses: ArrayLike, reference: Sequence[float]) -> float:
    """Return the volume between the losses, shape (trials, objectives), and the reference point, which is worse than all that counts.

    Rows that are not better than the reference in every objective add nothing. Exact: a sweep for 2 objectives, slices along the last
    objective beyond (exponential in the number of objectives; fine for the 2 to 4 of a sweep). Raises `ValueError` for an infinite
    reference, a loss of minus infinity, or a reference of another length.
    """
    table = _table(losses)
    corner = np.asarray(reference, float)
    if corner.shape != (table.shape[1],) or not np.all(np.isfinite(corner)):
        raise ValueError(f"the reference point must be {table.shape[1]} finite numbers, got {list(reference)}")
    if np.any(np.isneginf(table)):
        raise ValueError("a loss of minus infinity has no hypervolume")
    inside = table[np.all(table < corner, axis=1)]  # False for NaN
    return _volume(inside[pareto_front(inside)], corner)


def _volume(rows: NDArray[np.float64], corner: NDArray[np.float64]) -> float:
    if len(rows) == 0:
        return 0.0
    if rows.shape[1] == 1:
        return float(corner[0] - rows.min())
    if rows.shape[1] == 2:
        ordered = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        ceilings = np.concatenate([[corner[1]], np.minimum.accumulate(ordered[:-1, 1])])
        return float(np.sum((corner[0] - ordered[:, 0]) * np.maximum(ceilings - ordered[:, 1], 0.0)))
    ordered = rows[np.argsort(rows[:, -1], kind="stable")]
    edges = np.append(ordered[:, -1], corner[-1])
    total = 0.0
    for i in range(len(ordered)):
        thickness = edges[i + 1] - edges[i]
        if thickness > 0:
            slice_ = ordered[: i + 1, :-1]
            total += thickness * _volume(slice_[pareto_front(slice_)], corner[:-1])
    return float(total)


FLAT = 0.05  # in units of the normalized front: a bulge below it is no knee


def knee(losses: ArrayLike) -> int | None:
    """Return the row at the knee of the front: the member farthest below the chord between the extremes, after scaling each to 0..1.

    With more than two objectives the chord is the plane of equal sums through the extreme with the smallest sum. None when the front has
    fewer than 3 distinct members, or bulges by less than 5 % of its scaled span. Infinite losses never make the knee.
    """
    table = _table(losses)
    members = np.flatnonzero(pareto_front(table) & np.isfinite(table).all(axis=1))
    if len(members) == 0 or len(np.unique(table[members], axis=0)) < 3:
        return None
    front = table[members]
    low, high = front.min(axis=0), front.max(axis=0)
    span = np.where(high > low, high - low, 1.0)
    sums = ((front - low) / span).sum(axis=1)
    extremes = [float(sums[front[:, k] == low[k]].min()) for k in range(front.shape[1])]
    chosen = int(np.argmin(sums))
    distance = (min(extremes) - float(sums[chosen])) / np.sqrt(front.shape[1])
    return int(members[chosen]) if distance >= FLAT else None


def _table(losses: ArrayLike) -> NDArray[np.float64]:
    table = np.asarray(losses, float)
    if table.ndim != 2 or table.shape[1] == 0:
        raise ValueError(f"losses must have the shape (trials, objectives), got {table.shape}")
    return table
