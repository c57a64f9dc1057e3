"""OnnxMixedPrecision: float16 or bfloat16 where the values that were seen fit into it, float32 elsewhere.

The conversion is that of OnnxFloatToFloat16; here calibration data decides what stays in float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from autotune.errors import PassError, nearest
from autotune.model import ONNXModelHandler
from autotune.passes.base import ONNX, AcceleratorSpec, ModelTraits, ParamCategory, Pass, PassConfigParam, PassContract
from autotune.passes.calibration import calibration_feeds, visit_activations
from autotune.passes.float16_graph import (
    ADVICE,
    LARGEST,
    SMALLEST,
    block_list_rows,
    clipped_weights,
    convert,
    count_weights,
    known_operators,
    why_not_float32,
    with_shapes,
)
from autotune.passes.onnx_graph import (
    glob_like,
    graphs_of,
    library_errors,
    load_fixed,
    loads_at_every_level,
    matching_nodes,
    name_every_node,
    operator_counts,
    unchanged,
    weight_bytes,
)
from autotune.passes.onnx_outputs import real_feeds, run_at
from autotune.passes.registry import register
from autotune.search_spaces.parameters import INACTIVE, Categorical, Conditional, ConditionalDefault

if TYPE_CHECKING:
    import onnx

WHO = "OnnxMixedPrecision"
# Operators that add up many values; at each, how many is found from the shapes that were seen.
REDUCTIONS = frozenset({
    "MatMul", "Gemm", "Conv", "ConvTranspose", "ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum",
    "ReduceLogSumExp", "GlobalAveragePool", "AveragePool", "LayerNormalization", "InstanceNormalization", "GroupNormalization", "Softmax",
    "LogSoftmax", "CumSum", "LpNormalization", "SimplifiedLayerNormalization", "RMSNormalization", "SkipLayerNormalization",
})  # fmt: skip
NARROW = {"float16": "FLOAT16", "bfloat16": "BFLOAT16"}
LISTED = 50


@register
class OnnxMixedPrecision(Pass):
    """Turn a float32 model into 16 bits, except for nodes whose values leave its range or that add up too many numbers."""

    contract = PassContract(
        accepts=ONNX,
        returns=ONNX,
        min_opset=7,
        needs_calibration_when={"range_screen": True},
        data={"calibration_data_dir": "calibration"},
        version=1,
    )

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        on_cpu = accelerator_spec.execution_provider == "CPUExecutionProvider"
        return {
            "precision": PassConfigParam(
                type_=Literal["float16", "bfloat16"], default_value="float16", search_defaults=Categorical(["float16"] if on_cpu else [*NARROW]),
                description="float16 (11 bits of mantissa, up to 65504) or bfloat16 (8 bits, the range of float32), which ONNX Runtime's CPU "
                "execution provider has next to no kernels for",
            ),
            "keep_io_types": PassConfigParam(
                type_=bool, default_value=True,
                description="keep float32 inputs and outputs, with casts at the rim; otherwise whoever calls the model must use 16 bits",
            ),
            "range_screen": PassConfigParam(
                type_=bool, default_value=True,
                description="run the model on calibration data and leave nodes in float32 whose values are too large, or that add up too many; "
                "nodes with branches or bodies, whose values can't be seen, too",
            ),
            "max_activation": PassConfigParam(
                type_=float, minimum=1.0, maximum=LARGEST, default_value=ConditionalDefault("range_screen", {True: LARGEST}, default=INACTIVE),
                search_defaults=Conditional("range_screen", {True: Categorical([LARGEST, 512.0])}, default=INACTIVE),
                description="largest size of a value that a 16-bit node may take or make; smaller leaves room for inputs that were not seen",
            ),
            "max_reduction": PassConfigParam(
                type_=int, minimum=1, default_value=ConditionalDefault("range_screen", {True: 4096}, default=INACTIVE),
                search_defaults=Conditional("range_screen", {True: Categorical([4096, 512])}, default=INACTIVE),
                description="most numbers that a 16-bit node may add up for one result; beyond, float16 sums lose small terms",
            ),
            **block_list_rows(),
            "value_block_list": PassConfigParam(
                type_=list[str],
                description="names of weights and inner values; nodes that take or make them stay in float32. * and ? match any text. A name that "
                "matches nothing is refused",
            ),
            "calibration_data_dir": PassConfigParam(
                type_=str | Path, category=ParamCategory.DATA,
                description="an .npz of calibration examples, or a folder of such files; needed for the range screen",
            ),
            "calibration_samples": PassConfigParam(
                type_=int, minimum=1, default_value=ConditionalDefault("range_screen", {True: 16}, default=INACTIVE),
                description="examples to look at the values of, at most; spread evenly over the data",
            ),
        }  # fmt: skip

    @classmethod
    def traits(cls, config: Mapping[str, Any]) -> ModelTraits:
        """Weights and arithmetic in 16 bits, for the most part."""
        return ModelTraits(weight_type=config["precision"], activation_type=config["precision"])

    def _run_for_config(self, model: ONNXModelHandler, config: Mapping[str, Any], output_model_path: Path) -> ONNXModelHandler:
        given = load_fixed(model)
        before = operator_counts(given)
        notes: dict[str, Any] = {"operators_before": before, "weight_bytes_before": weight_bytes(given)}
        reason = why_not_float32(given)
        if reason:
            return unchanged(model, output_model_path, reason, notes={**notes, "operators_after": before})
        data = config.get("calibration_data_dir")
        if config["range_screen"] and data is None:
            raise PassError(
                WHO, "the range screen needs calibration data", "calibration_data_dir=None", "Give calibration data, or set range_screen to false."
            )
        given = with_shapes(given, who=WHO)
        name_every_node(given)
        operators = known_operators(given, config.get("op_block_list") or [], who=WHO)
        kept = dict.fromkeys(matching_nodes(given, config.get("node_block_list") or [], who=WHO, parameter="node_block_list"), "named")
        kept.update(_nodes_at(given, config.get("value_block_list") or []))
        if config["range_screen"] and data is not None:
            walk = calibration_feeds(Path(data), model.io, config["calibration_samples"], who=WHO)
            seen = _Seen.of(given, walk)
            kept = {**_screened(given, seen, float(config["max_activation"]), config["max_reduction"], config["precision"]), **kept}
        notes["kept_float32"] = dict(sorted(Counter(kept.values()).items()))
        notes["kept_nodes"] = sorted(kept)[:LISTED]
        nodes_before = sum(len(g.node) for g in graphs_of(given.graph))
        notes["share_of_nodes"] = round(1 - len(kept) / max(nodes_before, 1), 4)
        if len(kept) >= len(given.graph.node):
            return unchanged(model, output_model_path, "every node has to stay in float32", notes={**notes, "operators_after": before})
        notes.update(clipped_weights(given, SMALLEST, LARGEST) if config["precision"] == "float16" else {})
        original = type(given)()
        original.CopyFrom(given)
        converted = convert(
            given, who=WHO, keep_io_types=config["keep_io_types"], operators=operators, nodes=sorted(kept), limits=(SMALLEST, LARGEST)
        )
        if config["precision"] == "bfloat16":
            _to_bfloat16(converted, original)
        if not count_weights(converted, NARROW[config["precision"]]):
            reason = "every node with weights has to stay in float32"
            return unchanged(model, output_model_path, reason, notes={**notes, "operators_after": before})
        if self.accelerator_spec.execution_provider == "CPUExecutionProvider":
            advice = ADVICE if config["precision"] == "float16" else "ONNX Runtime's CPU execution provider has few bfloat16 kernels: choose float16."
            with library_errors(WHO, f"the {config['precision']} model must load", advice):
                loads_at_every_level(converted)
            if data is not None:
                _refuse_not_finite(original, converted, model, Path(data), config["keep_io_types"])
        notes.update(
            operators_after=operator_counts(converted),
            weight_bytes_after=weight_bytes(converted),
            float32_weights_left=count_weights(converted, "FLOAT"),
        )
        return model.written(output_model_path, proto=converted, notes={**notes, "changed": True})


def _nodes_at(proto: onnx.ModelProto, patterns: list[str]) -> dict[str, str]:
    """Nodes that take or make a value that a name or pattern means."""
    names = sorted({n for g in graphs_of(proto.graph) for node in g.node for n in (*node.input, *node.output) if n})
    wanted: set[str] = set()
    for pattern in patterns:
        matches = {name for name in names if glob_like(pattern).fullmatch(name)}
        if not matches:
            hint = nearest(pattern, names)
            raise PassError(
                WHO, "each entry of value_block_list must match a value of the model", repr(pattern), hint if hint.startswith("Did") else ""
            )
        wanted |= matches
    nodes = [node for g in graphs_of(proto.graph) for node in g.node]
    return {node.name: "named by a value" for node in nodes if wanted & {*node.input, *node.output}}


@dataclass
class _Seen:
    """Largest size and last shape of each float value of the main graph."""

    largest: dict[str, float]
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, proto: onnx.ModelProto, walk: Any) -> _Seen:
        seen = cls({}, {t.name: tuple(t.dims) for t in proto.graph.initializer})

        def visit(name: str, array: NDArray[Any]) -> None:
            with np.errstate(all="ignore"):
                size = float(np.abs(array).max())
            size = float("inf") if np.isnan(size) else size
            seen.largest[name] = max(seen.largest.get(name, 0.0), size)
            seen.shapes[name] = array.shape

        names = [*(v.name for v in proto.graph.input), *(n for node in proto.graph.node for n in node.output if n)]
        with library_errors(WHO, "the model must run on the calibration data with its inner values as outputs"):
            visit_activations(proto, walk, names, visit)
        return seen


def _screened(proto: onnx.ModelProto, seen: _Seen, largest: float, reduction: int, precision: str) -> dict[str, str]:
    """Nodes that have to stay in float32, with the reason."""
    kept: dict[str, str] = {}
    for node in proto.graph.node:
        size = max((seen.largest.get(name, 0.0) for name in (*node.input, *node.output)), default=0.0)
        if any(a.HasField("g") or a.graphs for a in node.attribute):
            kept[node.name] = "has branches or a body"
        elif precision == "float16" and size > largest:
            kept[node.name] = f"values beyond {largest:g}"
        elif node.op_type in REDUCTIONS and _terms(node, seen.shapes) > reduction:
            kept[node.name] = f"adds up more than {reduction} numbers"
    return kept


def _terms(node: onnx.NodeProto, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """How many numbers a node adds up for one result; 0 where that was not seen."""
    shape = shapes.get(node.input[0], ())
    if not shape:
        return 0
    if node.op_type == "MatMul":
        return shape[-1]
    if node.op_type == "Gemm":
        return shape[0 if any(a.name == "transA" and a.i for a in node.attribute) else -1]
    if node.op_type in ("Conv", "ConvTranspose"):
        weight = shapes.get(node.input[1], ())
        if not weight:
            return 0
        return int(np.prod(weight[1:])) if node.op_type == "Conv" else weight[0] * int(np.prod(weight[2:]))
    if "Softmax" in node.op_type or node.op_type in ("CumSum", "LpNormalization"):
        axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
        return shape[axis] if -len(shape) <= axis < len(shape) else 0
    if "LayerNormalization" in node.op_type or node.op_type == "RMSNormalization":
        axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
        return int(np.prod(shape[axis:]))
    if node.op_type in ("InstanceNormalization", "GroupNormalization"):
        return int(np.prod(shape[2:]))
    after = shapes.get(node.output[0], shape)
    return int(np.prod(shape) // max(int(np.prod(after)), 1))


def _to_bfloat16(proto: onnx.ModelProto, original: onnx.ModelProto) -> None:
    """Turn a float16 model into bfloat16; the weights come from the float32 one, as float16 has cut them."""
    import ml_dtypes
    from onnx import helper, numpy_helper

    half, brain = 10, 16  # TensorProto.FLOAT16 and BFLOAT16
    exact = {t.name: t for g in graphs_of(original.graph) for t in g.initializer}
    constants = {
        n.output[0]: a.t for g in graphs_of(original.graph) for n in g.node for a in n.attribute if n.op_type == "Constant" and a.HasField("t")
    }

    def narrow(tensor: onnx.TensorProto, source: onnx.TensorProto | None) -> None:
        values = numpy_helper.to_array(source if source is not None and source.data_type == 1 else tensor).astype(ml_dtypes.bfloat16)
        tensor.CopyFrom(helper.make_tensor(tensor.name, brain, values.shape, values.tobytes(), raw=True))

    for graph in graphs_of(proto.graph):
        for tensor in graph.initializer:
            if tensor.data_type == half:
                narrow(tensor, exact.get(tensor.name))
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.tensor_type.elem_type == half:
                value.type.tensor_type.elem_type = brain
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("t") and attribute.t.data_type == half:
                    narrow(attribute.t, constants.get(node.output[0]))
                elif attribute.name in ("to", "dtype") and attribute.i == half:
                    attribute.i = brain


def _refuse_not_finite(before: onnx.ModelProto, after: onnx.ModelProto, model: ONNXModelHandler, data: Path, keep_io_types: bool) -> None:
    """Run both on real rows. Raises `PassError` where the 16-bit model loses numbers that the other has."""
    feeds = real_feeds(data, model.io, who=WHO)
    half = {v.name for v in after.graph.input if v.type.tensor_type.elem_type == 10}
    if any(v.type.tensor_type.elem_type == 16 for v in after.graph.input) and not keep_io_types:
        return  # numpy has no such numbers to feed
    narrow = [{n: a.astype(np.float16) if n in half else a for n, a in feed.items()} for feed in feeds]
    with library_errors(WHO, "the converted model must run on the calibration data", ADVICE):
        wanted, got = run_at(before, feeds, "all"), run_at(after, narrow, "all")
    for old, new in zip(wanted, got, strict=True):
        for spec, a, b in zip(model.io.outputs, old, new, strict=True):
            if isinstance(a, np.ndarray) and a.dtype.kind == "f" and np.isfinite(a).all() and not np.isfinite(np.asarray(b, np.float32)).all():
                raise PassError(
                    WHO, "the converted model must give finite numbers where the float32 model does", f"NaN or infinity in output {spec.name!r}",
                    "Lower max_activation, or name what overflows in op_block_list.",
                )  # fmt: skip
