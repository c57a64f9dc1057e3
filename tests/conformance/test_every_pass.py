"""Every registered pass stands the conformance checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.model import ModelHandler, ONNXModelHandler
from autotune.passes import conformance
from autotune.passes.base import AcceleratorSpec, ParamCategory, Pass, PassConfigParam, PassContract
from autotune.passes.conformance import ConformanceFault, Sample
from autotune.passes.registry import BUILT_IN, get_pass

SPEC = AcceleratorSpec()
POINTS = 8
every_pass = pytest.mark.parametrize("name", list(BUILT_IN))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@every_pass
def test_the_table_is_consistent_and_searchable_names_are_options(name: str) -> None:
    pass_class = get_pass(name)

    conformance.check_registered(pass_class)
    conformance.check_table(pass_class, SPEC)


@every_pass
def test_an_unknown_parameter_is_refused_with_the_nearest_name(name: str, sample_for: Callable[[type[Pass]], Sample]) -> None:
    pass_class = get_pass(name)

    conformance.check_unknown_parameter_is_refused(pass_class, SPEC, sample_for(pass_class))


@every_pass
def test_a_value_of_the_wrong_type_is_refused_by_name(name: str, sample_for: Callable[[type[Pass]], Sample]) -> None:
    pass_class = get_pass(name)

    conformance.check_wrong_types_are_refused(pass_class, SPEC, sample_for(pass_class))


@every_pass
def test_each_point_makes_a_pass_that_survives_pickling(name: str, sample_for: Callable[[type[Pass]], Sample]) -> None:
    pass_class = get_pass(name)
    sample = sample_for(pass_class)

    for config in conformance.configs_to_try(pass_class, SPEC, sample, points=64, seed=0):
        conformance.check_pickling(pass_class, SPEC, config, sample)


@every_pass
def test_results_run_inputs_stay_and_bytes_are_the_same_in_another_process(
    name: str, sample_for: Callable[[type[Pass]], Sample], tmp_path: Path
) -> None:
    pass_class = get_pass(name)
    sample = sample_for(pass_class)
    configs = conformance.configs_to_try(pass_class, SPEC, sample, points=POINTS, seed=0)

    results = [conformance.check_run(pass_class, SPEC, config, sample, tmp_path / str(i)) for i, config in enumerate(configs)]

    conformance.check_same_bytes_elsewhere(pass_class, SPEC, configs, sample, [r.digest for r in results])


class _Broken(Pass):
    """A pass with one fault, chosen by its config."""

    contract = PassContract()

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {"fault": PassConfigParam(type_=str, default_value="none", description="what to do wrong")}

    def _run_for_config(self, model: ONNXModelHandler, config: Mapping[str, Any], output_model_path: Path) -> ModelHandler:
        proto = model.load()
        fault = config["fault"]
        if fault == "changes its input":
            (model.folder / "left.txt").write_text("left behind")
        if fault == "prints":
            print("converting ...")
        if fault == "does not load":
            proto.graph.node[0].op_type = "NoSuchOperator"
        notes = {"changed": False} if fault == "does not say why nothing changed" else {"changed": True}
        if fault == "says unchanged and is not":
            proto.producer_name = "somebody else"
            notes = {"changed": False, "reason": "nothing to do"}
        return model.written(output_model_path, proto=proto, notes=notes)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("changes its input", "input must stay"),
        ("prints", "prints nothing"),
        ("does not say why nothing changed", "must say why"),
        ("says unchanged and is not", "same bytes"),
    ],
)
def test_a_pass_that_breaks_the_contract_is_found_out(fault: str, told: str, samples: dict[str, Sample], tmp_path: Path) -> None:
    own = tmp_path / "model"
    own.mkdir()
    given = samples["onnx"].model
    (own / "model.onnx").write_bytes((given.folder / "model.onnx").read_bytes())
    sample = Sample(ONNXModelHandler.from_folder(own), samples["onnx"].arrays)

    with pytest.raises(ConformanceFault, match=told):
        conformance.check_run(_Broken, SPEC, {"fault": fault}, sample, tmp_path / "out")


@pytest.mark.parametrize(
    ("notes", "told"),
    [
        ({}, "must tell what share"),
        ({"coverage": {"operators": 3}}, "must tell what share"),
        ({"coverage": {"operators": 3, "of_operators": 2}}, "3 of 2 operators"),
        ({"changed": False, "coverage": {"weight_bytes": 4, "of_weight_bytes": 8}}, "can't have changed 4 weight_bytes"),
    ],
)
def test_a_pass_that_does_not_say_what_share_it_changed_is_found_out(notes: dict[str, Any], told: str, samples: dict[str, Sample]) -> None:
    with pytest.raises(ConformanceFault, match=told):
        conformance.check_coverage(replace(samples["onnx"].model, notes=notes))


def test_a_result_that_does_not_load_is_found_out(samples: dict[str, Sample], tmp_path: Path) -> None:
    with pytest.raises(Exception, match="NoSuchOperator"):
        conformance.check_run(_Broken, SPEC, {"fault": "does not load"}, samples["onnx"], tmp_path / "out")


def test_an_undescribed_row_is_found_out() -> None:
    class Undescribed(_Broken):
        @classmethod
        def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
            return {"x": PassConfigParam(type_=int, default_value=1, category=ParamCategory.NONE)}

    with pytest.raises(ConformanceFault, match="described"):
        conformance.check_table(Undescribed, SPEC)


UNORDERED = """
from autotune.passes.base import Pass, PassConfigParam, PassContract


class Unordered(Pass):
    contract = PassContract()

    @classmethod
    def _default_config(cls, accelerator_spec):
        return {"x": PassConfigParam(type_=int, default_value=1, description="nothing")}

    def _run_for_config(self, model, config, output_model_path):
        proto = model.load()
        proto.doc_string = " ".join({f"word{i}" for i in range(50)})
        return model.written(output_model_path, proto=proto, notes={"changed": True})
"""


def test_bytes_that_depend_on_the_order_of_hashes_are_found_out(samples: dict[str, Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unordered_pass.py").write_text(UNORDERED)
    monkeypatch.syspath_prepend(tmp_path)
    from unordered_pass import Unordered  # type: ignore[import-not-found] # written above

    result = conformance.check_run(Unordered, SPEC, {}, samples["onnx"], tmp_path / "out")

    with pytest.raises(ConformanceFault, match="same bytes in every process"):
        conformance.check_same_bytes_elsewhere(Unordered, SPEC, [{}], samples["onnx"], [result.digest])
