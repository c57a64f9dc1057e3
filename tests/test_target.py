"""The target and the surroundings of a number."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import onnxruntime
import pytest

from autotune.target import ACCELERATOR_OF, SHORT_PROVIDER_NAMES, AcceleratorSpec, Target, effective_cpus, library_versions, surroundings


def test_the_effective_cpus_are_no_more_than_the_process_may_use() -> None:
    assert 1 <= effective_cpus() <= len(os.sched_getaffinity(0))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_a_process_pinned_to_one_cpu_has_one() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        "from autotune.target import effective_cpus; print(effective_cpus())"
    )  # fmt: skip

    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert shown.strip() == "1"


def test_threads_not_named_are_as_many_as_there_are_cpus() -> None:
    assert Target().run_threads == effective_cpus()
    assert Target(threads=3).run_threads == 3


def test_a_target_tells_passes_its_accelerator_and_provider() -> None:
    assert Target(execution_provider="CUDAExecutionProvider", accelerator_type="gpu").accelerator == AcceleratorSpec("gpu", "CUDAExecutionProvider")


def test_every_short_name_stands_for_a_provider_with_an_accelerator() -> None:
    assert set(SHORT_PROVIDER_NAMES.values()) == set(ACCELERATOR_OF)


def test_providers_are_spelt_as_the_runtime_spells_them() -> None:
    known = set(onnxruntime.get_all_providers())

    assert set(SHORT_PROVIDER_NAMES.values()) - known <= {"ROCMExecutionProvider"}  # gone from recent releases


def test_surroundings_name_machine_and_versions_and_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORT_SOMETHING", "1")
    monkeypatch.setenv("SECRET_TOKEN", "hush")

    found = surroundings()

    assert found.cpu_model
    assert found.effective_cpus == effective_cpus()
    assert found.versions["onnxruntime"] == onnxruntime.__version__
    assert found.ort_variables["ORT_SOMETHING"] == "1"
    text = json.dumps(found.to_json())
    assert json.loads(text)["effective_cpus"] == effective_cpus()
    assert "hush" not in text


def test_versions_of_what_is_not_installed_are_left_out() -> None:
    assert "passtune" in library_versions()
    assert all(library_versions().values())
