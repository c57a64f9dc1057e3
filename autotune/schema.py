"""The JSON Schema of the sweep file, for editors that complete and check while the file is written.

It is made of the same models and pass tables as the file's own check. What it can't say is left to that check: whether files exist,
units fit metrics, values go together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from autotune.benchmarks.metrics import ALIASES as METRIC_ALIASES
from autotune.benchmarks.metrics import BUILT_IN as METRICS
from autotune.config import SweepConfig
from autotune.passes.base import AcceleratorSpec
from autotune.passes.registry import ALIASES, get_pass, pass_names
from autotune.target import ACCELERATOR_OF, SHORT_PROVIDER_NAMES

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def sweep_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a sweep file, with a schema for the `params` of every pass that is known here."""
    schema = _without_titles(SweepConfig.model_json_schema(by_alias=True))
    parts, properties = schema["$defs"], schema["properties"]
    names = [*pass_names(), *ALIASES]
    for name in names:
        table = get_pass(name).json_schema(AcceleratorSpec())
        parts[f"params of {name}"] = table
    for part in ("SlotSection", "PassSection"):
        parts[part]["properties"]["pass"] = _named(parts[part]["properties"]["pass"], names)
        parts[part]["allOf"] = [_params_of(name, parts[f"params of {name}"]["required"]) for name in names]
    parts["SlotSection"] |= {
        "oneOf": [{"properties": {"pass": {"type": "string"}}, "required": ["pass"]}, _SEVERAL],
        "if": _SEVERAL,
        "then": {"properties": {"params": {"maxProperties": 0}}},
    }
    parts["ModelSection"]["oneOf"] = [{"properties": {key: {"type": "string"}}, "required": [key]} for key in ("path", "script")]
    parts["SearchSection"] |= {
        "if": {"properties": {"sampler": {"const": "random"}}, "required": ["sampler"]},
        "then": {"properties": {"options": {"type": "null"}}},
    }
    providers = parts["TargetSection"]["properties"]["ep"]
    parts["TargetSection"]["properties"]["ep"] = _words(providers, [*SHORT_PROVIDER_NAMES, *ACCELERATOR_OF], _any_case(SHORT_PROVIDER_NAMES))
    properties["metric"] = _words(properties["metric"], METRICS, _any_case([*METRICS, *METRIC_ALIASES]), r"^.+\.py:.+$")
    # A script may bring passes of its own; without one, a pass that is not known is a mistake.
    known = {"properties": {"pass": {"enum": [*names, None]}}}
    several = {"any_of": {"anyOf": [{"type": "null"}, {"items": known}]}}
    schema["if"] = {"not": {"properties": {"script": {"type": "string"}}, "required": ["script"]}}
    schema["then"] = {"properties": {"chain": {"items": {"properties": {**known["properties"], **several}}}}}
    return {"$schema": DRAFT, "title": "autotune sweep file", **schema}


_SEVERAL = {"properties": {"any_of": {"type": "array", "minItems": 1}}, "required": ["any_of"]}


def _params_of(name: str, required: list[str]) -> dict[str, Any]:
    then: dict[str, Any] = {"properties": {"params": {"$ref": f"#/$defs/params of {name}".replace(" ", "%20")}}}
    return {
        "if": {"properties": {"pass": {"const": name}}, "required": ["pass"]},
        "then": then | ({"required": ["params"]} if required else {}),
    }


def _named(row: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """A row of text for which names are offered, and others allowed."""
    kept = {k: v for k, v in row.items() if k in ("description", "default")}
    others = row.get("anyOf", [{k: v for k, v in row.items() if k not in kept}])
    return {**kept, "anyOf": [{"enum": list(names)}, *others]}


def _words(row: dict[str, Any], names: Iterable[str], *patterns: str) -> dict[str, Any]:
    """A row of text that is one of the names, or fits one of the patterns."""
    kept = {k: v for k, v in row.items() if k in ("description", "default")}
    return {**kept, "anyOf": [{"enum": list(names)}, *({"type": "string", "pattern": p} for p in patterns)]}


def _any_case(names: Iterable[str]) -> str:
    """A pattern for the names in capitals or not, with any of blank, _ and - between their words."""
    spelled = []
    for name in names:
        words = re.split(r"[\s_\-]+", name)
        spelled.append(r"[\s_\-]+".join("".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else re.escape(c) for c in word) for word in words))
    return rf"^\s*({'|'.join(spelled)})\s*$"


def _without_titles(part: Any) -> Any:
    """Leave out the titles that are made of the names: they say nothing more."""
    if isinstance(part, dict):
        return {k: _without_titles(v) for k, v in part.items() if not (k == "title" and isinstance(v, str))}
    return [_without_titles(v) for v in part] if isinstance(part, list) else part
