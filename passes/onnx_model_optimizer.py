"""OnnxModelOptimizer: fold constants, drop dead parts and merge duplicates, without changing what is computed.

Sources: onnxslim, onnxscript's optimizer, and ONNX Runtime's own graph optimizations saved to a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autotune.model import ONNXModelHandler
from autotune.passes.base import ONNX, AcceleratorSpec, Pass, PassConfigParam, PassContract
from autotune.passes.onnx_graph import (
    fit_domains,
    initializer_names,
    keep_io,
    library_errors,
    load_fixed,
    loads_at_every_level,
    operator_counts,
    optimize_by_session,
    quiet,
    rename_new_initializers,
    same_work,
    sort_nodes,
    unchanged,
    weight_bytes,
)
from autotune.passes.registry import register
from autotune.search_spaces.parameters import Categorical

if TYPE_CHECKING:
    import onnx

WHO = "OnnxModelOptimizer"


@register
class OnnxModelOptimizer(Pass):
    """Simplify the graph by one of several optimizers."""

    # Extended fusions are made for one execution provider; the others are portable, but a store key can't tell by value.
    contract = PassContract(accepts=ONNX, returns=ONNX, ep_dependent=True, version=2)

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {
            "optimizer": PassConfigParam(
                type_=Literal["onnxslim", "onnxscript", "ort_basic", "ort_extended"], default_value="onnxslim",
                search_defaults=Categorical(["onnxslim", "onnxscript", "ort_basic"]),
                description="onnxslim and onnxscript write plain ONNX; ort_basic is what every ONNX Runtime session does first. ort_extended "
                "writes fused operators for this execution provider, which other runtimes lack and later passes can't see through: not searched",
            ),
        }  # fmt: skip

    def _run_for_config(self, model: ONNXModelHandler, config: Mapping[str, Any], output_model_path: Path) -> ONNXModelHandler:
        optimizer = config["optimizer"]
        given = load_fixed(model)
        with library_errors(WHO, f"the model must be one that {optimizer} takes", "Choose another optimizer, or leave this pass out."), quiet():
            result = self._optimized(optimizer, given)
            keep_io(result, given)
        before, after = operator_counts(given), operator_counts(result)
        notes: dict[str, Any] = {
            "operators_before": before, "operators_after": after, "nodes_before": sum(before.values()), "nodes_after": sum(after.values()),
            "weight_bytes_before": weight_bytes(given), "weight_bytes_after": weight_bytes(result),
            "portable": optimizer != "ort_extended",
        }  # fmt: skip
        if same_work(given, result):
            return unchanged(model, output_model_path, f"{optimizer} found nothing to fold, fuse or drop", notes=notes)
        # A graph can be saved that the same runtime will not load; a candidate like that must end here, with the cause.
        if self.accelerator_spec.execution_provider == "CPUExecutionProvider":
            with library_errors(WHO, f"what {optimizer} makes of the model must load", "Choose another optimizer, or leave this pass out."):
                loads_at_every_level(result)
        return model.written(output_model_path, proto=result, notes={**notes, "changed": True})

    def _optimized(self, optimizer: str, given: onnx.ModelProto) -> onnx.ModelProto:
        if optimizer == "ort_basic":
            return optimize_by_session(given, "basic")
        if optimizer == "ort_extended":
            return optimize_by_session(given, "extended", execution_provider=self.accelerator_spec.execution_provider)
        copied = type(given)()
        copied.CopyFrom(given)
        known = initializer_names(given)
        if optimizer == "onnxslim":
            import onnxslim

            result: onnx.ModelProto = onnxslim.slim(copied)
        else:
            from onnxscript import optimizer as onnxscript_optimizer

            result = onnxscript_optimizer.optimize(copied)
        sort_nodes(result.graph)
        rename_new_initializers(result, known)
        fit_domains(result)
        return result
