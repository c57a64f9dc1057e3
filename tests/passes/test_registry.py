"""Passes of users' scripts: edited, undone, of the same name in two files; each sweep gets those of its own script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune import model
from autotune.config import LoadedSweep, parse_sweep
from autotune.errors import ConfigError
from autotune.model import load_script, scripts_in_use
from autotune.passes import registry
from autotune.passes.registry import get_pass, pass_names
from autotune.pipeline import InputFacts, Pipeline

NAME = "PassOfTheRegistryTests"
SOURCE = """
from autotune.passes.base import Pass, PassConfigParam
from autotune.passes.registry import register


@register
class {name}(Pass):
    version = {version}

    @classmethod
    def _default_config(cls, accelerator_spec):
        return {{}}

    def _run_for_config(self, model, config, output_model_path):
        return model


def make_model():
    raise NotImplementedError
"""


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_in_use", dict(model._in_use))
    monkeypatch.setattr(registry, "_of_scripts", {name: dict(found) for name, found in registry._of_scripts.items()})


def written(path: Path, version: int, name: str = NAME) -> Path:
    path.write_text(SOURCE.format(name=name, version=version))
    return path


def version_in_use() -> Any:
    return vars(get_pass(NAME))["version"]


def pipeline(folder: Path, **more: Any) -> Pipeline:
    np.savez(folder / "eval.npz", x=np.zeros((4, 8), np.float32))
    given: dict[str, Any] = {
        "model": {"path": "model.onnx"},
        "data": {"eval": "eval.npz"},
        "metric": "accuracy",
        "chain": [{"slot": "own", "pass": NAME}],
        **more,
    }
    return Pipeline(LoadedSweep(parse_sweep(given), folder), InputFacts(opset=17))


def test_a_script_that_is_edited_and_edited_back_gives_the_pass_that_stands_in_it(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    found = []
    for version in (1, 2, 1, 1, 3):
        load_script(written(script, version), who="script")
        found.append(version_in_use())

    assert found == [1, 2, 1, 1, 3]
    assert sum(path == script for path in scripts_in_use().values()) == 1


def test_a_pass_that_was_edited_away_is_no_pass_any_more(tmp_path: Path) -> None:
    load_script(written(tmp_path / "mine.py", 1), who="script")
    load_script(written(tmp_path / "mine.py", 1, name="AnotherOfTheRegistryTests"), who="script")

    assert NAME not in pass_names()
    with pytest.raises(ConfigError, match=f"a pass must be a known name; got '{NAME}'"):
        get_pass(NAME)


def test_a_script_that_fails_registers_nothing(tmp_path: Path) -> None:
    script = written(tmp_path / "mine.py", 1)
    script.write_text(script.read_text() + "\nraise RuntimeError('halfway')\n")

    with pytest.raises(ConfigError, match="halfway"):
        load_script(script, who="script")

    assert NAME not in pass_names()


def test_each_sweep_of_a_process_gets_the_pass_of_its_own_script(tmp_path: Path) -> None:
    one, other = (written(tmp_path / f"{name}.py", version) for version, name in enumerate(("one", "other")))

    found = [vars(pipeline(tmp_path, script=script.name).classes[NAME])["version"] for script in (one, other, one)]

    assert found == [0, 1, 0]


def test_two_scripts_of_one_sweep_with_a_pass_of_the_same_name_are_refused_and_both_named(tmp_path: Path) -> None:
    script, net = written(tmp_path / "script.py", 1), written(tmp_path / "net.py", 2)
    load_script(net, who="model")  # as whoever looks at the model does before

    with pytest.raises(ConfigError) as caught:
        pipeline(tmp_path, script="script.py", model={"script": "net.py"})

    assert f"{NAME} must be the name of one pass of a sweep; got one in each of {net} and {script}" in str(caught.value)


def test_a_pass_in_the_model_s_script_is_told_to_belong_into_script(tmp_path: Path) -> None:
    load_script(written(tmp_path / "net.py", 2), who="model")

    with pytest.raises(ConfigError, match=r"which every trial loads; got PassOfTheRegistryTests in .*net.py. Write script: net.py"):
        pipeline(tmp_path, model={"script": "net.py"})
    with pytest.raises(ConfigError, match=f"a pass must be a known name; got '{NAME}'"):
        pipeline(tmp_path)  # a sweep that has nothing to do with that script


def test_a_script_can_not_take_the_name_of_a_built_in_pass_loaded_or_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"SmoothQuant is already that of autotune\.passes\.smooth_quant"):
        load_script(written(tmp_path / "mine.py", 1, name="SmoothQuant"), who="script")

    assert get_pass("SmoothQuant").__module__ == "autotune.passes.smooth_quant"
