"""Every pass on every awkward model ends in a correct model, or says why not; and the program that prints it tells right from wrong."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from autotune.stages import StageRunner

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "comparisons" / "pass_matrix.py"


def loaded() -> ModuleType:
    """The program as a module; it stands outside the packages."""
    spec = importlib.util.spec_from_file_location("pass_matrix_program", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up here
    spec.loader.exec_module(module)
    return module


program = loaded()


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, list[Any]]]:
    """A matrix with a server of its own, and every model opened in it."""
    folder = tmp_path_factory.mktemp("matrix")
    facts = program.generator().write_models(folder / "models")
    with StageRunner(program.PRELOAD) as runner:
        made = program.Matrix(runner, folder / "work")
        yield made, [program.open_model(made, folder / "models", name, facts) for name in sorted(facts)]


def test_models_run_or_do_not_as_they_say(matrix: tuple[Any, list[Any]]) -> None:
    facts = {name: make() for name, make in program.generator().MODELS.items()}

    assert {given.name: given.outputs is not None for given in matrix[1]} == {name: one.runs for name, one in facts.items()}
    assert [given.name for given in matrix[1] if given.died] == ["loop_that_crashes"]
    assert len(facts) >= 45


Shown = Callable[[Sequence[Any], Callable[[Sequence[Any]], list[str]]], None]


def judge(matrix: tuple[Any, list[Any]], column: Any, shown: Shown) -> None:
    made, models = matrix
    cells = [made.cell(given, column) for given in models]
    shown(cells, program.grid)
    wrong = {c.model: f"{c.letter} {c.words}" for c in cells if c.letter in (*program.WRONG, "i")}
    assert not wrong
    assert all(c.words for c in cells if c.letter != "+")


@pytest.mark.parametrize("column", program.COLUMNS, ids=lambda column: str(column.name))
def test_a_pass_ends_in_a_correct_model_or_says_why_not(column: Any, matrix: tuple[Any, list[Any]], shown: Shown) -> None:
    judge(matrix, column, shown)


@pytest.mark.slow  # all of them together
@pytest.mark.parametrize("column", program.MORE_COLUMNS, ids=lambda column: str(column.name))
def test_a_pass_with_other_parameters_ends_in_a_correct_model_or_says_why_not(column: Any, matrix: tuple[Any, list[Any]], shown: Shown) -> None:
    judge(matrix, column, shown)


def test_the_program_prints_the_matrix_and_ends_with_1_only_when_a_cell_is_wrong(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, "--only", "identity_only", "tokens", "--passes", "OnnxOpsetUpgrade", "data", "--json", tmp_path / "cells.json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    cells = json.loads((tmp_path / "cells.json").read_text())
    assert done.returncode == 0, done.stderr
    assert [(c["model"], c["column"], c["letter"]) for c in cells] == [
        ("identity_only", "opset", "+"), ("identity_only", "data", "="), ("tokens", "opset", "+"), ("tokens", "data", "+"),
    ]  # fmt: skip
    assert "identity_only" in done.stdout
    assert "no weight has 128 bytes" in done.stdout


def test_errors_for_users_are_told_from_others() -> None:
    users = 'Traceback (most recent call last):\n  File "x"\nValueError: inner\n\nThe above ...\n\nTraceback (most recent call last):\n  File "y"\n'

    assert program.said_in_words(users + "autotune.errors.PassError: Some: thing.\n")
    assert not program.said_in_words(users + "KeyError: 'w'\n")


def test_differences_are_shares_of_the_norm_and_shapes_count() -> None:
    wanted = {"y": np.array([3.0, 4.0]), "label": np.array([1, 2, 3, 4])}

    assert program.difference(wanted, {"y": np.array([3.0, 4.5]), "label": np.array([1, 2, 3, 4])}) == pytest.approx(0.1)
    assert program.difference(wanted, {"y": np.array([3.0, 4.0]), "label": np.array([1, 2, 3, 5])}) == 0.25
    assert program.difference(wanted, {"y": np.array([3.0]), "label": np.array([1, 2, 3, 4])}) == float("inf")
