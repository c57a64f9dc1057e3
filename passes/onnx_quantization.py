"""OnnxQuantization: post-training quantization to 4, 8 or 16 bits by ONNX Runtime's own quantizers.

Source: ONNX Runtime documentation, "Quantize ONNX models"; failures that are met here on purpose were each seen with 1.32.
"""

from __future__ import annotations

import copy
import functools
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autotune.data import RANDOM
from autotune.errors import PassConfigError, PassError, nearest
from autotune.model import MODEL_FILE, ONNXModelHandler, save_onnx
from autotune.passes.base import ONNX, AcceleratorSpec, ModelTraits, ParamCategory, Pass, PassConfigParam, PassContract
from autotune.passes.calibration import activation_ranges, calibration_feeds
from autotune.passes.findings import Findings
from autotune.passes.onnx_graph import (
    default_opset,
    graphs_of,
    is_quantized,
    keep_io,
    library_errors,
    load_fixed,
    loads_at_every_level,
    matching_nodes,
    name_every_node,
    operator_counts,
    quiet,
    sort_nodes,
    unchanged,
)
from autotune.passes.quantization_bodies import quantize_bodies
from autotune.passes.quantization_fusions import free_outputs, hold_apart, last_shares
from autotune.passes.quantization_graph import (
    Prepared,
    coverage,
    drop_nodes,
    float_type,
    hold_floats,
    one_scale,
    prepare,
    quantizable,
    refuse_wild_weights,
    wrongly_removed,
)
from autotune.passes.quantization_groups import CUTS, by_harm, content_of, content_of_arrays, groups_of, lone_cuts, rows_for
from autotune.passes.quantization_names import give_names_back
from autotune.passes.quantization_scales import drop_unbounded, nodes_at, saturated, to_powers_of_two
from autotune.passes.registry import register
from autotune.search_spaces.parameters import INACTIVE, Boolean, Categorical, Conditional, ConditionalDefault
from autotune.target import library_versions, surroundings

if TYPE_CHECKING:
    import onnx

    from autotune.data import Arrays

WHO = "OnnxQuantization"
CPU = "CPUExecutionProvider"
PER_CHANNEL_OPSET = 13  # DequantizeLinear has an axis from here on
WIDE_OPSET = 21  # QuantizeLinear and DequantizeLinear have types of 4 and 16 bits from here on
GROUPS: Mapping[str, tuple[str, ...]] = {"matmul": ("MatMul", "Gemm", "Attention"), "conv": ("Conv", "ConvTranspose")}
# What ONNX Runtime can quantize, by mode. Written out, so that a config can be judged without loading ONNX Runtime.
DYNAMIC_OPERATORS = frozenset({"Attention", "Conv", "EmbedLayerNormalization", "Gather", "Gemm", "LSTM", "MatMul", "Transpose"})
QOPERATOR_OPERATORS = frozenset({
    "Add", "ArgMax", "AveragePool", "Clip", "Concat", "Conv", "EmbedLayerNormalization", "Flatten", "Gather", "Gemm", "GlobalAveragePool",
    "LeakyRelu", "MatMul", "MaxPool", "Mul", "Pad", "Relu", "Reshape", "Resize", "Sigmoid", "Softmax", "Split", "Squeeze", "Transpose",
    "Unsqueeze", "Where",
})  # fmt: skip
QDQ_OPERATORS = QOPERATOR_OPERATORS | {
    "BatchNormalization", "ConvTranspose", "CumSum", "GatherElements", "InstanceNormalization", "LayerNormalization", "Slice", "TopK",
}  # fmt: skip
EIGHT_BITS = ("int8", "uint8")
SAMPLES: Mapping[str, int] = {  # histograms cost more a sample
    "minmax": 100, "moving_average": 100, "distribution": 100, "entropy": 32, "percentile": 32,
}  # fmt: skip
HARM_DEPENDS_ON = (
    "weight_type", "activation_type", "weight_symmetric", "activation_symmetric", "per_channel", "reduce_range",
    "op_types_to_exclude_output_quantization", "outputs_in_float",
)  # fmt: skip
# Shares, so that small models lose one group or two, and large ones enough to matter: a tenth took two thirds of the error from a transformer
# of 37 groups, a quarter nine tenths; of a network of depthwise convolutions with 50, the first two had half of it and cost no time.
WORST_LEFT_OUT = Conditional(
    "op_types_to_quantize", dict.fromkeys(["all", "conv+matmul"], Categorical([0, 0.03, 0.1, 0.25])), default=Categorical([0])
)
MOST_REPAIRS = 8  # rounds in which nodes with biases out of bounds are left out; each round finds one at least
STATIC_ONLY = (
    "activation_type", "activation_symmetric", "quant_format", "power_of_two_scales", "calibrate_method", "percentile", "standard_deviations",
    "calibration_data_dir", "calibration_samples", "exclude_top_k", "op_types_to_exclude_output_quantization",
    "outputs_in_float",
)  # fmt: skip

# A product whose takers are quantized too gets its scale from them, so that with `all` there is next to nothing to choose.
PRODUCTS_IN_FLOAT = Conditional(
    "op_types_to_quantize", dict.fromkeys(["matmul", "conv+matmul"], Categorical(["none", "matmul"])), default=Categorical(["none"])
)


def _operator_fault(value: str) -> str:
    """What `op_types_to_quantize` should have been; empty when it is fine."""
    known = {"all", *GROUPS, *DYNAMIC_OPERATORS, *QDQ_OPERATORS}
    unknown = [part for part in value.split("+") if part not in known]
    return f"all, or operators joined by + (no {unknown[0]!r}: {nearest(unknown[0], known)})" if unknown else ""


def _output_fault(value: str) -> str:
    """What `op_types_to_exclude_output_quantization` should have been; empty when it is fine."""
    known = {"none", *GROUPS, *QDQ_OPERATORS}
    unknown = [part for part in value.split("+") if part not in known]
    if unknown:
        return f"none, or operators joined by + (no {unknown[0]!r}: {nearest(unknown[0], known)})"
    return "none alone, or operators joined by +" if "none" in value.split("+") and value != "none" else ""


def _operators_of(config: Mapping[str, Any]) -> frozenset[str]:
    if config["quant_mode"] == "dynamic":
        return DYNAMIC_OPERATORS
    return QDQ_OPERATORS if config["quant_format"] == "QDQ" else QOPERATOR_OPERATORS


def _share_fault(value: float) -> str:
    """What `exclude_top_k` should have been; empty when it is fine."""
    return "a whole number of groups, or a share of them below 1" if isinstance(value, float) and value >= 1 else ""


def _static(branch: Categorical | Conditional) -> Conditional:
    return Conditional(parents="quant_mode", support={("static",): branch}, default=INACTIVE)


def _static_default(value: Any) -> ConditionalDefault:
    return ConditionalDefault(parents="quant_mode", support={("static",): value}, default=INACTIVE)


@functools.cache
def _eight_bits_overflow() -> bool:
    """x86 without VNNI adds pairs of 8-bit products in 16 bits, which overflow: there, and only there, 7-bit weights help."""
    here = surroundings()
    return "x86_64" in here.platform and not {"avx512_vnni", "avx_vnni", "amx_int8"} & set(here.cpu_flags)


@register
class OnnxQuantization(Pass):
    """Quantize weights, and in static mode activations too, to whole numbers of 8 bits, or of 4 and 16 where the operators have them."""

    contract = PassContract(
        accepts=ONNX, returns=ONNX, min_opset=10, needs_calibration_when={"quant_mode": "static"}, refuses_quantized_input=True,
        data={"calibration_data_dir": "calibration"}, ep_dependent=True, version=5,
    )  # fmt: skip

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        ends = accelerator_spec.execution_provider == CPU
        return {
            "quant_mode": PassConfigParam(
                type_=Literal["static", "dynamic"], default_value="static", search_defaults=Categorical(["static", "dynamic"]),
                description="static takes activation ranges from calibration data; dynamic finds them while the model runs",
            ),
            "weight_type": PassConfigParam(
                type_=Literal["int8", "uint8", "int4", "uint4"], default_value="int8",
                search_defaults=Conditional("quant_mode", {"static": Categorical(["int8"]), "dynamic": Categorical(["int8", "uint8"])}),
                description="type of quantized weights; in static mode uint8 is slower on x86 and not searched. int4 and uint4 are for size, not "
                "speed: static mode, QDQ, opset 21",
            ),
            "weight_symmetric": PassConfigParam(
                type_=bool | None,
                description="weights without an offset; left out: int8 and int4 have none, uint8 and uint4 one, but none in static mode per channel",
            ),
            "activation_type": PassConfigParam(
                type_=Literal["uint8", "int8", "uint16", "int16"], default_value=_static_default("uint8"),
                search_defaults=_static(Categorical(["uint8"])),
                description="type of quantized activations; static mode only. int8 is slow on x86 and not searched; int8 with uint8 weights is "
                "refused, as ONNX Runtime has no kernels for it. 16 bits need QDQ and opset 21, keep accuracy, and run as float on CPUs",
            ),
            "activation_symmetric": PassConfigParam(
                type_=bool, default_value=_static_default(False), search_defaults=_static(Categorical([False])),
                description="scales of activations without an offset, as TensorRT and QNN demand; static mode only",
            ),
            "quant_format": PassConfigParam(
                type_=Literal["QDQ", "QOperator"], default_value=_static_default("QDQ"), search_defaults=_static(Categorical(["QDQ"])),
                description="QDQ (pairs of QuantizeLinear and DequantizeLinear around float operators) or QOperator (QLinear operators); "
                "static mode only. QOperator is no faster and, with int8 activations, 4 times slower: not searched",
            ),
            "power_of_two_scales": PassConfigParam(
                type_=bool, default_value=_static_default(False), search_defaults=_static(Categorical([False])),
                description="raise every scale to the next power of two, as QNN demands; QDQ with symmetric weights and activations only",
            ),
            "calibrate_method": PassConfigParam(
                type_=Literal["minmax", "moving_average", "distribution", "entropy", "percentile"], default_value=_static_default("minmax"),
                search_defaults=_static(Categorical(["minmax", "entropy", "percentile"])),
                description="how activation ranges are found; static mode only. moving_average: the mean of the examples' ends; distribution: "
                "the mean and standard_deviations to either side, no further than the ends. Neither of these is searched",
            ),
            "percentile": PassConfigParam(
                type_=float, default_value=ConditionalDefault("calibrate_method", {"percentile": 99.99}, default=INACTIVE), minimum=50, maximum=100,
                search_defaults=Conditional("calibrate_method", {"percentile": Categorical([99.99])}, default=INACTIVE),
                description="share of values, in percent, that a range must hold; half of the rest is cut at either end. percentile method only",
            ),
            "standard_deviations": PassConfigParam(
                type_=float, minimum=1, maximum=100, default_value=ConditionalDefault("calibrate_method", {"distribution": 6.0}, default=INACTIVE),
                search_defaults=Conditional("calibrate_method", {"distribution": Categorical([6.0])}, default=INACTIVE),
                description="how far a range reaches from the mean; distribution method only",
            ),
            "calibration_data_dir": PassConfigParam(
                type_=str | Path, category=ParamCategory.DATA,
                description="an .npz of calibration examples, or a folder of such files; needed in static mode. random: made-up numbers",
            ),
            "calibration_samples": PassConfigParam(
                type_=int, minimum=1, default_value=ConditionalDefault("calibrate_method", SAMPLES, default=INACTIVE),
                search_defaults=Conditional("calibrate_method", {k: Categorical([v]) for k, v in SAMPLES.items()}, default=INACTIVE),
                description="examples to calibrate with, at most; spread evenly over the data. Static mode only",
            ),
            "op_types_to_quantize": PassConfigParam(
                type_=str, default_value="all", check=_operator_fault,
                search_defaults=Conditional(
                    "quant_mode", {"static": Categorical(["all", "conv+matmul", "matmul", "conv"]), "dynamic": Categorical(["all", "matmul"])},
                ),
                description="all, or some of matmul (MatMul, Gemm, Attention), conv (Conv, ConvTranspose) and ONNX operator types, joined by +. "
                "In static mode a Relu or Clip goes with the product before it. "
                "In dynamic mode all leaves out Conv, which would run some 4 times slower; name it to have it",
            ),
            "op_types_to_exclude_output_quantization": PassConfigParam(
                type_=str, default_value=ConditionalDefault("quant_format", {"QDQ": "none"}, default=INACTIVE), check=_output_fault,
                search_defaults=Conditional("quant_format", {"QDQ": PRODUCTS_IN_FLOAT}, default=INACTIVE),
                description="operators whose inputs are quantized and whose results are not, named as in op_types_to_quantize, or none. matmul keeps "
                "the accuracy of transformers, whose products are added up and normalized in float; they still run in 8 bits. A Conv with a float "
                "result runs in float on CPUs. QDQ only; searched where products stand among float operators",
            ),
            "outputs_in_float": PassConfigParam(
                type_=bool, default_value=_static_default(ends), search_defaults=_static(Categorical([ends])),
                description="leave the last step of each output of the model as precise as it is where that costs next to nothing: in QDQ format a "
                "product or sum that gives one is not rounded to 8 bits, and with op_types_to_quantize=all a Softmax or Sigmoid that gives one runs "
                "in float. Static mode only; the default on CPUs",
            ),
            "per_channel": PassConfigParam(
                type_=bool, default_value=True, search_defaults=Boolean(),
                description="one scale for each output channel of a weight instead of one for all; from opset 13 on",
            ),
            "reduce_range": PassConfigParam(
                type_=bool, default_value=False, search_defaults=Boolean() if _eight_bits_overflow() else None,
                description="7-bit weights, against overflow on x86 CPUs without VNNI (searched there only)",
            ),
            "nodes_to_quantize": PassConfigParam(
                type_=list[str],
                description="names of nodes of the input model to quantize, of the chosen types, and no others; patterns as in nodes_to_exclude",
            ),
            "nodes_to_exclude": PassConfigParam(
                type_=list[str],
                description="names of nodes of the input model to leave in float; * and ? match any text. A name that matches nothing is refused",
            ),
            "exclude_top_k": PassConfigParam(
                type_=int | float, minimum=0, default_value=_static_default(0), check=_share_fault, search_defaults=_static(WORST_LEFT_OUT),
                description="how many groups of nodes to leave in float, beginning with the one whose quantization alone changes the outputs most; "
                "below 1 it is a share of the groups, rounded up. A group is what the runtime fuses. The order is found once for a model and these "
                "parameters; it costs a quantization and a few runs for each group. Static mode only; searched where most operators are quantized",
            ),
            "quant_preprocess": PassConfigParam(
                type_=bool, default_value=True,
                description="infer shapes, fold constants, fuse batch normalization and, in static mode for CPUs, GELU, SiLU and layer normalization "
                "written out in parts first, and pool where a mean is taken over an image; without it models often stay half in float, and what "
                "the runtime would have fused does not fuse between quantized values",
            ),
        }  # fmt: skip

    @classmethod
    def validate_config(cls, config: Mapping[str, Any], accelerator_spec: AcceleratorSpec) -> None:
        """Refuse types, formats and symmetries that ONNX Runtime has no quantizer or no kernels for together."""
        for must, got, do in _contradictions(config):
            raise PassConfigError(cls.__name__, must, got, do)
        known = _operators_of(config)
        for part in config["op_types_to_quantize"].split("+"):
            if part != "all" and part not in GROUPS and part not in known:
                kind = config["quant_mode"] if config["quant_mode"] == "dynamic" else config["quant_format"]
                raise PassConfigError(cls.__name__, f"op_types_to_quantize must name operators that {kind} has", repr(part), nearest(part, known))

    @classmethod
    def traits(cls, config: Mapping[str, Any]) -> ModelTraits:
        """Per channel, ONNX Runtime's static quantizer makes symmetric weights of any type; else its signed types are symmetric by default."""
        weights, symmetric = config["weight_type"], config.get("weight_symmetric")
        static = config["quant_mode"] == "static"
        if symmetric is None:
            symmetric = weights in ("int8", "int4") or (static and config["per_channel"])
        common = ModelTraits(quantized=True, weight_type=weights, symmetric_weights=symmetric, per_channel=config["per_channel"], power_of_two=False)
        if not static:
            return replace(common, format="dynamic", activation_type="uint8", symmetric_activations=False)
        return replace(
            common, format=config["quant_format"].lower(), activation_type=config["activation_type"],
            symmetric_activations=config["activation_symmetric"], power_of_two=config["power_of_two_scales"],
        )  # fmt: skip

    def _run_for_config(self, model: ONNXModelHandler, config: Mapping[str, Any], output_model_path: Path) -> ONNXModelHandler:
        who = type(self).__name__
        given = load_fixed(model)
        if is_quantized(given):
            raise PassError(
                who, "takes a float model", "one that holds quantized operators already", "Leave this pass out, or start from the float model."
            )
        _refuse_low_opset(who, default_opset(given), config)
        before = operator_counts(given)
        named = type(given)()
        named.CopyFrom(given)
        name_every_node(named)
        operators = _operator_types(config)
        patterns = {name: config.get(name) for name in ("nodes_to_exclude", "nodes_to_quantize")}
        bodies = config["quant_mode"] == "dynamic"
        # To exclude a node of a body costs nothing where bodies are not entered; to ask for it would be in vain.
        seen = {"nodes_to_exclude": True, "nodes_to_quantize": bodies}
        named_by = {name: set(matching_nodes(named, p or [], who=who, parameter=name, bodies=seen[name])) for name, p in patterns.items()}
        excluded, only = ([n for graph in graphs_of(named.graph) for n in graph.node if n.name in found] for found in named_by.values())
        prepared = prepare(
            named, optimize=config["quant_preprocess"], excluded=excluded, only=only if patterns["nodes_to_quantize"] is not None else None,
            operators=operators, bodies=bodies, composites=_on_cpu(self) and not bodies,
        )  # fmt: skip
        possible = quantizable(prepared.proto, operators, prepared.excluded, bodies=bodies)
        refuse_wild_weights(prepared.proto, who=who)
        notes: dict[str, Any] = {"operators_before": before, "quantizable_nodes": possible.nodes, **prepared.notes}
        if not possible.nodes:
            return unchanged(model, output_model_path, possible.reason, notes={**notes, "operators_after": before, "quantized_nodes": 0})
        groups = len(_groups(prepared.proto, operators, prepared.excluded, config))
        if 0 < groups <= _count_of(config.get("exclude_top_k", 0), groups):  # known before anything is calibrated or ordered
            reason = f"every group of nodes is excluded: there are {groups}"
            return unchanged(model, output_model_path, reason, notes={**notes, "operators_after": before, "quantized_nodes": 0})

        whole = one_scale(prepared.proto, operators, notes, bodies=bodies) if config["per_channel"] else []
        feed = None
        if config["quant_mode"] == "static":
            if str(config.get("calibration_data_dir")) == RANDOM:
                notes["calibration"] = "random data: the activation ranges say nothing about real data"
            quantized, feed = _quantize_static(self, prepared, operators, whole, model, config, notes)
        else:
            quantized = _quantize_dynamic(who, prepared, operators, whole, config)
        sort_nodes(quantized.graph)  # the quantizers append what they add
        give_names_back(quantized, prepared.renamed)
        keep_io(quantized, given)
        covered = coverage(possible, quantized, bodies=bodies)
        notes.update(operators_after=operator_counts(quantized), quantized_nodes=covered["nodes"], coverage=covered)
        if not covered["nodes"]:
            reason = notes.get("left_in_float", "ONNX Runtime's quantizer left every weight in float")
            return unchanged(model, output_model_path, reason, notes={**notes, "operators_after": before})
        if _on_cpu(self):
            with library_errors(who, "what ONNX Runtime's quantizer makes must load and run", "Leave out operators, or choose other types."):
                loads_at_every_level(quantized, feed)
        return model.written(output_model_path, proto=quantized, notes={**notes, "changed": True})


def _on_cpu(this: Pass) -> bool:
    return this.accelerator_spec.execution_provider == CPU


def _contradictions(config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What can't be together, as the parts of an error: what must hold, what came, what to do."""
    weights, activations = config["weight_type"], config.get("activation_type", "uint8")
    static, symmetric = config["quant_mode"] == "static", config.get("weight_symmetric")
    qdq = config.get("quant_format") == "QDQ"
    found = []
    if not static and weights not in EIGHT_BITS:
        found.append(("dynamic mode has weights of 8 bits", f"weight_type={weights!r}", "Choose int8 or uint8, or OnnxBlockwiseQuantization."))
    if activations == "int8" and weights == "uint8":
        found.append((
            "int8 activations need int8 weights", "activation_type='int8' with weight_type='uint8'",
            "Set weight_type to 'int8', or activation_type to 'uint8'.",
        ))  # fmt: skip
    if static and not qdq and not {weights, activations} <= set(EIGHT_BITS):
        got = f"weight_type={weights!r}, activation_type={activations!r}"
        found.append(("QOperator has types of 8 bits only", got, "Set quant_format to 'QDQ', or choose types of 8 bits."))
    if static and not qdq and config["per_channel"] and weights != "int8":
        found.append(("QOperator per channel writes int8 weights, whatever is asked", f"weight_type={weights!r}", "Choose int8, or QDQ."))
    if static and config["per_channel"] and symmetric is False:
        found.append((
            "weights are symmetric per channel in static mode", "weight_symmetric=False with per_channel=True",
            "Leave weight_symmetric out, or set per_channel to false.",
        ))  # fmt: skip
    if config["reduce_range"] and weights not in EIGHT_BITS:
        found.append(("reduce_range is for weights of 8 bits", f"weight_type={weights!r}", "Set reduce_range to false."))
    if config.get("power_of_two_scales"):
        default = weights in ("int8", "int4") or config["per_channel"]
        if not qdq or not config["activation_symmetric"] or not (default if symmetric is None else symmetric):
            got = f"quant_format={config['quant_format']!r}, activation_symmetric={config['activation_symmetric']}, weight_symmetric={symmetric}"
            found.append(("power_of_two_scales needs QDQ with symmetric weights and activations", got, "Set both to true, quant_format to 'QDQ'."))
    return found


def _refuse_low_opset(who: str, opset: int, config: Mapping[str, Any]) -> None:
    """Raise `PassError` where the operators or types that are asked for are not in the model's opset."""
    wide = {config["weight_type"], config.get("activation_type", "uint8")} - set(EIGHT_BITS)
    if wide and opset < WIDE_OPSET:
        raise PassError(
            who, f"{' and '.join(sorted(wide))} need opset {WIDE_OPSET} or later", f"opset {opset}",
            "Choose types of 8 bits, or convert the model to a later opset first.",
        )  # fmt: skip
    if config["per_channel"] and opset < PER_CHANNEL_OPSET:
        raise PassError(
            who, f"per_channel needs opset {PER_CHANNEL_OPSET} or later", f"opset {opset}",
            "Set per_channel to false, or convert the model to a later opset first.",
        )  # fmt: skip


def _operator_types(config: Mapping[str, Any]) -> list[str]:
    """Operator types for the quantizer, sorted: Conv is in the dynamic mode's `all` no more than a user names it."""
    known = _operators_of(config)
    chosen: set[str] = set()
    for part in config["op_types_to_quantize"].split("+"):
        if part == "all":
            chosen |= known - {"Conv"} if config["quant_mode"] == "dynamic" else known
        else:
            chosen |= set(GROUPS.get(part, (part,))) & known
    if config["quant_mode"] == "dynamic" and "Gemm" in chosen:
        chosen.add("MatMul")  # the dynamic quantizer rewrites Gemm to MatMul and Add before it begins
    return sorted(chosen)


@dataclass(frozen=True)
class _Static:
    """The static quantizer at work: quantizes the prepared model with some nodes left in float, as often as it is asked.

    `operators` are those that were chosen; cuts (Relu and Clip) come with the products before them.
    """

    who: str
    prepared: Prepared
    operators: Sequence[str]
    ranges: Any  # ONNX Runtime's TensorsData
    one_scale: Sequence[str]
    config: Mapping[str, Any]

    def __call__(self, excluded: frozenset[str]) -> onnx.ModelProto:
        from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
        from onnxruntime.quantization.quant_utils import QuantizationMode, QuantType

        config = self.config
        types = {
            "int8": QuantType.QInt8, "uint8": QuantType.QUInt8, "int4": QuantType.QInt4, "uint4": QuantType.QUInt4, "int16": QuantType.QInt16,
            "uint16": QuantType.QUInt16,
        }  # fmt: skip
        options: dict[str, Any] = {"DefaultTensorType": float_type(), "ActivationSymmetric": config["activation_symmetric"]}
        if config.get("weight_symmetric") is not None:
            options["WeightSymmetric"] = config["weight_symmetric"]
        if self.one_scale and config["quant_format"] == "QDQ":
            options["TensorQuantOverrides"] = {n: [{"quant_type": types[config["weight_type"]]}] for n in self.one_scale}
        ranges = copy.copy(self.ranges)
        ranges.data = dict(self.ranges.data)  # the quantizer changes some
        floats = _float_results(config)
        if floats:
            options["OpTypesToExcludeOutputQuantization"] = sorted(floats)
        copied = type(self.prepared.proto)()
        copied.CopyFrom(self.prepared.proto)
        given: tuple[Any, ...] = (
            types[config["weight_type"]], types[config["activation_type"]], ranges, [],
            sorted(excluded | _alone(self.prepared.proto, self.operators, excluded, config)), sorted({*self.operators, *CUTS}), options,
        )  # fmt: skip
        with library_errors(self.who, "the model must be one that ONNX Runtime's static quantizer takes"), quiet():
            if config["quant_format"] != "QDQ":
                return _by_operators(copied, config, self.one_scale, QuantizationMode.QLinearOps, True, *given)
            quantizer = QDQQuantizer(copied, config["per_channel"], config["reduce_range"], *given)
            quantizer.quantize_model()
            result: onnx.ModelProto = quantizer.model.model
        if config["outputs_in_float"]:
            free_outputs(result)
        return result


def _by_operators(proto: onnx.ModelProto, config: Mapping[str, Any], one_scale: Sequence[str], *given: Any) -> onnx.ModelProto:
    """Quantize by the quantizer that puts integer operators in the place of float ones; `proto` is changed. Raises what it raises.

    By itself it has no way to give single weights one scale: asked to, it stops at "axis value is missing", or makes what does not run.
    """
    from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer

    held = hold_floats(proto)
    quantizer = ONNXQuantizer(proto, config["per_channel"], config["reduce_range"], *given)
    by_channel = quantizer.quantize_weight_per_channel
    whole = {t.name: t for t in quantizer.model.initializer() if t.name in set(one_scale)}

    def by_weight(name: str, kind: Any, axis: int, *more: Any, **named: Any) -> Any:
        return quantizer.quantize_initializer(whole[name], kind, *more, **named) if name in whole else by_channel(name, kind, axis, *more, **named)

    quantizer.quantize_weight_per_channel = by_weight
    quantizer.quantize_model()
    result: onnx.ModelProto = quantizer.model.model
    drop_nodes(result, held)
    return result


def _quantize_static(
    this: OnnxQuantization,
    prepared: Prepared,
    operators: list[str],
    whole: Sequence[str],
    model: ONNXModelHandler,
    config: Mapping[str, Any],
    notes: dict[str, Any],
) -> tuple[onnx.ModelProto, Arrays]:
    """The quantized model, and a feed of the calibration data on which it should run."""
    who = type(this).__name__
    data = config.get("calibration_data_dir")
    if data is None:
        raise PassError(
            who, "static mode needs calibration data", "calibration_data_dir=None", "Give calibration data, or set quant_mode to 'dynamic'."
        )
    walk = calibration_feeds(Path(data), model.io, config["calibration_samples"], who=who)
    given = sorted({*operators, *CUTS})
    with tempfile.TemporaryDirectory(prefix="autotune-quantize-") as name:
        path = Path(name, MODEL_FILE)
        copied = type(prepared.proto)()
        copied.CopyFrom(prepared.proto)
        save_onnx(copied, path)
        with library_errors(who, "the model must run on the calibration data with its inner values as outputs"):
            ranges = activation_ranges(
                path, walk, method=config["calibrate_method"], percentile=float(config.get("percentile", 100.0)), op_types=given,
                deviations=float(config.get("standard_deviations", 0.0)),
            )  # fmt: skip
    left: dict[str, str] = {}
    if config["outputs_in_float"] and config["op_types_to_quantize"] == "all" and config.get("nodes_to_quantize") is None:
        ends = {name: output for name, output in last_shares(prepared.proto).items() if name not in prepared.excluded}
        left.update({name: f"it gives {output!r}, of which 8 bits would leave 256 levels" for name, output in ends.items()})
    floats = prepared.excluded | _alone(prepared.proto, operators, prepared.excluded, config)
    wild = nodes_at(prepared.proto, given, drop_unbounded(ranges)) - floats
    left.update(dict.fromkeys(sorted(wild), "values without bounds, or none at all, on the calibration data"))
    if config["quant_format"] == "QOperator" and config["weight_type"] != config["activation_type"]:
        weights = {t.name for t in prepared.proto.graph.initializer}
        lefts = [n.name for n in prepared.proto.graph.node if n.op_type == "MatMul" and n.input[0] in weights and n.name not in prepared.excluded]
        left.update(dict.fromkeys(lefts, "QLinearMatMul has no kernel for a weight of another type on its left"))
    cut = set(wrongly_removed(prepared.proto, given, by_operators=config["quant_format"] == "QOperator")) - floats
    left.update(dict.fromkeys(sorted(cut), "others need its input as it is, and the quantizer would cut it off"))
    quantize = _Static(who, prepared, operators, ranges, whole, config)
    if config["exclude_top_k"]:
        ordered = _by_harm(this.findings, quantize, frozenset(left), Path(data), model)
        worst = ordered[: _count_of(config["exclude_top_k"], len(ordered))]
        notes["excluded_groups"] = [{**entry, "nodes": [prepared.renamed.get(n, n) for n in entry["nodes"]]} for entry in worst]
        prepared = replace(prepared, excluded=prepared.excluded.union(*(entry["nodes"] for entry in worst)))
    result = _repaired(quantize, prepared.excluded, left)
    if config["power_of_two_scales"]:
        from onnx import numpy_helper

        to_powers_of_two(result, {t.name: numpy_helper.to_array(t) for t in prepared.proto.graph.initializer if t.data_type == float_type()})
    if config["quant_format"] == "QDQ":
        hold_apart(result)
    if left:
        notes["left_in_float"] = "; ".join(f"{prepared.renamed.get(node, node)}: {why}" for node, why in list(left.items())[:20])
    return result, next(walk())


def _float_results(config: Mapping[str, Any]) -> set[str]:
    """Operators whose results are not to be quantized."""
    kept = config.get("op_types_to_exclude_output_quantization", "none")
    return set() if kept == "none" else {op for part in kept.split("+") for op in GROUPS.get(part, (part,))}


def _alone(proto: onnx.ModelProto, operators: Iterable[str], excluded: frozenset[str], config: Mapping[str, Any]) -> set[str]:
    """Cuts (Relu and Clip) to leave in float, with these nodes left in float."""
    return lone_cuts(proto, operators, excluded, _float_results(config))


def _groups(proto: onnx.ModelProto, operators: Iterable[str], excluded: frozenset[str], config: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Groups of nodes that are quantized or left together: products have their cuts with them."""
    return groups_of(proto, {*operators, *CUTS}, excluded | _alone(proto, operators, excluded, config))


def _count_of(wanted: float, groups: int) -> int:
    """How many groups `exclude_top_k` means: it, or that share of them, rounded up."""
    return math.ceil(wanted * groups) if isinstance(wanted, float) else wanted


def _by_harm(findings: Findings, quantize: _Static, left: frozenset[str], data: Path, model: ONNXModelHandler) -> list[dict[str, Any]]:
    """Groups of nodes by measured harm, largest first; found once for the same model, ranges, rows and parameters."""
    proto, excluded = quantize.prepared.proto, quantize.prepared.excluded | left
    groups = _groups(proto, quantize.operators, excluded, quantize.config)
    rows = min(rows_for(len(groups)), quantize.config["calibration_samples"])
    feeds = list(calibration_feeds(data, model.io, rows, who=quantize.who)())
    # QDQ computes in float what the other format computes in whole numbers: one order serves both.
    whole = replace(quantize, config={"op_types_to_exclude_output_quantization": "none", **quantize.config, "quant_format": "QDQ"})
    facts = {
        "version": OnnxQuantization.contract.version, "libraries": library_versions(), "model": content_of(proto), "groups": groups,
        "ranges": content_of_arrays([{f"{n} {i}": v for n, d in quantize.ranges.items() for i, v in enumerate(d.range_value)}]),
        "rows": content_of_arrays(feeds), "one_scale": list(quantize.one_scale),
        **{name: whole.config.get(name) for name in HARM_DEPENDS_ON},
    }  # fmt: skip
    found: list[dict[str, Any]] = findings.once("harm", facts, lambda: by_harm(proto, groups, whole(excluded), feeds))
    return found


def _repaired(quantize: Callable[[frozenset[str]], onnx.ModelProto], excluded: frozenset[str], left: dict[str, str]) -> onnx.ModelProto:
    """Quantize, and again without the nodes whose biases came out cut off; these are added to `left`, name to reason."""
    result = quantize(excluded | set(left))
    for _ in range(MOST_REPAIRS):
        cut = saturated(result) - set(left)
        if not cut:
            break
        left.update(dict.fromkeys(sorted(cut), "its bias needs more than 32 bits at the scale of its input and weight"))
        result = quantize(excluded | set(left))
    return result


def _quantize_dynamic(who: str, prepared: Prepared, operators: list[str], one_scale: Sequence[str], config: Mapping[str, Any]) -> onnx.ModelProto:
    from onnxruntime.quantization.quant_utils import QuantizationMode, QuantType

    weight_type = QuantType.QInt8 if config["weight_type"] == "int8" else QuantType.QUInt8
    # A Gemm becomes NAME_MatMul and NAME_Add; an exclusion must follow it there.
    excluded = sorted(prepared.excluded | {f"{name}_MatMul" for name in prepared.excluded})
    options: dict[str, Any] = {"MatMulConstBOnly": True, "DefaultTensorType": float_type()}
    if config.get("weight_symmetric") is not None:
        options["WeightSymmetric"] = config["weight_symmetric"]
    copied = type(prepared.proto)()
    copied.CopyFrom(prepared.proto)

    def quantize(proto: onnx.ModelProto) -> onnx.ModelProto:
        given: tuple[Any, ...] = (weight_type, QuantType.QUInt8, None, [], excluded, operators, options)
        return _by_operators(proto, config, one_scale, QuantizationMode.IntegerOps, False, *given)

    with library_errors(who, "the model must be one that ONNX Runtime's dynamic quantizer takes"), quiet():
        result = quantize(copied)
        quantize_bodies(result, operators, frozenset(excluded), quantize)
    return result
