"""Laws of search spaces: random conditional spaces, held against a brute-force walk written here for the purpose."""

import json
import pickle
import random
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autotune.errors import SpaceError
from autotune.search_spaces import (
    INACTIVE,
    INVALID,
    Alternative,
    Categorical,
    Conditional,
    Rule,
    Slot,
    Space,
    compile_space,
    draw_points,
    enumerate_points,
    neighbours,
    parameter_from_json,
    point_key,
    walk,
)

POOL = [0, 1, 2, True, False, None, "a", 1.0, [1], {"k": 2}]
MOST_LEAVES = 1000  # of a space that the oracle walks
LAWS = settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))


@dataclass(frozen=True)
class Forbid:
    """Refuses one combination of values; an inactive variable is written INACTIVE. Values are told apart by their `repr`."""

    combination: tuple[tuple[str, str], ...]

    def __call__(self, values: Mapping[str, Any]) -> bool:
        return not all(repr(values.get(name, INACTIVE)) == text for name, text in self.combination)


@dataclass(frozen=True)
class Declared:
    """A chain, its rules, and what the oracle needs: (name, slot, alternative, parameter) of each variable, parents first."""

    slots: tuple[Slot, ...]
    rules: tuple[Rule, ...]
    variables: tuple[tuple[str, str, str | None, Any], ...]


# ---- the oracle ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """The end of a walk that doesn't prune: one value (or INACTIVE) a turn, the rows looked up, who refuses it first (None: valid)."""

    turns: tuple[Any, ...]
    point: dict[str, Any]
    rows: frozenset[str]
    refuser: str | None
    holds_invalid: bool


def oracle_branch(declared: Declared, slot: str, branch: Any, values: Mapping[str, Any], path: str, seen: set[str]) -> Any:
    if not isinstance(branch, Conditional):
        return branch
    state = []
    for parent in branch.parents:
        own = f"{slot}.{parent}"
        known = any(name == own for name, *_ in declared.variables)
        state.append(values.get(own if known else parent, INACTIVE))
    for number, (row, below) in enumerate(branch.support.items()):
        if [repr(v) for v in row] == [repr(v) for v in state]:
            seen.add(f"{path}/{number}")
            return oracle_branch(declared, slot, below, values, f"{path}/{number}", seen)
    if INACTIVE in state:
        return INACTIVE
    return oracle_branch(declared, slot, branch.default, values, f"{path}/default", seen)


def oracle_rows(branch: Any, path: str) -> dict[str, Any]:
    """The branch of every row, by the row's place."""
    if not isinstance(branch, Conditional):
        return {}
    rows = {}
    for number, below in enumerate(branch.support.values()):
        rows[f"{path}/{number}"] = below
        rows.update(oracle_rows(below, f"{path}/{number}"))
    return rows | oracle_rows(branch.default, f"{path}/default")


def all_rows(declared: Declared) -> dict[str, Any]:
    return {
        place: row for name, _, alternative, parameter in declared.variables for place, row in oracle_rows(parameter, f"{name}:{alternative}").items()
    }


def oracle_leaves(declared: Declared) -> Iterator[Leaf]:
    variables, last = declared.variables, {}
    for i, (name, *_) in enumerate(variables):
        last[name] = i

    def go(i: int, turns: tuple[Any, ...], values: dict[str, Any], rows: frozenset[str], refuser: str | None, invalid: bool) -> Iterator[Leaf]:
        if i == len(variables):
            yield Leaf(turns, dict(values), rows, refuser, invalid)
            return
        name, slot, alternative, parameter = variables[i]
        branch: Any = INACTIVE
        seen: set[str] = set()
        if alternative is None or values[slot] == alternative:
            branch = oracle_branch(declared, slot, parameter, values, f"{name}:{alternative}", seen)
        nothing_to_choose = branch is INACTIVE or branch is INVALID
        options = [(INACTIVE, values)] if nothing_to_choose else [(value, {**values, name: value}) for value in branch.values]
        for value, chosen in options:
            judged = [r for r in declared.rules if max(last[n] for n in r.names) == i]
            refusing = [r.id for r in judged if not r.allows({n: chosen[n] for n in r.names if n in chosen})]
            refused = refuser or ("INVALID" if branch is INVALID else None) or (refusing[0] if refusing else None)
            yield from go(i + 1, (*turns, value), chosen, rows | seen, refused, invalid or branch is INVALID)

    yield from go(0, (), {}, frozenset(), None, False)


def leaves_of(declared: Declared) -> list[Leaf]:
    """Every leaf, in the order of the walk; sets aside what is too large for this."""
    leaves = list(islice(oracle_leaves(declared), MOST_LEAVES + 1))
    assume(len(leaves) <= MOST_LEAVES)
    return leaves


def oracle_refusal(declared: Declared, leaves: list[Leaf]) -> str | None:
    """What a compiler must say of a space that it can't take; None for one it can."""
    places = all_rows(declared)
    strict = places if not declared.slots else {}
    if strict.keys() - {row for leaf in leaves for row in leaf.rows}:
        return "must be able to occur"
    sound = [leaf for leaf in leaves if not leaf.holds_invalid]
    alive = {row for leaf in sound for row in leaf.rows}
    if sound and any(row not in alive and isinstance(branch, Categorical) and len(branch.values) > 1 for row, branch in strict.items()):
        return "must leave a valid point"
    points = [leaf.point for leaf in leaves if leaf.refuser is None]
    if not points:
        return "at least one valid point must remain"
    if declared.slots and all(point[slot.name] is None for point in points for slot in declared.slots):
        return "at least one slot must be able to hold a pass"
    return None


def oracle_neighbours(declared: Declared, valid: list[Leaf], leaf: Leaf) -> list[dict[str, Any]]:
    """What one decision parts from a valid leaf: another value that some valid leaf has there after the same beginning, then as before."""
    names = [name for name, *_ in declared.variables]
    found = []
    for turn, mine in enumerate(leaf.turns):
        if mine is INACTIVE:
            continue
        alike = [other for other in valid if repr(other.turns[:turn]) == repr(leaf.turns[:turn])]
        for value in {repr(other.turns[turn]): other.turns[turn] for other in alike}.values():
            if repr(value) == repr(mine):
                continue
            left = [other for other in alike if repr(other.turns[turn]) == repr(value)]
            for later in range(turn + 1, len(names)):
                offered = [repr(other.turns[later]) for other in left]  # in the order of the walk, so the first is the first on offer
                before = repr(leaf.point.get(names[later], INACTIVE))
                chosen = before if before in offered else offered[0]
                left = [other for other in left if repr(other.turns[later]) == chosen]
            found.append(left[0].point)
    return found


# ---- random spaces -------------------------------------------------------------------------------------------------------------


def some_values(draw: st.DrawFn) -> list[Any]:
    return [POOL[i] for i in draw(st.lists(st.integers(0, len(POOL) - 1), min_size=1, max_size=3, unique=True))]


def some_branch(draw: st.DrawFn, visible: Mapping[str, list[Any]], depth: int) -> Any:
    kind = draw(st.sampled_from(["values", "values", "values", "inactive", "invalid", "condition"]))
    if kind in ("inactive", "invalid"):
        return INACTIVE if kind == "inactive" else INVALID
    if kind == "condition" and depth < 2:
        return some_condition(draw, visible, depth + 1)
    return Categorical(some_values(draw))


def some_condition(draw: st.DrawFn, visible: Mapping[str, list[Any]], depth: int = 0) -> Conditional:
    """A condition on one or two of the visible variables, with rows for values they may have, INACTIVE among them."""
    parents = draw(st.lists(st.sampled_from(sorted(visible)), min_size=1, max_size=2, unique=True))
    rows: dict[str, tuple[tuple[Any, ...], Any]] = {}
    for _ in range(draw(st.integers(1, 3))):
        row = tuple(draw(st.sampled_from([*visible[p], INACTIVE])) for p in parents)
        rows[repr(row)] = (row, some_branch(draw, visible, depth))
    default = draw(st.sampled_from([INVALID, INACTIVE, INACTIVE, "values"]))
    return Conditional(tuple(parents), list(rows.values()), Categorical(some_values(draw)) if default == "values" else default)


@st.composite
def chains(draw: st.DrawFn, most_parameters: int = 8) -> Declared:
    """One to three slots with three parameters or more in all, as long as their alternatives have room for them."""
    slots: list[Slot] = []
    variables: list[tuple[str, str, str | None, Any]] = []
    choices: dict[str, list[Any]] = {}  # union of choices of every variable so far
    left = draw(st.integers(3, most_parameters))
    for s in range(draw(st.integers(1, 3))):
        name = f"s{s}"
        alternatives = []
        names = [f"Pass{a}" for a in range(draw(st.integers(1, 2)))]
        optional = draw(st.booleans())
        variables.append((name, name, None, Categorical([*names, None] if optional else names)))
        choices[name] = [*names, None] if optional else list(names)
        found: dict[str, list[Any]] = {}
        for alternative in names:
            own: dict[str, list[Any]] = {}
            table: dict[str, Any] = {}
            for p in range(min(left, draw(st.integers(0, 4)))):
                left -= 1
                parameter = some_condition(draw, {**choices, **own}) if draw(st.booleans()) else Categorical(some_values(draw))
                table[f"p{p}"] = parameter
                own[f"p{p}"] = oracle_values(parameter) or [0]
                variables.append((f"{name}.p{p}", name, alternative, parameter))
                found.setdefault(f"{name}.p{p}", []).extend(own[f"p{p}"])
            alternatives.append(Alternative(alternative, table))
        choices.update({variable: values for variable, values in found.items() if values})
        slots.append(Slot(name, tuple(alternatives), optional))
    return Declared(tuple(slots), some_rules(draw, choices), tuple(variables))


@st.composite
def tables(draw: st.DrawFn) -> Declared:
    """Parameters without slots, three to eight of them, parents first."""
    variables: list[tuple[str, str, str | None, Any]] = []
    choices: dict[str, list[Any]] = {}
    for p in range(draw(st.integers(3, 8))):
        parameter = some_condition(draw, choices) if p and draw(st.booleans()) else Categorical(some_values(draw))
        variables.append((f"v{p}", "", None, parameter))
        choices[f"v{p}"] = oracle_values(parameter) or [0]
    return Declared((), some_rules(draw, choices), tuple(variables))


def some_rules(draw: st.DrawFn, choices: Mapping[str, list[Any]]) -> tuple[Rule, ...]:
    rules = []
    for r in range(draw(st.integers(0, 2))):
        looked_at = draw(st.lists(st.sampled_from(sorted(choices)), min_size=1, max_size=2, unique=True))
        combination = tuple((n, repr(draw(st.sampled_from([*choices[n], INACTIVE])))) for n in looked_at)
        rules.append(Rule(f"rule{r}", tuple(looked_at), Forbid(combination), "loosen the rule"))
    return tuple(rules)


def oracle_values(branch: Any) -> list[Any]:
    if isinstance(branch, Categorical):
        return list(branch.values)
    if isinstance(branch, Conditional):
        return [v for b in [*branch.support.values(), branch.default] for v in oracle_values(b)]
    return []


def what(declared: Declared) -> Any:
    return declared.slots or {name: parameter for name, _, _, parameter in declared.variables}


def compiled(declared: Declared, *, at_most: int) -> Space:
    """Compile, setting aside spaces that are refused and those too large."""
    try:
        space = compile_space(what(declared), rules=declared.rules)
    except SpaceError:
        assume(False)
        raise
    assume(space.declared <= at_most)
    return space


def keys(points: Any) -> list[str]:
    return [point_key(p) for p in points]


# ---- the laws ------------------------------------------------------------------------------------------------------------------


@given(chains() | tables())
@LAWS
def test_points_counts_examples_and_refusals_are_those_of_the_brute_force_walk(declared: Declared) -> None:
    leaves = leaves_of(declared)
    points = [leaf.point for leaf in leaves if leaf.refuser is None]
    refused = {name: [leaf.point for leaf in leaves if leaf.refuser == name] for name in ["INVALID", *(rule.id for rule in declared.rules)]}
    refusal = oracle_refusal(declared, leaves)
    if refusal is not None:
        with pytest.raises(SpaceError, match=refusal):
            compile_space(what(declared), rules=declared.rules)
        return

    space = compile_space(what(declared), rules=declared.rules)

    assert list(enumerate_points(space)) == points
    assert [list(point) for point in enumerate_points(space)] == [list(point) for point in points], "variables stand in the walk's order"
    assert space.exact
    assert (space.valid, space.declared) == (len(points), len(leaves))
    assert space.invalid == {name: len(those) for name, those in refused.items()}
    assert space.distinct == len(set(keys(points)))
    assert set(space.examples) == {name for name, those in refused.items() if those}
    assert all(example in refused[name] for name, example in space.examples.items())
    assert len(space.unreachable) == len(all_rows(declared).keys() - {row for leaf in leaves for row in leaf.rows})


@given(tables() | chains())
@LAWS
def test_the_order_that_keeps_wide_diagrams_narrow_changes_no_point_and_no_count(declared: Declared) -> None:
    usual = compiled(declared, at_most=1000)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.search_spaces.diagram._MANY_STATES", 0)  # so that the other order is taken
        narrow = compile_space(what(declared), rules=declared.rules)

    assert sorted(keys(enumerate_points(narrow))) == sorted(keys(enumerate_points(usual)))
    assert (narrow.valid, narrow.declared, narrow.exact) == (usual.valid, usual.declared, True)
    assert sorted(narrow.unreachable) == sorted(usual.unreachable)
    assert set(narrow.variables) == set(usual.variables)


@given(tables(), st.randoms(use_true_random=False))
@LAWS
def test_the_order_in_which_a_table_is_written_changes_no_point_and_no_refusal(declared: Declared, shuffler: random.Random) -> None:
    leaves = leaves_of(declared)
    refusal = oracle_refusal(declared, leaves)
    table = list(what(declared).items())
    shuffler.shuffle(table)
    if refusal is not None:
        with pytest.raises(SpaceError, match=refusal):
            compile_space(dict(table), rules=declared.rules)
        return

    space = compile_space(dict(table), rules=declared.rules)

    assert sorted(keys(enumerate_points(space))) == sorted(keys(leaf.point for leaf in leaves if leaf.refuser is None))
    assert (space.valid, space.declared) == (sum(leaf.refuser is None for leaf in leaves), len(leaves))


@given(chains() | tables())
@LAWS
def test_rank_and_unrank_undo_each_other_and_follow_the_order_of_enumeration(declared: Declared) -> None:
    space = compiled(declared, at_most=1000)

    points = list(enumerate_points(space))

    assert [space.rank(point) for point in points] == list(range(space.valid))
    assert [space.unrank(rank) for rank in range(space.valid)] == points


@given(chains() | tables(), st.integers(0, 2**32))
@LAWS
def test_a_draw_covers_the_space_exactly_once_and_honours_its_seed_and_exclusions(declared: Declared, seed: int) -> None:
    space = compiled(declared, at_most=300)
    every = set(keys(enumerate_points(space)))

    drawn = draw_points(space, space.valid + 5, seed=seed)
    some = draw_points(space, (space.valid + 1) // 2, seed=seed)
    rest = draw_points(space, space.valid, seed=seed, exclude=frozenset(keys(some)))

    assert len(drawn) == space.valid
    assert set(keys(drawn)) == every
    assert some == drawn[: len(some)]
    assert set(keys(rest)) == every - set(keys(some))
    assert len(rest) == space.valid - len(some)


@given(chains() | tables(), st.integers(0, 2**32))
@LAWS
def test_neighbours_are_those_of_the_brute_force_walk_and_differ_by_one_decision(declared: Declared, seed: int) -> None:
    leaves = leaves_of(declared)
    assume(oracle_refusal(declared, leaves) is None)
    valid = [leaf for leaf in leaves if leaf.refuser is None]
    space = compile_space(what(declared), rules=declared.rules)

    for leaf in random.Random(seed).sample(valid, min(3, len(valid))):
        found = neighbours(space, leaf.point)

        assert found == oracle_neighbours(declared, valid, leaf)
        assert len({point_key(leaf.point), *keys(found)}) == len(found) + 1, "all differ, and none is the point itself"
        assert all(space.contains(point) for point in found)


@given(chains(), st.integers(0, 2**32))
@LAWS
def test_a_neighbour_is_completed_by_the_given_chooser_and_only_where_nothing_can_be_kept(declared: Declared, seed: int) -> None:
    space = compiled(declared, at_most=1000)
    point = space.unrank(seed % space.valid)
    asked: list[tuple[str, tuple[Any, ...]]] = []

    def last(name: str, choices: tuple[Any, ...], so_far: Mapping[str, Any]) -> Any:
        asked.append((name, choices))
        assert name not in so_far
        return choices[-1]

    found = neighbours(space, point, complete=last)

    assert len(found) == len(neighbours(space, point))
    assert all(space.contains(p) for p in found)
    assert all(len(choices) > 1 and repr(point.get(name, INACTIVE)) not in map(repr, choices) for name, choices in asked)


@given(chains() | tables(), st.integers(0, 2**32))
@LAWS
def test_a_walk_with_any_chooser_ends_in_a_valid_point(declared: Declared, seed: int) -> None:
    space = compiled(declared, at_most=1000)
    every = set(keys(enumerate_points(space)))
    generator = random.Random(seed)

    walked = [walk(space, lambda name, choices: generator.choice(choices)) for _ in range(10)]

    assert set(keys(walked)) <= every
    assert all(space.contains(point) for point in walked)


@given(chains() | tables(), st.integers(0, 2**32))
@LAWS
def test_whatever_differs_from_every_point_is_not_contained_and_refused_by_name(declared: Declared, seed: int) -> None:
    space = compiled(declared, at_most=300)
    every = set(keys(enumerate_points(space)))
    generator = random.Random(seed)

    for point in draw_points(space, 10, seed=seed):
        changed = dict(point)
        name = generator.choice(space.variables)
        if name in changed and generator.random() < 0.3:
            del changed[name]
        else:
            changed[name] = generator.choice(POOL)
        assert space.contains(changed) == (point_key(changed) in every)
        if not space.contains(changed):
            with pytest.raises(SpaceError, match=r"must be one of|must be left out"):
                neighbours(space, changed)


@given(chains() | tables())
@LAWS
def test_spaces_and_parameters_survive_pickling_json_and_yaml_and_compiling_changes_nothing(declared: Declared) -> None:
    before = pickle.dumps(declared)
    space = compiled(declared, at_most=300)

    again = pickle.loads(pickle.dumps(space))

    assert list(enumerate_points(again)) == list(enumerate_points(space))
    assert json.loads(json.dumps(again.to_json())) == space.to_json()
    assert again.examples == space.examples
    assert pickle.dumps(declared) == before
    for *_, parameter in declared.variables:
        written = parameter.to_json()
        assert parameter_from_json(json.loads(json.dumps(written))) == parameter
        assert parameter_from_json(yaml.safe_load(yaml.safe_dump(written))) == parameter
        assert parameter_from_json(written).to_json() == written


@given(chains() | tables(), st.integers(0, 2**32))
@LAWS
def test_where_counting_is_too_dear_every_point_that_is_left_is_valid_and_no_count_too_high(declared: Declared, seed: int) -> None:
    leaves = leaves_of(declared)
    assume(oracle_refusal(declared, leaves) is None)
    points = [leaf.point for leaf in leaves if leaf.refuser is None]
    wanted = random.Random(seed).choice(points)

    with pytest.MonkeyPatch.context() as patch:
        for limit, value in {"_MANY_STATES": 0, "_MOST_EDGES": 0, "_SUBSET_STATES": 2}.items():
            patch.setattr(f"autotune.search_spaces.diagram.{limit}", value)
        space = compile_space(what(declared), rules=declared.rules, keep=[wanted])

    assert not space.exact
    assert set(keys(enumerate_points(space))) <= set(keys(points))
    assert space.contains(wanted)
    assert space.valid == len(list(enumerate_points(space)))
    assert [space.unrank(space.rank(point)) for point in enumerate_points(space)] == list(enumerate_points(space))
    assert all(count <= sum(leaf.refuser is not None for leaf in leaves) for count in space.invalid.values())
    assert sum(space.invalid.values()) <= sum(leaf.refuser is not None for leaf in leaves)
    for name, example in space.examples.items():
        # who refuses first depends on the order, and this order is another one; that it is refused doesn't
        assert any(repr(sorted(leaf.point.items())) == repr(sorted(example.items())) and leaf.refuser for leaf in leaves), (name, example)


# ---- one truth: every way to reach points reaches the same ones ------------------------------------------------------------------


def grid_of_ray(space: Space) -> list[dict[str, Any]]:
    """The points of a real variant generator over the grid, prepared and used as a Tuner does."""
    from ray import tune
    from ray.tune.impl.placeholder import create_resolvers_map, inject_placeholders
    from ray.tune.search.basic_variant import BasicVariantGenerator

    from autotune.search_spaces.ray_space import point_from_ray, to_ray_tune

    tune.register_trainable("law_of_spaces", nothing)
    searcher = BasicVariantGenerator()
    config = inject_placeholders(to_ray_tune(space, grid=True), create_resolvers_map())
    searcher.add_configurations({"law": {"run": "law_of_spaces", "config": config, "num_samples": 1}})
    found = []
    while (trial := searcher.next_trial()) is not None:
        found.append(point_from_ray(trial.config, space))
    return found


def nothing(config: dict[str, Any]) -> None: ...


def draws_of_ray(space: Space, seed: int) -> list[dict[str, Any]]:
    import numpy as np
    from ray.tune.impl.placeholder import create_resolvers_map, inject_placeholders
    from ray.tune.search.variant_generator import generate_variants

    from autotune.search_spaces.ray_space import point_from_ray, to_ray_tune

    state = np.random.RandomState(seed)
    param_space = {"config": inject_placeholders(to_ray_tune(space), create_resolvers_map())}
    return [point_from_ray(spec["config"], space) for _ in range(5) for _, spec in generate_variants(param_space, random_state=state)]


def points_of_optuna(space: Space, sampler: Any, trials: int) -> list[dict[str, Any]]:
    import optuna

    from autotune.search_spaces.optuna_space import point_to_params, suggest_point

    study = optuna.create_study(sampler=sampler)
    found = []

    def objective(trial: optuna.Trial) -> float:
        found.append(suggest_point(trial, space))
        assert point_to_params(space, found[-1]) == (trial.params, trial.distributions)
        return 0.0

    study.optimize(objective, n_trials=trials)  # brute force stops by itself when nothing new is left
    return found


@given(chains() | tables(), st.integers(0, 2**31))
@LAWS
def test_all_ways_to_reach_points_reach_the_same_ones(declared: Declared, seed: int) -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    space = compiled(declared, at_most=10**9)
    assume(space.valid <= 20)
    every = sorted(keys(enumerate_points(space)))
    assert len(set(every)) == space.valid

    grid = grid_of_ray(space)

    assert sorted(keys(grid)) == every
    assert [list(p) for p in grid] == [list(space.unrank(space.rank(p))) for p in grid], "variables stand in the space's order"
    assert sorted(keys(draw_points(space, space.valid, seed=seed))) == every
    assert sorted(keys(points_of_optuna(space, optuna.samplers.BruteForceSampler(seed=seed), space.valid + 5))) == every


@given(chains() | tables(), st.integers(0, 2**31))
@LAWS
def test_samplers_of_ray_and_optuna_draw_only_valid_points_and_honour_their_seed(declared: Declared, seed: int) -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space = compiled(declared, at_most=10**9)

    first, second = draws_of_ray(space, seed), draws_of_ray(space, seed)
    suggested = points_of_optuna(space, optuna.samplers.RandomSampler(seed=seed), 5)

    assert keys(first) == keys(second)
    assert all(space.contains(point) for point in [*first, *suggested])
    assert keys(suggested) == keys(points_of_optuna(space, optuna.samplers.RandomSampler(seed=seed), 5))


@given(chains() | tables(), st.integers(0, 2**31))
@LAWS
def test_all_ways_reach_the_same_points_of_a_subset_too(declared: Declared, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for limit, value in {"_MANY_STATES": 0, "_MOST_EDGES": 0, "_SUBSET_STATES": 2}.items():
            patch.setattr(f"autotune.search_spaces.diagram.{limit}", value)
        space = compiled(declared, at_most=10**9)
    assume(space.valid <= 60)
    every = sorted(keys(enumerate_points(space)))

    grid, drawn = grid_of_ray(space), draws_of_ray(space, seed)

    assert not space.exact
    assert sorted(keys(grid)) == sorted(keys(draw_points(space, space.valid, seed=seed))) == every
    assert set(keys(drawn)) <= set(every)
