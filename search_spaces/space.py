"""A search space: what may vary in a chain of passes, compiled once, then counted, enumerated, sampled and walked.

The work of compiling is in `autotune.search_spaces.diagram`. Nothing here enumerates unless it is asked to, and no chooser can run into
a dead end: it is offered only what can still end in a valid point.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autotune.digest import digest_of
from autotune.errors import SpaceError, nearest
from autotune.search_spaces.diagram import ABSENT, INVALID_BRANCH, Alternative, Diagram, Edge, Rule, Slot, Step, Wish, compile_diagram
from autotune.search_spaces.parameters import Categorical, Conditional, Parameter, detached, value_json, value_key

__all__ = [
    "INVALID_BRANCH", "Alternative", "Point", "Rule", "RuleNote", "Slot", "Space", "Step", "Wish", "compile_space",
    "draw_points", "enumerate_points", "neighbours", "point_key", "walk",
]  # fmt: skip

Point = dict[str, Any]
"""Active variables only, in the order of the space: name to value. A skipped optional slot is there as None."""

_WHO = "search space"


@dataclass(frozen=True)
class RuleNote:
    """What a compiled space remembers of a rule: enough to tell why it refused, without the function."""

    id: str
    names: tuple[str, ...]
    message: str


@dataclass(frozen=True, eq=False, repr=False)
class Space:
    """A compiled space; made by `compile_space`, never changed, cheap to send to another process (rules stay behind).

    `invalid` counts the leaves refused by an INVALID branch (key "INVALID") and by each rule, in the walk that does not prune: each leaf
    is put down to what refuses it first in the order of the variables. A variable whose branch is INVALID is walked past as one that is
    inactive, so independent variables multiply every count alike.

    `exact` is False where rules look at too much for all points to be counted: the space is then a subset of what was declared, all
    counts are lower bounds, and every way to reach points (walk, rank, draw, Ray, Optuna) reaches those of the subset.
    """

    slots: tuple[Slot, ...]
    parameters: Mapping[str, Parameter]
    rules: tuple[RuleNote, ...]
    diagram: Diagram

    def __repr__(self) -> str:
        return f"Space({len(self.variables)} variables, {'' if self.exact else 'at least '}{self.valid} points)"

    def __getstate__(self) -> dict[str, Any]:
        # keys of objects are made from their identity, so they are made anew on the other side
        return {name: value for name, value in self.__dict__.items() if name != "_index"}

    @property
    def variables(self) -> tuple[str, ...]:
        """Names in the order of the walk, parents first."""
        return self.diagram.variables

    @property
    def steps(self) -> tuple[Step, ...]:
        """Turns of the walk; as many as variables, or more where alternatives share a parameter's name."""
        return self.diagram.steps

    @property
    def valid(self) -> int:
        """Number of points; of those that were kept, where the space is not `exact`."""
        return self.diagram.valid

    @property
    def exact(self) -> bool:
        """Whether all counts are exact; otherwise each says "at least"."""
        return self.diagram.exact

    @property
    def invalid(self) -> Mapping[str, int]:
        """Number of leaves refused, by what refuses them first."""
        return dict(self.diagram.invalid)

    @property
    def examples(self) -> Mapping[str, Point]:
        """For each key of `invalid` that counts something, one leaf that it refuses first, active variables only."""
        return {name: {n: detached(v) for n, v in example.items()} for name, example in self.diagram.examples.items()}

    @property
    def unreachable(self) -> tuple[str, ...]:
        """Rows of conditions in passes' own tables that cannot occur here, because their parents were narrowed."""
        return self.diagram.unreachable

    @property
    def declared(self) -> int:
        """Leaves of the walk that does not prune: the valid ones and all that were refused."""
        return self.valid + sum(self.invalid.values())

    @property
    def distinct(self) -> int:
        """Number of different points. Equal to `valid`: two leaves part at a variable that is active in both, with different values."""
        return self.valid

    def choices(self, name: str) -> tuple[Any, ...]:
        """Return all choices a variable has in any branch, in order of declaration, whether or not rules leave them."""
        self._known(name)
        return tuple(detached(v) for v in self.diagram.choices[name])

    def offers(self, name: str) -> tuple[tuple[Any, ...], ...]:
        """Return the different sets of choices that a walk may offer for a variable, each in order, without those that lead nowhere."""
        self._known(name)
        return self._offers.get(name, ())

    @cached_property
    def _offers(self) -> dict[str, tuple[tuple[Any, ...], ...]]:
        found: dict[str, dict[tuple[int, ...], None]] = {}
        for step, layer in zip(self.steps, self.diagram.layers, strict=True):
            for edges in layer:
                offer = tuple(choice for choice, _, _ in edges)
                if offer != (ABSENT,):
                    found.setdefault(step.name, {})[offer] = None
        return {name: tuple(tuple(self.diagram.choices[name][c] for c in offer) for offer in offers) for name, offers in found.items()}

    @cached_property
    def _index(self) -> dict[str, dict[Any, int]]:
        return {name: {value_key(v): i for i, v in enumerate(values)} for name, values in self.diagram.choices.items()}

    def choice_index(self, name: str, value: Any) -> int:
        """Return the place of a value among `choices(name)`, or -1 when it is none of them."""
        return self._index[name].get(value_key(value), ABSENT)

    def offers_at(self, turns: AbstractSet[int], values: Mapping[int, Any]) -> dict[int, tuple[Any, ...] | None]:
        """Return the choices on offer at some steps, None where the variable is inactive: for samplers with an order of their own.

        `values` maps the steps taken already to values (those of inactive ones are passed over); it must hold all that the asked ones
        look at and may lack others. Values that cannot stand together give None.
        """
        offers: dict[int, tuple[Any, ...] | None] = dict.fromkeys(turns)
        states = {0}
        for turn in range(max(turns, default=-1) + 1):
            step, layer = self.steps[turn], self.diagram.layers[turn]
            if turn in turns and states:
                edges = layer[min(states)]
                if edges[0][0] != ABSENT:
                    offers[turn] = tuple(detached(self.diagram.choices[step.name][c]) for c, _, _ in edges)
            taken = self.choice_index(step.name, values[turn]) if turn in values else None
            states = {f for state in states for c, f, _ in layer[state] if taken is None or c in (taken, ABSENT)}
        return offers

    def steady_offer(self, turn: int) -> tuple[Any, ...] | None:
        """Return the choices of a step that are on offer whatever the earlier values (none: never active), or None where these decide."""
        step, layer = self.steps[turn], self.diagram.layers[turn]
        offers = {tuple(choice for choice, _, _ in edges) for edges in layer}
        if len(offers) > 1:
            return None
        return tuple(detached(self.diagram.choices[step.name][c]) for c in next(iter(offers)) if c != ABSENT)

    def unrank(self, rank: int) -> Point:
        """Return the point with this rank: 0 to `valid - 1`, lexicographic in the order of variables and choices."""
        if not 0 <= rank < self.valid:
            raise SpaceError(_WHO, f"a rank must lie between 0 and {self.valid - 1}", str(rank))
        return self._follow(_by_rank(rank))

    def rank(self, point: Mapping[str, Any]) -> int:
        """Return the rank of a point. Raises `SpaceError` for a point that the space does not hold."""
        rank = self._rank(point)
        if rank is None:
            raise self._refusal(point)
        return rank

    def contains(self, point: Mapping[str, Any]) -> bool:
        """Say whether the point is valid: every active variable and no other, each with a choice it has there."""
        return self._rank(point) is not None

    def _rank(self, point: Mapping[str, Any]) -> int | None:
        rank, state, used = 0, 0, 0
        for step, layer in zip(self.steps, self.diagram.layers, strict=True):
            edges = layer[state]
            if edges[0][0] == ABSENT:
                state = edges[0][1]
                continue
            if step.name not in point:
                return None
            wanted = self.choice_index(step.name, point[step.name])
            used += 1
            for choice, following, beyond in edges:
                if choice == wanted:
                    state = following
                    break
                rank += beyond
            else:
                return None
        return rank if used == len(point) else None

    def _refusal(self, point: Mapping[str, Any]) -> SpaceError:
        """Say by name what keeps a point from being valid."""
        for name in point:
            self._known(name)
        state = 0
        active = set()
        for step, layer in zip(self.steps, self.diagram.layers, strict=True):
            edges = layer[state]
            if edges[0][0] == ABSENT:
                state = edges[0][1]
                continue
            active.add(step.name)
            must = f"{step.name} must be one of {[self.diagram.choices[step.name][c] for c, _, _ in edges]!r} here"
            if step.name not in point:
                return SpaceError(_WHO, must, "none", "A point holds every active variable")
            wanted = self.choice_index(step.name, point[step.name])
            following = [f for c, f, _ in edges if c == wanted]
            if not following:
                return SpaceError(_WHO, must, repr(point[step.name]))
            state = following[0]
        extra = next(name for name in point if name not in active)
        return SpaceError(_WHO, f"{extra} must be left out: it is inactive here", repr(point[extra]), "A point holds active variables only")

    def _follow(self, choose: Callable[[Step, tuple[Edge, ...]], Edge]) -> Point:
        point: Point = {}
        state = 0
        for step, layer in zip(self.steps, self.diagram.layers, strict=True):
            choice, state, _ = choose(step, layer[state])
            if choice != ABSENT:
                point[step.name] = detached(self.diagram.choices[step.name][choice])
        return point

    def _known(self, name: str) -> None:
        if name not in self.diagram.choices:
            raise SpaceError(_WHO, "a variable must be one of the space's", repr(name), nearest(name, self.variables))

    def to_json(self) -> dict[str, Any]:
        """Describe the space in JSON: what was declared, the variables in order, the counts."""
        declared: dict[str, Any] = {}
        if self.slots:
            declared["slots"] = [
                {
                    "name": slot.name,
                    "optional": slot.optional,
                    "alternatives": [{"name": a.name, "parameters": _described(a.parameters)} for a in slot.alternatives],
                }
                for slot in self.slots
            ]
        else:
            declared["parameters"] = _described(self.parameters)
        return {
            **declared,
            "variables": [{"name": n, "choices": [value_json(v) for v in self.diagram.choices[n]]} for n in self.variables],
            "rules": [{"id": r.id, "names": list(r.names), "message": r.message} for r in self.rules],
            "exact": self.exact,
            "valid": self.valid,
            "invalid": dict(self.invalid),
            "examples": {rule: {name: value_json(value) for name, value in point.items()} for rule, point in self.diagram.examples.items()},
            "declared": self.declared,
            "distinct": self.distinct,
            "unreachable": list(self.unreachable),
        }


def walk(space: Space, pick: Callable[[str, tuple[Any, ...]], Any]) -> Point:
    """Return the point that a chooser picks: `pick(name, choices)` gives back one of the choices.

    It is asked only where there is a choice, and offered only choices that can still end in a valid point. Raises `SpaceError` when it
    gives back something else.
    """

    def choose(step: Step, edges: tuple[Edge, ...]) -> Edge:
        if len(edges) == 1:
            return edges[0]
        choices = tuple(detached(space.diagram.choices[step.name][c]) for c, _, _ in edges)
        picked = pick(step.name, choices)
        return _picked(space, step, edges, choices, picked)

    return space._follow(choose)  # noqa: SLF001 # one module


def _first_choice(name: str, choices: tuple[Any, ...], so_far: Mapping[str, Any]) -> Any:
    """Return the first of the choices."""
    return choices[0]


def neighbours(
    space: Space, point: Mapping[str, Any], *, complete: Callable[[str, tuple[Any, ...], Mapping[str, Any]], Any] = _first_choice
) -> list[Point]:
    """Return the points that one decision parts from a point: for each active variable, in order, each other choice on offer there.

    What comes after keeps its value where that is still on offer; where it is not, and for variables that become active,
    `complete(name, choices, so_far)` gives one of the choices, `so_far` being the values before it. A slot that takes another pass, or is
    skipped, is one decision, and so are the values that its new pass needs. All are valid, different, and none is the point itself.
    Raises `SpaceError` for a point that the space does not hold.
    """
    space.rank(point)
    found: list[Point] = []
    before: Point = {}
    state = 0
    for turn, (step, layer) in enumerate(zip(space.steps, space.diagram.layers, strict=True)):
        edges = layer[state]
        if edges[0][0] == ABSENT:
            state = edges[0][1]
            continue
        taken = space.choice_index(step.name, point[step.name])
        for edge in edges:
            if edge[0] == taken:
                state = edge[1]
            else:
                found.append(_completed(space, point, turn, before, edge, complete))
        before[step.name] = point[step.name]
    return found


def _completed(
    space: Space,
    point: Mapping[str, Any],
    turn: int,
    before: Mapping[str, Any],
    edge: Edge,
    complete: Callable[[str, tuple[Any, ...], Mapping[str, Any]], Any],
) -> Point:
    """The point that takes another edge at a step, and afterwards what it took before as far as that is on offer."""
    made: Point = {name: detached(value) for name, value in before.items()}
    made[space.steps[turn].name] = detached(space.diagram.choices[space.steps[turn].name][edge[0]])
    state = edge[1]
    for step, layer in zip(space.steps[turn + 1 :], space.diagram.layers[turn + 1 :], strict=True):
        edges = layer[state]
        if edges[0][0] == ABSENT:
            state = edges[0][1]
            continue
        values = space.diagram.choices[step.name]
        wanted = space.choice_index(step.name, point[step.name]) if step.name in point else ABSENT
        chosen = next((e for e in edges if e[0] == wanted), None)
        if chosen is None:
            choices = tuple(detached(values[c]) for c, _, _ in edges)
            chosen = edges[0] if len(edges) == 1 else _picked(space, step, edges, choices, complete(step.name, choices, made))
        made[step.name] = detached(values[chosen[0]])
        state = chosen[1]
    return made


def _picked(space: Space, step: Step, edges: tuple[Edge, ...], choices: tuple[Any, ...], value: Any) -> Edge:
    wanted = space.choice_index(step.name, value)
    for edge in edges:
        if edge[0] == wanted:
            return edge
    raise SpaceError(_WHO, f"the value picked for {step.name} must be one of {list(choices)!r}", repr(value))


def enumerate_points(space: Space) -> Iterator[Point]:
    """Yield every point once, in the order of their ranks."""
    layers, last = space.diagram.layers, len(space.steps)
    open_edges = [iter(layers[0][0])] if layers else []
    taken: list[int] = []
    if not layers:
        yield {}
    while open_edges:
        edge = next(open_edges[-1], None)
        if edge is None:
            open_edges.pop()
            if taken:
                taken.pop()
            continue
        taken.append(edge[0])
        if len(taken) < last:
            open_edges.append(iter(layers[len(taken)][edge[1]]))
            continue
        yield {
            step.name: detached(space.diagram.choices[step.name][choice]) for step, choice in zip(space.steps, taken, strict=True) if choice != ABSENT
        }
        taken.pop()


def draw_points(space: Space, count: int, *, seed: int, exclude: AbstractSet[str] = frozenset()) -> list[Point]:
    """Draw points uniformly without repeats: at most `count`, fewer when no more are left.

    `exclude` holds the keys (`point_key`) of points not to be drawn. The same seed gives the same points, and a longer draw begins with
    a shorter one. Takes time and memory for the points drawn and excluded, not for the size of the space.
    """
    generator = random.Random(seed)
    moved: dict[int, int] = {}  # a Fisher-Yates shuffle of all ranks of which only the places touched are stored
    points: list[Point] = []
    for place in range(space.valid):
        if len(points) >= count:
            break
        other = generator.randrange(place, space.valid)
        rank = moved.get(other, other)
        moved[other] = moved.pop(place, place)
        point = space.unrank(rank)
        if not exclude or point_key(point) not in exclude:
            points.append(point)
    return points


def point_key(point: Mapping[str, Any]) -> str:
    """Return the digest of a point, 64 hex digits: equal for equal points whatever their order; None, True, 1 and 1.0 differ."""
    return digest_of({name: value_json(value) for name, value in point.items()})


def _by_rank(rank: int) -> Callable[[Step, tuple[Edge, ...]], Edge]:
    left = rank

    def choose(step: Step, edges: tuple[Edge, ...]) -> Edge:
        nonlocal left
        for edge in edges:
            if left < edge[2]:
                return edge
            left -= edge[2]
        raise AssertionError(f"rank beyond the last edge at {step.name}")

    return choose


def _own(slot: Slot) -> Slot:
    """The slot with tables of its own, which the caller can't change afterwards."""
    return replace(slot, alternatives=tuple(replace(a, parameters=dict(a.parameters)) for a in slot.alternatives))


def _described(parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    return {name: _describe(parameter) for name, parameter in parameters.items()}


def _describe(branch: Any) -> Any:
    """JSON of a parameter for readers; unlike `to_json` it takes any value, and can't be read back where that is an object."""
    if isinstance(branch, Categorical):
        return {"type": "Categorical", "values": [value_json(v) for v in branch.values]}
    if isinstance(branch, Conditional):
        rows = [[[value_json(v) for v in row], _describe(b)] for row, b in branch.support.items()]
        return {"type": "Conditional", "parents": list(branch.parents), "support": rows, "default": _describe(branch.default)}
    return value_json(branch)


def compile_space(slots_or_parameters: Sequence[Slot] | Mapping[str, Parameter], *, rules: Sequence[Rule] = (), keep: Sequence[Wish] = ()) -> Space:
    """Compile a chain of slots, or a flat table of parameters, into a space; arguments are never changed.

    Variables of a chain are the slots (`slot`: name of the alternative, None when skipped) and their parameters (`slot.parameter`,
    active while the slot holds the alternative that has it). Raises `SpaceError`, by name and with the mend, for unknown parents,
    cycles, empty and repeated choices, rows that cannot occur and rows that other conditions make INVALID throughout (see
    `Alternative.written`), rules on unknown variables, a space in which nothing valid remains, and a chain that can hold no pass.

    Time and memory are bounded: at most 40,000 calls of rules for exact counts and, where those are not enough, about as many again for a
    subset of the space that is not `exact`. `keep` names points that must be in the subset: mappings (whole points or parts, the first
    valid point that honours them is kept) or choosers as `walk` takes them. They change nothing in a space that is exact.
    """
    flat = isinstance(slots_or_parameters, Mapping)
    slots: tuple[Slot, ...] = () if flat else tuple(_own(slot) for slot in slots_or_parameters)  # type: ignore[arg-type] # no mapping here
    parameters: dict[str, Parameter] = dict(slots_or_parameters) if flat else {}  # type: ignore[arg-type] # a mapping here
    diagram = compile_diagram(None if flat else slots, parameters, rules, tuple(keep))
    notes = tuple(RuleNote(rule.id, tuple(rule.names), rule.message) for rule in rules)
    return Space(slots=slots, parameters=parameters, rules=notes, diagram=diagram)
