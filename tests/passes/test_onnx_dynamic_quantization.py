"""OnnxDynamicQuantization: OnnxQuantization in dynamic mode, without what only the other mode has."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import helper

from autotune.errors import PassConfigError
from autotune.model import ONNXModelHandler
from autotune.passes.onnx_dynamic_quantization import OnnxDynamicQuantization
from autotune.passes.onnx_quantization import STATIC_ONLY, OnnxQuantization
from autotune.search_spaces.space import compile_space, enumerate_points
from autotune.target import AcceleratorSpec
from tests.passes.small_onnx import handler, random_weight

SPEC = AcceleratorSpec()


def one_layer(folder: Path) -> ONNXModelHandler:
    return handler(folder, [helper.make_node("MatMul", ["x", "w"], ["y"], "m")], [random_weight("w", 16, 16)])


def test_it_makes_the_bytes_of_the_whole_pass_in_that_mode(tmp_path: Path) -> None:
    model = one_layer(tmp_path / "in")
    digests = set()
    for number, made in enumerate((OnnxDynamicQuantization(SPEC), OnnxQuantization(SPEC, {"quant_mode": "dynamic"}))):
        (tmp_path / str(number)).mkdir()
        digests.add(made.run(model, tmp_path / str(number)).digest)

    assert len(digests) == 1


def test_it_has_no_other_mode_and_no_parameters_of_the_other() -> None:
    with pytest.raises(PassConfigError, match="OnnxDynamicQuantization: quant_mode must be one of 'dynamic'"):
        OnnxDynamicQuantization(SPEC, {"quant_mode": "static"})
    with pytest.raises(PassConfigError, match="OnnxDynamicQuantization: parameters must be those of its table; got 'calibrate_method'"):
        OnnxDynamicQuantization(SPEC, {"calibrate_method": "minmax"})

    assert set(OnnxQuantization.default_config(SPEC)) - set(OnnxDynamicQuantization.default_config(SPEC)) == set(STATIC_ONLY)
    assert OnnxDynamicQuantization.needed_data(OnnxDynamicQuantization(SPEC).config) == frozenset()


def test_its_points_are_those_of_the_whole_pass_in_that_mode() -> None:
    def points(pass_class: type[OnnxQuantization]) -> list[dict[str, object]]:
        return [dict(p) for p in enumerate_points(compile_space(pass_class.search_space(SPEC, {"reduce_range": False})))]

    dynamic = points(OnnxDynamicQuantization)

    assert {p["quant_mode"] for p in dynamic} == {"dynamic"}
    whole = [p for p in points(OnnxQuantization) if p["quant_mode"] == "dynamic"]
    assert dynamic == [{name: value for name, value in p.items() if name not in STATIC_ONLY} for p in whole]
