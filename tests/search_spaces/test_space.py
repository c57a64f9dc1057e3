"""Compiled spaces: what is refused and how it is said, exact counts, order, draws from huge spaces."""

import json
import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from autotune.errors import SpaceError
from autotune.search_spaces import (
    INACTIVE,
    INVALID,
    Alternative,
    Boolean,
    Categorical,
    Conditional,
    ConditionalDefault,
    Rule,
    Slot,
    compile_space,
    draw_points,
    enumerate_points,
    neighbours,
    point_key,
    same,
    walk,
)


@dataclass(frozen=True)
class NotBoth:
    one: tuple[str, Any]
    other: tuple[str, Any]

    def __call__(self, values: Mapping[str, Any]) -> bool:
        return not (values.get(self.one[0]) == self.one[1] and values.get(self.other[0]) == self.other[1])


def no_static(values: Mapping[str, Any]) -> bool:
    return values.get("quantize.mode") != "static"


QUANTIZATION = Alternative(
    "Quantization",
    {
        "method": Conditional("mode", {"static": Categorical(["minmax", "entropy"])}, default=INACTIVE),
        "mode": Categorical(["dynamic", "static"]),
        "bits": Categorical([8]),
    },
)
FLOAT16 = Alternative("Float16", {"bits": Categorical([16]), "keep_io": Boolean()})
SESSION = Alternative("Session", {"threads": Conditional("quantize", {"Quantization": Categorical([1, 2]), (None,): Categorical([4])}, INACTIVE)})
CHAIN = [Slot("quantize", (QUANTIZATION, FLOAT16), optional=True), Slot("session", (SESSION,))]


OPAQUE = {f"x{i}": Categorical(range(10)) for i in range(12)}


def test_a_chain_has_the_points_that_its_tables_say() -> None:
    space = compile_space(CHAIN)

    points = list(enumerate_points(space))

    static = {"quantize": "Quantization", "quantize.mode": "static", "quantize.bits": 8, "session": "Session"}
    dynamic = {"quantize": "Quantization", "quantize.mode": "dynamic", "quantize.bits": 8, "session": "Session"}
    assert points == [
        *({**dynamic, "session.threads": t} for t in (1, 2)),
        *({**static, "quantize.method": m, "session.threads": t} for m in ("minmax", "entropy") for t in (1, 2)),
        *({"quantize": "Float16", "quantize.bits": 16, "quantize.keep_io": k, "session": "Session"} for k in (True, False)),
        {"quantize": None, "session": "Session", "session.threads": 4},
    ]
    assert (space.valid, space.distinct, space.declared, space.invalid) == (9, 9, 9, {"INVALID": 0})


def test_parents_stand_before_their_children_and_slots_in_their_order() -> None:
    space = compile_space(CHAIN)

    order = space.variables

    assert order.index("quantize.mode") < order.index("quantize.method")
    assert order.index("quantize") < order.index("session")
    assert list(space.unrank(2))[:4] == ["quantize", "quantize.mode", "quantize.method", "quantize.bits"]


def test_a_parameter_that_two_alternatives_share_has_the_choices_of_the_one_that_is_held() -> None:
    space = compile_space(CHAIN)

    assert space.choices("quantize.bits") == (8, 16)
    assert space.offers("quantize.bits") == ((8,), (16,))
    assert {(p["quantize"], p.get("quantize.bits")) for p in enumerate_points(space)} == {("Quantization", 8), ("Float16", 16), (None, None)}


def test_alternatives_may_order_the_same_names_differently() -> None:
    one = Alternative("One", {"x": Categorical([1, 2]), "y": Conditional("x", {1: Categorical(["a"])}, INACTIVE)})
    other = Alternative("Other", {"y": Categorical([1, 2]), "x": Conditional("y", {1: Categorical(["b"])}, INACTIVE)})

    space = compile_space([Slot("s", (one, other))])

    assert list(enumerate_points(space)) == [
        {"s": "One", "s.x": 1, "s.y": "a"},
        {"s": "One", "s.x": 2},
        {"s": "Other", "s.y": 1, "s.x": "b"},
        {"s": "Other", "s.y": 2},
    ]


def test_conditions_reach_back_and_forth_across_slots() -> None:
    first = Alternative("First", {"a": Conditional("second.b", {1: Categorical(["x", "y"])}, default=INACTIVE)})
    second = Alternative("Second", {"b": Categorical([1, 2])})

    space = compile_space([Slot("first", (first,), optional=True), Slot("second", (second,))])

    assert space.valid == 5
    assert space.contains({"first": "First", "second": "Second", "second.b": 1, "first.a": "y"})
    assert not space.contains({"first": None, "second": "Second", "second.b": 1, "first.a": "y"})


def test_refused_leaves_are_counted_once_each_under_what_refuses_them_first() -> None:
    table = {
        "n": Categorical(range(10)),
        "a": Categorical([1, 2, 3]),
        "b": Conditional("a", {1: INVALID}, default=Categorical([1, 2])),
        "c": Categorical([1, 2]),
    }
    rules = [Rule("b-2", ("b", "c"), NotBoth(("b", 2), ("c", 2))), Rule("a-2", ("a", "c"), NotBoth(("a", 2), ("c", 2)))]

    space = compile_space(table, rules=rules)

    # leaves without n: a=1 makes 2 (INVALID); a=2 and a=3 make 4 each, of which b=2,c=2 falls to the first rule, a=2,b=1,c=2 to the second
    assert space.invalid == {"INVALID": 20, "b-2": 20, "a-2": 10}
    assert (space.valid, space.declared) == (50, 100)


def test_rules_of_one_id_are_counted_together() -> None:
    table = {"a": Categorical([1, 2, 3])}
    rules = [Rule("same", ("a",), NotBoth(("a", v), ("a", v))) for v in (1, 2)]

    space = compile_space(table, rules=rules)

    assert space.invalid == {"INVALID": 0, "same": 2}


def test_a_walk_is_offered_only_what_can_still_end_well_and_asked_only_where_there_is_a_choice() -> None:
    table = {"a": Categorical([1, 2, 3]), "b": Conditional("a", {1: INVALID, 2: Categorical([7])}, default=Categorical([8, 9]))}
    space = compile_space(table, rules=[Rule("r", ("a", "b"), NotBoth(("a", 3), ("b", 8)))])
    asked = []

    def last(name: str, choices: tuple[Any, ...]) -> Any:
        asked.append((name, choices))
        return choices[-1]

    point = walk(space, last)

    assert point == {"a": 3, "b": 9}
    assert asked == [("a", (2, 3))]


def test_a_pick_that_was_not_offered_is_refused() -> None:
    space = compile_space({"a": Categorical([1, 2])})

    with pytest.raises(SpaceError, match=r"the value picked for a must be one of \[1, 2\]; got True"):
        walk(space, lambda name, choices: True)


def test_points_hold_copies_so_that_changing_one_changes_nothing_else() -> None:
    space = compile_space({"op_types": Categorical([["Conv"], ["MatMul"]])})

    space.unrank(0)["op_types"].append("Gemm")

    assert space.unrank(0) == {"op_types": ["Conv"]}


@pytest.mark.parametrize("conditions", [0, 8, 24])
def test_ten_to_the_24_points_are_counted_exactly_and_drawn_from_without_being_made(conditions: int) -> None:
    table: dict[str, Any] = {f"x{i}": Categorical(range(10)) for i in range(24)}
    for i in range(conditions):  # declared far from their parents
        table[f"y{i}"] = Conditional(f"x{i}", {0: Categorical([1, 2])}, default=INACTIVE)
    space = compile_space(table)

    points = draw_points(space, 100, seed=3)

    assert space.valid == 10 ** (24 - conditions) * 11**conditions
    assert len({point_key(p) for p in points}) == 100
    assert [space.unrank(space.rank(p)) for p in points] == points
    assert max(len(layer) for layer in space.diagram.layers) <= 256, "the diagram has not grown with the space"


def test_rules_between_far_variables_do_not_blow_up() -> None:
    table = {f"x{i}": Categorical(range(10)) for i in range(24)}
    rules = [Rule(f"r{i}", (f"x{i}", f"x{i + 12}"), NotBoth((f"x{i}", 0), (f"x{i + 12}", 0))) for i in range(12)]

    space = compile_space(table, rules=rules)

    assert space.valid == 99**12
    assert space.declared == 10**24


def test_draws_are_uniform_over_points_not_over_branches() -> None:
    small_and_large = {"branch": Categorical(["small", "large"]), "x": Conditional("branch", {"large": Categorical(range(99))}, INACTIVE)}
    space = compile_space(small_and_large)

    firsts = [draw_points(space, 1, seed=seed)[0]["branch"] for seed in range(2000)]

    assert 5 <= Counter(firsts)["small"] <= 45  # binomial(2000, 1/100): mean 20, standard deviation 4.4; fixed seeds


def test_the_key_of_a_point_tells_types_apart_and_forgets_order() -> None:
    values = [None, True, 1, 1.0, "1", [1], {"a": 1}]

    assert len({point_key({"x": v}) for v in values}) == len(values)
    assert point_key({"a": 1, "b": None}) == point_key({"b": None, "a": 1})
    assert point_key({"a": 1}) != point_key({"a": 1, "b": None})


def test_a_point_is_contained_only_with_every_active_variable_and_no_other() -> None:
    space = compile_space(CHAIN)
    point = space.unrank(0)

    assert space.contains(point)
    assert not space.contains({**point, "quantize.method": "minmax"})
    assert not space.contains({name: v for name, v in point.items() if name != "session"})
    assert not space.contains({**point, "session.threads": True})
    with pytest.raises(SpaceError, match="a rank must lie between 0 and 8; got 9"):
        space.unrank(9)


def test_rows_of_a_passes_own_table_may_fall_away_when_parents_are_narrowed() -> None:
    narrowed = Alternative("Quantization", {**QUANTIZATION.parameters, "mode": Categorical(["dynamic"])})

    space = compile_space([Slot("quantize", (narrowed,))])

    assert space.valid == 1
    assert space.unreachable == ("quantize.method: mode='static'",)


def test_rows_written_for_this_space_must_be_able_to_occur() -> None:
    written = Alternative("P", {"mode": Boolean(), "x": Conditional("mode", {1: Categorical([1])}, INACTIVE)}, written=frozenset({"x"}))

    with pytest.raises(SpaceError) as caught:
        compile_space([Slot("s", (written,))])

    assert (
        str(caught.value) == "search space: a row in the condition of s.x must be able to occur; got mode=1. The choices of mode are [True, False]."
    )


def test_a_row_that_only_combinations_keep_from_occurring_is_refused_too() -> None:
    table = {
        "a": Categorical([1, 2]),
        "b": Conditional("a", {1: Categorical(["x"])}, default=Categorical(["y"])),
        "c": Conditional(("a", "b"), {(1, "y"): Categorical([1])}, default=INACTIVE),
    }

    with pytest.raises(SpaceError, match=r"a row in the condition of c must be able to occur; got a=1, b='y'\. These values never come together"):
        compile_space(table)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: compile_space({"mode": Boolean(), "x": Conditional("mod", {True: INACTIVE})}),
            "search space: the parents of x must be known; got 'mod'. Did you mean 'mode'?",
        ),
        (
            lambda: compile_space([Slot("s", (Alternative("P", {"x": Conditional("t.mode", {True: INACTIVE})}),))]),
            "search space: the parents of s.x must be known; got 't.mode'. Known: s.",
        ),
        (
            lambda: compile_space({"a": Conditional("b", {1: INACTIVE}), "b": Conditional("a", {1: INACTIVE})}),
            "search space: no parameter may depend on itself; got a -> b -> a. Take one of the parents of a away.",
        ),
        (lambda: compile_space({"a": [1, 2]}), "search space: a must be a Categorical or a Conditional; got [1, 2]. Write Categorical([1, 2])."),  # type: ignore[dict-item]
        (
            lambda: compile_space({"a": Boolean(), "b": Conditional("a", {True: INVALID}), "c": ConditionalDefault("a", {})}),  # type: ignore[dict-item]
            "search space: c must be a Categorical or a Conditional; got ConditionalDefault(parents=('a',), support={}, default=None). "
            "Use its as_conditional().",
        ),
        (
            lambda: compile_space({"a": Boolean(), "b": Conditional("a", {True: INVALID})}),
            "search space: at least one valid point must remain; got 2 points: 2 refused by INVALID branches (b with a=True). "
            "Make a branch valid, or widen the parents' choices.",
        ),
        (
            lambda: compile_space(
                {"quantize.mode": Categorical(["static"])}, rules=[Rule("data-needed", ("quantize.mode",), no_static, "Give --calib.")]
            ),
            "search space: at least one valid point must remain; got 1 points: 1 refused by data-needed. Give --calib.",
        ),
        (
            lambda: compile_space({"mode": Boolean()}, rules=[Rule("r", ("mod",), no_static)]),
            "rule r: a rule must look at variables of the space; got 'mod'. Did you mean 'mode'?",
        ),
        (
            lambda: compile_space(
                {
                    "a": Conditional(("b", "d"), {(1, 1): INACTIVE}),
                    "b": Conditional("c", {1: INACTIVE}),
                    "c": Conditional("a", {1: INACTIVE}),
                    "d": Categorical([1]),
                }
            ),
            "search space: no parameter may depend on itself; got a -> b -> c -> a. Take one of the parents of a away.",
        ),
        (
            lambda: compile_space(
                {
                    "a": Categorical([1, 2]),
                    "b": Conditional("a", {1: Categorical(["x", "y"])}, default=INACTIVE),
                    "c": Conditional("b", {"x": INVALID, "y": INVALID}, default=INACTIVE),
                }
            ),
            "search space: the branch of b for a=1 must leave a valid point; got only combinations that c makes INVALID. "
            "Make one of them valid, or this branch INVALID too.",
        ),
        (
            lambda: compile_space(
                [Slot("quantize", (FLOAT16,), True), Slot("session", (Alternative("Session", {}),), True)],
                rules=[
                    Rule(
                        "provider-mismatch", ("quantize",), NotBoth(("quantize", "Float16"), ("quantize", "Float16")), "Float16: is for another EP."
                    ),
                    Rule("missing-engine", ("session",), NotBoth(("session", "Session"), ("session", "Session")), "Session: install it."),
                ],
            ),
            "search space: at least one slot must be able to hold a pass; got quantize, session can only be skipped: "
            "quantize='Float16', quantize.bits=16, quantize.keep_io=True, session='Session' refused by provider-mismatch; "
            "quantize=None, session='Session' refused by missing-engine. Float16: is for another EP. Session: install it.",
        ),
        (
            lambda: compile_space({"mode": Boolean()}, keep=[{"mood": True}]),
            "search space: a point to keep must be made of variables of the space; got 'mood'. Did you mean 'mode'?",
        ),
        (
            lambda: compile_space(OPAQUE, rules=[Rule("never", tuple(OPAQUE), lambda values: False)]),
            "search space: at least one valid point must be found; got none in 28330 calls of rules (never). "
            "Split conditions and rules that look at many variables into smaller ones, or name a valid point to start from.",
        ),
        (lambda: compile_space([]), "search space: a chain must have at least one slot; got none. Add a pass."),
        (lambda: compile_space([Slot("s", ())]), "slot s: it must have at least one pass to choose from; got none."),
        (
            lambda: compile_space([Slot("s", (FLOAT16,)), Slot("s", (FLOAT16,))]),
            "search space: slots must have different names; got 's' twice. Rename one.",
        ),
        (
            lambda: compile_space([Slot("s", (FLOAT16, FLOAT16))]),
            "slot s: its alternatives must have different names; got 'Float16' twice. Give one a name of its own.",
        ),
        (lambda: compile_space([Slot("a.b", (FLOAT16,))]), "search space: the name of a slot must not hold '.'; got 'a.b'. Rename it."),
    ],
)
def test_a_space_that_cannot_be_compiled_is_refused_by_name_with_the_mend(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpaceError) as caught:
        make()

    assert str(caught.value) == message


def test_a_rule_that_fails_is_named_before_any_trial() -> None:
    with pytest.raises(SpaceError, match=r"rule r: a rule must be able to judge \{'a': 1\}; got KeyError: 'missing'"):
        compile_space({"a": Categorical([1])}, rules=[Rule("r", ("a",), lambda values: bool(values["missing"]))])


def adds_up(values: Mapping[str, Any]) -> bool:
    return sum(values.values()) % 7 != 0


@pytest.fixture
def soon_too_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give exact counts up after two thousand edges: the rest is the same, and the tests take a tenth of the time."""
    monkeypatch.setattr("autotune.search_spaces.diagram._MOST_EDGES", 2000)


@pytest.mark.usefixtures("soon_too_dear")
def test_where_a_rule_looks_at_too_much_a_part_of_the_space_is_kept_and_said_to_be_one() -> None:
    asked = []

    def counted(values: Mapping[str, Any]) -> bool:
        asked.append(0)
        return adds_up(values)

    nines, ones = dict.fromkeys(OPAQUE, 9), dict.fromkeys(OPAQUE, 1)
    last = {f"x{i}": i % 3 for i in range(6)}

    space = compile_space(OPAQUE, rules=[Rule("sum", tuple(OPAQUE), counted)], keep=[nines, ones, last])

    points = list(enumerate_points(space))
    assert not space.exact
    assert space.to_json()["exact"] is False
    assert repr(space) == f"Space(12 variables, at least {space.valid} points)"
    assert 1000 <= len(points) == space.valid
    assert all(adds_up(point) for point in points)
    assert space.contains(nines)
    assert space.contains(ones)
    assert any(last.items() <= point.items() for point in points)
    assert not adds_up(space.examples["sum"])
    assert all({point[name] for point in points} == set(range(10)) for name in OPAQUE), "no choice is left out"
    assert len(asked) <= 80_000
    assert list(enumerate_points(compile_space(OPAQUE, rules=[Rule("sum", tuple(OPAQUE), adds_up)], keep=[nines, ones, last]))) == points


@pytest.mark.usefixtures("soon_too_dear")
def test_a_chooser_may_name_the_point_to_keep() -> None:
    space = compile_space(OPAQUE, rules=[Rule("sum", tuple(OPAQUE), adds_up)], keep=[lambda name, choices: choices[3]])

    assert space.contains({**dict.fromkeys(OPAQUE, 3)})  # 36 is no multiple of 7


def test_rows_are_not_called_unreachable_where_nobody_looked() -> None:
    table = {f"x{i}": Conditional(f"y{i}", {0: Categorical([1])}, INACTIVE) for i in range(3)} | {f"y{i}": Categorical(range(10)) for i in range(3)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.search_spaces.diagram._MANY_STATES", 0)
        patch.setattr("autotune.search_spaces.diagram._MOST_EDGES", 0)
        patch.setattr("autotune.search_spaces.diagram._SUBSET_STATES", 1)
        space = compile_space(table, keep=[{"y0": 7}])

    assert not space.exact
    assert space.unreachable == ()
    assert any(point["y0"] == 7 for point in enumerate_points(space))


def test_a_condition_on_many_parents_costs_only_what_its_rows_can_be_told_apart_in() -> None:
    names = tuple(OPAQUE)
    rows = {(1,) * 12: Categorical([1, 2]), (2,) * 12: INVALID, (1, 2, *(3,) * 10): INVALID}

    space = compile_space({**OPAQUE, "c": Conditional(names, rows, Categorical([5, 6, 7]))})

    assert space.exact
    assert space.valid == (10**12 - 3) * 3 + 2
    assert space.invalid == {"INVALID": 2}
    assert max(len(layer) for layer in space.diagram.layers) <= 5


def test_each_id_that_refuses_something_has_an_example_of_what_it_refuses_first() -> None:
    table = {"a": Categorical([1, 2, 3]), "b": Conditional("a", {1: INVALID}, default=Categorical([1, 2])), "c": Categorical([1, 2])}
    rules = [Rule("b-2", ("b", "c"), NotBoth(("b", 2), ("c", 2))), Rule("never", ("a",), NotBoth(("a", 9), ("a", 9)))]

    space = compile_space(table, rules=rules)

    assert space.examples == {"INVALID": {"a": 1, "c": 1}, "b-2": {"a": 2, "b": 2, "c": 2}}
    assert space.to_json()["examples"] == space.examples


def test_neighbours_differ_by_one_decision_completed_through_the_conditions() -> None:
    space = compile_space(CHAIN)
    point = {"quantize": "Quantization", "quantize.mode": "dynamic", "quantize.bits": 8, "session": "Session", "session.threads": 2}

    found = neighbours(space, point, complete=lambda name, choices, so_far: choices[-1])

    assert found == [
        {"quantize": "Float16", "quantize.bits": 16, "quantize.keep_io": False, "session": "Session"},
        {"quantize": None, "session": "Session", "session.threads": 4},
        {**point, "quantize.mode": "static", "quantize.method": "entropy"},
        {**point, "session.threads": 1},
    ]
    assert list(found[2]) == ["quantize", "quantize.mode", "quantize.method", "quantize.bits", "session", "session.threads"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantize.mode": "sttic"}, "search space: quantize.mode must be one of ['dynamic', 'static'] here; got 'sttic'."),
        (
            {"quantize.keep_io": True},
            "search space: quantize.keep_io must be left out: it is inactive here; got True. A point holds active variables only.",
        ),
        ({"session": ...}, "search space: session must be one of ['Session'] here; got none. A point holds every active variable."),
        ({"quantize.mod": 1}, "search space: a variable must be one of the space's; got 'quantize.mod'. Did you mean 'quantize.mode'?"),
    ],
)
def test_a_point_that_is_none_of_the_space_is_refused_by_the_name_that_is_wrong(change: dict[str, Any], message: str) -> None:
    space = compile_space(CHAIN)
    point = {name: value for name, value in {**space.unrank(0), **change}.items() if value is not ...}

    for refuse in (lambda: neighbours(space, point), lambda: space.rank(point)):
        with pytest.raises(SpaceError) as caught:
            refuse()
        assert str(caught.value) == message


def test_values_of_every_json_type_may_decide_and_be_decided() -> None:
    values = [None, True, 1, 1.0, "1", [1], [[1]], [True], {}, {"a": [1, None]}, 10**40, ""]
    table = {
        "a": Categorical(values),
        "b": Conditional("a", [((v,), Categorical([v])) for v in values]),
    }

    points = list(enumerate_points(compile_space(table)))

    assert len(points) == len(values)
    assert all(same(point["a"], point["b"]) and same(point["a"], value) for point, value in zip(points, values, strict=True))


def test_a_default_may_depend_on_a_parameter_that_is_searched() -> None:
    default = ConditionalDefault(("mode", "s.bits"), {("static", 8): "minmax", ("static", 16): "entropy"}, default=INACTIVE)
    table = {"method": default.as_conditional(), "mode": Categorical(["static", "dynamic"]), "bits": Categorical([8, 16])}

    space = compile_space([Slot("s", (Alternative("P", table),))])

    assert [(p["s.mode"], p["s.bits"], p.get("s.method")) for p in enumerate_points(space)] == [
        ("static", 8, "minmax"),
        ("static", 16, "entropy"),
        ("dynamic", 8, None),
        ("dynamic", 16, None),
    ]


def test_a_table_without_parameters_is_one_point() -> None:
    space = compile_space({})

    assert list(enumerate_points(space)) == draw_points(space, 5, seed=0) == [{}]


def test_a_space_survives_pickling_without_its_rules_functions() -> None:
    rule = Rule("no-static", ("quantize.mode",), lambda values: values.get("quantize.mode") != "static", "message")  # a lambda can't be pickled
    space = compile_space(CHAIN, rules=[rule])

    again = pickle.loads(pickle.dumps(space))

    assert list(enumerate_points(again)) == list(enumerate_points(space))
    assert draw_points(again, 5, seed=1) == draw_points(space, 5, seed=1)
    assert again.invalid == {"INVALID": 0, "no-static": 4}


def test_the_description_in_json_holds_tables_choices_and_counts_and_takes_objects_as_values() -> None:
    chain = [Slot("s", (Alternative("P", {"objects": Categorical([len, None]), "on": Conditional("objects", {None: Boolean()}, INACTIVE)}),), True)]

    data = json.loads(json.dumps(compile_space(chain).to_json()))

    assert data["variables"][1] == {"name": "s.objects", "choices": [{"object": "builtins:len"}, None]}
    assert data["slots"][0]["alternatives"][0]["parameters"]["on"]["support"] == [[[None], {"type": "Categorical", "values": [True, False]}]]
    assert (data["valid"], data["declared"], data["invalid"]) == (4, 4, {"INVALID": 0})


def test_compiling_leaves_its_arguments_as_they_were_and_a_later_change_to_them_has_no_effect() -> None:
    table = dict(FLOAT16.parameters)
    chain = [Slot("s", (Alternative("Float16", table),))]
    before = pickle.dumps(chain)

    space = compile_space(chain)
    unchanged = pickle.dumps(chain) == before
    table["late"] = Categorical([1])

    assert unchanged
    assert "late" not in space.to_json()["slots"][0]["alternatives"][0]["parameters"]
