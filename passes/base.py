"""The contract of a pass: one table of parameters, what it accepts and promises, the work.

The names are those of the field's leading tool, so that a pass written for it needs little more than a new import line.
"""

from __future__ import annotations

import enum
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Union, get_args, get_origin

from autotune.errors import PassConfigError, PassError, nearest
from autotune.model import ONNX, PYTORCH, ModelHandler, load_object
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
    "ONNX", "PYTORCH", "SEARCH", "AcceleratorSpec", "ParamCategory", "Pass", "PassConfigParam", "PassContract",
]  # fmt: skip


class _Search:
    """`SEARCH` in a user's config: search this parameter over the pass's own search defaults."""

    def __repr__(self) -> str:
        return "SEARCH"

    def __reduce__(self) -> str:
        return "SEARCH"


SEARCH = _Search()


class ParamCategory(enum.Enum):
    """What a parameter's value stands for."""

    NONE = "none"
    OBJECT = "object"  # a callable or other object, or the name of one in the user's script
    PATH = "path"  # a file or folder that travels with the trial
    DATA = "data"  # a data path, resolved against the data root


@dataclass(frozen=True)
class PassConfigParam:
    """One row of a pass's table. `type_` is a type or a union (`int | None`, `list[str]`, `Callable | str`)."""

    type_: Any
    required: bool = False
    category: ParamCategory = ParamCategory.NONE
    description: str = ""
    default_value: Any = None
    search_defaults: Parameter | None = None


@dataclass(frozen=True)
class PassContract:
    """What a pass accepts and promises; the engine enforces it.

    `needs_calibration_when` names parameter values that need calibration data ({} never; {"quant_mode": "static"}: then).
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


class Pass(ABC):
    """A change to a model. Subclasses give a contract, a table and the work.

    A pass never changes its input, times nothing, logs nothing, caches nothing: instruments around it do.
    """

    contract: ClassVar[PassContract] = PassContract()

    def __init__(self, accelerator_spec: AcceleratorSpec, config: Mapping[str, Any] | None = None, *, user_script: Path | None = None) -> None:
        """Validate `config` against the table and fill in defaults; raises `PassConfigError`."""
        self.accelerator_spec = accelerator_spec
        self.user_script = user_script
        self.config: dict[str, Any] = self.resolve(accelerator_spec, config or {})

    @classmethod
    @abstractmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        """Return the table of parameters."""

    @abstractmethod
    def _run_for_config(self, model: Any, config: Mapping[str, Any], output_model_path: Path) -> ModelHandler:
        """Do the work: read `model`, write into the empty folder `output_model_path`, return the result's handler."""

    @classmethod
    def default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        """Return the checked table: every default and searchable value has the declared type, every parent exists."""
        table = cls._default_config(accelerator_spec)
        for name, row in table.items():
            if row.search_defaults is not None and not isinstance(row.search_defaults, Categorical | Conditional):
                raise PassConfigError(cls.__name__, f"search_defaults of {name} must be a Categorical or a Conditional", repr(row.search_defaults))
            for value in _values_in(row.default_value) + _values_in(row.search_defaults):
                if not _fits(value, row):
                    raise PassConfigError(cls.__name__, f"{name} must be {_type_name(row.type_)} in its own table too", repr(value))
        return table

    @classmethod
    def search_space(
        cls, accelerator_spec: AcceleratorSpec, user: Mapping[str, Any] | None = None, *, search: bool = True
    ) -> dict[str, Parameter]:
        """Compile table and user values into one parameter per row (fixed ones are a Categorical of one value).

        A scalar fixes; a list, `Categorical` or `Conditional` (also written out as JSON) replaces the search defaults; `SEARCH` or
        nothing asks for them; with `search` off, defaults hold. Rows typed as lists take a list as a value, a list of lists as
        choices. Raises `PassConfigError` for unknown names, wrong types and missing required parameters.
        """
        table = cls.default_config(accelerator_spec)
        user = dict(user or {})
        cls._refuse_unknown(user, table)
        return {name: cls._parameter(name, row, user.get(name, _MISSING), search) for name, row in table.items()}

    @classmethod
    def _parameter(cls, name: str, row: PassConfigParam, given: Any, search: bool) -> Parameter:
        if given is _MISSING or given is SEARCH or (isinstance(given, str) and given == "SEARCH" and not _fits_exactly_str(row)):
            if given is not _MISSING and row.search_defaults is None:
                raise PassConfigError(cls.__name__, f"{name} has no search defaults", "SEARCH", "Give the choices as a list.")
            if search and row.search_defaults is not None:
                return row.search_defaults
            if row.required and given is _MISSING:
                raise PassConfigError(cls.__name__, f"{name} must be given", "nothing", f"It is {_type_name(row.type_)}: {row.description}")
            default = row.default_value
            return default.as_conditional() if isinstance(default, ConditionalDefault) else Categorical([default])
        parameter = cls._as_parameter(name, row, given)
        for value in _values_in(parameter):
            if not _fits(value, row):
                raise PassConfigError(cls.__name__, f"{name} must be {_type_name(row.type_)}", repr(value), row.description)
        if not search and isinstance(parameter, Categorical) and len(parameter.values) > 1:
            raise PassConfigError(cls.__name__, f"{name} must be one value when search is off", repr(given), "Switch search on, or choose one.")
        return parameter

    @classmethod
    def _as_parameter(cls, name: str, row: PassConfigParam, given: Any) -> Parameter:
        if isinstance(given, ConditionalDefault):
            return given.as_conditional()
        if isinstance(given, Categorical | Conditional):
            return given
        if isinstance(given, Mapping) and "type" in given and given["type"] in ("Categorical", "Boolean", "Conditional", "ConditionalDefault"):
            parsed = parameter_from_json(given)
            return parsed.as_conditional() if isinstance(parsed, ConditionalDefault) else parsed
        if isinstance(given, list | tuple) and not _fits(given, row):
            return Categorical(list(given))
        return Categorical([given])

    @classmethod
    def resolve(cls, accelerator_spec: AcceleratorSpec, values: Mapping[str, Any]) -> dict[str, Any]:
        """Complete a config: given values, then defaults, `ConditionalDefault`s by their parents; inactive ones are left out.

        Raises `PassConfigError` for what the table refuses, a combination that is INVALID included.
        """
        table = cls.default_config(accelerator_spec)
        cls._refuse_unknown(values, table)
        parameters: dict[str, Parameter | ConditionalDefault] = {}
        for name, row in table.items():
            if isinstance(row.search_defaults, Conditional):
                parameters[name] = row.search_defaults
            elif isinstance(row.default_value, ConditionalDefault):
                parameters[name] = row.default_value
        resolved: dict[str, Any] = {}
        for name in order_parents_first({n: _parents(parameters.get(n)) for n in table}, who=cls.__name__):
            row = table[name]
            if name in values and values[name] is not INACTIVE:
                value = values[name]
                if not _fits(value, row):
                    raise PassConfigError(cls.__name__, f"{name} must be {_type_name(row.type_)}", repr(value), row.description)
                cls._refuse_invalid(name, value, row, resolved)
            elif row.required:
                raise PassConfigError(cls.__name__, f"{name} must be given", "nothing", f"It is {_type_name(row.type_)}: {row.description}")
            else:
                value = row.default_value.choose(resolved) if isinstance(row.default_value, ConditionalDefault) else row.default_value
                if value is INVALID:
                    raise PassConfigError(cls.__name__, f"{name} has no default for these values of its parents", _shown(resolved, _parents(row.default_value)))
                if isinstance(row.search_defaults, Conditional):
                    branch = row.search_defaults.branch(resolved)
                    if branch is INACTIVE:
                        value = INACTIVE
                    elif branch is INVALID and value is not None:
                        raise PassConfigError(
                            cls.__name__, f"{name} has no valid value here", _shown(resolved, row.search_defaults.parents), "Change its parents."
                        )  # fmt: skip
            if value is not INACTIVE:
                resolved[name] = value
        return {name: resolved[name] for name in table if name in resolved}

    @classmethod
    def _refuse_invalid(cls, name: str, value: Any, row: PassConfigParam, resolved: Mapping[str, Any]) -> None:
        """A value given where the table says INACTIVE or INVALID is a contradiction; other values than the searched ones are free."""
        if not isinstance(row.search_defaults, Conditional):
            return
        branch = row.search_defaults.branch(resolved)
        if branch is INACTIVE or branch is INVALID:
            state = "plays no part" if branch is INACTIVE else "is not allowed"
            raise PassConfigError(
                cls.__name__, f"{name} {state} with {_shown(resolved, row.search_defaults.parents)}", f"{name}={value!r}", f"Leave {name} out, or change its parents."
            )  # fmt: skip

    @classmethod
    def _refuse_unknown(cls, values: Mapping[str, Any], table: Mapping[str, PassConfigParam]) -> None:
        for name in values:
            if name not in table:
                raise PassConfigError(cls.__name__, "parameters must be those of its table", repr(name), nearest(str(name), table))

    @classmethod
    def json_schema(cls, accelerator_spec: AcceleratorSpec) -> dict[str, Any]:
        """JSON Schema of the pass's config, for editors; searchable rows also take a list of choices."""
        properties = {}
        for name, row in cls.default_config(accelerator_spec).items():
            value = {**_json_type(row.type_), "description": row.description}
            if row.default_value is not None and not isinstance(row.default_value, ConditionalDefault) and not callable(row.default_value):
                value["default"] = list(row.default_value) if isinstance(row.default_value, tuple) else row.default_value
            properties[name] = {"anyOf": [value, {"type": "array"}, {"type": "object", "required": ["type"]}, {"const": "SEARCH"}]}
        required = [n for n, r in cls.default_config(accelerator_spec).items() if r.required]
        return {"title": cls.__name__, "type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def run(self, model: ModelHandler, output_model_path: Path) -> ModelHandler:
        """Check the input's format and opset, do the work, and return a handler of files in `output_model_path`.

        Raises `PassError` when the model is not what the contract accepts.
        """
        who = type(self).__name__
        if model.format != self.contract.accepts:
            raise PassError(who, f"takes a model in {self.contract.accepts} format", model.format, "Put the passes in order.")
        opset = getattr(model, "opset", 0)
        if opset and opset < self.contract.min_opset:
            raise PassError(who, f"needs opset {self.contract.min_opset} or later", f"opset {opset}", "Convert the model to a later opset first.")
        result = self._run_for_config(model, self.config, output_model_path)
        if result.format != self.contract.returns:
            raise PassError(who, f"promises a model in {self.contract.returns} format", result.format, "This is a mistake in the pass.")
        return result

    def object(self, name: str) -> Any:
        """Return the object that an OBJECT parameter holds or names: `function` (user script) or `script.py:function`."""
        value = self.config.get(name)
        if not isinstance(value, str):
            return value
        script, _, attribute = value.rpartition(":")
        path = Path(script) if script else self.user_script
        if path is None:
            raise PassConfigError(type(self).__name__, f"{name} must be script.py:name, or a user script must be set", repr(value))
        return load_object(path, attribute, who=type(self).__name__)


_MISSING = object()


def _parents(parameter: object) -> tuple[str, ...]:
    return parameter.parents if isinstance(parameter, Conditional | ConditionalDefault) else ()


def _shown(values: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{n}={values[n]!r}" if n in values else f"{n} inactive" for n in names)


def _values_in(parameter: object) -> list[Any]:
    """All values a parameter or default can take, sentinels left out."""
    if parameter is None or parameter is INVALID or parameter is INACTIVE:
        return []
    if isinstance(parameter, Categorical):
        return [v for v in parameter.values if v is not INACTIVE and v is not INVALID]
    if isinstance(parameter, Conditional | ConditionalDefault):
        found: list[Any] = []
        for branch in [*parameter.support.values(), parameter.default]:
            found += _values_in(branch)
        return found
    return [parameter]


def _fits_exactly_str(row: PassConfigParam) -> bool:
    return row.type_ is str and row.search_defaults is None


def _fits(value: Any, row: PassConfigParam) -> bool:
    if value is None:
        return not row.required or _is_of_type(None, row.type_)
    if row.category is ParamCategory.OBJECT and isinstance(value, str):
        return True
    if row.category in (ParamCategory.PATH, ParamCategory.DATA):
        return isinstance(value, str | Path)
    return _is_of_type(value, row.type_)


def _is_of_type(value: Any, type_: Any) -> bool:
    """Type check by the rules of the table: `True` is no int, an int is a fine float, a tuple is a fine list."""
    if type_ is Any or type_ is object:
        return True
    origin = get_origin(type_)
    if origin is Union or str(origin) == "<class 'types.UnionType'>":
        return any(_is_of_type(value, t) for t in get_args(type_))
    if str(origin) == "typing.Literal":
        return any(same(value, v) for v in get_args(type_))
    if type_ is None or type_ is type(None):
        return value is None
    if origin in (list, tuple) or type_ in (list, tuple):
        inner = [t for t in get_args(type_) if t is not Ellipsis]
        return isinstance(value, list | tuple) and all(any(_is_of_type(v, t) for t in inner) if inner else True for v in value)
    if origin is dict or type_ is dict:
        return isinstance(value, Mapping)
    if callable(value) and (str(origin).endswith("Callable'>") or "Callable" in str(type_)):
        return True
    if inspect.isclass(origin):
        return isinstance(value, origin)
    if not inspect.isclass(type_):
        return callable(value) if "Callable" in str(type_) else False
    if isinstance(value, bool):
        return type_ is bool
    if type_ is float:
        return isinstance(value, int | float)
    return isinstance(value, type_)


def _type_name(type_: Any) -> str:
    return getattr(type_, "__name__", None) if inspect.isclass(type_) and not get_args(type_) else str(type_).replace("typing.", "")  # type: ignore[return-value] # a class has a name


def _json_type(type_: Any) -> dict[str, Any]:
    origin = get_origin(type_)
    if origin is Union or str(origin) == "<class 'types.UnionType'>":
        return {"anyOf": [_json_type(t) for t in get_args(type_)]}
    if str(origin) == "typing.Literal":
        return {"enum": list(get_args(type_))}
    if origin in (list, tuple) or type_ in (list, tuple):
        return {"type": "array"}
    names = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string", dict: "object", type(None): "null", None: "null"}
    return {"type": names[type_]} if type_ in names else {}
