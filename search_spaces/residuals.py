"""Conditions of which some parents are known: what is left of their tables, each different remainder once.

Two walks that leave the same remainder of every condition have the same future. So a condition on many parents with few rows costs as
many cases as its rows can be told apart in, not as many as its parents have values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.search_spaces.parameters import INACTIVE, Inactive, Invalid

ABSENT = -1
"""Stands for the index of a choice where a variable is inactive."""

Notes = tuple[int, ...]
"""Numbers of the rows that were looked up on the way."""

Offer = tuple[int, ...] | Inactive | Invalid
"""What a condition comes to: indices of choices, or one of the two marks."""


@dataclass(frozen=True)
class _Table:
    """A condition whose parents at `positions` are still unknown. Rows and the default lead to the numbers of other remainders."""

    positions: tuple[int, ...]
    rows: tuple[tuple[tuple[int, ...], Notes, int], ...]
    default_notes: Notes
    default: int


class Remainders:
    """A store of conditions and of what is left of them; a number stands for each, equal for equal ones."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._contents: list[Any] = []
        self._looks_at: list[frozenset[int]] = []
        self._known: dict[tuple[int, int, int], tuple[Notes, int]] = {}
        self._inactive = self.offer(INACTIVE)

    def offer(self, offer: Offer) -> int:
        """Number of a branch that depends on nothing more."""
        return self._number(offer, frozenset())

    def table(self, positions: tuple[int, ...], rows: Sequence[tuple[tuple[int, ...], Notes, int]], default: int) -> int:
        """Number of a condition: `rows` are (choices at the positions, notes, number of the branch)."""
        return self._reduced(positions, tuple(rows), (), default)[1]

    def content(self, number: int) -> Offer:
        """What a condition comes to once all its parents are known."""
        offer: Offer = self._contents[number]
        assert not isinstance(offer, _Table), "a parent is not known yet"
        return offer

    def looks_at(self, number: int) -> frozenset[int]:
        """Positions that what is left still looks at."""
        return self._looks_at[number]

    def given(self, number: int, position: int, choice: int) -> tuple[Notes, int]:
        """What is left once the variable at a position has a choice (or is `ABSENT`), and the rows that are now sure to be looked up."""
        if position not in self._looks_at[number]:
            return (), number
        asked = (number, position, choice)
        if asked not in self._known:
            self._known[asked] = self._narrowed(self._contents[number], position, choice)
        return self._known[asked]

    def _narrowed(self, table: _Table, position: int, choice: int) -> tuple[Notes, int]:
        at = table.positions.index(position) if position in table.positions else -1
        rows = []
        for key, notes, branch in table.rows:
            if at < 0 or key[at] == choice:
                more, left = self.given(branch, position, choice)
                rows.append((key if at < 0 else key[:at] + key[at + 1 :], notes + more, left))
        if at >= 0 and choice == ABSENT:
            default_notes: Notes = ()
            default = self._inactive  # no row lists the absent parent: inactive, whatever the default
        else:
            more, default = self.given(table.default, position, choice)
            default_notes = table.default_notes + more
        positions = table.positions if at < 0 else table.positions[:at] + table.positions[at + 1 :]
        return self._reduced(positions, tuple(rows), default_notes, default)

    def _reduced(
        self, positions: tuple[int, ...], rows: tuple[tuple[tuple[int, ...], Notes, int], ...], default_notes: Notes, default: int
    ) -> tuple[Notes, int]:
        if not positions:
            return (rows[0][1], rows[0][2]) if rows else (default_notes, default)
        if not rows and not default_notes and default == self._inactive:
            return (), default
        below = [self._looks_at[branch] for _, _, branch in rows]
        return (), self._number(_Table(positions, rows, default_notes, default), frozenset(positions).union(self._looks_at[default], *below))

    def _number(self, content: Any, looks_at: frozenset[int]) -> int:
        number = self._numbers.setdefault(content, len(self._contents))
        if number == len(self._contents):
            self._contents.append(content)
            self._looks_at.append(looks_at)
        return number


def told_apart(rows: Mapping[int, set[int]], position: int, choice: int) -> int:
    """The choice itself where some row names it, else one number for all that no row names."""
    return choice if choice == ABSENT or choice in rows.get(position, ()) else ABSENT - 1
