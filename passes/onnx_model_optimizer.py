"""OnnxModelOptimizer: fold constants, drop dead parts, resolve branches and merge duplicates, without changing what is computed.

Sources: onnxslim, onnxscript's optimizer, and ONNX Runtime's own graph optimizations saved to a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autotune.errors import PassError
from autotune.model import ONNXModelHandler
from autotune.passes.base import ONNX, AcceleratorSpec, Pass, PassConfigParam, PassContract
from autotune.passes.folding import put_aside, put_back
from autotune.passes.known_branches import Branches, drop_dead, resolve_ifs
from autotune.passes.onnx_graph import (
    fit_domains,
    initializer_names,
    keep_io,
    library_errors,
    load_fixed,
    loads_at_every_level,
    name_every_node,
    operator_counts,
    optimize_by_session,
    quiet,
    rename_new_initializers,
    same_work,
    sort_nodes,
    unchanged,
    weight_bytes,
)
from autotune.passes.onnx_outputs import LEVELS, NotComparable, compare
from autotune.passes.registry import register
from autotune.search_spaces.parameters import INACTIVE, Categorical, Conditional, ConditionalDefault

if TYPE_CHECKING:
    import onnx

WHO = "OnnxModelOptimizer"
ADVICE = "Choose another optimizer, or leave this pass out."
SESSION_LEVELS = {"ort_basic": "basic", "ort_extended": "extended", "ort_all": "all"}
FOLD_BYTES = 16 << 20
BOUND: Mapping[str, str] = {
    "ort_extended": "fused operators of ONNX Runtime for this execution provider: other runtimes lack them",
    "ort_all": "fused operators and a memory layout for CPUs like this one: it may not load, or be slow, on others",
}


@register
class OnnxModelOptimizer(Pass):
    """Simplify the graph by one of several optimizers."""

    # Extended fusions are made for one execution provider; the others are portable, but a store key can't tell by value.
    contract = PassContract(accepts=ONNX, returns=ONNX, ep_dependent=True, version=3)

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        folding = Conditional("constant_folding", {True: Categorical([FOLD_BYTES])}, default=INACTIVE)
        return {
            "optimizer": PassConfigParam(
                type_=Literal["onnxslim", "onnxscript", "ort_basic", "ort_extended", "ort_all"], default_value="onnxslim",
                search_defaults=Categorical(["onnxslim", "onnxscript", "ort_basic"]),
                description="onnxslim and onnxscript write plain ONNX; ort_basic is what every ONNX Runtime session does first. ort_extended "
                "writes fused operators for this execution provider, and ort_all a memory layout for this kind of CPU too, which other runtimes "
                "and machines lack and later passes can't see through: not searched",
            ),
            "constant_folding": PassConfigParam(
                type_=bool, default_value=True,
                description="compute what is the same for every input once and for all. A session does so too when it loads; a quantizer sees "
                "only weights that are folded",
            ),
            "fold_size_limit": PassConfigParam(
                type_=int, minimum=0, default_value=ConditionalDefault("constant_folding", {True: FOLD_BYTES}, default=INACTIVE),
                search_defaults=folding,
                description="bytes by which folded constants may all together be larger than what they are computed from; those that grow most "
                "stay nodes, so that the file stays small. A DequantizeLinear of weights stays in any case",
            ),
            "resolve_ifs": PassConfigParam(
                type_=bool, default_value=True,
                description="put the branch that is always taken in the place of its If, so that later passes see what is inside: where the "
                "condition follows from constants, or from sizes of axes that are known. The simplest ones the optimizers resolve in any case",
            ),
            "dead_code": PassConfigParam(
                type_=bool, default_value=True,
                description="drop nodes whose results nobody takes and unused weights, where the optimizer leaves them",
            ),
        }  # fmt: skip

    def _run_for_config(self, model: ONNXModelHandler, config: Mapping[str, Any], output_model_path: Path) -> ONNXModelHandler:
        optimizer = config["optimizer"]
        given = load_fixed(model)
        result = type(given)()
        result.CopyFrom(given)
        branches = resolve_ifs(result) if config["resolve_ifs"] else Branches()
        aside = put_aside(result, config["fold_size_limit"] if config["constant_folding"] else None)
        if optimizer in SESSION_LEVELS:
            name_every_node(result)  # ONNX Runtime takes no two nodes of one name
        with library_errors(WHO, f"the model must be one that {optimizer} takes", ADVICE), quiet():
            result = self._optimized(optimizer, result)
        kept = put_back(result, aside)
        keep_io(result, given)
        with library_errors(WHO, f"what {optimizer} makes of the model must be a graph", ADVICE):
            sort_nodes(result.graph)
        if config["resolve_ifs"]:  # the optimizer may have found out what a condition is
            after = resolve_ifs(result)
            branches = Branches(branches.resolved + after.resolved, after.left)
        dropped = drop_dead(result) if config["dead_code"] else 0
        fit_domains(result)
        _keep_words(result, given)
        notes = _notes(given, result, optimizer, branches, kept, dropped)
        if same_work(given, result):
            return unchanged(model, output_model_path, f"{optimizer} found nothing to fold, fuse or drop", notes=notes)
        on_cpu = self.accelerator_spec.execution_provider == "CPUExecutionProvider"
        if on_cpu or optimizer not in BOUND:
            notes.update(_compared(given, result, model, optimizer))
        # A graph can be saved that the same runtime will not load; a candidate like that must end here, with the cause.
        if on_cpu and "error" not in notes:  # whatever was compared has been loaded
            with library_errors(WHO, f"what {optimizer} makes of the model must load", ADVICE):
                loads_at_every_level(result)
        return model.written(output_model_path, proto=result, notes={**notes, "changed": True})

    def _optimized(self, optimizer: str, given: onnx.ModelProto) -> onnx.ModelProto:
        """Let a library optimize; it may change what it is given."""
        if optimizer in SESSION_LEVELS:
            bound = {"execution_provider": self.accelerator_spec.execution_provider} if optimizer in BOUND else {}
            return optimize_by_session(given, SESSION_LEVELS[optimizer], **bound)
        known = initializer_names(given)
        if optimizer == "onnxslim":
            import onnxslim

            result: onnx.ModelProto = onnxslim.slim(given)
        else:
            from onnxscript import optimizer as onnxscript_optimizer

            # Its own limits (8192 elements in, 262144 out) leave weights behind a Transpose; large results were put aside before.
            try:
                result = onnxscript_optimizer.optimize(given, input_size_limit=1 << 31, output_size_limit=1 << 31)
            except Exception as error:  # it wraps what went wrong in many layers that don't say what
                raise _root(error) from error
        sort_nodes(result.graph)
        rename_new_initializers(result, known)
        return result


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _notes(given: onnx.ModelProto, result: onnx.ModelProto, optimizer: str, branches: Branches, kept: int, dropped: int) -> dict[str, Any]:
    before, after = operator_counts(given), operator_counts(result)
    notes: dict[str, Any] = {
        "operators_before": before, "operators_after": after, "nodes_before": sum(before.values()), "nodes_after": sum(after.values()),
        "weight_bytes_before": weight_bytes(given), "weight_bytes_after": weight_bytes(result), "ifs_resolved": branches.resolved,
        "dead_nodes_dropped": dropped, "constants_not_folded": kept, "portable": optimizer not in BOUND,
    }  # fmt: skip
    if branches.left:
        notes["ifs_left"] = dict(branches.left)
    casts = after.get("Cast", 0) - before.get("Cast", 0)
    if optimizer in SESSION_LEVELS and casts > 0:
        notes.update(portable=False, casts_added=casts)
    words = [BOUND[optimizer]] if optimizer in BOUND else []
    words += [f"{casts} casts around operators that the CPU has no 16-bit kernels for"] if "casts_added" in notes else []
    if words:
        notes["bound_to"] = "; ".join(words)
    return notes


def _compared(given: onnx.ModelProto, result: onnx.ModelProto, model: ONNXModelHandler, optimizer: str) -> dict[str, Any]:
    """Compare outputs on made-up inputs. Raises `PassError` where they differ by more than another order of sums explains."""
    try:
        # Kernels that were chosen beforehand sum in another order than plain ones: with all optimizations both models use them.
        found = compare(given, result, model.io, who=WHO, levels=("all",) if optimizer in BOUND else LEVELS)
    except NotComparable as error:
        return {"compared": f"no: {error}"}
    if found.fault:
        raise PassError(WHO, f"what {optimizer} makes of the model must give the same outputs", found.fault, ADVICE)
    return {"compared": found.inputs, "error": found.error}


def _keep_words(result: onnx.ModelProto, given: onnx.ModelProto) -> None:
    """Give a model, in place, the metadata (labels, for instance) and the description that an optimizer has dropped."""
    known = {p.key for p in result.metadata_props}
    result.metadata_props.extend(p for p in given.metadata_props if p.key not in known)
    result.doc_string = result.doc_string or given.doc_string
