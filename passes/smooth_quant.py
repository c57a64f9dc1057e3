"""SmoothQuant: even out activation channels before they are quantized, by moving their size into the weights that follow.

Source: Xiao and others, "SmoothQuant", arXiv:2211.10438. Channel j is divided by `max|x_j| ** alpha / max|w_j| ** (1 - alpha)`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autotune.errors import PassError
from autotune.model import ONNXModelHandler
from autotune.passes.base import ONNX, AcceleratorSpec, ModelTraits, ParamCategory, Pass, PassConfigParam, PassContract
from autotune.passes.calibration import calibration_feeds, visit_activations
from autotune.passes.channel_scales import Group, Scaler, find_groups, refuse_difference
from autotune.passes.onnx_graph import (
    drop_unused_initializers,
    library_errors,
    lift_constants,
    load_fixed,
    loads_at_every_level,
    matching_nodes,
    name_every_node,
    operator_counts,
    unchanged,
)
from autotune.passes.registry import register
from autotune.search_spaces.parameters import Categorical

WHO = "SmoothQuant"
SMALLEST, LARGEST = 1e-4, 1e4  # of a scale: beyond, float32 begins to lose what the channels hold
LISTED = 50


@register
class SmoothQuant(Pass):
    """Scale activation channels down and the weights that meet them up, so that 8-bit activations lose less."""

    contract = PassContract(
        accepts=ONNX, returns=ONNX, min_opset=7, refuses_quantized_input=True, data={"calibration_data_dir": "calibration"}, version=1
    )

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {
            "alpha": PassConfigParam(
                type_=float, default_value=0.5, minimum=0.0, maximum=1.0, search_defaults=Categorical([0.3, 0.5, 0.7, 0.9]),
                description="how much of the difficulty moves from activations (1: all of it) to weights (0: the other way round)",
            ),
            "unfoldable": PassConfigParam(
                type_=Literal["leave", "insert"], default_value="leave", search_defaults=Categorical(["leave", "insert"]),
                description="what to do where no layer norm or weight before can take the scale, as behind GELU or where a residual branches "
                "off: leave the channels as they are, or insert a Mul, which costs time",
            ),
            "calibration_data_dir": PassConfigParam(
                type_=str | Path, category=ParamCategory.DATA, description="an .npz of calibration examples, or a folder of such files; needed",
            ),
            "calibration_samples": PassConfigParam(
                type_=int, minimum=1, default_value=64, description="examples to find the largest activations with, spread evenly over the data",
            ),
            "nodes_to_exclude": PassConfigParam(
                type_=list[str],
                description="names of MatMul and Gemm nodes whose inputs are to stay as they are; * and ? match any text. A name that matches "
                "nothing is refused",
            ),
        }  # fmt: skip

    @classmethod
    def needed_data(cls, config: Mapping[str, Any]) -> frozenset[str]:
        """The largest activations come from calibration data, whatever the parameters."""
        return frozenset({"calibration"})

    @classmethod
    def traits(cls, config: Mapping[str, Any]) -> ModelTraits:
        """The model stays float; only the method is told."""
        return ModelTraits(methods=frozenset({"smoothquant"}))

    def _run_for_config(self, model: ONNXModelHandler, config: Mapping[str, Any], output_model_path: Path) -> ONNXModelHandler:
        given = load_fixed(model)
        before = operator_counts(given)
        data = config.get("calibration_data_dir")
        if data is None:
            raise PassError(WHO, "needs calibration data", "calibration_data_dir=None", "Give calibration data, or leave this pass out.")
        smoothed = type(given)()
        smoothed.CopyFrom(given)
        name_every_node(smoothed)
        excluded = set(matching_nodes(smoothed, config.get("nodes_to_exclude") or [], who=WHO, parameter="nodes_to_exclude"))
        lift_constants(smoothed)
        groups = find_groups(smoothed)
        names = [[smoothed.graph.node[p.node].name for p in g.weights] for g in groups]
        kept: Counter[str] = Counter()
        chosen: list[tuple[Group, list[str]]] = []
        for group, consumers in zip(groups, names, strict=True):
            if excluded.intersection(consumers):
                kept["excluded"] += 1
            elif group.before is None and config["unfoldable"] == "leave":
                kept[group.reason] += 1
            else:
                chosen.append((group, consumers))
        notes: dict[str, Any] = {"operators_before": before, "scalable_values": len(groups), "left": dict(sorted(kept.items()))}
        if not chosen:
            why = "; ".join(f"{reason} ({count} times)" for reason, count in sorted(kept.items()))
            reason = f"nothing to scale: {why}" if groups else "no MatMul or Gemm multiplies an inner value by constant weights"
            return unchanged(model, output_model_path, reason, notes={**notes, "operators_after": before})

        walk = calibration_feeds(Path(data), model.io, config["calibration_samples"], who=WHO)
        largest: dict[str, NDArray[np.float64]] = {}

        def visit(name: str, array: NDArray[Any]) -> None:
            found = np.abs(array.reshape(-1, array.shape[-1])).max(axis=0).astype(np.float64)
            largest[name] = np.maximum(largest[name], found) if name in largest else found

        with library_errors(WHO, "the model must run on the calibration data with its inner values as outputs"):
            visit_activations(smoothed, walk, [g.value for g, _ in chosen], visit)
        pairs = _smooth(smoothed, chosen, largest, config["alpha"])
        drop_unused_initializers(smoothed)
        if not pairs:
            reason = "the activations at every product are all zero or not finite on the calibration data"
            return unchanged(model, output_model_path, reason, notes={**notes, "operators_after": before})
        with library_errors(WHO, "the smoothed model must load"):
            loads_at_every_level(smoothed)
        notes["largest_difference"] = refuse_difference(given, smoothed, model.io, Path(data), who=WHO)
        notes.update(
            operators_after=operator_counts(smoothed), smoothed_values=len(pairs), folded=sum(p["folded"] for p in pairs), pairs=pairs[:LISTED]
        )
        return model.written(output_model_path, proto=smoothed, notes={**notes, "changed": True})


def _smooth(proto: Any, chosen: list[tuple[Group, list[str]]], largest: Mapping[str, NDArray[np.float64]], alpha: float) -> list[dict[str, Any]]:
    """Scale the groups in place; returns what was done, first nodes first. Channels that are never touched keep their size."""
    scaler = Scaler(proto)
    pairs: list[dict[str, Any]] = []
    for group, consumers in chosen:
        activations = largest.get(group.value)
        if activations is None or len(activations) != group.channels or not np.isfinite(activations).all() or not activations.any():
            continue
        weights = np.zeros(group.channels)
        for place in group.weights:
            values = np.abs(np.moveaxis(scaler.weight(place), place.axis, 0)).reshape(group.channels, -1)
            weights = np.maximum(weights, values.max(axis=1))
        alive = (activations > 0) & (weights > 0)
        safe_a, safe_w = np.where(alive, activations, 1.0), np.where(alive, weights, 1.0)
        scales = np.where(alive, safe_a**alpha / safe_w ** (1 - alpha), 1.0)
        scales = (scales / np.exp(np.log(scales[alive]).mean())) if alive.any() else scales  # as a whole nothing grows or shrinks
        scales = np.where(alive, scales.clip(SMALLEST, LARGEST), 1.0).astype(np.float32)
        scaler.apply(group, scales)
        spread = activations[alive]
        after = spread / scales[alive]
        pairs.append({
            "value": group.value, "products": consumers, "folded": group.before is not None,
            "spread_before": _spread(spread), "spread_after": _spread(after),
        })  # fmt: skip
    return pairs[::-1]


def _spread(values: NDArray[Any]) -> float:
    """Largest by median channel: what one scale for all channels wastes."""
    return round(float(values.max() / np.median(values)), 2) if values.size else 1.0
