"""F13: versions, variables, scripts and data change. Whatever an artifact depends on makes another key; other surroundings share no front."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.errors import ConfigError
from autotune.sweep.result import SweepResult
from autotune.sweep.run import run

PASS = '''
"""A pass of the user's own."""

from autotune.passes.base import ONNX, Pass, PassConfigParam, PassContract
from autotune.passes.registry import register
from autotune.passes.base import ParamCategory


@register
class Mine(Pass):
    """Do nothing."""

    contract = PassContract(accepts=ONNX, returns=ONNX, version=1, ep_dependent=True)

    @classmethod
    def _default_config(cls, accelerator_spec):
        return {
            "strength": PassConfigParam(type_=float, default_value=0.5, description="how much"),
            "table": PassConfigParam(type_=str, category=ParamCategory.PATH, default_value=None, description="a file"),
            "score": PassConfigParam(type_=str, category=ParamCategory.OBJECT, default_value=None, description="a function"),
        }

    def _run_for_config(self, model, config, output_model_path):
        return model.written(output_model_path, proto=model.load())
'''
HELPER = "def score(model):\n    return 0\n"

PROGRAM = """
import json
import sys
from pathlib import Path

from autotune.config import LoadedSweep, parse_sweep
from autotune.model import ONNXModelHandler, load_script
from autotune.passes.registry import get_pass
from autotune.pipeline import Step
from autotune.trial import TrialRunner

folder = Path(sys.argv[1])
given = json.loads(sys.argv[2])
sweep = LoadedSweep(parse_sweep(json.loads((folder / "sweep.json").read_text())), folder)
load_script(folder / "mine.py", who="script")
target = sweep.target.accelerator
model = ONNXModelHandler.from_folder(folder / "model")
with TrialRunner(folder / "run", sweep) as runner:
    keys = {}
    for name in ("Mine", "OnnxQuantization"):
        config = get_pass(name).resolve(target, {**given.get(name, {})})
        keys[name] = runner.store.key(runner._key_facts(Step("slot", name, config), model, model.digest))
    keys["measurement"] = runner._measurement(model.digest, model).name
print(json.dumps(keys))
"""


@pytest.fixture(scope="module")
def template(digits: Path, sweep_of: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with a model, data, a user's pass and a sweep that names them, and the keys that come of it."""
    folder = tmp_path_factory.mktemp("versions") / "place"
    shutil.copytree(digits, folder)
    (folder / "model").mkdir()
    shutil.copyfile(digits / "model.onnx", folder / "model" / "model.onnx")
    (folder / "mine.py").write_text(PASS)
    (folder / "helper.py").write_text(HELPER)
    (folder / "table.bin").write_bytes(b"1")
    (folder / "metric.py").write_text("def good(outputs, labels):\n    return 0.5\n")
    sweep = sweep_of(folder, script=str(folder / "mine.py"), metric=f"{folder / 'metric.py'}:good", chain=[{"slot": "mine", "pass": "Mine"}])
    (folder / "sweep.json").write_text(json.dumps(sweep))
    shutil.copytree(folder, folder.with_name("kept"))
    return folder, keys_of(folder)


@pytest.fixture
def place(template: tuple[Path, dict[str, str]]) -> Path:
    """That folder, as it was."""
    folder, _ = template
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("kept"), folder)
    return folder


def keys_of(place: Path, env: dict[str, str] | None = None) -> dict[str, str]:
    given = {
        "Mine": {"table": str(place / "table.bin"), "score": f"{place / 'helper.py'}:score"},
        "OnnxQuantization": {"quant_mode": "static", "calibration_data_dir": str(place / "calib.npz")},
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(place), json.dumps(given)], capture_output=True, text=True, check=False, env={**os.environ, **(env or {})}
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def version(place: Path, distribution: str) -> dict[str, str]:
    """Surroundings in which another version of a distribution is installed, as far as its metadata tell."""
    info = place / "site" / f"{distribution}-99.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 99.0\n")
    path = os.pathsep.join([str(place / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path}


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def other_rows(path: Path) -> None:
    with np.load(path) as file:
        arrays = dict(file)
    arrays["x"] = arrays["x"][::-1]
    np.savez(path, **arrays)


def edit_sweep(place: Path, section: str | None, key: str, value: Any) -> None:
    sweep = json.loads((place / "sweep.json").read_text())
    (sweep.setdefault(section, {}) if section else sweep)[key] = value
    (place / "sweep.json").write_text(json.dumps(sweep))


ALL = {"Mine", "OnnxQuantization", "measurement"}
ARTIFACTS = {"Mine", "OnnxQuantization"}
CHANGES: dict[str, tuple[Callable[[Path], dict[str, str] | None], set[str]]] = {
    "another onnxruntime": (lambda p: version(p, "onnxruntime"), ALL),
    "another onnx": (lambda p: version(p, "onnx"), ALL),
    "an ORT_ variable": (lambda p: {"ORT_SOMETHING": "1"}, ALL),
    "another version of the pass": (lambda p: edit(p / "mine.py", "version=1", "version=2"), {"Mine"}),
    "another text of the user's pass": (lambda p: edit(p / "mine.py", "proto=model.load()", "proto=model.load( )"), {"Mine"}),
    "another text of a function that the pass is given": (lambda p: edit(p / "helper.py", "return 0", "return 1"), {"Mine"}),
    "other bytes in a file that the pass is given": (lambda p: (p / "table.bin").write_bytes(b"2") and None, {"Mine"}),
    "other calibration rows under the same name": (lambda p: other_rows(p / "calib.npz"), {"OnnxQuantization"}),
    "another seed": (lambda p: edit_sweep(p, None, "seed", 1), ALL),
    "other evaluation rows under the same name": (lambda p: other_rows(p / "eval.npz"), {"measurement"}),
    "another text of the metric": (lambda p: edit(p / "metric.py", "0.5", "0.6"), {"measurement"}),
    "another setting of the measurement": (lambda p: edit_sweep(p, "measure", "ratio_width", 0.2), {"measurement"}),
    "another batch size": (lambda p: edit_sweep(p, "target", "batch_size", 2), {"measurement"}),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_an_artifact_or_a_measurement_depends_on_is_in_its_key(
    template: tuple[Path, dict[str, str]], place: Path, injected: Callable[[str], None], change: str
) -> None:
    act, affected = CHANGES[change]
    before = template[1]
    env = act(place)
    injected("F13")

    after = keys_of(place, env)

    assert {name for name in before if before[name] != after[name]} == affected


def test_the_same_in_another_process_is_the_same_key(template: tuple[Path, dict[str, str]], place: Path, injected: Callable[[str], None]) -> None:
    injected("F13")

    assert keys_of(place, {"SOME_VARIABLE": "1", "PYTHONHASHSEED": "7"}) == template[1]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("ort_variables", {"ORT_X": "1"}, "ort_variables"), ("versions", {"onnxruntime": "1.0"}, "versions"), ("cpu_model", "another CPU", "cpu_model")],
)
def test_a_run_never_goes_on_in_other_surroundings_and_says_which(
    finished: SweepResult, digits: Path, sweep_of: Callable[..., dict[str, Any]], tmp_path: Path, injected: Callable[[str], None],
    name: str, value: Any, words: str,
) -> None:  # fmt: skip
    out = tmp_path / "out"
    shutil.copytree(finished.run, out)
    content = json.loads((out / "run.json").read_text())
    content["surroundings"][name] = value
    (out / "run.json").write_text(json.dumps(content))
    injected("F13")

    with pytest.raises(ConfigError, match=rf"a run goes on in the surroundings that it was begun in; got other {words}"):
        run(sweep_of(digits), out)


def test_an_ort_variable_set_after_the_start_is_refused_on_resume(
    finished: SweepResult, digits: Path, sweep_of: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, injected: Callable[[str], None]
) -> None:
    monkeypatch.setenv("ORT_SOMETHING_NEW", "1")
    injected("F13")

    with pytest.raises(ConfigError, match="other ort_variables"):
        run(sweep_of(digits), finished.run)
