"""Parameters: values told apart by type, conditions looked up by the parents' values, JSON and pickle round trips, clear refusals."""

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from autotune.errors import SpaceError
from autotune.search_spaces import (
    INACTIVE,
    INVALID,
    Boolean,
    Categorical,
    Conditional,
    ConditionalDefault,
    order_parents_first,
    parameter_from_json,
    same,
    value_key,
)
from autotune.search_spaces.parameters import value_json

DIFFERENT = [
    None,
    True,
    False,
    1,
    0,
    1.0,
    0.0,
    "1",
    "",
    [],
    [1],
    [[1]],
    [True],
    {},
    {"a": 1},
    {"a": True},
    Path("a"),
    "a",
    len,
    max,
    {1},
    INACTIVE,
    INVALID,
]


@pytest.mark.parametrize("sentinel", [INVALID, INACTIVE])
@pytest.mark.parametrize("through", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_sentinel_is_itself_on_the_other_side(sentinel: Any, through: Callable[[Any], Any]) -> None:
    assert through(sentinel) is sentinel
    assert repr(sentinel) in ("INVALID", "INACTIVE")


def test_values_are_the_same_only_by_type_and_value() -> None:
    for i, a in enumerate(DIFFERENT):
        for j, b in enumerate(DIFFERENT):
            assert same(a, b) == (i == j), (a, b)


def test_value_key_is_hashable_and_agrees_with_same() -> None:
    assert len({value_key(v) for v in DIFFERENT}) == len(DIFFERENT)
    assert value_key([1, {"a": (2,)}]) == value_key((1, {"a": [2]}))
    assert same(np.int64(3), 3)
    assert not same(np.float32(3), 3)
    assert same(float("nan"), float("nan"))
    assert same(0.0, -0.0)


def test_the_json_description_tells_different_values_apart() -> None:
    odd = [*DIFFERENT, {"path": "a"}, {"float": "nan"}, float("nan"), float("inf"), {1: 2}, {"1": 2}, {"sentinel": "INACTIVE"}]

    texts = [json.dumps(value_json(v), sort_keys=True, allow_nan=False) for v in odd]

    assert len(set(texts)) == len(odd)


def test_choices_keep_their_order_and_are_a_copy_of_what_was_given() -> None:
    given = [["Conv"], ["Conv", "MatMul"], None]

    parameter = Categorical(given)
    given[0].append("Gemm")  # type: ignore[union-attr]
    given.pop()

    assert parameter.values == (["Conv"], ["Conv", "MatMul"], None)


def test_true_and_one_and_one_point_zero_are_three_choices() -> None:
    assert Categorical([True, 1, 1.0]).values == (True, 1, 1.0)
    assert Categorical([True]) != Categorical([1])
    assert Boolean() == Categorical([True, False])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Categorical([]), "Categorical: there must be at least one value to choose from; got none. Give values, or leave the parameter out."),
        (lambda: Categorical([1, 2, 1]), "Categorical: each value must be given once; got 1 twice. Take one away."),
        (lambda: Categorical([[1], (1,)]), "Categorical: each value must be given once; got (1,) twice. Take one away."),
        (lambda: Categorical("minmax"), "Categorical: values must be a list; got 'minmax'. Write Categorical(['minmax'])."),
        (
            lambda: Categorical([1, INVALID]),
            "Categorical: INVALID and INACTIVE are no values; got INVALID. Make the whole branch of a Conditional INVALID or INACTIVE.",
        ),
        (
            lambda: Conditional("mode", {"static": [1, 2]}),
            "Conditional: the branch for mode='static' must be a Categorical, a Conditional, INVALID or INACTIVE; got [1, 2]. "
            "Write Categorical([1, 2]).",
        ),
        (
            lambda: Conditional("mode", {"static": 3}),
            "Conditional: the branch for mode='static' must be a Categorical, a Conditional, INVALID or INACTIVE; got 3. Write Categorical([3]).",
        ),
        (
            lambda: Conditional(("a", "b"), {1: INACTIVE}),
            "Conditional: a row of support must hold one value for each of a, b; got 1. Name a value for each parent.",
        ),
        (
            lambda: Conditional("a", [([1], INACTIVE), (1, INVALID)]),
            "Conditional: each row of support must be given once (parents a); got (1,) twice. Take one away.",
        ),
        (lambda: Conditional(("a", "a"), {(1, 1): INACTIVE}), "Conditional: each parent must be named once; got ('a', 'a')."),
        (lambda: Conditional((), {}), "Conditional: parents must be a name or a tuple of names; got ()."),
        (lambda: Conditional("a", 3), "Conditional: support must map values of a to branches; got 3."),
        (
            lambda: Conditional("a", {1: "INVALID"}),
            "Conditional: the branch for a=1 must be a Categorical, a Conditional, INVALID or INACTIVE; got 'INVALID'. "
            "Write INVALID without quotes (import it from autotune.search_spaces).",
        ),
        (
            lambda: Conditional("a", {INVALID: INACTIVE}),
            "Conditional: a row of support must name values that a parent can have; got INVALID. Use INACTIVE for an inactive parent.",
        ),
        (
            lambda: Categorical([1.0, [float("nan")]]),
            "Categorical: NaN is no value: it equals nothing, and JSON can't hold it; got [nan]. Use None for a value that is left open.",
        ),
        (
            lambda: Conditional("a", {np.float32("nan"): INACTIVE}),
            "Conditional: NaN is no value: it equals nothing, and JSON can't hold it; got np.float32(nan). Use None for a value that is left open.",
        ),
        (
            lambda: Categorical([{"sentinel": "INACTIVE"}]),
            "Categorical: a mapping of the one key 'sentinel' is how JSON writes INVALID and INACTIVE; got {'sentinel': 'INACTIVE'}.",
        ),
        (
            lambda: Categorical(["INACTIVE"]),
            "Categorical: the names INVALID and INACTIVE are kept for the two marks; got 'INACTIVE'. Choose another name for the value.",
        ),
        (
            lambda: ConditionalDefault("a", {1: Categorical([2])}),
            "ConditionalDefault: its values must be plain values; got Categorical([2]). Use a Conditional for choices.",
        ),
    ],
)
def test_what_is_no_parameter_is_refused_with_the_mend(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpaceError) as caught:
        make()

    assert str(caught.value) == message


def test_a_branch_is_found_by_the_parents_values_and_unlisted_ones_take_the_default() -> None:
    minmax = Categorical(["minmax"])
    parameter = Conditional(("mode", "per_channel"), [(("static", True), minmax), (("static", 1), INVALID)], default=INACTIVE)

    assert parameter.branch({"mode": "static", "per_channel": True, "other": 3}) is minmax
    assert parameter.branch({"mode": "static", "per_channel": 1}) is INVALID
    assert parameter.branch({"mode": "dynamic", "per_channel": True}) is INACTIVE


def test_an_absent_parent_makes_the_parameter_inactive_unless_a_row_names_it() -> None:
    silent = Conditional("a", {1: Categorical([2])}, default=Categorical([3]))
    named = Conditional("a", {1: Categorical([2]), INACTIVE: Categorical([4])})

    assert silent.branch({}) is INACTIVE
    assert silent.branch({"a": 9}) == Categorical([3])
    assert named.branch({}) == named.branch({"a": INACTIVE}) == Categorical([4])
    assert named.branch({"a": 9}) is INVALID


def test_a_nested_condition_is_resolved_by_the_same_values() -> None:
    inner = Conditional("b", {1: Categorical(["deep"])}, default=INACTIVE)
    outer = Conditional("a", {1: inner}, default=Conditional("c", {1: INVALID}))

    assert outer.branch({"a": 1, "b": 1}) == Categorical(["deep"])
    assert outer.branch({"a": 1, "b": 2}) is INACTIVE
    assert outer.branch({"a": 2, "c": 1}) is INVALID
    assert outer.all_parents == ("a", "b", "c")


def test_a_parents_value_may_be_a_list() -> None:
    parameter = Conditional("op_types", {(("Conv", "MatMul"),): Categorical([1])}, default=INACTIVE)

    assert parameter.branch({"op_types": ["Conv", "MatMul"]}) == Categorical([1])
    assert parameter.branch({"op_types": ["Conv"]}) is INACTIVE


def test_a_parameter_written_in_yaml_may_map_one_parents_values_of_any_plain_type() -> None:
    text = """
    type: Conditional
    parents: a
    support:
      true: {type: Categorical, values: [1]}
      1: {type: Categorical, values: [1.0, 1]}
      1.5: INVALID
      null: INACTIVE
    """

    parameter = parameter_from_json(yaml.safe_load(text.replace("1:", "'1':", 1)))

    assert parameter == Conditional(
        "a", [((True,), Categorical([1])), (("1",), Categorical([1.0, 1])), ((1.5,), INVALID), ((None,), INACTIVE)], INVALID
    )


def test_a_conditional_default_chooses_and_becomes_a_parameter_of_single_choices() -> None:
    default = ConditionalDefault(parents="param2", support={(1,): 2, (2,): INACTIVE}, default=4)

    parameter = default.as_conditional()

    assert [default.choose({"param2": v}) for v in (1, 2, 3)] == [2, INACTIVE, 4]
    assert default.choose({}) is INACTIVE
    assert [parameter.branch({"param2": v}) for v in (1, 2, 3)] == [Categorical([2]), INACTIVE, Categorical([4])]


ROUND = [
    Categorical([True, 1, 1.0, None, "x", [1, [2]], {"a": [None]}]),
    Categorical(
        [
            10**40,
            -(2**63),
            1e300,
            1e-07,
            -0.0,
            0,
            "1",
            "true",
            "null",
            "~",
            "1e3",
            "é\n",
            "",
            [],
            {},
            [[], [{}]],
            {"type": "Categorical", "values": []},
        ]
    ),
    Conditional(
        "a",
        [
            ((10**40,), INVALID),
            (((1, (2, None)),), INACTIVE),
            (({"k": [1.0]},), Categorical([1])),
            ((False,), Categorical([2])),
            ((0,), INVALID),
        ],
    ),
    Boolean(),
    Conditional(
        ("a", "b"),
        [[(True, 1), Categorical([1])], [(1, True), INVALID], [(INACTIVE, None), Conditional("c", {"x": INACTIVE}, Categorical([0]))]],
        INACTIVE,
    ),
    ConditionalDefault("a", {(1,): [1, 2], (2,): INACTIVE, (3,): None}, default=INVALID),
]


@pytest.mark.parametrize("parameter", ROUND, ids=lambda p: type(p).__name__)
def test_json_yaml_and_pickle_give_back_the_same_parameter(parameter: Any) -> None:
    text = json.dumps(parameter.to_json())

    assert parameter_from_json(json.loads(text)) == parameter
    assert json.dumps(parameter_from_json(json.loads(text)).to_json()) == text
    assert parameter_from_json(yaml.safe_load(yaml.safe_dump(parameter.to_json()))) == parameter
    assert pickle.loads(pickle.dumps(parameter)) == parameter
    assert copy.deepcopy(parameter) == parameter


def test_a_parameter_written_by_hand_may_name_the_sentinels_and_map_one_parents_values() -> None:
    data = {
        "type": "Conditional",
        "parents": "mode",
        "support": {"static": {"type": "Categorical", "values": [1, 2]}, "dynamic": "INVALID"},
        "default": "INACTIVE",
    }

    assert parameter_from_json(data) == Conditional("mode", {"static": Categorical([1, 2]), "dynamic": INVALID}, INACTIVE)
    assert parameter_from_json({"type": "Boolean"}) == Boolean()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"type": "Categorial", "values": [1]}, "search space: a parameter's type must be known; got 'Categorial'. Did you mean 'Categorical'?"),
        ({"type": "Categorical", "vals": [1]}, "Categorical: values must be given; got only type, vals."),
        ({"type": "Categorical", "values": [1], "defualt": 1}, "Categorical: its keys must be known; got 'defualt'. Known: values."),
        ({"type": "Categorical", "values": 3}, "Categorical: values must be a list; got 3. Write Categorical([3])."),
        ({"type": "Conditional", "parents": "a", "support": 3}, "Conditional: support must map values of a to branches; got 3."),
        ({"values": [1]}, "search space: a parameter must be a mapping with a type; got {'values': [1]}. Write {type: Categorical, values: [...]}."),
    ],
)
def test_a_parameter_badly_written_is_refused_with_the_mend(data: Any, message: str) -> None:
    with pytest.raises(SpaceError) as caught:
        parameter_from_json(data)

    assert str(caught.value) == message


def test_a_value_that_json_cannot_hold_is_refused_when_written_not_before() -> None:
    parameter = Categorical([len, max])

    with pytest.raises(SpaceError, match="only values that JSON can hold can be written out"):
        parameter.to_json()


def test_parents_come_first_and_the_rest_keeps_its_order() -> None:
    order = order_parents_first({"z": ("a",), "y": (), "a": ("other.slot",), "b": ("z", "y")}, "Here")

    assert order == ["y", "a", "z", "b"]


def test_unknown_parents_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(SpaceError) as caught:
        order_parents_first({"calibrate_method": ("quant_mod",), "quant_mode": ()}, "OnnxQuantization")

    assert str(caught.value) == (
        "OnnxQuantization: the parents of calibrate_method must be known parameters; got 'quant_mod'. Did you mean 'quant_mode'?"
    )


def test_a_cycle_is_spelled_out() -> None:
    with pytest.raises(SpaceError) as caught:
        order_parents_first({"free": (), "a": ("b", "free"), "b": ("c",), "c": ("b",)}, "P")

    assert str(caught.value) == "P: no parameter may depend on itself; got b -> c -> b. Take one of the parents of b away."
