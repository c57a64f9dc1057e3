"""Rules on one pass: whatever the rest of the chain, is what this pass makes of a model, needs and refuses fit for this target?

Each rule reads one answer of a pass (see `autotune.foresight`) and says in words what breaks it, or nothing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.capabilities import Answer, Capabilities, Fact
from autotune.foresight import Place
from autotune.model import ONNX
from autotune.passes.base import ModelTraits
from autotune.search_spaces.parameters import INACTIVE, value_key
from autotune.target import AcceleratorSpec, Target

DOT_PRODUCT_FLAGS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"})
GPU_METHODS = frozenset({"awq", "gptq"})
GPU_PROVIDERS = frozenset({"CUDAExecutionProvider", "TensorrtExecutionProvider", "ROCMExecutionProvider", "MIGraphXExecutionProvider"})
QNN, DIRECTML, CPU = "QNNExecutionProvider", "DmlExecutionProvider", "CPUExecutionProvider"


@dataclass(frozen=True)
class Context:
    """What rules look at besides the passes: the target, what it can run, this machine, the model as it comes.

    `opset` 0: not known. `machine` and `cpu_flags` are empty unless the models run on this machine's CPU. `upgrade_opset`: the user allows
    conversions to a later opset where a pass needs one.
    """

    target: Target
    capabilities: Capabilities
    format: str
    opset: int = 0
    quantized: bool = False
    machine: str = ""
    cpu_flags: frozenset[str] = frozenset()
    upgrade_opset: bool = False

    @property
    def accelerator(self) -> AcceleratorSpec:
        return self.target.accelerator


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
    refused = context.target.execution_provider == QNN and traits.quantized and traits.format in ("qoperator", "dynamic")
    return f"QNN takes QDQ only, not {traits.format}" if refused else ""


def _qnn_doubtful(place: Place, traits: ModelTraits, context: Context) -> str:
    if context.target.execution_provider != QNN or not traits.quantized or traits.format == "weight_only":
        return ""
    demands = {
        "asymmetric weights": traits.symmetric_weights is False, "asymmetric activations": traits.symmetric_activations is False,
        "scales that are no powers of two": traits.power_of_two is False, "MatMul weights with a scale for each channel": traits.per_channel is True,
    }  # fmt: skip
    found = [words for words, there in demands.items() if there]
    return f"not every QNN device takes {', '.join(found)}" if found else ""


def because(fact: Fact) -> str:
    """What a table says of it, to be put behind the statement."""
    return f": {fact.note} ({fact.source})" if fact.note else f" ({fact.source})"


def _facts_on(traits: ModelTraits, capabilities: Capabilities) -> list[tuple[str, Fact]]:
    """What is known of the types and the format that a pass makes."""
    types = dict.fromkeys(t for t in (traits.weight_type, traits.activation_type) if t)
    format_ = [(f"the {traits.format} format", capabilities.format_(traits.format))] if traits.format else []
    return [*((t, capabilities.type_(t)) for t in types), *format_]


def _ep_limits(place: Place, traits: ModelTraits, context: Context) -> str:
    provider, known = context.target.execution_provider, context.capabilities
    broken = [f"{provider} does not run {what}{because(fact)}" for what, fact in _facts_on(traits, known) if fact.answer is Answer.NO]
    if traits.quantized:
        offset = "uint" in traits.activation_type or "uint" in traits.weight_type or False in (traits.symmetric_activations, traits.symmetric_weights)
        demands = {
            "symmetric_weights": traits.symmetric_weights is False, "symmetric_activations": traits.symmetric_activations is False,
            "zero_point_zero": offset, "power_of_two": traits.power_of_two is False,
        }  # fmt: skip
        for demand, breaks in demands.items():
            if breaks and known.demands_(demand):
                broken.append(f"{provider} demands {DEMAND_WORDS[demand]}{because(known.demands[demand])}")
    return "; ".join(dict.fromkeys(broken))


DEMAND_WORDS = {
    "symmetric_weights": "symmetric weights", "symmetric_activations": "symmetric activations", "zero_point_zero": "zero points of 0",
    "power_of_two": "scales that are powers of two",
}  # fmt: skip


def _slow_type(place: Place, traits: ModelTraits, context: Context) -> str:
    known = context.capabilities
    slow = [f"{what} is slow on {known.provider}{because(fact)}" for what, fact in _facts_on(traits, known) if fact.answer is Answer.SLOW]
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
class PassRule:
    """A rule judged on what one pass tells (`hook`: which of its answers), whatever the rest of the chain."""

    id: str
    hook: str
    breach: Callable[[Place, Any, Context], str]


PASS_RULES = (
    PassRule("provider-mismatch", "", _provider_mismatch),
    PassRule("missing-engine", "", _missing_engine),
    PassRule("order", "", _quantized_input),
    PassRule("gpu-only-method", "", _needs_gpu),
    PassRule("pass-config", "refuses", _pass_config),
    PassRule("data-needed", "data", _data_needed),
    PassRule("gpu-only-method", "traits", _gpu_only),
    PassRule("qat-unsupported", "traits", _qat_unsupported),
    PassRule("qnn-limits", "traits", _qnn_limits),
    PassRule("qnn-doubtful", "traits", _qnn_doubtful),
    PassRule("ep-limits", "traits", _ep_limits),
    PassRule("slow-type", "traits", _slow_type),
    PassRule("no-int8-dot", "traits", _no_int8_dot),
    PassRule("random-calibration", "data", _random_calibration),
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
