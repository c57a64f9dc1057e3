"""What an import loads, and who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SLOW = {"onnx", "onnxruntime", "onnxscript", "onnxslim", "optuna", "pandas", "pyarrow", "ray", "sklearn", "torch", "torch_pruning", "transformers"}
MAY_IMPORT_RAY = {Path("autotune/sweep/ray_tune.py"), Path("search_spaces/ray_space.py")}


def sources() -> list[Path]:
    """The packaged Python files, relative to the root."""
    found = []
    for folder in ("autotune", "search_spaces", "passes", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT)
            if relative.parts[:2] not in (
                ("autotune", "passes"),
                ("autotune", "search_spaces"),
                ("autotune", "benchmarks"),
                ("benchmarks", "comparisons"),
            ):
                found.append(relative)
    return found


def packages_imported(nodes: list[ast.stmt] | Iterator[ast.AST]) -> set[str]:
    """Top-level names of the packages that these statements import."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def run_when_imported(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that importing the module runs: functions are left out, and what only a type checker reads."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from run_when_imported(node.orelse)
            continue
        yield node
        for block in ("body", "orelse", "finalbody"):
            yield from run_when_imported(getattr(node, block, []))
        for handler in getattr(node, "handlers", []):
            yield from run_when_imported(handler.body)


def loaded_by(statement: str) -> set[str]:
    """Slow packages that are loaded after `statement` ran in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return SLOW & set(done.stdout.split())


def test_the_probe_sees_what_is_loaded() -> None:
    assert loaded_by("import onnx") == {"onnx"}


@pytest.mark.parametrize("module", ["autotune", "autotune.cli", "autotune.passes.registry", "autotune.search_spaces", "autotune.sweep.run"])
def test_importing_loads_no_slow_library(module: str) -> None:
    assert loaded_by(f"import {module}") == set()


@pytest.mark.parametrize("source", sources(), ids=str)
def test_slow_libraries_are_imported_inside_functions(source: Path) -> None:
    tree = ast.parse((ROOT / source).read_text())

    assert packages_imported(run_when_imported(tree.body)) & SLOW == set()


def test_only_the_two_modules_meant_for_it_import_ray() -> None:
    importers = {source for source in sources() if "ray" in packages_imported(ast.walk(ast.parse((ROOT / source).read_text())))}

    assert importers == MAY_IMPORT_RAY


@pytest.mark.parametrize("source", sources(), ids=str)
def test_the_project_imports_itself_by_its_full_name(source: Path) -> None:
    nodes = list(ast.walk(ast.parse((ROOT / source).read_text())))

    assert packages_imported(iter(nodes)) & {"passes", "search_spaces", "benchmarks", "tests"} == set()
    assert not [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level], "write autotune.…, not a relative import"


def test_imports_go_down_only() -> None:
    done = subprocess.run([str(Path(sys.executable).with_name("lint-imports")), "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout[-3000:]
