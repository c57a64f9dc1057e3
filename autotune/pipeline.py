"""From a sweep's chain to a search space, and from a point of it to the passes to run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from autotune.config import LoadedSweep, SlotSection
from autotune.errors import ConfigError, PassConfigError, nearest
from autotune.model import ONNX, PYTORCH, load_script
from autotune.passes.base import SEARCH, ParamCategory, Pass
from autotune.passes.registry import get_pass
from autotune.search_spaces.parameters import Categorical, Conditional, ConditionalDefault, Parameter, same
from autotune.search_spaces.space import Alternative, Point, Rule, Slot, Space, compile_space, walk
from autotune.target import AcceleratorSpec, Target

QUANTIZED_OPERATORS = frozenset(
    {"QuantizeLinear", "DequantizeLinear", "QLinearConv", "QLinearMatMul", "MatMulInteger", "ConvInteger", "DynamicQuantizeLinear"}
)


@dataclass(frozen=True)
class Step:
    """One pass of a chain with its full config."""

    slot: str
    pass_name: str
    config: Mapping[str, Any]


@dataclass(frozen=True)
class InputFacts:
    """What validation needs to know of the input model."""

    format: str = ONNX
    opset: int = 0
    operators: Mapping[str, int] = field(default_factory=dict)

    @property
    def quantized(self) -> bool:
        return bool(QUANTIZED_OPERATORS & set(self.operators))


@dataclass(frozen=True)
class Formats:
    """Rule `order`: each pass gets the format it takes, a quantized model is not quantized again, and an ONNX model comes out."""

    slots: tuple[str, ...]
    formats: Mapping[str, tuple[str, str]]  # pass -> (accepts, returns)
    quantizers: frozenset[str]  # passes that take float models only, and leave quantized ones
    start: str

    def __call__(self, values: Mapping[str, Any]) -> bool:
        current, quantized = self.start, False
        for slot in self.slots:
            name = values.get(slot)
            if name is None:
                continue
            accepts, current_after = self.formats[name]
            if accepts != current or (quantized and name in self.quantizers):
                return False
            current, quantized = current_after, quantized or name in self.quantizers
        return current == ONNX


@dataclass(frozen=True)
class Refused:
    """A rule that refuses one alternative, whatever its parameters."""

    slot: str
    pass_name: str

    def __call__(self, values: Mapping[str, Any]) -> bool:
        return values.get(self.slot) != self.pass_name


@dataclass(frozen=True)
class ConfigRule:
    """A rule on a pass's whole config. `kind`: `pass-config` (what it refuses), `data-needed` or `opset-floor`.

    `roles` are the data there are, `opset` the model's (0: not known, or the pass takes no ONNX).
    """

    kind: str
    slot: str
    pass_name: str
    pass_class: type[Pass]
    accelerator: AcceleratorSpec
    roles: frozenset[str]
    opset: int

    def __call__(self, values: Mapping[str, Any]) -> bool:
        if values.get(self.slot) != self.pass_name:
            return True
        prefix = f"{self.slot}."
        try:
            config = self.pass_class.resolve(self.accelerator, {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)})
        except PassConfigError:
            return self.kind != "pass-config"
        if self.kind == "data-needed":
            return self.pass_class.needed_data(config) <= self.roles
        if self.kind == "opset-floor" and self.opset:
            return self.pass_class.needed_opset(config) <= self.opset
        return True


class Pipeline:
    """A sweep's chain, compiled: its space, its rules, and the way from a point to passes."""

    def __init__(self, sweep: LoadedSweep, facts: InputFacts) -> None:
        """Compile the chain. Raises `ConfigError` (unknown passes and parameters, bad values) or `SpaceError` (nothing valid)."""
        self.sweep = sweep
        self.target: Target = sweep.target
        self.facts = facts
        self.data = {
            role: str(sweep.path(name))
            for role, name in (("calibration", sweep.config.data.calibration), ("train", sweep.config.data.train))
            if name is not None
        }
        if sweep.config.script is not None:
            load_script(sweep.path(sweep.config.script), who="script")  # it may register passes of its own
        self.classes: dict[str, type[Pass]] = {}
        self._user: dict[tuple[str, str], dict[str, Any]] = {}
        self._defaults: dict[str, Any] = {}
        slots = [self._slot(section) for section in sweep.config.chain]
        self.slots = tuple(s.name for s in slots)
        self.rules = tuple(self._rules(slots))
        self.space: Space = compile_space(slots, rules=self.rules)

    # ------------------------------------------------------------------ compiling

    def _slot(self, section: SlotSection) -> Slot:
        alternatives = []
        for choice in section.choices:
            pass_class = get_pass(choice.pass_)
            name = pass_class.__name__
            self.classes[name] = pass_class
            user = self._user_values(pass_class, choice.params)
            self._user[section.name, name] = user
            alternatives.append(Alternative(name, self._variables(section.name, pass_class, user), written=_written(user)))
        return Slot(section.name, tuple(alternatives), optional=section.optional)

    def _user_values(self, pass_class: type[Pass], params: Mapping[str, Any]) -> dict[str, Any]:
        """The user's values, paths made absolute, callables made names (a child process fetches them by name)."""
        table = pass_class.default_config(self.target.accelerator)
        values: dict[str, Any] = {}
        for name, given in params.items():
            category = table[name].category if name in table else ParamCategory.NONE
            if isinstance(given, str) and given == "SEARCH":
                values[name] = SEARCH
            elif isinstance(given, str) and category in (ParamCategory.PATH, ParamCategory.DATA):
                values[name] = str(self._existing(f"{pass_class.__name__}.{name}", given))
            elif category is ParamCategory.OBJECT:
                values[name] = self._named(pass_class, name, given)
            else:
                values[name] = given
        if self.target.threads_fixed and pass_class.contract.session_only and "intra_op_num_threads" in table:
            values.setdefault("intra_op_num_threads", self.target.run_threads)  # the number named for the target holds here too
        return values

    def _existing(self, who: str, name: str) -> Path:
        path = self.sweep.path(name)
        if not path.exists():
            raise ConfigError(who, "the path must exist", name, nearest(path.name, [p.name for p in path.parent.glob("*")]))
        return path

    def _named(self, pass_class: type[Pass], name: str, value: Any) -> Any:
        if isinstance(value, str):
            script, colon, attribute = value.rpartition(":")
            return f"{self.sweep.path(script)}:{attribute}" if colon else value
        if callable(value):
            code = getattr(value, "__code__", None)
            qualified = getattr(value, "__qualname__", "")
            if code is None or "<" in qualified or "." in qualified:
                raise ConfigError(
                    f"{pass_class.__name__}.{name}", "an object must be a function at the top of a file, since trials run in other processes",
                    repr(value), "Move it to the top level, or give it as 'script.py:function'.",
                )  # fmt: skip
            return f"{Path(code.co_filename).resolve()}:{qualified}"
        return value

    def _variables(self, slot: str, pass_class: type[Pass], user: Mapping[str, Any]) -> dict[str, Parameter]:
        """Parameters that somebody searches, fixes or looks at; the other rows keep their defaults and are no variables."""
        accelerator = self.target.accelerator
        table = pass_class.default_config(accelerator)
        parameters = pass_class.search_space(accelerator, user, search=self.sweep.config.search.enabled)
        watched = {p for parameter in parameters.values() if isinstance(parameter, Conditional) for p in _parents_of(parameter)}
        for name, row in table.items():
            self._defaults[f"{slot}.{name}"] = row.default_value
        return {
            name: parameter
            for name, parameter in parameters.items()
            if name in user
            or name in watched
            or isinstance(parameter, Conditional)
            or len(parameter.values) > 1
            or not same(parameter.values[0], table[name].default_value)
        }

    def _rules(self, slots: list[Slot]) -> list[Rule]:
        formats = {name: (c.contract.accepts, c.contract.returns) for name, c in self.classes.items()}
        quantizers = frozenset(name for name, c in self.classes.items() if c.contract.refuses_quantized_input)
        order = Formats(tuple(s.name for s in slots), formats, quantizers, self.facts.format)
        words = f"passes must follow one another in format, from {self.facts.format} to {ONNX}, and quantize once"
        rules = [Rule("order", order.slots, order, words)]
        for slot in slots:
            for alternative in slot.alternatives:
                rules += self._rules_of(slot.name, alternative)
        return rules

    def _rules_of(self, slot: str, alternative: Alternative) -> list[Rule]:
        name = alternative.name
        contract = self.classes[name].contract
        ep = self.target.execution_provider
        found: list[Rule] = []

        def refuse(rule_id: str, message: str) -> None:
            found.append(Rule(rule_id, (slot,), Refused(slot, name), f"{name}: {message}"))

        if contract.execution_providers and ep not in contract.execution_providers:
            refuse("provider-mismatch", f"is for {', '.join(contract.execution_providers)}, the target is {ep}")
        if contract.accelerators and self.target.accelerator_type not in contract.accelerators:
            refuse("provider-mismatch", f"is for {', '.join(contract.accelerators)}, the target is {self.target.accelerator_type}")
        if contract.needs_gpu and self.target.accelerator_type != "gpu":
            refuse("gpu-only-method", f"needs a GPU, the target is {ep}")
        for package, extra in contract.packages.items():
            if importlib.util.find_spec(package) is None:
                refuse("missing-engine", f"needs the package {package}; install {extra}")
        if contract.refuses_quantized_input and self.facts.quantized:
            refuse("order", "the model is quantized already")
        found += self._config_rules(slot, alternative)
        return found

    def _config_rules(self, slot: str, alternative: Alternative) -> list[Rule]:
        """Rules that look at a pass's whole config: what it refuses together, the data it needs, the opset it needs.

        Left out for a pass with very many combinations: there a trial says it, with the same words.
        """
        pass_class = self.classes[alternative.name]
        names = [slot, *(f"{slot}.{p}" for p in alternative.parameters)]
        if prod(_choices_in(p) for p in alternative.parameters.values()) > MOST_CONFIGS_CHECKED:
            return []
        user = self._user[slot, alternative.name]
        roles = {role for parameter, role in pass_class.contract.data.items() if role in self.data or parameter in user}
        needs = sorted(set(pass_class.contract.data.values()) - roles)
        messages = {
            "pass-config": "these values don't go together",
            "data-needed": f"needs {' and '.join(needs)} data here; give {', '.join(f'data.{n}' for n in needs)}",
            "opset-floor": f"needs a later opset here than the model's {self.facts.opset}",
        }
        opset = self.facts.opset if self.facts.format == ONNX and pass_class.contract.accepts == ONNX else 0
        checks = [ConfigRule(kind, slot, alternative.name, pass_class, self.target.accelerator, frozenset(roles), opset) for kind in messages]
        return [Rule(c.kind, tuple(names), c, f"{alternative.name}: {messages[c.kind]}") for c in checks]

    # ------------------------------------------------------------------ points

    def default_point(self) -> Point:
        """Every slot filled with its first alternative, every parameter at its default (the nearest valid choice where that is none)."""
        return walk(self.space, self._choose({}))

    def untouched_point(self) -> Point | None:
        """The point that leaves every optional slot out, or None when a slot that changes the model must be filled."""
        wanted: dict[str, Any] = dict.fromkeys(self.slots)
        point = walk(self.space, self._choose(wanted))
        steps = [s for s in self.steps(point) if not self._harmless(s)]
        return point if not steps else None

    def _harmless(self, step: Step) -> bool:
        """Conversion makes the baseline of a torch model, and session tuning at its defaults changes nothing."""
        contract = self.classes[step.pass_name].contract
        return (contract.accepts == PYTORCH and contract.returns == ONNX) or contract.session_only

    def start_points(self) -> list[Point]:
        """The user's starting points, completed by defaults. Raises `ConfigError` for names or values that the space doesn't have."""
        points = []
        for number, part in enumerate(self.sweep.config.search.start):
            for name, value in part.items():
                if name not in self.space.variables:
                    raise ConfigError(
                        f"search.start.{number}", "names must be variables of the space", repr(name), nearest(name, self.space.variables)
                    )
                if not any(same(value, c) for c in self.space.choices(name)):
                    shown = ", ".join(map(repr, self.space.choices(name)))
                    raise ConfigError(f"search.start.{number}", f"{name} must be one of {shown}", repr(value))
            points.append(walk(self.space, self._choose(part)))
        return points

    def _choose(self, wanted: Mapping[str, Any]) -> Callable[[str, tuple[Any, ...]], Any]:
        taken: dict[str, Any] = {}

        def pick(name: str, choices: tuple[Any, ...]) -> Any:
            if name in wanted:
                value = wanted[name]
            elif name in self.slots:  # a pass that is there is used
                value = next((c for c in choices if c is not None), None)
            else:
                value = self._default_of(name, taken)
            chosen = next((c for c in choices if same(c, value)), choices[0])
            taken[name] = chosen
            return chosen

        return pick

    def _default_of(self, name: str, taken: Mapping[str, Any]) -> Any:
        default = self._defaults.get(name)
        if isinstance(default, ConditionalDefault):
            slot = name.partition(".")[0]
            own = {k.partition(".")[2]: v for k, v in taken.items() if k.startswith(f"{slot}.")}
            missing = {p: self._defaults.get(f"{slot}.{p}") for p in default.parents if p not in own}
            return default.choose({**missing, **own})
        return default

    def steps(self, point: Mapping[str, Any]) -> list[Step]:
        """The passes of a point in order, each with its complete config (data files filled in)."""
        found = []
        for slot in self.slots:
            name = point.get(slot)
            if name is None:
                continue
            pass_class = self.classes[name]
            given = {k.partition(".")[2]: v for k, v in point.items() if k.startswith(f"{slot}.")}
            table = pass_class.default_config(self.target.accelerator)
            for parameter, role in pass_class.contract.data.items():
                if parameter in table and parameter not in given and role in self.data:
                    given[parameter] = self.data[role]
            found.append(Step(slot, name, pass_class.resolve(self.target.accelerator, given)))
        return found

    def changed_from_default(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """The searched values of a point that differ from its passes' defaults: what makes it special, for people."""
        taken: dict[str, Any] = {}
        changed = {}
        for name, value in point.items():
            searched = "." in name and len(self.space.choices(name)) > 1
            if searched and not same(value, self._default_of(name, taken)):
                changed[name] = value
            taken[name] = value
        return changed


MOST_CONFIGS_CHECKED = 5_000


def _written(user: Mapping[str, Any]) -> frozenset[str]:
    """Parameters whose condition the user wrote: each of its rows must be able to occur."""
    return frozenset(n for n, v in user.items() if isinstance(v, Conditional) or (isinstance(v, Mapping) and v.get("type") == "Conditional"))


def _choices_in(parameter: Parameter) -> int:
    """An upper bound on a parameter's choices over all branches."""
    if isinstance(parameter, Categorical):
        return len(parameter.values)
    return max([1, *(_choices_in(b) for b in [*parameter.support.values(), parameter.default] if isinstance(b, Categorical | Conditional))])


def _parents_of(parameter: Conditional) -> set[str]:
    """Parents of a condition and of the conditions nested in its branches."""
    found = set(parameter.parents)
    for branch in [*parameter.support.values(), parameter.default]:
        if isinstance(branch, Conditional):
            found |= _parents_of(branch)
    return found


__all__ = ["ConfigRule", "Formats", "InputFacts", "Pipeline", "Refused", "Step"]
