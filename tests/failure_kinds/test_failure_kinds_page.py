"""The page on kinds of failure has every kind, and the tests that it names are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parent
PAGE = TESTS.parent / "docs" / "failure-kinds.md"
KINDS = 50
MATRIX = "test_pass_matrix.py"


def rows() -> list[tuple[int, list[tuple[str, str]]]]:
    """Number of each row and the tests that it names, by file and function."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        row = re.match(r"\| (\d+) \|", line)
        if row:
            found.append((int(row[1]), re.findall(r"`([\w/]+\.py)::(\w+)`", line)))
    return found


def functions_of(path: Path) -> set[str]:
    return {n.name for n in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")}


def test_the_page_has_every_kind_in_order() -> None:
    assert [number for number, _ in rows()] == list(range(1, KINDS + 1))


def test_every_kind_names_tests_that_are_there() -> None:
    for number, named in rows():
        assert named, number
        for file, function in named:
            assert (TESTS / file).is_file(), (number, file)
            assert function in functions_of(TESTS / file), (number, file, function)


def test_every_test_of_a_kind_is_on_the_page() -> None:
    named = {(file, function) for _, tests in rows() for file, function in tests}

    for path in HERE.glob("test_*.py"):
        if path.name not in (MATRIX, Path(__file__).name):
            missing = {(f"failure_kinds/{path.name}", name) for name in functions_of(path)} - named
            assert not missing
