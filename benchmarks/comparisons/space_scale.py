"""How compiling, counting and drawing grow with a search space, beside ConfigSpace where it can express the same space.

    python benchmarks/comparisons/space_scale.py [--repeats 7] [--json FILE]

Prints a table and, with `--json`, writes it: for spaces of 10^3 to 10^24 points, flat, with a condition on every variable, and as chains of
slots with conditions and rules, the median processor time to compile, to count and to draw 100 points (ms), and the peak of Python's memory over the
three (MB, by tracemalloc, in a run of its own). ConfigSpace draws with repeats and estimates sizes without conditions in mind, so its
count is left out; what it can't express is named. It is needed for its columns only: `pip install ConfigSpace` (BSD-3-Clause).
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import SpaceError
from autotune.search_spaces import INACTIVE, Alternative, Categorical, Conditional, Rule, Slot, Space, compile_space, draw_points, value_key

DRAWS = 100


@dataclass(frozen=True)
class NotBoth:
    """Refuses one pair of values."""

    one: tuple[str, Any]
    other: tuple[str, Any]

    def __call__(self, values: Mapping[str, Any]) -> bool:
        return not all(name in values and values[name] == value for name, value in (self.one, self.other))


@dataclass(frozen=True)
class Case:
    """A space to compile: what is declared, and the rules on it."""

    name: str
    declared: Sequence[Slot] | Mapping[str, Any]
    rules: tuple[Rule, ...] = ()


def flat(count: int, choices: int) -> dict[str, Any]:
    return {f"x{i}": Categorical(range(choices)) for i in range(count)}


def conditional(count: int) -> dict[str, Any]:
    """As flat, and beside each variable one that is active for one of its values only."""
    return flat(count, 10) | {f"y{i}": Conditional(f"x{i}", {0: Categorical([1, 2])}, INACTIVE) for i in range(count)}


def chain(count: int) -> tuple[list[Slot], tuple[Rule, ...]]:
    """Slots of three variables, with a condition inside each, one across slots, and a rule between neighbours."""
    slots, rules = [], []
    for s in range(count):
        table: dict[str, Any] = {
            "mode": Categorical(range(10)),
            "bits": Categorical(range(10)),
            "method": Conditional("mode", {1: Categorical(range(10))}, INACTIVE),
        }
        if s:
            table["extra"] = Conditional(f"slot{s - 1}.bits", {8: Categorical([1, 2])}, INACTIVE)
            rules.append(Rule("neighbours", (f"slot{s - 1}.mode", f"slot{s}.mode"), NotBoth((f"slot{s - 1}.mode", 9), (f"slot{s}.mode", 9))))
        slots.append(Slot(f"slot{s}", (Alternative("One", table), Alternative("Other", {"bits": Categorical(range(10))})), optional=True))
    return slots, tuple(rules)


def cases() -> list[Case]:
    found = [Case(f"10^{n} flat", flat(n, 10)) for n in (3, 6, 12, 24)] + [Case("8^24 flat", flat(24, 8))]
    found += [Case(f"10^{n} and a condition each", conditional(n)) for n in (3, 6, 12, 24)]
    far = tuple(Rule(f"r{i}", (f"x{i}", f"x{i + 12}"), NotBoth((f"x{i}", 0), (f"x{i + 12}", 0))) for i in range(12))
    found.append(Case("10^24 and 12 far rules", flat(24, 10), far))
    found += [Case(f"chain of {n} slots", *chain(n)) for n in (2, 3, 6, 11)]
    return found


# ---- ConfigSpace ---------------------------------------------------------------------------------------------------------------


def to_configspace(space: Space, rules: Sequence[Rule] = (), *, seed: int = 0) -> Any:
    """Return the space as a ConfigSpace `ConfigurationSpace`, values as their places among the choices.

    It can hold conditions that make a variable active for some values of one parent each, all with the same choices, and `NotBoth`
    rules. Raises `SpaceError` for what it can't express: other choices for other values, INVALID, rows on INACTIVE, other rules.
    """
    from ConfigSpace import (
        AndConjunction,
        CategoricalHyperparameter,
        ConfigurationSpace,
        ForbiddenAndConjunction,
        ForbiddenEqualsClause,
        InCondition,
    )

    made = ConfigurationSpace(seed=seed)
    parameters: dict[str, Any] = {}
    for name in space.variables:
        count = len(space.choices(name))
        # the default has to pass the rules, and the last value never does
        parameters[name] = CategoricalHyperparameter(name, list(range(count)), default_value=min(1, count - 1))
    made.add(*parameters.values())
    for name, needed in _needs(space).items():
        clauses = [InCondition(parameters[name], parameters[parent], places) for parent, places in needed]
        made.add(clauses[0] if len(clauses) == 1 else AndConjunction(*clauses))
    for rule in rules:
        if not isinstance(rule.allows, NotBoth):
            raise SpaceError("ConfigSpace", "rules must forbid pairs of values", rule.id)
        pairs = (rule.allows.one, rule.allows.other)
        made.add(ForbiddenAndConjunction(*(ForbiddenEqualsClause(parameters[n], space.choice_index(n, v)) for n, v in pairs)))
    return made


def _needs(space: Space) -> dict[str, list[tuple[str, list[int]]]]:
    """For each conditional variable: parents, and the places of the values with which it is active."""
    needs: dict[str, list[tuple[str, list[int]]]] = {}
    tables: list[tuple[str, Mapping[str, Any], tuple[str, str] | None]] = [] if space.slots else [("", space.parameters, None)]
    tables += [(f"{slot.name}.", a.parameters, (slot.name, a.name)) for slot in space.slots for a in slot.alternatives]
    active: dict[str, list[Any]] = {}  # the ways in which a variable comes to be active, each a list of (parent, places)
    for prefix, table, gate in tables:
        for name, parameter in table.items():
            ways = [(gate[0], [space.choice_index(*gate)])] if gate else []
            if isinstance(parameter, Conditional):
                ways.append(_only_way(space, prefix, table, name, parameter))
            active.setdefault(prefix + name, []).append((parameter, ways))
    for name, those in active.items():
        if len(those) > 1:  # alternatives share the name: active for each of them, if the choices are the same and nothing else decides
            if any(isinstance(p, Conditional) or value_key(p.values) != value_key(those[0][0].values) for p, _ in those):
                raise SpaceError("ConfigSpace", "a name must have the same choices wherever it is active", name)
            needs[name] = [(those[0][1][0][0], [place for _, ways in those for place in ways[0][1]])]
        elif those[0][1]:
            needs[name] = those[0][1]
    return needs


def _only_way(space: Space, prefix: str, table: Mapping[str, Any], name: str, parameter: Conditional) -> tuple[str, list[int]]:
    branches = [branch for branch in [*parameter.support.values(), parameter.default] if branch is not INACTIVE]
    on = [row[0] for row, branch in parameter.support.items() if branch is not INACTIVE]
    simple = len(parameter.parents) == 1 and parameter.default is INACTIVE and INACTIVE not in on
    if not simple or not all(isinstance(b, Categorical) and value_key(b.values) == value_key(branches[0].values) for b in branches):
        raise SpaceError("ConfigSpace", "a condition must say for which values of one parent the same choices are active", name)
    parent = prefix + parameter.parents[0] if parameter.parents[0] in table else parameter.parents[0]
    return parent, [space.choice_index(parent, value) for value in on]


# ---- measuring -----------------------------------------------------------------------------------------------------------------


def timed_ms(work: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    times, result = [], None
    for _ in range(repeats):
        gc.collect()
        start = time.process_time_ns()
        result = work()
        times.append((time.process_time_ns() - start) / 1e6)
    return statistics.median(times), result


def peak_mb(work: Callable[[], Any]) -> float:
    gc.collect()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def measured(case: Case, repeats: int) -> dict[str, Any]:
    compile_ms, space = timed_ms(lambda: compile_space(case.declared, rules=case.rules), repeats)
    count_ms, valid = timed_ms(lambda: space.valid, repeats)
    draw_ms, points = timed_ms(lambda: draw_points(space, DRAWS, seed=1), repeats)
    memory = peak_mb(lambda: draw_points(compile_space(case.declared, rules=case.rules), DRAWS, seed=1))
    assert len(points) == min(DRAWS, valid)
    row = {
        "space": case.name, "variables": len(space.variables), "valid": valid, "exact": space.exact, "compile_ms": compile_ms,
        "count_ms": count_ms, "draw_100_ms": draw_ms, "all_ms": compile_ms + count_ms + draw_ms, "peak_mb": memory,
    }  # fmt: skip
    return row | beside(case, space, repeats)


def beside(case: Case, space: Space, repeats: int) -> dict[str, Any]:
    """The same in ConfigSpace: milliseconds to build, to draw, MB; or why not."""
    if importlib.util.find_spec("ConfigSpace") is None:
        return {"configspace": "not installed"}
    try:
        build_ms, made = timed_ms(lambda: to_configspace(space, case.rules), repeats)
    except SpaceError as error:
        return {"configspace": str(error)}
    draw_ms, _ = timed_ms(lambda: made.sample_configuration(DRAWS), repeats)
    memory = peak_mb(lambda: to_configspace(space, case.rules).sample_configuration(DRAWS))
    return {"configspace": {"build_ms": build_ms, "draw_100_ms": draw_ms, "peak_mb": memory}}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = f"{'space':28}{'points':>12}{'compile':>10}{'count':>8}{'draw 100':>10}{'all ms':>9}{'MB':>7}   ConfigSpace: build, draw 100, MB"
    lines = [head]
    for row in rows:
        other = row["configspace"]
        told = other if isinstance(other, str) else f"{other['build_ms']:.1f}, {other['draw_100_ms']:.1f}, {other['peak_mb']:.1f}"
        points = f"{'' if row['exact'] else '>='}{row['valid']:.3g}"
        lines.append(
            f"{row['space']:28}{points:>12}{row['compile_ms']:10.1f}{row['count_ms']:8.3f}{row['draw_100_ms']:10.1f}"
            f"{row['all_ms']:9.1f}{row['peak_mb']:7.1f}   {told}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [measured(case, options.repeats) for case in cases()]
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
