"""Compiling what may vary into a decision diagram: one layer a variable, one state for each way the earlier values still matter.

The variables are walked parents first, and walks that leave the same remainder of every later condition and rule are merged. Independent
variables have one state a layer, so 10^24 points are as cheap as 24 variables; every edge knows how many valid points lie beyond it.

Where there would be too many states (rules are opaque: all values they look at must be told apart) a subset of them is kept, and with
them a subset of the points: counts are then lower bounds, and every chooser works on the same subset. What is kept is bounded by counts
of edges and of calls of rules, never by time, so that it is the same on every machine.
"""

from __future__ import annotations

import zlib
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any

from autotune.errors import SpaceError, nearest
from autotune.search_spaces.parameters import (
    INACTIVE,
    Categorical,
    Conditional,
    ConditionalDefault,
    Inactive,
    Invalid,
    Parameter,
    detached,
    order_parents_first,
    same,
    value_key,
)
from autotune.search_spaces.residuals import ABSENT as ABSENT  # edges are read with it
from autotune.search_spaces.residuals import Remainders, told_apart

INVALID_BRANCH = "INVALID"
"""The name under which points with an INVALID branch are counted among those refused."""

Wish = Mapping[str, Any] | Callable[[str, tuple[Any, ...]], Any]
"""A point to keep, whole or in part (other variables take their first choice), or a chooser as `walk` takes them."""

_WHO = "search space"
_MANY_STATES = 4_000  # what the order of declaration may cost before a narrower one is tried
_MOST_EDGES = 200_000  # one to two seconds and 200 MB
_MOST_CALLS = 40_000  # of rules: two seconds at 50 µs a call
_SUBSET_EDGES = 100_000
_SUBSET_CALLS = 20_000
_SUBSET_STATES = 2_000  # of a layer
_WISH_CALLS = 10_000  # for all that is to be kept together
_LEAST_WISH_CALLS = 500  # for each
_FORBIDDEN = "/@"  # "/" parts nested names in Ray, "@" marks a variant of a name in Optuna


@dataclass(frozen=True)
class Alternative:
    """One of the passes that a slot may hold, with its parameters.

    A parent is a name in the same table, the name of a slot, or `slot.parameter`. `written` names the parameters whose condition was
    written for this very space: each row of theirs must be able to occur. The rows of a pass's own table may fall away when its
    parents are narrowed, and are then listed in `Space.unreachable`.
    """

    name: str
    parameters: Mapping[str, Parameter]
    written: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Slot:
    """A place in a chain: holds one of the alternatives or, where optional, nothing (None)."""

    name: str
    alternatives: tuple[Alternative, ...]
    optional: bool = False


@dataclass(frozen=True)
class Rule:
    """A rule that refuses points. `allows` gets the values of the named variables (inactive ones are absent) and looks at nothing else.

    It is asked once for each combination while the space is compiled, never while a sampler draws. Several rules may share an id: they
    are counted together. To travel to another process before it is compiled, `allows` must be picklable.
    """

    id: str
    names: tuple[str, ...]
    allows: Callable[[Mapping[str, Any]], bool]
    message: str = ""


@dataclass(frozen=True)
class Step:
    """A variable's turn in the walk. Two alternatives that share a parameter's name have a step each, never active together.

    `looks_at` are the positions (in `Space.variables`) of the earlier variables that decide what is on offer from here on.
    """

    name: str
    position: int
    looks_at: tuple[int, ...]


Edge = tuple[int, int, int]
"""One way out of a state: index of the choice (-1: inactive here), state it leads to, number of valid points beyond."""


@dataclass(frozen=True, eq=False)
class Diagram:
    """A compiled space, pruned to what is valid; `compile_diagram` makes it, `autotune.search_spaces.space.Space` is read through it.

    `layers[turn][state]` holds the edges out of a state; no two states of a layer have the same edges. The other fields are told in
    `Space`.
    """

    variables: tuple[str, ...]
    choices: Mapping[str, tuple[Any, ...]]
    steps: tuple[Step, ...]
    layers: tuple[tuple[tuple[Edge, ...], ...], ...]
    valid: int
    exact: bool
    invalid: Mapping[str, int]
    examples: Mapping[str, Mapping[str, Any]]
    unreachable: tuple[str, ...]


def compile_diagram(chain: tuple[Slot, ...] | None, parameters: Mapping[str, Parameter], rules: Sequence[Rule], keep: Sequence[Wish] = ()) -> Diagram:
    """Compile a chain of slots or, where that is None, a flat table; `compile_space` tells what is refused."""
    nodes = [_flat_node(name, parameter) for name, parameter in parameters.items()] if chain is None else _chain_nodes(chain)
    judge = _Judge(tuple(rules))
    compiler = _Compiler(nodes, judge, keep, in_order=_as_declared)
    try:
        return compiler.diagram(most_states=_MANY_STATES)
    except _TooWide:
        compiler = _Compiler(nodes, judge, keep, in_order=_narrow, unreachable=compiler.unreachable)
    try:
        return compiler.diagram(most_states=_MOST_EDGES)
    except _TooWide:
        return compiler.subset()


@dataclass(frozen=True)
class _Node:
    """A variable before ordering: where it was declared, and when it has a turn (`gate`: slot and the alternative it must hold)."""

    label: str
    name: str
    parameter: Parameter
    siblings: Mapping[str, str] = field(default_factory=dict)  # plain name in the same table -> label of its node
    gate: tuple[str, str] | None = None
    strict: bool = True
    is_slot: bool = False


@dataclass(frozen=True)
class _Row:
    """A row of a condition, for messages. `offers`: its branch has choices to lose.

    A branch of one value has none: it is what a default by its parents compiles to.
    """

    label: str
    text: str
    hint: str
    strict: bool
    possible: bool  # each of its values is among its parent's choices
    offers: bool


_Key = tuple[int, ...] | None
"""What tells a state from others: numbers of what is left of the conditions and rules to come. None: refused, and not followed further."""

_State = tuple[bool, _Key]
"""(already refused?, key)."""

_Out = tuple[int, _State, str | None, tuple[int, ...]]
"""A way out of a state: index of the choice, where it leads, who refuses here, rows that are now sure to be looked up."""

_Order = Callable[[list[_Node], Mapping[str, tuple[str, ...]], tuple[Rule, ...]], list[_Node]]
"""Orders nodes; gets the labels of each label's parents too, and the rules."""

_REFUSED: _State = (True, None)
_OPEN = ABSENT - 1  # in what a rule has seen so far: its variable has not had its turn


class _TooWide(Exception):  # caught where it is raised: a wider limit or a subset follows
    """The diagram has more states, or asks its rules more often, than allowed."""


class _Judge:
    """Asks rules, each about the same values once, and no more often than `most` times in all."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self.rules = rules
        self.asked = 0
        self.most: int | None = _MOST_CALLS
        self._answers: list[dict[tuple[int, ...], bool]] = [{} for _ in rules]

    def allows(self, number: int, key: tuple[int, ...], choices: Mapping[str, list[Any]]) -> bool:
        answers = self._answers[number]
        if key not in answers:
            if self.most is not None and self.asked >= self.most:
                raise _TooWide
            self.asked += 1
            rule = self.rules[number]
            seen = {name: detached(choices[name][c]) for name, c in zip(rule.names, key, strict=True) if c != ABSENT}
            try:
                answers[key] = bool(rule.allows(seen))
            except Exception as error:
                raise SpaceError(f"rule {rule.id}", f"a rule must be able to judge {seen!r}", f"{type(error).__name__}: {error}") from error
        return answers[key]


@dataclass(frozen=True)
class _Plan:
    """How a step makes the key of the next state: once for walks that are valid so far, once for refused ones.

    `watchers` are those that look at the step's variable: (watcher, its place in the key or -1 while it has seen nothing, whether this is
    the last chance to see it set). `classes[choice]` is one number for all choices that no watcher tells apart; `ABSENT` comes last.
    `onward[ended]` picks the next key from this key followed by the watchers' new remainders.
    """

    own: int
    watchers: tuple[tuple[int, int, bool], ...]
    classes: tuple[int, ...]
    onward: tuple[Callable[[tuple[int, ...]], tuple[int, ...]], Callable[[tuple[int, ...]], tuple[int, ...]]]


@dataclass
class _Full:
    """The diagram that does not prune: states of each layer, and for each the ways out (choice, state it leads to, who refuses here)."""

    states: list[list[_State]]
    edges: list[list[list[tuple[int, int, str | None]]]]
    came: list[list[tuple[int, int]]]  # for each state one state of the layer before, and the choice that led here
    refusals: dict[str, tuple[int, int, int]]  # of each id the first: layer, state, choice
    lookups: set[tuple[int, int, int]]  # row, layer, state: here the row is sure to be looked up; layer -1: in refused walks


class _Compiler:
    """The work of `compile_diagram`: order, turn names into positions, build the diagram forwards, count it backwards, prune.

    Watchers are what later steps look back with: number i is the condition of step i (its gate the outermost table), the numbers after
    those stand for the rules, one for all that look at the same names.
    """

    def __init__(self, nodes: list[_Node], judge: _Judge, keep: Sequence[Wish], *, in_order: _Order, unreachable: list[_Row] | None = None) -> None:
        self.unreachable = unreachable  # rows that cannot occur, the same in any order; None while not known
        self.judge = judge
        self.rules = judge.rules
        self.labels_of: dict[str, list[str]] = {}
        for node in nodes:
            self.labels_of.setdefault(node.name, []).append(node.label)
        parents = {node.label: self._parent_labels(node) for node in nodes}
        self.nodes = in_order(nodes, parents, self.rules)
        self.variables = tuple(dict.fromkeys(node.name for node in self.nodes))
        self.position = {name: i for i, name in enumerate(self.variables)}
        self.here = [self.position[node.name] for node in self.nodes]
        self.choices: dict[str, list[Any]] = {name: [] for name in self.variables}
        self.index: dict[str, dict[Any, int]] = {name: {} for name in self.variables}
        for node in nodes:
            for value in _values_of(node.parameter):
                places = self.index[node.name]
                if value_key(value) not in places:
                    places[value_key(value)] = len(places)
                    self.choices[node.name].append(value)
        self.keep = keep
        for wish in keep:
            for name in wish if isinstance(wish, Mapping) else ():
                if name not in self.position:
                    raise SpaceError(_WHO, "a point to keep must be made of variables of the space", repr(name), nearest(name, self.variables))
        self.rows: list[_Row] = []
        self.named: dict[int, set[int]] = {}  # position -> choices that some row names
        self.left = Remainders()
        self.starts = [self._with_gate(node, self._compiled(node.parameter, node)) for node in self.nodes]
        self._place_rules()
        self._place_watchers()

    def _parent_labels(self, node: _Node) -> tuple[str, ...]:
        wanted = node.parameter.all_parents if isinstance(node.parameter, Conditional) else ()
        labels = [label for name in wanted for label in self._labels(node, name)]
        return tuple(([node.gate[0]] if node.gate else []) + labels)

    def _labels(self, node: _Node, parent: str) -> list[str]:
        if parent in node.siblings:
            return [node.siblings[parent]]
        if parent in self.labels_of:
            return self.labels_of[parent]
        known = [n for n in [*node.siblings, *self.labels_of] if node.siblings.get(n) != node.label and n != node.name]
        raise SpaceError(_WHO, f"the parents of {node.label} must be known", repr(parent), nearest(parent, known))

    def _variable(self, node: _Node, parent: str) -> str:
        if parent in node.siblings and node.gate is not None:
            return f"{node.gate[0]}.{parent}"
        return parent

    # ------------------------------------------------------------------ conditions and rules as watchers

    def _compiled(self, branch: Any, node: _Node) -> int:
        """Number of the remainder that a branch is while nothing is known."""
        if isinstance(branch, Categorical):
            return self.left.offer(tuple(self.index[node.name][value_key(v)] for v in branch.values))
        if not isinstance(branch, Conditional):
            return self.left.offer(branch)
        names = [self._variable(node, parent) for parent in branch.parents]
        positions = tuple(self.position[n] for n in names)
        table = []
        for values, below in branch.support.items():
            number = len(self.rows)
            places = tuple(ABSENT if v is INACTIVE else self.index[n].get(value_key(v)) for n, v in zip(names, values, strict=True))
            known = tuple(place for place in places if place is not None)
            possible = len(known) == len(places)
            self.rows.append(self._row(node, branch.parents, names, values, below, possible))
            compiled = self._compiled(below, node)
            if possible:
                table.append((known, (number,), compiled))
                for position, place in zip(positions, known, strict=True):
                    self.named.setdefault(position, set()).add(place)
        return self.left.table(positions, table, self._compiled(branch.default, node))

    def _row(self, node: _Node, parents: tuple[str, ...], names: list[str], values: tuple[Any, ...], branch: Any, possible: bool) -> _Row:
        text = ", ".join(f"{parent}={value!r}" for parent, value in zip(parents, values, strict=True))
        hint = "These values never come together: take the row away, or widen its parents"
        for parent, name, value in zip(parents, names, values, strict=True):
            if value is not INACTIVE and value_key(value) not in self.index[name]:
                hint = f"The choices of {parent} are {self.choices[name]!r}"
        return _Row(node.label, text, hint, node.strict, possible, offers=isinstance(branch, Categorical) and len(branch.values) > 1)

    def _with_gate(self, node: _Node, number: int) -> int:
        if node.gate is None:
            return number
        slot, alternative = node.gate
        place = self.index[slot][value_key(alternative)]
        self.named.setdefault(self.position[slot], set()).add(place)
        return self.left.table((self.position[slot],), [((place,), (), number)], self.left.offer(INACTIVE))

    def _place_rules(self) -> None:
        """Put each rule at the step after which it can be judged."""
        last = {node.name: i for i, node in enumerate(self.nodes)}
        self.rules_at: list[list[int]] = [[] for _ in self.nodes]
        self.groups: dict[tuple[str, ...], int] = {}  # names -> watcher
        self.seen: list[tuple[int, ...]] = []  # what a group of rules has seen so far, by number; equal for equal ones
        self._seen_numbers: dict[tuple[int, ...], int] = {}
        for number, rule in enumerate(self.rules):
            who = f"rule {rule.id}"
            if not rule.names:
                raise SpaceError(who, "a rule must name the variables it looks at", "none")
            if rule.id == INVALID_BRANCH:
                raise SpaceError(who, "the name INVALID is kept for INVALID branches", repr(rule.id), "Choose another id")
            for name in rule.names:
                if name not in last:
                    raise SpaceError(who, "a rule must look at variables of the space", repr(name), nearest(name, self.variables))
            self.rules_at[max(last[name] for name in rule.names)].append(number)
            self.groups.setdefault(tuple(rule.names), len(self.nodes) + len(self.groups))

    def _place_watchers(self) -> None:
        """Find what each watcher looks at and when, and so what a key holds in each layer and how it is made from the one before."""
        count = len(self.nodes)
        last = {position: i for i, position in enumerate(self.here)}
        watched = [self.left.looks_at(start) for start in self.starts]
        until = list(range(count))  # the first step whose variable the watcher no longer sees
        self.group_positions = [tuple(self.position[name] for name in names) for names in self.groups]
        for positions in self.group_positions:
            watched.append(frozenset(positions))
            until.append(max(last[p] for p in positions) + 1)
            self.starts.append(self._seen_number((_OPEN,) * len(positions)))
        firsts = [min((i for i in range(until[w]) if self.here[i] in watched[w]), default=count) for w in range(len(watched))]
        due = [w if w < count else until[w] - 1 for w in range(len(watched))]
        layouts: list[tuple[list[int], list[int]]] = []
        for i in range(count + 1):
            held = [w for w in range(len(watched)) if firsts[w] < i <= due[w]]
            layouts.append((held, [w for w in held if w < count]))
        self.plans = [
            (self._plan(i, layouts, watched, until, refused=False), self._plan(i, layouts, watched, until, refused=True)) for i in range(count)
        ]
        self.effects: list[tuple[dict[Any, Any], dict[Any, Any]]] = [({}, {}) for _ in self.nodes]
        # for samplers that ask in an order of their own: positions set before a step that it or a later one looks at
        self.looks_at = []
        for i in range(count):
            wanted = frozenset[int]().union(*(watched[w] for w in range(len(watched)) if due[w] >= i))
            self.looks_at.append(tuple(p for p in dict.fromkeys(self.here[:i]) if p in wanted))

    def _plan(self, i: int, layouts: list[tuple[list[int], list[int]]], watched: list[frozenset[int]], until: list[int], *, refused: bool) -> _Plan:
        layout = layouts[i][refused]
        place = {w: at for at, w in enumerate(layout)}
        watchers = []
        for w in range(len(self.nodes) if refused else len(watched)):
            if i < until[w] and self.here[i] in watched[w]:
                watchers.append((w, place.get(w, -1), self.here[i] not in self.here[i + 1 : until[w]]))
        updated = {w: len(layout) + at for at, (w, _, _) in enumerate(watchers)}
        onward = [_picker([updated.get(w, place.get(w, -1)) for w in layouts[i + 1][ended]]) for ended in (False, True)]
        choices = range(len(self.choices[self.nodes[i].name]))
        classes = choices if any(w >= len(self.nodes) for w, _, _ in watchers) else [told_apart(self.named, self.here[i], c) for c in choices]
        return _Plan(place.get(i, -1), tuple(watchers), (*classes, ABSENT), (onward[0], onward[1]))

    def _seen_number(self, seen: tuple[int, ...]) -> int:
        number = self._seen_numbers.setdefault(seen, len(self.seen))
        if number == len(self.seen):
            self.seen.append(seen)
        return number

    # ------------------------------------------------------------------ one step

    def _outs(self, i: int, state: _State) -> list[_Out]:
        """The ways out of a state."""
        refused, key = state
        if key is None:
            return [(ABSENT, state, None, ())]
        plan = self.plans[i][refused]
        offer = self.left.content(self.starts[i] if plan.own < 0 else key[plan.own])
        fault = INVALID_BRANCH if isinstance(offer, Invalid) else None
        choices = (ABSENT,) if isinstance(offer, Inactive | Invalid) else offer
        current = tuple([self.starts[w] if at < 0 else key[at] for w, at, _ in plan.watchers])
        effects = self.effects[i][refused]
        targets: dict[Any, _State] = {}
        outs = []
        for choice in choices:
            asked = (current, plan.classes[choice], fault)
            effect = effects.get(asked)
            if effect is None:
                effect = effects[asked] = self._effect(i, plan, current, plan.classes[choice], judged=not refused and fault is None)
            after, notes, refuser = effect
            refuser = None if refused else fault or refuser
            ended = refused or refuser is not None
            target = targets.get((after, ended))
            if target is None:
                target = targets[after, ended] = (ended, plan.onward[ended](key + after))
            outs.append((choice, target, refuser, notes))
        return outs

    def _effect(
        self, i: int, plan: _Plan, current: tuple[int, ...], choice: int, *, judged: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...], str | None]:
        """What a choice makes of the watchers' remainders, the rows it makes sure of, and the rule that refuses it."""
        position = self.here[i]
        after = []
        notes: tuple[int, ...] = ()
        for (watcher, _, is_last), number in zip(plan.watchers, current, strict=True):
            if choice == ABSENT and not is_last:  # a later step of the same name may set it
                after.append(number)
            elif watcher < len(self.nodes):
                more, number_after = self.left.given(number, position, told_apart(self.named, position, choice))
                notes += more
                after.append(number_after)
            else:
                positions = self.group_positions[watcher - len(self.nodes)]
                seen = self.seen[number]
                fresh = tuple([choice if p == position and (choice != ABSENT or s == _OPEN) else s for p, s in zip(positions, seen, strict=True)])
                after.append(self._seen_number(fresh))
        refuser = None
        if judged:
            number_of = {watcher: number for (watcher, _, _), number in zip(plan.watchers, after, strict=True)}
            for rule in self.rules_at[i]:
                key = self.seen[number_of[self.groups[tuple(self.rules[rule].names)]]]
                if not self.judge.allows(rule, key, self.choices):
                    refuser = self.rules[rule].id
                    break
        return tuple(after), notes, refuser

    # ------------------------------------------------------------------ the whole

    def diagram(self, *, most_states: int) -> Diagram:
        """Compile with exact counts. Raises `_TooWide`."""
        full = None if self.rules else self._forwards(most_states)
        if self.unreachable is None:
            self.unreachable = self._refuse_rows(full or self._without_rules(most_states))
        return self._finished(full or self._forwards(most_states), exact=True)

    def subset(self) -> Diagram:
        """Compile a part of the space: at most so many states a layer, those that lead to the points to keep among them."""
        if self.unreachable is None:  # too wide even without rules: whether other rows can occur isn't known
            self.unreachable = [row for row in self.rows if not row.possible]
            self._refuse_unreachable(self.unreachable)
        paths = [path for wish in self.keep or [{}] if (path := self._wished(wish)) is not None]
        if not paths and (path := self._wished(lambda _, choices: choices[-1])) is not None:
            paths = [path]
        ways = [max(1, len(self.choices[node.name])) for node in self.nodes]  # out of one state, at most
        edges, calls = sum(ways), sum(count * len(numbers) for count, numbers in zip(ways, self.rules_at, strict=True))
        width = max(1, min(_SUBSET_STATES, _SUBSET_EDGES // max(edges, 1), _SUBSET_CALLS // max(calls, 1)))
        self.judge.most = None  # the width is the limit from here on
        return self._finished(self._forwards(None, width=width, paths=paths), exact=False)

    def _forwards(self, most_states: int | None, *, width: int = 0, paths: Sequence[Sequence[int]] = ()) -> _Full:
        """Build the diagram forwards. With `width`, only so many states a layer are kept, and those on the paths (choices, one a step)."""
        start: _State = (False, ())
        full = _Full(states=[[start]], edges=[], came=[[]], refusals={}, lookups=set())
        on_paths = [0] * len(paths)
        states, edges = 0, 0
        for i in range(len(self.nodes)):
            numbers: dict[_State, int] = {}
            came: list[tuple[int, int]] = []
            layer = []
            for s, state in enumerate(full.states[i]):
                out = []
                for choice, leads_to, refuser, notes in self._outs(i, state):
                    if refuser is not None and refuser not in full.refusals:
                        full.refusals[refuser] = (i, s, choice)
                    target = _REFUSED if width and leads_to[0] else leads_to  # in a subset not followed: it counts for one leaf at least
                    following = numbers.get(target)
                    if following is None:
                        following = numbers[target] = len(numbers)
                        came.append((s, choice))
                    full.lookups.update((row, -1, 0) if target[0] else (row, i + 1, following) for row in notes)
                    out.append((choice, following, refuser))
                layer.append(out)
                edges += len(out)
                if most_states is not None and (states + len(numbers) > most_states or edges > _MOST_EDGES):
                    raise _TooWide
            states += len(numbers)
            reached = list(numbers)
            if width:
                on_paths = [next(f for c, f, _ in layer[at] if c == path[i]) for at, path in zip(on_paths, paths, strict=True)]
                kept = _kept(reached, layer, width, on_paths, i)
                reached, layer = [reached[f] for f in kept], [[(c, kept[f], r) for c, f, r in out if f in kept] for out in layer]
                came = [came[f] for f in kept]
                on_paths = [kept[f] for f in on_paths]
            full.states.append(reached)
            full.edges.append(layer)
            full.came.append(came)
        return full

    def _wished(self, wish: Wish) -> list[int] | None:
        """The choices, one a step, of the first valid point in a walk that goes by a wish and turns back where nothing valid is left.

        None where there is none, or none that a bounded number of calls finds.
        """
        self.judge.most = self.judge.asked + max(_LEAST_WISH_CALLS, _WISH_CALLS // max(len(self.keep), 1))
        dead: set[tuple[int, _State]] = set()
        path: list[tuple[_State, Iterator[_Out]]] = []
        taken: list[int] = []
        state: _State = (False, ())
        steps_left = _SUBSET_EDGES
        try:
            while len(taken) < len(self.nodes):
                if len(path) == len(taken):
                    path.append((state, iter(self._by_wish(len(taken), state, wish))))
                following = next(path[-1][1], None)
                steps_left -= 1
                if steps_left < 0:
                    return None
                if following is None:
                    dead.add((len(taken), path.pop()[0]))
                    if not taken:
                        return None
                    taken.pop()
                    continue
                choice, state, _, _ = following
                if (len(taken) + 1, state) not in dead:
                    taken.append(choice)
        except _TooWide:
            return None
        return taken

    def _by_wish(self, i: int, state: _State, wish: Wish) -> list[_Out]:
        outs = [out for out in self._outs(i, state) if out[2] is None]
        name = self.nodes[i].name
        if not outs or outs[0][0] == ABSENT:
            return outs
        values = [self.choices[name][choice] for choice, *_ in outs]
        if isinstance(wish, Mapping):
            wanted = wish.get(name, values[0])
        else:
            wanted = wish(name, tuple(detached(v) for v in values)) if len(values) > 1 else values[0]
        return sorted(outs, key=lambda out: not same(self.choices[name][out[0]], wanted))

    def _finished(self, full: _Full, *, exact: bool) -> Diagram:
        ends = full.states[-1]
        valid = _backwards(full, [0 if refused else 1 for refused, _ in ends])
        invalid = self._refusals(full, _backwards(full, [1] * len(ends)))
        examples = {name: self._example(full, *where) for name, where in full.refusals.items()}
        if not valid[0][0]:
            raise self._nothing_left(full, invalid, examples) if exact else self._nothing_found()
        layers = _pruned(full, valid)
        if exact:
            self._refuse_empty_chain(layers, examples)
        return Diagram(
            variables=self.variables,
            choices={name: tuple(values) for name, values in self.choices.items()},
            steps=tuple(Step(n.name, self.here[i], self.looks_at[i]) for i, n in enumerate(self.nodes)),
            layers=layers,
            valid=valid[0][0],
            exact=exact,
            invalid=invalid,
            examples={name: examples[name] for name in invalid if name in examples},
            unreachable=tuple(f"{row.label}: {row.text}" for row in self.unreachable or ()),
        )

    def _refusals(self, full: _Full, leaves: list[list[int]]) -> dict[str, int]:
        """Count the leaves that each rule, and INVALID branches, refuse first: paths to the refusing edge times leaves beyond it."""
        refused = {INVALID_BRANCH: 0, **{rule.id: 0 for rule in self.rules}}
        paths = [1]
        for i, layer in enumerate(full.edges):
            onward = [0] * len(leaves[i + 1])
            for reached, out in zip(paths, layer, strict=True):
                for _, following, refuser in out:
                    onward[following] += reached
                    if refuser is not None:
                        refused[refuser] += reached * leaves[i + 1][following]
            paths = onward
        return refused

    def _example(self, full: _Full, i: int, s: int, choice: int) -> dict[str, Any]:
        """The leaf that this choice in this state is on the way to, the first choice taken wherever there is one after it."""
        path = [choice]
        state = full.states[i][s]
        for earlier in range(i, 0, -1):
            s, before = full.came[earlier][s]
            path.append(before)
        path.reverse()
        for step in range(i, len(self.nodes)):
            outs = self._outs_unjudged(step, state)
            taken, state = next((out for out in outs if step == i and out[0] == choice), outs[0])
            if step > i:
                path.append(taken)
        return {node.name: detached(self.choices[node.name][c]) for node, c in zip(self.nodes, path, strict=True) if c != ABSENT}

    def _outs_unjudged(self, i: int, state: _State) -> list[tuple[int, _State]]:
        """The ways out of a state where the walk is refused by this step at the latest; no rule is asked."""
        refused, key = state
        assert key is not None, "examples start from states that are followed"
        plan = self.plans[i][refused]
        offer = self.left.content(self.starts[i] if plan.own < 0 else key[plan.own])
        current = tuple([self.starts[w] if at < 0 else key[at] for w, at, _ in plan.watchers])
        choices = (ABSENT,) if isinstance(offer, Inactive | Invalid) else offer
        return [(c, (True, plan.onward[True](key + self._effect(i, plan, current, c, judged=False)[0]))) for c in choices]

    # ------------------------------------------------------------------ refusals

    def _without_rules(self, most_states: int) -> _Full:
        """The diagram of the conditions alone: its keys hold nothing of what rules have seen."""
        if not self.rows:
            return _Full(states=[], edges=[], came=[], refusals={}, lookups=set())
        rules_at, effects, plans = self.rules_at, self.effects, self.plans
        self.rules_at = [[] for _ in self.nodes]
        self.effects = [({}, {}) for _ in self.nodes]
        bare = [replace(refused, onward=(refused.onward[True], refused.onward[True])) for _, refused in plans]
        self.plans = [(plan, plan) for plan in bare]
        try:
            return self._forwards(most_states)
        finally:
            self.rules_at, self.effects, self.plans = rules_at, effects, plans

    def _refuse_rows(self, full: _Full) -> list[_Row]:
        """Refuse rows, written for this space, that cannot occur or in which INVALID branches leave nothing; give the others back.

        Rules are left out of it: what they refuse depends on the target and the data, and a sweep file serves more than one.
        """
        if not self.rows:
            return []
        visited = {row for row, _, _ in full.lookups}
        unreachable = [row for number, row in enumerate(self.rows) if number not in visited]
        self._refuse_unreachable(unreachable)
        valid = _backwards(full, [0 if refused else 1 for refused, _ in full.states[-1]])
        alive = {row for row, layer, state in full.lookups if layer >= 0 and valid[layer][state]}
        for number, row in enumerate(self.rows):
            if valid[0][0] and row.strict and row.offers and number in visited and number not in alive:
                raise SpaceError(
                    _WHO,
                    f"the branch of {row.label} for {row.text} must leave a valid point",
                    f"only combinations that {self._invalid_after(full, number)} makes INVALID",
                    "Make one of them valid, or this branch INVALID too",
                )
        return unreachable

    def _invalid_after(self, full: _Full, row: int) -> str:
        """The label of a condition that is INVALID wherever the row is looked up; nothing valid lies beyond it."""
        where = min(((layer, state) for number, layer, state in full.lookups if number == row and layer >= 0), default=None)
        if where is None:
            return "another condition"
        layer, state = where
        while True:
            _, state, refuser = full.edges[layer][state][0]
            if refuser is not None:
                return self.nodes[layer].label
            layer += 1

    def _refuse_unreachable(self, rows: Iterable[_Row]) -> None:
        for row in rows:
            if row.strict:
                raise SpaceError(_WHO, f"a row in the condition of {row.label} must be able to occur", row.text, row.hint)

    def _refuse_empty_chain(self, layers: tuple[tuple[tuple[Edge, ...], ...], ...], examples: Mapping[str, Mapping[str, Any]]) -> None:
        slots = [i for i, node in enumerate(self.nodes) if node.is_slot]
        if not slots or any(self.choices[self.nodes[i].name][c] is not None for i in slots for edges in layers[i] for c, _, _ in edges):
            return
        names = ", ".join(self.nodes[i].name for i in slots)
        raise SpaceError(
            _WHO,
            "at least one slot must be able to hold a pass",
            f"{names} can only be skipped: " + "; ".join(f"{_shown(example)} refused by {_refuser(name)}" for name, example in examples.items()),
            self._mend(examples),
        )

    def _nothing_left(self, full: _Full, invalid: Mapping[str, int], examples: Mapping[str, Mapping[str, Any]]) -> SpaceError:
        causes = {name: count for name, count in invalid.items() if count}
        told = []
        for name, count in causes.items():
            where = ""
            if name == INVALID_BRANCH:
                node = self.nodes[full.refusals[name][0]]
                earlier = {n: v for n, v in examples[name].items() if n in self._parents_in_words(node)}
                where = f" ({node.label}" + (f" with {_shown(earlier)})" if earlier else ")")
            told.append(f"{count} refused by {_refuser(name)}{where}")
        return SpaceError(_WHO, "at least one valid point must remain", f"{sum(causes.values())} points: {', '.join(told)}", self._mend(causes))

    def _nothing_found(self) -> SpaceError:
        ids = ", ".join(dict.fromkeys(rule.id for rule in self.rules))
        return SpaceError(
            _WHO,
            "at least one valid point must be found",
            f"none in {self.judge.asked} calls of rules ({ids})" if ids else "none among the combinations looked at",
            "Split conditions and rules that look at many variables into smaller ones, or name a valid point to start from",
        )

    def _parents_in_words(self, node: _Node) -> set[str]:
        wanted = node.parameter.all_parents if isinstance(node.parameter, Conditional) else ()
        return {self._variable(node, parent) for parent in wanted}

    def _mend(self, ids: Iterable[str]) -> str:
        messages = dict.fromkeys(rule.message for rule in self.rules if rule.message and rule.id in ids)
        return " ".join(messages) or "Make a branch valid, or widen the parents' choices"


def _refuser(name: str) -> str:
    return "INVALID branches" if name == INVALID_BRANCH else name


def _shown(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in point.items())


def _picker(places: list[int]) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    if not places:
        return lambda _: ()
    if len(places) == 1:
        only = places[0]
        return lambda values: (values[only],)
    return itemgetter(*places)


def _kept(reached: list[_State], layer: list[list[tuple[int, int, str | None]]], width: int, wanted: Iterable[int], turn: int) -> dict[int, int]:
    """Choose the states of a layer to keep: old number to new. Every state before keeps one way on, as far as the width allows.

    The order is that of a checksum of what a state holds: even, the same everywhere, and no choice is preferred.
    """
    kept = dict.fromkeys(wanted)
    kept.update(dict.fromkeys(f for f, state in enumerate(reached) if state[0]))  # refused: one state
    open_states = [f for f, state in enumerate(reached) if not state[0]]
    if len(open_states) > width:
        rank = {f: zlib.crc32(repr((turn, reached[f])).encode()) for f in open_states}
        ways = [sorted({f for _, f, _ in out if f in rank}, key=lambda f: (rank[f], f)) for out in layer]
        room = width + len(kept)
        for turn_of_each in range(max(map(len, ways), default=0)):
            for state in sorted((way[turn_of_each] for way in ways if turn_of_each < len(way)), key=lambda f: (rank[f], f)):
                if len(kept) >= room:
                    break
                kept[state] = None
    else:
        kept.update(dict.fromkeys(open_states))
    return {old: new for new, old in enumerate(sorted(kept))}


def _backwards(full: _Full, ends: list[int]) -> list[list[int]]:
    """Count, for every state, what lies beyond it: `ends` says what each state of the last layer counts for."""
    counts = [ends]
    for layer in reversed(full.edges):
        beyond = counts[-1]
        counts.append([sum([beyond[following] for _, following, _ in out]) for out in layer])
    return counts[::-1]


def _pruned(full: _Full, valid: list[list[int]]) -> tuple[tuple[tuple[Edge, ...], ...], ...]:
    """Leave only states and edges with a valid point beyond, and make one state of those with the same edges."""
    layers: list[tuple[tuple[Edge, ...], ...]] = []
    numbers = [0] * len(valid[-1])  # of each state of the full diagram, in the layer made last
    for i in range(len(full.edges) - 1, -1, -1):
        beyond = valid[i + 1]
        made: dict[tuple[Edge, ...], int] = {}
        numbers_here = []
        for out, count in zip(full.edges[i], valid[i], strict=True):
            edges = tuple([(choice, numbers[following], beyond[following]) for choice, following, _ in out if beyond[following]])
            numbers_here.append(made.setdefault(edges, len(made)) if count else -1)
        layers.append(tuple(made))
        numbers = numbers_here
    return tuple(reversed(layers))


def _flat_node(name: str, parameter: Parameter) -> _Node:
    return _Node(_checked_name("a parameter", name), name, _checked_parameter(name, parameter))


def _chain_nodes(slots: tuple[Slot, ...]) -> list[_Node]:
    if not slots:
        raise SpaceError(_WHO, "a chain must have at least one slot", "none", "Add a pass")
    nodes: list[_Node] = []
    for slot in slots:
        who = f"slot {_checked_name('a slot', slot.name, forbidden=_FORBIDDEN + '.')}"
        if any(node.label == slot.name for node in nodes):
            raise SpaceError(_WHO, "slots must have different names", f"{slot.name!r} twice", "Rename one")
        if not slot.alternatives:
            raise SpaceError(who, "it must have at least one pass to choose from", "none")
        names = [alternative.name for alternative in slot.alternatives]
        for name in names:
            if names.count(name) > 1:
                raise SpaceError(who, "its alternatives must have different names", f"{name!r} twice", "Give one a name of its own")
        nodes.append(_Node(slot.name, slot.name, Categorical([*names, None] if slot.optional else names), is_slot=True))
        for alternative in slot.alternatives:
            nodes += _alternative_nodes(slot, alternative)
    return nodes


def _alternative_nodes(slot: Slot, alternative: Alternative) -> list[_Node]:
    for name in alternative.written:
        if name not in alternative.parameters:
            raise SpaceError(alternative.name, "written conditions must be on its parameters", repr(name), nearest(name, alternative.parameters))
    labels = {}
    for name in alternative.parameters:
        shared = sum(name in other.parameters for other in slot.alternatives) > 1
        labels[name] = f"{slot.name}.{_checked_name('a parameter', name)}" + (f" of {alternative.name}" if shared else "")
    return [
        _Node(
            label=labels[name],
            name=f"{slot.name}.{name}",
            parameter=_checked_parameter(labels[name], parameter),
            siblings=labels,
            gate=(slot.name, alternative.name),
            strict=name in alternative.written,
        )
        for name, parameter in alternative.parameters.items()
    ]


def _checked_name(what: str, name: object, *, forbidden: str = _FORBIDDEN) -> str:
    if not isinstance(name, str) or not name:
        raise SpaceError(_WHO, f"the name of {what} must be text", repr(name))
    for sign in forbidden:
        if sign in name:
            raise SpaceError(_WHO, f"the name of {what} must not hold {sign!r}", repr(name), "Rename it")
    return name


def _checked_parameter(label: str, parameter: object) -> Parameter:
    if isinstance(parameter, Categorical | Conditional):
        return parameter
    if isinstance(parameter, ConditionalDefault):
        mend = "Use its as_conditional()"
    else:
        mend = f"Write Categorical({list(parameter) if isinstance(parameter, list | tuple) else [parameter]!r})"
    raise SpaceError(_WHO, f"{label} must be a Categorical or a Conditional", repr(parameter), mend)


def _values_of(branch: Any) -> list[Any]:
    """All values a parameter can have, in order of declaration, sentinels left out."""
    if isinstance(branch, Categorical):
        return list(branch.values)
    if isinstance(branch, Conditional):
        return [value for below in [*branch.support.values(), branch.default] for value in _values_of(below)]
    return []


def _as_declared(nodes: list[_Node], parents: Mapping[str, tuple[str, ...]], rules: tuple[Rule, ...]) -> list[_Node]:
    """Order nodes parents first and else as declared. Refuses cycles."""
    by_label = {node.label: node for node in nodes}
    return [by_label[label] for label in order_parents_first(parents, _WHO)]


def _narrow(nodes: list[_Node], parents: Mapping[str, tuple[str, ...]], rules: tuple[Rule, ...]) -> list[_Node]:
    """Order nodes parents first, slots as given, such that few earlier values matter at any time: that keeps the diagram narrow.

    Greedy: of the nodes that may come next, the one that leaves the fewest variables open (set, and still to be looked at); the first
    declared among equals. So a condition declared far from its parents moves up to them, and all else keeps its order.
    """
    number = {node.label: i for i, node in enumerate(nodes)}
    waiting = [{number[label] for label in parents[node.label]} for node in nodes]
    slots = [i for i, node in enumerate(nodes) if node.is_slot]
    for earlier, later in pairwise(slots):
        waiting[later].add(earlier)
    at: dict[str, set[int]] = {}
    for i, node in enumerate(nodes):
        at.setdefault(node.name, set()).add(i)
    lookers: dict[str, set[int]] = {name: set() for name in at}  # of each variable: nodes still to come that look at it
    for i, node in enumerate(nodes):
        for label in parents[node.label]:
            lookers[nodes[number[label]].name].add(i)
    for rule in rules:
        together = set().union(*(at.get(name, set()) for name in rule.names))
        for name in rule.names:
            lookers.get(name, set()).update(together)
    looked_at: list[set[str]] = [set() for _ in nodes]
    for name, those in lookers.items():
        for i in those:
            looked_at[i].add(name)
    children: list[list[int]] = [[] for _ in nodes]
    for i, those in enumerate(waiting):
        for parent in those:
            children[parent].append(i)
    left = [len(those) for those in waiting]
    ready = [i for i, count in enumerate(left) if not count]
    opened: set[str] = set()
    ordered: list[_Node] = []

    def cost(i: int) -> int:
        name = nodes[i].name
        opens = name not in opened and bool(lookers[name] - {i})
        return opens - sum(len(lookers[other]) == 1 for other in looked_at[i] if other in opened)

    while ready:
        chosen = ready[0]
        if opened or lookers[nodes[chosen].name]:
            chosen = min(ready, key=lambda i: (cost(i), i))
        ready.remove(chosen)
        ordered.append(nodes[chosen])
        opened.add(nodes[chosen].name)
        for name in looked_at[chosen]:
            lookers[name].discard(chosen)
        opened = {name for name in opened if lookers[name]}
        for child in children[chosen]:
            left[child] -= 1
            if not left[child]:
                insort(ready, child)
    return ordered
