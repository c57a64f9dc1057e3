"""What an execution provider can run: data types, quantization formats, what it demands. Read from `providers/*.toml`, one file each.

Every answer but `unknown` names its source. What nobody has written down, or measured, is `unknown`, and refuses nothing.
"""

from __future__ import annotations

import enum
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError, nearest
from autotune.target import ACCELERATOR_OF

FOLDER = Path(__file__).with_name("providers")

TYPES = ("float32", "float16", "bfloat16", "float8", "float4", "int16", "uint16", "int8", "uint8", "int4", "uint4")
FORMATS = ("qdq", "qoperator", "dynamic", "weight_only")
METHODS = ("awq", "gptq", "qat", "smoothquant")
DEMANDS = ("symmetric_weights", "symmetric_activations", "zero_point_zero", "power_of_two")
MACHINES = ("x86_64", "aarch64")
SECTIONS: Mapping[str, tuple[str, ...]] = {"types": TYPES, "formats": FORMATS, "methods": METHODS, "demands": DEMANDS}


class Answer(enum.StrEnum):
    """Whether it works, or whether it is demanded. `slow`: it runs, but gains nothing or loses time."""

    YES = "yes"
    SLOW = "slow"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Fact:
    """One answer with where it comes from."""

    answer: Answer = Answer.UNKNOWN
    source: str = ""
    note: str = ""


@dataclass(frozen=True)
class SlowPair:
    """Types of activations and weights that are slow together, in these formats, on machines of this kind (empty: any)."""

    activation_type: str
    weight_type: str
    note: str
    source: str
    formats: tuple[str, ...] = ()
    machine: str = ""


@dataclass(frozen=True)
class Capabilities:
    """What one execution provider can run. `retired` says since when it is no longer part of ONNX Runtime, and what took its place.

    `methods` says whether there are kernels for what a method makes, not whether the method itself can run there.
    """

    provider: str
    types: Mapping[str, Fact] = field(default_factory=dict)
    formats: Mapping[str, Fact] = field(default_factory=dict)
    methods: Mapping[str, Fact] = field(default_factory=dict)
    demands: Mapping[str, Fact] = field(default_factory=dict)
    slow_pairs: tuple[SlowPair, ...] = ()
    notes: tuple[Fact, ...] = ()
    retired: Fact = Fact()

    def type_(self, name: str) -> Fact:
        """Return what is known of a data type."""
        return self.types.get(name, Fact())

    def format_(self, name: str) -> Fact:
        """Return what is known of a quantization format."""
        return self.formats.get(name, Fact())

    def method(self, name: str) -> Fact:
        """Return whether there are kernels for what a method makes."""
        return self.methods.get(name, Fact())

    def demands_(self, name: str) -> bool:
        """Say whether the provider is known to demand this of a quantized model."""
        return self.demands.get(name, Fact()).answer is Answer.YES


@cache
def capabilities_of(provider: str) -> Capabilities:
    """Return the table of an execution provider; an empty one, where all is unknown, for a provider without a file."""
    for path in sorted(FOLDER.glob("*.toml")):
        found = load_capabilities(path)
        if found.provider == provider:
            return found
    return Capabilities(provider)


def load_capabilities(path: Path) -> Capabilities:
    """Read one table. Raises `ConfigError` for anything in it that is not known, not sourced, or not of the right kind."""
    who = f"{path.parent.name}/{path.name}"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(who, "a capability table must be readable TOML", str(error)) from error
    _known(who, "sections", data, ("provider", *SECTIONS, "slow_pairs", "notes", "retired"))
    provider = data.get("provider")
    if provider not in ACCELERATOR_OF:
        raise ConfigError(who, "provider must be a known execution provider", repr(provider), nearest(str(provider), ACCELERATOR_OF))
    facts = {section: _facts(who, section, names, data.get(section, {})) for section, names in SECTIONS.items()}
    return Capabilities(
        provider=provider, types=facts["types"], formats=facts["formats"], methods=facts["methods"], demands=facts["demands"],
        slow_pairs=tuple(_slow_pair(who, row) for row in _rows(who, "slow_pairs", data)),
        notes=tuple(_note(who, row) for row in _rows(who, "notes", data)),
        retired=_note(who, data["retired"]) if "retired" in data else Fact(),
    )  # fmt: skip


def _facts(who: str, section: str, names: Sequence[str], data: Any) -> dict[str, Fact]:
    if not isinstance(data, Mapping):
        raise ConfigError(who, f"{section} must be a table", repr(data))
    _known(who, f"entries of {section}", data, names)
    return {name: _fact(f"{who}: {section}.{name}", row, may_be_slow=section != "demands") for name, row in data.items()}


def _fact(who: str, row: Any, *, may_be_slow: bool) -> Fact:
    texts = _texts(who, row, required=("answer",), optional=("source", "note"))
    answers = [a.value for a in Answer if may_be_slow or a is not Answer.SLOW]
    if texts["answer"] not in answers:
        raise ConfigError(who, f"answer must be one of {', '.join(answers)}", repr(texts["answer"]), nearest(texts["answer"], answers))
    answer = Answer(texts["answer"])
    if answer is not Answer.UNKNOWN and not texts.get("source"):
        raise ConfigError(who, "every answer but unknown must name its source", "no source", "Name the document, thread or measurement.")
    return Fact(answer, texts.get("source", ""), texts.get("note", ""))


def _slow_pair(who: str, row: Any) -> SlowPair:
    who = f"{who}: slow_pairs"
    formats: Any = row.get("formats", []) if isinstance(row, Mapping) else []
    rest = {k: v for k, v in row.items() if k != "formats"} if isinstance(row, Mapping) else row
    texts = _texts(who, rest, required=("activation_type", "weight_type", "note", "source"), optional=("machine",))
    for key in ("activation_type", "weight_type"):
        _known(who, "types", [texts[key]], TYPES)
    if not isinstance(formats, list):
        raise ConfigError(who, "formats must be a list", repr(formats))
    _known(who, "formats", formats, FORMATS)
    if "machine" in texts:
        _known(who, "machines", [texts["machine"]], MACHINES)
    return SlowPair(**texts, formats=tuple(formats))


def _note(who: str, row: Any) -> Fact:
    texts = _texts(f"{who}: notes", row, required=("note", "source"), optional=())
    return Fact(Answer.YES, texts["source"], texts["note"])


def _rows(who: str, section: str, data: Mapping[str, Any]) -> list[Any]:
    rows = data.get(section, [])
    if not isinstance(rows, list):
        raise ConfigError(who, f"{section} must be a list of tables", repr(rows), f"Write [[{section}]].")
    return rows


def _texts(who: str, row: Any, *, required: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, str]:
    """The row, checked to hold text under known keys only, and no required one empty."""
    if not isinstance(row, Mapping):
        raise ConfigError(who, f"an entry must be a table with {', '.join(required)}", repr(row))
    _known(who, "keys", row, (*required, *optional))
    for key, value in row.items():
        if not isinstance(value, str):
            raise ConfigError(who, f"{key} must be text", repr(value))
    for key in required:
        if not row.get(key):
            raise ConfigError(who, f"{key} must be given", "nothing")
    return dict(row)


def _known(who: str, what: str, given: Any, known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(who, f"{what} must be known", repr(name), nearest(str(name), known))
