"""Optuna's form of a space: define-by-run, one `suggest_categorical` for each variable that is active and has a choice.

Optuna allows one set of choices under a name. A variable that always offers the same choices keeps its name; where branches or rules
leave different ones, each set has a name of its own: `name@` and eight hex digits of the digest of its choices.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune.digest import digest_of
from autotune.errors import SpaceError
from autotune.search_spaces.parameters import same, value_json
from autotune.search_spaces.space import Point, Space, walk

if TYPE_CHECKING:
    import optuna

_PLAIN = (type(None), bool, int, float, str)


def suggest_point(trial: optuna.trial.BaseTrial, space: Space) -> Point:
    """Return the point that a trial's sampler suggests, one variable after the other; every suggestion leads to a valid point."""

    def pick(name: str, choices: tuple[Any, ...]) -> Any:
        coded = encoded(choices)
        code = trial.suggest_categorical(parameter_name(space, name, choices), coded)
        return choices[_place(coded, code)]

    return walk(space, pick)


def point_to_params(space: Space, point: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, optuna.distributions.BaseDistribution]]:
    """Return what Optuna would have recorded had it suggested this point: `params` and `distributions` for `create_trial`.

    The params alone serve `study.enqueue_trial`. Raises `SpaceError` for a point that the space does not hold.
    """
    from optuna.distributions import CategoricalDistribution

    if not space.contains(point):
        raise SpaceError("search space", "only a point of the space can be told to Optuna", repr(dict(point)))
    params: dict[str, Any] = {}
    distributions: dict[str, optuna.distributions.BaseDistribution] = {}

    def pick(name: str, choices: tuple[Any, ...]) -> Any:
        coded = encoded(choices)
        label = parameter_name(space, name, choices)
        params[label] = coded[next(i for i, choice in enumerate(choices) if same(choice, point[name]))]
        distributions[label] = CategoricalDistribution(coded)
        return point[name]

    walk(space, pick)
    return params, distributions


def parameter_name(space: Space, name: str, choices: tuple[Any, ...]) -> str:
    """Return the Optuna name for a variable where it offers these choices."""
    # a variable is asked for only where it has a choice, so sets of one value need no name
    if sum(len(offer) > 1 for offer in space.offers(name)) == 1:
        return name
    return f"{name}@{digest_of([value_json(c) for c in choices])[:8]}"


def encoded(choices: tuple[Any, ...]) -> tuple[bool | int | float | str | None, ...]:
    """Return choices that Optuna can hold and tell apart, one for each of the given ones.

    They are the choices themselves where all are None, bool, int, finite float or str and no two are equal by `==` (Optuna takes True
    for 1); else their JSON texts; else, where objects have the same description, their places.
    """
    if all(type(c) in _PLAIN and not (isinstance(c, float) and not math.isfinite(c)) for c in choices) and len(set(choices)) == len(choices):
        return choices
    texts = tuple(json.dumps(value_json(c), sort_keys=True) for c in choices)
    return texts if len(set(texts)) == len(texts) else tuple(range(len(choices)))


def _place(coded: tuple[Any, ...], code: Any) -> int:
    return next(i for i, c in enumerate(coded) if same(c, code))


class OptunaSpace:
    """The space as the callable that Ray's `OptunaSearch(space=...)` takes; picklable.

    The config of a trial holds the point under the variables' own names, beside what Optuna recorded; `point_from_ray(config, space)`
    reads it.
    """

    def __init__(self, space: Space) -> None:
        self.space = space

    def __call__(self, trial: optuna.trial.BaseTrial) -> dict[str, Any]:
        """Suggest a point and return it as the constants that Ray puts into the trial's config."""
        return suggest_point(trial, self.space)
