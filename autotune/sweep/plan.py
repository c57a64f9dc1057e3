"""What a sweep would do, before it does anything: slots, parameters, counts, first points; and the table of one pass."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from autotune.config import SearchSection
from autotune.passes.base import AcceleratorSpec, Pass
from autotune.pipeline import UPGRADE
from autotune.search_spaces.parameters import Categorical, Conditional, ConditionalDefault, Parameter, same
from autotune.search_spaces.space import Point, Space
from autotune.sweep.estimate import estimate
from autotune.sweep.prepare import Prepared, space_counts

WIDTH = 120
MOST_FIRST = 12


def describe_plan(prepared: Prepared, said: list[str], *, run: Path | None = None) -> dict[str, Any]:
    """Describe a prepared sweep as plain data: the numbers that a run would count by.

    `run` is the folder that it would write into; an earlier run there is the basis of the estimate.
    """
    config, pipeline = prepared.sweep.config, prepared.pipeline
    space = pipeline.space
    first = pipeline.first_points()
    trials = min(config.budget.trials, space.valid) + sum(not point for point, _ in first)
    enumerates = space.exact and space.valid <= config.budget.trials
    firsts = [
        {"origin": origin, "passes": [s.pass_name for s in pipeline.steps(p)], "changed": pipeline.changed_from_default(p), "point": p}
        for p, origin in first[: config.budget.trials]
    ]
    outside = any(not point for point, _ in first)
    return {
        "model": config.model.path or config.model.script, "format": prepared.facts.format, "opset": prepared.facts.opset or None,
        "metric": prepared.metric.name, "objectives": [str(o) for o in prepared.objectives], "constraints": [c.text for c in prepared.constraints],
        "target": config.to_json()["target"], "rows": {"search": len(prepared.rows.search), "holdout": len(prepared.rows.holdout)},
        "slots": [
            {"slot": s.name, "optional": s.optional, "passes": [c.pass_ for c in s.choices], "searched": _searched_in(space, s.name)}
            for s in config.chain
        ],
        "fixed": _fixed(prepared),
        "space": space_counts(space),
        "upgrades": pipeline.upgraded(),
        "rules": _rules(prepared), "findings": [f.to_json() for f in pipeline.findings], "unreachable": list(space.unreachable),
        "budget": {"trials": trials, "asked": config.budget.trials, "time": config.budget.time},
        "search": "enumerate" if enumerates else config.search.sampler, "sampler_options": _sampler_options(config.search) if not enumerates else {},
        "seed": config.seed, "first": firsts,
        "estimate": estimate(prepared, trials=trials, run=run),
        "notes": [*said, *prepared.notes, *(["the untouched model is tried too, outside the space"] if outside else [])],
    }  # fmt: skip


def _sampler_options(search: SearchSection) -> dict[str, Any]:
    return search.options.model_dump(exclude_none=True) if search.options else {}


def _searched_in(space: Space, slot: str) -> dict[str, list[Any]]:
    """Variables of a slot that offer more than one choice somewhere, with all their choices."""
    return {n: list(space.choices(n)) for n in space.variables if n.startswith(f"{slot}.") and any(len(o) > 1 for o in space.offers(n))}


def _fixed(prepared: Prepared) -> list[dict[str, Any]]:
    """Variables with one value wherever they are active, and who fixed them."""
    pipeline, config = prepared.pipeline, prepared.sweep.config
    found = []
    for slot in pipeline.space.slots:
        for alternative in slot.alternatives:
            given = pipeline.given(slot.name, alternative.name)
            table = pipeline.classes[alternative.name].default_config(pipeline.target.accelerator)
            written = next(c.params for s in config.chain if s.name == slot.name for c in s.choices if c.pass_.lower() == alternative.name.lower())
            for name, parameter in alternative.parameters.items():
                offers = pipeline.space.offers(f"{slot.name}.{name}")
                values = _values_of(parameter)
                if not offers or any(len(offer) > 1 for offer in offers):
                    continue
                if name in written:
                    why = "given in the sweep file" if len(values) == 1 else "all other choices given are refused by rules"
                elif name in given:
                    why = "target.threads"
                elif not config.search.enabled and table[name].search_defaults is not None:
                    why = "search is off: the pass's default"
                elif len(values) == 1:
                    why = "the pass's default"
                elif isinstance(parameter, Conditional):
                    why = f"one value each, by {', '.join(parameter.all_parents)}"
                else:
                    why = "rules leave one choice"
                shown = values if len(values) == 1 else [offer[0] for offer in offers]
                found.append({"name": f"{slot.name}.{name}", "pass": alternative.name, "values": shown, "why": why})
    return found


def _values_of(parameter: Parameter) -> list[Any]:
    """All different values of a parameter, in every branch."""
    values: list[Any] = []
    branches: list[Any] = [parameter]
    while branches:
        branch = branches.pop(0)
        if isinstance(branch, Categorical):
            values += [v for v in branch.values if not any(same(v, w) for w in values)]
        elif isinstance(branch, Conditional):
            branches += [*branch.support.values(), branch.default]
    return values


def _rules(prepared: Prepared) -> list[dict[str, Any]]:
    """Rules that refuse something: how many points, an example, the words; the costliest first."""
    space = prepared.pipeline.space
    words: dict[str, list[str]] = {}
    for rule in space.rules:
        words.setdefault(rule.id, []).append(rule.message)
    concerned = {f.rule: f.message for f in prepared.pipeline.findings}
    found = []
    for rule_id, count in sorted(space.invalid.items(), key=lambda item: -item[1]):
        if not count:
            continue
        messages = list(dict.fromkeys(words.get(rule_id, [])))
        if rule_id == "INVALID":
            messages = ["a pass's own table forbids the combination"]
        elif rule_id in concerned and len(messages) > 1:
            messages = [concerned[rule_id]]
        found.append({"rule": rule_id, "refused": count, "message": "; ".join(messages), "example": dict(space.examples[rule_id])})
    return found


def render_plan(content: Mapping[str, Any]) -> str:
    """The plan as text for a terminal."""
    space, budget = content["space"], content["budget"]
    lines = [
        f"model    {content['model']} ({content['format']}{', opset ' + str(content['opset']) if content['opset'] else ''})",
        f"target   {content['target']['ep']}, threads {content['target']['threads'] or 'searched'}, batch {content['target']['batch_size']}",
        f"goal     {', '.join(content['objectives'])}; " + ("; ".join(content["constraints"]) or "no constraints"),
        f"rows     {content['rows']['search']} for the search, {content['rows']['holdout']} held out",
        "",
    ]
    for slot in content["slots"]:
        lines.append(f"{slot['slot']}: {' | '.join(slot['passes'])}{' (optional)' if slot['optional'] else ''}")
        for name, choices in slot["searched"].items():
            lines += _wrapped(f"    {name.partition('.')[2]:24} ", ", ".join(map(_value, choices)))
        for row in content["fixed"]:
            if row["name"].startswith(f"{slot['slot']}."):
                lines.append(f"    {row['name'].partition('.')[2]:24} = {', '.join(map(_value, row['values']))}   ({row['why']})")
    fixed = {row["name"] for row in content["fixed"]}
    widest = max(len(f"{space['declared']:,}"), 6)
    more = "" if space["exact"] else ", and more: rules look at too many parameters together to count all"
    lines += ["", f"points   {space['declared']:>{widest},} declared{more}"]
    for rule in content["rules"]:
        lines += _wrapped(f"       - {rule['refused']:>{widest},} {rule['rule']:18} ", rule["message"])
        lines += _wrapped(" " * (widest + 29), f"such as {_point(rule['example'], fixed)}")
    lines.append(
        f"       = {space['valid']:>{widest},} valid, all different{'' if space['exact'] else '; at least so many, and the search stays among these'}"
    )
    for row in content["upgrades"]:
        count = "some" if row["points"] is None else f"{row['points']:,}"
        such = f"; such as {_point(row['point'], fixed)}" if row["point"] else ""
        lines += _wrapped("opset    ", f"{count} of them get {UPGRADE} before {row['slot']}: {row['why']}{such}")
    counted = {rule["rule"] for rule in content["rules"]}
    for finding in content["findings"]:
        if finding["waived"] or finding["severity"] == "warning" or finding["rule"] not in counted:
            head = "waived" if finding["waived"] else finding["severity"]
            who = f"{finding['pass_name']}: " if finding["pass_name"] and not finding["message"].startswith(finding["pass_name"]) else ""
            lines += _wrapped(f"{head:8} ", f"{finding['rule']}: {who}{finding['message']}")
    lines += ["", *_wrapped("trials   ", f"{budget['trials']}, " + _how(content))]
    took, disk = content["estimate"]["time"], content["estimate"]["disk"]
    lines += _wrapped("time     ", (f"about {_duration(took['seconds'])}: " if took["seconds"] else "no estimate: ") + took["basis"])
    room = f"at most {_bytes(disk['at_most_bytes'])}, {_bytes(disk['free_bytes'])} free: " if disk["at_most_bytes"] else "no estimate: "
    lines += _wrapped("disk     ", room + disk["basis"])
    lines += ["", "first:"]
    for first in content["first"][:MOST_FIRST]:
        changed = ", ".join(f"{k}={_value(v)}" for k, v in first["changed"].items())
        lines += _wrapped(f"    {first['origin']:11} ", (" > ".join(first["passes"]) or "nothing") + (f"   {changed}" if changed else ""))
    if len(content["first"]) > MOST_FIRST:
        lines.append(f"    and {len(content['first']) - MOST_FIRST} more")
    lines += [line for n in content["notes"] for line in _wrapped("note: ", n)]
    return "\n".join(lines)


def _how(content: Mapping[str, Any]) -> str:
    """What chooses the points after the first ones, in words."""
    budget = content["budget"]
    if content["search"] == "enumerate":
        how = "all points, in order after the first ones"
    elif content["search"] == "random":
        how = f"drawn uniformly without repeats (seed {content['seed']}) after the first ones"
    else:
        options = ", ".join(f"{k}={v}" for k, v in content["sampler_options"].items())
        how = f"chosen by {content['search']} (seed {content['seed']}{', ' + options if options else ''}) after the first ones; none twice"
    return how + (f"; the search ends after {budget['time']}" if budget["time"] else "")


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False) or [head.rstrip()]


def _value(value: Any) -> str:
    return "none" if value is None else str(value)


def _point(point: Point, fixed: Collection[str]) -> str:
    """The searched values of a point."""
    return ", ".join(f"{name}={_value(value)}" for name, value in point.items() if name not in fixed)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def render_pass(pass_class: type[Pass], accelerator: AcceleratorSpec) -> str:
    """A pass's table as text: its own documentation, made from the same rows as its config and its search space."""
    from rich.console import Console
    from rich.table import Table

    contract = pass_class.contract
    doc = (pass_class.__doc__ or "").strip().splitlines()
    lines = [f"{pass_class.__name__}: {doc[0] if doc else ''}", f"{contract.accepts} -> {contract.returns}, version {contract.version}"]
    if contract.min_opset:
        lines.append(f"from opset {contract.min_opset}")
    if contract.needs_calibration_when:
        lines.append("needs calibration data with " + ", ".join(f"{k}={v}" for k, v in contract.needs_calibration_when.items()))
    table = Table(box=None, pad_edge=False, show_edge=False)
    for column in ("parameter", "default", "searched", "meaning"):
        table.add_column(column, overflow="fold")
    for name, row in pass_class.default_config(accelerator).items():
        table.add_row(name, "(required)" if row.required else _shown(row.default_value), _searched(row.search_defaults), row.description)
    out = io.StringIO()
    Console(file=out, width=120, highlight=False, markup=False, color_system=None).print(table)
    return "\n".join([*lines, "", "\n".join(line.rstrip() for line in out.getvalue().splitlines())])


def _shown(value: Any) -> str:
    if isinstance(value, ConditionalDefault):
        return f"by {', '.join(value.parents)}"
    return str(value)


def _searched(parameter: Any) -> str:
    if parameter is None:
        return ""
    if isinstance(parameter, Conditional):
        rows = [f"{'/'.join(map(str, key))}: {_searched(branch) or branch}" for key, branch in parameter.support.items()]
        return f"by {', '.join(parameter.parents)}: " + "; ".join(rows)
    values = getattr(parameter, "values", None)
    return ", ".join(map(str, values)) if isinstance(values, tuple) else str(parameter)
