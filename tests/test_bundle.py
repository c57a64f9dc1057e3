"""The bundle: loads with onnxruntime and numpy alone, says what it is, and a flipped byte anywhere is found and named."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from autotune.bundle import BUNDLE_FILE, run_samples, verify_bundle
from autotune.digest import files_under
from autotune.errors import VerificationError
from autotune.sweep.result import SweepResult


@pytest.fixture
def bundle(finished: SweepResult, tmp_path: Path) -> Path:
    source = finished.bundle()
    assert source is not None
    shutil.copytree(source, tmp_path / "moved.bundle")
    return tmp_path / "moved.bundle"


def failed(bundle: Path) -> list[str]:
    return [c.message for c in verify_bundle(bundle) if c.state == "failed"]


def test_a_moved_bundle_verifies(bundle: Path) -> None:
    assert failed(bundle) == []


def test_the_readme_runs_the_model_with_onnxruntime_and_numpy_alone(bundle: Path) -> None:
    code = re.search(r"```python\n(.*?)```", (bundle / "README.md").read_text(), re.S)
    assert code is not None
    proof = (
        "\nwant = np.load('sample/outputs_0.npz')['logits']\n"
        "got = session.run(None, dict(np.load('sample/inputs_0.npz')))[0]\n"
        "print('largest difference', abs(got - want).max())\n"
    )
    blocker = "import sys\nfor name in ('autotune', 'onnx', 'torch', 'ray', 'optuna', 'pandas', 'yaml'): sys.modules[name] = None\n"

    done = subprocess.run([sys.executable, "-c", blocker + code[1] + proof], cwd=bundle, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 1e-4


def test_run_options_of_a_bundle_reach_the_runtime_in_the_readme_and_in_verify(bundle: Path) -> None:
    path = bundle / "session.json"
    session = json.loads(path.read_text())
    assert session["run_config_entries"] == session["read_back"]["run_config_entries"] == {}
    path.write_text(json.dumps({**session, "run_config_entries": {"memory.enable_memory_arena_shrinkage": "cpu:7"}}))  # there is no such arena
    code = re.search(r"```python\n(.*?)```", (bundle / "README.md").read_text(), re.S)
    assert code is not None

    done = subprocess.run([sys.executable, "-c", code[1]], cwd=bundle, capture_output=True, text=True, check=False)

    assert "memory arena shrink list" in done.stderr
    with pytest.raises(Exception, match="memory arena shrink list"):
        run_samples({"bundle": str(bundle), "samples": 1, "tolerance": 1e-3, "exact": False})


def test_a_flipped_byte_in_any_file_is_found_and_the_file_named(bundle: Path) -> None:
    names = files_under(bundle)
    assert len(names) > 10
    for name in names:
        path = bundle / name
        whole = path.read_bytes()
        for position in {0, len(whole) // 2, len(whole) - 1}:
            raw = bytearray(whole)
            raw[position] ^= 0x04
            path.write_bytes(raw)
            messages = failed(bundle)
            assert any(name in m for m in messages), f"byte {position} of {name}: {messages}"
        path.write_bytes(whole)
    assert failed(bundle) == []


def test_a_missing_and_a_foreign_file_are_named(bundle: Path) -> None:
    (bundle / "io.json").unlink()
    (bundle / "model" / "extra.bin").write_bytes(b"x")

    messages = failed(bundle)

    assert "io.json is missing" in messages
    assert "model/extra.bin does not belong to the bundle" in messages


def test_a_link_in_a_bundle_is_refused(bundle: Path) -> None:
    (bundle / "model" / "link").symlink_to("/etc/hostname")

    assert "model/link is a link; a bundle holds regular files only" in failed(bundle)


def test_a_damaged_model_is_never_loaded(bundle: Path) -> None:
    path = bundle / "model" / "model.onnx"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")

    assert "load" not in [c.name for c in verify_bundle(bundle)]


def test_a_folder_that_is_no_bundle_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match=f"must hold {BUNDLE_FILE}"):
        verify_bundle(tmp_path)


def test_a_bundle_of_another_major_version_is_refused_by_version(bundle: Path) -> None:
    from autotune.digest import digest_of, dump_json

    content = json.loads((bundle / BUNDLE_FILE).read_text())
    content.pop("self")
    content["schema"] = "bundel/7.0"
    content["self"] = digest_of(content)
    (bundle / BUNDLE_FILE).write_text(dump_json(content))

    assert any("schema bundel/7.0" in m for m in failed(bundle))


def test_a_bundle_holds_recipe_evidence_and_read_back_but_no_path_of_this_machine(bundle: Path, digits: Path) -> None:
    content = json.loads((bundle / BUNDLE_FILE).read_text())
    recipe = yaml.safe_load((bundle / "recipe.yaml").read_text())
    session = json.loads((bundle / "session.json").read_text())

    assert recipe["passes"]
    assert recipe["passes"][-1]["pass"] == "OrtPerfTuning"
    assert all("version" in p and p["config"] for p in recipe["passes"])
    assert session["read_back"]["graph_optimization_level"] == session["graph_optimization_level"]
    assert np.load(bundle / "evidence" / "baseline" / "latency" / "latency.npz")["candidate_ns"].size > 0
    assert content["constraints"][0]["verdict"] in ("certain", "met")
    assert set(content["files"]) == set(files_under(bundle)) - {BUNDLE_FILE}
    for name in ("recipe.yaml", "session.json", "io.json", "env.json", "README.md", "MODEL_CARD.md", BUNDLE_FILE):
        text = (bundle / name).read_text()
        assert str(digits) not in text, name
        assert str(Path.home()) + "/" not in text, name
