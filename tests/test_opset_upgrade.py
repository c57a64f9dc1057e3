"""`validation.upgrade_opset`: a conversion stands before the pass that needs a later opset, in the points that need one, and in no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from onnx import TensorProto, helper

from autotune.config import LoadedSweep, parse_sweep
from autotune.errors import SpaceError
from autotune.model import ONNX, PYTORCH, ONNXModelHandler
from autotune.passes import registry
from autotune.passes.base import ModelTraits, Pass, PassContract
from autotune.pipeline import InputFacts, Pipeline
from autotune.records import Cause, Status
from autotune.search_spaces.space import enumerate_points
from autotune.session import SessionSettings, create_session
from autotune.sweep.plan import describe_plan, render_plan
from autotune.sweep.prepare import prepare
from autotune.sweep.result import SweepResult
from autotune.sweep.run import run
from autotune.trial import TrialPlan, TrialRunner
from tests.passes.small_onnx import random_weight

ALLOWED = {"upgrade_opset": True}
QUANTIZE = {
    "slot": "quantize", "pass": "OnnxQuantization",
    "params": {"quant_mode": "static", "calibrate_method": "minmax", "op_types_to_quantize": "MatMul", "reduce_range": False,
               "per_channel": [False, True]},
}  # fmt: skip


def pipeline(folder: Path, chain: list[dict[str, Any]], *, opset: int = 11, validation: Any = ALLOWED, format_: str = ONNX) -> Pipeline:
    np.savez(folder / "calib.npz", x=np.zeros((4, 8), np.float32))
    model = {"path": "model.onnx"} if format_ == ONNX else {"script": "net.py"}
    data = {"eval": "eval.npz", "calibration": "calib.npz"}
    config = parse_sweep({"model": model, "data": data, "metric": "accuracy", "chain": chain, "validation": validation or {}})
    return Pipeline(LoadedSweep(config, folder), InputFacts(format_, opset if format_ == ONNX else 0, {"MatMul": 1}))


def made(name: str, monkeypatch: pytest.MonkeyPatch, *, needs: int = 0, sets: int = 0) -> dict[str, Any]:
    """A slot with a pass that needs and sets opsets, and never runs."""
    traits = ModelTraits(opset=sets)
    own = {
        "contract": PassContract(min_opset=needs), "_default_config": classmethod(lambda cls, spec: {}),
        "_run_for_config": lambda self, model, config, out: model, "traits": classmethod(lambda cls, config: traits),
    }  # fmt: skip
    monkeypatch.setitem(registry._registered, name, type(name, (Pass,), own))
    return {"slot": name.lower(), "pass": name}


def test_without_leave_the_points_are_pruned_and_the_message_names_the_setting(tmp_path: Path) -> None:
    per_channel = {**QUANTIZE, "params": {**QUANTIZE["params"], "per_channel": True}}

    with pytest.raises(SpaceError, match=r"(?s)opset-floor.*`validation: \{upgrade_opset: true\}`"):
        pipeline(tmp_path, [per_channel], validation=None)


def test_only_the_points_that_need_it_get_a_conversion_to_the_lowest_opset_that_does(tmp_path: Path) -> None:
    allowed, refused = pipeline(tmp_path, [QUANTIZE]), pipeline(tmp_path, [QUANTIZE], validation=None)

    found = {p["quantize.per_channel"]: allowed.steps(p) for p in enumerate_points(allowed.space)}

    assert [s.pass_name for s in found[False]] == ["OnnxQuantization"]
    upgrade, quantization = found[True]
    assert (upgrade.slot, upgrade.pass_name, upgrade.config["target_opset"]) == ("quantize-opset", "OnnxOpsetUpgrade", 13)
    assert upgrade.config["compare_data_dir"] == str(tmp_path / "calib.npz")
    assert upgrade.inserted == "OnnxQuantization needs opset 13; the model has 11"
    assert quantization.inserted == ""
    (plain,) = enumerate_points(refused.space)
    assert refused.steps(plain) == found[False]  # what needs no conversion is what it was
    assert "opset-floor" not in {f.rule for f in allowed.findings}
    assert allowed.space.invalid.get("opset-floor", 0) == 0


def test_a_model_that_is_high_enough_gets_none(tmp_path: Path) -> None:
    chain = pipeline(tmp_path, [QUANTIZE], opset=13)

    assert all(not s.inserted for p in enumerate_points(chain.space) for s in chain.steps(p))
    assert chain.upgraded() == []


def test_one_conversion_serves_the_passes_behind_it_and_stands_before_the_first_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = [made("Easy", monkeypatch), made("Needs13", monkeypatch, needs=13), made("Needs19", monkeypatch, needs=19)]
    chain = pipeline(tmp_path, slots)

    steps = chain.steps(chain.default_point())

    assert [(s.pass_name, s.config.get("target_opset")) for s in steps] == [
        ("Easy", None), ("OnnxOpsetUpgrade", 19), ("Needs13", None), ("Needs19", None),
    ]  # fmt: skip
    assert steps[1].inserted == "Needs13 needs opset 13 and Needs19 needs opset 19; the model has 11"


def test_behind_a_pass_that_sets_the_opset_there_is_another_if_that_is_too_low(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = made("Sets15", monkeypatch, needs=12, sets=15)
    chain = pipeline(tmp_path, [sets, made("Needs14", monkeypatch, needs=14), made("Needs21", monkeypatch, needs=21)])

    inserted = [(s.slot, s.config["target_opset"]) for s in chain.steps(chain.default_point()) if s.inserted]

    assert inserted == [("sets15-opset", 12), ("needs21-opset", 21)]


def test_a_conversion_from_torch_decides_what_the_opset_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert = {"slot": "convert", "pass": "OnnxConversion", "params": {"target_opset": [17, 21], "exporter": "torchscript"}}
    chain = pipeline(tmp_path, [convert, made("Needs20", monkeypatch, needs=20)], format_=PYTORCH)

    found = {p["convert.target_opset"]: [s.pass_name for s in chain.steps(p)] for p in enumerate_points(chain.space)}

    assert found == {17: ["OnnxConversion", "OnnxOpsetUpgrade", "Needs20"], 21: ["OnnxConversion", "Needs20"]}
    (row,) = chain.upgraded()
    assert (row["slot"], row["points"], row["point"]["convert.target_opset"]) == ("needs20", 1, 17)


def test_the_points_that_get_one_are_counted_slot_by_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {**made("Needs13", monkeypatch, needs=13), "optional": True}
    chain = pipeline(tmp_path, [first, {**made("Needs19", monkeypatch, needs=19), "optional": True}, made("Any", monkeypatch)])

    counted = {row["slot"]: row["points"] for row in chain.upgraded()}

    points = [chain.steps(p) for p in enumerate_points(chain.space)]
    assert counted == {slot: sum(any(s.slot == f"{slot}-opset" for s in steps) for steps in points) for slot in ("needs13", "needs19")}
    assert counted == {"needs13": 2, "needs19": 1}


# ------------------------------------------------------------------ a sweep over a model of opset 11


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of opset 11 that is nearly all weights of one MatMul, and data of which it labels every row right."""
    folder = tmp_path_factory.mktemp("old")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["r"], "act"),
        helper.make_node("MatMul", ["r", "v"], ["logits"], "last"),
    ]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", width]) for n, width in (("x", 64), ("logits", 10))]
    graph = helper.make_graph(nodes, "old", ends[:1], ends[1:], [random_weight("w", 64, 512), random_weight("v", 512, 10, seed=1)])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=6), str(folder / "model.onnx"))
    x = np.random.default_rng(0).standard_normal((160, 64)).astype(np.float32)
    labels = create_session(folder / "model.onnx", SessionSettings()).run(None, {"x": x})[0].argmax(1)
    np.savez(folder / "eval.npz", x=x[:120], labels=labels[:120])
    np.savez(folder / "calib.npz", x=x[120:])
    return folder


@pytest.fixture(scope="module")
def sweep(old: Path, sweep_of: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    params = {
        "quant_mode": "static", "calibrate_method": "minmax", "op_types_to_quantize": "MatMul", "per_channel": False, "reduce_range": False,
        "weight_type": ["int8", "int4", "uint4"],
    }  # fmt: skip
    chain = [{"slot": "quantize", "pass": "OnnxQuantization", "params": params}]
    return sweep_of(
        old,
        chain=chain,
        objectives=["size", "score"],
        pick="smallest",
        constraints=["size <= 0.2x"],
        validation=ALLOWED,
        budget={"trials": 3},
        measure={"max_time": "300ms", "final_time": "300ms", "final_budget": "1s", "ratio_width": 0.2},
    )


@pytest.fixture(scope="module")
def swept(sweep: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> SweepResult:
    return run(sweep, tmp_path_factory.mktemp("run") / "out")


def test_the_plan_says_which_points_get_a_conversion_and_why(sweep: dict[str, Any]) -> None:
    content = describe_plan(prepare(LoadedSweep(parse_sweep(sweep), Path.cwd())), [])

    (row,) = content["upgrades"]
    assert (row["slot"], row["points"]) == ("quantize", 2)
    assert content["space"]["valid"] == 3
    text = " ".join(render_plan(content).split())
    assert "opset 2 of them get OnnxOpsetUpgrade before quantize: OnnxQuantization: needs opset 21 here, and gets 11" in text


def test_the_sweep_converts_once_shares_it_and_delivers_it_in_the_recipe(swept: SweepResult) -> None:
    stages = {r.point["quantize.weight_type"]: [s for s in r.stages if s.pass_name] for r in swept.records if r.point}

    plain, *upgraded = stages["int8"], stages["int4"], stages["uint4"]
    assert [s.name for s in plain] == ["quantize"]
    assert [[s.name for s in found] for found in upgraded] == [["quantize-opset", "quantize"]] * 2
    assert len({found[0].key for found in upgraded}) == 1
    assert sorted(found[0].cached for found in upgraded) == [False, True]
    assert all("needs opset 21; the model has 11" in found[0].notes["inserted"] for found in upgraded)
    assert upgraded[0][0].notes["opset_after"] == 21
    bundle = swept.bundle()
    assert bundle is not None
    recipe = yaml.safe_load((bundle / "recipe.yaml").read_text())
    assert [(s["pass"], s["config"].get("target_opset")) for s in recipe["passes"]] == [("OnnxOpsetUpgrade", 21), ("OnnxQuantization", None)]
    assert recipe["passes"][0]["inserted"].startswith("OnnxQuantization needs opset 21")
    assert "inserted" not in recipe["passes"][1]


def test_the_same_command_again_has_nothing_left_to_do(swept: SweepResult, sweep: dict[str, Any]) -> None:
    before = {r.id: json.loads((swept.run / "trials" / r.id / "trial.json").read_text()) for r in swept.records}

    again = run(sweep, swept.run)

    assert {r.id: json.loads((swept.run / "trials" / r.id / "trial.json").read_text()) for r in again.records} == before


def test_a_trial_whose_model_can_not_be_converted_fails_with_the_operator_named(swept: SweepResult, sweep: dict[str, Any], tmp_path: Path) -> None:
    nodes = [
        helper.make_node("ThresholdedRelu", ["x"], ["t"], "thresholded"),
        helper.make_node("MatMul", ["t", "w"], ["logits"], "product"),
    ]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", width]) for n, width in (("x", 64), ("logits", 10))]
    graph = helper.make_graph(nodes, "stuck", ends[:1], ends[1:], [random_weight("w", 64, 10)])
    (tmp_path / "model").mkdir()
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)], ir_version=6), str(tmp_path / "model" / "model.onnx"))
    loaded = LoadedSweep(parse_sweep(sweep), tmp_path)
    chain = Pipeline(loaded, InputFacts(ONNX, 9, {"MatMul": 1, "ThresholdedRelu": 1}))
    plan = replace(TrialPlan.load(swept.run), input_model=ONNXModelHandler.from_folder(tmp_path / "model"))

    with TrialRunner(tmp_path / "run", loaded) as runner:
        record = runner.run(plan, chain, 0, chain.default_point(), "start")

    assert (record.status, record.cause, record.stage) == (Status.FAILED, Cause.EXCEPTION, "quantize-opset")
    assert "OnnxOpsetUpgrade: the model must convert from opset 9 to 10" in record.message
    assert "no adapter for ThresholdedRelu 9 -> 10" in record.message
