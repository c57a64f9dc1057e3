"""OnnxFloatToFloat16: weights and arithmetic in float16 instead of float32.

Source: ONNX Runtime's converter, `onnxruntime.transformers.float16`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.errors import PassConfigError
from autotune.model import ONNXModelHandler
from autotune.passes.base import ONNX, AcceleratorSpec, ModelTraits, Pass, PassConfigParam, PassContract
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
    library_errors,
    load_fixed,
    loads_at_every_level,
    matching_nodes,
    name_every_node,
    operator_counts,
    unchanged,
)
from autotune.passes.registry import register

WHO = "OnnxFloatToFloat16"


@register
class OnnxFloatToFloat16(Pass):
    """Turn a float32 model into float16: half the size, and faster where the execution provider has float16 kernels."""

    contract = PassContract(accepts=ONNX, returns=ONNX, min_opset=7, version=2)

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {
            "keep_io_types": PassConfigParam(
                type_=bool, default_value=True,
                description="keep float32 inputs and outputs, with casts at the rim; otherwise whoever calls the model must use float16",
            ),
            **block_list_rows(),
            "min_positive_val": PassConfigParam(
                type_=float, default_value=SMALLEST, minimum=SMALLEST, maximum=1.0,
                description="weights nearer to zero than this become this, with their sign",
            ),
            "max_finite_val": PassConfigParam(
                type_=float, default_value=LARGEST, minimum=1.0, maximum=LARGEST,
                description="weights farther from zero than this become this, with their sign",
            ),
        }  # fmt: skip

    @classmethod
    def validate_config(cls, config: Mapping[str, Any], accelerator_spec: AcceleratorSpec) -> None:
        """Refuse limits that leave no value between them."""
        if config["min_positive_val"] >= config["max_finite_val"]:
            raise PassConfigError(
                cls.__name__, "min_positive_val must be below max_finite_val", f"{config['min_positive_val']} and {config['max_finite_val']}"
            )

    @classmethod
    def traits(cls, config: Mapping[str, Any]) -> ModelTraits:
        """Weights and arithmetic in float16."""
        return ModelTraits(weight_type="float16", activation_type="float16")

    def _run_for_config(self, model: ONNXModelHandler, config: Mapping[str, Any], output_model_path: Path) -> ONNXModelHandler:
        given = load_fixed(model)
        before = operator_counts(given)
        notes: dict[str, Any] = {"operators_before": before}
        reason = why_not_float32(given)
        if reason:
            return unchanged(model, output_model_path, reason, notes={**notes, "operators_after": before})

        given = with_shapes(given, who=WHO)
        name_every_node(given)
        operators = known_operators(given, config.get("op_block_list") or [], who=WHO)
        blocked = matching_nodes(given, config.get("node_block_list") or [], who=WHO, parameter="node_block_list")
        smallest, largest = config["min_positive_val"], config["max_finite_val"]
        notes.update(clipped_weights(given, smallest, largest))
        converted = convert(given, who=WHO, keep_io_types=config["keep_io_types"], operators=operators, nodes=blocked, limits=(smallest, largest))
        if self.accelerator_spec.execution_provider == "CPUExecutionProvider":
            with library_errors(WHO, "the converted model must load", ADVICE):
                loads_at_every_level(converted)
        notes.update(operators_after=operator_counts(converted), float32_weights_left=count_weights(converted, "FLOAT"))
        return model.written(output_model_path, proto=converted, notes={**notes, "changed": True})
