"""Ray Tune's form of a space: a `param_space` for anyone's Tuner.

Variables that are always active with the same choices are plain `tune.choice` (or `grid_search`) entries. The others stand one level
deeper, under `CONDITIONAL`, in a dict that a domain of ours makes once what decides them is known; it holds the active ones only and may
hold a next level in turn. So only valid points arise, each draw is Ray's own and honours its seed, and a grid has each point once.

The domain takes the part of `tune.sample_from`, which a Tuner replaces by a placeholder and fills in last of all: what such a function
returns is not looked into again, so choices in it would reach the trial undrawn, and a grid in it untried.

A draw here walks down the tree: small branches come up as often as large ones. `draw_points` draws points uniformly instead. Searchers
that take no conditions (OptunaSearch) are served by `autotune.search_spaces.optuna_space.OptunaSpace`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from autotune.search_spaces.parameters import detached
from autotune.search_spaces.space import Point, Space

CONDITIONAL = "(conditional)"
"""The key of a config under which the variables stand whose choices depend on those beside it."""


def to_ray_tune(space: Space, *, grid: bool = False) -> dict[str, Any]:
    """Return the space as a Ray Tune `param_space`: sampled with Ray's seed, or with `grid` every point exactly once.

    With `grid`, leave Ray's `num_samples` at 1; `space.valid` trials will run. `point_from_ray` turns a trial's config into a point.
    """
    levels = _levels(space)
    first: dict[str, Any] = {}
    for turn in levels[0]:
        offer = space.steady_offer(turn)
        assert offer is not None, "the first level holds steady variables only"
        if offer:
            first[space.steps[turn].name] = _domain(offer, grid)
    if len(levels) > 1:
        first[CONDITIONAL] = _later(_Level(space, tuple(levels), 1, grid))
    return first


def point_from_ray(config: Mapping[str, Any], space: Space | None = None) -> Point:
    """Return the point that a trial's config stands for, its levels flattened.

    With `space` given, other entries of the config are left out and the variables stand in its order. Configs of an OptunaSearch
    over `OptunaSpace` are read as well.
    """
    flat: Point = {}
    level: Any = config
    while isinstance(level, Mapping):
        flat.update((name, detached(value)) for name, value in level.items() if name != CONDITIONAL and not _is_variant(name))
        level = level.get(CONDITIONAL)
    return flat if space is None else {name: flat[name] for name in space.variables if name in flat}


def _is_variant(name: str) -> bool:
    """Whether the entry is an Optuna name of one set of choices (`name@digest`): the value itself stands under the plain name."""
    return "@" in name


def _domain(offer: tuple[Any, ...], grid: bool) -> Any:
    from ray import tune

    if len(offer) == 1:
        return offer[0]
    return tune.grid_search(list(offer)) if grid else tune.choice(list(offer))


def _later(level: _Level) -> Any:
    """A domain of Ray's that asks a level for its dict; pickled as this call, since its class is made when Ray is there."""
    return _later_class()(level)


@cache
def _later_class() -> Any:
    from ray.tune.search.sample import Domain

    class Later(Domain):
        def __init__(self, level: _Level) -> None:
            self.level = level

        def sample(self, config: Any = None, size: int = 1, random_state: Any = None) -> dict[str, Any]:
            return self.level(config)

        def __reduce__(self) -> tuple[Any, ...]:
            return (_later, (self.level,))

        @property
        def domain_str(self) -> str:
            return "conditional"

    return Later


def _plain(value: Any) -> bool:
    """Whether Ray leaves a value as it is while it makes variants; it puts a placeholder where an object stands on the first level."""
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    if isinstance(value, Mapping):
        return all(map(_plain, value.values()))
    return value is None or isinstance(value, bool | int | float | str)


def _levels(space: Space) -> list[list[int]]:
    """Group the steps: first the steady ones with plain values, then each one level below the last of the variables that decide it."""
    level_of_step: list[int] = []
    level_of_variable: dict[int, int] = {}
    for turn, step in enumerate(space.steps):
        offer = space.steady_offer(turn)
        level = 0
        if offer is None or not all(map(_plain, offer)):
            level = 1 + max((level_of_variable[position] for position in step.looks_at), default=0)
        level_of_step.append(level)
        level_of_variable[step.position] = max(level, level_of_variable.get(step.position, 0))
    return [[turn for turn, at in enumerate(level_of_step) if at == level] for level in range(max(level_of_step, default=0) + 1)]


@dataclass(frozen=True, eq=False)
class _Level:
    """Makes one level of a config from those above it; called by Ray while it resolves a trial's config."""

    space: Space
    levels: tuple[list[int], ...]
    depth: int
    grid: bool

    def __call__(self, config: Mapping[str, Any]) -> dict[str, Any]:
        values = self._values(config if CONDITIONAL in config else config["config"])
        turns = self.levels[self.depth]
        offers = self.space.offers_at(frozenset(turns), values)
        made = {self.space.steps[turn].name: _domain(offer, self.grid) for turn in turns if (offer := offers[turn]) is not None}
        if self.depth + 1 < len(self.levels):
            made[CONDITIONAL] = _later(_Level(self.space, self.levels, self.depth + 1, self.grid))
        return made

    def _values(self, config: Mapping[str, Any]) -> dict[int, Any]:
        """Values on the levels above this one by step; steps that share a name on one level share the value, and one of them is active."""
        values: dict[int, Any] = {}
        level: Any = config
        for turns in self.levels[: self.depth]:
            values.update((turn, level[name]) for turn in turns if (name := self.space.steps[turn].name) in level)
            level = level.get(CONDITIONAL, {})
        return values

    def __deepcopy__(self, memo: dict[int, Any]) -> _Level:
        return self  # nothing in it changes, and Ray copies a config once for every variable
