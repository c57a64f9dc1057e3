"""What a chain of passes must keep to on a target: rules as data, judged before the first trial.

A pass tells what it refuses, needs and makes (`validate_config`, `needed_data`, `needed_opset`, `traits`); `autotune.foresight` finds out which
parameters decide. So a rule looks at few variables, and prunes exactly what it refuses. What stays open, because a pass reads too much at
once, is judged when a trial has its point, which then ends as pruned.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from autotune.capabilities import Answer, Capabilities, Fact
from autotune.errors import ConfigError, nearest
from autotune.foresight import NEVER, UNCHECKED, Mark, Place, Tree, answer, answers, ask, both, cases, hooks_of, leaves, mapped, names_in
from autotune.model import ONNX
from autotune.passes.base import ModelTraits, Pass
from autotune.search_spaces.parameters import INACTIVE, value_key
from autotune.search_spaces.space import Rule, Slot
from autotune.target import AcceleratorSpec, Target

MOST_CASES = 10_000  # combinations of values that one rule tells apart

PER_CHANNEL_OPSET, QDQ_OPSET, FLOAT8_OPSET, SIXTEEN_BIT_OPSET, INT4_OPSET = 13, 10, 19, 21, 21
DOT_PRODUCT_FLAGS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"})
GPU_METHODS = frozenset({"awq", "gptq"})
GPU_PROVIDERS = frozenset({"CUDAExecutionProvider", "TensorrtExecutionProvider", "ROCMExecutionProvider", "MIGraphXExecutionProvider"})
EXCLUSIONS = (("awq", "pruning"),)
QNN, DIRECTML, CPU = "QNNExecutionProvider", "DmlExecutionProvider", "CPUExecutionProvider"


@dataclass(frozen=True)
class RuleDefinition:
    """A rule as it is told to people. `critical`: why it can't be waived; empty for one that can be. Warnings tell, and refuse nothing."""

    id: str
    severity: Literal["error", "warning"]
    refuses: str
    mend: str
    critical: str = ""

    @property
    def waivable(self) -> bool:
        return not self.critical


RULES: Mapping[str, RuleDefinition] = {
    rule.id: rule
    for rule in (
        RuleDefinition(
            "order", "error", "passes that don't follow one another in format, a chain that doesn't end in ONNX, quantizing a quantized model",
            "Put torch passes before the conversion and ONNX passes after it, and quantize once.", critical="such a chain can't run",
        ),
        RuleDefinition(
            "provider-mismatch", "error", "a pass for other execution providers or accelerators than the target's",
            "Leave the pass out, or choose another target.", critical="the pass itself refuses to run",
        ),
        RuleDefinition(
            "missing-engine", "error", "a pass whose package is not installed", "Install what is named.", critical="the pass can't run",
        ),
        RuleDefinition(
            "pass-config", "error", "values that a pass refuses together", "", critical="the pass itself refuses to run",
        ),
        RuleDefinition(
            "data-needed", "error", "static quantization, AWQ or SmoothQuant without calibration data, fine-tuning without training data",
            "Give the data; `data: {calibration: random}` takes random ones, with ranges and scores to match.", critical="the pass can't run",
        ),
        RuleDefinition(
            "opset-floor", "error",
            f"a pass or a data type below its opset: Q/DQ {QDQ_OPSET}, per channel {PER_CHANNEL_OPSET}, float8 Q/DQ {FLOAT8_OPSET}, "
            f"4-bit and 16-bit Q/DQ {INT4_OPSET}",
            "Convert the model to a later opset first.", critical="the operators don't exist there",
        ),
        RuleDefinition(
            "ep-unavailable", "error", "an execution provider that no session can be started on here",
            "Install the onnxruntime package that carries it, or choose another target.", critical="nothing could be measured",
        ),
        RuleDefinition(
            "method-exclusion", "error", "AWQ together with a pruning pass in one chain", "Keep one of the two.",
        ),
        RuleDefinition(
            "gpu-only-method", "error",
            "AWQ and GPTQ unless the target is CUDA, TensorRT, ROCm or MIGraphX (DirectML too for AWQ on ONNX); a pass that needs a GPU without one",
            "Choose a GPU target.",
        ),
        RuleDefinition(
            "qat-unsupported", "error", "quantization-aware training for QNN", "Quantize after training.",
        ),
        RuleDefinition(
            "qnn-limits", "error", "for QNN: anything but QDQ with symmetric quantization and power-of-two scales",
            "Use a quantizer that makes these.",
        ),
        RuleDefinition(
            "ep-limits", "error", "data types, formats and zero points that the target is known not to run (tables in autotune/providers)",
            "Choose what the target runs.",
        ),
        RuleDefinition(
            "slow-type", "warning", "data types and formats that the target is known to run slowly (the same tables)",
            "Expect no gain in speed, or choose others.",
        ),
        RuleDefinition(
            "no-int8-dot", "warning", "8 bits on a CPU without dot products of 8-bit numbers (VNNI, AMX, ARM's dot product)",
            "Expect little gain in speed; on x86 set reduce_range where accuracy suffers.",
        ),
        RuleDefinition(
            "random-calibration", "warning", "activation ranges from random data", "Give real examples before you believe a score.",
        ),
        RuleDefinition(
            "ep-retired", "warning", "an execution provider that ONNX Runtime has dropped", "Choose its successor.",
        ),
        RuleDefinition(
            "unreachable-row", "warning", "rows of a pass's own conditions that can't occur here, as their parents were narrowed",
            "Nothing needs to be done.",
        ),
        RuleDefinition(
            "checked-late", "warning", "configs that can't all be judged beforehand, as a pass reads too many parameters at once",
            "What rules refuse there ends as a pruned trial, without running.",
        ),
    )
}  # fmt: skip


def check_waivers(waive: Sequence[str]) -> frozenset[str]:
    """Return the ids of the rules that the user sets aside. Raises `ConfigError` for unknown and critical ones."""
    for rule_id in waive:
        if rule_id not in RULES:
            raise ConfigError("validation.waive", "rules to waive must be known", repr(rule_id), nearest(rule_id, RULES))
        if not RULES[rule_id].waivable:
            raise ConfigError(
                "validation.waive", "a critical rule can't be waived", f"{rule_id!r}: {RULES[rule_id].critical}", RULES[rule_id].mend
            )  # fmt: skip
    return frozenset(waive)


@dataclass(frozen=True)
class Finding:
    """A rule that concerns this chain on this target: what it refuses or warns of, or would if it were not waived."""

    rule: str
    severity: str
    message: str
    slot: str = ""
    pass_name: str = ""
    waived: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Context:
    """What rules look at besides the passes: the target, what it can run, this machine, the model as it comes.

    `opset` 0: not known. `machine` and `cpu_flags` are empty unless the models run on this machine's CPU.
    """

    target: Target
    capabilities: Capabilities
    format: str
    opset: int = 0
    quantized: bool = False
    machine: str = ""
    cpu_flags: frozenset[str] = frozenset()

    @property
    def accelerator(self) -> AcceleratorSpec:
        return self.target.accelerator


# ---------------------------------------------------------------------- rules on one pass


def _provider_mismatch(place: Place, _: object, context: Context) -> str:
    contract, target = place.pass_class.contract, context.target
    if contract.execution_providers and target.execution_provider not in contract.execution_providers:
        return f"is for {', '.join(contract.execution_providers)}, the target is {target.execution_provider}"
    if contract.accelerators and target.accelerator_type not in contract.accelerators:
        return f"is for {', '.join(contract.accelerators)}, the target is {target.accelerator_type}"
    return ""


def _missing_engine(place: Place, _: object, context: Context) -> str:
    missing = {package: extra for package, extra in place.pass_class.contract.packages.items() if importlib.util.find_spec(package) is None}
    return "; ".join(f"needs the package {package}: install {extra}" for package, extra in missing.items())


def _quantized_input(place: Place, _: object, context: Context) -> str:
    first = context.format == place.pass_class.contract.accepts == ONNX
    return "takes a float model, and the model is quantized already" if first and context.quantized and _float_only(place) else ""


def _float_only(place: Place) -> bool:
    return place.pass_class.contract.refuses_quantized_input


def _pass_config(place: Place, refused: str, context: Context) -> str:
    return refused.removeprefix(f"{place.name}: ")


def _data_needed(place: Place, needed: frozenset[str], context: Context) -> str:
    missing = sorted(needed - place.roles)
    return f"needs {' and '.join(missing)} data here: give {', '.join(f'data.{role}' for role in missing)}" if missing else ""


def _gpu_only(place: Place, traits: ModelTraits, context: Context) -> str:
    provider = context.target.execution_provider
    allowed = GPU_PROVIDERS | ({DIRECTML} if place.pass_class.contract.accepts == ONNX else set())
    for method in sorted(traits.methods & GPU_METHODS):
        if provider not in (allowed if method == "awq" else GPU_PROVIDERS):
            kernels = context.capabilities.method(method).answer is Answer.YES
            also = ", though it has kernels for the result" if kernels else ""
            return f"{method.upper()} is for GPUs, the target is {provider}{also}"
    return ""


def _needs_gpu(place: Place, _: object, context: Context) -> str:
    needs = place.pass_class.contract.needs_gpu and context.target.accelerator_type != "gpu"
    return f"needs a GPU, the target is {context.target.execution_provider}" if needs else ""


def _qat_unsupported(place: Place, traits: ModelTraits, context: Context) -> str:
    return "quantization-aware training is not for QNN" if "qat" in traits.methods and context.target.execution_provider == QNN else ""


def _qnn_limits(place: Place, traits: ModelTraits, context: Context) -> str:
    if context.target.execution_provider != QNN or not traits.quantized:
        return ""
    broken = []
    if traits.format not in ("", "qdq"):
        broken.append(f"QDQ only, not {traits.format}")
    if traits.symmetric_weights is False:
        broken.append("symmetric weights")
    if traits.symmetric_activations is False:
        broken.append("symmetric activations")
    if traits.power_of_two is False:
        broken.append("scales that are powers of two")
    return f"QNN takes {', '.join(broken)}" if broken else ""


def _because(fact: Fact) -> str:
    """What a table says of it, to be put behind the statement."""
    return f": {fact.note} ({fact.source})" if fact.note else f" ({fact.source})"


def _facts_on(traits: ModelTraits, capabilities: Capabilities) -> list[tuple[str, Fact]]:
    """What is known of the types and the format that a pass makes."""
    types = dict.fromkeys(t for t in (traits.weight_type, traits.activation_type) if t)
    format_ = [(f"the {traits.format} format", capabilities.format_(traits.format))] if traits.format else []
    return [*((t, capabilities.type_(t)) for t in types), *format_]


def _ep_limits(place: Place, traits: ModelTraits, context: Context) -> str:
    provider, known = context.target.execution_provider, context.capabilities
    broken = [f"{provider} does not run {what}{_because(fact)}" for what, fact in _facts_on(traits, known) if fact.answer is Answer.NO]
    if traits.quantized:
        offset = "uint" in traits.activation_type or "uint" in traits.weight_type or False in (traits.symmetric_activations, traits.symmetric_weights)
        demands = {
            "symmetric_weights": traits.symmetric_weights is False, "symmetric_activations": traits.symmetric_activations is False,
            "zero_point_zero": offset, "power_of_two": traits.power_of_two is False,
        }  # fmt: skip
        for demand, breaks in demands.items():
            if breaks and known.demands_(demand):
                broken.append(f"{provider} demands {DEMAND_WORDS[demand]}{_because(known.demands[demand])}")
    return "; ".join(dict.fromkeys(broken))


DEMAND_WORDS = {
    "symmetric_weights": "symmetric weights", "symmetric_activations": "symmetric activations", "zero_point_zero": "zero points of 0",
    "power_of_two": "scales that are powers of two",
}  # fmt: skip


def _slow_type(place: Place, traits: ModelTraits, context: Context) -> str:
    known = context.capabilities
    slow = [f"{what} is slow on {known.provider}{_because(fact)}" for what, fact in _facts_on(traits, known) if fact.answer is Answer.SLOW]
    for pair in known.slow_pairs:
        here = not pair.machine or pair.machine == context.machine
        if here and (pair.activation_type, pair.weight_type) == (traits.activation_type, traits.weight_type) and traits.quantized:
            slow += [f"{pair.note} ({pair.source})"] if not pair.formats or traits.format in pair.formats else []
    return "; ".join(dict.fromkeys(slow))


def _no_int8_dot(place: Place, traits: ModelTraits, context: Context) -> str:
    eight = {traits.weight_type, traits.activation_type} & {"int8", "uint8"}
    without = bool(context.machine) and not context.cpu_flags & DOT_PRODUCT_FLAGS
    return "this CPU has no dot products of 8-bit numbers" if traits.quantized and eight and without and traits.format != "weight_only" else ""


def _random_calibration(place: Place, needed: frozenset[str], context: Context) -> str:
    return "activation ranges come from random data" if needed & place.random else ""


@dataclass(frozen=True)
class _PassRule:
    """A rule judged on what one pass tells (`hook`: which of its answers), whatever the rest of the chain."""

    id: str
    hook: str
    breach: Callable[[Place, Any, Context], str]


_PASS_RULES = (
    _PassRule("provider-mismatch", "", _provider_mismatch),
    _PassRule("missing-engine", "", _missing_engine),
    _PassRule("order", "", _quantized_input),
    _PassRule("gpu-only-method", "", _needs_gpu),
    _PassRule("pass-config", "refuses", _pass_config),
    _PassRule("data-needed", "data", _data_needed),
    _PassRule("gpu-only-method", "traits", _gpu_only),
    _PassRule("qat-unsupported", "traits", _qat_unsupported),
    _PassRule("qnn-limits", "traits", _qnn_limits),
    _PassRule("ep-limits", "traits", _ep_limits),
    _PassRule("slow-type", "traits", _slow_type),
    _PassRule("no-int8-dot", "traits", _no_int8_dot),
    _PassRule("random-calibration", "data", _random_calibration),
)


@dataclass(frozen=True)
class Refusals:
    """Allows all but the listed combinations of a pass's variables; with no names, the pass itself is refused."""

    slot: str
    pass_name: str
    names: tuple[str, ...]
    refused: frozenset[tuple[Any, ...]]

    def __call__(self, values: Mapping[str, Any]) -> bool:
        if values.get(self.slot) != self.pass_name:
            return True
        return tuple(value_key(values.get(f"{self.slot}.{name}", INACTIVE)) for name in self.names) not in self.refused


# ---------------------------------------------------------------------- rules on the chain


@dataclass(frozen=True)
class Link:
    """One pass of a chain as the rules on chains see it. None: not found out, and then no rule refuses for it."""

    slot: str
    pass_class: type[Pass]
    quantized: bool | None = None
    methods: frozenset[str] | None = None
    needs_opset: int | None = None
    sets_opset: int | None = None


@dataclass(frozen=True)
class Order:
    """Each pass gets the format it takes, a quantized model is not quantized again, and an ONNX model comes out."""

    start: str

    def __call__(self, chain: Sequence[Link]) -> str:
        current, quantized = self.start, False
        for link in chain:
            contract = link.pass_class.contract
            if contract.accepts != current:
                return f"{link.pass_class.__name__} takes a model in {contract.accepts} format, and gets {current}"
            if quantized and contract.refuses_quantized_input:
                return f"{link.pass_class.__name__} gets a model that is quantized already"
            current, quantized = contract.returns, quantized or link.quantized is True
        return "" if current == ONNX else f"the chain ends with a model in {current} format"


@dataclass(frozen=True)
class Exclusions:
    """Methods that spoil each other are not in one chain."""

    def __call__(self, chain: Sequence[Link]) -> str:
        by = {method: link.pass_class.__name__ for link in chain for method in link.methods or ()}
        for one, other in EXCLUSIONS:
            if one in by and other in by:
                return f"{one.upper()} ({by[one]}) and {other} ({by[other]}) are in one chain"
        return ""


@dataclass(frozen=True)
class OpsetFloor:
    """The last pass of the chain given gets a model of the opset that it needs; `start` is the input model's, 0 where that is not known."""

    start: int

    def __call__(self, chain: Sequence[Link]) -> str:
        current = self.start
        for link in chain[:-1]:
            if link.sets_opset is None:
                return ""
            current = link.sets_opset or current
        last = chain[-1]
        needs = last.needs_opset or 0
        return f"{last.pass_class.__name__} needs opset {needs} here, and gets {current}" if current and needs > current else ""


@dataclass(frozen=True)
class ChainRule:
    """A rule on a chain as a space takes it: looks up what each pass tells at these values, then judges."""

    slots: tuple[str, ...]
    links: Mapping[tuple[str, str], tuple[type[Pass], Mapping[str, Tree]]]
    breach: Callable[[Sequence[Link]], str]
    only: tuple[str, str] = ("", "")  # (slot, pass): judged only while that is there

    def __call__(self, values: Mapping[str, Any]) -> bool:
        if self.only[0] and values.get(self.only[0]) != self.only[1]:
            return True
        chain = []
        for slot in self.slots:
            name = values.get(slot)
            if name is not None:
                pass_class, trees = self.links[slot, name]
                told = {what: answer(tree, slot, values) for what, tree in trees.items()}
                chain.append(Link(slot, pass_class, **{what: None if isinstance(a, Mark) else a for what, a in told.items()}))
        return not self.breach(chain)

    @property
    def names(self) -> tuple[str, ...]:
        asked = [f"{slot}.{name}" for (slot, _), (_, trees) in self.links.items() for tree in trees.values() for name in names_in(tree)]
        return tuple(dict.fromkeys([*self.slots, *asked]))


def opset_of(traits: ModelTraits) -> int:
    """Return the opset that the operators in what a pass makes came with; 0 for none in particular.

    Source: ONNX operator documentation of QuantizeLinear (10, 13, 19, 21). 16-bit zero points came with 21 too.
    """
    if traits.format not in ("qdq", "qoperator", "dynamic"):
        return 0
    types = {traits.weight_type, traits.activation_type}
    floors = [QDQ_OPSET]
    if traits.per_channel:
        floors.append(PER_CHANNEL_OPSET)
    if "float8" in types:
        floors.append(FLOAT8_OPSET)
    if types & {"int4", "uint4"}:
        floors.append(INT4_OPSET)
    if types & {"int16", "uint16"}:
        floors.append(SIXTEEN_BIT_OPSET)
    return max(floors)


def _opset_needed(told_opset: int, traits: ModelTraits) -> int:
    """What the input must have: what the pass says itself, and what its operators need unless it raises the opset."""
    makes = opset_of(traits)
    return max(told_opset, 0 if traits.opset >= makes else makes)


# ---------------------------------------------------------------------- all together


class Judge:
    """The rules of one chain on one target: for the space that is compiled (`rules`), for people (`findings`), for a trial (`refusal`)."""

    def __init__(self, slots: Sequence[Slot], places: Mapping[tuple[str, str], Place], context: Context, waived: frozenset[str]) -> None:
        self.context, self.waived, self.places = context, waived, places
        self.slots = tuple(slot.name for slot in slots)
        self._hooks = {key: hooks_of(place, context.accelerator) for key, place in places.items()}
        self._trees: dict[tuple[str, str], dict[str, Tree]] = {}
        for key, place in places.items():
            refuses = ask(place, context.accelerator, self._hooks[key]["refuses"])
            rest = {what: ask(place, context.accelerator, hook) for what, hook in self._hooks[key].items() if what != "refuses"}
            # A config that another hook chokes on is refused as a whole: it makes no difference what would be told of it.
            self._trees[key] = {"refuses": refuses, **{k: mapped(t, lambda a: NEVER if isinstance(a, str) else a) for k, t in rest.items()}}
        self._found: list[Finding] = []
        self._late: dict[tuple[str, str], list[str]] = {}
        rules = self._chain_rules()
        for place in places.values():
            for pass_rule in _PASS_RULES:
                rules += self._pass_rule(place, pass_rule)
        self.rules = tuple(rules)

    def findings(self, refused: Mapping[str, int], unreachable: Sequence[str]) -> tuple[Finding, ...]:
        """Return what concerns this chain; `refused` are the points that each rule refused, `unreachable` the rows that can't occur."""
        found = list(self._found)
        for rule_id in ("order", "method-exclusion", "opset-floor"):
            if refused.get(rule_id) and not any(f.rule == rule_id for f in found):
                found.append(self._finding(rule_id, f"refuses {RULES[rule_id].refuses}"))
        if self.context.capabilities.retired.note:
            found.append(self._finding("ep-retired", f"{self.context.target.execution_provider}{_because(self.context.capabilities.retired)}"))
        for (slot, name), ids in self._late.items():
            message = f"{name}: not every config could be judged beforehand by {', '.join(dict.fromkeys(ids))}"
            found.append(self._finding("checked-late", message, slot=slot, pass_name=name))
        found += [self._finding("unreachable-row", f"the condition of {row} can't occur here") for row in unreachable]
        return tuple(found)

    def refusal(self, steps: Sequence[tuple[str, str, Mapping[str, Any]]]) -> Finding | None:
        """Judge a point by its steps (slot, pass, values given to it): the rule that refuses it, or None.

        The same rules as the space's, and those that could not be judged beforehand.
        """
        chain: list[Link] = []
        for slot, name, given in steps:
            place = self.places[slot, name]
            told: dict[str, Any] = {"": None, "refuses": ""}
            try:
                config = place.pass_class.resolve(self.context.accelerator, given)
            except Exception as error:  # `validate_config` may be somebody else's
                told["refuses"] = str(error) or type(error).__name__
                config = {}
            for what, hook in self._hooks[slot, name].items():
                if what != "refuses" and not told["refuses"]:
                    told[what] = _quietly(hook, config)
            for rule in _PASS_RULES:
                if RULES[rule.id].severity == "error" and rule.id not in self.waived and not isinstance(told.get(rule.hook, UNCHECKED), Mark):
                    text = rule.breach(place, told[rule.hook], self.context)
                    if text:
                        return self._finding(rule.id, f"{name}: {text}", slot=slot, pass_name=name)
            chain.append(_link(place, told))
            text = OpsetFloor(self._opset())(chain) if place.pass_class.contract.accepts == ONNX else ""
            if text:
                return self._finding("opset-floor", text, slot=slot, pass_name=name)
        for rule_id, breach in (("order", Order(self.context.format)), ("method-exclusion", Exclusions())):
            text = "" if rule_id in self.waived else breach(chain)
            if text:
                return self._finding(rule_id, text)
        return None

    def _finding(self, rule_id: str, text: str, *, slot: str = "", pass_name: str = "") -> Finding:
        rule = RULES[rule_id]
        return Finding(rule_id, rule.severity, _sentences(text, rule.mend), slot, pass_name, waived=rule_id in self.waived)

    def _opset(self) -> int:
        return self.context.opset if self.context.format == ONNX else 0

    def _pass_rule(self, place: Place, rule: _PassRule) -> list[Rule]:
        """Turn a rule on one pass into what it refuses here, by the variables that decide; notes what people should know."""
        name, key = place.name, (place.slot, place.name)
        told = self._trees[key][rule.hook] if rule.hook else None
        texts = mapped(told, lambda outcome: rule.breach(place, outcome, self.context)) if rule.hook else rule.breach(place, None, self.context)
        breaches = mapped(texts, bool)
        examples = [text for text in answers(texts) if text]
        definition = RULES[rule.id]
        if any(a is UNCHECKED for _, a in leaves(breaches)) and definition.severity == "error" and rule.id not in self.waived:
            self._late.setdefault(key, []).append(rule.id)
        if not examples:
            return []
        example = examples[0] if len(examples) == 1 else f"for example {examples[0]}"
        self._found.append(self._finding(rule.id, f"{name}: {example}", slot=place.slot, pass_name=name))
        if definition.severity == "warning" or rule.id in self.waived:
            return []
        grouped: dict[tuple[str, ...], set[tuple[Any, ...]]] = {}
        for path, breach in leaves(breaches):
            if breach is True:
                grouped.setdefault(tuple(n for n, _ in path), set()).add(tuple(k for _, k in path))
        rules = []
        for names, refused in grouped.items():
            if cases(place, names) > MOST_CASES:
                self._late.setdefault(key, []).append(rule.id)
                continue
            judge = Refusals(place.slot, name, names, frozenset(refused))
            rules.append(Rule(rule.id, (place.slot, *(f"{place.slot}.{n}" for n in names)), judge, _sentences(f"{name}: {example}", _mend(rule.id))))
        return rules

    def _narrow(self, place: Place, rule_id: str, tree: Tree) -> Tree:
        """The tree, unless it asks for too much to be looked at together with other passes."""
        if cases(place, names_in(tree)) <= MOST_CASES:
            return tree
        self._late.setdefault((place.slot, place.name), []).append(rule_id)
        return UNCHECKED

    def _links(self, rule_id: str, what: str, read: Callable[[ModelTraits], Any]) -> dict[tuple[str, str], tuple[type[Pass], dict[str, Tree]]]:
        return {
            key: (place.pass_class, {what: self._narrow(place, rule_id, mapped(self._trees[key]["traits"], read))})
            for key, place in self.places.items()
        }

    def _chain_rules(self) -> list[Rule]:
        order = ChainRule(self.slots, self._links("order", "quantized", lambda t: t.quantized), Order(self.context.format))
        words = f"passes must follow one another in format, from {self.context.format} to {ONNX}, and quantize once"
        rules = [Rule("order", order.names, order, _sentences(words, _mend("order")))]
        excluded = frozenset(method for pair in EXCLUSIONS for method in pair)
        links = self._links("method-exclusion", "methods", lambda t: t.methods & excluded)
        by_slot = {slot: [m for (s, _), (_, t) in links.items() if s == slot for a in answers(t["methods"]) for m in a] for slot in self.slots}
        concerned = tuple(slot for slot, methods in by_slot.items() if methods)
        if any(set(pair) <= {m for methods in by_slot.values() for m in methods} for pair in EXCLUSIONS):
            words = "AWQ and pruning are in one chain"
            self._found.append(self._finding("method-exclusion", words))
            if "method-exclusion" not in self.waived:
                exclusion = ChainRule(concerned, {k: v for k, v in links.items() if k[0] in concerned}, Exclusions())
                rules.append(Rule("method-exclusion", exclusion.names, exclusion, _sentences(words, _mend("method-exclusion"))))
        sets = self._links("opset-floor", "sets_opset", lambda t: t.opset)
        return rules + [rule for place in self.places.values() for rule in self._opset_rules(place, sets)]

    def _opset_rules(self, place: Place, sets: Mapping[tuple[str, str], tuple[type[Pass], Mapping[str, Tree]]]) -> list[Rule]:
        """The floor of one pass, by what decides its needs and the opset that it gets."""
        key = (place.slot, place.name)
        if place.pass_class.contract.accepts != ONNX:
            return []
        before = self.slots[: self.slots.index(place.slot)]
        setting = {k: link for k, link in sets.items() if k[0] in before and link[1]["sets_opset"] != 0}
        setting = {k: link for k, link in sets.items() if k[0] in {slot for slot, _ in setting}}  # with the other passes of these slots
        needs = self._narrow(place, "opset-floor", both(self._trees[key]["opset"], self._trees[key]["traits"], _opset_needed))
        given = [opset for _, trees in setting.values() for opset in answers(trees["sets_opset"]) if opset] + [self._opset()] * bool(self._opset())
        most = max(answers(needs), default=0)
        if not given or most <= min(given):
            return []
        slots = (*(slot for slot in before if slot in {s for s, _ in setting}), place.slot)
        floor = ChainRule(slots, {**setting, key: (place.pass_class, {"needs_opset": needs})}, OpsetFloor(self._opset()), only=key)
        words = f"{place.name}: needs opset {most} here, and gets {min(given)}"
        return [Rule("opset-floor", floor.names, floor, _sentences(words, _mend("opset-floor")))]


def _sentences(text: str, mend: str) -> str:
    return f"{text.rstrip('.')}. {mend}".strip()


def _mend(rule_id: str) -> str:
    """How to mend what a rule refuses, with the way to waive it where there is one."""
    rule = RULES[rule_id]
    return rule.mend if rule.critical else f"{rule.mend} Or set the rule aside: validation: {{waive: [{rule_id}]}}."


def _quietly(hook: Callable[[Mapping[str, Any]], Any], config: Mapping[str, Any]) -> Any:
    try:
        return hook(config)
    except Exception:  # somebody else's hook: the trial will tell
        return UNCHECKED


def _link(place: Place, told: Mapping[str, Any]) -> Link:
    traits = told.get("traits", UNCHECKED)
    if isinstance(traits, Mark):
        return Link(place.slot, place.pass_class)
    opset = told.get("opset", UNCHECKED)
    needs = None if isinstance(opset, Mark) else _opset_needed(opset, traits)
    return Link(place.slot, place.pass_class, traits.quantized, traits.methods, needs, traits.opset)
