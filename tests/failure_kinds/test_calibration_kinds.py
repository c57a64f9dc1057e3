"""Kinds C: calibration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper

from autotune.errors import AutotuneError
from autotune.model import ONNXModelHandler
from tests.failure_kinds.awkward import FLOAT, MODELS, X, Y, flat, model, node, two_layers, value, weight
from tests.failure_kinds.kinds import CALIBRATION_METHODS, FORMATS, apply, error, outputs, saved

# 21

MEASURE = """
import resource, sys
from pathlib import Path

from autotune.model import ONNXModelHandler
from autotune.passes.base import AcceleratorSpec
from autotune.passes.onnx_quantization import OnnxQuantization

folder, method, samples = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
out = folder / f"{method}-{samples}"
out.mkdir()
config = {"calibration_data_dir": str(folder / "rows.npz"), "calibrate_method": method, "calibration_samples": samples, "quant_preprocess": False}
OnnxQuantization(AcceleratorSpec(), config).run(ONNXModelHandler.from_folder(folder / "in"), out)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.parametrize("method", ["minmax", "entropy", "percentile"])
def test_memory_does_not_grow_with_the_number_of_samples(method: str, tmp_path: Path) -> None:
    wide = 250_000  # a megabyte of activations a tensor and sample; four tensors are looked at
    nodes = [node("MatMul", ["x", "w"], ["a"], "one"), node("Relu", ["a"], ["r"], "relu"), node("MatMul", ["r", "v"], ["y"], "two")]
    shapes = [value("x", FLOAT, ["n", wide // 4, 4])], [value("y", FLOAT, ["n", wide // 4, 4])]
    saved(tmp_path / "in", model(nodes, *shapes, [weight("w", 4, 4), weight("v", 4, 4, seed=1)]))
    np.savez(tmp_path / "rows.npz", x=np.random.default_rng(0).standard_normal((48, wide // 4, 4)).astype(np.float32))

    def peak(samples: int) -> int:
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(tmp_path), method, str(samples)], capture_output=True, text=True, check=True
        )  # fmt: skip
        return int(done.stdout)

    few, many = peak(4), peak(48)

    kept = 44 * 4 * wide * 4  # what every activation of every further sample would take: 176 MB
    assert many - few < kept / 3


# 22


def test_rows_that_are_used_up_are_walked_again_for_the_second_pass(tmp_path: Path) -> None:
    given = saved(tmp_path / "in", two_layers())

    for method in ("entropy", "percentile"):  # these look at the rows twice
        result = apply("OnnxStaticQuantization", given, tmp_path / method, {"x": flat()["x"][:1]}, calibrate_method=method)
        assert result.notes["quantized_nodes"] == 2


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"x": np.zeros((0, 16), np.float32)}, "at least one example"),
        ({"y": np.zeros((4, 16), np.float32)}, "an array for each model input"),
        ({"x": np.zeros((4, 9), np.float32)}, "axis 1 of input 'x' must be 16"),
        ({"x": np.zeros(4, np.float32)}, "takes shape"),
    ],
    ids=["empty", "another name", "another size", "another rank"],
)
@pytest.mark.parametrize("name", ["OnnxStaticQuantization", "SmoothQuant", "OnnxMixedPrecision"])
def test_data_without_rows_or_of_another_shape_are_refused_at_once_in_words(
    name: str, rows: dict[str, np.ndarray], words: str, tmp_path: Path
) -> None:
    given = saved(tmp_path / "in", two_layers())

    with pytest.raises(AutotuneError, match=words):
        apply(name, given, tmp_path / "out", rows)


# 23


@pytest.mark.parametrize("method", CALIBRATION_METHODS)
@pytest.mark.parametrize("quant_format", FORMATS)
def test_a_tensor_that_is_empty_in_every_run_stops_no_calibration(quant_format: str, method: str, tmp_path: Path) -> None:
    made = MODELS["empty_boxes"]()
    given = saved(tmp_path / "in", made.proto)

    result = apply("OnnxStaticQuantization", given, tmp_path / "out", made.rows, quant_format=quant_format, calibrate_method=method)

    assert result.notes["quantized_nodes"] == 1
    assert "score: values without bounds, or none at all" in result.notes["left_in_float"]
    assert error(given, result, made.rows) < (0.9 if method in ("moving_average", "distribution") else 0.05)  # these two cut the ends off


# 24


@pytest.mark.parametrize("method", CALIBRATION_METHODS)
@pytest.mark.parametrize("quant_format", FORMATS)
def test_outputs_of_the_model_and_of_inner_nodes_are_calibrated_alike(quant_format: str, method: str, tmp_path: Path) -> None:
    proto = two_layers()
    proto.graph.output.append(value("a", FLOAT, ["n", 16]))
    given = saved(tmp_path / "in", proto)
    rows = flat()

    config = {"quant_format": quant_format, "calibrate_method": method, "outputs_in_float": False}
    result = apply("OnnxStaticQuantization", given, tmp_path / "out", rows, **config)

    held = {t.name: numpy_helper.to_array(t) for t in result.load().graph.initializer}
    low, high = float(outputs(given, rows)[1].min()), float(outputs(given, rows)[1].max())
    assert {"a_scale", "y_scale"} <= set(held)
    assert 0 < float(held["a_scale"].max()) <= 1.05 * (high - low) / 255
    assert result.notes["quantized_nodes"] == 2


# 26


def test_calibration_reads_the_inputs_and_nothing_else(tmp_path: Path) -> None:
    given = saved(tmp_path / "in", two_layers())
    rows = flat()
    misleading = {**rows, "labels": np.full(len(rows["x"]), np.nan), "a": 1e6 * rows["x"], "y": 1e6 * rows["x"]}

    plain, beside = (apply("OnnxStaticQuantization", given, tmp_path / n, r) for n, r in (("plain", rows), ("beside", misleading)))

    assert isinstance(plain, ONNXModelHandler)
    assert plain.digest == beside.digest
    assert [s.name for s in plain.io.inputs] == [X.name]
    assert [s.name for s in plain.io.outputs] == [Y.name]
