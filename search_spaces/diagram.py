"""Compiling what may vary into a decision diagram: one layer a variable, one state for each way the earlier values still matter.

The variables are walked parents first, and walks that agree on everything a later condition or rule looks at are merged. Independent
variables have one state a layer, so 10^24 points are as cheap as 24 variables; every edge knows how many valid points lie beyond it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
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
    value_key,
)

INVALID_BRANCH = "INVALID"
"""The name under which points with an INVALID branch are counted among those refused."""

ABSENT = -1
"""Stands for the index of a choice where a variable is inactive."""

_WHO = "search space"
_MANY_STATES = 2_000  # what the order of declaration may cost before a narrower one is tried
_MOST_STATES = 1_000_000
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

    `layers[turn][state]` holds the edges out of a state. `states[turn]` maps choices at the positions that the step looks at to the
    number of the state; `stands_for[position][choice]` is the choice that a state names for all that make no difference later.
    `invalid` and `unreachable` are told in `Space`.
    """

    variables: tuple[str, ...]
    choices: Mapping[str, tuple[Any, ...]]
    steps: tuple[Step, ...]
    layers: tuple[tuple[tuple[Edge, ...], ...], ...]
    states: tuple[Mapping[tuple[int, ...], int], ...]
    stands_for: tuple[tuple[int, ...], ...]
    valid: int
    invalid: Mapping[str, int]
    unreachable: tuple[str, ...]


def compile_diagram(chain: tuple[Slot, ...] | None, parameters: Mapping[str, Parameter], rules: Sequence[Rule]) -> Diagram:
    """Compile a chain of slots or, where that is None, a flat table; `compile_space` tells what is refused."""
    nodes = [_flat_node(name, parameter) for name, parameter in parameters.items()] if chain is None else _chain_nodes(chain)
    try:
        return _Compiler(nodes, rules, in_order=_as_declared, most_states=_MANY_STATES).diagram()
    except _TooWide:
        return _Compiler(nodes, rules, in_order=_narrow, most_states=_MOST_STATES).diagram()


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
class _Switch:
    """A condition over positions and choice indices; each row carries the number under which its visit is noted."""

    positions: tuple[int, ...]
    rows: Mapping[tuple[int, ...], tuple[int, Any]]
    default: Any


@dataclass(frozen=True)
class _Row:
    label: str
    text: str
    hint: str
    strict: bool


_Layer = dict[tuple[bool, tuple[int, ...]], int]
"""States of the diagram that does not prune, numbered: (already refused?, values of the positions still looked at)."""

_FullEdges = list[list[list[tuple[int, int, str | None]]]]
"""For each layer and state, the ways out: index of the choice, state it leads to, who refuses here (None: nobody, or refused before)."""

_Kept = dict[tuple[int, ...], int]


_Order = Callable[[list[_Node], Mapping[str, tuple[str, ...]], tuple[Rule, ...]], list[_Node]]
"""Orders nodes; gets the labels of each label's parents too, and the rules."""


class _TooWide(SpaceError):
    """The diagram has more states than allowed."""


class _Compiler:
    """The work of `compile_diagram`: order, turn names into positions, build the diagram forwards, count it backwards, prune."""

    def __init__(self, nodes: list[_Node], rules: Sequence[Rule], *, in_order: _Order, most_states: int) -> None:
        self.rules = tuple(rules)
        self.most_states = most_states
        self.labels_of: dict[str, list[str]] = {}
        for node in nodes:
            self.labels_of.setdefault(node.name, []).append(node.label)
        parents = {node.label: self._parent_labels(node) for node in nodes}
        self.nodes = in_order(nodes, parents, self.rules)
        self.variables = tuple(dict.fromkeys(node.name for node in self.nodes))
        self.position = {name: i for i, name in enumerate(self.variables)}
        self.choices: dict[str, list[Any]] = {name: [] for name in self.variables}
        self.index: dict[str, dict[Any, int]] = {name: {} for name in self.variables}
        for node in nodes:
            for value in _values_of(node.parameter):
                places = self.index[node.name]
                if value_key(value) not in places:
                    places[value_key(value)] = len(places)
                    self.choices[node.name].append(value)
        self.rows: list[_Row] = []
        self.visited: set[int] = set()
        self.branches = [self._compiled(node.parameter, node) for node in self.nodes]
        self.gates = [(self.position[n.gate[0]], self.index[n.gate[0]][value_key(n.gate[1])]) if n.gate else None for n in self.nodes]
        self._place_rules()
        self._find_live()
        self._find_classes()

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

    def _compiled(self, branch: Any, node: _Node) -> Any:
        if isinstance(branch, Categorical):
            return tuple(self.index[node.name][value_key(v)] for v in branch.values)
        if not isinstance(branch, Conditional):
            return branch
        names = [self._variable(node, parent) for parent in branch.parents]
        table: dict[tuple[int, ...], tuple[int, Any]] = {}
        for values, below in branch.support.items():
            number = len(self.rows)
            self.rows.append(self._row(node, branch.parents, names, values))
            compiled = self._compiled(below, node)
            places = tuple(ABSENT if v is INACTIVE else self.index[n].get(value_key(v)) for n, v in zip(names, values, strict=True))
            if None not in places:
                table[places] = (number, compiled)  # type: ignore[index] # no None among the places
        return _Switch(tuple(self.position[n] for n in names), table, self._compiled(branch.default, node))

    def _row(self, node: _Node, parents: tuple[str, ...], names: list[str], values: tuple[Any, ...]) -> _Row:
        text = ", ".join(f"{parent}={value!r}" for parent, value in zip(parents, values, strict=True))
        hint = "These values never come together: take the row away, or widen its parents"
        for parent, name, value in zip(parents, names, values, strict=True):
            if value is not INACTIVE and value_key(value) not in self.index[name]:
                hint = f"The choices of {parent} are {self.choices[name]!r}"
        return _Row(node.label, text, hint, node.strict)

    def _place_rules(self) -> None:
        """Put each rule at the step after which it can be judged."""
        last = {node.name: i for i, node in enumerate(self.nodes)}
        self.rules_at: list[list[int]] = [[] for _ in self.nodes]
        self.rule_positions: list[tuple[int, ...]] = []
        self.judged: list[dict[tuple[int, ...], bool]] = [{} for _ in self.rules]
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
            self.rule_positions.append(tuple(self.position[name] for name in rule.names))

    def _find_live(self) -> None:
        """Find, for every step, the earlier positions that it or a later one looks at: conditions alone, and with rules."""
        by_conditions: dict[int, int] = {}
        for i, (branch, gate) in enumerate(zip(self.branches, self.gates, strict=True)):
            for switch in _switches(branch):
                by_conditions.update(dict.fromkeys(switch.positions, i))
            if gate is not None:
                by_conditions[gate[0]] = i
        by_all = dict(by_conditions)
        for i, numbers in enumerate(self.rules_at):
            for number in numbers:
                for position in self.rule_positions[number]:
                    by_all[position] = max(by_all.get(position, 0), i)
        self.live: list[tuple[int, ...]] = []
        self.live_refused: list[tuple[int, ...]] = []
        before: dict[int, None] = {}
        for i in range(len(self.nodes) + 1):
            self.live.append(tuple(p for p in before if by_all.get(p, -1) >= i))
            self.live_refused.append(tuple(p for p in before if by_conditions.get(p, -1) >= i))
            if i < len(self.nodes):
                before[self.position[self.nodes[i].name]] = None

    def _find_classes(self) -> None:
        """Give each choice the one that stands for it in a state: choices that no row, gate or rule tells apart share one."""
        told_apart: list[set[int]] = [set() for _ in self.variables]
        for branch in self.branches:
            for switch in _switches(branch):
                for key in switch.rows:
                    for position, choice in zip(switch.positions, key, strict=True):
                        told_apart[position].add(choice)
        for gate in self.gates:
            if gate is not None:
                told_apart[gate[0]].add(gate[1])
        for positions in self.rule_positions:
            for position in positions:
                told_apart[position].update(range(len(self.choices[self.variables[position]])))
        self.stands_for: list[tuple[int, ...]] = []
        for name, apart in zip(self.variables, told_apart, strict=True):
            alike = [choice for choice in range(len(self.choices[name])) if choice not in apart]
            self.stands_for.append(tuple(choice if choice in apart else alike[0] for choice in range(len(self.choices[name]))))

    def diagram(self) -> Diagram:
        states, edges = self._forwards()
        valid = _backwards(edges, [0 if refused else 1 for refused, _ in states[-1]])
        invalid = self._refusals(edges, _backwards(edges, [1] * len(states[-1])))
        unreachable = [row for number, row in enumerate(self.rows) if number not in self.visited]
        for row in unreachable:
            if row.strict:
                raise SpaceError(_WHO, f"a row in the condition of {row.label} must be able to occur", row.text, row.hint)
        if not valid[0][0]:
            raise self._nothing_left(invalid)
        layers, kept = _pruned(states, edges, valid)
        return Diagram(
            variables=self.variables,
            choices={name: tuple(values) for name, values in self.choices.items()},
            steps=tuple(Step(n.name, self.position[n.name], self.live[i]) for i, n in enumerate(self.nodes)),
            layers=layers,
            states=kept,
            stands_for=tuple(self.stands_for),
            valid=valid[0][0],
            invalid=invalid,
            unreachable=tuple(f"{row.label}: {row.text}" for row in unreachable),
        )

    def _forwards(self) -> tuple[list[_Layer], _FullEdges]:
        """Build the diagram that does not prune: the states of each layer with their numbers, and the edges between layers."""
        states: list[_Layer] = [{(False, ()): 0}]
        edges: _FullEdges = []
        values = [ABSENT] * len(self.variables)
        total = 0
        for i, node in enumerate(self.nodes):
            here = self.position[node.name]
            following: _Layer = {}
            layer = []
            for refused, known in states[i]:
                looked_at = self.live_refused[i] if refused else self.live[i]
                values[here] = ABSENT  # unless an earlier step of the same name has set it
                for position, value in zip(looked_at, known, strict=True):
                    values[position] = value
                before = values[here]
                out = []
                for choice, fault in self._options(i, values):
                    values[here] = before if choice == ABSENT else self.stands_for[here][choice]
                    refuser = fault if fault or refused else self._refuser(i, values)
                    ended = refused or refuser is not None
                    after = tuple(values[p] for p in (self.live_refused if ended else self.live)[i + 1])
                    out.append((choice, following.setdefault((ended, after), len(following)), None if refused else refuser))
                layer.append(out)
                if total + len(following) > self.most_states:
                    raise _TooWide(
                        _WHO,
                        f"conditions and rules must look at few variables each; they make more than {self.most_states} cases to tell apart",
                        f"this many at {node.label}",
                        "Split the rules into smaller ones, or take some choices away",
                    )
            total += len(following)
            edges.append(layer)
            states.append(following)
        return states, edges

    def _options(self, i: int, values: list[int]) -> list[tuple[int, str | None]]:
        gate = self.gates[i]
        if gate is not None and values[gate[0]] != gate[1]:
            return [(ABSENT, None)]
        branch = self.branches[i]
        while isinstance(branch, _Switch):
            key = tuple(values[p] for p in branch.positions)
            row = branch.rows.get(key)
            if row is not None:
                self.visited.add(row[0])
                branch = row[1]
            else:
                branch = INACTIVE if ABSENT in key else branch.default
        if isinstance(branch, Inactive):
            return [(ABSENT, None)]
        if isinstance(branch, Invalid):
            return [(ABSENT, INVALID_BRANCH)]
        return [(choice, None) for choice in branch]

    def _refuser(self, i: int, values: list[int]) -> str | None:
        for number in self.rules_at[i]:
            key = tuple(values[p] for p in self.rule_positions[number])
            judged = self.judged[number]
            if key not in judged:
                judged[key] = self._judge(self.rules[number], key)
            if not judged[key]:
                return self.rules[number].id
        return None

    def _judge(self, rule: Rule, key: tuple[int, ...]) -> bool:
        seen = {name: detached(self.choices[name][c]) for name, c in zip(rule.names, key, strict=True) if c != ABSENT}
        try:
            return bool(rule.allows(seen))
        except Exception as error:
            raise SpaceError(f"rule {rule.id}", f"a rule must be able to judge {seen!r}", f"{type(error).__name__}: {error}") from error

    def _refusals(self, edges: _FullEdges, leaves: list[list[int]]) -> dict[str, int]:
        """Count the leaves that each rule, and INVALID branches, refuse first: paths to the refusing edge times leaves beyond it."""
        refused = {INVALID_BRANCH: 0, **{rule.id: 0 for rule in self.rules}}
        paths = [1]
        for i, layer in enumerate(edges):
            onward = [0] * len(leaves[i + 1])
            for reached, out in zip(paths, layer, strict=True):
                for _, following, refuser in out:
                    onward[following] += reached
                    if refuser is not None:
                        refused[refuser] += reached * leaves[i + 1][following]
            paths = onward
        return refused

    def _nothing_left(self, invalid: Mapping[str, int]) -> SpaceError:
        causes = {name: count for name, count in invalid.items() if count}
        messages = dict.fromkeys(rule.message for rule in self.rules if rule.message and causes.get(rule.id))
        mend = " ".join(messages) or "Make a branch valid, or widen the parents' choices"
        refused = ", ".join(f"{count} refused by {'INVALID branches' if name == INVALID_BRANCH else name}" for name, count in causes.items())
        return SpaceError(_WHO, "at least one valid point must remain", f"{sum(causes.values())} points: {refused}", mend)


def _backwards(edges: _FullEdges, ends: list[int]) -> list[list[int]]:
    """Count, for every state, what lies beyond it: `ends` says what each state of the last layer counts for."""
    counts = [ends]
    for layer in reversed(edges):
        counts.append([sum(counts[-1][following] for _, following, _ in out) for out in layer])
    return counts[::-1]


def _pruned(states: list[_Layer], edges: _FullEdges, valid: list[list[int]]) -> tuple[tuple[tuple[tuple[Edge, ...], ...], ...], tuple[_Kept, ...]]:
    """Leave only states and edges with a valid point beyond, and number the states anew."""
    renumbered: list[dict[int, int]] = []
    kept: list[_Kept] = []
    for layer, counts in zip(states, valid, strict=True):
        alive = [(known, old) for (_, known), old in layer.items() if counts[old]]
        renumbered.append({old: new for new, (_, old) in enumerate(alive)})
        kept.append({known: new for new, (known, _) in enumerate(alive)})
    layers = []
    for i, layer_edges in enumerate(edges):
        beyond, numbers = valid[i + 1], renumbered[i + 1]
        layers.append(
            tuple(
                tuple((choice, numbers[following], beyond[following]) for choice, following, _ in layer_edges[old] if beyond[following])
                for old in renumbered[i]
            )
        )
    return tuple(layers), tuple(kept[:-1])


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


def _switches(branch: Any) -> list[_Switch]:
    """The switches in a compiled parameter, nested ones included."""
    if not isinstance(branch, _Switch):
        return []
    below = [inner for _, inner in branch.rows.values()]
    return [branch, *(switch for inner in [*below, branch.default] for switch in _switches(inner))]


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
