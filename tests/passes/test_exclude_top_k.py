"""`exclude_top_k` of OnnxQuantization: groups of nodes ordered by measured harm, found once, the worst left in float."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

from autotune.errors import PassConfigError
from autotune.model import ONNXModelHandler
from autotune.passes import onnx_quantization
from autotune.passes.findings import Findings
from autotune.passes.onnx_quantization import OnnxQuantization
from autotune.passes.quantization_groups import groups_of
from autotune.search_spaces.space import compile_space, enumerate_points
from autotune.target import AcceleratorSpec
from tests.passes.small_onnx import handler, random_weight, run

SPEC = AcceleratorSpec()
X = np.random.default_rng(5).standard_normal((32, 16)).astype(np.float32)


@pytest.fixture
def calib(tmp_path: Path) -> str:
    np.savez(tmp_path / "calib.npz", x=X)
    return str(tmp_path / "calib.npz")


@pytest.fixture
def model(tmp_path: Path) -> ONNXModelHandler:
    """Three layers; the second works on values a few of which are a thousand times the others, so that 8 bits can't tell the others apart."""
    loud = np.ones(16, np.float32)
    loud[3] = 1000.0
    second = numpy_helper.to_array(random_weight("v", 16, 16, seed=1)).copy()
    second[3] = 0.0  # what is loud is not listened to
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["r"], "first/act"),
        helper.make_node("Mul", ["r", "loud"], ["l"], "loud"),
        helper.make_node("MatMul", ["l", "v"], ["b"], "second"),
        helper.make_node("Tanh", ["b"], ["t"], "tanh"),
        helper.make_node("MatMul", ["t", "u"], ["y"], "third"),
    ]
    weights = [
        random_weight("w", 16, 16),
        numpy_helper.from_array(second, "v"),
        random_weight("u", 16, 16, seed=2),
        numpy_helper.from_array(loud, "loud"),
    ]
    return handler(tmp_path / "in", nodes, weights)


def quantize(model: ONNXModelHandler, folder: Path, findings: Findings | None = None, **config: Any) -> ONNXModelHandler:
    folder.mkdir()
    made = OnnxQuantization(SPEC, {"op_types_to_quantize": "matmul+Relu", **config})
    made.findings = findings or Findings()
    return made.run(model, folder)  # type: ignore[return-value] # an ONNX pass gives an ONNX model


def error(model: ONNXModelHandler, result: ONNXModelHandler, x: np.ndarray = X) -> float:
    """Squared error as a share of the square."""
    expected = run(model, x=x).astype(np.float64)
    return float(((run(result, x=x) - expected) ** 2).sum() / (expected**2).sum())


def test_the_worst_groups_stay_in_float_and_the_error_falls(model: ONNXModelHandler, tmp_path: Path, calib: str) -> None:
    results = [quantize(model, tmp_path / str(k), calibration_data_dir=calib, exclude_top_k=k) for k in (0, 1, 2)]

    errors = [error(model, r) for r in results]
    assert [r.notes["quantized_nodes"] for r in results] == [3, 2, 1]
    assert results[1].notes["excluded_groups"][0]["nodes"] == ["second"]
    assert errors[1] < 0.1 * errors[0]
    assert errors[2] < errors[0]
    assert "excluded_groups" not in results[0].notes


def test_the_harm_of_a_group_is_the_error_of_a_model_with_only_it_quantized(model: ONNXModelHandler, tmp_path: Path, calib: str) -> None:
    findings = Findings(tmp_path / "findings")
    quantize(model, tmp_path / "all", findings, calibration_data_dir=calib, exclude_top_k=1)

    (path,) = (tmp_path / "findings").glob("harm-*.json")
    order = json.loads(path.read_text())["found"]
    harms = {tuple(entry["nodes"]): entry["harm"] for entry in order}
    assert set(harms) == {("first", "first/act"), ("second",), ("third",)}
    assert list(harms.values()) == sorted(harms.values(), reverse=True)
    rows = np.unique(np.linspace(0, 31, 16).round().astype(int))  # the rows that are looked at
    for number, (nodes, harm) in enumerate(harms.items()):
        alone = quantize(model, tmp_path / f"only{number}", calibration_data_dir=calib, nodes_to_quantize=list(nodes))
        np.testing.assert_allclose(harm, error(model, alone, X[rows]), rtol=0.15)


@pytest.mark.parametrize("k", [3, 50, 0.7])
def test_as_many_groups_as_there_are_leave_the_model_as_it_was_without_any_work(
    k: float, model: ONNXModelHandler, tmp_path: Path, calib: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def worked(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is to be found out")

    for name in ("activation_ranges", "by_harm"):
        monkeypatch.setattr(onnx_quantization, name, worked)

    result = quantize(model, tmp_path / "out", calibration_data_dir=calib, exclude_top_k=k)

    assert result.digest == model.digest
    assert result.notes["changed"] is False
    assert result.notes["reason"] == "every group of nodes is excluded: there are 3"


def test_a_share_of_the_groups_is_rounded_up(model: ONNXModelHandler, tmp_path: Path, calib: str) -> None:
    tenth, one = (quantize(model, tmp_path / str(k), calibration_data_dir=calib, exclude_top_k=k) for k in (0.1, 1))
    half = quantize(model, tmp_path / "half", calibration_data_dir=calib, exclude_top_k=0.5)

    assert tenth.digest == one.digest
    assert [len(r.notes["excluded_groups"]) for r in (tenth, half)] == [1, 2]


def test_shares_are_searched_by_default_where_most_operators_are_quantized_and_nowhere_else() -> None:
    space = compile_space(OnnxQuantization.search_space(SPEC))

    searched = {(p["quant_mode"], p["op_types_to_quantize"], p.get("exclude_top_k")) for p in enumerate_points(space)}

    assert searched == {
        *(("static", kind, k) for kind in ("all", "conv+matmul") for k in (0, 0.03, 0.1, 0.25)),
        *(("static", kind, 0) for kind in ("conv", "matmul")), ("dynamic", "all", None), ("dynamic", "matmul", None),
    }  # fmt: skip


@pytest.mark.parametrize("wrong", [-1, 1.0, 2.5, True])
def test_what_is_neither_a_number_nor_a_share_of_groups_is_refused(wrong: Any) -> None:
    with pytest.raises(PassConfigError, match="exclude_top_k must be"):
        OnnxQuantization(SPEC, {"exclude_top_k": wrong})


def test_the_order_is_found_once_and_shared(model: ONNXModelHandler, tmp_path: Path, calib: str, monkeypatch: pytest.MonkeyPatch) -> None:
    findings, counted = Findings(tmp_path / "findings"), []
    original = onnx_quantization.by_harm
    monkeypatch.setattr(onnx_quantization, "by_harm", lambda *given: counted.append(1) or original(*given))

    first = quantize(model, tmp_path / "1", findings, calibration_data_dir=calib, exclude_top_k=1)
    second = quantize(model, tmp_path / "2", findings, calibration_data_dir=calib, exclude_top_k=2)
    other_format = quantize(model, tmp_path / "3", findings, calibration_data_dir=calib, exclude_top_k=2, quant_format="QOperator")
    assert len(counted) == 1
    per_tensor = quantize(model, tmp_path / "4", findings, calibration_data_dir=calib, exclude_top_k=1, per_channel=False)
    assert len(counted) == 2

    alone = quantize(model, tmp_path / "5", calibration_data_dir=calib, exclude_top_k=1)
    assert (alone.digest, alone.notes) == (first.digest, first.notes)
    assert first.notes["excluded_groups"] == second.notes["excluded_groups"][:1] == other_format.notes["excluded_groups"][:1]
    assert per_tensor.notes["excluded_groups"][0]["nodes"] == ["second"]


BUILDER = """
import json, sys
from autotune.passes.run import run_pass
run_pass(json.load(sys.stdin))
"""


def test_two_builders_at_once_find_it_once_and_make_the_same_bytes(model: ONNXModelHandler, tmp_path: Path, calib: str) -> None:
    config = {"op_types_to_quantize": "matmul+Relu", "calibration_data_dir": calib, "exclude_top_k": 1}
    args = {
        "pass": "OnnxQuantization", "config": config, "model": model.to_json(), "accelerator": ["cpu", "CPUExecutionProvider"],
        "findings": str(tmp_path / "findings"),
    }  # fmt: skip

    builders = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        builder = subprocess.Popen([sys.executable, "-c", BUILDER], stdin=subprocess.PIPE, text=True)
        assert builder.stdin is not None
        builder.stdin.write(json.dumps({**args, "out": str(tmp_path / name)}))
        builder.stdin.close()
        builders.append(builder)

    assert [b.wait(timeout=240) for b in builders] == [0, 0]
    assert (tmp_path / "a" / "model.onnx").read_bytes() == (tmp_path / "b" / "model.onnx").read_bytes()
    assert len(list((tmp_path / "findings").glob("*.json"))) == 1


def test_groups_are_what_the_runtime_fuses_and_moving_values_is_none(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], "product"),
        helper.make_node("Add", ["m", "b"], ["a"], "bias"),
        helper.make_node("Relu", ["a"], ["r"], "act"),
        helper.make_node("Reshape", ["r", "shape"], ["s"], "reshape"),
        helper.make_node("Softmax", ["s"], ["p"], "softmax"),
        helper.make_node("MatMul", ["s", "w"], ["n"], "branch"),
        helper.make_node("Add", ["n", "p"], ["y"], "residual"),
    ]
    shape = numpy_helper.from_array(np.array([-1, 16]), "shape")
    proto = handler(tmp_path / "in", nodes, [random_weight("w", 16, 16), random_weight("b", 16), shape]).load()
    operators = ["MatMul", "Add", "Relu", "Reshape", "Softmax"]

    assert groups_of(proto, operators, frozenset()) == [("product", "bias", "act"), ("softmax",), ("branch",), ("residual",)]
    assert groups_of(proto, operators, frozenset({"bias", "softmax"})) == [("product",), ("act",), ("branch",), ("residual",)]
    assert groups_of(proto, ["MatMul"], frozenset()) == [("product",), ("branch",)]


def test_a_finding_is_read_back_as_it_was_found_and_found_again_when_its_file_is_damaged(tmp_path: Path) -> None:
    findings, calls = Findings(tmp_path / "f"), []

    def find() -> dict[str, Any]:
        calls.append(1)
        return {"order": ("a", "b"), "share": 0.1}

    facts = {"model": "abc"}
    kept = [findings.once("kind", facts, find) for _ in range(2)]
    assert kept == [{"order": ["a", "b"], "share": 0.1}] * 2
    assert Findings().once("kind", facts, find) == kept[0]
    assert len(calls) == 2

    path = next((tmp_path / "f").glob("*.json"))
    for damage in (path.read_text()[:20], json.dumps({**json.loads(path.read_text()), "found": "something else"}), "[]"):
        path.write_text(damage)
        assert findings.once("kind", facts, find) == kept[0]
    assert len(calls) == 5
    findings.once("kind", {"model": "other"}, find)
    findings.once("another kind", facts, find)
    assert len(calls) == 7


def test_a_folder_that_can_not_be_written_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")

    assert Findings(tmp_path / "file" / "inside").once("kind", {}, lambda: [1]) == [1]
