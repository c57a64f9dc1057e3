"""OnnxPruning: take the smallest weights out of an ONNX model, without training.

Whole channels make a smaller and faster model. Single weights (and n of m) only become zeros: ONNX Runtime multiplies by zeros like by any
number (measured: an MLP with 80 % zeros takes the time of the dense one), so that serves other runtimes and compressed files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from autotune.errors import PassError, nearest
from autotune.model import ONNXModelHandler
from autotune.passes.base import ONNX, AcceleratorSpec, ModelTraits, ParamCategory, Pass, PassConfigParam, PassContract
from autotune.passes.onnx_channels import Channels, components, follow_channels, remove_channels
from autotune.passes.onnx_graph import (
    graphs_of,
    is_quantized,
    library_errors,
    lift_constants,
    load_fixed,
    matching_nodes,
    name_every_node,
    operator_counts,
    unchanged,
)
from autotune.passes.onnx_outputs import LEVELS, NotComparable, run_at, usable_feeds
from autotune.passes.registry import register
from autotune.search_spaces.parameters import INACTIVE, Categorical, Conditional, ConditionalDefault

if TYPE_CHECKING:
    import onnx

WHO = "OnnxPruning"

OPERATORS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
ZEROS_HELP_NOT = "zeros change neither latency nor size in ONNX Runtime, which has no sparse kernels; they serve compression and other runtimes"
FLOATS = frozenset({1, 10, 11, 16})  # float32, float16, float64, bfloat16


def _operator_fault(value: str) -> str:
    known = {"all", *OPERATORS}
    unknown = [part for part in value.split("+") if part not in known]
    return f"all, or operators joined by + (no {unknown[0]!r}: {nearest(unknown[0], known)})" if unknown else ""


def _pattern_fault(value: str) -> str:
    kept, _, of = value.partition(":")
    good = kept.isdigit() and of.isdigit() and 0 < int(kept) < int(of) <= 64
    return "" if good else "two whole numbers, kept:of, such as 2:4"


@register
class OnnxPruning(Pass):
    """Remove the channels with the smallest weights, or set the smallest weights to zero.

    Channels are followed through the main graph, not into branches and bodies, and not through shapes, pads and biases that the graph computes:
    OnnxModelOptimizer before this pass makes constants of most.
    """

    contract = PassContract(
        accepts=ONNX, returns=ONNX, min_opset=7, refuses_quantized_input=True, data={"compare_data_dir": "calibration"}, version=1
    )

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {
            "method": PassConfigParam(
                type_=Literal["channel", "unstructured", "n_m"], default_value="channel", search_defaults=Categorical(["channel"]),
                description="channel removes whole channels, which makes the model smaller and faster; unstructured and n_m set single weights to "
                "zero, which makes it neither in ONNX Runtime: not searched",
            ),
            "sparsity": PassConfigParam(
                type_=float, minimum=0.0, maximum=0.99,
                default_value=ConditionalDefault("method", {("channel",): 0.15, ("unstructured",): 0.5}, default=INACTIVE),
                search_defaults=Conditional(
                    "method",
                    {("channel",): Categorical([0.05, 0.1, 0.15, 0.25, 0.35]), ("unstructured",): Categorical([0.25, 0.5, 0.75])},
                    default=INACTIVE,
                ),
                description="share of the channels, or of the weights, of each layer that goes; without training, small shares",
            ),
            "importance": PassConfigParam(
                type_=Literal["l1", "l2", "in_out"], default_value=ConditionalDefault("method", {("channel",): "in_out"}, default=INACTIVE),
                search_defaults=Conditional("method", {("channel",): Categorical(["in_out", "l2"])}, default=INACTIVE),
                description="what makes a channel matter: size of the weights that make it (l1, l2, batch normalization counted in), or in_out: l2 "
                "times the size of the weights that take it. Channels only",
            ),
            "round_to": PassConfigParam(
                type_=int, minimum=1, maximum=256, default_value=ConditionalDefault("method", {("channel",): 8}, default=INACTIVE),
                search_defaults=Conditional("method", {("channel",): Categorical([8])}, default=INACTIVE),
                description="round the channels kept up to a multiple of this (of a quarter of the layer, if less), to fit vectors. Channels only",
            ),
            "pattern": PassConfigParam(
                type_=str, check=_pattern_fault, default_value=ConditionalDefault("method", {("n_m",): "2:4"}, default=INACTIVE),
                search_defaults=Conditional("method", {("n_m",): Categorical(["2:4"])}, default=INACTIVE),
                description="kept:of, of so many weights in a row along the axis that sums run over. n_m only",
            ),
            "op_types": PassConfigParam(
                type_=str, default_value="all", check=_operator_fault,
                description="all, or some of Conv, ConvTranspose, Gemm and MatMul, joined by +; layers of other types keep their weights",
            ),
            "nodes_to_exclude": PassConfigParam(
                type_=list[str],
                description="names of nodes that keep their weights; * and ? match any text. A name that matches nothing is refused",
            ),
            "compare_data_dir": PassConfigParam(
                type_=str | Path, category=ParamCategory.DATA,
                description="rows on which outputs are checked afterwards (an .npz, or a folder of them); without any, made-up inputs are used",
            ),
        }  # fmt: skip

    @classmethod
    def traits(cls, config: Mapping[str, Any]) -> ModelTraits:
        """Pruning, unless everything is kept."""
        return ModelTraits(methods=frozenset() if config.get("sparsity") == 0 else frozenset({"pruning"}))

    def _run_for_config(self, model: ONNXModelHandler, config: Mapping[str, Any], output_model_path: Path) -> ONNXModelHandler:
        given = load_fixed(model)
        if is_quantized(given):
            raise PassError(WHO, "takes a float model", "one that holds quantized operators", "Prune first, then quantize.")
        method = config["method"]
        if config.get("sparsity") == 0:
            return unchanged(model, output_model_path, "sparsity 0 keeps every weight")
        result = type(given)()
        result.CopyFrom(given)
        name_every_node(result)
        excluded = frozenset(matching_nodes(result, config.get("nodes_to_exclude") or [], who=WHO, parameter="nodes_to_exclude"))
        lift_constants(result)
        scope = _Scope(frozenset(OPERATORS) if config["op_types"] == "all" else frozenset(config["op_types"].split("+")), excluded)
        before = _count(given)
        notes: dict[str, Any] = {"method": method, "operators_before": operator_counts(given), "weights_before": before}
        with library_errors(WHO, "the model's weights must be readable"):
            if method == "channel":
                found, reason = _prune_channels(result, scope, config["sparsity"], config["importance"], config["round_to"])
            else:
                found, reason = _prune_weights(result, scope, config)
        notes.update(found)
        if reason:
            return unchanged(model, output_model_path, reason, notes={**notes, "weights_after": before})
        after = _count(result)
        notes.update(weights_after=after, share_of_weights_removed=round(1 - after / before, 4) if before else 0.0)
        notes.update(self._check_outputs(model, given, result, config))
        return model.written(output_model_path, proto=result, notes={**notes, "changed": True})

    def _check_outputs(self, model: ONNXModelHandler, given: onnx.ModelProto, result: onnx.ModelProto, config: Mapping[str, Any]) -> dict[str, Any]:
        """Outputs must keep their shapes and be finite where they were; notes say how far they moved."""
        data = config.get("compare_data_dir")
        try:
            feeds, words = usable_feeds(given, model.io, data=None if data is None else Path(data), who=WHO)
        except NotComparable as error:
            do = "Leave this pass out." if data else "Give calibration data, so that real rows can be tried."
            raise PassError(WHO, "the input model must run, so that the result can be checked", str(error), do) from error
        moved = 0.0
        for level in LEVELS:
            with library_errors(WHO, f"the pruned model must run at optimization level {level}", "Name the layers in nodes_to_exclude."):
                old, new = run_at(given, feeds, level), run_at(result, feeds, level)
            for wanted, got in zip(old, new, strict=True):
                for spec, a, b in zip(model.io.outputs, wanted, got, strict=True):
                    if not (isinstance(a, np.ndarray) and a.dtype.kind == "f" and isinstance(b, np.ndarray)):
                        continue
                    if a.shape != b.shape:
                        raise PassError(WHO, f"output {spec.name!r} must keep its shape {list(a.shape)}", f"{list(b.shape)}")
                    if np.isfinite(a).all() and not np.isfinite(b).all():
                        raise PassError(WHO, f"output {spec.name!r} must stay finite", "infinite or no numbers", "Lower sparsity.")
                    finite = np.isfinite(a) & np.isfinite(b)
                    if finite.any():
                        x, y = a[finite].astype(np.float64), b[finite].astype(np.float64)
                        moved = max(moved, float(np.linalg.norm(x - y)) / max(float(np.linalg.norm(x)), 1e-12))
        return {"checked_on": words, "outputs_moved_by": round(moved, 4)}


@dataclass(frozen=True)
class _Scope:
    operators: frozenset[str]
    excluded: frozenset[str]

    def __call__(self, node: onnx.NodeProto) -> bool:
        return node.op_type in self.operators and node.name not in self.excluded


def _count(proto: onnx.ModelProto) -> int:
    """Numbers in floating-point initializers and constants of all graphs."""
    tensors = [t for g in graphs_of(proto.graph) for t in g.initializer]
    tensors += [a.t for g in graphs_of(proto.graph) for n in g.node if n.op_type == "Constant" for a in n.attribute if a.name == "value"]
    return sum(int(np.prod(list(t.dims), dtype=np.int64)) for t in tensors if t.data_type in FLOATS)


# ---------------------------------------------------------------------- channels


def _prune_channels(proto: onnx.ModelProto, scope: _Scope, sparsity: float, importance: str, round_to: int) -> tuple[dict[str, Any], str]:
    """Remove the least important channels of every set of layers that go together. Returns notes, and why nothing was done."""
    channels = follow_channels(proto, may_make=scope)
    sizes = _importances(proto, channels, importance)
    gone: set[int] = set()
    total = free = 0
    for group in components(channels):
        candidates = [root for root in group if not channels.is_frozen(root)]
        total, free = total + len(group), free + len(candidates)
        keep = len(candidates) - int(sparsity * len(candidates))
        step = max(min(round_to, len(group) // 4), 1)
        fixed = len(group) - len(candidates)
        keep = min(max(-(-(keep + fixed) // step) * step - fixed, 1), len(candidates))
        ranked = sorted(candidates, key=lambda root: (sizes[root], root))
        gone.update(ranked[: len(candidates) - keep])
    reasons = dict(channels.frozen_by.most_common())
    notes: dict[str, Any] = {
        "channels": total, "channels_removable": free, "channels_removed": len(gone),
        "share_of_channels_removed": round(len(gone) / total, 4) if total else 0.0, "channels_kept_by": reasons,
    }  # fmt: skip
    if not total:
        return notes, "no Conv, ConvTranspose, Gemm or MatMul with constant weights makes channels"
    if not free:
        by = ", ".join(f"{name} ({count})" for name, count in reasons.items()) or "weights shared with a layer that keeps its own"
        return notes, f"every channel is needed as it is: {by}"
    if not gone:
        return notes, f"sparsity {sparsity:g} removes no channel of any layer, rounded to multiples of {round_to}"
    remove_channels(proto, channels, frozenset(gone))
    return {**notes, "effect": "fewer weights and less arithmetic, so a smaller file and less time"}, ""


def _importances(proto: onnx.ModelProto, channels: Channels, importance: str) -> dict[int, float]:
    """Importance of each root: mean over the layers that make it, each layer's mean being 1; times the same of those that take it."""
    from onnx import numpy_helper

    arrays = {t.name: t for t in proto.graph.initializer}

    def norms(name: str, axis: int) -> NDArray[np.float64]:
        array = np.abs(np.moveaxis(numpy_helper.to_array(arrays[name]).astype(np.float64), axis, 0).reshape(arrays[name].dims[axis], -1))
        return np.asarray(array.mean(axis=1) if importance == "l1" else np.sqrt(np.square(array).mean(axis=1)))

    def gather(parts: Iterator[tuple[NDArray[np.int64], NDArray[np.float64]]]) -> dict[int, float]:
        sums: dict[int, float] = {}
        counts: Counter[int] = Counter()
        for units, values in parts:
            mean = float(values.mean()) or 1.0
            for root, value in zip(channels.roots(units), values, strict=True):
                sums[int(root)] = sums.get(int(root), 0.0) + float(value) / mean
                counts[int(root)] += 1
        return {root: value / counts[root] for root, value in sums.items()}

    made = gather((p.units, norms(p.weight, p.axis) * (1.0 if p.factor is None else p.factor)) for p in channels.producers)
    if importance != "in_out":
        return made
    taken = gather((units, norms(name, axis)) for name, axis, units in channels.consumers)
    return {root: value * taken.get(root, 1.0) for root, value in made.items()}


# ---------------------------------------------------------------------- single weights


def _prune_weights(proto: onnx.ModelProto, scope: _Scope, config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Set the smallest weights to zero, each tensor once. Returns notes, and why nothing was done."""
    from onnx import numpy_helper

    kept, of = (int(part) for part in config["pattern"].split(":")) if config["method"] == "n_m" else (0, 0)
    weights = zeros = more = tensors = 0
    uneven: list[str] = []
    for graph, axes in _weights_in(proto, scope):
        for tensor in graph.initializer:
            if tensor.name not in axes or tensor.data_type not in FLOATS:
                continue
            array = numpy_helper.to_array(tensor).copy()
            mask = _smallest_n_of_m(array, axes[tensor.name], kept, of) if of else _smallest(array, config["sparsity"])
            if mask is None:
                uneven.append(tensor.name)
                continue
            changed = int((mask & (array != 0)).sum())
            weights, tensors, more = weights + array.size, tensors + 1, more + changed
            array[mask] = 0
            zeros += int((array == 0).sum())
            if changed:
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    notes: dict[str, Any] = {
        "tensors_pruned": tensors, "weights_in_scope": weights, "zeros": zeros, "sparsity_reached": round(zeros / weights, 4) if weights else 0.0,
    }  # fmt: skip
    if of:
        notes["tensors_not_divisible"] = sorted(uneven)
    if not tensors:
        return notes, f"no weight in scope has rows of a multiple of {of}" if uneven else "no constant weight of the operators in scope"
    if not more:
        return notes, "the smallest weights are zeros already"
    return {**notes, "effect": ZEROS_HELP_NOT}, ""


def _weights_in(proto: onnx.ModelProto, scope: _Scope) -> Iterator[tuple[onnx.GraphProto, dict[str, int]]]:
    """Each graph with the weights of its own that nodes in scope take, and the axis that sums run over.

    A weight that a node out of scope takes too (excluded, or of another type) stays as it is.
    """
    every = list(graphs_of(proto.graph))
    axes: dict[str, int] = {}
    others: set[str] = set()
    for graph in every:
        for node in graph.node:
            for place, name in enumerate(node.input):
                if place == 1 and scope(node):
                    axes.setdefault(name, _sum_axis(node))
                else:
                    others.add(name)
    for graph in every:
        yield graph, {t.name: axes[t.name] for t in graph.initializer if t.name in axes and t.name not in others and len(t.dims) > 1}


def _sum_axis(node: onnx.NodeProto) -> int:
    if node.op_type == "Gemm":
        return 1 if any(a.name == "transB" and a.i for a in node.attribute) else 0
    return {"Conv": 1, "ConvTranspose": 0, "MatMul": -2}[node.op_type]


def _smallest(array: NDArray[Any], sparsity: float) -> NDArray[np.bool_]:
    """Mark the share of values that is nearest to zero; among equals the first."""
    count = int(sparsity * array.size)
    mask = np.zeros(array.size, dtype=bool)
    mask[np.argsort(np.abs(array.astype(np.float64)).ravel(), kind="stable")[:count]] = True
    return mask.reshape(array.shape)


def _smallest_n_of_m(array: NDArray[Any], axis: int, kept: int, of: int) -> NDArray[np.bool_] | None:
    """Mark all but the `kept` largest of every `of` values in a row along an axis; None when the axis is no multiple of `of`."""
    moved = np.abs(np.moveaxis(array.astype(np.float64), axis, -1))
    if moved.shape[-1] % of:
        return None
    rows = moved.reshape(-1, of)
    mask = np.ones(rows.shape, dtype=bool)
    np.put_along_axis(mask, np.argsort(-rows, axis=1, kind="stable")[:, :kept], False, axis=1)
    return np.moveaxis(mask.reshape(moved.shape), -1, axis)
