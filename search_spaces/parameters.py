"""Parameters and their conditions: what a pass's table, a sweep file and a search space are written in.

Values are compared by type and value: `True` is not `1`, and `1` is not `1.0`.
"""

from __future__ import annotations

import enum
import heapq
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import SpaceError, nearest

__all__ = [
    "INACTIVE", "INVALID", "Boolean", "Categorical", "Conditional", "ConditionalDefault", "Inactive", "Invalid", "Parameter",
    "Rows", "detached", "order_parents_first", "parameter_from_json", "same", "value_json", "value_key",
]  # fmt: skip


class Invalid:
    """The class of `INVALID`: a combination that is never tried. There is one instance, in every process."""

    _only: Invalid | None = None

    def __new__(cls) -> Invalid:
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        return "INVALID"

    def __reduce__(self) -> tuple[type[Invalid], tuple[()]]:
        return (Invalid, ())


class Inactive:
    """The class of `INACTIVE`: a parameter that plays no part here. There is one instance, in every process."""

    _only: Inactive | None = None

    def __new__(cls) -> Inactive:
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        return "INACTIVE"

    def __reduce__(self) -> tuple[type[Inactive], tuple[()]]:
        return (Inactive, ())


INVALID = Invalid()
INACTIVE = Inactive()
_BY_NAME: dict[str, Invalid | Inactive] = {"INVALID": INVALID, "INACTIVE": INACTIVE}


_MARKS = frozenset({"float", "is", "items", "object", "path", "sentinel", "set"})  # keys by which `value_json` marks what JSON lacks


def value_key(value: object) -> Any:
    """Return a hashable that is equal for two values exactly when they are the same by type and value.

    Lists and tuples of the same items are the same (JSON has one kind of sequence). A numpy scalar is the number it holds; every
    NaN is the same; objects that JSON does not know (functions, instances) are compared by identity unless they can be hashed.
    """
    if value is None or isinstance(value, Invalid | Inactive):
        return (type(value).__name__,)
    kind = type(value)
    if kind in (bool, int, str):
        return (kind.__name__, value)
    if kind is float:
        return ("float", "nan") if math.isnan(value) else ("float", value)  # type: ignore[arg-type] # kind says float
    if isinstance(value, enum.Enum):
        return (kind, value.name)
    if isinstance(value, list | tuple):
        return ("list", tuple(value_key(v) for v in value))
    if isinstance(value, Mapping):
        return ("dict", frozenset((value_key(k), value_key(v)) for k, v in value.items()))
    if isinstance(value, set | frozenset):
        return ("set", frozenset(value_key(v) for v in value))
    scalar = _numpy_scalar(value)
    if scalar is not value:
        return value_key(scalar)
    try:
        hash(value)
    except TypeError:
        return (kind, id(value))
    return (kind, value)


def same(a: object, b: object) -> bool:
    """Say whether two values are equal by type and value, however deep: `True` is not `1`; a list is the tuple of its items."""
    return bool(value_key(a) == value_key(b))


def value_json(value: object) -> Any:
    """Describe any value in JSON, different values differently; objects by where they are defined (this can't be read back)."""
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, float) and not isinstance(value, enum.Enum):
        return float(value) + 0.0 if math.isfinite(value) else {"float": repr(float(value))}  # + 0.0: minus zero is zero
    if isinstance(value, Invalid | Inactive):
        return {"sentinel": repr(value)}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, list | tuple):
        return [value_json(v) for v in value]
    if isinstance(value, Mapping):
        if all(type(k) is str for k in value) and not (value and _MARKS.issuperset(value)):
            return {k: value_json(v) for k, v in value.items()}
        return {"items": sorted(([value_json(k), value_json(v)] for k, v in value.items()), key=_text)}
    if isinstance(value, set | frozenset):
        return {"set": sorted((value_json(v) for v in value), key=_text)}
    scalar = _numpy_scalar(value)
    if scalar is not value:
        return value_json(scalar)
    if isinstance(value, enum.Enum):
        return {"object": f"{type(value).__module__}:{type(value).__qualname__}.{value.name}"}
    name = getattr(value, "__qualname__", None)
    if name is None:
        return {"object": f"{type(value).__module__}:{type(value).__qualname__}", "is": repr(value)}
    line = getattr(getattr(value, "__code__", None), "co_firstlineno", 0) if "<" in name else 0
    return {"object": f"{value.__module__}:{name}" + (f":{line}" if line else "")}


def detached(value: Any) -> Any:
    """Copy lists and dicts, however deep, so that nobody can change another's; other values are given back as they are."""
    if isinstance(value, list):
        return [detached(v) for v in value]
    if type(value) is tuple:
        return tuple(detached(v) for v in value)
    if type(value) is dict:
        return {k: detached(v) for k, v in value.items()}
    return value


@dataclass(frozen=True, eq=False)
class Categorical:
    """One of the given values, in the given order. Raises `SpaceError` for no values and for two that are the same."""

    values: tuple[Any, ...]

    def __init__(self, values: Iterable[Any]) -> None:
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
            raise SpaceError("Categorical", "values must be a list", repr(values), f"Write Categorical([{values!r}])")
        choices = tuple(detached(v) for v in values)
        if not choices:
            raise SpaceError("Categorical", "there must be at least one value to choose from", "none", "Give values, or leave the parameter out")
        seen = set()
        for value in choices:
            _refuse_reserved("Categorical", value)
            if value_key(value) in seen:
                raise SpaceError("Categorical", "each value must be given once", f"{value!r} twice", "Take one away")
            seen.add(value_key(value))
        object.__setattr__(self, "values", choices)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Categorical) and same(self.values, other.values)

    def __hash__(self) -> int:
        return hash(value_key(self.values))

    def __repr__(self) -> str:
        return f"Categorical({list(self.values)!r})"

    def to_json(self) -> dict[str, Any]:
        """Write the parameter as JSON that `parameter_from_json` reads back exactly; raises `SpaceError` for values JSON can't hold."""
        return {"type": "Categorical", "values": [_strict_json("Categorical", v) for v in self.values]}


class Boolean(Categorical):
    """`True` or `False`, in this order."""

    def __init__(self) -> None:
        super().__init__((True, False))


class Rows(Mapping[tuple[Any, ...], Any]):
    """The support of a condition: tuples of parent values to branches, looked up by type and value. Never changes.

    A plain dict would take `(True,)` and `(1,)` for one row, and could hold no list as a parent's value.
    """

    def __init__(self, who: str, parents: tuple[str, ...], support: object) -> None:
        pairs = _pairs(who, parents, support)
        self._rows: dict[Any, tuple[tuple[Any, ...], Any]] = {}
        for given, branch in pairs:
            row = _row(who, parents, given)
            if value_key(row) in self._rows:
                raise SpaceError(who, f"each row of support must be given once (parents {', '.join(parents)})", f"{row!r} twice", "Take one away")
            self._rows[value_key(row)] = (row, branch)
        self._parents = parents
        self._who = who

    def __getitem__(self, values: tuple[Any, ...]) -> Any:
        try:
            return self._rows[value_key(values)][1]
        except KeyError:
            raise KeyError(values) from None

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return (row for row, _ in self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{row!r}: {branch!r}" for row, branch in self._rows.values()) + "}"

    def __reduce__(self) -> tuple[Any, ...]:
        # keys of objects are made from their identity, so they are made anew on the other side
        return (Rows, (self._who, self._parents, [[row, branch] for row, branch in self._rows.values()]))


@dataclass(frozen=True, eq=False)
class Conditional:
    """A parameter whose choices depend on others: `support` maps the parents' values to a parameter, `INVALID` or `INACTIVE`.

    `parents` is a name or a tuple of names; a row of `support` is a tuple of their values (or one value for one parent). Combinations
    that no row lists take `default`. A parent that is inactive makes the parameter inactive, unless a row names `INACTIVE` for it.
    """

    parents: tuple[str, ...]
    support: Mapping[tuple[Any, ...], Any]
    default: Any = INVALID

    def __init__(self, parents: str | Sequence[str], support: Mapping[Any, Any] | Sequence[Any], default: Any = INVALID) -> None:
        names = _names("Conditional", parents)
        rows = Rows("Conditional", names, support)
        for row, branch in rows.items():
            _refuse_non_branch(branch, f"the branch for {_shown(names, row)}")
        _refuse_non_branch(default, f"the default of the condition on {', '.join(names)}")
        object.__setattr__(self, "parents", names)
        object.__setattr__(self, "support", rows)
        object.__setattr__(self, "default", default)

    @property
    def all_parents(self) -> tuple[str, ...]:
        """Names of the parents, those of nested conditions included, each once, in order."""
        names = dict.fromkeys(self.parents)
        for branch in [*self.support.values(), self.default]:
            if isinstance(branch, Conditional):
                names.update(dict.fromkeys(branch.all_parents))
        return tuple(names)

    def branch(self, values: Mapping[str, Any]) -> Categorical | Invalid | Inactive:
        """Return what the parameter is for these values of its parents: a `Categorical`, `INVALID` or `INACTIVE`; absent is inactive."""
        found = _look_up(self.parents, self.support, self.default, values)
        return found.branch(values) if isinstance(found, Conditional) else found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Conditional) and _condition_key(self) == _condition_key(other)

    def __hash__(self) -> int:
        return hash(_condition_key(self))

    def to_json(self) -> dict[str, Any]:
        """Write the parameter as JSON that `parameter_from_json` reads back exactly; raises `SpaceError` for values JSON can't hold."""
        return {
            "type": "Conditional",
            "parents": list(self.parents),
            "support": [[[_strict_json("Conditional", v) for v in row], _branch_json(branch)] for row, branch in self.support.items()],
            "default": _branch_json(self.default),
        }


@dataclass(frozen=True, eq=False)
class ConditionalDefault:
    """A default value that depends on other parameters; combinations that no row of `support` lists take `default`."""

    parents: tuple[str, ...]
    support: Mapping[tuple[Any, ...], Any]
    default: Any = None

    def __init__(self, parents: str | Sequence[str], support: Mapping[Any, Any] | Sequence[Any], default: Any = None) -> None:
        names = _names("ConditionalDefault", parents)
        rows = Rows("ConditionalDefault", names, support)
        for value in [*rows.values(), default]:
            if isinstance(value, Categorical | Conditional | ConditionalDefault):
                raise SpaceError("ConditionalDefault", "its values must be plain values", repr(value), "Use a Conditional for choices")
            if not isinstance(value, Invalid | Inactive):
                _refuse_reserved("ConditionalDefault", value)
        object.__setattr__(self, "parents", names)
        object.__setattr__(self, "support", rows)
        object.__setattr__(self, "default", detached(default))

    @property
    def all_parents(self) -> tuple[str, ...]:
        """Names of the parents, each once, in order."""
        return self.parents

    def choose(self, values: Mapping[str, Any]) -> Any:
        """Return the default for these values of the parents: a value, `INVALID` or `INACTIVE`; an absent parent is inactive."""
        return detached(_look_up(self.parents, self.support, self.default, values))

    def as_conditional(self) -> Conditional:
        """Return the same as a parameter: each value is the only choice of its branch."""
        return Conditional(self.parents, [[row, _only(value)] for row, value in self.support.items()], _only(self.default))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConditionalDefault) and _condition_key(self) == _condition_key(other)

    def __hash__(self) -> int:
        return hash(_condition_key(self))

    def to_json(self) -> dict[str, Any]:
        """Write the default as JSON that `parameter_from_json` reads back exactly; raises `SpaceError` for values JSON can't hold."""
        who = "ConditionalDefault"
        return {
            "type": who,
            "parents": list(self.parents),
            "support": [
                [[_strict_json("ConditionalDefault", v) for v in row], _strict_json("ConditionalDefault", v)] for row, v in self.support.items()
            ],
            "default": _strict_json("ConditionalDefault", self.default),
        }


Parameter = Categorical | Conditional


def parameter_from_json(data: Mapping[str, Any]) -> Categorical | Conditional | ConditionalDefault:
    """Read a parameter written by `to_json`, or by hand in a sweep file. Raises `SpaceError`.

    `support` is a list of pairs `[parent values, branch]`, or, for one parent, a mapping of its values to branches. `INVALID` and
    `INACTIVE` are written by name or as `{"sentinel": name}`.
    """
    if not isinstance(data, Mapping) or "type" not in data:
        raise SpaceError("search space", "a parameter must be a mapping with a type", repr(data), "Write {type: Categorical, values: [...]}")
    kind = data["type"]
    readers: dict[str, tuple[set[str], set[str], Callable[[Mapping[str, Any]], Categorical | Conditional | ConditionalDefault]]] = {
        "Categorical": ({"values"}, set(), lambda d: Categorical(d["values"])),
        "Boolean": (set(), set(), lambda d: Boolean()),
        "Conditional": ({"parents", "support"}, {"default"}, _conditional_from_json),
        "ConditionalDefault": ({"parents", "support"}, {"default"}, _default_from_json),
    }
    if not isinstance(kind, str) or kind not in readers:
        raise SpaceError("search space", "a parameter's type must be known", repr(kind), nearest(str(kind), readers))
    needed, possible, read = readers[kind]
    for key in needed - set(data):
        raise SpaceError(kind, f"{key} must be given", f"only {', '.join(map(str, data))}")
    for key in data:
        if key != "type" and key not in needed | possible:
            raise SpaceError(kind, "its keys must be known", repr(key), nearest(str(key), needed | possible) or "It takes none")
    return read(data)


def order_parents_first(parents: Mapping[str, tuple[str, ...]], who: str) -> list[str]:
    """Return the names with each after its parents, in the order of declaration as far as that allows.

    `parents` maps each name to the names it depends on. A parent written `slot.parameter` that is not among the names belongs to
    another table and is passed over. Raises `SpaceError` for unknown parents (with the nearest name) and for cycles (spelled out).
    """
    index = {name: i for i, name in enumerate(parents)}
    waiting: dict[str, int] = {}
    children: dict[str, list[str]] = {name: [] for name in parents}
    for name, wanted in parents.items():
        known = []
        for parent in dict.fromkeys(wanted):
            if parent in index:
                known.append(parent)
            elif "." not in parent:
                raise SpaceError(
                    who, f"the parents of {name} must be known parameters", repr(parent), nearest(parent, [n for n in parents if n != name])
                )
        waiting[name] = len(known)
        for parent in known:
            children[parent].append(name)
    ready = [index[name] for name in parents if not waiting[name]]
    names = list(parents)
    heapq.heapify(ready)
    ordered: list[str] = []
    while ready:
        name = names[heapq.heappop(ready)]
        ordered.append(name)
        for child in children[name]:
            waiting[child] -= 1
            if not waiting[child]:
                heapq.heappush(ready, index[child])
    if len(ordered) < len(names):
        cycle = _cycle(parents, next(n for n in names if waiting[n]), waiting)
        raise SpaceError(who, "no parameter may depend on itself", " -> ".join(cycle), f"Take one of the parents of {cycle[0]} away")
    return ordered


def _cycle(parents: Mapping[str, tuple[str, ...]], start: str, waiting: Mapping[str, int]) -> list[str]:
    """Follow unmet parents until a name comes back; return that round trip, first name repeated at the end."""
    path = [start]
    while True:
        following = next(p for p in parents[path[-1]] if waiting.get(p))
        if following in path:
            return [*path[path.index(following) :], following]
        path.append(following)


def _look_up(parents: tuple[str, ...], support: Mapping[tuple[Any, ...], Any], default: Any, values: Mapping[str, Any]) -> Any:
    row = tuple(values.get(name, INACTIVE) for name in parents)
    if row in support:
        return support[row]
    return INACTIVE if INACTIVE in row else default


def _only(value: Any) -> Any:
    return value if isinstance(value, Invalid | Inactive) else Categorical([value])


def _names(who: str, parents: object) -> tuple[str, ...]:
    names = (parents,) if isinstance(parents, str) else tuple(parents) if isinstance(parents, list | tuple) else ()
    if not names or not all(isinstance(n, str) and n for n in names):
        raise SpaceError(who, "parents must be a name or a tuple of names", repr(parents))
    if len(set(names)) != len(names):
        raise SpaceError(who, "each parent must be named once", repr(parents))
    return names


def _pairs(who: str, parents: tuple[str, ...], support: object) -> list[tuple[Any, Any]]:
    if isinstance(support, Mapping):
        pairs = list(support.items())
    elif isinstance(support, list | tuple) and all(isinstance(p, list | tuple) and len(p) == 2 for p in support):
        pairs = [(p[0], p[1]) for p in support]
    else:
        raise SpaceError(who, f"support must map values of {', '.join(parents)} to branches", repr(support))
    return pairs


def _row(who: str, parents: tuple[str, ...], given: Any) -> tuple[Any, ...]:
    values = tuple(given) if isinstance(given, list | tuple) else (given,)
    if len(values) != len(parents):
        hint = "A parent's value that is itself a list stands inside a tuple: ((1, 2),)" if len(parents) == 1 else "Name a value for each parent"
        raise SpaceError(who, f"a row of support must hold one value for each of {', '.join(parents)}", repr(given), hint)
    for value in values:
        if value is INVALID:
            raise SpaceError(who, "a row of support must name values that a parent can have", "INVALID", "Use INACTIVE for an inactive parent")
        if value is not INACTIVE:
            _refuse_reserved(who, value)
    return tuple(detached(v) for v in values)


def _refuse_non_branch(branch: object, what: str) -> None:
    if isinstance(branch, Categorical | Conditional | Invalid | Inactive):
        return
    if isinstance(branch, list | tuple):
        mend = f"Write Categorical({list(branch)!r})"
    elif isinstance(branch, ConditionalDefault):
        mend = "Write a Conditional"
    elif isinstance(branch, str) and branch in _BY_NAME:
        mend = f"Write {branch} without quotes (import it from autotune.search_spaces)"
    else:
        mend = f"Write Categorical([{branch!r}])"
    raise SpaceError("Conditional", f"{what} must be a Categorical, a Conditional, INVALID or INACTIVE", repr(branch), mend)


def _refuse_reserved(who: str, value: object) -> None:
    """The sentinels and their names are no values, so that what a sweep file says of them has one meaning."""
    if isinstance(value, Invalid | Inactive):
        raise SpaceError(who, "INVALID and INACTIVE are no values", repr(value), "Make the whole branch of a Conditional INVALID or INACTIVE")
    if isinstance(value, str) and value in _BY_NAME:
        raise SpaceError(who, "the names INVALID and INACTIVE are kept for the two marks", repr(value), "Choose another name for the value")
    if isinstance(value, Categorical | Conditional | ConditionalDefault):
        raise SpaceError(who, "values must be plain values", repr(value), "Use a Conditional for choices that depend on others")
    if _holds_nan(value):
        raise SpaceError(who, "NaN is no value: it equals nothing, and JSON can't hold it", repr(value), "Use None for a value that is left open")
    if isinstance(value, Mapping) and set(value) == {"sentinel"}:
        raise SpaceError(who, "a mapping of the one key 'sentinel' is how JSON writes INVALID and INACTIVE", repr(value))


def _holds_nan(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_nan, value))
    if isinstance(value, Mapping):
        return any(map(_holds_nan, value.values()))
    return isinstance(_numpy_scalar(value), float) and value != value  # only NaN differs from itself


def _shown(parents: tuple[str, ...], row: tuple[Any, ...]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in zip(parents, row, strict=True))


def _condition_key(condition: Conditional | ConditionalDefault) -> Any:
    rows = frozenset((value_key(row), _branch_key(branch)) for row, branch in condition.support.items())
    return (condition.parents, rows, _branch_key(condition.default))


def _branch_key(branch: Any) -> Any:
    if isinstance(branch, Categorical):
        return ("Categorical", value_key(branch.values))
    if isinstance(branch, Conditional):
        return ("Conditional", _condition_key(branch))
    return value_key(branch)


def _branch_json(branch: Any) -> Any:
    return branch.to_json() if isinstance(branch, Categorical | Conditional) else {"sentinel": repr(branch)}


def _strict_json(who: str, value: Any) -> Any:
    """JSON of a value that reads back as the same value, or `SpaceError`."""
    if isinstance(value, Invalid | Inactive):
        return {"sentinel": repr(value)}
    if isinstance(value, list | tuple):
        return [_strict_json(who, v) for v in value]
    if isinstance(value, Mapping) and all(type(k) is str for k in value):
        return {k: _strict_json(who, v) for k, v in value.items()}
    value = _numpy_scalar(value)
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    raise SpaceError(who, "only values that JSON can hold can be written out", repr(value), "Use the name of the object, or a plain value")


def _sentinel_from_json(value: Any) -> Any:
    if isinstance(value, str) and value in _BY_NAME:
        return _BY_NAME[value]
    if isinstance(value, Mapping) and set(value) == {"sentinel"} and value["sentinel"] in _BY_NAME:
        return _BY_NAME[value["sentinel"]]
    return value


def _branch_from_json(value: Any) -> Any:
    value = _sentinel_from_json(value)
    return parameter_from_json(value) if isinstance(value, Mapping) and "type" in value else value


def _support_from_json(who: str, data: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[Any, Any]]]:
    parents = _names(who, data["parents"])
    pairs = []
    for given, branch in _pairs(who, parents, data["support"]):
        values = given if isinstance(given, list | tuple) else [given]
        pairs.append(([_sentinel_from_json(v) for v in values], branch))
    return parents, pairs


def _conditional_from_json(data: Mapping[str, Any]) -> Conditional:
    parents, pairs = _support_from_json("Conditional", data)
    return Conditional(parents, [(row, _branch_from_json(branch)) for row, branch in pairs], _branch_from_json(data.get("default", INVALID)))


def _default_from_json(data: Mapping[str, Any]) -> ConditionalDefault:
    parents, pairs = _support_from_json("ConditionalDefault", data)
    return ConditionalDefault(parents, [(row, _sentinel_from_json(v)) for row, v in pairs], _sentinel_from_json(data.get("default")))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _numpy_scalar(value: Any) -> Any:
    """The Python number that a numpy scalar holds; anything else as it is (numpy itself is not imported for this)."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0 else value
