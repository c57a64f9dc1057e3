"""The worked example of the contract: six parameters, one of each kind, and a pass that does real work with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from autotune.errors import PassConfigError
from autotune.model import ONNXModelHandler
from autotune.passes.base import SEARCH, ParamCategory, Pass, PassConfigParam, PassContract
from autotune.search_spaces.parameters import INVALID, Categorical, Conditional, ConditionalDefault
from autotune.search_spaces.space import compile_space, enumerate_points
from autotune.target import AcceleratorSpec

CPU = AcceleratorSpec()


class SixParameters(Pass):
    """Add `param1 + 10 * param2 + 100 * param3 + 1000 * param5`, put through `param4`, to a model's one weight."""

    contract = PassContract(version=3)

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {
            "param1": PassConfigParam(type_=int, required=True, description="required"),
            "param2": PassConfigParam(type_=int, default_value=1, description="with a default"),
            "param3": PassConfigParam(type_=int, default_value=1, search_defaults=Categorical([1, 2, 3]), description="searched"),
            "param4": PassConfigParam(type_=Callable | str | None, category=ParamCategory.OBJECT, description="an object, or its name"),
            "param5": PassConfigParam(
                type_=int, default_value=ConditionalDefault(parents="param2", support={(1,): 2, (2,): 3}, default=4), description="by param2"
            ),
            "param6": PassConfigParam(
                type_=int,
                search_defaults=Conditional(
                    parents=("param2", "param3"), support={(1, 1): Categorical([1, 2, 3]), (1, 2): Categorical([4, 5, 6])}, default=INVALID
                ),
                description="searched by param2 and param3",
            ),
        }

    def _run_for_config(self, model: ONNXModelHandler, config: Mapping[str, Any], output_model_path: Path) -> ONNXModelHandler:
        total = config["param1"] + 10 * config["param2"] + 100 * config["param3"] + 1000 * config["param5"]
        function = self.object("param4")
        proto = model.load()
        weight = numpy_helper.to_array(proto.graph.initializer[0]) + np.float32(function(total) if function else total)
        proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, proto.graph.initializer[0].name))
        return model.written(output_model_path, proto=proto, notes={"changed": True, "param6": config["param6"]})


def negated(value: int) -> int:
    return -value


@pytest.fixture
def model(tmp_path: Path) -> ONNXModelHandler:
    folder = tmp_path / "input"
    folder.mkdir()
    weight = numpy_helper.from_array(np.zeros(2, np.float32), "w")
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 2]) for n in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", ends[:1], ends[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), str(folder / "model.onnx"))
    return ONNXModelHandler.from_folder(folder)


def points(user: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    return [dict(p) for p in enumerate_points(compile_space(SixParameters.search_space(CPU, user, **options)))]


def test_defaults_fill_what_is_not_given() -> None:
    config = SixParameters(CPU, {"param1": 7}).config

    assert config == {"param1": 7, "param2": 1, "param3": 1, "param4": None, "param5": 2, "param6": None}


@pytest.mark.parametrize(("param2", "param5"), [(1, 2), (2, 3), (3, 4), (99, 4)])
def test_the_conditional_default_follows_its_parent(param2: int, param5: int) -> None:
    assert SixParameters(CPU, {"param1": 0, "param2": param2}).config["param5"] == param5


def test_the_search_space_holds_the_valid_combinations_and_no_others() -> None:
    space = compile_space(SixParameters.search_space(CPU, {"param1": 7}))

    found = [(p["param3"], p["param6"]) for p in enumerate_points(space)]
    assert found == [(1, 1), (1, 2), (1, 3), (2, 4), (2, 5), (2, 6)]
    assert space.valid == 6
    assert sum(space.invalid.values()) == 1  # param3 = 3


def test_every_point_makes_a_pass() -> None:
    for point in points({"param1": 7}):
        assert SixParameters(CPU, point).config == point


def test_the_conditional_default_is_in_every_point() -> None:
    assert {p["param5"] for p in points({"param1": 7})} == {2}
    assert {(p["param2"], p["param5"]) for p in points({"param1": 7, "param2": [1, 2]})} == {(1, 2)}  # 2 is invalid for param6


def test_search_and_nothing_mean_the_same() -> None:
    assert SixParameters.search_space(CPU, {"param1": 7, "param3": SEARCH, "param6": "SEARCH"}) == SixParameters.search_space(CPU, {"param1": 7})


def test_a_scalar_fixes() -> None:
    assert [(p["param3"], p["param6"]) for p in points({"param1": 7, "param3": 2})] == [(2, 4), (2, 5), (2, 6)]
    assert [(p["param3"], p["param6"]) for p in points({"param1": 7, "param6": 5})] == [(1, 5), (2, 5)]


@pytest.mark.parametrize(
    "given",
    [
        [1, 2],
        Categorical([1, 2]),
        {"type": "Categorical", "values": [1, 2]},
        Conditional("param2", {(1,): Categorical([1, 2])}),
        {"type": "Conditional", "parents": ["param2"], "support": [[[1], {"type": "Categorical", "values": [1, 2]}]]},
    ],
    ids=["list", "Categorical", "Categorical written out", "Conditional", "Conditional written out"],
)
def test_choices_replace_the_search_defaults_in_every_form(given: Any) -> None:
    found = points({"param1": 7, "param3": given, "param6": 9})

    assert [(p["param3"], p["param6"]) for p in found] == [(1, 9), (2, 9)]


def test_choices_make_a_required_parameter_searchable() -> None:
    assert [p["param1"] for p in points({"param1": [7, 8], "param3": 1, "param6": 1})] == [7, 8]


def test_with_search_off_defaults_hold() -> None:
    assert points({"param1": 7}, search=False) == [{"param1": 7, "param2": 1, "param3": 1, "param4": None, "param5": 2, "param6": None}]
    assert points({"param1": 7, "param2": 2}, search=False)[0]["param5"] == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "SixParameters: param1 must be given; got nothing. It is int: required."),
        ({"param1": "7"}, "SixParameters: param1 must be int; got '7'. It means: required."),
        ({"param1": True}, "SixParameters: param1 must be int; got True. It means: required."),
        ({"param1": None}, "SixParameters: param1 must be int; got None. It means: required."),
        ({"param1": 7, "parm2": 1}, "SixParameters: parameters must be those of its table; got 'parm2'. Did you mean 'param2'?"),
        ({"param1": 7, "param3": 1.5}, "SixParameters: param3 must be int; got 1.5. It means: searched."),
        ({"param1": 7, "param4": 5}, "SixParameters: param4 must be a callable or str or None; got 5. It means: an object, or its name."),
        (
            {"param1": 7, "param3": 3, "param6": 1},
            "SixParameters: param6 is not allowed with param2=1, param3=3; got param6=1. Leave param6 out, or change its parents.",
        ),
    ],
)
def test_a_wrong_config_is_refused_with_what_must_hold(config: dict[str, Any], message: str) -> None:
    with pytest.raises(PassConfigError) as caught:
        SixParameters(CPU, config)

    assert str(caught.value) == message


def test_a_space_without_valid_values_for_a_parameter_is_refused() -> None:
    with pytest.raises(PassConfigError, match=r"param6 is not allowed with param2 in \[2\], param3 in \[1, 2, 3\]"):
        SixParameters.search_space(CPU, {"param1": 7, "param2": 2})


@pytest.mark.parametrize("form", ["callable", "user script", "script:name"])
def test_a_run_does_the_work_with_the_values_given(model: ONNXModelHandler, tmp_path: Path, form: str) -> None:
    script = tmp_path / "user.py"
    script.write_text("def negated(value):\n    return -value\n")
    param4 = {"callable": negated, "user script": "negated", "script:name": f"{script}:negated"}[form]
    before = model.digest
    output = tmp_path / "output"
    output.mkdir()

    result = SixParameters(CPU, {"param1": 7, "param2": 2, "param4": param4}, user_script=script).run(model, output)

    session = ort.InferenceSession(str(result.path), providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": np.zeros((1, 2), np.float32)})[0].tolist() == [[-3127.0, -3127.0]]
    assert ONNXModelHandler.from_folder(model.folder).digest == before
    assert result.folder == output
