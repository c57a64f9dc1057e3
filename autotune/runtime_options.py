"""The options of ONNX Runtime, by version: which do what their names say, which do nothing, and how that is known.

Read from `session_options/*.toml`, one file for each version in which options came, went or changed. ONNX Runtime takes misspelt keys and nonsense
values in silence, and keys change their names between versions and then do nothing; so only what stands here as shown to work is taken.
`benchmarks/comparisons/session_options.py` shows it again, on the runtime that is installed.
"""

from __future__ import annotations

import platform
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError, nearest

FOLDER = Path(__file__).with_name("session_options")

ENTRY, RUN_ENTRY, ATTRIBUTE, RUN_ATTRIBUTE = "entry", "run_entry", "attribute", "run_attribute"
KINDS = (ENTRY, RUN_ENTRY, ATTRIBUTE, RUN_ATTRIBUTE)
LIVE, UNPROVEN, DEAD, NOT_OFFERED = "live", "unproven", "dead", "not_offered"
STATUSES = (LIVE, UNPROVEN, DEAD, NOT_OFFERED)
PROOFS = ("read_back", "threads", "graph", "profile", "effect")
WHEELS = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml", "onnxruntime-training", "onnxruntime-rocm")
IN_WORDS = {ENTRY: "config_entries", RUN_ENTRY: "run_config_entries", ATTRIBUTE: "session attributes", RUN_ATTRIBUTE: "run attributes"}
CPU = "CPUExecutionProvider"


@dataclass(frozen=True)
class Option:
    """One option of ONNX Runtime.

    `live`: shown to do what it says, by `proof`. `unproven`: said to do something, which could not be shown. `dead`: taken in silence, and does
    nothing. `not_offered`: does something that is no part of how a model runs. A name that ends with `*` stands for all that begin so.
    """

    name: str
    kind: str
    status: str
    since: str
    proof: str = ""
    seen: str = ""
    values: tuple[str, ...] = ()
    pattern: str = ""
    default: str = ""
    providers: tuple[str, ...] = ()
    not_providers: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()
    reason: str = ""
    instead: str = ""

    @property
    def form(self) -> str:
        """The pattern that a value must match."""
        return self.pattern or "|".join(re.escape(v) for v in self.values)

    def is_for(self, provider: str, machine: str) -> bool:
        """Say whether it can do anything for this execution provider on this kind of machine."""
        return not self.elsewhere(provider, machine)

    def elsewhere(self, provider: str, machine: str) -> str:
        """Say, in words, where it would do something, when that is not here."""
        if self.providers and provider not in self.providers:
            return f"for {' or '.join(self.providers)}, not for {provider}"
        if provider in self.not_providers:
            return f"for other execution providers than {provider}"
        if self.machines and machine not in self.machines:
            return f"for {' or '.join(self.machines)}, not for {machine}"
        return ""


@dataclass(frozen=True)
class OptionTable:
    """What is known of the options of one version. `note` says, in words, where the installed runtime is none that the tables were made for."""

    runtime: str
    options: Mapping[str, Option] = field(default_factory=dict)
    note: str = ""

    def get(self, kind: str, name: str) -> Option | None:
        """Return the option of this kind and name, or None."""
        for option in (self.options.get(name), *(o for o in self.options.values() if o.name.endswith("*") and name.startswith(o.name[:-1]))):
            if option is not None and option.kind == kind:
                return option
        return None

    def check(self, kind: str, name: str, value: str, *, provider: str = CPU, machine: str = "") -> Option:
        """Return the option that `name` is; raises `ConfigError` for one that would do nothing here, or a value that it does not take."""
        who, option, machine = "session", self.get(kind, name), machine or platform.machine()
        if option is None:
            offered = [o.name for o in self.options.values() if o.kind == kind and o.status in (LIVE, UNPROVEN) and o.is_for(provider, machine)]
            raise ConfigError(who, f"{IN_WORDS[kind]} must be keys that this ONNX Runtime honours", repr(name), nearest(name, offered))
        if option.status in (DEAD, NOT_OFFERED):
            said = "does nothing" if option.status == DEAD else "is no setting"
            do = f"Did you mean {option.instead!r}?" if option.instead else "Leave it out."
            raise ConfigError(who, f"{IN_WORDS[kind]} must be keys that do something", f"{name!r}, which {said} here: {option.reason}", do)
        elsewhere = option.elsewhere(provider, machine)
        if elsewhere:
            raise ConfigError(who, f"{IN_WORDS[kind]} must be keys that do something", f"{name!r}, which is {elsewhere}", "Leave it out.")
        if not isinstance(value, str):
            raise ConfigError(who, f"the value of {name} must be text", repr(value), f"Write '{value}', with quotes.")
        if not re.fullmatch(option.form, value):
            raise ConfigError(who, f"{name} must match {option.form}", repr(value), "ONNX Runtime would take the wrong value in silence.")
        return option


@cache
def installed_runtime() -> str:
    """Return the version of the ONNX Runtime that is installed, without loading it; empty where there is none."""
    loaded = getattr(sys.modules.get("onnxruntime"), "__version__", "")
    if loaded:
        return str(loaded)
    for wheel in WHEELS:
        try:
            return metadata.version(wheel)
        except metadata.PackageNotFoundError:
            continue
    return ""


@cache
def options_of(version: str = "") -> OptionTable:
    """Return the newest table that is not newer than a version of ONNX Runtime (the installed one), or the oldest, and say so in `note`."""
    version = version or installed_runtime()
    known = sorted((_number(path.stem), path) for path in FOLDER.glob("*.toml"))
    wanted = _number(version) if version else known[-1][0]
    usable = [path for number, path in known if number <= wanted]
    options: dict[str, Option] = {}
    for path in usable or [known[0][1]]:
        options |= {option.name: option for option in load_options(path, before=options)}
    runtime = (usable or [known[0][1]])[-1].stem
    note = ""
    if not usable:
        note = f"ONNX Runtime {version} is older than the oldest table of its options ({runtime}): some that are taken may do nothing"
    elif wanted > known[-1][0]:
        note = f"ONNX Runtime {version} is newer than the newest table of its options ({runtime}): what it added is refused, what it dropped is taken"
    return OptionTable(runtime, options, note)


def _number(version: str) -> tuple[int, ...]:
    """Major and minor version as numbers."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def load_options(path: Path, *, before: Mapping[str, Option] | None = None) -> list[Option]:
    """Read one table; a row takes the place of the one of that name in `before`. Raises `ConfigError` for a row that is not whole."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(path.name, "must be TOML", str(error)) from error
    rows = data.get("option")
    if not isinstance(rows, list):
        raise ConfigError(path.name, "must hold [[option]] tables", repr(rows))
    return [_option(f"{path.name}: {row.get('name', 'a row')}", row, path.stem, (before or {}).get(row.get("name", ""))) for row in rows]


def _option(who: str, row: Mapping[str, Any], version: str, before: Option | None) -> Option:
    names = {f.name for f in fields(Option)} - {"since"}
    for key, value in row.items():
        if key not in names:
            raise ConfigError(who, "keys must be known", repr(key), nearest(key, names))
        lists = key in ("values", "providers", "not_providers", "machines")
        if not (isinstance(value, list) and all(isinstance(v, str) for v in value) if lists else isinstance(value, str)):
            raise ConfigError(who, f"{key} must be {'a list of texts' if lists else 'text'}", repr(value))
    content: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
    if missing := [key for key in ("name", "kind", "status") if not content.get(key)]:
        raise ConfigError(who, f"{', '.join(missing)} must be given", "nothing")
    option = Option(since=before.since if before else version, **content)
    for what, got, known in (("kind", option.kind, KINDS), ("status", option.status, STATUSES), ("proof", option.proof, ("", *PROOFS))):
        if got not in known:
            raise ConfigError(who, f"{what} must be one of {', '.join(k for k in known if k)}", repr(got), nearest(got, known))
    if option.status == LIVE and not (option.proof and option.seen):
        raise ConfigError(who, "a live option must say how that was shown, in proof and seen", "nothing")
    if option.status in (LIVE, UNPROVEN) and option.kind in (ENTRY, RUN_ENTRY) and not option.form:
        raise ConfigError(who, "an option that is taken must say its values, or their pattern", "nothing")
    if option.status != LIVE and not option.reason:
        raise ConfigError(who, f"an option that is {option.status.replace('_', ' ')} must say why, in reason", "nothing")
    return option
