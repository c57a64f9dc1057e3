"""How what a pass tells of itself hangs on its searched parameters, found out before anything runs.

A pass tells what it refuses, needs and makes by hooks that look at a whole config. A hook is asked for one config after another while watching
which parameters it reads, so its answers come as a decision tree over those alone, however many others there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from autotune.errors import PassConfigError
from autotune.passes.base import ConfigView, Pass, PassConfigParam
from autotune.search_spaces.parameters import INACTIVE, INVALID, Categorical, Conditional, ConditionalDefault, Parameter, value_key
from autotune.target import AcceleratorSpec

MOST_ASKED = 2_000  # configs that one hook is asked about


@dataclass(frozen=True)
class Place:
    """A pass in a slot. `parameters` are its variables; `filled` are values given to it where it has none (data files).

    `roles` are the roles of data that it gets, `random` those of them that are random numbers.
    """

    slot: str
    pass_class: type[Pass]
    parameters: Mapping[str, Parameter]
    filled: Mapping[str, Any]
    roles: frozenset[str] = frozenset()
    random: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return self.pass_class.__name__


class Mark:
    """An answer that is none."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


UNCHECKED = Mark("UNCHECKED")  # not found out
NEVER = Mark("NEVER")  # these values never come together, or the pass refuses them anyway


@dataclass(frozen=True)
class Question:
    """A variable (by its name in the pass's table) and what follows from each of its values, by `value_key`."""

    name: str
    answers: Mapping[Any, Tree]


Tree = Question | Any
"""A decision tree over variables; its leaves are answers."""


class _Asked(BaseException):
    """Raised by a view when a variable is read whose value is open. No `Exception`: a hook must not catch it."""

    def __init__(self, name: str, values: Sequence[Any]) -> None:
        super().__init__(name, values)
        self.name, self.values = name, values


class _Impossible(BaseException):
    """Raised by a view for values that an INVALID branch forbids."""


def ask(place: Place, accelerator: AcceleratorSpec, hook: Callable[[Mapping[str, Any]], Any]) -> Tree:
    """Find out how a hook's answer hangs on the variables. A `PassConfigError` it raises is an answer: its text."""
    table = place.pass_class.default_config(accelerator)
    left = MOST_ASKED

    def grow(known: dict[str, Any]) -> Tree:
        nonlocal left
        if left <= 0:
            return UNCHECKED
        left -= 1

        def given(name: str) -> Any:
            value = _variable(place, known, name) if name in place.parameters else INACTIVE
            return place.filled.get(name, INACTIVE) if value is INACTIVE else value

        try:
            return hook(ConfigView(place.pass_class, table, given))
        except _Asked as asked:
            name, values = asked.name, asked.values
        except _Impossible:
            return NEVER
        except PassConfigError as error:
            return str(error)
        except Exception:  # a hook of somebody else's; a trial at this point will tell
            return UNCHECKED
        return _joined(name, {value_key(value): grow({**known, name: value}) for value in values})

    return grow({})


def _variable(place: Place, known: Mapping[str, Any], name: str) -> Any:
    """The value of a variable, INACTIVE where it plays no part; asks for it when it may have several."""
    if name in known:
        return known[name]
    parameter = place.parameters[name]
    if isinstance(parameter, Conditional):
        if all(parent in place.parameters for parent in parameter.all_parents):
            branch = parameter.branch(_Parents(place, known))
            if branch is INVALID:
                raise _Impossible
            values = [INACTIVE] if branch is INACTIVE else list(branch.values)  # type: ignore[union-attr] # a Categorical is left
        else:  # it hangs on another slot: any of its values, or none
            values = [*_values_in(parameter), INACTIVE]
    else:
        values = list(parameter.values)
    if len(values) > 1:
        raise _Asked(name, values)
    return values[0]


class _Parents(Mapping[str, Any]):
    """The variables as a condition sees them."""

    def __init__(self, place: Place, known: Mapping[str, Any]) -> None:
        self._place, self._known = place, known

    def __getitem__(self, name: str) -> Any:
        return _variable(self._place, self._known, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._place.parameters)

    def __len__(self) -> int:
        return len(self._place.parameters)


def _values_in(parameter: Parameter) -> list[Any]:
    if isinstance(parameter, Categorical):
        return list(parameter.values)
    branches = [b for b in [*parameter.support.values(), parameter.default] if isinstance(b, Categorical | Conditional)]
    return list({value_key(v): v for branch in branches for v in _values_in(branch)}.values())


def _joined(name: str, answers: Mapping[Any, Tree]) -> Tree:
    """A question, or the one answer that all values lead to."""
    different: list[Tree] = []
    for tree in answers.values():
        if tree is not NEVER and tree not in different:
            different.append(tree)
    if not different:
        return NEVER
    return different[0] if len(different) == 1 else Question(name, answers)


def mapped(tree: Tree, function: Callable[[Any], Any]) -> Tree:
    """Replace the answers; questions that then make no difference fall away."""
    if isinstance(tree, Question):
        return _joined(tree.name, {key: mapped(below, function) for key, below in tree.answers.items()})
    return tree if isinstance(tree, Mark) else function(tree)


def answer(tree: Tree, slot: str, values: Mapping[str, Any]) -> Any:
    """Return the answer for a point's values (names with their slot), or UNCHECKED."""
    while isinstance(tree, Question):
        tree = tree.answers.get(value_key(values.get(f"{slot}.{tree.name}", INACTIVE)), UNCHECKED)
    return tree


def leaves(tree: Tree, path: tuple[tuple[str, Any], ...] = ()) -> Iterator[tuple[tuple[tuple[str, Any], ...], Any]]:
    """Yield each path of (name, value key) pairs with its answer."""
    if isinstance(tree, Question):
        for key, below in tree.answers.items():
            yield from leaves(below, (*path, (tree.name, key)))
    else:
        yield path, tree


def names_in(tree: Tree) -> tuple[str, ...]:
    """Return the names that a tree asks for, each once."""
    return tuple(dict.fromkeys(name for path, _ in leaves(tree) for name, _ in path))


def hooks_of(place: Place, accelerator: AcceleratorSpec) -> dict[str, Callable[[Mapping[str, Any]], Any]]:
    """The hooks of a pass, by what they tell of a config."""
    pass_class = place.pass_class
    fallible = [n for n, row in pass_class.default_config(accelerator).items() if n not in place.parameters and _may_be_invalid(row)]

    def refuses(config: Mapping[str, Any]) -> str:
        for name in fallible:
            config.get(name)
        pass_class.validate_config(config, accelerator)
        return ""

    return {"refuses": refuses, "data": pass_class.needed_data, "opset": pass_class.needed_opset, "traits": pass_class.traits}


def _may_be_invalid(row: PassConfigParam) -> bool:
    """Whether a row that nobody gives a value can be INVALID by its table."""

    def within(branch: Any) -> bool:
        if isinstance(branch, Conditional | ConditionalDefault):
            return any(within(below) for below in [*branch.support.values(), branch.default])
        return branch is INVALID

    return within(row.default_value) or within(row.search_defaults)


def both(one: Tree, other: Tree, function: Callable[[Any, Any], Any]) -> Tree:
    """The answers of two trees put together."""

    def below(first: Any, path: Mapping[str, Any], tree: Tree) -> Tree:
        if isinstance(tree, Question):
            if tree.name in path:
                return below(first, path, tree.answers.get(path[tree.name], UNCHECKED))
            return _joined(tree.name, {key: below(first, path, t) for key, t in tree.answers.items()})
        marks = [a for a in (first, tree) if isinstance(a, Mark)]
        return marks[0] if marks else function(first, tree)

    def walk(tree: Tree, path: Mapping[str, Any]) -> Tree:
        if isinstance(tree, Question):
            return _joined(tree.name, {key: walk(t, {**path, tree.name: key}) for key, t in tree.answers.items()})
        return below(tree, path, other)

    return walk(one, {})


def cases(place: Place, names: Sequence[str]) -> int:
    """An upper bound on the combinations of variables."""
    return prod(len(_values_in(place.parameters[name])) + 1 for name in names)


def answers(tree: Tree) -> list[Any]:
    """The answers that a tree can give, each once, marks left out."""
    found: list[Any] = []
    for _, a in leaves(tree):
        if not isinstance(a, Mark) and a not in found:
            found.append(a)
    return found
