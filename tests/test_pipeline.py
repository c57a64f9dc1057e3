"""From a chain to a space and back to passes: rules prune, defaults come first, data are filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.config import LoadedSweep, parse_sweep
from autotune.errors import ConfigError, SpaceError
from autotune.model import ONNX, PYTORCH
from autotune.pipeline import InputFacts, Pipeline
from autotune.search_spaces.space import enumerate_points, point_key

QUANTIZE = {"slot": "quantize", "pass": "OnnxQuantization", "optional": True}
SESSION = {"slot": "session", "pass": "OrtPerfTuning"}
ONNX_INPUT = InputFacts(ONNX, 17, {"Conv": 3, "Gemm": 1})


def pipeline(tmp_path: Path, chain: list[dict[str, Any]], *, facts: InputFacts = ONNX_INPUT, calibrated: bool = True, **more: Any) -> Pipeline:
    np.savez(tmp_path / "calib.npz", x=np.zeros((4, 1, 8, 8), np.float32))
    data = {"eval": "eval.npz", **({"calibration": "calib.npz"} if calibrated else {})}
    model = {"path": "model.onnx"} if facts.format == ONNX else {"script": "net.py"}
    config = parse_sweep({"model": model, "data": data, "metric": "accuracy", "chain": chain, "target": {"threads": 1}, **more})
    return Pipeline(LoadedSweep(config, tmp_path), facts)


def test_the_default_point_uses_every_pass_with_its_defaults(tmp_path: Path) -> None:
    chain = pipeline(tmp_path, [QUANTIZE, SESSION])

    steps = chain.steps(chain.default_point())

    assert [s.pass_name for s in steps] == ["OnnxQuantization", "OrtPerfTuning"]
    assert steps[0].config["quant_mode"] == "static"
    assert chain.changed_from_default(chain.default_point()) == {}


def test_the_untouched_point_leaves_every_optional_pass_out(tmp_path: Path) -> None:
    chain = pipeline(tmp_path, [QUANTIZE, SESSION])

    point = chain.untouched_point()

    assert point is not None
    assert [s.pass_name for s in chain.steps(point)] == ["OrtPerfTuning"]


def test_there_is_no_untouched_point_where_a_pass_must_change_the_model(tmp_path: Path) -> None:
    chain = pipeline(tmp_path, [{**QUANTIZE, "optional": False}, SESSION])

    assert chain.untouched_point() is None


def test_calibration_data_are_filled_in_where_a_pass_takes_them(tmp_path: Path) -> None:
    chain = pipeline(tmp_path, [QUANTIZE, SESSION])

    step = chain.steps(chain.default_point())[0]

    assert step.config["calibration_data_dir"] == str(tmp_path / "calib.npz")
    assert not [name for name in chain.space.variables if "calibration_data_dir" in name]


def test_static_quantization_is_pruned_by_name_without_calibration_data(tmp_path: Path) -> None:
    chain = pipeline(tmp_path, [QUANTIZE, SESSION], calibrated=False)

    modes = {p.get("quantize.quant_mode") for p in enumerate_points(chain.space)}

    assert modes == {None, "dynamic"}
    assert chain.space.invalid["data-needed"] > 0


def test_static_quantization_alone_without_data_leaves_nothing_and_says_why(tmp_path: Path) -> None:
    chain = [{**QUANTIZE, "optional": False, "params": {"quant_mode": "static"}}, SESSION]

    with pytest.raises(SpaceError, match=r"data-needed.*calibration data"):
        pipeline(tmp_path, chain, calibrated=False)


def test_a_torch_pass_after_conversion_leaves_nothing_and_says_why(tmp_path: Path) -> None:
    chain = [{"slot": "convert", "pass": "OnnxConversion"}, {"slot": "prune", "pass": "TorchPruning"}]

    with pytest.raises(SpaceError, match="order"):
        pipeline(tmp_path, chain, facts=InputFacts(PYTORCH))


def test_points_that_never_become_onnx_are_pruned(tmp_path: Path) -> None:
    chain = pipeline(tmp_path, [{"slot": "convert", "pass": "OnnxConversion", "optional": True}, QUANTIZE, SESSION], facts=InputFacts(PYTORCH))

    assert all(p["convert"] == "OnnxConversion" for p in enumerate_points(chain.space))
    assert chain.space.invalid["order"] > 0


def test_pruning_that_trains_is_pruned_by_name_without_training_data(tmp_path: Path) -> None:
    chain = pipeline(tmp_path, [{"slot": "prune", "pass": "TorchPruning"}, {"slot": "convert", "pass": "OnnxConversion"}], facts=InputFacts(PYTORCH))

    assert {p["prune.fine_tune_epochs"] for p in enumerate_points(chain.space)} == {0}
    assert chain.space.invalid["data-needed"] > 0


def test_scales_per_channel_are_pruned_by_name_below_opset_13(tmp_path: Path) -> None:
    chain = pipeline(tmp_path, [QUANTIZE, SESSION], facts=InputFacts(ONNX, 11, {"Conv": 3}))

    assert {p.get("quantize.per_channel") for p in enumerate_points(chain.space)} == {None, False}
    assert chain.space.invalid["opset-floor"] > 0


def test_values_that_a_pass_refuses_together_are_pruned_by_name(tmp_path: Path) -> None:
    params = {"quant_mode": "static", "activation_type": ["uint8", "int8"], "weight_type": ["int8", "uint8"]}
    chain = pipeline(tmp_path, [{**QUANTIZE, "params": params}, SESSION])

    pairs = {(p["quantize.activation_type"], p["quantize.weight_type"]) for p in enumerate_points(chain.space) if p["quantize"]}

    assert ("int8", "uint8") not in pairs
    assert len(pairs) == 3
    assert chain.space.invalid["pass-config"] > 0


def test_a_quantized_model_is_not_quantized_again(tmp_path: Path) -> None:
    chain = pipeline(tmp_path, [QUANTIZE, SESSION], facts=InputFacts(ONNX, 17, {"QuantizeLinear": 2, "Conv": 1}))

    assert all(p["quantize"] is None for p in enumerate_points(chain.space))


def test_two_slots_never_quantize_one_after_the_other(tmp_path: Path) -> None:
    chain = pipeline(tmp_path, [QUANTIZE, {**QUANTIZE, "slot": "again"}])

    assert not [p for p in enumerate_points(chain.space) if p["quantize"] and p["again"]]
    assert [p for p in enumerate_points(chain.space) if p["again"]]


GPU_ONLY = '''
from autotune.passes.base import Pass, PassConfigParam, PassContract
from autotune.passes.registry import register


@register
class OnlyOnGpu(Pass):
    """A pass that needs a GPU and a package that is not there."""

    contract = PassContract(needs_gpu=True, packages={"no_such_package_anywhere": "passtune[none]"})

    @classmethod
    def _default_config(cls, accelerator_spec):
        return {}

    def _run_for_config(self, model, config, output_model_path):
        raise AssertionError("never run here")
'''


def test_a_pass_that_needs_a_gpu_or_a_missing_package_is_pruned_by_name(tmp_path: Path) -> None:
    (tmp_path / "gpu.py").write_text(GPU_ONLY)

    chain = pipeline(tmp_path, [{"slot": "gpu", "pass": "OnlyOnGpu", "optional": True}, SESSION], script="gpu.py")

    assert {p["gpu"] for p in enumerate_points(chain.space)} == {None}
    assert chain.space.invalid["gpu-only-method"] + chain.space.invalid["missing-engine"] > 0


def test_the_threads_of_the_target_hold_for_session_tuning(tmp_path: Path) -> None:
    chain = pipeline(tmp_path, [SESSION])

    assert {p["session.intra_op_num_threads"] for p in enumerate_points(chain.space)} == {1}


def test_a_user_list_replaces_the_choices_and_a_scalar_fixes(tmp_path: Path) -> None:
    params = {"quant_mode": "static", "calibrate_method": ["minmax", "entropy"], "per_channel": True, "op_types_to_quantize": "all"}
    chain = pipeline(tmp_path, [{**QUANTIZE, "params": params}, {**SESSION, "params": {"graph_optimization_level": "all"}}])

    points = [p for p in enumerate_points(chain.space) if p["quantize"]]

    assert {p["quantize.calibrate_method"] for p in points} == {"minmax", "entropy"}
    assert {p["quantize.per_channel"] for p in points} == {True}


def test_search_off_leaves_the_choice_of_passes_only(tmp_path: Path) -> None:
    chain = pipeline(tmp_path, [QUANTIZE, SESSION], search={"enabled": False})

    assert chain.space.valid == 2


def test_start_points_are_completed_by_defaults(tmp_path: Path) -> None:
    chain = pipeline(tmp_path, [QUANTIZE, SESSION], search={"start": [{"quantize.quant_mode": "dynamic"}]})

    point = chain.start_points()[0]

    assert chain.space.contains(point)
    assert point["quantize.quant_mode"] == "dynamic"
    assert "quantize.calibrate_method" not in point


def test_a_start_point_keeps_all_that_the_user_named(tmp_path: Path) -> None:
    start = {"quantize.weight_type": "uint8", "quantize.per_channel": False, "session.graph_optimization_level": "extended"}
    chain = pipeline(tmp_path, [QUANTIZE, SESSION], search={"start": [start]})

    point = chain.start_points()[0]

    assert chain.space.contains(point)
    assert point.items() >= start.items()
    assert point["quantize.quant_mode"] == "dynamic"  # the default, static, has int8 weights only


def test_a_start_point_without_a_pass_is_completed_without_it(tmp_path: Path) -> None:
    chain = pipeline(tmp_path, [QUANTIZE, SESSION], search={"start": [{"quantize": None}]})

    assert [s.pass_name for s in chain.steps(chain.start_points()[0])] == ["OrtPerfTuning"]


@pytest.mark.parametrize(
    ("start", "told"),
    [
        (
            {"quantize.quant_mode": "dynamic", "quantize.calibrate_method": "minmax"},
            "quantize.calibrate_method='minmax', which plays no part with quant_mode='dynamic'",
        ),
        ({"quantize": None, "quantize.per_channel": True}, "quantize.per_channel=True, which plays no part in it"),
        (
            {"quantize.quant_mode": "static", "quantize.weight_type": "uint8"},
            "quantize.weight_type='uint8', where only 'int8' can be had",
        ),
    ],
)  # fmt: skip
def test_a_start_point_that_a_condition_would_change_is_refused(start: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        pipeline(tmp_path, [QUANTIZE, SESSION], search={"start": [start]}).start_points()

    assert "a starting point must be one that the space holds" in str(caught.value)
    assert told in str(caught.value)


def test_a_start_point_that_a_rule_refuses_is_refused_with_the_rule(tmp_path: Path) -> None:
    params = {"quant_mode": "static", "activation_type": ["uint8", "int8"], "weight_type": ["int8", "uint8"]}
    start = [{"quantize.activation_type": "int8", "quantize.weight_type": "uint8"}]

    with pytest.raises(ConfigError, match=r"search\.start\.0.*pass-config: OnnxQuantization: int8 activations need int8 weights"):
        pipeline(tmp_path, [{**QUANTIZE, "params": params}, SESSION], search={"start": start}).start_points()


def test_a_start_point_that_lacks_data_is_refused_with_the_rule(tmp_path: Path) -> None:
    start = [{"quantize.quant_mode": "static"}]

    with pytest.raises(ConfigError, match=r"search\.start\.0.*data-needed: OnnxQuantization: needs calibration data here"):
        pipeline(tmp_path, [QUANTIZE, SESSION], calibrated=False, search={"start": start}).start_points()


@pytest.mark.parametrize(
    ("chain", "start", "message"),
    [
        ([{"pass": "OnnxQuantisation"}], [], "a pass must be a known name; got 'OnnxQuantisation'. Did you mean 'OnnxQuantization'?"),
        (
            [{"pass": "OnnxQuantization", "params": {"per_chanel": True}}],
            [],
            "parameters must be those of its table; got 'per_chanel'. Did you mean 'per_channel'?",
        ),
        (
            [QUANTIZE],
            [{"quantize.quant_mod": "static"}],
            "names must be variables of the space; got 'quantize.quant_mod'. Did you mean 'quantize.quant_mode'?",
        ),
        ([QUANTIZE], [{"quantize.quant_mode": "statik"}], "quantize.quant_mode must be one of 'static', 'dynamic'; got 'statik'."),
        (
            [{"pass": "OnnxQuantization", "params": {"calibration_data_dir": "calibb.npz"}}],
            [],
            "the path must exist; got 'calibb.npz'. Did you mean 'calib.npz'?",
        ),
        ([{"pass": "OnnxQuantization", "params": {"per_channel": 3}}], [], "OnnxQuantization: per_channel must be bool; got 3."),
    ],
)
def test_a_misspelt_name_gets_the_nearest_one(tmp_path: Path, chain: list[dict[str, Any]], start: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pipeline(tmp_path, chain, search={"start": start}).start_points()

    assert message.replace("; got 'calibb.npz'", "; got calibb.npz") in str(caught.value) or message in str(caught.value)


def test_equal_points_have_equal_keys_and_all_points_differ(tmp_path: Path) -> None:
    space = pipeline(tmp_path, [QUANTIZE, SESSION]).space

    keys = [point_key(p) for p in enumerate_points(space)]

    assert len(keys) == len(set(keys)) == space.valid == space.distinct
