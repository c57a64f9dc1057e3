"""OnnxOpsetUpgrade: the same model in a later version of ONNX's operator set.

Source: onnx's version converter, else onnxscript's (from opset 18 on). Neither is trusted: outputs are compared with the input model's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import PassError
from autotune.model import ONNXModelHandler
from autotune.passes.base import ONNX, AcceleratorSpec, ModelTraits, ParamCategory, Pass, PassConfigParam, PassContract
from autotune.passes.onnx_graph import (
    DEFAULT_DOMAINS,
    default_opset,
    graphs_of,
    library_errors,
    load_fixed,
    operator_counts,
    quiet,
    short_message,
    sort_nodes,
    unchanged,
    weights_aside,
    weights_back,
)
from autotune.passes.onnx_outputs import Comparison, NotComparable, compare, first_difference, usable_feeds
from autotune.passes.registry import register

if TYPE_CHECKING:
    import onnx

    from autotune.data import Arrays

WHO = "OnnxOpsetUpgrade"
RESIZE_OPSET = 11  # before it, Resize and Upsample mapped coordinates in the one way that is called asymmetric since


@register
class OnnxOpsetUpgrade(Pass):
    """Convert to a later opset, for passes and types that need one: scales per channel 13, float8 19, 4-bit integers 21."""

    contract = PassContract(accepts=ONNX, returns=ONNX, data={"compare_data_dir": "calibration"}, version=1)

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {
            "target_opset": PassConfigParam(
                type_=int, default_value=21, minimum=7,
                description="version of ONNX's operator set to convert to; other domains stay. A model that is there already is left alone, a "
                "later one is refused. Not searched: by itself it changes neither speed nor size",
            ),
            "compare_data_dir": PassConfigParam(
                type_=str | Path, category=ParamCategory.DATA,
                description="rows on which outputs are compared before and after (an .npz, or a folder of them); without any, made-up inputs are",
            ),
        }  # fmt: skip

    @classmethod
    def traits(cls, config: Mapping[str, Any]) -> ModelTraits:
        """A model of the opset asked for."""
        return ModelTraits(opset=config["target_opset"])

    def _run_for_config(self, model: ONNXModelHandler, config: Mapping[str, Any], output_model_path: Path) -> ONNXModelHandler:
        import onnx

        given, target = load_fixed(model), config["target_opset"]
        present, before = default_opset(given), operator_counts(given)
        notes: dict[str, Any] = {"opset_before": present, "opset_after": target, "operators_before": before}
        if present in (0, target):
            reason = f"the model is at opset {target} already" if present else "the model has no operators of ONNX's own set"
            return unchanged(model, output_model_path, reason, notes={**notes, "opset_after": present, "operators_after": before})
        if present > target:
            raise PassError(WHO, "converts to later opsets only", f"opset {present} and target_opset={target}", "Leave this pass out.")
        newest = onnx.defs.onnx_opset_version()
        if target > newest:
            raise PassError(WHO, f"target_opset must be one that the installed onnx knows, to {newest}", str(target), "Choose an earlier one.")
        data = config.get("compare_data_dir")
        try:
            feeds, words = usable_feeds(given, model.io, data=None if data is None else Path(data), who=WHO)
        except NotComparable as error:
            do = "Leave this pass out." if data else "Give calibration data, so that real rows can be compared."
            raise PassError(WHO, "the input model must run, so that the result can be compared with it", str(error), do) from error

        causes: list[str] = []
        for name, convert in (("onnx", _by_onnx), ("onnxscript", _by_onnxscript)):
            result, cause, comparison = _attempt(convert, given, target, model, feeds)
            if result is None:
                causes.append(f"{name}'s converter: {cause}")
                continue
            redefined = _redefined(given, present, target)
            share = sum(redefined.values()) / max(sum(before.values()), 1)
            notes.update(
                operators_after=operator_counts(result), converter=name, redefined_operators=redefined, redefined_share=round(share, 4),
                compared_on=words, largest_error=comparison.error, refused_by=causes,
            )  # fmt: skip
            return model.written(output_model_path, proto=result, notes={**notes, "changed": True})
        do = "Export it again at a later opset, or choose another target."
        raise PassError(WHO, f"the model must convert from opset {present} to {target}", "; ".join(causes), do)


def _attempt(
    convert: Callable[[onnx.ModelProto, int], onnx.ModelProto], given: onnx.ModelProto, target: int, model: ONNXModelHandler, feeds: list[Arrays]
) -> tuple[onnx.ModelProto | None, str, Comparison]:
    """Convert and compare; the result is None, with the cause in words, where either goes wrong."""
    nothing = Comparison("", 0.0, "")
    try:
        with quiet():
            result = convert(given, target)
            _mend(given, result, target)
    except Exception as error:  # onnx raises RuntimeErrors from C++, onnxscript whatever comes
        return None, _stopped_by(error), nothing
    if default_opset(result) != target:  # onnxscript's gives up in silence
        return None, f"it left the model at opset {default_opset(result)}", nothing
    comparison = compare(given, result, model.io, who=WHO, feeds_=feeds)
    if not comparison.fault:
        return result, "", comparison
    with library_errors(WHO, "the model's inner values must be comparable"):
        where = first_difference(given, result, feeds)
    changed = ", ".join(_redefined(given, default_opset(given), target))
    hint = f"; {where} differs first" if where else f"; redefined in between: {changed}" if changed else ""
    return None, f"the result computes something else: {comparison.fault}{hint}", comparison


def _stopped_by(error: Exception) -> str:
    """Name the operator that a converter stopped at, as far as its message tells."""
    text = str(error)
    found = re.search(r"No Adapter From Version \$?(\d+) for (\w+)", text)
    if found:
        return f"no adapter for {found[2]} {found[1]} -> {int(found[1]) + 1}"
    found = re.search(r"No Adapter (?:To Version \$?\d+ )?[Ff]or (\w+)", text)
    if found:
        return f"no adapter for {found[1]}"
    found = re.search(r"has no registered schema.*?lld\.?([A-Za-z]+)", text, re.DOTALL)
    return f"no definition of operator {found[1]}" if found else short_message(error)


def _by_onnx(given: onnx.ModelProto, target: int) -> onnx.ModelProto:
    """Convert by onnx, large weights standing in as inputs meanwhile."""
    import onnx

    small, large = weights_aside(given)
    result: onnx.ModelProto = onnx.version_converter.convert_version(small, target)
    weights_back(result, large, [t.name for t in given.graph.initializer])
    return result


def _by_onnxscript(given: onnx.ModelProto, target: int) -> onnx.ModelProto:
    from onnxscript import ir, version_converter

    converted = ir.from_proto(given)
    version_converter.convert_version(converted, target_version=target, fallback=False)
    result: onnx.ModelProto = ir.to_proto(converted)
    return result


def _mend(given: onnx.ModelProto, result: onnx.ModelProto, target: int) -> None:
    """Put back what converters lose: what goes in and out, functions, sparse weights, metadata, IR version, how old Resizes sampled."""
    from onnx import helper

    for field in ("input", "output", "sparse_initializer"):
        result.graph.ClearField(field)
        getattr(result.graph, field).extend(getattr(given.graph, field))
    if given.functions and not result.functions and any(n.domain in {f.domain for f in given.functions} for n in result.graph.node):
        result.functions.extend(given.functions)
    result.ClearField("metadata_props")
    result.metadata_props.extend(given.metadata_props)
    result.producer_name, result.producer_version = given.producer_name, given.producer_version
    if default_opset(given) < RESIZE_OPSET <= target:
        for graph in graphs_of(result.graph):
            for node in graph.node:
                if node.op_type == "Resize" and node.domain in DEFAULT_DOMAINS:
                    kept = [a for a in node.attribute if a.name not in ("coordinate_transformation_mode", "nearest_mode")]
                    mode = next((a.s for a in kept if a.name == "mode"), b"nearest")
                    del node.attribute[:]
                    node.attribute.extend([*kept, helper.make_attribute("coordinate_transformation_mode", "asymmetric")])
                    if mode == b"nearest":
                        node.attribute.append(helper.make_attribute("nearest_mode", "floor"))
    sort_nodes(result.graph)
    # A model with training domains and the like has no least version that onnx knows; those were given, so they count as they stand.
    result.ir_version = max(given.ir_version, helper.find_min_ir_version_for([o for o in result.opset_import if o.domain in DEFAULT_DOMAINS]))


def _redefined(proto: onnx.ModelProto, present: int, target: int) -> dict[str, int]:
    """Nodes by operator, of those operators that got a new definition after opset `present`, up to `target`."""
    import onnx

    found: dict[str, int] = {}
    for name, count in operator_counts(proto).items():
        try:
            if "." not in name and onnx.defs.get_schema(name, target).since_version > present:
                found[name] = count
        except onnx.defs.SchemaError:  # gone by then
            found[name] = count
    return found
