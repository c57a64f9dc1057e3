"""The folders, the links between them and the package list agree; a second copy of a module can't be loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from autotune.passes.registry import ALIASES, BUILT_IN

ROOT = Path(__file__).resolve().parent.parent
MAPPED = ("benchmarks", "passes", "search_spaces")
NOT_PACKAGED = {"tests", "examples", "docs", "build", "dist", "demo", "runs"}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def folders_with_init() -> set[str]:
    """Folders under the root that hold an `__init__.py`, as dotted names; links, hidden folders and installations are not entered."""
    found = set()
    for folder, names, files in os.walk(ROOT):
        names[:] = [n for n in names if n[0] != "." and not (Path(folder) / n).is_symlink() and not (Path(folder) / n / "pyvenv.cfg").exists()]
        if Path(folder) == ROOT:
            names[:] = [n for n in names if n not in NOT_PACKAGED]
        if "__init__.py" in files:
            found.add(".".join(Path(folder).relative_to(ROOT).parts))
    return found


def test_every_folder_with_an_init_is_in_the_package_list() -> None:
    expected = {f"autotune.{name}" if name.split(".")[0] in MAPPED else name for name in folders_with_init()}

    packages = project()["tool"]["setuptools"]["packages"]

    assert set(packages) == expected
    assert len(packages) == len(expected)


def test_every_package_is_mapped_to_its_folder() -> None:
    setuptools = project()["tool"]["setuptools"]

    assert set(setuptools["package-dir"]) == set(setuptools["packages"])
    for package, folder in setuptools["package-dir"].items():
        assert (ROOT / folder / "__init__.py").is_file(), f"{package} is mapped to {folder}, which has no __init__.py"


@pytest.mark.parametrize("name", MAPPED)
def test_the_link_in_the_package_is_relative_and_leads_to_the_top_folder(name: str) -> None:
    link = ROOT / "autotune" / name

    assert link.is_symlink(), f"autotune/{name} must be a link: was it checked out by a tool that writes links as text?"
    assert os.readlink(link) == f"../{name}"
    assert (link / "__init__.py").samefile(ROOT / name / "__init__.py")


def test_the_package_holds_no_other_link() -> None:
    links = sorted(path.name for path in (ROOT / "autotune").rglob("*") if path.is_symlink())

    assert links == sorted(MAPPED)


@pytest.mark.parametrize("name", MAPPED)
def test_a_second_copy_of_a_mapped_folder_is_refused(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert f"ImportError: import autotune.{name}, not {name}" in done.stderr


def test_the_modules_under_test_are_those_of_this_tree() -> None:
    import autotune.benchmarks
    import autotune.passes
    import autotune.search_spaces

    for module in (autotune.benchmarks, autotune.passes, autotune.search_spaces):
        folder = module.__name__.rpartition(".")[2]
        assert Path(str(module.__file__)).samefile(ROOT / folder / "__init__.py")


@pytest.mark.parametrize(("name", "module"), BUILT_IN.items())
def test_a_built_in_pass_has_a_file_of_its_own_and_a_test_module(name: str, module: str) -> None:
    source = ROOT / "passes" / f"{module}.py"
    tests = ROOT / "tests" / "passes" / f"test_{module}.py"

    assert source.is_file()
    assert re.search(rf"^class {name}\(\w+\):", source.read_text(), re.MULTILINE)  # a Pass, or another with its mode fixed
    assert tests.is_file()
    assert re.search(rf"\b{name}\b", tests.read_text())


def test_an_alias_leads_to_a_built_in_pass() -> None:
    assert set(ALIASES.values()) <= set(BUILT_IN)
    assert not set(ALIASES) & set(BUILT_IN)


def test_every_requirement_is_pinned_once_and_within_its_limits() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pins = {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines}
    table = project()["project"]
    requirements = [Requirement(text) for text in sum(table["optional-dependencies"].values(), table["dependencies"])]

    assert len(pins) == len(lines)
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{requirement.name} has no pin: run `make pins`"
        assert requirement.specifier.contains(pins[name], prereleases=True), f"{requirement} does not allow its pin {pins[name]}"


def test_every_requirement_has_its_reason_in_the_decision_record() -> None:
    from packaging.requirements import Requirement

    record = (ROOT / "docs" / "decisions" / "0002-dependencies.md").read_text()
    table = project()["project"]
    names = {Requirement(text).name for text in sum(table["optional-dependencies"].values(), table["dependencies"])}

    told = set(re.findall(r"^\| `([^`]+)`", record, re.MULTILINE))

    assert told == names
