"""The contract's own rules, apart from any real pass."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from autotune.errors import PassConfigError, PassError
from autotune.model import ONNXModelHandler
from autotune.passes.base import SEARCH, ConfigView, ModelTraits, ParamCategory, Pass, PassConfigParam, PassContract
from autotune.search_spaces.parameters import INACTIVE, INVALID, Boolean, Categorical, Conditional, ConditionalDefault
from autotune.search_spaces.space import compile_space, enumerate_points
from autotune.target import AcceleratorSpec

CPU = AcceleratorSpec()


class Mode(Pass):
    """A switch, and two rows that hang on it."""

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {
            "mode": PassConfigParam(Literal["plain", "fancy"], default_value="plain", search_defaults=Categorical(["plain", "fancy"])),
            "method": PassConfigParam(
                type_=str,
                default_value=ConditionalDefault("mode", {("fancy",): "fast"}, default=INACTIVE),
                search_defaults=Conditional("mode", {("fancy",): Categorical(["fast", "slow"])}, default=INACTIVE),
            ),
            "depth": PassConfigParam(
                type_=int,
                default_value=ConditionalDefault("method", {("slow",): 3}, default=INACTIVE),
                search_defaults=Conditional("method", {("slow",): Categorical([3, 4])}, default=INACTIVE),
            ),
            "share": PassConfigParam(float, default_value=0.5, minimum=0.1, maximum=1.0, description="a share"),
            "names": PassConfigParam(list[str] | None, description="names"),
            "even": PassConfigParam(int, default_value=2, check=lambda v: "" if v % 2 == 0 else "even"),
        }

    def _run_for_config(self, model: ONNXModelHandler, config: Mapping[str, Any], output_model_path: Path) -> ONNXModelHandler:
        return model.written(output_model_path, proto=model.load())


def points(**user: Any) -> list[dict[str, Any]]:
    return [dict(p) for p in enumerate_points(compile_space(Mode.search_space(CPU, user)))]


def onnx_model(folder: Path, opset: int = 18) -> ONNXModelHandler:
    folder.mkdir()
    node = helper.make_node("Relu", ["x"], ["y"])
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n"]) for n in ("x", "y")]
    proto = helper.make_model(helper.make_graph([node], "g", ends[:1], ends[1:]), opset_imports=[helper.make_opsetid("", opset)])
    onnx.save(proto, str(folder / "model.onnx"))
    return ONNXModelHandler.from_folder(folder)


def test_defaults_follow_their_parents() -> None:
    plain = Mode(CPU).config
    fancy = Mode(CPU, {"mode": "fancy"}).config
    slow = Mode(CPU, {"mode": "fancy", "method": "slow"}).config

    assert plain == {"mode": "plain", "share": 0.5, "names": None, "even": 2}
    assert fancy == {"mode": "fancy", "method": "fast", "share": 0.5, "names": None, "even": 2}
    assert slow["depth"] == 3


def test_every_point_of_the_space_makes_a_pass_with_exactly_these_values() -> None:
    found = points()

    assert len(found) == 4  # plain; fancy fast; fancy slow 3 and 4
    for point in found:
        assert Mode(CPU, point).config == point


def test_a_fixed_value_keeps_its_parameter_out_where_the_table_does() -> None:
    found = points(method="slow")

    assert [(p["mode"], p.get("method"), p.get("depth")) for p in found] == [("plain", None, None), ("fancy", "slow", 3), ("fancy", "slow", 4)]


def test_what_fixed_parents_rule_out_is_not_in_the_space() -> None:
    space = Mode.search_space(CPU, {"mode": "plain"})

    assert list(space) == ["mode", "share", "names", "even"]
    assert len(points(mode="plain")) == 1


def test_a_value_for_a_parameter_that_plays_no_part_is_refused_not_dropped() -> None:
    with pytest.raises(PassConfigError, match="method plays no part with mode in \\['plain'\\]; got 'slow'"):
        Mode.search_space(CPU, {"mode": "plain", "method": "slow"})
    with pytest.raises(PassConfigError, match="method plays no part with mode='plain'"):
        Mode(CPU, {"method": "slow"})


def test_a_row_that_names_an_inactive_parent_survives_that_parent() -> None:
    class Fallback(Mode):
        @classmethod
        def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
            table = super()._default_config(accelerator_spec)
            rows = {("plain", INACTIVE): Categorical([0]), ("fancy", "slow"): Categorical([1, 2])}
            return {**table, "extra": PassConfigParam(int, default_value=0, search_defaults=Conditional(("mode", "method"), rows, default=INACTIVE))}

    plain = [dict(p) for p in enumerate_points(compile_space(Fallback.search_space(CPU, {"mode": "plain"})))]
    everything = [dict(p) for p in enumerate_points(compile_space(Fallback.search_space(CPU)))]

    assert [p["extra"] for p in plain] == [0]
    assert sorted((p["mode"], p.get("method", "-"), p.get("extra", "-")) for p in everything if p.get("depth", 3) == 3) == [
        ("fancy", "fast", "-"), ("fancy", "slow", 1), ("fancy", "slow", 2), ("plain", "-", 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "fncy"}, "Mode: mode must be one of 'plain', 'fancy'; got 'fncy'. Did you mean 'fancy'?"),
        ({"share": 0.05}, "Mode: share must be float, at least 0.1 and at most 1; got 0.05. It means: a share."),
        ({"share": float("nan")}, "Mode: share must be float, at least 0.1 and at most 1; got nan. It means: a share."),
        ({"share": True}, "Mode: share must be float; got True. It means: a share."),
        ({"even": 3}, "Mode: even must be even; got 3."),
        ({"even": None}, "Mode: even must be int; got None."),
        ({"names": ["a", 1]}, "Mode: names must be list[str] or None; got ['a', 1]. It means: names."),
        ({"shar": 0.5}, "Mode: parameters must be those of its table; got 'shar'. Did you mean 'share'?"),
    ],
)
def test_what_the_table_refuses_is_said_in_words(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PassConfigError) as caught:
        Mode(CPU, given)

    assert str(caught.value) == message


def test_choices_are_checked_before_any_trial() -> None:
    with pytest.raises(PassConfigError, match=r"share must be float, at least 0.1 and at most 1; got 2.0"):
        Mode.search_space(CPU, {"share": [0.5, 2.0]})


def test_a_list_is_a_value_for_a_row_of_lists_and_choices_for_any_other() -> None:
    space = Mode.search_space(CPU, {"names": ["a", "b"], "share": [0.2, 0.4]})
    nested = Mode.search_space(CPU, {"names": [["a"], ["b"]]})

    assert space["names"] == Categorical([["a", "b"]])
    assert space["share"] == Categorical([0.2, 0.4])
    assert nested["names"] == Categorical([["a"], ["b"]])


def test_with_search_off_defaults_hold_and_choices_are_refused() -> None:
    space = Mode.search_space(CPU, {"mode": "fancy"}, search=False)

    assert [dict(p) for p in enumerate_points(compile_space(space))] == [{"mode": "fancy", "method": "fast", "share": 0.5, "names": None, "even": 2}]
    with pytest.raises(PassConfigError, match="mode must be one value when search is off"):
        Mode.search_space(CPU, {"mode": ["plain", "fancy"]}, search=False)


def test_search_asks_for_the_search_defaults_and_is_refused_where_there_are_none() -> None:
    assert Mode.search_space(CPU, {"mode": SEARCH})["mode"] == Mode.search_space(CPU, {"mode": "SEARCH"})["mode"] == Categorical(["plain", "fancy"])
    with pytest.raises(PassConfigError, match=r"share has no search defaults; got SEARCH\. Give the choices as a list\."):
        Mode.search_space(CPU, {"share": "SEARCH"})


def test_a_table_with_faults_is_refused_by_name() -> None:
    class WrongDefault(Mode):
        @classmethod
        def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
            return {"n": PassConfigParam(int, default_value="two")}

    class UnknownParent(Mode):
        @classmethod
        def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
            return {"mode": PassConfigParam(int, default_value=1), "n": PassConfigParam(int, search_defaults=Conditional("mod", {1: Boolean()}))}

    with pytest.raises(PassConfigError, match="n must be int in its own table too; got 'two'"):
        WrongDefault(CPU)
    with pytest.raises(PassConfigError, match=r"n must be int in its own table too; got True"):
        UnknownParent(CPU)


def test_parents_that_are_in_no_table_are_refused_with_the_nearest_name() -> None:
    class UnknownParent(Mode):
        @classmethod
        def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
            return {
                "mode": PassConfigParam(int, default_value=1),
                "n": PassConfigParam(int, search_defaults=Conditional("mod", {1: Categorical([2])})),
            }

    with pytest.raises(PassConfigError, match=r"parents of n must be parameters of the table; got 'mod'\. Did you mean 'mode'\?"):
        UnknownParent(CPU)


def test_a_combination_that_no_single_row_can_refuse_is_refused_by_the_pass() -> None:
    class Together(Mode):
        @classmethod
        def validate_config(cls, config: Mapping[str, Any], accelerator_spec: AcceleratorSpec) -> None:
            if config["share"] == 1.0 and config["even"] == 4:
                raise PassConfigError("Together", "share and even must differ")

    assert Together(CPU, {"share": 1.0}).config["even"] == 2
    with pytest.raises(PassConfigError, match="share and even must differ"):
        Together(CPU, {"share": 1.0, "even": 4})


def test_needed_calibration_data_follows_the_contract() -> None:
    class Calibrated(Mode):
        contract = PassContract(needs_calibration_when={"mode": "fancy"})

    assert Calibrated.needed_data(Calibrated(CPU).config) == frozenset()
    assert Calibrated.needed_data(Calibrated(CPU, {"mode": "fancy"}).config) == {"calibration"}
    assert Mode.needed_data(Mode(CPU, {"mode": "fancy"}).config) == frozenset()


def test_a_run_refuses_what_the_contract_does_not_accept(tmp_path: Path) -> None:
    class Late(Mode):
        contract = PassContract(min_opset=19)

    class OtherProvider(Mode):
        contract = PassContract(execution_providers=("QNNExecutionProvider",))

    class Elsewhere(Mode):
        def _run_for_config(self, model: ONNXModelHandler, config: Mapping[str, Any], output_model_path: Path) -> ONNXModelHandler:
            return model

    model = onnx_model(tmp_path / "in")
    out = tmp_path / "out"
    out.mkdir()

    with pytest.raises(PassError, match="Late: needs opset 19 or later; got opset 18"):
        Late(CPU).run(model, out)
    with pytest.raises(PassError, match="OtherProvider: is for QNNExecutionProvider; got CPUExecutionProvider"):
        OtherProvider(CPU).run(model, out)
    with pytest.raises(PassError, match="must leave its result in the folder given to it"):
        Elsewhere(CPU).run(model, out)
    assert Mode(CPU).run(model, out).folder == out


def test_an_object_may_be_given_or_named(tmp_path: Path) -> None:
    class Uses(Mode):
        @classmethod
        def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
            return {"work": PassConfigParam(Callable | None, category=ParamCategory.OBJECT)}

    script = tmp_path / "mine.py"
    script.write_text("def double(x):\n    return 2 * x\n")

    assert Uses(CPU, {"work": np.sqrt}).object("work") is np.sqrt
    assert Uses(CPU, {"work": f"{script}:double"}).object("work")(3) == 6
    assert Uses(CPU, {"work": "double"}, user_script=script).object("work")(3) == 6
    assert Uses(CPU, {"work": "mine.py:double"}, user_script=tmp_path / "other.py").object("work")(3) == 6
    assert Uses(CPU).object("work") is None
    with pytest.raises(PassConfigError, match=r"work must be script\.py:name, or a user script must be set; got 'double'"):
        Uses(CPU, {"work": "double"}).object("work")
    with pytest.raises(PassConfigError, match="work must be a callable or None; got 3"):
        Uses(CPU, {"work": 3})


def test_passes_and_search_survive_pickling() -> None:
    config = Mode(CPU, {"mode": "fancy"}).config

    assert pickle.loads(pickle.dumps(Mode(CPU, {"mode": "fancy"}))).config == config
    assert pickle.loads(pickle.dumps(SEARCH)) is SEARCH


def test_the_json_schema_has_types_bounds_and_choices() -> None:
    schema = Mode.json_schema(CPU)

    assert schema["additionalProperties"] is False
    assert schema["properties"]["mode"]["anyOf"][0]["enum"] == ["plain", "fancy"]
    share = schema["properties"]["share"]
    assert (share["description"], share["default"]) == ("a share", 0.5)
    assert share["anyOf"][0] == {"type": "number", "minimum": 0.1, "maximum": 1.0}
    assert share["anyOf"][1] == {"type": "array", "items": share["anyOf"][0], "minItems": 1}
    assert {"type": "null"} in schema["properties"]["names"]["anyOf"][0]["anyOf"]


def test_invalid_parts_of_a_table_stay_invalid_whoever_gives_the_values() -> None:
    class Forbids(Mode):
        @classmethod
        def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
            table = super()._default_config(accelerator_spec)
            return {**table, "extra": PassConfigParam(int, search_defaults=Conditional("mode", {"plain": Categorical([1, 2])}, default=INVALID))}

    space = Forbids.search_space(CPU, {"extra": [7, 8]})

    assert space["extra"] == Conditional("mode", {"plain": Categorical([7, 8])}, default=INVALID)
    with pytest.raises(PassConfigError, match="extra is not allowed with mode='fancy'"):
        Forbids(CPU, {"mode": "fancy", "extra": 7})


def test_a_view_of_a_config_holds_what_resolving_would_give() -> None:
    for given in ({}, {"mode": "fancy"}, {"mode": "plain"}):
        view = ConfigView(Mode, Mode.default_config(CPU), lambda name, given=given: given.get(name, INACTIVE))  # type: ignore[misc] # bound here

        assert dict(view) == Mode.resolve(CPU, given)
        assert "no such row" not in view


def test_a_view_reads_only_what_it_is_asked_for() -> None:
    read: list[str] = []

    def given(name: str) -> object:
        read.append(name)
        return INACTIVE

    assert ConfigView(Mode, Mode.default_config(CPU), given)["mode"] == Mode.resolve(CPU, {})["mode"]
    assert read == ["mode"]


def test_a_pass_that_takes_float_models_only_is_taken_to_quantize() -> None:
    class Quantizes(Mode):
        contract = PassContract(refuses_quantized_input=True)

    assert Mode.traits({}) == ModelTraits()
    assert Quantizes.traits({}) == ModelTraits(quantized=True)
