"""The matrix of passes by awkward models that a test run prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

_CELLS: pytest.StashKey[list[Any]] = pytest.StashKey()
_LAYOUT: pytest.StashKey[Callable[[Sequence[Any]], list[str]]] = pytest.StashKey()


@pytest.fixture
def shown(request: pytest.FixtureRequest) -> Callable[[Sequence[Any], Callable[[Sequence[Any]], list[str]]], None]:
    """Call it with a column's cells and the function that lays all cells out in lines: printed at the end of the run."""

    def note(cells: Sequence[Any], layout: Callable[[Sequence[Any]], list[str]]) -> None:
        stash = request.config.stash
        stash.setdefault(_CELLS, []).extend(cells)
        stash[_LAYOUT] = layout

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the matrix, when any of its columns ran."""
    if cells := config.stash.get(_CELLS, []):
        terminalreporter.section("passes by awkward models")
        terminalreporter.write_line("\n".join(config.stash[_LAYOUT](cells)))
