"""OnnxStaticQuantization: OnnxQuantization in static mode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from autotune.errors import PassConfigError, PassError
from autotune.model import ONNXModelHandler
from autotune.passes.onnx_quantization import OnnxQuantization
from autotune.passes.onnx_static_quantization import OnnxStaticQuantization
from autotune.search_spaces.space import compile_space, enumerate_points
from autotune.target import AcceleratorSpec
from tests.passes.small_onnx import handler, random_weight

SPEC = AcceleratorSpec()


def one_layer(folder: Path) -> ONNXModelHandler:
    return handler(folder, [helper.make_node("MatMul", ["x", "w"], ["y"], "m")], [random_weight("w", 16, 16)])


def test_it_makes_the_bytes_of_the_whole_pass_in_that_mode(tmp_path: Path) -> None:
    model = one_layer(tmp_path / "in")
    np.savez(tmp_path / "calib.npz", x=np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32))
    config = {"calibration_data_dir": str(tmp_path / "calib.npz")}
    digests = set()
    for number, made in enumerate((OnnxStaticQuantization(SPEC, config), OnnxQuantization(SPEC, {**config, "quant_mode": "static"}))):
        (tmp_path / str(number)).mkdir()
        digests.add(made.run(model, tmp_path / str(number)).digest)

    assert len(digests) == 1


def test_it_has_no_other_mode_and_speaks_for_itself(tmp_path: Path) -> None:
    with pytest.raises(PassConfigError, match="OnnxStaticQuantization: quant_mode must be one of 'static'"):
        OnnxStaticQuantization(SPEC, {"quant_mode": "dynamic"})
    with pytest.raises(PassError, match="OnnxStaticQuantization: static mode needs calibration data"):
        OnnxStaticQuantization(SPEC).run(one_layer(tmp_path / "in"), tmp_path)

    assert OnnxStaticQuantization.needed_data(OnnxStaticQuantization(SPEC).config) == frozenset({"calibration"})


def test_its_points_are_those_of_the_whole_pass_in_that_mode() -> None:
    def points(pass_class: type[OnnxQuantization]) -> list[dict[str, object]]:
        return [dict(p) for p in enumerate_points(compile_space(pass_class.search_space(SPEC, {"reduce_range": False})))]

    static = points(OnnxStaticQuantization)

    assert {p["quant_mode"] for p in static} == {"static"}
    assert static == [p for p in points(OnnxQuantization) if p["quant_mode"] == "static"]
