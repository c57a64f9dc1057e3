"""Rules on a chain of passes: formats that follow one another, methods that spoil each other, opsets that are high enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.foresight import UNCHECKED, Mark, Place, Tree, answer, names_in
from autotune.model import ONNX
from autotune.passes.base import ModelTraits, Pass

PER_CHANNEL_OPSET, QDQ_OPSET, FLOAT8_OPSET, SIXTEEN_BIT_OPSET, INT4_OPSET = 13, 10, 19, 21, 21
EXCLUSIONS = (("awq", "pruning"),)


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
            if not contract.takes(current):
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


def opset_needed(told_opset: int, traits: ModelTraits) -> int:
    """What the input must have: what the pass says itself, and what its operators need unless it raises the opset."""
    makes = opset_of(traits)
    return max(told_opset, 0 if traits.opset >= makes else makes)


def link_of(place: Place, told: Mapping[str, Any]) -> Link:
    """Return a pass as rules on chains see it, by what it told of a config; what could not be found out stays None."""
    traits = told.get("traits", UNCHECKED)
    if isinstance(traits, Mark):
        return Link(place.slot, place.pass_class)
    opset = told.get("opset", UNCHECKED)
    needs = None if isinstance(opset, Mark) else opset_needed(opset, traits)
    return Link(place.slot, place.pass_class, traits.quantized, traits.methods, needs, traits.opset)


@dataclass(frozen=True)
class Upgrade:
    """A conversion to a later opset that a chain needs before one of its slots. `why` names the passes that need it."""

    slot: str
    present: int
    target: int
    why: str


def upgrades(start: int, chain: Sequence[Link]) -> tuple[Upgrade, ...]:
    """Return the conversions that a chain can't do without: as few as can be, each right before the first pass that needs it.

    The target is the lowest opset that does for that pass and for those behind it, up to one that sets the opset itself: a float model
    converts better than what passes have made of it. `start` is the input model's opset, 0 where that is not known; nothing is asked for where
    the opset is not known.
    """
    current = start
    found = []
    for number, link in enumerate(chain):
        if link.pass_class.contract.accepts == ONNX and current and (link.needs_opset or 0) > current:
            target, words = current, []
            for later in chain[number:]:
                needs = later.needs_opset or 0
                if needs > target:
                    target = needs
                    words.append(f"{later.pass_class.__name__} needs opset {needs}")
                if later.sets_opset != 0:  # not known, or what comes behind has another one
                    break
            found.append(Upgrade(link.slot, current, target, " and ".join(words)))
            current = target
        current = 0 if link.sets_opset is None else link.sets_opset or current
    return tuple(found)
