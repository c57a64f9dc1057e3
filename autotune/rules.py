"""What a chain of passes must keep to on a target: rules as data, judged before the first trial.

A pass tells what it refuses, needs and makes (`validate_config`, `needed_data`, `needed_opset`, `traits`); `autotune.foresight` finds out which
parameters decide. So a rule looks at few variables, and prunes exactly what it refuses. What stays open, because a pass reads too much at
once, is judged when a trial has its point, which then ends as pruned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from autotune.chain_rules import (
    EXCLUSIONS,
    FLOAT8_OPSET,
    INT4_OPSET,
    PER_CHANNEL_OPSET,
    QDQ_OPSET,
    ChainRule,
    Exclusions,
    Link,
    OpsetFloor,
    Order,
    Upgrade,
    link_of,
    opset_needed,
    upgrades,
)
from autotune.errors import ConfigError, nearest
from autotune.foresight import NEVER, UNCHECKED, Mark, Place, Tree, answers, ask, both, cases, hooks_of, leaves, mapped, names_in
from autotune.model import ONNX
from autotune.pass_rules import PASS_RULES, Context, PassRule, Refusals, because
from autotune.passes.base import ModelTraits, Pass
from autotune.search_spaces.space import Rule, Slot

MOST_CASES = 10_000  # combinations of values that one rule tells apart


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
            "Convert the model to a later opset first, or allow it: `validation: {upgrade_opset: true}`.",
            critical="the operators don't exist there",
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
            "qnn-limits", "error", "for QNN: QOperator and dynamic quantization", "Use a quantizer that makes QDQ, or packs weights only.",
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
            "qnn-doubtful", "warning",
            "for QNN: asymmetric quantization, scales that are no powers of two, MatMul weights per channel (not every device takes them)",
            "Where the device refuses them, set activation_symmetric and power_of_two_scales, and per_channel to false.",
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
        floors = self._opset_floors()
        # What breaks a floor is refused, or converted before the pass runs: then the floors only tell which points that concerns.
        self.upgraded: tuple[tuple[str, str, Rule], ...] = tuple(floors) if context.upgrade_opset else ()  # slot, words, rule
        rules = self._chain_rules() + ([] if context.upgrade_opset else [rule for _, _, rule in floors])
        for place in places.values():
            for pass_rule in PASS_RULES:
                rules += self._pass_rule(place, pass_rule)
        self.rules = tuple(rules)

    def findings(self, refused: Mapping[str, int], unreachable: Sequence[str]) -> tuple[Finding, ...]:
        """Return what concerns this chain; `refused` are the points that each rule refused, `unreachable` the rows that can't occur."""
        found = list(self._found)
        for rule_id in ("order", "method-exclusion", "opset-floor"):
            if refused.get(rule_id) and not any(f.rule == rule_id for f in found):
                found.append(self._finding(rule_id, f"refuses {RULES[rule_id].refuses}"))
        if self.context.capabilities.retired.note:
            found.append(self._finding("ep-retired", f"{self.context.target.execution_provider}{because(self.context.capabilities.retired)}"))
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
            for rule in PASS_RULES:
                if RULES[rule.id].severity == "error" and rule.id not in self.waived and not isinstance(told.get(rule.hook, UNCHECKED), Mark):
                    text = rule.breach(place, told[rule.hook], self.context)
                    if text:
                        return self._finding(rule.id, f"{name}: {text}", slot=slot, pass_name=name)
            chain.append(link_of(place, told))
            floor = place.pass_class.contract.accepts == ONNX and not self.context.upgrade_opset
            text = OpsetFloor(self._opset())(chain) if floor else ""
            if text:
                return self._finding("opset-floor", text, slot=slot, pass_name=name)
        for rule_id, breach in (("order", Order(self.context.format)), ("method-exclusion", Exclusions())):
            text = "" if rule_id in self.waived else breach(chain)
            if text:
                return self._finding(rule_id, text)
        return None

    def upgrades(self, steps: Sequence[tuple[str, str, Mapping[str, Any]]]) -> tuple[Upgrade, ...]:
        """Return the conversions to a later opset that a chain (slot, pass, resolved config) needs; none unless the user allows them."""
        if not self.context.upgrade_opset:
            return ()
        chain = []
        for slot, name, config in steps:
            told = {what: _quietly(hook, config) for what, hook in self._hooks[slot, name].items() if what in ("opset", "traits")}
            chain.append(link_of(self.places[slot, name], told))
        return upgrades(self._opset(), chain)

    def _finding(self, rule_id: str, text: str, *, slot: str = "", pass_name: str = "") -> Finding:
        rule = RULES[rule_id]
        return Finding(rule_id, rule.severity, _sentences(text, rule.mend), slot, pass_name, waived=rule_id in self.waived)

    def _opset(self) -> int:
        return self.context.opset if self.context.format == ONNX else 0

    def _pass_rule(self, place: Place, rule: PassRule) -> list[Rule]:
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
        return rules

    def _opset_floors(self) -> list[tuple[str, str, Rule]]:
        """The floors of all passes that may break one, with slot and words, in the order of the chain."""
        sets = self._links("opset-floor", "sets_opset", lambda t: t.opset)
        order = sorted(self.places.values(), key=lambda place: self.slots.index(place.slot))
        return [(place.slot, *floor) for place in order for floor in self._opset_floor(place, sets)]

    def _opset_floor(self, place: Place, sets: Mapping[tuple[str, str], tuple[type[Pass], Mapping[str, Tree]]]) -> list[tuple[str, Rule]]:
        """The floor of one pass with its words, by what decides its needs and the opset that it gets; empty where it is always kept."""
        key = (place.slot, place.name)
        if place.pass_class.contract.accepts != ONNX:
            return []
        before = self.slots[: self.slots.index(place.slot)]
        setting = {k: link for k, link in sets.items() if k[0] in before and link[1]["sets_opset"] != 0}
        setting = {k: link for k, link in sets.items() if k[0] in {slot for slot, _ in setting}}  # with the other passes of these slots
        needs = self._narrow(place, "opset-floor", both(self._trees[key]["opset"], self._trees[key]["traits"], opset_needed))
        given = [opset for _, trees in setting.values() for opset in answers(trees["sets_opset"]) if opset] + [self._opset()] * bool(self._opset())
        most = max(answers(needs), default=0)
        if not given or most <= min(given):
            return []
        slots = (*(slot for slot in before if slot in {s for s, _ in setting}), place.slot)
        floor = ChainRule(slots, {**setting, key: (place.pass_class, {"needs_opset": needs})}, OpsetFloor(self._opset()), only=key)
        words = f"{place.name}: needs opset {most} here, and gets {min(given)}"
        return [(words, Rule("opset-floor", floor.names, floor, _sentences(words, _mend("opset-floor"))))]


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
