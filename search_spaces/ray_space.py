"""Ray Tune's form of a space: a `param_space` for anyone's Tuner.

Variables that are always active with the same choices are plain `tune.choice` (or `grid_search`) entries. The others stand one level
deeper, under `CONDITIONAL`, in a dict that a `tune.sample_from` makes once what decides them is known; it holds the active ones only and
may hold a next level in turn. So only valid points arise, each draw is Ray's own and honours its seed, and a grid has each point once.

A draw here walks down the tree: small branches come up as often as large ones. `draw_points` draws points uniformly instead. Searchers
that take no `sample_from` (OptunaSearch) are served by `autotune.search_spaces.optuna_space.OptunaSpace`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    from ray import tune

    return tune.sample_from(level)


def _levels(space: Space) -> list[list[int]]:
    """Group the steps: first the steady ones, then each one level below the last of the variables that decide it."""
    level_of_step: list[int] = []
    level_of_variable: dict[int, int] = {}
    for turn, step in enumerate(space.steps):
        level = 0
        if space.steady_offer(turn) is None:
            level = 1 + max(level_of_variable[position] for position in step.looks_at)
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
        made: dict[str, Any] = {}
        for turn in self.levels[self.depth]:
            offer = self._offer(turn, values)
            if offer is not None:
                made[self.space.steps[turn].name] = _domain(offer, self.grid)
        if self.depth + 1 < len(self.levels):
            made[CONDITIONAL] = _later(_Level(self.space, self.levels, self.depth + 1, self.grid))
        return made

    def _offer(self, turn: int, values: Mapping[int, int]) -> tuple[Any, ...] | None:
        # a later step of the same name may have its value already; to this step it is none of the past
        return self.space.offer_at(turn, {self.space.steps[past].position: choice for past, choice in values.items() if past < turn})

    def _values(self, config: Mapping[str, Any]) -> dict[int, int]:
        """Steps that were active on the levels above this one, with the index of the choice taken."""
        values: dict[int, int] = {}
        level: Any = config
        for depth, turns in enumerate(self.levels[: self.depth]):
            taken = {}
            for turn in turns:
                name = self.space.steps[turn].name
                if name in level and (depth == 0 or self._offer(turn, values) is not None):
                    taken[turn] = self.space.choice_index(name, level[name])
            values |= taken
            level = level.get(CONDITIONAL, {})
        return values

    def __deepcopy__(self, memo: dict[int, Any]) -> _Level:
        return self  # nothing in it changes, and Ray copies a config once for every variable
