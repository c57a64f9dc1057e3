"""From a sweep's chain to a search space, and from a point of it to the passes to run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.capabilities import capabilities_of
from autotune.chain_rules import Upgrade
from autotune.config import LoadedSweep, SlotSection, script_of
from autotune.data import RANDOM
from autotune.errors import ConfigError, SpaceError, nearest
from autotune.foresight import Place
from autotune.model import ONNX, PYTORCH, USER_MODULE, load_script
from autotune.pass_rules import CPU, Context
from autotune.passes.base import SEARCH, ParamCategory, Pass
from autotune.passes.registry import get_pass, pass_names, script_of_pass
from autotune.rules import Finding, Judge, check_waivers
from autotune.search_spaces.diagram import ABSENT
from autotune.search_spaces.parameters import Categorical, Conditional, ConditionalDefault, Parameter, order_parents_first, same
from autotune.search_spaces.space import Alternative, Point, Slot, Space, compile_space, point_key, walk
from autotune.target import Target, surroundings

UPGRADE = "OnnxOpsetUpgrade"
QUANTIZED_OPERATORS = frozenset(
    {"QuantizeLinear", "DequantizeLinear", "QLinearConv", "QLinearMatMul", "MatMulInteger", "ConvInteger", "DynamicQuantizeLinear"}
)


@dataclass(frozen=True)
class Step:
    """One pass of a chain with its full config. `inserted` says why it is there, where no slot of the sweep asks for it."""

    slot: str
    pass_name: str
    config: Mapping[str, Any]
    inserted: str = ""


@dataclass(frozen=True)
class InputFacts:
    """What validation needs to know of the input model."""

    format: str = ONNX
    opset: int = 0
    operators: Mapping[str, int] = field(default_factory=dict)

    @property
    def quantized(self) -> bool:
        return bool(QUANTIZED_OPERATORS & set(self.operators))


class Pipeline:
    """A sweep's chain, compiled: its space, its rules, and the way from a point to passes."""

    def __init__(self, sweep: LoadedSweep, facts: InputFacts) -> None:
        """Compile the chain. Raises `ConfigError` (unknown passes and parameters, bad values) or `SpaceError` (nothing valid)."""
        self.sweep = sweep
        self.target: Target = sweep.target
        self.facts = facts
        self.data = {
            role: name if role == "calibration" and name == RANDOM else str(sweep.path(name))
            for role, name in (("calibration", sweep.config.data.calibration), ("train", sweep.config.data.train))
            if name is not None
        }
        if sweep.config.script is not None:
            with sweep.at("script"):
                load_script(sweep.path(sweep.config.script), who="script")  # it may register passes of its own
        self.classes: dict[str, type[Pass]] = {}
        self._user: dict[tuple[str, str], dict[str, Any]] = {}
        self._defaults: dict[str, Any] = {}
        slots = [self._slot(section, number) for number, section in enumerate(sweep.config.chain)]
        self.slots = tuple(s.name for s in slots)
        if sweep.config.validation.upgrade_opset:
            self.classes.setdefault(UPGRADE, get_pass(UPGRADE))
        self._compiled = tuple(slots)
        self.judge = self._judge(slots)
        with sweep.at("chain"):
            first = [{}, dict.fromkeys(self.slots), *sweep.config.search.start]
            self.space: Space = compile_space(slots, rules=self.judge.rules, keep=[self._choose(wanted) for wanted in first])
        self.findings: tuple[Finding, ...] = self.judge.findings(self.space.invalid, self.space.unreachable)

    # ------------------------------------------------------------------ compiling

    def _slot(self, section: SlotSection, position: int) -> Slot:
        """Compile the slot at this position of the chain."""
        alternatives = []
        for number, choice in enumerate(section.choices):
            place = ("chain", position, *(("any_of", number) if section.any_of else ()))
            with self.sweep.at(*place, "pass"):
                pass_class = get_pass(choice.pass_)
                self._refuse_other_scripts(pass_class)
            name = pass_class.__name__
            self.classes[name] = pass_class
            with self.sweep.at(*place, "params"):
                user = self._user_values(pass_class, choice.params)
                self._user[section.name, name] = user
                alternatives.append(Alternative(name, self._variables(section.name, pass_class, user), written=_written(user)))
        return Slot(section.name, tuple(alternatives), optional=section.optional)

    def _refuse_other_scripts(self, pass_class: type[Pass]) -> None:
        """A pass of the user's own comes from the file that `script` names, since the processes of trials load no other."""
        if not pass_class.__module__.startswith(USER_MODULE):
            return
        config, name = self.sweep.config, pass_class.__name__
        named = (config.script, config.model.script, script_of(config.metric), script_of(config.measure.measurer or ""))
        found = script_of_pass(name, [self.sweep.path(script) for script in named if script])
        if found is None:  # from a script of another sweep in this process
            raise ConfigError("passes", "a pass must be a known name", repr(name), nearest(name, [n for n in pass_names() if n != name]))
        if config.script is None or found != self.sweep.path(config.script).resolve():
            must = "passes of one's own must be in the file that `script` names, which every trial loads"
            raise ConfigError("passes", must, f"{name} in {found}", f"Write script: {found.name}, or move the class there.")

    def _user_values(self, pass_class: type[Pass], params: Mapping[str, Any]) -> dict[str, Any]:
        """The user's values, paths made absolute, callables made names (a child process fetches them by name)."""
        table = pass_class.default_config(self.target.accelerator)
        values: dict[str, Any] = {}
        for name, given in params.items():
            category = table[name].category if name in table else ParamCategory.NONE
            if isinstance(given, str) and given == "SEARCH":
                values[name] = SEARCH
            elif given == RANDOM and pass_class.contract.data.get(name) == "calibration":
                values[name] = given
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
        watched = {p for parameter in parameters.values() for p in _parents_of(parameter)}
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

    def _judge(self, slots: list[Slot]) -> Judge:
        """The rules of this chain on this target. Raises `ConfigError` for rules to waive that are unknown or critical."""
        with self.sweep.at("validation", "waive"):
            waived = check_waivers(self.sweep.config.validation.waive)
        here = surroundings() if self.target.execution_provider == CPU else None
        context = Context(
            target=self.target, capabilities=capabilities_of(self.target.execution_provider), format=self.facts.format, opset=self.facts.opset,
            quantized=self.facts.quantized, machine=here.platform.rpartition(" ")[2] if here else "",
            cpu_flags=frozenset(here.cpu_flags) if here else frozenset(), upgrade_opset=self.sweep.config.validation.upgrade_opset,
        )  # fmt: skip
        places = {(slot.name, a.name): self._place(slot.name, a) for slot in slots for a in slot.alternatives}
        return Judge(slots, places, context, waived)

    def _place(self, slot: str, alternative: Alternative) -> Place:
        pass_class = self.classes[alternative.name]
        user = self._user[slot, alternative.name]
        data = pass_class.contract.data
        return Place(
            slot, pass_class, alternative.parameters,
            filled={parameter: self.data[role] for parameter, role in data.items() if role in self.data},
            roles=frozenset(role for parameter, role in data.items() if role in self.data or user.get(parameter) is not None),
            random=frozenset(role for parameter, role in data.items() if user.get(parameter, self.data.get(role)) == RANDOM),
        )  # fmt: skip

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

    def given(self, slot: str, pass_name: str) -> Mapping[str, Any]:
        """What fixes or widens a pass's parameters here: the user's values, and the target's number of threads."""
        return self._user[slot, pass_name]

    def first_points(self) -> list[tuple[Point, str]]:
        """Points to try before any sampler has a say, each once, with their origin: default, untouched, start.

        The untouched model is the empty point in a space that has no such point.
        """
        untouched = self.untouched_point()
        wanted = [(self.default_point(), "default"), ({} if untouched is None else untouched, "untouched")]
        if untouched is not None and point_key(untouched) == point_key(wanted[0][0]):
            wanted.pop(0)
        wanted += [(point, "start") for point in self.start_points()]
        seen: dict[str, tuple[Point, str]] = {}
        for point, origin in wanted:
            seen.setdefault(point_key(point), (point, origin))
        return list(seen.values())

    def start_points(self) -> list[Point]:
        """The user's starting points, completed by defaults. Raises `ConfigError` for names or values that the space doesn't have."""
        points = []
        for number, part in enumerate(self.sweep.config.search.start):
            with self.sweep.at("search", "start", number):
                who = f"search.start.{number}"
                self._check_names(who, part)
                point = self._completed(part)
                if point is None:
                    raise ConfigError(who, "a starting point must be one that the space holds", self._why_not(part), "Change it, or leave it out.")
                refused = self.refusal(point)
                if refused is not None:
                    raise ConfigError(who, "a starting point must be one that no rule refuses", f"{refused.rule}: {refused.message}")
            points.append(point)
        return points

    def refusal(self, point: Mapping[str, Any]) -> Finding | None:
        """Judge a point by every rule, those included that could not be judged when the space was compiled; None when nothing is wrong."""
        return self.judge.refusal([(slot, name, values) for slot, name, values in self._given(point)])

    def _completed(self, part: Mapping[str, Any]) -> Point | None:
        """The valid point with all these values that is nearest to the defaults elsewhere; None when there is none."""
        layers, steps = self.space.diagram.layers, self.space.steps
        wanted = {name: self.space.choice_index(name, value) for name, value in part.items()}
        turns = Counter(step.name for step in steps)  # alternatives that share a parameter's name have a turn each, and one is active

        def fits(name: str, choice: int) -> bool:
            return name not in wanted or choice == wanted[name] or (choice == ABSENT and turns[name] > 1)

        open_: list[list[bool]] = [[]]
        for step, layer in zip(reversed(steps), reversed(layers), strict=True):
            after = open_[-1]
            open_.append([any(fits(step.name, c) and (not after or after[following]) for c, following, _ in edges) for edges in layer])
        open_.reverse()
        pick, point, state = self._choose(part), {}, 0
        for turn, step in enumerate(steps):
            after = open_[turn + 1]
            edges = {c: following for c, following, _ in layers[turn][state] if fits(step.name, c) and (not after or after[following])}
            if not edges:
                return None
            chosen = next(iter(edges))
            if chosen != ABSENT:
                choices = self.space.choices(step.name)
                chosen = self.space.choice_index(step.name, pick(step.name, tuple(choices[c] for c in edges)))
                point[step.name] = choices[chosen]
            state = edges[chosen]
        return point if set(part) <= set(point) else None

    def _why_not(self, part: Mapping[str, Any]) -> str:
        """What stands against these values: the condition or the rule, in words."""
        values: dict[str, Any] = {}
        for slot in self._compiled:
            values[slot.name] = part[slot.name] if slot.name in part else next((a.name for a in slot.alternatives if _speaks_of(part, slot, a)), None)
            alternative = next((a for a in slot.alternatives if a.name == values[slot.name]), None)
            if alternative is None:
                continue
            parents = {n: tuple(p for p in _parents_of(q) if p in alternative.parameters) for n, q in alternative.parameters.items()}
            for name in order_parents_first(parents, who=alternative.name):
                full = f"{slot.name}.{name}"
                branch = _branch(alternative.parameters[name], {**values, **_own(values, slot.name)})
                if not isinstance(branch, Categorical):
                    if full in part:
                        seen = {**values, **_own(values, slot.name)}
                        decided = ", ".join(f"{p}={seen[p]!r}" for p in _parents_of(alternative.parameters[name]) if p in seen)
                        return f"{full}={part[full]!r}, which plays no part with {decided}"
                    continue
                value = part[full] if full in part else self._default_of(full, values)
                if full in part and not any(same(value, v) for v in branch.values):
                    return f"{full}={value!r}, where only {', '.join(map(repr, branch.values))} can be had"
                values[full] = next((v for v in branch.values if same(v, value)), branch.values[0])
        for name, value in part.items():
            if name not in values:
                return f"{name}={value!r}, which plays no part in it"
        refused = self.refusal(values)
        return f"{refused.rule}: {refused.message}" if refused else "values that can't be had together"

    def _check_names(self, who: str, part: Mapping[str, Any]) -> None:
        for name, value in part.items():
            if name not in self.space.variables:
                raise ConfigError(who, "names must be variables of the space", repr(name), nearest(name, self.space.variables))
            if not any(same(value, c) for c in self.space.choices(name)):
                raise ConfigError(who, f"{name} must be one of {', '.join(map(repr, self.space.choices(name)))}", repr(value))

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
        """The passes of a point in order, each with its complete config (data files filled in).

        Where the sweep allows it, conversions to a later opset stand before the passes that need them; points that need none have none.
        """
        asked = [Step(slot, name, self.classes[name].resolve(self.target.accelerator, given)) for slot, name, given in self._given(point)]
        needed = {u.slot: u for u in self.judge.upgrades([(s.slot, s.pass_name, s.config) for s in asked])}
        return [step for s in asked for step in ([self._upgrade(needed[s.slot]), s] if s.slot in needed else [s])]

    def _upgrade(self, needed: Upgrade) -> Step:
        """The conversion to a later opset, outputs compared on the calibration data where there are any."""
        given = {parameter: self.data[role] for parameter, role in self.classes[UPGRADE].contract.data.items() if role in self.data}
        config = self.classes[UPGRADE].resolve(self.target.accelerator, {**given, "target_opset": needed.target})
        return Step(f"{needed.slot}-opset", UPGRADE, config, inserted=f"{needed.why}; the model has {needed.present}")

    def upgraded(self) -> list[dict[str, Any]]:
        """For each slot that conversions to a later opset are inserted before: how many points have one there, why, and one of them.

        A dict holds slot, points (None where not all points can be counted), why and point (None where none is at hand).
        """
        found: list[dict[str, Any]] = []
        rules, left = list(self.judge.rules), self.space.valid
        examples = [self.default_point(), *self.start_points()]
        for slot in dict.fromkeys(slot for slot, _, _ in self.judge.upgraded):
            here = [(words, rule) for s, words, rule in self.judge.upgraded if s == slot]
            rules += [rule for _, rule in here]
            refused: list[Point] = []
            try:  # the points that the slot's floors would refuse are those that are converted
                without = compile_space(self._compiled, rules=rules)
            except SpaceError:  # nothing is left: every point is converted, here or before
                kept = 0
            else:
                kept = without.valid
                refused = [dict(p) for rule_id, p in without.examples.items() if rule_id == here[0][1].id and self.space.contains(p)]
            if left > kept:
                example = next((p for p in [*examples, *refused] if f"{slot}-opset" in {s.slot for s in self.steps(p)}), None)
                points = left - kept if self.space.exact else None
                found.append({"slot": slot, "points": points, "why": " or ".join(words for words, _ in here), "point": example})
            left = kept
        return found

    def _given(self, point: Mapping[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
        """Slot, pass and the values given to it, data files included, for each pass of a point."""
        found = []
        for slot in self.slots:
            name = point.get(slot)
            if name is not None:
                found.append((slot, name, {**self.judge.places[slot, name].filled, **_own(point, slot)}))
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


def _written(user: Mapping[str, Any]) -> frozenset[str]:
    """Parameters whose condition the user wrote: each of its rows must be able to occur."""
    return frozenset(n for n, v in user.items() if isinstance(v, Conditional) or (isinstance(v, Mapping) and v.get("type") == "Conditional"))


def _own(point: Mapping[str, Any], slot: str) -> dict[str, Any]:
    """The values of a slot's parameters, by their plain names."""
    return {name.partition(".")[2]: value for name, value in point.items() if name.startswith(f"{slot}.")}


def _speaks_of(part: Mapping[str, Any], slot: Slot, alternative: Alternative) -> bool:
    """Whether an alternative has all the parameters of its slot that a part of a point names."""
    return set(_own(part, slot.name)) <= set(alternative.parameters)


def _branch(parameter: Parameter, values: Mapping[str, Any]) -> object:
    return parameter.branch(values) if isinstance(parameter, Conditional) else parameter


def _parents_of(parameter: Parameter) -> tuple[str, ...]:
    """Parents of a condition and of the conditions nested in its branches; none for a plain choice."""
    return parameter.all_parents if isinstance(parameter, Conditional) else ()


__all__ = ["InputFacts", "Pipeline", "Step"]
