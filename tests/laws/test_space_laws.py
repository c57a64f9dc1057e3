"""Laws of search spaces: random conditional spaces, held against a brute-force walk written here for the purpose."""

import pickle
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
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
    parameter_from_json,
    point_key,
    walk,
)

POOL = [0, 1, 2, True, False, None, "a", 1.0, [1], {"k": 2}]
LAWS = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
FEWER = settings(LAWS, max_examples=30)


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


def oracle_rows(branch: Any) -> int:
    if not isinstance(branch, Conditional):
        return 0
    return len(branch.support) + sum(oracle_rows(b) for b in [*branch.support.values(), branch.default])


def oracle_leaves(declared: Declared, seen: set[str]) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Every leaf of the walk that doesn't prune, with who refuses it first (None: valid)."""
    variables, last = declared.variables, {}
    for i, (name, *_) in enumerate(variables):
        last[name] = i

    def go(i: int, values: dict[str, Any], refuser: str | None) -> Iterator[tuple[dict[str, Any], str | None]]:
        if i == len(variables):
            yield dict(values), refuser
            return
        name, slot, alternative, parameter = variables[i]
        branch: Any = INACTIVE
        if alternative is None or values[slot] == alternative:
            branch = oracle_branch(declared, slot, parameter, values, f"{name}:{alternative}", seen)
        options: list[tuple[dict[str, Any], str | None]]
        if branch is INACTIVE:
            options = [(values, refuser)]
        elif branch is INVALID:
            options = [(values, refuser or "INVALID")]
        else:
            options = [({**values, name: value}, refuser) for value in branch.values]
        for chosen, refused in options:
            judged = [r for r in declared.rules if max(last[n] for n in r.names) == i]
            refusing = [r.id for r in judged if not r.allows({n: chosen[n] for n in r.names if n in chosen})]
            yield from go(i + 1, chosen, refused or (refusing[0] if refusing else None))

    yield from go(0, {}, None)


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
def chains(draw: st.DrawFn, most_parameters: int = 6) -> Declared:
    slots: list[Slot] = []
    variables: list[tuple[str, str, str | None, Any]] = []
    choices: dict[str, list[Any]] = {}  # union of choices of every variable so far
    left = most_parameters
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
            for p in range(min(left, draw(st.integers(0, 3)))):
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
    """Parameters without slots, three to six of them, parents first."""
    variables: list[tuple[str, str, str | None, Any]] = []
    choices: dict[str, list[Any]] = {}
    for p in range(draw(st.integers(3, 6))):
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


def compiled(declared: Declared, *, at_most: int) -> Space:
    """Compile, setting aside spaces in which nothing is valid and those too large for the oracle."""
    try:
        space = compile_space(declared.slots, rules=declared.rules)
    except SpaceError:
        assume(False)
        raise
    assume(space.declared <= at_most)
    return space


def keys(points: Any) -> list[str]:
    return [point_key(p) for p in points]


# ---- the laws ------------------------------------------------------------------------------------------------------------------


@given(chains())
@LAWS
def test_points_counts_and_unreachable_rows_are_those_of_the_brute_force_walk(declared: Declared) -> None:
    seen: set[str] = set()
    leaves = list(islice(oracle_leaves(declared, seen), 3001))
    assume(len(leaves) <= 3000)
    points = [point for point, refuser in leaves if refuser is None]
    refused = {name: sum(r == name for _, r in leaves) for name in ["INVALID", *(rule.id for rule in declared.rules)]}
    if not points:
        with pytest.raises(SpaceError, match="at least one valid point must remain"):
            compile_space(declared.slots, rules=declared.rules)
        return

    space = compile_space(declared.slots, rules=declared.rules)

    assert list(enumerate_points(space)) == points
    assert [list(point) for point in enumerate_points(space)] == [list(point) for point in points], "variables stand in the walk's order"
    assert (space.valid, space.invalid, space.declared) == (len(points), refused, len(leaves))
    assert space.distinct == len(set(keys(points)))
    assert len(space.unreachable) == sum(oracle_rows(parameter) for *_, parameter in declared.variables) - len(seen)


@given(tables() | chains())
@LAWS
def test_the_order_that_keeps_wide_diagrams_narrow_changes_no_point_and_no_count(declared: Declared) -> None:
    what = {name: parameter for name, _, _, parameter in declared.variables} if not declared.slots else declared.slots
    try:
        usual = compile_space(what, rules=declared.rules)
    except SpaceError:
        assume(False)
        raise
    assume(usual.declared <= 2000)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.search_spaces.diagram._MANY_STATES", 0)  # so that the other order is taken
        narrow = compile_space(what, rules=declared.rules)

    assert sorted(keys(enumerate_points(narrow))) == sorted(keys(enumerate_points(usual)))
    assert (narrow.valid, narrow.declared, narrow.unreachable == ()) == (usual.valid, usual.declared, usual.unreachable == ())
    assert set(narrow.variables) == set(usual.variables)


@given(tables(), st.randoms(use_true_random=False))
@LAWS
def test_a_flat_table_in_any_order_has_the_points_of_the_brute_force_walk_and_rows_that_cannot_occur_are_refused(
    declared: Declared, shuffler: random.Random
) -> None:
    seen: set[str] = set()
    leaves = list(islice(oracle_leaves(declared, seen), 3001))
    assume(len(leaves) <= 3000)
    table = [(name, parameter) for name, _, _, parameter in declared.variables]
    shuffler.shuffle(table)
    points = [point for point, refuser in leaves if refuser is None]
    lost_rows = sum(oracle_rows(parameter) for _, parameter in table) - len(seen)
    if lost_rows or not points:
        with pytest.raises(SpaceError, match="must be able to occur" if lost_rows else "at least one valid point must remain"):
            compile_space(dict(table), rules=declared.rules)
        return

    space = compile_space(dict(table), rules=declared.rules)

    assert sorted(keys(enumerate_points(space))) == sorted(keys(points))
    assert (space.valid, space.declared) == (len(points), len(leaves))


@given(chains())
@LAWS
def test_rank_and_unrank_undo_each_other_and_follow_the_order_of_enumeration(declared: Declared) -> None:
    space = compiled(declared, at_most=2000)

    points = list(enumerate_points(space))

    assert [space.rank(point) for point in points] == list(range(space.valid))
    assert [space.unrank(rank) for rank in range(space.valid)] == points


@given(chains(), st.integers(0, 2**32))
@LAWS
def test_a_draw_covers_the_space_exactly_once_and_honours_its_seed_and_exclusions(declared: Declared, seed: int) -> None:
    space = compiled(declared, at_most=500)
    every = set(keys(enumerate_points(space)))

    drawn = draw_points(space, space.valid + 5, seed=seed)
    some = draw_points(space, (space.valid + 1) // 2, seed=seed)
    rest = draw_points(space, space.valid, seed=seed, exclude=frozenset(keys(some)))

    assert len(drawn) == space.valid
    assert set(keys(drawn)) == every
    assert some == drawn[: len(some)]
    assert set(keys(rest)) == every - set(keys(some))
    assert len(rest) == space.valid - len(some)


@given(chains(), st.integers(0, 2**32))
@LAWS
def test_a_walk_with_any_chooser_ends_in_a_valid_point(declared: Declared, seed: int) -> None:
    space = compiled(declared, at_most=2000)
    every = set(keys(enumerate_points(space)))
    generator = random.Random(seed)

    walked = [walk(space, lambda name, choices: generator.choice(choices)) for _ in range(20)]

    assert set(keys(walked)) <= every
    assert all(space.contains(point) for point in walked)


@given(chains(), st.integers(0, 2**32))
@LAWS
def test_whatever_differs_from_every_point_is_not_contained(declared: Declared, seed: int) -> None:
    space = compiled(declared, at_most=500)
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


@given(chains())
@LAWS
def test_spaces_and_parameters_survive_pickling_and_json_and_compiling_changes_nothing(declared: Declared) -> None:
    before = pickle.dumps(declared)
    space = compiled(declared, at_most=500)

    again = pickle.loads(pickle.dumps(space))

    assert list(enumerate_points(again)) == list(enumerate_points(space))
    assert again.to_json() == space.to_json()
    assert pickle.dumps(declared) == before
    for *_, parameter in declared.variables:
        assert parameter_from_json(parameter.to_json()) == parameter
        assert parameter_from_json(parameter.to_json()).to_json() == parameter.to_json()


@given(chains(most_parameters=5))
@FEWER
def test_a_ray_grid_has_each_point_exactly_once(declared: Declared) -> None:
    from ray.tune.search.variant_generator import generate_variants

    from autotune.search_spaces.ray_space import point_from_ray, to_ray_tune

    space = compiled(declared, at_most=100)

    configs = [spec["config"] for _, spec in generate_variants({"config": to_ray_tune(space, grid=True)})]

    points = [point_from_ray(config, space) for config in configs]
    assert sorted(keys(points)) == sorted(keys(enumerate_points(space)))
    assert [list(p) for p in points] == [list(space.unrank(space.rank(p))) for p in points], "variables stand in the space's order"


@given(chains(most_parameters=5), st.integers(0, 2**31))
@FEWER
def test_ray_draws_only_valid_points_and_honours_its_seed(declared: Declared, seed: int) -> None:
    import numpy as np
    from ray.tune.search.variant_generator import generate_variants

    from autotune.search_spaces.ray_space import point_from_ray, to_ray_tune

    space = compiled(declared, at_most=2000)
    param_space = {"config": to_ray_tune(space)}

    def draws() -> list[dict[str, Any]]:
        state = np.random.RandomState(seed)
        return [point_from_ray(spec["config"], space) for _ in range(8) for _, spec in generate_variants(param_space, random_state=state)]

    first, second = draws(), draws()
    assert first == second
    assert all(space.contains(point) for point in first)


@given(chains(most_parameters=5))
@FEWER
def test_optuna_reaches_each_point_exactly_once_by_brute_force_and_records_what_we_would(declared: Declared) -> None:
    import optuna

    from autotune.search_spaces.optuna_space import point_to_params, suggest_point

    space = compiled(declared, at_most=60)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.BruteForceSampler(seed=0))
    points = []

    def objective(trial: optuna.Trial) -> float:
        points.append(suggest_point(trial, space))
        assert point_to_params(space, points[-1]) == (trial.params, trial.distributions)
        return 0.0

    study.optimize(objective, n_trials=space.valid + 5)  # stops by itself when nothing new is left

    assert sorted(keys(points)) == sorted(keys(enumerate_points(space)))
