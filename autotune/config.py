"""The sweep file: one model of it, checked before anything runs. What is wrong is said with line, column and nearest name."""

from __future__ import annotations

import difflib
import math
import re
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from autotune.data import RANDOM
from autotune.errors import ConfigError, nearest
from autotune.sweep_text import Places, Steps, read_text, read_yaml, where, write_yaml
from autotune.target import ACCELERATOR_OF, SHORT_PROVIDER_NAMES, Target, effective_cpus

SCHEMA_VERSION = 1
_DURATION = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_SIZE = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_DURATION_PATTERN = r"\s*(\d+(?:\.\d+)?)\s*(ms|[smh]?)\s*"
_PERCENT_PATTERN, _POINTS_PATTERN = r"\s*(\d+(?:\.\d+)?)\s*%\s*", r"\s*(\d+(?:\.\d+)?)\s*pts?\s*"
_SIZE_PATTERN = rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(_SIZE)})\s*"


def seconds(text: str) -> float:
    """Read a duration such as `45m`, `1.5h`, `30s`, `10ms` or plain seconds; raises `ValueError` in words."""
    match = re.fullmatch(_DURATION_PATTERN, text)
    if not match or not 0 < float(match[1]) < math.inf:
        raise ValueError(f"a duration must be a number above 0 with ms, s, m or h, such as 45m; got {text!r}")
    return float(match[1]) * _DURATION[match[2]]


def size_bytes(text: str) -> int:
    """Read a size such as `8GB` or `512MiB`; raises `ValueError` in words."""
    match = re.fullmatch(_SIZE_PATTERN, text)
    if not match or not 0 < float(match[1]) * _SIZE[match[2]] < 2**63:
        raise ValueError(f"a size must be a number above 0 with a unit ({', '.join(_SIZE)}), such as 8GB; got {text!r}")
    return int(float(match[1]) * _SIZE[match[2]])


def percent(text: str) -> float:
    """Read a share of a value such as `3%`, as a number from 0 to below 1; raises `ValueError` in words."""
    match = re.fullmatch(_PERCENT_PATTERN, text)
    if not match or not 0 <= float(match[1]) < 100:
        raise ValueError(f"it must be from 0 % to below 100 %, such as 3%; got {text!r}")
    return float(match[1]) / 100


def points(text: str) -> float:
    """Read points of a score such as `0.3pt`, as a share from 0 to below 1; raises `ValueError` in words."""
    match = re.fullmatch(_POINTS_PATTERN, text)
    if not match or not 0 <= float(match[1]) < 100:
        raise ValueError(f"it must be from 0 to below 100 points, such as 0.3pt; got {text!r}")
    return float(match[1]) / 100


def _in_unit(units: str) -> BeforeValidator:
    def refuse(value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise ValueError(f"a number must have its unit here; got {value}. Write {' or '.join(f'{value}{unit}' for unit in units.split())}")
        return value

    return BeforeValidator(refuse)


def _readable_by(read: Any) -> AfterValidator:
    def check(value: str) -> str:
        read(value)
        return value

    return AfterValidator(check)


def _nodes_required(value: Any) -> Any:
    share = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
    if value not in ("primary", "all") and not share:
        raise ValueError(f"it must be primary, all, or a share of the nodes above 0 and up to 1; got {value!r}")
    return value


# Nothing is turned into another type: "30" is no number, 2.0 is not 2, true is not 1.
Text = Annotated[str, Field(min_length=1)]
Whole = Annotated[int, Strict()]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Flag = Annotated[bool, Strict()]
Duration = Annotated[
    str, _in_unit("s m"), _readable_by(seconds), WithJsonSchema({"type": "string", "pattern": f"^{_DURATION_PATTERN}$", "examples": ["45m"]})
]
RequiredNodes = Annotated[
    str | float, BeforeValidator(_nodes_required),
    WithJsonSchema({"anyOf": [{"enum": ["primary", "all"]}, {"type": "number", "exclusiveMinimum": 0, "maximum": 1}]}),
]  # fmt: skip
Pause = Annotated[
    str, _in_unit("ms s"), _readable_by(seconds), WithJsonSchema({"type": "string", "pattern": f"^{_DURATION_PATTERN}$", "examples": ["10ms"]})
]
Size = Annotated[
    str, _in_unit("MB GB"), _readable_by(size_bytes), WithJsonSchema({"type": "string", "pattern": f"^{_SIZE_PATTERN}$", "examples": ["8GB"]})
]


Percent = Annotated[
    str, _in_unit("%"), _readable_by(percent), WithJsonSchema({"type": "string", "pattern": f"^{_PERCENT_PATTERN}$", "examples": ["3%"]})
]
Points = Annotated[
    str, _in_unit("pt"), _readable_by(points), WithJsonSchema({"type": "string", "pattern": f"^{_POINTS_PATTERN}$", "examples": ["0.3pt"]})
]


def _misplaced(words: str, *steps: Any) -> PydanticCustomError:
    """A complaint about what lies `steps` further in than the section that found it."""
    return PydanticCustomError("misplaced", "{words}", {"words": words, "steps": list(steps)})


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(_Section):
    """The model to tune: a file or a folder (`path`), or a torch module (`script` and `loader`, `weights` if it does not load its own)."""

    path: Text | None = Field(
        None, description="ONNX file, TorchScript file, torch.export program, or Hugging Face folder (with config.json); either this or script"
    )
    script: Text | None = Field(None, description="Python file that makes a torch module; either this or path")
    loader: Text = Field("make_model", description="function of the script that returns the module")
    weights: Text | None = Field(None, description="file of weights that the module loads, as torch.save writes a state_dict")
    outputs: list[Text] | None = Field(None, description="names of a torch model's outputs, in order; not given: the keys that it returns them under")

    @model_validator(mode="after")
    def _one_kind(self) -> ModelSection:
        if (self.path is None) == (self.script is None):
            raise ValueError("give either path (a model's file or folder) or script (a Python file whose loader returns a torch module)")
        if self.path is not None:
            for name, given in (("loader", self.loader != "make_model"), ("weights", self.weights)):
                if given:
                    raise _misplaced(f"{name} is for a torch module that a script makes, and path names a model. Leave {name} out", name)
        return self


class DataSection(_Section):
    """The data: `.npz` files, or folders of them, with one array per model input and one row per example."""

    eval: Text = Field(description="rows that candidates are scored on; `labels` is the array that the metric compares with")
    calibration: Text | None = Field(None, description="rows that quantization takes its ranges from; none of the evaluation rows")
    train: Text | None = Field(None, description="rows with `labels` that fine-tuning learns from; none of the evaluation rows")
    holdout: Number = Field(0.25, ge=0.0, lt=0.9, description="share of the evaluation rows kept apart for the last word on the chosen model")


class TargetSection(_Section):
    """Where the model shall run."""

    ep: Text = Field("CPUExecutionProvider", description="execution provider, by its full or short name (cpu, cuda, ...)")
    threads: Whole | None = Field(None, ge=1, description="threads of one run; not given: all that this process may use, and searchable")
    batch_size: Whole = Field(1, ge=1, description="examples in one run")
    require_ep: RequiredNodes = Field(
        "primary", description="which nodes must run on ep: primary (some), all, or a share such as 0.9; a candidate with fewer is invalid"
    )

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

    pass_: Text = Field(alias="pass", description="name of the pass; `autotune passes list` names them")
    params: dict[str, Any] = Field(
        default_factory=dict,
        description="its parameters: a value fixes one, a list gives its choices, SEARCH asks for the pass's own, a Conditional may be written out",
    )


class SlotSection(_Section):
    """One place in the chain: a pass, or one of several (`any_of`); `optional` lets the sweep leave it out."""

    slot: str = Field("", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$|^$", description="name of the slot; not given: that of its (first) pass")
    pass_: Text | None = Field(None, alias="pass", description="name of the pass; either this or any_of")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of the pass, as in any_of")
    any_of: list[PassSection] | None = Field(None, description="passes of which the sweep tries one at a time")
    optional: Flag = Field(False, description="the sweep may leave the slot empty")

    @model_validator(mode="after")
    def _one_or_several(self) -> SlotSection:
        if (self.pass_ is None) == (not self.any_of):
            raise ValueError("a slot needs either pass or a non-empty any_of")
        if self.any_of and self.params:
            raise _misplaced("params of a slot with any_of belong to its passes", "params")
        names = [choice.pass_ for choice in self.any_of or ()]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise _misplaced(f"passes of any_of must differ; got {name} again. Give a list of choices to a parameter", "any_of", number, "pass")
        return self

    @property
    def choices(self) -> list[PassSection]:
        """The alternatives, one for a plain slot."""
        return self.any_of or [PassSection.model_validate({"pass": self.pass_, "params": self.params})]

    @property
    def name(self) -> str:
        return self.slot or self.choices[0].pass_


class BudgetSection(_Section):
    """When to stop, and what one stage may cost."""

    trials: Whole = Field(30, ge=1, description="points to try at most")
    time: Duration | None = Field(None, description="wall-clock limit of the search, such as 45m")
    stage_timeout: Duration = Field("10m", description="wall-clock limit of one stage: a pass, the checks, a measurement")
    memory: Size | None = Field(None, description="data memory of one stage, such as 8GB; not given: no limit of ours")
    store: Size | None = Field(None, description="size that the run folder's store of artifacts is kept under, such as 20GB; not given: no limit")


class TpeOptions(_Section):
    """What may be said to Optuna's TPE sampler; it has the names."""

    n_startup_trials: Whole = Field(10, ge=0, le=1_000_000, description="measured trials before TPE models anything; until then it draws at random")
    n_ei_candidates: Whole = Field(24, ge=1, le=100_000, description="candidates drawn for each new point, of which the best by the model is taken")
    multivariate: Flag = Field(True, description="model parameters together, not each by itself")
    group: Flag = Field(True, description="model parameters that are active together in groups; needs multivariate")

    @model_validator(mode="after")
    def _groups_are_multivariate(self) -> TpeOptions:
        if self.group and not self.multivariate:
            raise _misplaced("group needs multivariate. Write group: false too", "group" if "group" in self.model_fields_set else "multivariate")
        return self


class SearchSection(_Section):
    """How points are chosen."""

    enabled: Flag = Field(True, description="false: parameters that the file does not fix keep their defaults")
    sampler: Literal["tpe", "random"] = Field("tpe", description="who proposes points, once those of start are tried; small spaces are tried whole")
    options: TpeOptions | None = Field(None, description="options of the tpe sampler; not given: its defaults")
    start: list[dict[str, Any]] = Field(
        default_factory=list,
        description="points or parts of them, tried right after the default and the untouched model: slot to pass or null, slot.parameter to value",
    )

    @model_validator(mode="after")
    def _options_of_the_sampler(self) -> SearchSection:
        if self.options is not None and self.sampler != "tpe":
            raise _misplaced(f"the {self.sampler} sampler has no options. Leave options out, or take sampler: tpe", "options")
        return self


class ValidationSection(_Section):
    """What is to be made of rules: those that the user sets aside, and what may be done so that one is kept."""

    waive: list[Text] = Field(default_factory=list, description="rules to set aside, by id; `autotune plan` names those at work")
    upgrade_opset: Flag = Field(
        False, description="convert the model to a later opset before a pass that needs one, where the chain has no OnnxOpsetUpgrade of its own"
    )


class EpsSection(_Section):
    """Differences that are worth nothing in the choice: models that differ by less count as tied."""

    latency: Percent = Field("3%", description="of latency and throughput, relative")
    score: Points = Field("0.3pt", description="of the score: points for shares, hundredths of the baseline's value for others")


class MeasureSection(_Section):
    """How latency is measured; see docs/measuring.md."""

    max_time: Duration = Field("3s", description="longest time for one candidate's latency")
    final_time: Duration = Field("10s", description="the same for a finalist, measured afresh")
    final_budget: Duration = Field(
        "2m", description="longest time for timing again, in turns, those whose place on the front is not settled; final_time for one of them at most"
    )
    eps: EpsSection = EpsSection()
    ratio_width: Number = Field(0.01, gt=0, description="stop when the 95 % interval of the ratio to the baseline is this narrow, relative")
    looks: Flag | None = Field(
        None,
        description="score candidates in looks at 2, 5, 10, 20 and 40 % of the rows, and stop when the outcome over all is certain; "
        "not given: with 200 search rows or more; false: neither scores nor timings stop for what other candidates are",
    )
    pattern: Literal["steady", "paced", "cold"] = Field(
        "steady", description="how runs follow each other: at once; one every interval; or each the first of a fresh session"
    )
    interval: Pause | None = Field(None, description="time from one paced run to the next, such as 10ms")
    concurrency: Whole = Field(1, ge=1, le=1024, description="threads that share a session for throughput; latency is that of one run at a time")
    clock: Literal["wall", "cpu"] = Field(
        "wall", description="what times a run: elapsed time, or the CPU time of one thread, which a busy machine disturbs less"
    )
    measurer: Text | None = Field(None, description="script.py:function that times models in place of autotune, such as on a device in the network")

    @field_validator("measurer")
    @classmethod
    def _function_of_a_script(cls, value: str | None) -> str | None:
        if value is not None and not script_of(value):
            raise ValueError(f"a measurer must be script.py:function; got {value!r}")
        return value

    @model_validator(mode="after")
    def _one_way_of_timing(self) -> MeasureSection:
        if self.interval is not None and self.pattern != "paced":
            raise _misplaced("interval is for paced runs. Write pattern: paced too, or leave interval out", "interval")
        if self.interval is None and self.pattern == "paced":
            raise _misplaced("paced runs need an interval. Write interval: 10ms, for example", "pattern")
        if self.concurrency > 1 and self.pattern == "cold":
            raise _misplaced("cold runs are made one at a time. Leave concurrency out, or take another pattern", "concurrency")
        if self.concurrency > 1 and self.clock == "cpu":
            raise _misplaced("CPU time can't tell the throughput of several threads. Leave concurrency out, or write clock: wall", "concurrency")
        for name in ("pattern", "concurrency", "clock") if self.measurer is not None else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise _misplaced(f"{name} is for timing by autotune, and measurer names a function that times instead. Leave one of them out", name)
        return self


class SweepConfig(_Section):
    """Everything a sweep is told. Paths are relative to the sweep file."""

    schema_: Literal[1] = Field(1, alias="schema", description="version of this format")
    model: ModelSection
    data: DataSection
    metric: Text = Field(description="what makes a model good: a built-in metric such as accuracy, or script.py:function")
    objectives: list[Text] = Field(
        default_factory=lambda: ["latency", "score"], min_length=1, description="what to make small or large: latency, min size, max accuracy, score"
    )
    constraints: list[Text] = Field(default_factory=list, description="limits, such as `accuracy >= baseline - 1.0pt` or `latency.p99 <= 5ms`")
    target: TargetSection = TargetSection()
    chain: list[SlotSection] = Field(min_length=1, description="the slots, in the order in which their passes run")
    search: SearchSection = SearchSection()
    budget: BudgetSection = BudgetSection()
    measure: MeasureSection = MeasureSection()
    validation: ValidationSection = ValidationSection()
    seed: Whole = Field(0, ge=0, lt=2**63, description="seed of everything random")
    pick: Literal["fastest", "most_accurate", "smallest", "knee", "nearest_to_baseline"] = Field(
        "fastest", description="which member of the front is delivered"
    )
    strict: Flag = Field(False, description="take candidates only whose whole interval meets every constraint")
    script: Text | None = Field(None, description="Python file with the user's functions and passes")
    storage: Text | None = Field(None, description="database URL for the Optuna study; not given: a journal file in the run folder")

    @model_validator(mode="after")
    def _slot_names_differ(self) -> SweepConfig:
        names = [s.name for s in self.chain]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise _misplaced(f"slots need different names: {name} is there more than once; give each a `slot:`", "chain", number)
        return self

    @model_validator(mode="after")
    def _cpu_time_of_one_thread(self) -> SweepConfig:
        if self.measure.clock == "cpu":
            if self.target.ep != "CPUExecutionProvider":
                raise _misplaced(f"CPU time can't tell how long {self.target.ep} takes. Write clock: wall", "measure", "clock")
            if self.target.threads != 1:
                raise _misplaced("CPU time stands for the time of a run on one thread only. Write target: {threads: 1} too", "measure", "clock")
        return self

    def to_json(self) -> dict[str, Any]:
        """The file's content with every default filled in."""
        return self.model_dump(by_alias=True)


@dataclass(frozen=True)
class LoadedSweep:
    """A checked sweep file, the folder that its paths start from, and where each value stands in it."""

    config: SweepConfig
    root: Path
    source: str = "sweep"
    places: Places = field(default_factory=dict, compare=False, repr=False)

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
                if data[section].get(key) is not None and (key, data[section][key]) != ("calibration", RANDOM):
                    data[section][key] = str(self.path(data[section][key]))
        if data.get("script"):
            data["script"] = str(self.path(data["script"]))
        for holder, key in ((data, "metric"), (data["measure"], "measurer")):
            if holder[key] is not None and (script := script_of(holder[key])):
                holder[key] = f"{self.path(script)}:{holder[key].rpartition(':')[2]}"
        return SweepConfig.model_validate(data)

    def changed(self, values: Mapping[tuple[str, ...], Any]) -> LoadedSweep:
        """The sweep with other values, by their path, as options of the command line give them. Raises `ConfigError`."""
        data = self.config.to_json()
        for path, value in values.items():
            section = data
            for part in path[:-1]:
                section = section[part]
            section[path[-1]] = value
        kept = {steps: place for steps, place in self.places.items() if not any(steps[: len(path)] == path for path in values)}
        return LoadedSweep(parse_sweep(data, source="command line"), self.root, self.source, kept)

    @contextmanager
    def at(self, *steps: Any) -> Iterator[None]:
        """Say where in the file the value stands that a `ConfigError` raised inside is about: the value at `steps`, or one in it.

        An error that names a key below `steps`, or a value there, is put to that one.
        """
        try:
            yield
        except ConfigError as error:
            while steps and steps not in self.places:
                steps = steps[:-1]
            if not steps or error.who.startswith(f"{self.source}:"):
                raise
            found, at_key = self._meant(steps, error)
            raise type(error)(f"{where(self.places, self.source, found, key=at_key)}: {error.who}", error.must, error.got, error.do) from error

    def _meant(self, steps: Steps, error: ConfigError) -> tuple[Steps, bool]:
        """The value that an error is about, and whether it is about its key."""
        below = [s for s in self.places if len(s) == len(steps) + 1 and s[: len(steps)] == steps]
        for child in below:
            name = str(child[-1])
            if isinstance(child[-1], str) and error.got == repr(name):
                return child, True
            if isinstance(child[-1], str) and error.must.startswith((f"{name} ", f"{name}:")):
                return self._meant(child, error)
        for child in below:
            written = self.places[child].written
            if written is not None and error.got in (written, repr(written)):
                return child, False
        return steps, False


def load_sweep(path: Path) -> LoadedSweep:
    """Read a sweep file (YAML or JSON). Raises `ConfigError` with line, column and nearest name for anything it can't take."""
    data, places = read_yaml(read_text(path), path.name)
    return LoadedSweep(parse_sweep(data, source=path.name, places=places), path.parent.resolve(), path.name, places)


def parse_sweep(data: Any, *, source: str = "sweep", places: Places | None = None) -> SweepConfig:
    """Check a sweep given as plain data. Raises `ConfigError` for the first thing wrong, and says how many more there are."""
    places = places or {}
    if not isinstance(data, Mapping):
        got = "nothing" if data is None else _shown(data)
        raise ConfigError(source, "a sweep file must be a mapping with model, data, metric and chain", got)
    version = data.get("schema", SCHEMA_VERSION)
    if type(version) is not int or version != SCHEMA_VERSION:
        do = "The file is for a later autotune" if type(version) is int and version > SCHEMA_VERSION else f"Write schema: {SCHEMA_VERSION}"
        must = f"schema must be {SCHEMA_VERSION}, the one version of sweep files that is known"
        raise ConfigError(where(places, source, ("schema",)), must, _shown(version), do)
    try:
        return SweepConfig.model_validate(data)
    except ValidationError as error:
        raise _config_error(error, source, places) from None


# ---------------------------------------------------------------------------------------------------------------- in words


def _config_error(error: ValidationError, source: str, places: Places) -> ConfigError:
    """One message for all complaints: the first in the file, and how many more. Unknown keys come first: they explain missing ones."""
    problems = error.errors()
    unknown = [p for p in problems if p["type"] == "extra_forbidden"]
    for problem in unknown:  # a misspelt key is one mistake, not two
        near = nearest(str(problem["loc"][-1]), _names_at(problem["loc"][:-1]))
        meant = [p for p in problems if p["type"] == "missing" and p["loc"][:-1] == problem["loc"][:-1] and near == f"Did you mean {p['loc'][-1]!r}?"]
        problems = [p for p in problems if p not in meant]

    def order(problem: ErrorDetails) -> tuple[bool, int, int]:
        place = next((places[problem["loc"][:n]] for n in range(len(problem["loc"]), 0, -1) if problem["loc"][:n] in places), None)
        return (problem["type"] != "extra_forbidden", place.line if place else 0, place.column if place else 0)

    first = min(problems, key=order)
    steps = (*first["loc"], *first.get("ctx", {}).get("steps", ()))
    must, got, do = _complaint(first, steps, places)
    more = len(problems) - 1
    if more:
        count = "One more problem comes" if more == 1 else f"{more} more problems come"
        do = " ".join(filter(None, (do if not do or do.endswith((".", "?")) else f"{do}.", f"{count} after this one.")))
    return ConfigError(where(places, source, steps, key=first["type"] == "extra_forbidden"), must, got, do)


_WANTED = {
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number", "finite_number": "a finite number",
    "string_type": "text", "bool_type": "true or false", "list_type": "a list",
    "dict_type": "a mapping", "model_type": "a mapping", "model_attributes_type": "a mapping",
}  # fmt: skip
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"), "greater_than": ("above", "gt"), "less_than_equal": ("at most", "le"), "less_than": ("below", "lt"),
}  # fmt: skip
_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def _complaint(problem: ErrorDetails, steps: Steps, places: Places) -> tuple[str, str, str]:
    """What must hold, what came, what to do."""
    path = ".".join(map(str, steps)) or "the sweep file"
    kind, value, facts = problem["type"], problem["input"], problem.get("ctx", {})
    place = places.get(steps)
    got = _shown(value, place.written if place else None)
    if kind == "extra_forbidden":
        parent = ".".join(map(str, steps[:-1])) or "the sweep file"
        return f"keys of {parent} must be known", repr(steps[-1]), _where_else(str(steps[-1]), steps[:-1])
    if kind == "missing":
        return f"{path} must be given", "nothing", ""
    if kind in ("value_error", "misplaced"):
        return f"{path}: {problem['msg'].removeprefix('Value error, ')}", "", ""
    if kind in _WANTED:
        return f"{path} must be {_WANTED[kind]}", got, _mend(_WANTED[kind], value, steps, got)
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"{path} must be {words} {facts[name]:g}", got, ""
    if kind == "literal_error":
        known = re.findall(r"'(.*?)'", str(facts["expected"]))
        near = nearest(value, known) if isinstance(value, str) else ""
        return f"{path} must be one of {', '.join(known)}", got, near if near.startswith("Did") else ""
    if kind == "string_pattern_mismatch":
        return f"{path} must be made of letters, digits and _, and not begin with a digit", got, ""
    if kind == "string_too_short":
        return f"{path} must not be empty", got, ""
    if kind == "too_short":
        return f"{path} must hold at least one item", "none", ""
    if kind == "invalid_key":
        return f"keys of {'.'.join(map(str, steps[:-1])) or 'the sweep file'} must be text", _shown(steps[-1]), ""
    return f"{path}: {problem['msg'][0].lower()}{problem['msg'][1:]}", got, ""


def _shown(value: Any, written: str | None = None) -> str:
    """A value as its writer knows it."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return repr(value if len(value) <= 80 else f"{value[:80]}...")
    if isinstance(value, int | float):
        return written or repr(value)
    if isinstance(value, list | tuple):
        return "a list"
    return "a mapping" if isinstance(value, Mapping) else f"{type(value).__name__} {value!r}"[:120]


def _mend(wanted: str, value: Any, steps: Steps, got: str) -> str:
    """What to write in place of a value of another type, where that can be told."""
    if value is None:
        return "Give it a value, or leave it out"
    if wanted in ("a whole number", "a number") and isinstance(value, str | float):
        try:
            number = float(value.replace("_", "") if isinstance(value, str) else value)
        except ValueError:
            return ""
        if wanted == "a number" or number.is_integer():
            return f"Write {int(number) if number.is_integer() else number}" + (", without quotes" if value == f"{number:g}" else "")
    if wanted == "text" and isinstance(value, bool | int | float):
        return f"Write '{got}', in quotes"
    if wanted == "true or false" and str(value).lower() in (*_YES, *_NO):
        unquoted = ", without quotes" if isinstance(value, str) else ""
        return f"Write {'true' if str(value).lower() in _YES else 'false'}{unquoted}"
    names = _names_at(steps)
    if wanted == "a list" and isinstance(value, str) and not names:
        return f"Write [{value!r}]"
    if wanted == "a list":
        return "Begin each item with `- `"
    return f"It takes {', '.join(names)}" if names and wanted == "a mapping" else ""


def _where_else(name: str, steps: Steps) -> str:
    """The nearest name of a section for an unknown key, or the section where it belongs."""
    homes = [path for path, section in sections().items() if name in names_of(section) and path != tuple(s for s in steps if isinstance(s, str))]
    if len(homes) == 1:
        return f"It belongs in {'.'.join(homes[0])}." if homes[0] else "It belongs at the top of the file, not in a section."
    known = _names_at(steps)
    if "params" in known and not difflib.get_close_matches(name, known, n=1, cutoff=0.7):
        return f"Parameters of a pass belong in params. Known here: {', '.join(known)}."
    return nearest(name, known)


def _names_at(steps: Steps) -> list[str]:
    """Names that the section at `steps` takes; empty where there is no section."""
    section = sections().get(tuple(s for s in steps if isinstance(s, str)))
    return names_of(section) if section else []


def names_of(section: type[BaseModel]) -> list[str]:
    """Names of a section's keys, as they stand in the file."""
    return [found.alias or name for name, found in section.model_fields.items()]


def sections() -> dict[tuple[str, ...], type[BaseModel]]:
    """Every section of the sweep file by its path, list positions left out."""
    found: dict[tuple[str, ...], type[BaseModel]] = {(): SweepConfig}
    waiting: list[tuple[tuple[str, ...], type[BaseModel]]] = [((), SweepConfig)]
    while waiting:
        path, section = waiting.pop(0)
        for name, row in section.model_fields.items():
            for inner in _models_in(row.annotation):
                here = (*path, row.alias or name)
                found[here] = inner
                waiting.append((here, inner))
    return found


def _models_in(annotation: Any) -> list[type[_Section]]:
    if isinstance(annotation, type) and not get_origin(annotation) and issubclass(annotation, _Section):
        return [annotation]
    if get_origin(annotation) in (Union, types.UnionType, list):
        return [model for part in get_args(annotation) for model in _models_in(part)]
    return []


def script_of(name: str) -> str:
    """The script's path in `script.py:function`; empty for any other name."""
    script, _, function = name.rpartition(":")
    return script if script.endswith(".py") and function else ""


def write_sweep(config: SweepConfig) -> str:
    """The sweep as YAML text, keys in the file's usual order."""
    return write_yaml(config.to_json())
