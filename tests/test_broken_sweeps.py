"""Sweep files with one fault each, through the real command: the exact message, status 2, nothing written, no traceback.

The first line of a file in `broken_sweeps/` holds the message; `{folder}` stands for the folder it lies in, `{cpus}` for the CPUs of
this process. A second line `# refused by the schema too` marks the faults of structure that an editor sees with the published schema.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner

from autotune.cli import main
from autotune.schema import sweep_schema
from autotune.sweep_text import read_text, read_yaml
from autotune.target import effective_cpus

BROKEN = sorted((Path(__file__).parent / "broken_sweeps").glob("*.yaml"))
STRUCTURAL = [path for path in BROKEN if "# refused by the schema too\n" in path.read_text().splitlines(keepends=True)[1:2]]
FIT_FOR_A_SUBPROCESS = [path for path in BROKEN if path.stem.partition("_")[2] in ("misspelt_section", "python_tag", "unknown_pass")]


@pytest.fixture(scope="module")
def folder(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that broken sweeps name: sound ones, and some that have a fault of their own."""
    folder = tmp_path_factory.mktemp("broken") / "here"
    shutil.copytree(digits, folder)
    rows = np.load(digits / "eval.npz")
    np.savez(folder / "no_labels.npz", x=rows["x"])
    np.savez(folder / "other_names.npz", image=rows["x"], labels=rows["labels"])
    np.savez(folder / "same_rows.npz", x=rows["x"][:50])
    (folder / "text.onnx").write_text("hello")
    (folder / "broken.py").write_text("import nothing_of_this_name\n")
    return folder


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(sweep_schema())


def expected(path: Path, folder: Path) -> str:
    message = path.read_text().splitlines()[0].removeprefix("# error: ")
    return message.replace("{folder}", str(folder)).replace("{cpus}", str(effective_cpus()))


def everything(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(p), p.stat().st_size) for p in folder.rglob("*") if "__pycache__" not in p.parts)


def test_there_are_broken_files_of_every_kind() -> None:
    assert len(BROKEN) >= 40
    assert len(STRUCTURAL) >= 20
    assert len(FIT_FOR_A_SUBPROCESS) == 3


@pytest.mark.parametrize("path", BROKEN, ids=lambda p: p.stem)
def test_a_broken_sweep_gets_exactly_its_message(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copyfile(path, folder / "sweep.yaml")
    monkeypatch.chdir(folder)
    before = everything(folder)

    done = CliRunner().invoke(main, ["plan", "sweep.yaml"])

    assert done.stderr == f"error: {expected(path, folder)}\n"
    assert done.exit_code == 2
    assert done.stdout == ""
    assert everything(folder) == before


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize("path", FIT_FOR_A_SUBPROCESS, ids=lambda p: p.stem)
def test_a_broken_sweep_gets_its_message_in_a_process_of_its_own(path: Path, command: str, folder: Path) -> None:
    shutil.copyfile(path, folder / "sweep.yaml")
    before = everything(folder)

    done = subprocess.run(
        [sys.executable, "-m", "autotune", command, "sweep.yaml"], cwd=folder, capture_output=True, text=True, check=False, env=dict(os.environ)
    )

    assert (done.returncode, done.stderr, done.stdout) == (2, f"error: {expected(path, folder)}\n", "")
    assert everything(folder) == before


@pytest.mark.parametrize("path", STRUCTURAL, ids=lambda p: p.stem)
def test_a_fault_of_structure_is_refused_by_the_schema_too(path: Path, schema: jsonschema.Draft202012Validator) -> None:
    text = read_text(path)
    data, _ = read_yaml(text, path.name)

    assert not schema.is_valid(data)
