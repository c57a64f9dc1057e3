"""What a sweep would do, before it does anything: slots, parameters, counts, first points; and the table of one pass."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from autotune.passes.base import AcceleratorSpec, Pass
from autotune.search_spaces.parameters import Conditional, ConditionalDefault
from autotune.search_spaces.space import Space, point_key
from autotune.sweep.prepare import Prepared, space_counts


def describe_plan(prepared: Prepared, said: list[str]) -> dict[str, Any]:
    """Describe a prepared sweep as plain data: the numbers that a run would count by."""
    config, pipeline = prepared.sweep.config, prepared.pipeline
    space = pipeline.space
    untouched = pipeline.untouched_point()
    first = [(pipeline.default_point(), "default"), (untouched, "untouched"), *((p, "start") for p in pipeline.start_points())]
    seen: set[str] = set()
    firsts = []
    for point, origin in first:
        if point is None or point_key(point) in seen:
            continue
        seen.add(point_key(point))
        firsts.append({"origin": origin, "passes": [s.pass_name for s in pipeline.steps(point)], "changed": pipeline.changed_from_default(point)})
    trials = min(config.budget.trials, space.valid)
    return {
        "model": config.model.path or config.model.script, "format": prepared.facts.format, "opset": prepared.facts.opset or None,
        "metric": prepared.metric.name, "objectives": [str(o) for o in prepared.objectives], "constraints": [c.text for c in prepared.constraints],
        "target": config.to_json()["target"], "rows": {"search": len(prepared.rows.search), "holdout": len(prepared.rows.holdout)},
        "slots": [
            {"slot": s.name, "optional": s.optional, "passes": [c.pass_ for c in s.choices],
             "searched": _searched_in(space, s.name)}
            for s in config.chain
        ],
        "space": space_counts(space),
        "budget": {"trials": trials, "asked": config.budget.trials, "time": config.budget.time},
        "search": "enumerate" if space.valid <= config.budget.trials else config.search.sampler, "first": firsts,
        "notes": [*said, *prepared.notes, *([] if untouched is not None else ["the untouched model is tried too, outside the space"])],
    }  # fmt: skip


def _searched_in(space: Space, slot: str) -> dict[str, list[Any]]:
    """Variables of a slot that offer more than one choice somewhere, with all their choices."""
    return {n: list(space.choices(n)) for n in space.variables if n.startswith(f"{slot}.") and any(len(o) > 1 for o in space.offers(n))}


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
            lines.append(f"    {name.partition('.')[2]:24} {', '.join(map(str, choices))}")
    refused = ", ".join(f"{count} by {rule}" for rule, count in space["invalid_by_rule"].items() if count)
    lines += ["", f"{space['valid']} valid points of {space['declared']}" + (f"; refused: {refused}" if refused else "")]
    how = "all of them" if content["search"] == "enumerate" else f"chosen by {content['search']}"
    lines.append(f"{budget['trials']} trials, {how}" + (f", within {budget['time']}" if budget["time"] else ""))
    lines += ["", "first:"]
    for first in content["first"]:
        changed = ", ".join(f"{k}={v}" for k, v in first["changed"].items())
        lines.append(f"    {first['origin']:10} {' > '.join(first['passes']) or 'nothing'}" + (f"   {changed}" if changed else ""))
    lines += [f"note: {n}" for n in content["notes"]]
    return "\n".join(lines)


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
