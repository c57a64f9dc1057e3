"""OrtTransformersOptimization: fuse attention, layer normalization, embeddings and GELU into ONNX Runtime's own operators.

Source: ONNX Runtime documentation, "Transformers optimizer" (`onnxruntime.transformers.optimizer`).
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from autotune.data import Arrays
from autotune.errors import PassConfigError, PassError
from autotune.model import MODEL_FILE, ONNXModelHandler, save_onnx
from autotune.passes.base import ONNX, AcceleratorSpec, ModelTraits, Pass, PassConfigParam, PassContract
from autotune.passes.float16_graph import LARGEST, SMALLEST, convert, count_weights, with_shapes
from autotune.passes.onnx_graph import (
    fit_domains,
    initializer_names,
    keep_io,
    library_errors,
    load_fixed,
    loads_at_every_level,
    name_every_node,
    operator_counts,
    quiet,
    rename_new_initializers,
    same_work,
    sort_nodes,
    unchanged,
)
from autotune.passes.onnx_outputs import FLOAT32_TOLERANCE, LEVELS, NotComparable, compare, usable_feeds
from autotune.passes.registry import register
from autotune.passes.transformer_fusions import (
    DIFFUSION,
    FUSIONS,
    TRIED,
    UNUSABLE,
    Fusion,
    attention_sites,
    heads_of,
    model_types,
    not_applied,
    operators_made,
    option_values,
    without_kernel,
)
from autotune.search_spaces.parameters import INACTIVE, Boolean, Categorical, Conditional, ConditionalDefault

if TYPE_CHECKING:
    import onnx

WHO = "OrtTransformersOptimization"
ADVICE = "Set opt_level to 0 or 1, switch fusions off, or leave this pass out."
CPU = "CPUExecutionProvider"
EXACT = 1e-4  # of an output's largest magnitude; fusions that are right differ by less than 1e-5 of it
APPROXIMATE = 2e-2
NORMALIZING = frozenset({"LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization"})
ATTENTION = next(f.makes for f in FUSIONS if f.name == "attention")


def _row(fusion: Fusion, types: Sequence[str], *, on_gpu: bool) -> PassConfigParam:
    default = fusion.default and (on_gpu or not fusion.gpu)
    choices = Boolean() if fusion.searched else Categorical([default])
    description = fusion.description + (": on CUDA only" if fusion.gpu else "")
    if not fusion.types:
        return PassConfigParam(
            type_=bool, default_value=ConditionalDefault("only_onnxruntime", {False: default}, default=INACTIVE),
            search_defaults=Conditional("only_onnxruntime", {False: choices}, default=INACTIVE), description=description,
        )  # fmt: skip
    parents, rows = ("only_onnxruntime", "model_type"), [(False, t) for t in fusion.types if t in types]
    return PassConfigParam(
        type_=bool, default_value=ConditionalDefault(parents, dict.fromkeys(rows, default), default=INACTIVE),
        search_defaults=Conditional(parents, dict.fromkeys(rows, choices), default=INACTIVE),
        description=f"{description}; model types {', '.join(fusion.types)}",
    )  # fmt: skip


def _with_fusions(value: bool, description: str) -> PassConfigParam:
    return PassConfigParam(
        type_=bool, default_value=ConditionalDefault("only_onnxruntime", {False: value}, default=INACTIVE),
        search_defaults=Conditional("only_onnxruntime", {False: Categorical([value])}, default=INACTIVE), description=description,
    )  # fmt: skip


@register
class OrtTransformersOptimization(Pass):
    """Fuse the patterns of transformers; the result runs on ONNX Runtime only."""

    contract = PassContract(accepts=ONNX, returns=ONNX, min_opset=11, ep_dependent=True, version=3)

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        types = model_types()
        on_gpu = accelerator_spec.accelerator_type == "gpu"
        fusions = {f.name: _row(f, types, on_gpu=on_gpu) for f in FUSIONS if not f.types or any(t in types for t in f.types)}
        return {
            "model_type": PassConfigParam(
                type_=Literal.__getitem__(("auto", *types)), default_value="auto", search_defaults=Categorical(["auto"]),
                description="family whose patterns are looked for: those of the installed ONNX Runtime. auto tries the likely ones until every "
                "attention is fused, and takes the one that fuses most",
            ),
            "num_heads": PassConfigParam(
                type_=int, default_value=0, minimum=0, description="attention heads; 0 finds out from the graph"
            ),
            "hidden_size": PassConfigParam(
                type_=int, default_value=0, minimum=0, description="width of all heads together; 0 finds out from the graph"
            ),
            "opt_level": PassConfigParam(
                type_=Literal[0, 1, 2, 99], default_value=0, search_defaults=Categorical([0, 1]),
                description="let ONNX Runtime optimize first: 0 not at all, 1 basic, 2 extended, 99 all. Basic helps some exports and hides the "
                "patterns of others; 2 and 99 make a model for this kind of CPU only",
            ),
            "only_onnxruntime": PassConfigParam(
                type_=bool, default_value=False, description="leave out the pattern fusions, do opt_level only (which must then be above 0)"
            ),
            **fusions,
            "use_raw_attention_mask": _with_fusions(
                True, "keep the mask as it is given; otherwise it is read as a length, which is right only for inputs padded at the end"
            ),
            "use_multi_head_attention": _with_fusions(
                False, "write MultiHeadAttention instead of Attention, which merges the three projections"
            ),
            "shape_inference": _with_fusions(
                True, "infer shapes first where there is attention or normalization, which the fusion of residual additions goes by. Switch it off "
                "for models on which it takes minutes"
            ),
            "float16": PassConfigParam(
                type_=bool, default_value=False, description="convert to float16 afterwards, float32 inputs and outputs kept (slower on most CPUs)"
            ),
        }  # fmt: skip

    @classmethod
    def validate_config(cls, config: Mapping[str, Any], accelerator_spec: AcceleratorSpec) -> None:
        """Refuse a config that does nothing, heads that can't share the width, and types that make another model."""
        if config["only_onnxruntime"] and config["opt_level"] == 0:
            raise PassConfigError(
                cls.__name__, "only_onnxruntime needs an opt_level above 0", "opt_level=0", "Set opt_level to 1, or only_onnxruntime to false."
            )
        heads, width = config["num_heads"], config["hidden_size"]
        if bool(heads) != bool(width):
            raise PassConfigError(
                cls.__name__, "num_heads and hidden_size must be given together", f"num_heads={heads}, hidden_size={width}",
                "Give both, or neither: they are then found in the graph.",
            )  # fmt: skip
        if heads and width % heads:
            raise PassConfigError(cls.__name__, "hidden_size must be a multiple of num_heads", f"hidden_size={width}, num_heads={heads}")
        why = UNUSABLE.get(config["model_type"])
        if why:
            raise PassConfigError(cls.__name__, "model_type must be one whose result can take the model's place", repr(config["model_type"]),
                                  f"Of {config['model_type']}: {why}. Take auto.")  # fmt: skip
        if accelerator_spec.accelerator_type != "gpu":
            asked = [f.name for f in FUSIONS if f.gpu and config.get(f.name)]
            if asked:
                raise PassConfigError(
                    cls.__name__, f"{asked[0]} needs a GPU: its operators have no kernels elsewhere", f"{asked[0]}=True", f"Leave {asked[0]} out."
                )

    @classmethod
    def traits(cls, config: Mapping[str, Any]) -> ModelTraits:
        """Weights and arithmetic in float16, where asked for."""
        return ModelTraits(weight_type="float16", activation_type="float16") if config["float16"] else ModelTraits()

    def _run_for_config(self, model: ONNXModelHandler, config: Mapping[str, Any], output_model_path: Path) -> ONNXModelHandler:
        given = load_fixed(model)
        before = operator_counts(given)
        if self.accelerator_spec.accelerator_type == "gpu" and config["opt_level"] > 0:
            self._refuse_missing_provider()
        judge = _Judge.of(given, model, config, on_cpu=self.accelerator_spec.execution_provider == CPU)
        fused = self._best(given, config, judge, model.digest)
        result = fused.proto
        after = operator_counts(result)
        asked = {f.name for f in FUSIONS if config.get(f.name)} - set(fused.left_out)
        notes: dict[str, Any] = {
            "operators_before": before, "operators_after": after, "nodes_before": sum(before.values()), "nodes_after": sum(after.values()),
            "model_type": fused.model_type, "num_heads": fused.heads[0], "hidden_size": fused.heads[1], "fused": operators_made(before, after),
            "not_applied": {**not_applied(asked, before, after, fused.model_type), **fused.left_out},
            "attention_before": len(judge.sites), "attention_left": len(attention_sites(result)) if judge.sites else 0,
            "portable": config["opt_level"] <= 1, "compared": judge.words, "error": judge.error,
        }  # fmt: skip
        if config["float16"]:
            if not count_weights(result, "FLOAT"):
                notes["not_applied"]["float16"] = "the model holds no float32 weights"
            else:
                result = self._to_float16(result, judge)
                notes["operators_after"] = operator_counts(result)
                notes["float16_error"] = judge.error
        if same_work(given, result):
            reason = "nothing to optimize" if config["only_onnxruntime"] else f"no pattern of {fused.model_type} was found in the graph"
            return unchanged(model, output_model_path, reason, notes=notes)
        if self.accelerator_spec.execution_provider == CPU:
            with library_errors(WHO, "the fused model must load", ADVICE):
                loads_at_every_level(result)
        return model.written(output_model_path, proto=result, notes={**notes, "changed": True})

    def _refuse_missing_provider(self) -> None:
        import onnxruntime as ort

        wanted = self.accelerator_spec.execution_provider
        if wanted not in ort.get_available_providers():
            raise PassError(WHO, f"opt_level above 0 needs {wanted}", "an ONNX Runtime without it", "Set opt_level to 0.")

    def _best(self, given: onnx.ModelProto, config: Mapping[str, Any], judge: _Judge, digest: str) -> _Fused:
        """Fuse for the model type asked for, or for the one that fuses most; what gives wrong outputs is left out and named."""
        if config["model_type"] != "auto":
            return self._right(given, config["model_type"], config, judge)
        types = [t for t in TRIED if t in model_types()]
        if config["only_onnxruntime"] or not config["attention"] or not judge.sites:
            return self._right(given, types[0], config, judge)
        tried: dict[str, _Fused] = {}

        def find() -> str:
            best, most = types[0], None
            for one in types:
                with contextlib.suppress(PassError):
                    tried[one] = self._fuse(given, one, config, judge)
                    score = (sum(tried[one].made.get(name, 0) for name in ATTENTION), -len(tried[one].proto.graph.node))
                    if most is None or score > most:
                        best, most = one, score
                    if score[0] >= len(judge.sites):
                        break
            return best

        facts = {
            "model": digest, "config": {k: v for k, v in config.items() if k != "float16"}, "types": types,
            "version": self.contract.version, "ep": self.accelerator_spec.execution_provider,
        }  # fmt: skip
        chosen = str(self.findings.once("fusion-type", facts, find))
        return self._right(given, chosen, config, judge, first=tried.get(chosen))

    def _right(self, given: onnx.ModelProto, model_type: str, config: Mapping[str, Any], judge: _Judge, *, first: _Fused | None = None) -> _Fused:
        """Fuse, and where outputs are not those of the model, leave out the one fusion that is to blame, or all that have to go."""
        first = first or self._fuse(given, model_type, config, judge)
        fault = judge.fault(first.proto)
        if not fault:
            return first
        suspects = [f.name for f in reversed(FUSIONS) if config.get(f.name) and any(name in first.made for name in f.makes)]
        suspects.sort(key=lambda name: name != "attention")  # the likeliest one first
        for out in [*({name} for name in suspects), set(suspects)]:
            again = self._fuse(given, model_type, config, judge, left_out=out)
            if not judge.fault(again.proto):
                return _Fused(again.proto, model_type, again.heads, again.made, dict.fromkeys(sorted(out), f"left out, since with it {fault}"))
        raise PassError(WHO, "the fused model must give the outputs of the model", f"{fault} (model type {model_type})", ADVICE)

    def _fuse(self, given: onnx.ModelProto, model_type: str, config: Mapping[str, Any], judge: _Judge, *, left_out: Set[str] = frozenset()) -> _Fused:
        from onnxruntime.transformers.fusion_options import FusionOptions
        from onnxruntime.transformers.optimizer import optimize_model

        options = FusionOptions(model_type)
        if model_type in DIFFUSION:
            for fusion in FUSIONS:  # switches that the table has no row for unless the type is named
                if fusion.types and fusion.name not in config:
                    setattr(options, fusion.option, False)
        for option, value in option_values(config, left_out).items():
            setattr(options, option, value)
        options.use_multi_head_attention = config.get("use_multi_head_attention", False)
        # The runtime's inference with symbols runs for minutes on convolutions of unknown sizes; only normalization and attention need it.
        present = {n.op_type for n in given.graph.node}
        needed = judge.sites or present & NORMALIZING or present >= {"ReduceMean", "Sqrt"}  # these are normalization written out in parts
        options.enable_shape_inference = config.get("shape_inference", True) and bool(needed)
        options.use_raw_attention_mask(config.get("use_raw_attention_mask", True))
        heads = (config["num_heads"], config["hidden_size"]) if config["num_heads"] else heads_of(judge.sites)
        known = initializer_names(given)
        must = f"the model must be one that ONNX Runtime's transformers optimizer takes as {model_type}"
        with tempfile.TemporaryDirectory(prefix="autotune-fuse-") as name, library_errors(WHO, must, ADVICE), _silent():
            path = Path(name, MODEL_FILE)
            copied = type(given)()
            copied.CopyFrom(given)
            save_onnx(copied, path)
            result: onnx.ModelProto = optimize_model(
                str(path), model_type=model_type, num_heads=heads[0], hidden_size=heads[1], optimization_options=options,
                opt_level=config["opt_level"], only_onnxruntime=config["only_onnxruntime"],
                use_gpu=self.accelerator_spec.accelerator_type == "gpu",
            ).model  # fmt: skip
            keep_io(result, given)
            sort_nodes(result.graph)
            rename_new_initializers(result, known)
            fit_domains(result)
        return _Fused(result, model_type, heads, operators_made(operator_counts(given), operator_counts(result)), {})

    def _to_float16(self, proto: onnx.ModelProto, judge: _Judge) -> onnx.ModelProto:
        given = with_shapes(proto, who=WHO)
        name_every_node(given)
        result = convert(given, who=WHO, keep_io_types=True, operators=[], nodes=[], limits=(SMALLEST, LARGEST))
        fault = judge.fault(result, tolerance=float("inf"))
        if fault:
            raise PassError(WHO, "the float16 model must give finite outputs of the same kinds", fault, "Set float16 to false.")
        return result


@dataclass(frozen=True)
class _Fused:
    """A fused model: operators made by name, and what was left out of it, with why."""

    proto: onnx.ModelProto
    model_type: str
    heads: tuple[int, int]
    made: Mapping[str, int]
    left_out: Mapping[str, str]


class _Judge:
    """Compares fused models with the one they are made of, on the same made-up inputs; `error` and `words` tell of the last comparison."""

    def __init__(
        self,
        given: onnx.ModelProto,
        model: ONNXModelHandler,
        feeds: list[Arrays] | None,
        words: str,
        *,
        tolerance: float,
        on_cpu: bool,
        levels: Sequence[str] = LEVELS,
    ) -> None:
        self.levels = levels
        self.given, self.io, self.feeds, self.words, self.tolerance, self.on_cpu = given, model.io, feeds, words, tolerance, on_cpu
        self.sites = attention_sites(given)
        self.error = 0.0

    @classmethod
    def of(cls, given: onnx.ModelProto, model: ONNXModelHandler, config: Mapping[str, Any], *, on_cpu: bool) -> _Judge:
        try:
            feeds, words = usable_feeds(given, model.io, who=WHO)
        except NotComparable as error:
            return cls(given, model, None, f"no: {error}", tolerance=EXACT, on_cpu=on_cpu)
        if not config.get("use_raw_attention_mask", True):  # right for rows without padding, so those are compared
            feeds = [{n: np.ones_like(a) if a.dtype.kind in "iu" else a for n, a in feed.items()} for feed in feeds]
        tolerance = APPROXIMATE if config.get("gelu_approximation") else EXACT
        # Kernels that were chosen beforehand sum in another order than plain ones: with all optimizations both models use them.
        levels = LEVELS if config["opt_level"] <= 1 else ("all",)
        return cls(given, model, feeds, words, tolerance=tolerance, on_cpu=on_cpu, levels=levels)

    def fault(self, proto: onnx.ModelProto, *, tolerance: float | None = None) -> str:
        """Say where outputs differ by more than they may; empty for nowhere, and where nothing can be compared."""
        if self.feeds is None:
            return ""
        missing = without_kernel(proto, CPU)
        if missing and self.on_cpu:
            return f"{missing[0]} has no kernel on the CPU"
        if missing:
            self.words = f"no: {missing[0]} does not run on the CPU"
            return ""
        try:
            found = compare(self.given, proto, self.io, who=WHO, feeds_=self.feeds, levels=self.levels)
        except Exception as error:  # the model ran once, to find its feeds
            self.words = f"no: {type(error).__name__}"
            return ""
        self.error = found.error
        if found.error > (self.tolerance if tolerance is None else tolerance):
            return found.fault or f"an output differs by {found.error:.2g} of its largest value"
        return found.fault if found.error <= FLOAT32_TOLERANCE else ""


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep the optimizer quiet; its progress bars go to standard error."""
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        yield
