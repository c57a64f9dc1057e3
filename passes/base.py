"""The contract of a pass: one table of parameters, what it accepts and promises, the work.

The names are those of the field's leading tool, so that a pass written for it needs little more than a new import line.
"""

from __future__ import annotations

import enum
import inspect
import itertools
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeGuard, Union, get_args, get_origin

from autotune.errors import PassConfigError, PassError, SpaceError, nearest
from autotune.model import ONNX, PYTORCH, ModelHandler, ONNXModelHandler, load_object
from autotune.passes.coverage import coverage_of
from autotune.passes.findings import Findings
from autotune.search_spaces.parameters import (
    INACTIVE,
    INVALID,
    Categorical,
    Conditional,
    ConditionalDefault,
    Parameter,
    order_parents_first,
    parameter_from_json,
    same,
)
from autotune.target import AcceleratorSpec

__all__ = [
    "ONNX", "PYTORCH", "SEARCH", "AcceleratorSpec", "ConfigView", "ModelTraits", "ParamCategory", "Pass", "PassConfigParam", "PassContract",
]  # fmt: skip


class _Search:
    """`SEARCH` in a user's config: search this parameter over the pass's own search defaults."""

    def __repr__(self) -> str:
        return "SEARCH"

    def __reduce__(self) -> str:
        return "SEARCH"


SEARCH = _Search()
PARAMETER_KINDS = ("Categorical", "Boolean", "Conditional", "ConditionalDefault")  # written out in a sweep file as {type: ...}


class ParamCategory(enum.Enum):
    """What a parameter's value stands for."""

    NONE = "none"
    OBJECT = "object"  # a callable or other object, or the name of one in the user's script
    PATH = "path"  # a file or folder that travels with the trial
    DATA = "data"  # a data path, resolved against the data root


@dataclass(frozen=True)
class PassConfigParam:
    """One row of a pass's table. `type_` is a type or a union (`int | None`, `list[str]`, `Literal["l1", "l2"]`).

    `minimum` and `maximum` bound numbers, both inclusive. `check` says in words what a value breaks, or nothing: "".
    A value may be None only where the type says so or None is the default.
    """

    type_: Any
    required: bool = False
    category: ParamCategory = ParamCategory.NONE
    description: str = ""
    default_value: Any = None
    search_defaults: Parameter | None = None
    minimum: float | None = None
    maximum: float | None = None
    check: Callable[[Any], str] | None = None


@dataclass(frozen=True)
class PassContract:
    """What a pass accepts and promises; the engine enforces it.

    `accepts` is the format of models that it takes, `accepts_too` names others. `needs_calibration_when` names parameter values that need
    calibration data ({} never; {"quant_mode": "static"}: then).
    `execution_providers` and `accelerators` empty: any. `packages` maps an import name to the extra that brings it.
    `data` maps a DATA parameter to the role whose data fills it when the user gives none: `calibration` or `train`.
    `session_only`: changes session settings, never the files. `version` is part of the store's key: raise it with the work.
    """

    accepts: str = ONNX
    returns: str = ONNX
    version: int = 1
    min_opset: int = 0
    execution_providers: tuple[str, ...] = ()
    accelerators: tuple[str, ...] = ()
    needs_calibration_when: Mapping[str, Any] = field(default_factory=dict)
    needs_gpu: bool = False
    packages: Mapping[str, str] = field(default_factory=dict)
    ep_dependent: bool = False
    refuses_quantized_input: bool = False
    data: Mapping[str, str] = field(default_factory=dict)
    session_only: bool = False
    accepts_too: tuple[str, ...] = ()

    def takes(self, format_: str) -> bool:
        """Whether a model of this format may come in."""
        return format_ == self.accepts or format_ in self.accepts_too


@dataclass(frozen=True)
class ModelTraits:
    """What a pass makes of a model, as far as rules must know it before the pass runs. Empty or None: unchanged, or not known.

    `format`: qdq (pairs of QuantizeLinear and DequantizeLinear), qoperator (QLinear operators), dynamic (activations quantized while the
    model runs) or weight_only (ONNX Runtime's own operators on packed weights, such as MatMulNBits). Types are named as in
    `autotune.capabilities`: int8, uint8, int4, float8, float16 ... `opset` is that of the ONNX model made, where the pass sets it.
    `methods` are by name: awq, gptq, smoothquant, qat, pruning.
    """

    quantized: bool = False
    format: str = ""
    weight_type: str = ""
    activation_type: str = ""
    symmetric_weights: bool | None = None
    symmetric_activations: bool | None = None
    per_channel: bool | None = None
    power_of_two: bool | None = None
    methods: frozenset[str] = frozenset()
    opset: int = 0


class Pass(ABC):
    """A change to a model. Subclasses give a contract, a table and the work.

    A pass never changes its input, times nothing, logs nothing, caches nothing: instruments around it do.
    """

    contract: ClassVar[PassContract] = PassContract()

    def __init__(self, accelerator_spec: AcceleratorSpec, config: Mapping[str, Any] | None = None, *, user_script: Path | None = None) -> None:
        """Validate `config` against the table and fill in defaults; raises `PassConfigError`."""
        self.accelerator_spec = accelerator_spec
        self.user_script = user_script
        self.findings = Findings()  # the runner of a sweep gives a folder that its trials share
        self.operator_times: Mapping[str, float] = {}  # and these of the input model, for the coverage
        self.config: dict[str, Any] = self.resolve(accelerator_spec, config or {})

    @classmethod
    @abstractmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        """Return the table of parameters."""

    @abstractmethod
    def _run_for_config(self, model: Any, config: Mapping[str, Any], output_model_path: Path) -> ModelHandler:
        """Do the work: read `model`, write into the empty folder `output_model_path`, return the result's handler."""

    @classmethod  # noqa: B027 -- no need to override: most passes have nothing to add to their table
    def validate_config(cls, config: Mapping[str, Any], accelerator_spec: AcceleratorSpec) -> None:
        """Refuse (`PassConfigError`) a resolved config that the rows of the table, each by itself, could not."""

    @classmethod
    def needed_data(cls, config: Mapping[str, Any]) -> frozenset[str]:
        """Name the roles of data (`calibration`, `train`) that this resolved config can't do without."""
        when = cls.contract.needs_calibration_when
        needs = bool(when) and all(name in config and same(config[name], value) for name, value in when.items())
        return frozenset({"calibration"}) if needs else frozenset()

    @classmethod
    def needed_opset(cls, config: Mapping[str, Any]) -> int:
        """Return the lowest opset of an ONNX input that this resolved config works on; what its `traits` need is added by itself."""
        return cls.contract.min_opset

    @classmethod
    def traits(cls, config: Mapping[str, Any]) -> ModelTraits:
        """Tell what this resolved config makes of a model, so that rules can judge it for the target before anything runs."""
        return ModelTraits(quantized=cls.contract.refuses_quantized_input)

    @classmethod
    def default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        """Return the checked table: every default and searchable value has the declared type, every parent exists."""
        table = cls._default_config(accelerator_spec)
        for name, row in table.items():
            if row.search_defaults is not None and not isinstance(row.search_defaults, Categorical | Conditional):
                raise PassConfigError(cls.__name__, f"search_defaults of {name} must be a Categorical or a Conditional", repr(row.search_defaults))
            for value in _values_in(row.default_value) + _values_in(row.search_defaults):
                fault = _fault(value, row)
                if fault:
                    raise PassConfigError(cls.__name__, f"{name} must be {fault} in its own table too", repr(value))
            for parent in {*_all_parents(row.default_value), *_all_parents(row.search_defaults)}:
                if "." not in parent and parent not in table:
                    raise PassConfigError(cls.__name__, f"parents of {name} must be parameters of the table", repr(parent), nearest(parent, table))
        return table

    @classmethod
    def search_space(cls, accelerator_spec: AcceleratorSpec, user: Mapping[str, Any] | None = None, *, search: bool = True) -> dict[str, Parameter]:
        """Compile table and user values into one parameter per row (fixed ones are a Categorical of one value).

        A scalar fixes; a list, `Categorical` or `Conditional` (also written out as JSON) replaces the search defaults; `SEARCH` or
        nothing asks for them; with `search` off, defaults hold. Rows typed as lists take a list as a value, a list of lists as
        choices. Where the table says that a parameter plays no part or is invalid, it stays so, whoever gave the values. Branches
        that the fixed values rule out are left away, and so are parameters that then play no part at all.

        Raises `PassConfigError` for unknown names, wrong types, missing required parameters, and values given for a parameter that
        plays no part in any combination.
        """
        table = cls.default_config(accelerator_spec)
        user = dict(user or {})
        cls._refuse_unknown(user, table)
        wide = {name: cls._parameter(name, row, user.get(name, _MISSING), search) for name, row in table.items()}
        compiled: dict[str, Parameter] = {}
        possible: dict[str, list[Any]] = {}
        for name in order_parents_first({n: _own(_all_parents(p), table) for n, p in wide.items()}, who=cls.__name__):
            narrow = _without_impossible_rows(wide[name], possible)
            if isinstance(narrow, Categorical | Conditional):
                compiled[name] = narrow
                possible[name] = _values_in(narrow) + ([INACTIVE] if _may_be_inactive(narrow, possible) else [])
                continue
            state = "plays no part" if narrow is INACTIVE else "is not allowed"
            parents = ", ".join(f"{p} in {possible[p]!r}" for p in _own(_all_parents(wide[name]), table))
            if narrow is INVALID or user.get(name, SEARCH) is not SEARCH:
                raise PassConfigError(
                    cls.__name__, f"{name} {state} with {parents}", repr(user.get(name, "no value")), f"Leave {name} out, or change its parents."
                )
            possible[name] = [INACTIVE]
        return {name: compiled[name] for name in table if name in compiled}

    @classmethod
    def _parameter(cls, name: str, row: PassConfigParam, given: Any, search: bool) -> Parameter:
        asks = given is SEARCH or (isinstance(given, str) and given == "SEARCH" and not _takes_any_text(row))
        if given is _MISSING or asks:
            if asks and row.search_defaults is None:
                raise PassConfigError(cls.__name__, f"{name} has no search defaults", "SEARCH", "Give the choices as a list.")
            if search and row.search_defaults is not None:
                return row.search_defaults
            if row.required:
                raise PassConfigError(cls.__name__, f"{name} must be given", "nothing", f"It is {_type_name(row.type_)}: {row.description}")
            if isinstance(row.default_value, ConditionalDefault):
                return row.default_value.as_conditional()
            return _masked(row.search_defaults, Categorical([row.default_value]), invalid_too=False)
        try:
            parameter = cls._as_parameter(row, given)
        except SpaceError as error:
            raise PassConfigError(cls.__name__, f"{name}: {error.must}", error.got, error.do) from error
        for value in _values_in(parameter):
            fault = _fault(value, row)
            if fault:
                raise PassConfigError(cls.__name__, f"{name} must be {fault}", repr(value), _advice(value, row))
        if not search and len(_values_in(parameter)) > 1:
            raise PassConfigError(cls.__name__, f"{name} must be one value when search is off", repr(given), "Switch search on, or choose one.")
        return _masked(row.search_defaults, parameter)

    @classmethod
    def _as_parameter(cls, row: PassConfigParam, given: Any) -> Parameter:
        if isinstance(given, ConditionalDefault):
            return given.as_conditional()
        if isinstance(given, Categorical | Conditional):
            return given
        if isinstance(given, Mapping) and "type" in given and (given["type"] in PARAMETER_KINDS or _fault(given, row)):
            parsed = parameter_from_json(given)
            return parsed.as_conditional() if isinstance(parsed, ConditionalDefault) else parsed
        if isinstance(given, list | tuple) and _fault(given, row):
            return Categorical(list(given))
        return Categorical([given])

    @classmethod
    def resolve(cls, accelerator_spec: AcceleratorSpec, values: Mapping[str, Any]) -> dict[str, Any]:
        """Complete a config: given values, then defaults, `ConditionalDefault`s by their parents; inactive ones are left out.

        Raises `PassConfigError` for what the table refuses, a combination that is INVALID included.
        """
        table = cls.default_config(accelerator_spec)
        cls._refuse_unknown(values, table)
        parents = {n: _own((*_all_parents(r.default_value), *_all_parents(r.search_defaults)), table) for n, r in table.items()}
        resolved: dict[str, Any] = {}
        for name in order_parents_first(parents, who=cls.__name__):
            row = table[name]
            given = values.get(name, INACTIVE)
            if given is INACTIVE or (given is None and row.default_value is None and not row.required):
                if row.required:
                    raise PassConfigError(cls.__name__, f"{name} must be given", "nothing", f"It is {_type_name(row.type_)}: {row.description}")
                value = cls._default_for(name, row, resolved)
            else:
                value = given
                fault = _fault(value, row)
                if fault:
                    raise PassConfigError(cls.__name__, f"{name} must be {fault}", repr(value), _advice(value, row))
                cls._refuse_contradiction(name, value, row, resolved)
            if value is not INACTIVE:
                resolved[name] = value
        config = {name: resolved[name] for name in table if name in resolved}
        cls.validate_config(config, accelerator_spec)
        return config

    @classmethod
    def _default_for(cls, name: str, row: PassConfigParam, resolved: Mapping[str, Any]) -> Any:
        branch = row.search_defaults.branch(resolved) if _hangs_on_own_rows(row.search_defaults) else None
        if branch is INACTIVE:
            return INACTIVE
        value = row.default_value.choose(resolved) if isinstance(row.default_value, ConditionalDefault) else row.default_value
        # No default and no valid value is "not set": the pass does without. A default that the table forbids is a contradiction.
        if value is INVALID or (branch is INVALID and value is not None):
            parents = _all_parents(row.default_value if value is INVALID else row.search_defaults)
            raise PassConfigError(cls.__name__, f"{name} has no valid value with {_shown(resolved, parents)}", "its default", "Change its parents.")
        return value

    @classmethod
    def _refuse_contradiction(cls, name: str, value: Any, row: PassConfigParam, resolved: Mapping[str, Any]) -> None:
        """A value given where the table says INACTIVE or INVALID is a contradiction; other values than the searched ones are free."""
        if not _hangs_on_own_rows(row.search_defaults):
            return
        branch = row.search_defaults.branch(resolved)
        if branch is INACTIVE or branch is INVALID:
            state = "plays no part" if branch is INACTIVE else "is not allowed"
            raise PassConfigError(
                cls.__name__, f"{name} {state} with {_shown(resolved, _all_parents(row.search_defaults))}", f"{name}={value!r}",
                f"Leave {name} out, or change its parents.",
            )  # fmt: skip

    @classmethod
    def _refuse_unknown(cls, values: Mapping[str, Any], table: Mapping[str, PassConfigParam]) -> None:
        for name in values:
            if name not in table:
                raise PassConfigError(cls.__name__, "parameters must be those of its table", repr(name), nearest(str(name), table))

    @classmethod
    def json_schema(cls, accelerator_spec: AcceleratorSpec) -> dict[str, Any]:
        """JSON Schema of the pass's config, for editors; every row also takes a list of choices or a written-out condition."""
        table = cls.default_config(accelerator_spec)
        properties = {}
        for name, row in table.items():
            value = _json_type(row.type_)
            if row.minimum is not None:
                value["minimum"] = row.minimum
            if row.maximum is not None:
                value["maximum"] = row.maximum
            if not _fault(None, row):
                value = {"anyOf": [value, {"type": "null"}]}
            written_out = {"type": "object", "properties": {"type": {"enum": list(PARAMETER_KINDS)}}, "required": ["type"]}
            row_schema = {
                "description": row.description,
                "anyOf": [value, {"type": "array", "items": value, "minItems": 1}, written_out, {"const": "SEARCH"}],
            }
            default = row.default_value
            if default is not None and not isinstance(default, ConditionalDefault) and not callable(default):
                row_schema["default"] = list(default) if isinstance(default, tuple) else default
            properties[name] = row_schema
        required = [n for n, r in table.items() if r.required]
        return {"title": cls.__name__, "type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def run(self, model: ModelHandler, output_model_path: Path) -> ModelHandler:
        """Check the input against the contract, do the work, and return a handler of files in `output_model_path`.

        Its notes say what share of the model was changed (`coverage_of`), beside what the pass itself tells of that.

        Raises `PassError` when the model or the target is not what the contract accepts.
        """
        who = type(self).__name__
        contract, spec = self.contract, self.accelerator_spec
        if not contract.takes(model.format):
            raise PassError(who, f"takes a model in {contract.accepts} format", model.format, "Put the passes in order.")
        if contract.execution_providers and spec.execution_provider not in contract.execution_providers:
            raise PassError(who, f"is for {', '.join(contract.execution_providers)}", spec.execution_provider, "Leave it out for this target.")
        if contract.accelerators and spec.accelerator_type not in contract.accelerators:
            raise PassError(who, f"is for {', '.join(contract.accelerators)}", spec.accelerator_type, "Leave it out for this target.")
        opset = getattr(model, "opset", 0)
        if opset and opset < contract.min_opset:
            raise PassError(who, f"needs opset {contract.min_opset} or later", f"opset {opset}", "Convert the model to a later opset first.")
        result = self._run_for_config(model, self.config, output_model_path)
        if result.format != contract.returns:
            raise PassError(who, f"promises a model in {contract.returns} format", result.format, "This is a mistake in the pass.")
        if result.folder != output_model_path:
            raise PassError(who, "must leave its result in the folder given to it", str(result.folder), "This is a mistake in the pass.")
        if not isinstance(result, ONNXModelHandler) or contract.session_only:
            return result
        share = coverage_of(model if isinstance(model, ONNXModelHandler) else None, result, self.operator_times)
        return replace(result, notes={**result.notes, "coverage": {**share, **result.notes.get("coverage", {})}})

    def object(self, name: str) -> Any:
        """Return the object that an OBJECT parameter holds or names: `function` (user script) or `script.py:function`.

        A relative script lies beside the user script, where there is one.
        """
        value = self.config.get(name)
        if not isinstance(value, str):
            return value
        script, _, attribute = value.rpartition(":")
        path = Path(script) if script else self.user_script
        if path is None:
            raise PassConfigError(type(self).__name__, f"{name} must be script.py:name, or a user script must be set", repr(value))
        if not path.is_absolute() and self.user_script is not None and (self.user_script.parent / path).is_file():
            path = self.user_script.parent / path
        return load_object(path, attribute, who=type(self).__name__)


class ConfigView(Mapping[str, Any]):
    """A pass's resolved config, worked out key by key as it is read: so whoever gives the values sees what is looked at.

    `given(name)` returns a value for a row, INACTIVE for none. The view holds what `Pass.resolve` would fill in, and checks nothing.
    """

    def __init__(self, pass_class: type[Pass], table: Mapping[str, PassConfigParam], given: Callable[[str], Any]) -> None:
        self._pass_class, self._table, self._given = pass_class, table, given

    def __getitem__(self, name: str) -> Any:
        if name not in self._table:
            raise KeyError(name)
        row, value = self._table[name], self._given(name)
        if value is INACTIVE or (value is None and row.default_value is None and not row.required):
            value = INACTIVE if row.required else self._pass_class._default_for(name, row, self)  # noqa: SLF001 # one module
        if value is INACTIVE:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._table if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Missing:
    """Stands for a parameter that the user did not name."""


_MISSING = _Missing()


def _all_parents(parameter: object) -> tuple[str, ...]:
    """Parents of a parameter or default and of the conditions nested in it, each once."""
    return parameter.all_parents if isinstance(parameter, Conditional | ConditionalDefault) else ()


def _hangs_on_own_rows(parameter: object) -> TypeGuard[Conditional]:
    """Whether it is a condition that a config alone decides; one on other slots of the chain is the search space's to judge."""
    return isinstance(parameter, Conditional) and not any("." in parent for parent in parameter.all_parents)


def _own(names: Sequence[str], table: Mapping[str, PassConfigParam]) -> tuple[str, ...]:
    """Those of the names that are in the table; others belong to other slots of the chain."""
    return tuple(dict.fromkeys(n for n in names if n in table))


def _shown(values: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{n}={values[n]!r}" if n in values else f"{n} inactive" for n in names)


def _values_in(parameter: object) -> list[Any]:
    """All values a parameter or default can take, each once, sentinels left out."""
    if parameter is None or parameter is INVALID or parameter is INACTIVE:
        return []
    if isinstance(parameter, Categorical):
        return [v for v in parameter.values if v is not INACTIVE and v is not INVALID]
    if isinstance(parameter, Conditional | ConditionalDefault):
        found: list[Any] = []
        for branch in [*parameter.support.values(), parameter.default]:
            found += [v for v in _values_in(branch) if not any(same(v, f) for f in found)]
        return found
    return [parameter]


def _masked(table: Parameter | None, values: Parameter, *, invalid_too: bool = True) -> Parameter:
    """Put `values` in the place of every branch that has any, so that a parameter stays out of play where its table says so."""
    if not isinstance(table, Conditional):
        return values

    def branch(original: Any) -> Any:
        if original is INACTIVE or (original is INVALID and invalid_too):
            return original
        return values if original is INVALID else _masked(original, values, invalid_too=invalid_too)

    return Conditional(table.parents, [(row, branch(original)) for row, original in table.support.items()], branch(table.default))


MOST_COMBINATIONS = 10_000  # of parent values looked at one by one; beyond, a default is taken to be reachable


def _without_impossible_rows(parameter: Parameter, possible: Mapping[str, Sequence[Any]]) -> Any:
    """Drop rows for values that the parents can't take; INACTIVE or INVALID when nothing else is left.

    `possible` holds the values of the parameters before this one, INACTIVE among them; parents it doesn't know may take any.
    """
    if not isinstance(parameter, Conditional):
        return parameter
    rows: list[tuple[tuple[Any, ...], Any]] = []
    for row, branch in parameter.support.items():
        if all(p not in possible or any(same(v, o) for o in possible[p]) for p, v in zip(parameter.parents, row, strict=True)):
            rows.append((row, _without_impossible_rows(branch, possible) if isinstance(branch, Conditional) else branch))
    default = parameter.default
    if isinstance(default, Conditional):
        default = _without_impossible_rows(default, possible)
    outcomes = [branch for _, branch in rows]
    combinations = _combinations(parameter.parents, possible)
    if combinations is None:
        outcomes.append(default)
    else:
        others = [c for c in combinations if not any(same(c, row) for row, _ in rows)]
        outcomes += [INACTIVE if any(v is INACTIVE for v in c) else default for c in others]
    for sentinel in (INACTIVE, INVALID):
        if all(o is sentinel for o in outcomes):
            return sentinel
    alive = [i for i, p in enumerate(parameter.parents) if p not in possible or any(v is not INACTIVE for v in possible[p])]
    if len(alive) == len(parameter.parents):
        return Conditional(parameter.parents, rows, default)
    # A parent that plays no part at all is in no point; rows that name it INACTIVE are left, and can do without it.
    if not alive:
        return rows[0][1]
    return Conditional([parameter.parents[i] for i in alive], [([row[i] for i in alive], branch) for row, branch in rows], INACTIVE)


def _may_be_inactive(parameter: Parameter, possible: Mapping[str, Sequence[Any]]) -> bool:
    if not isinstance(parameter, Conditional):
        return False
    branches = [*parameter.support.values(), parameter.default]
    if any(b is INACTIVE or (isinstance(b, Conditional) and _may_be_inactive(b, possible)) for b in branches):
        return True
    return any(p in possible and any(v is INACTIVE for v in possible[p]) for p in parameter.parents)


def _combinations(parents: Sequence[str], possible: Mapping[str, Sequence[Any]]) -> list[tuple[Any, ...]] | None:
    """All combinations of the parents' values; None where a parent is unknown or there are too many to look at."""
    size = 1
    for parent in parents:
        size *= len(possible.get(parent, ())) or MOST_COMBINATIONS + 1
    return None if size > MOST_COMBINATIONS else list(itertools.product(*(possible[p] for p in parents)))


def _takes_any_text(row: PassConfigParam) -> bool:
    """`SEARCH` is an ordinary word for a row of text without search defaults."""
    return row.type_ is str and row.search_defaults is None


def _fault(value: Any, row: PassConfigParam) -> str:
    """What the value should have been, in words; empty when it is fine."""
    if value is None:
        default = row.default_value
        default_may_be_none = default is None or (isinstance(default, ConditionalDefault) and None in [*default.support.values(), default.default])
        return "" if (default_may_be_none and not row.required) or _is_of_type(None, row.type_) else _type_name(row.type_)
    if row.category is ParamCategory.OBJECT and isinstance(value, str):
        return "" if value else "an object, or the name of one"
    if row.category in (ParamCategory.PATH, ParamCategory.DATA):
        return "" if isinstance(value, str | Path) else "a path"
    if not _is_of_type(value, row.type_):
        return _type_name(row.type_)
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = row.minimum, row.maximum
        if not ((low is None or value >= low) and (high is None or value <= high)):
            bounds = [f"at least {low:g}"] if low is not None else []
            bounds += [f"at most {high:g}"] if high is not None else []
            return f"{_type_name(row.type_)}, {' and '.join(bounds)}"
    return row.check(value) if row.check is not None else ""


def _advice(value: Any, row: PassConfigParam) -> str:
    """Nearest choice for a misspelt word, else what the parameter is."""
    choices = [c for c in get_args(row.type_) if isinstance(c, str)] if _origin(row.type_) is Literal else []
    near = nearest(value, choices) if isinstance(value, str) and choices else ""
    return near if near.startswith("Did") or not row.description else f"It means: {row.description}"


def _origin(type_: Any) -> Any:
    origin = get_origin(type_)
    return Union if origin is types.UnionType else origin


def _is_of_type(value: Any, type_: Any) -> bool:
    """Type check by the rules of the table: `True` is no int, an int is a fine float, a tuple is a fine list."""
    origin = _origin(type_)
    if type_ is Any or type_ is object:
        return True
    if origin is Union:
        return any(_is_of_type(value, t) for t in get_args(type_))
    if origin is Literal:
        return any(same(value, v) for v in get_args(type_))
    if type_ is None or type_ is type(None):
        return value is None
    if origin in (list, tuple) or type_ in (list, tuple):
        inner = [t for t in get_args(type_) if t is not Ellipsis]
        return isinstance(value, list | tuple) and all(not inner or any(_is_of_type(v, t) for t in inner) for v in value)
    if origin is dict or type_ is dict:
        return isinstance(value, Mapping)
    if type_ is Callable or origin is Callable or "Callable" in str(type_):
        return callable(value)
    wanted = origin if inspect.isclass(origin) else type_
    if not inspect.isclass(wanted):
        return False
    if isinstance(value, bool):
        return wanted is bool
    return isinstance(value, int | float) if wanted is float else isinstance(value, wanted)


def _type_name(type_: Any) -> str:
    """A type in words for a message: `int`, `one of 'l1', 'l2'`, `int or None`, `list[str]`."""
    origin = _origin(type_)
    if origin is Union:
        return " or ".join(_type_name(t) for t in get_args(type_))
    if origin is Literal:
        return "one of " + ", ".join(repr(c) for c in get_args(type_))
    if type_ is None or type_ is type(None):
        return "None"
    if "Callable" in str(type_):
        return "a callable"
    return type_.__name__ if inspect.isclass(type_) and not get_args(type_) else str(type_).replace("typing.", "")


def _json_type(type_: Any) -> dict[str, Any]:
    origin = _origin(type_)
    if origin is Union:
        return {"anyOf": [_json_type(t) for t in get_args(type_)]}
    if origin is Literal:
        return {"enum": list(get_args(type_))}
    if origin in (list, tuple) or type_ in (list, tuple):
        inner = [t for t in get_args(type_) if t is not Ellipsis]
        return {"type": "array", "items": _json_type(Union[tuple(inner)])} if inner else {"type": "array"}  # noqa: UP007 # a union of a list
    if origin is dict or type_ is dict:
        return {"type": "object"}
    names = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string", type(None): "null", None: "null"}
    return {"type": names[type_]} if type_ in names else {}
