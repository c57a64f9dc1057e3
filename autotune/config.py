"""The sweep file: one model of it, checked before anything runs. Unknown keys are errors with line and nearest name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from autotune.errors import ConfigError, nearest
from autotune.target import ACCELERATOR_OF, SHORT_PROVIDER_NAMES, Target, effective_cpus

_DURATION = {"s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_SIZE = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class ModelSection(_Section):
    """The model to tune: an ONNX file (`path`), or a torch module (`script` and `loader`, `weights` if it does not load its own)."""

    path: str | None = None
    script: str | None = None
    loader: str = "make_model"
    weights: str | None = None
    outputs: list[str] | None = Field(None, description="names of a torch module's outputs, in order")

    @model_validator(mode="after")
    def _one_kind(self) -> ModelSection:
        if (self.path is None) == (self.script is None):
            raise ValueError("give either path (an ONNX file) or script (a Python file whose loader returns a torch module)")
        return self


class DataSection(_Section):
    """Files of arrays. `eval`: one array per model input and `labels`; `calibration` and `train` set ranges and weights."""

    eval: str
    calibration: str | None = None
    train: str | None = None
    holdout: float = Field(0.25, ge=0.0, lt=0.9, description="share of the evaluation rows kept apart for the last word on the chosen model")


class TargetSection(_Section):
    """Where the model shall run."""

    ep: str = "CPUExecutionProvider"
    threads: int | None = Field(None, ge=1, description="threads of one run; not given: all that this process may use, and searchable")
    batch_size: int = Field(1, ge=1, description="examples in one run")

    @field_validator("ep")
    @classmethod
    def _known(cls, value: str) -> str:
        full = SHORT_PROVIDER_NAMES.get(value.lower(), value)
        if full not in ACCELERATOR_OF:
            raise ValueError(f"unknown execution provider {value!r}. {nearest(value, [*SHORT_PROVIDER_NAMES, *ACCELERATOR_OF])}")
        return full

    @field_validator("threads")
    @classmethod
    def _bounded(cls, value: int | None) -> int | None:
        if value is not None and value > effective_cpus():
            raise ValueError(f"threads must be at most the {effective_cpus()} CPUs this process may use; got {value}")
        return value


class PassSection(_Section):
    """A pass and what the user says about its parameters."""

    pass_: str = Field(alias="pass")
    params: dict[str, Any] = Field(default_factory=dict)


class SlotSection(_Section):
    """One place in the chain: a pass, or one of several (`any_of`); `optional` lets the sweep leave it out."""

    slot: str = Field("", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$|^$")
    pass_: str | None = Field(None, alias="pass")
    params: dict[str, Any] = Field(default_factory=dict)
    any_of: list[PassSection] | None = None
    optional: bool = False

    @model_validator(mode="after")
    def _one_or_several(self) -> SlotSection:
        if (self.pass_ is None) == (not self.any_of):
            raise ValueError("a slot needs either pass or a non-empty any_of")
        if self.any_of and self.params:
            raise ValueError("params of a slot with any_of belong to its passes")
        return self

    @property
    def choices(self) -> list[PassSection]:
        """The alternatives, one for a plain slot."""
        return self.any_of or [PassSection(pass_=self.pass_ or "", params=self.params)]

    @property
    def name(self) -> str:
        return self.slot or self.choices[0].pass_


class BudgetSection(_Section):
    """When to stop, and what one stage may cost."""

    trials: int = Field(30, ge=1)
    time: str | None = Field(None, description="wall-clock limit of the search, such as 45m")
    stage_timeout: str = "10m"
    memory: str | None = Field(None, description="data memory of one stage, such as 8GB; not given: no limit of ours")

    @field_validator("time", "stage_timeout")
    @classmethod
    def _duration(cls, value: str | None) -> str | None:
        if value is not None:
            seconds(value)
        return value

    @field_validator("memory")
    @classmethod
    def _size(cls, value: str | None) -> str | None:
        if value is not None:
            size_bytes(value)
        return value


class SearchSection(_Section):
    """How points are chosen. `start` lists points (or parts of points) to try right after the default and the untouched model."""

    enabled: bool = True
    sampler: Literal["tpe", "random"] = "tpe"
    start: list[dict[str, Any]] = Field(default_factory=list)


class MeasureSection(_Section):
    """How latency is measured; see docs/measuring.md."""

    max_time: str = Field("3s", description="longest time for one candidate's latency")
    final_time: str = Field("10s", description="the same for a finalist, measured afresh")
    ratio_width: float = Field(0.01, gt=0, description="stop when the 95 % interval of the ratio to the baseline is this narrow, relative")

    @field_validator("max_time", "final_time")
    @classmethod
    def _duration(cls, value: str) -> str:
        seconds(value)
        return value


class SweepConfig(_Section):
    """Everything a sweep is told. Paths are relative to the sweep file."""

    schema_: Literal[1] = Field(1, alias="schema")
    model: ModelSection
    data: DataSection
    metric: str
    objectives: list[str] = Field(default_factory=lambda: ["latency", "score"], min_length=1)
    constraints: list[str] = Field(default_factory=list)
    target: TargetSection = TargetSection()
    chain: list[SlotSection] = Field(min_length=1)
    search: SearchSection = SearchSection()
    budget: BudgetSection = BudgetSection()
    measure: MeasureSection = MeasureSection()
    seed: int = Field(0, ge=0)
    pick: Literal["fastest", "most_accurate", "smallest", "knee", "nearest_to_baseline"] = "fastest"
    strict: bool = Field(False, description="take candidates only whose whole interval meets every constraint")
    script: str | None = Field(None, description="Python file with the user's functions and passes")
    storage: str | None = Field(None, description="database URL for the Optuna study; not given: a journal file in the run folder")

    @model_validator(mode="after")
    def _slot_names_differ(self) -> SweepConfig:
        names = [s.name for s in self.chain]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"slots need different names: {', '.join(twice)} is there more than once; give each a `slot:`")
        return self

    def to_json(self) -> dict[str, Any]:
        """The file's content with every default filled in."""
        return self.model_dump(by_alias=True)


@dataclass(frozen=True)
class LoadedSweep:
    """A checked sweep file and the folder that its paths start from."""

    config: SweepConfig
    root: Path
    source: str = "sweep"

    def path(self, name: str) -> Path:
        """Resolve a path of the file against its folder."""
        return (self.root / name).resolve() if not Path(name).is_absolute() else Path(name)

    @property
    def target(self) -> Target:
        section = self.config.target
        return Target(
            execution_provider=section.ep, accelerator_type=ACCELERATOR_OF[section.ep], threads=section.threads or effective_cpus(),
            batch_size=section.batch_size, threads_fixed=section.threads is not None,
        )  # fmt: skip

    def absolute(self) -> SweepConfig:
        """The config with absolute paths, as it is written into the run folder."""
        data = self.config.to_json()
        for section, keys in (("model", ("path", "script", "weights")), ("data", ("eval", "calibration", "train"))):
            for key in keys:
                if data[section].get(key) is not None:
                    data[section][key] = str(self.path(data[section][key]))
        if data.get("script"):
            data["script"] = str(self.path(data["script"]))
        name, colon, function = data["metric"].rpartition(":")
        if colon and name.endswith(".py"):
            data["metric"] = f"{self.path(name)}:{function}"
        return SweepConfig.model_validate(data)


def load_sweep(path: Path) -> LoadedSweep:
    """Read a sweep file (YAML or JSON). Raises `ConfigError` with file, line and nearest name for anything it can't take."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            "sweep", "the sweep file must exist", str(path), nearest(path.name, [p.name for p in path.parent.glob("*.y*ml")])
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("sweep", "the sweep file must be readable UTF-8 text", f"{path}: {error}") from error
    try:
        data = yaml.safe_load(text)
        lines = _lines_of(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path.name}:{mark.line + 1}:{mark.column + 1}" if mark else path.name
        raise ConfigError(where, "the sweep file must be valid YAML", getattr(error, "problem", None) or "a syntax error") from error
    return LoadedSweep(parse_sweep(data, source=path.name, lines=lines), path.parent.resolve(), path.name)


def parse_sweep(data: Any, *, source: str = "sweep", lines: Mapping[tuple[Any, ...], int] | None = None) -> SweepConfig:
    """Check a sweep given as plain data. Raises `ConfigError` for the first thing wrong."""
    if not isinstance(data, Mapping):
        raise ConfigError(source, "a sweep file must be a mapping with model, data, metric and chain", type(data).__name__)
    try:
        return SweepConfig.model_validate(data)
    except ValidationError as error:
        raise _config_error(error, source, lines or {}) from None


def _config_error(error: ValidationError, source: str, lines: Mapping[tuple[Any, ...], int]) -> ConfigError:
    """Turn pydantic's first complaint into our one message; unknown keys come first, since they explain missing ones."""
    problems = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    first = problems[0]
    location = tuple(first["loc"])
    line = next((lines[location[:n]] for n in range(len(location), 0, -1) if location[:n] in lines), None)
    where = f"{source}:{line}" if line else source
    path = ".".join(str(p) for p in location) or "sweep"
    if first["type"] == "extra_forbidden":
        known = _fields_at(location[:-1])
        return ConfigError(
            where,
            f"keys of {'.'.join(map(str, location[:-1])) or 'the sweep file'} must be known",
            repr(location[-1]),
            nearest(str(location[-1]), known),
        )
    if first["type"] == "missing":
        return ConfigError(where, f"{path} must be given", "nothing")
    message = first["msg"].removeprefix("Value error, ")
    given = "" if first["type"] == "value_error" else repr(first["input"])[:120]
    return ConfigError(where, f"{path}: {message[0].lower() + message[1:]}", given)


def _fields_at(location: tuple[Any, ...]) -> list[str]:
    """Names that a section takes, found by walking the models along an error's location."""
    model: Any = SweepConfig
    for part in location:
        if isinstance(part, int):
            continue
        fields = {f.alias or n: f for n, f in model.model_fields.items()}
        annotation = fields[part].annotation if part in fields else None
        found = re.findall(r"autotune\.config\.(\w+)", repr(annotation))
        if not found:
            return []
        model = globals()[found[0]]
    return [f.alias or n for n, f in model.model_fields.items()]


def _lines_of(text: str) -> dict[tuple[Any, ...], int]:
    """Map the path of every key and item of a YAML text to its line, from 1."""
    found: dict[tuple[Any, ...], int] = {}

    def visit(node: yaml.Node | None, path: tuple[Any, ...]) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                here = (*path, key.value)
                found[here] = key.start_mark.line + 1
                visit(value, here)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                found[(*path, index)] = value.start_mark.line + 1
                visit(value, (*path, index))

    visit(yaml.compose(text, Loader=yaml.SafeLoader), ())
    return found


def seconds(text: str) -> float:
    """Read a duration such as `45m`, `1.5h`, `30s` or plain seconds; raises `ValueError` in words."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if not match or float(match[1]) <= 0:
        raise ValueError(f"a duration must be a number above 0 with s, m or h, such as 45m; got {text!r}")
    return float(match[1]) * _DURATION[match[2]]


def size_bytes(text: str) -> int:
    """Read a size such as `8GB` or `512MiB`; raises `ValueError` in words."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if not match or match[2] not in _SIZE or float(match[1]) <= 0:
        raise ValueError(f"a size must be a number above 0 with a unit ({', '.join(_SIZE)}), such as 8GB; got {text!r}")
    return int(float(match[1]) * _SIZE[match[2]])


def write_sweep(config: SweepConfig) -> str:
    """The sweep as YAML text, keys in the file's usual order."""
    return str(yaml.safe_dump(config.to_json(), sort_keys=False, allow_unicode=True, width=120))
