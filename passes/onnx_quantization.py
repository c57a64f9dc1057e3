"""OnnxQuantization: 8-bit post-training quantization by ONNX Runtime's own quantizers.

Source: ONNX Runtime documentation, "Quantize ONNX models"; failures that are met here on purpose were each seen with 1.32.
"""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from autotune.data import RANDOM
from autotune.errors import PassConfigError, PassError, nearest
from autotune.model import LARGE_BYTES, MODEL_FILE, ONNXModelHandler, message_bytes, save_onnx
from autotune.passes.base import ONNX, AcceleratorSpec, ModelTraits, ParamCategory, Pass, PassConfigParam, PassContract
from autotune.passes.calibration import activation_ranges, calibration_feeds
from autotune.passes.onnx_graph import (
    default_opset,
    fresh_name,
    glob_like,
    graphs_of,
    initializer_names,
    is_quantized,
    library_errors,
    lift_constants,
    load_fixed,
    name_every_node,
    operator_counts,
    optimize_by_session,
    quiet,
    rename_new_initializers,
    short_message,
    unchanged,
    value_names,
)
from autotune.passes.registry import register
from autotune.search_spaces.parameters import INACTIVE, Boolean, Categorical, Conditional, ConditionalDefault
from autotune.target import surroundings

if TYPE_CHECKING:
    import onnx

WHO = "OnnxQuantization"
PER_CHANNEL_OPSET = 13  # DequantizeLinear has an axis from here on
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
# Where weights sit: operator to the inputs that hold them. Without one of these an 8-bit model has nothing to gain.
WEIGHTED: Mapping[str, tuple[int, ...]] = {
    "MatMul": (0, 1), "Gemm": (0, 1), "Conv": (1,), "ConvTranspose": (1,), "Attention": (1,), "LSTM": (1, 2), "Gather": (0,),
    "EmbedLayerNormalization": (2, 3, 4),
}  # fmt: skip


SAMPLES: Mapping[str, int] = {"minmax": 100, "entropy": 32, "percentile": 32}  # histograms cost more a sample


def _operator_fault(value: str) -> str:
    """What `op_types_to_quantize` should have been; empty when it is fine."""
    known = {"all", *GROUPS, *DYNAMIC_OPERATORS, *QDQ_OPERATORS}
    unknown = [part for part in value.split("+") if part not in known]
    return f"all, or operators joined by + (no {unknown[0]!r}: {nearest(unknown[0], known)})" if unknown else ""


def _operators_of(config: Mapping[str, Any]) -> frozenset[str]:
    if config["quant_mode"] == "dynamic":
        return DYNAMIC_OPERATORS
    return QDQ_OPERATORS if config["quant_format"] == "QDQ" else QOPERATOR_OPERATORS


def _static(branch: Categorical) -> Conditional:
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
    """Quantize weights, and in static mode activations too, to 8 bits."""

    contract = PassContract(
        accepts=ONNX, returns=ONNX, min_opset=10, needs_calibration_when={"quant_mode": "static"}, refuses_quantized_input=True,
        data={"calibration_data_dir": "calibration"}, version=1,
    )  # fmt: skip

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {
            "quant_mode": PassConfigParam(
                type_=Literal["static", "dynamic"], default_value="static", search_defaults=Categorical(["static", "dynamic"]),
                description="static takes activation ranges from calibration data; dynamic finds them while the model runs",
            ),
            "weight_type": PassConfigParam(
                type_=Literal["int8", "uint8"], default_value="int8",
                search_defaults=Conditional("quant_mode", {"static": Categorical(["int8"]), "dynamic": Categorical(["int8", "uint8"])}),
                description="type of quantized weights, int8 (symmetric) or uint8; in static mode uint8 is slower on x86 and not searched",
            ),
            "activation_type": PassConfigParam(
                type_=Literal["uint8", "int8"], default_value=_static_default("uint8"), search_defaults=_static(Categorical(["uint8"])),
                description="type of quantized activations; static mode only. int8 is slow on x86 and not searched; int8 with uint8 weights is "
                "refused, as ONNX Runtime has no kernels for it",
            ),
            "quant_format": PassConfigParam(
                type_=Literal["QDQ", "QOperator"], default_value=_static_default("QDQ"), search_defaults=_static(Categorical(["QDQ"])),
                description="QDQ (pairs of QuantizeLinear and DequantizeLinear around float operators) or QOperator (QLinear operators); "
                "static mode only. QOperator is no faster and, with int8 activations, 4 times slower: not searched",
            ),
            "calibrate_method": PassConfigParam(
                type_=Literal["minmax", "entropy", "percentile"], default_value=_static_default("minmax"),
                search_defaults=_static(Categorical(["minmax", "entropy", "percentile"])),
                description="how activation ranges are found; static mode only",
            ),
            "percentile": PassConfigParam(
                type_=float, default_value=ConditionalDefault("calibrate_method", {"percentile": 99.99}, default=INACTIVE), minimum=50, maximum=100,
                search_defaults=Conditional("calibrate_method", {"percentile": Categorical([99.99])}, default=INACTIVE),
                description="share of values, in percent, that a range must hold; half of the rest is cut at either end. percentile method only",
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
                "In dynamic mode all leaves out Conv, which would run some 4 times slower; name it to have it",
            ),
            "per_channel": PassConfigParam(
                type_=bool, default_value=True, search_defaults=Boolean(),
                description="one scale for each output channel of a weight instead of one for all; from opset 13 on",
            ),
            "reduce_range": PassConfigParam(
                type_=bool, default_value=False, search_defaults=Boolean() if _eight_bits_overflow() else None,
                description="7-bit weights, against overflow on x86 CPUs without VNNI (searched there only)",
            ),
            "nodes_to_exclude": PassConfigParam(
                type_=list[str],
                description="names of nodes of the input model to leave in float; * and ? match any text. A name that matches nothing is refused",
            ),
            "quant_preprocess": PassConfigParam(
                type_=bool, default_value=True,
                description="infer shapes, fold constants and fuse batch normalization first; without it models often stay half in float",
            ),
        }  # fmt: skip

    @classmethod
    def validate_config(cls, config: Mapping[str, Any], accelerator_spec: AcceleratorSpec) -> None:
        """Refuse int8 activations with uint8 weights, and operators that the mode or format has no quantized form of."""
        if config.get("activation_type") == "int8" and config["weight_type"] == "uint8":
            raise PassConfigError(
                cls.__name__, "int8 activations need int8 weights", "activation_type='int8' with weight_type='uint8'",
                "Set weight_type to 'int8', or activation_type to 'uint8'.",
            )  # fmt: skip
        known = _operators_of(config)
        for part in config["op_types_to_quantize"].split("+"):
            if part != "all" and part not in GROUPS and part not in known:
                kind = config["quant_mode"] if config["quant_mode"] == "dynamic" else config["quant_format"]
                raise PassConfigError(cls.__name__, f"op_types_to_quantize must name operators that {kind} has", repr(part), nearest(part, known))

    @classmethod
    def traits(cls, config: Mapping[str, Any]) -> ModelTraits:
        """ONNX Runtime's quantizers make symmetric weights of int8 ones, asymmetric activations, and scales of any size."""
        weights = config["weight_type"]
        common = ModelTraits(
            quantized=True, weight_type=weights, symmetric_weights=weights == "int8", symmetric_activations=False, power_of_two=False,
            per_channel=config["per_channel"],
        )  # fmt: skip
        if config["quant_mode"] == "dynamic":
            return replace(common, format="dynamic", activation_type="uint8")
        return replace(common, format=config["quant_format"].lower(), activation_type=config["activation_type"])

    def _run_for_config(self, model: ONNXModelHandler, config: Mapping[str, Any], output_model_path: Path) -> ONNXModelHandler:
        given = load_fixed(model)
        if is_quantized(given):
            raise PassError(
                WHO, "takes a float model", "one that holds quantized operators already", "Leave this pass out, or start from the float model."
            )
        if config["per_channel"] and default_opset(given) < PER_CHANNEL_OPSET:
            raise PassError(
                WHO, f"per_channel needs opset {PER_CHANNEL_OPSET} or later", f"opset {default_opset(given)}",
                "Set per_channel to false, or convert the model to a later opset first.",
            )  # fmt: skip
        before = operator_counts(given)
        named = type(given)()
        named.CopyFrom(given)
        name_every_node(named)
        excluded = _matching_nodes(named, config.get("nodes_to_exclude") or [])
        prepared = _prepare(named, optimize=config["quant_preprocess"], excluded=excluded)
        operators = _operator_types(config)
        coverage = _coverage(prepared.proto, operators, prepared.excluded)
        _refuse_wild_weights(prepared.proto)
        notes: dict[str, Any] = {"operators_before": before, "quantizable_nodes": coverage.quantizable, **prepared.notes}
        if not coverage.quantizable:
            return unchanged(model, output_model_path, coverage.reason, notes={**notes, "operators_after": before, "quantized_nodes": 0})

        overrides = _scalar_scales(prepared.proto, operators, notes) if config["per_channel"] else {}
        if config["quant_mode"] == "static":
            if str(config.get("calibration_data_dir")) == RANDOM:
                notes["calibration"] = "random data: the activation ranges say nothing about real data"
            quantized = _quantize_static(prepared, operators, overrides, model, config)
        else:
            quantized = _quantize_dynamic(prepared, operators, config)
        after = operator_counts(quantized)
        notes.update(operators_after=after, quantized_nodes=_quantized_nodes(quantized))
        if not notes["quantized_nodes"]:
            return unchanged(
                model, output_model_path, "ONNX Runtime's quantizer left every weight in float", notes={**notes, "operators_after": before}
            )
        return model.written(output_model_path, proto=quantized, notes={**notes, "changed": True})


@dataclass(frozen=True)
class _Prepared:
    """A model ready for the quantizers: named, folded, with known shapes; and the nodes to leave alone, by their names there."""

    proto: onnx.ModelProto
    excluded: frozenset[str] = frozenset()
    notes: Mapping[str, Any] = field(default_factory=dict)


def _matching_nodes(proto: onnx.ModelProto, patterns: Sequence[str]) -> list[onnx.NodeProto]:
    """Nodes of the main graph that names or patterns mean. Raises `PassError` for one that matches nothing, with the nearest name."""
    found = {}
    for pattern in patterns:
        expression = glob_like(pattern)
        matches = [node for node in proto.graph.node if expression.fullmatch(node.name)]
        if not matches:
            names = [node.name for node in proto.graph.node]
            hint = nearest(pattern, names) if len(names) <= 20 or nearest(pattern, names).startswith("Did") else "No node's name is near it."
            raise PassError(WHO, "each entry of nodes_to_exclude must match a node of the model", repr(pattern), hint)
        found.update({node.name: node for node in matches})
    return list(found.values())


def _prepare(named: onnx.ModelProto, *, optimize: bool, excluded: Sequence[onnx.NodeProto]) -> _Prepared:
    """Fold and fuse by ONNX Runtime's basic level, infer shapes, lift constants, and give shared biases a copy each.

    Excluded nodes are looked up again afterwards: fusions rename nodes. Where one can't be found, nothing is fused.
    """
    notes: dict[str, Any] = {}
    proto = named
    if optimize:
        known = initializer_names(named)
        try:
            proto = optimize_by_session(named, "basic")
        except Exception as error:  # the quantizer may still take what a session would not
            notes["preprocess"] = f"not optimized first: {short_message(error)}"
            optimize = False
        rename_new_initializers(proto, known)
    names, lost = _find_again(proto, excluded)
    if lost and optimize:
        notes["preprocess"] = f"not optimized first: fusions would have hidden excluded nodes ({', '.join(lost[:3])})"
        proto = named
        names = frozenset(node.name for node in excluded)
    if optimize or default_opset(proto) <= 10:
        proto, problem = _with_shapes(proto)
        if problem:
            notes["shape_inference"] = problem
    else:
        copied = type(proto)()
        copied.CopyFrom(proto)
        proto = copied
    name_every_node(proto)
    lift_constants(proto)
    _own_biases(proto)
    _own_weights(proto)
    return _Prepared(proto, names, notes)


def _find_again(proto: onnx.ModelProto, excluded: Sequence[onnx.NodeProto]) -> tuple[frozenset[str], list[str]]:
    """Names in `proto` of nodes that came from another model, and the names of those that can't be told.

    A node is the same if it has the name, or gives the same output, or multiplies by the same weight.
    """
    by_name = {node.name: node for node in proto.graph.node}
    weights = initializer_names(proto)
    names, lost = set(), []
    for node in excluded:
        same = [node.name] if node.name in by_name else []
        same = same or [n.name for n in proto.graph.node if set(n.output) & set(node.output)]
        held = set(node.input) & weights
        same = same or [n.name for n in proto.graph.node if held & set(n.input)]
        names.update(same)
        if not same:
            lost.append(node.name)
    return frozenset(names), lost


def _with_shapes(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, str]:
    """Infer symbolic, then plain shapes; Upsample becomes Resize below opset 11. The second value says what did not work."""
    import onnx
    from onnxruntime.quantization.shape_inference import quant_pre_process

    problem = ""
    with tempfile.TemporaryDirectory(prefix="autotune-shapes-") as name:
        target = Path(name, "shapes.onnx")
        for symbolic in (True, False):
            copied = type(proto)()
            copied.CopyFrom(proto)
            try:
                with quiet():
                    quant_pre_process(
                        copied, str(target), skip_optimization=True, skip_symbolic_shape=not symbolic, auto_merge=True,
                        save_as_external_data=message_bytes(proto) >= LARGE_BYTES, all_tensors_to_one_file=True,
                    )  # fmt: skip
                return onnx.load(str(target)), problem
            except Exception as error:  # symbolic inference fails on many dynamic shapes; plain inference is second best
                problem = f"{'symbolic' if symbolic else 'plain'} shape inference failed: {short_message(error)}"
    copied = type(proto)()
    copied.CopyFrom(proto)
    return copied, problem


def _own_biases(proto: onnx.ModelProto) -> None:
    """Give each Conv and Gemm a bias of its own, of rank 1.

    A shared one would be quantized for one of them and be wrong for the other; on the rank 2 that Gemm allows, quantization per
    channel stops with "The truth value of an array with more than one element is ambiguous".
    """
    from onnx import numpy_helper

    initializers = {t.name: t for t in proto.graph.initializer}
    taken = value_names(proto)
    uses = Counter(name for graph in graphs_of(proto.graph) for node in graph.node for name in node.input)
    for node in proto.graph.node:
        if node.op_type not in ("Conv", "ConvTranspose", "Gemm") or len(node.input) < 3 or not node.input[2]:
            continue
        bias = initializers.get(node.input[2])
        weight = initializers.get(node.input[1])
        if bias is None or weight is None:
            continue
        values = numpy_helper.to_array(bias)
        if node.op_type == "Gemm" and len(weight.dims) == 2:
            transposed = any(a.name == "transB" and a.i for a in node.attribute)
            channels = weight.dims[0] if transposed else weight.dims[1]
            if values.size == 1:
                values = np.full(channels, values.reshape(-1)[0], values.dtype)
            elif values.size == channels and values.shape[-1] == channels:
                values = values.reshape(channels)
        if uses[bias.name] < 2 and values.shape == tuple(bias.dims):
            continue
        uses[bias.name] -= 1
        own = numpy_helper.from_array(np.ascontiguousarray(values), fresh_name(f"{bias.name}_own", taken))
        taken.add(own.name)
        proto.graph.initializer.append(own)
        node.input[2] = own.name


def _own_weights(proto: onnx.ModelProto) -> None:
    """Give nodes that take a weight along different axes a copy each.

    Quantized per channel once, for the axis of the first node, a weight is silently wrong for a Gemm that takes it transposed.
    """
    initializers = {t.name: t for t in proto.graph.initializer}
    taken = value_names(proto)
    copies: dict[tuple[str, str], str] = {}
    first: dict[str, str] = {}
    for node in proto.graph.node:
        for index in WEIGHTED.get(node.op_type, ()):
            name = node.input[index] if index < len(node.input) else ""
            if name not in initializers or len(initializers[name].dims) < 2:
                continue
            axis = f"{node.op_type} {index}"
            if node.op_type in ("MatMul", "Gemm"):
                transposed = any(a.name == ("transA", "transB")[index] and a.i for a in node.attribute)
                axis = f"product {index != transposed}"
            if first.setdefault(name, axis) == axis:
                continue
            if (name, axis) not in copies:
                own = proto.graph.initializer.add()
                own.CopyFrom(initializers[name])
                own.name = copies[name, axis] = fresh_name(f"{name}_own", taken)
                taken.add(own.name)
            node.input[index] = copies[name, axis]


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
class _Coverage:
    """How many nodes of the chosen types hold constant weights, and why it is none."""

    quantizable: int
    reason: str


def _coverage(proto: onnx.ModelProto, operators: Iterable[str], excluded: frozenset[str]) -> _Coverage:
    wanted = set(operators)
    weights = {t.name for t in proto.graph.initializer if t.data_type == _float_type()}

    def weighted(node: onnx.NodeProto) -> bool:
        return any(i < len(node.input) and node.input[i] in weights for i in WEIGHTED.get(node.op_type, ()))

    chosen = [n for n in proto.graph.node if n.op_type in wanted]
    kept = [n for n in chosen if n.name not in excluded]
    quantizable = sum(map(weighted, kept))
    inside = Counter(n.op_type for graph in list(graphs_of(proto.graph))[1:] for n in graph.node if n.op_type in WEIGHTED)
    inside.update(n.op_type for f in proto.functions for n in f.node if n.op_type in WEIGHTED)
    listed = ", ".join(f"{count} {name}" for name, count in sorted(inside.items()))
    reason = ""
    if chosen and not kept:
        reason = "every node of the chosen types is excluded"
    elif not quantizable:
        heavy = sorted(set(WEIGHTED) & wanted) or sorted(wanted)
        reason = f"no {'/'.join(heavy)} with constant float32 weights in the main graph"
        if listed:
            reason += f"; {listed} are inside bodies of If, Loop, Scan or of the model's own functions, which stay float"
    return _Coverage(quantizable=quantizable, reason=reason)


def _refuse_wild_weights(proto: onnx.ModelProto) -> None:
    """Raise `PassError` for weights that are not finite: no scale can be found for them, and the quantizer would not say so."""
    from onnx import numpy_helper

    for tensor in proto.graph.initializer:
        if tensor.data_type == _float_type() and len(tensor.dims) > 1 and not np.isfinite(numpy_helper.to_array(tensor)).all():
            raise PassError(WHO, "weights must be finite", f"NaN or infinity in {tensor.name!r}", "Mend the model, or exclude what it feeds.")


def _scalar_scales(proto: onnx.ModelProto, operators: Iterable[str], notes: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Keep one scale for MatMul weights of rank 3 and more: per channel the quantizer fails on them, or the model fails to run."""
    ranks = {t.name: len(t.dims) for t in proto.graph.initializer}
    if "MatMul" not in set(operators):
        return {}
    deep = sorted({name for n in proto.graph.node if n.op_type == "MatMul" for name in n.input if ranks.get(name, 0) > 2})
    if deep:
        notes["per_channel"] = (
            f"one scale for {len(deep)} weights of rank 3 or more, where ONNX Runtime has no per-channel kernel: {', '.join(deep[:5])}"
        )
    return {name: [{}] for name in deep}


def _quantize_static(
    prepared: _Prepared, operators: list[str], overrides: Mapping[str, Any], model: ONNXModelHandler, config: Mapping[str, Any]
) -> onnx.ModelProto:
    from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
    from onnxruntime.quantization.quant_utils import QuantizationMode, QuantType

    types = {"int8": QuantType.QInt8, "uint8": QuantType.QUInt8}
    data = config.get("calibration_data_dir")
    if data is None:
        raise PassError(
            WHO, "static mode needs calibration data", "calibration_data_dir=None", "Give calibration data, or set quant_mode to 'dynamic'."
        )
    walk = calibration_feeds(Path(data), model.io, config["calibration_samples"], who=WHO)
    with tempfile.TemporaryDirectory(prefix="autotune-quantize-") as name:
        path = Path(name, MODEL_FILE)
        copied = type(prepared.proto)()
        copied.CopyFrom(prepared.proto)
        save_onnx(copied, path)
        with library_errors(WHO, "the model must run on the calibration data with its inner values as outputs"):
            ranges = activation_ranges(
                path, walk, method=config["calibrate_method"], percentile=float(config.get("percentile", 100.0)), op_types=operators
            )
        options: dict[str, Any] = {"DefaultTensorType": _float_type()}
        if overrides:
            options["TensorQuantOverrides"] = {n: [{"quant_type": types[config["weight_type"]]}] for n in overrides}
        given: tuple[Any, ...] = (
            types[config["weight_type"]],
            types[config["activation_type"]],
            ranges,
            [],
            sorted(prepared.excluded),
            operators,
            options,
        )
        with library_errors(WHO, "the model must be one that ONNX Runtime's static quantizer takes"), quiet():
            if config["quant_format"] == "QDQ":
                quantizer = QDQQuantizer(copied, config["per_channel"], config["reduce_range"], *given)
            else:
                quantizer = ONNXQuantizer(copied, config["per_channel"], config["reduce_range"], QuantizationMode.QLinearOps, True, *given)
            quantizer.quantize_model()
            result: onnx.ModelProto = quantizer.model.model
    return result


def _quantize_dynamic(prepared: _Prepared, operators: list[str], config: Mapping[str, Any]) -> onnx.ModelProto:
    from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer
    from onnxruntime.quantization.quant_utils import QuantizationMode, QuantType

    weight_type = QuantType.QInt8 if config["weight_type"] == "int8" else QuantType.QUInt8
    # A Gemm becomes NAME_MatMul and NAME_Add; an exclusion must follow it there.
    excluded = sorted(prepared.excluded | {f"{name}_MatMul" for name in prepared.excluded})
    options = {"MatMulConstBOnly": True, "DefaultTensorType": _float_type()}
    copied = type(prepared.proto)()
    copied.CopyFrom(prepared.proto)
    with library_errors(WHO, "the model must be one that ONNX Runtime's dynamic quantizer takes"), quiet():
        quantizer = ONNXQuantizer(
            copied, config["per_channel"], config["reduce_range"], QuantizationMode.IntegerOps, False, weight_type, QuantType.QUInt8,
            None, [], excluded, operators, options,
        )  # fmt: skip
        quantizer.quantize_model()
        result: onnx.ModelProto = quantizer.model.model
    return result


def _float_type() -> int:
    """Type to assume where inference found none, as behind operators of other domains; without it the quantizer gives up."""
    import onnx

    return int(onnx.TensorProto.FLOAT)


def _quantized_nodes(proto: onnx.ModelProto) -> int:
    """Nodes that work with 8-bit weights: integer forms of operators that hold weights, and float ones behind a DequantizeLinear.

    A weight is told from a zero point by its rank, 2 or more.
    """
    import onnx

    small = {t.name for t in proto.graph.initializer if t.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8) and len(t.dims) > 1}
    dequantized = {name for n in proto.graph.node if n.op_type == "DequantizeLinear" and n.input[0] in small for name in n.output}
    holders = [n for n in proto.graph.node if any(name in n.op_type for name in WEIGHTED)]  # MatMulInteger, QLinearConv, QGemm ...
    return sum(not (small | dequantized).isdisjoint(n.input) for n in holders)
