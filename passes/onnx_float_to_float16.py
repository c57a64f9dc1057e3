"""OnnxFloatToFloat16: weights and arithmetic in float16 instead of float32.

Source: ONNX Runtime's converter, `onnxruntime.transformers.float16`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.errors import PassConfigError, PassError, nearest
from autotune.model import MODEL_FILE, ONNXModelHandler, save_onnx
from autotune.passes.base import ONNX, AcceleratorSpec, Pass, PassConfigParam, PassContract
from autotune.passes.onnx_graph import (
    check_types,
    fit_domains,
    glob_like,
    graphs_of,
    library_errors,
    load_fixed,
    loads_at_every_level,
    name_every_node,
    operator_counts,
    quiet,
    sort_nodes,
    unchanged,
)
from autotune.passes.registry import register

if TYPE_CHECKING:
    import onnx

WHO = "OnnxFloatToFloat16"
SMALLEST = 5.96e-08  # the smallest subnormal float16
LARGEST = 65504.0


@register
class OnnxFloatToFloat16(Pass):
    """Turn a float32 model into float16: half the size, and faster where the execution provider has float16 kernels."""

    contract = PassContract(accepts=ONNX, returns=ONNX, min_opset=7, version=1)

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {
            "keep_io_types": PassConfigParam(
                type_=bool, default_value=True,
                description="keep float32 inputs and outputs, with casts at the rim; otherwise whoever calls the model must use float16",
            ),
            "op_block_list": PassConfigParam(
                type_=list[str],
                description="operator types to leave in float32, besides those that ONNX Runtime's converter leaves; one that the model lacks "
                "is refused",
            ),
            "node_block_list": PassConfigParam(
                type_=list[str], description="names of nodes to leave in float32; * and ? match any text. A name that matches nothing is refused",
            ),
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

    def _run_for_config(self, model: ONNXModelHandler, config: Mapping[str, Any], output_model_path: Path) -> ONNXModelHandler:
        from onnxruntime.transformers import float16

        given = load_fixed(model)
        before = operator_counts(given)
        notes: dict[str, Any] = {"operators_before": before}
        if not _count_weights(given, _tensor_type("FLOAT")):
            reason = "the model is float16 already" if _count_weights(given, _tensor_type("FLOAT16")) else "the model holds no float32 weights"
            return unchanged(model, output_model_path, reason, notes={**notes, "operators_after": before})

        given = _with_shapes(given)
        name_every_node(given)
        operators = [*float16.DEFAULT_OP_BLOCK_LIST, *_known_operators(given, config.get("op_block_list") or [])]
        blocked = _matching_nodes(given, config.get("node_block_list") or [])
        notes.update(_clipped(given, config["min_positive_val"], config["max_finite_val"]))
        sound = _type_checks(given)
        with library_errors(WHO, "the model must be one that ONNX Runtime's float16 converter takes"), quiet():
            converted: onnx.ModelProto = float16.convert_float_to_float16(
                given, min_positive_val=config["min_positive_val"], max_finite_val=config["max_finite_val"], keep_io_types=config["keep_io_types"],
                disable_shape_infer=True, op_block_list=operators, node_block_list=blocked,
            )  # fmt: skip
            sort_nodes(converted.graph)  # the converter puts its casts at the end
            fit_domains(converted)
        doing = "Name the operators in its message in op_block_list, or leave this pass out."
        if sound:
            with library_errors(WHO, "the converted model must still type-check", doing):
                check_types(converted)
        if self.accelerator_spec.execution_provider == "CPUExecutionProvider":
            with library_errors(WHO, "the converted model must load", doing):
                loads_at_every_level(converted)
        notes.update(operators_after=operator_counts(converted), float32_weights_left=_count_weights(converted, _tensor_type("FLOAT")))
        return model.written(output_model_path, proto=converted, notes={**notes, "changed": True})


def _tensor_type(name: str) -> int:
    import onnx

    return int(getattr(onnx.TensorProto, name))


def _count_weights(proto: onnx.ModelProto, type_: int) -> int:
    """Initializers and constants of a tensor type, everywhere in the model."""
    count = 0
    for graph in graphs_of(proto.graph):
        count += sum(t.data_type == type_ for t in graph.initializer)
        count += sum(a.HasField("t") and a.t.data_type == type_ for n in graph.node for a in n.attribute)
    return count


def _with_shapes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with the types of inner values, which tell the converter where a cast is due. Works for models beyond 2 GB."""
    import onnx

    with tempfile.TemporaryDirectory(prefix="autotune-float16-") as name, library_errors(WHO, "the model's types must be inferable"):
        path = Path(name, MODEL_FILE)
        save_onnx(proto, path)
        onnx.shape_inference.infer_shapes_path(str(path), str(path.with_name("inferred.onnx")))
        return onnx.load(str(path.with_name("inferred.onnx")))


def _known_operators(proto: onnx.ModelProto, names: Iterable[str]) -> list[str]:
    present = {name.rpartition(".")[2] for name in operator_counts(proto)}
    for name in names:
        if name not in present:
            raise PassError(WHO, "each entry of op_block_list must be an operator of the model", repr(name), nearest(name, present))
    return list(names)


def _matching_nodes(proto: onnx.ModelProto, patterns: Iterable[str]) -> list[str]:
    names = [node.name for graph in graphs_of(proto.graph) for node in graph.node]
    found: list[str] = []
    for pattern in patterns:
        matches = [name for name in names if glob_like(pattern).fullmatch(name)]
        if not matches:
            hint = nearest(pattern, names)
            raise PassError(
                WHO, "each entry of node_block_list must match a node of the model", repr(pattern), hint if hint.startswith("Did") else ""
            )
        found += matches
    return found


def _clipped(proto: onnx.ModelProto, smallest: float, largest: float) -> dict[str, int]:
    """Count the float32 weights that float16 can't hold: those cut at the top and those raised at the bottom."""
    from onnx import numpy_helper

    above = below = 0
    for graph in graphs_of(proto.graph):
        for tensor in graph.initializer:
            if tensor.data_type == _tensor_type("FLOAT"):
                size = np.abs(numpy_helper.to_array(tensor))
                above += int(((size > largest) & np.isfinite(size)).sum())
                below += int(((size > 0) & (size < smallest)).sum())
    return {"weights_cut_at_max": above, "weights_raised_to_min": below}


def _type_checks(proto: onnx.ModelProto) -> bool:
    """Whether strict inference accepts the model as it came; where it does not, its opinion of the result tells nothing."""
    try:
        check_types(proto)
    except Exception:  # any complaint will do
        return False
    return True
