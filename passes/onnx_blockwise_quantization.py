"""OnnxBlockwiseQuantization: weights in 4 or 8 bits, a scale for each block of them; activations stay float.

Sources: ONNX Runtime's operators MatMulNBits, MatMulBnb4 and GatherBlockQuantized; `blockwise_weights` names the papers. ONNX Runtime's own
`matmul_nbits_quantizer` makes the same operators, but skips Gemm, leaves excluded nodes in only some algorithms and stores shared weights twice;
so the graph is changed here, and its code finds the numbers of k-quant, HQQ and NF4. Every statement about speed was measured with 1.32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from autotune.errors import PassError, nearest
from autotune.model import ONNXModelHandler
from autotune.passes import blockwise_weights as bw
from autotune.passes.base import ONNX, AcceleratorSpec, ModelTraits, ParamCategory, Pass, PassConfigParam, PassContract
from autotune.passes.blockwise_graph import (
    Settings,
    Site,
    clean,
    counted,
    find_sites,
    float_weights,
    has_activations,
    in_words,
    refuse_wrong_kernels,
    rewrite,
)
from autotune.passes.calibration import calibration_feeds, visit_activations
from autotune.passes.channel_scales import Group, Scaler, find_groups, refuse_difference
from autotune.passes.onnx_graph import (
    default_opset,
    drop_unused_initializers,
    is_quantized,
    library_errors,
    lift_constants,
    load_fixed,
    loads_at_every_level,
    matching_nodes,
    name_every_node,
    name_values_apart,
    operator_counts,
    unchanged,
    weight_bytes,
)
from autotune.passes.registry import register
from autotune.search_spaces.parameters import INACTIVE, Boolean, Categorical, Conditional, ConditionalDefault

if TYPE_CHECKING:
    import onnx

WHO = "OnnxBlockwiseQuantization"
BLOCK_SIZES = (16, 32, 64, 128, 256)  # 512 has returned zeros without a word (microsoft/onnxruntime#28551)
QDQ_OPSET = 21  # 4-bit types and DequantizeLinear by blocks
FROM_DATA = ("gptq", "awq")
OPERATORS: Mapping[str, tuple[str, ...]] = {
    "all": ("MatMul", "Gemm", "Gather"), "matmul": ("MatMul", "Gemm"), "MatMul": ("MatMul",), "Gemm": ("Gemm",), "Gather": ("Gather",),
}  # fmt: skip
SAMPLE_ROWS = 512  # of activations, that AWQ looks at for each weight
ROWS_A_RUN = 16
SAMPLE_OUTPUTS = 512  # of each weight, that AWQ tries scales with
ROWS_AT_ONCE = 1024  # that GPTQ multiplies with themselves
HESSIAN_BYTES = 512_000_000
AWQ_POWERS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of the channels' mean size; 0 leaves them as they are


def _operator_fault(value: str) -> str:
    unknown = [part for part in value.split("+") if part not in OPERATORS]
    return f"all, matmul, or operators joined by + (no {unknown[0]!r}: {nearest(unknown[0], OPERATORS)})" if unknown else ""


def _bits_fault(value: int) -> str:
    return "" if value in (4, 8) else "4 or 8"


def _block_fault(value: int) -> str:
    return "" if value in BLOCK_SIZES else f"one of {', '.join(map(str, BLOCK_SIZES))}"


@register
class OnnxBlockwiseQuantization(Pass):
    """Quantize the constant weights of MatMul, Gemm and Gather to 4 or 8 bits in blocks."""

    contract = PassContract(
        accepts=ONNX, returns=ONNX, min_opset=7, refuses_quantized_input=True, data={"calibration_data_dir": "calibration"}, version=2
    )

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        from_data = dict.fromkeys(FROM_DATA, 64)
        return {
            "algorithm": PassConfigParam(
                type_=Literal["rtn", "k_quant", "hqq", "gptq", "awq", "nf4"], default_value="rtn",
                search_defaults=Categorical(["rtn", "k_quant", "hqq", "gptq", "awq"]),
                description="how the values are found: rtn (nearest), k_quant and hqq (least error of the weights), gptq and awq (least error of "
                "the products on calibration data), nf4 (16 levels spaced like normal numbers; slow on CPUs and not searched)",
            ),
            "bits": PassConfigParam(
                type_=int, default_value=ConditionalDefault("algorithm", {"nf4": INACTIVE}, default=4), check=_bits_fault,
                search_defaults=Conditional("algorithm", {"nf4": INACTIVE, "rtn": Categorical([4, 8])}, default=Categorical([4])),
                description="bits of a weight, 4 or 8; at 8 the algorithms hardly differ, and only rtn is searched. nf4 has 4",
            ),
            "block_size": PassConfigParam(
                type_=int, default_value=32, search_defaults=Categorical([16, 32, 64, 128]), check=_block_fault,
                description="weights that share a scale: 16, 32, 64, 128 or 256; larger blocks are smaller and faster, and less exact",
            ),
            "is_symmetric": PassConfigParam(
                type_=bool, default_value=ConditionalDefault("algorithm", dict.fromkeys(("rtn", *FROM_DATA), True), default=INACTIVE),
                search_defaults=Conditional("algorithm", {a: Boolean() for a in ("rtn", *FROM_DATA)}, default=INACTIVE),
                description="no zero points; k_quant and hqq always have them, nf4 never",
            ),
            "quant_format": PassConfigParam(
                type_=Literal["QOperator", "QDQ"], default_value=ConditionalDefault("algorithm", {"nf4": INACTIVE}, default="QOperator"),
                search_defaults=Conditional("algorithm", {"nf4": INACTIVE}, default=Categorical(["QOperator"])),
                description="QOperator (ONNX Runtime's own operators) or QDQ (DequantizeLinear, opset 21, for other runtimes too). Of QDQ ONNX "
                "Runtime makes the same operators as it loads the model, at accuracy level 4: not searched. nf4 is QOperator",
            ),
            "accuracy_level": PassConfigParam(
                type_=int, minimum=0, maximum=4,
                default_value=ConditionalDefault(("quant_format", "bits"), {("QOperator", 4): 0, ("QOperator", 8): 4}, default=INACTIVE),
                search_defaults=Conditional(
                    ("quant_format", "bits"), {("QOperator", 4): Categorical([0, 4]), ("QOperator", 8): Categorical([4])}, default=INACTIVE
                ),
                description="least exact arithmetic that the runtime may use: 0 and 1 float32, 2 float16, 3 bfloat16, 4 activations rounded to int8. "
                "4 changes each product by about 0.6% and is up to 3 times faster at 4 bits; at 8 bits the others are some 30 times slower at one "
                "row and not searched. On CPUs 0 to 3 are the same. QOperator format only",
            ),
            "op_types_to_quantize": PassConfigParam(
                type_=str, default_value="matmul", search_defaults=Categorical(["matmul", "all"]), check=_operator_fault,
                description="matmul (MatMul and Gemm), all (Gather, as of embeddings, too), or some of MatMul, Gemm, Gather joined by +",
            ),
            "nodes_to_exclude": PassConfigParam(
                type_=list[str],
                description="names of nodes of the input model to leave in float; * and ? match any text. A name that matches nothing is refused",
            ),
            "calibration_data_dir": PassConfigParam(
                type_=str | Path, category=ParamCategory.DATA,
                description="an .npz of calibration examples, or a folder of such files; needed by gptq and awq",
            ),
            "calibration_samples": PassConfigParam(
                type_=int, minimum=1, default_value=ConditionalDefault("algorithm", from_data, default=INACTIVE),
                search_defaults=Conditional("algorithm", {a: Categorical([n]) for a, n in from_data.items()}, default=INACTIVE),
                description="examples for gptq and awq, at most; spread evenly over the data",
            ),
        }  # fmt: skip

    @classmethod
    def needed_data(cls, config: Mapping[str, Any]) -> frozenset[str]:
        """GPTQ and AWQ look at activations."""
        return frozenset({"calibration"} if config["algorithm"] in FROM_DATA else ())

    @classmethod
    def needed_opset(cls, config: Mapping[str, Any]) -> int:
        """Return 21 for QDQ: DequantizeLinear took blocks with it."""
        return QDQ_OPSET if config.get("quant_format") == "QDQ" else cls.contract.min_opset

    @classmethod
    def traits(cls, config: Mapping[str, Any]) -> ModelTraits:
        """Weights of few bits; activations as they were."""
        qdq, symmetric = config.get("quant_format") == "QDQ", bool(config.get("is_symmetric", False))
        type_ = f"{'int' if qdq and symmetric else 'uint'}{config['bits']}" if config["algorithm"] != "nf4" else "nf4"
        return ModelTraits(
            quantized=True, format="qdq" if qdq else "weight_only", weight_type=type_, symmetric_weights=symmetric, power_of_two=False,
            methods=frozenset({config["algorithm"]} & set(FROM_DATA)),
        )  # fmt: skip

    def _run_for_config(self, model: ONNXModelHandler, config: Mapping[str, Any], output_model_path: Path) -> ONNXModelHandler:
        given = load_fixed(model)
        before = operator_counts(given)
        operators = frozenset(o for part in config["op_types_to_quantize"].split("+") for o in OPERATORS[part])
        settings = Settings.of(config, operators)
        if is_quantized(given):
            raise PassError(
                WHO, "takes a float model", "one that holds quantized operators already", "Leave this pass out, or start from the float model."
            )
        if settings.qdq and default_opset(given) < QDQ_OPSET:
            raise PassError(
                WHO, f"QDQ format needs opset {QDQ_OPSET} or later", f"opset {default_opset(given)}",
                "Set quant_format to 'QOperator', or convert the model to a later opset first.",
            )  # fmt: skip
        bytes_before, weights_before = weight_bytes(given), float_weights(given)
        name_every_node(given)
        name_values_apart(given)
        lift_constants(given)
        excluded = frozenset(matching_nodes(given, config.get("nodes_to_exclude") or [], who=WHO, parameter="nodes_to_exclude"))
        sites, left = find_sites(given, settings, excluded)
        notes: dict[str, Any] = {"operators_before": before, "weight_bytes_before": bytes_before, "left": counted(left)}
        if not sites:
            reason = f"no weight to quantize: {in_words(left)}" if left else f"the model has no {'/'.join(sorted(settings.operators))}"
            return unchanged(model, output_model_path, reason, notes={**notes, "operators_after": before, "quantized_nodes": 0})

        finder = _Finder(settings, model, config)
        if settings.algorithm == "awq":
            notes["scaled_values"] = finder.scale_channels(given, sites)
            sites, _ = find_sites(given, settings, excluded)
        rewrite(given, finder.look_at(given, sites), finder.blocks, settings)
        if self.accelerator_spec.execution_provider == "CPUExecutionProvider":
            refuse_wrong_kernels(sites, settings)
        notes["quantized_by_operator"] = dict(sorted(Counter(s.node.op_type for s in sites).items()))
        notes["quantized_nodes"] = len(sites)
        quantized = sum({s.key: s.size for s in sites}.values())
        notes.update(quantized_weights=quantized, share_of_weights=round(quantized / max(weights_before, 1), 4))
        clean(given, settings)
        if self.accelerator_spec.execution_provider == "CPUExecutionProvider":
            with library_errors(WHO, "the quantized model must load", "Choose other parameters, or leave this pass out."):
                loads_at_every_level(given)
        notes.update(operators_after=operator_counts(given), weight_bytes_after=weight_bytes(given))
        return model.written(output_model_path, proto=given, notes={**notes, "changed": True})


class _Finder:
    """Finds a site's whole numbers by the algorithm asked for, with activations from calibration data where it needs them."""

    def __init__(self, settings: Settings, model: ONNXModelHandler, config: Mapping[str, Any]) -> None:
        self.settings = settings
        self.grid: dict[str, Any] = {"bits": settings.bits, "block_size": settings.block_size, "symmetric": settings.symmetric}
        self.io = model.io
        self.hessians: dict[str, NDArray[np.float64]] = {}
        self.hessian_rows: Counter[str] = Counter()
        self.waiting: dict[str, list[NDArray[np.float32]]] = {}
        self.seen: dict[str, _Seen] = {}
        self.data: Path | None = None
        if settings.algorithm in FROM_DATA:
            if config.get("calibration_data_dir") is None:
                raise PassError(
                    WHO,
                    f"{settings.algorithm} needs calibration data",
                    "calibration_data_dir=None",
                    "Give calibration data, or choose rtn.",
                )
            self.data = Path(config["calibration_data_dir"])
            self.walk = calibration_feeds(self.data, model.io, config["calibration_samples"], who=WHO)

    def visit(self, proto: onnx.ModelProto, names: Sequence[str], visit: Callable[[str, NDArray[Any]], None]) -> None:
        with library_errors(WHO, "the model must run on the calibration data with its inner values as outputs"):
            visit_activations(proto, self.walk, names, visit)

    def look_at(self, proto: onnx.ModelProto, sites: Sequence[Site]) -> Iterator[list[Site]]:
        """Yield the sites in parts; for GPTQ, with the second moments of what goes into each part's products at hand, and no others."""
        if self.settings.algorithm != "gptq":
            yield list(sites)
            return
        original = type(proto)()
        original.CopyFrom(proto)  # its values are asked for when half of it is quantized already
        rest = [s for s in sites if not has_activations(s)]
        inputs: dict[str, list[Site]] = {}
        for site in sites:
            if has_activations(site):
                inputs.setdefault(site.node.input[0], []).append(site)
        while inputs:
            room = HESSIAN_BYTES
            part: dict[str, list[Site]] = {}
            for name in list(inputs):
                room -= 8 * int(inputs[name][0].rows().shape[1]) ** 2
                if part and room < 0:
                    break
                part[name] = inputs.pop(name)
            self.hessians = {}
            self.visit(original, list(part), self._add_moments)
            for name in list(self.waiting):
                self._multiply(name)
            yield [site for group in part.values() for site in group]
        self.hessians = {}
        yield rest

    def _add_moments(self, name: str, array: NDArray[Any]) -> None:
        rows = self.waiting.setdefault(name, [])
        rows.append(array.reshape(-1, array.shape[-1]).astype(np.float32))
        if sum(map(len, rows)) >= ROWS_AT_ONCE:
            self._multiply(name)

    def _multiply(self, name: str) -> None:
        """Add up in double precision what was multiplied, some rows at once, in single precision."""
        rows = np.concatenate(self.waiting.pop(name))
        product = rows.T @ rows
        self.hessian_rows[name] += len(rows)
        self.hessians[name] = self.hessians[name] + product if name in self.hessians else product.astype(np.float64)

    def blocks(self, site: Site) -> bw.Blocks:
        """Return the whole numbers for a site's weight. Raises `PassError` for weights that are not finite."""
        rows = site.rows()
        size = {"bits": self.settings.bits, "block_size": self.settings.block_size}
        if not np.isfinite(rows).all():
            raise PassError(WHO, "weights must be finite", f"NaN or infinity in {site.weight.name!r}", "Mend the model, or exclude what it feeds.")
        if self.settings.algorithm == "k_quant":
            return bw.k_quant(rows, **size)
        if self.settings.algorithm == "hqq":
            return bw.hqq(rows, **size)
        value = site.node.input[0] if has_activations(site) else ""
        hessian = self.hessians.get(value)
        if hessian is not None and np.isfinite(hessian).all() and len(hessian) == rows.shape[1]:
            trust = self.hessian_rows[value] / (self.hessian_rows[value] + len(hessian))  # few rows show relations that are none
            return bw.gptq(rows, trust * hessian + (1 - trust) * np.diag(np.diag(hessian)), **self.grid)
        plain = bw.round_to_nearest(rows, **self.grid)
        seen = self.seen.get(value)
        if seen is None or not seen.usable(rows.shape[1]):
            return plain
        clipped = bw.round_to_nearest(rows, **self.grid, moments=seen.damped_moments(), shrinks=bw.SHRINKS)
        plain_error, clipped_error = (np.square(seen.sample() @ (b.dequantized(rows.shape[1]) - rows).T).sum() for b in (plain, clipped))
        return clipped if clipped_error < plain_error else plain

    def scale_channels(self, proto: onnx.ModelProto, sites: Sequence[Site]) -> int:
        """Scale the input channels of weights where what comes before can take it, so that the products lose least; returns how many values.

        Keeps what it saw of the values, as they are afterwards.
        """
        wanted = [s for s in sites if has_activations(s)]
        names = {s.node.name for s in wanted}
        block_size = self.settings.block_size
        self.visit(proto, [s.node.input[0] for s in wanted], lambda name, array: self.seen.setdefault(name, _Seen(block_size)).add(array))
        before = type(proto)()
        before.CopyFrom(proto)
        scaler = Scaler(proto)
        scaled = 0
        for group in find_groups(proto):
            consumers = {scaler.nodes[p.node].name for p in group.weights}
            seen = self.seen.get(group.value)
            if group.before is None or seen is None or not seen.usable(group.channels) or not consumers <= names:
                continue
            scales = self._best_scales(scaler, group, seen)
            if scales is not None:
                scaler.apply(group, scales)
                seen.divide(scales)
                scaled += 1
        drop_unused_initializers(proto)
        if scaled:
            refuse_difference(before, proto, self.io, self.data, who=WHO)
        return scaled

    def _best_scales(self, scaler: Scaler, group: Group, seen: _Seen) -> NDArray[np.float32] | None:
        """Try powers of the channels' mean size; None when leaving them as they are is best."""
        sample = seen.sample()
        every = [np.moveaxis(scaler.weight(p), p.axis, -1).reshape(-1, group.channels) for p in group.weights]
        weights = [rows[:: -(-len(rows) // SAMPLE_OUTPUTS)].astype(np.float32) for rows in every]
        sizes = np.maximum(seen.sizes / seen.rows, 1e-8)
        best, best_error = None, np.inf
        for power in AWQ_POWERS:
            scales = sizes**power
            scales = (scales / np.sqrt(scales.max() * scales.min())).clip(1e-4, 1e4).astype(np.float32)
            error = 0.0
            for rows in weights:
                found = bw.round_to_nearest(rows * scales, **self.grid)
                error += float(np.square(sample @ (found.dequantized(group.channels) / scales - rows).T).sum())
            if error < best_error:
                best, best_error = (scales if power else None), error
        return best


class _Seen:
    """What AWQ keeps of a value: sizes by channel; second moments by block, of one half of the rows; and some rows of the other half.

    So what was fitted to the one half can be judged on the other.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.rows = self.moment_rows = 0
        self.sizes: Any = 0.0
        self.moments: Any = 0.0
        self.kept: list[NDArray[np.float32]] = []
        self.turn = 0

    def add(self, array: NDArray[Any]) -> None:
        rows = array.reshape(-1, array.shape[-1]).astype(np.float32)
        self.rows += len(rows)
        self.sizes = self.sizes + np.abs(rows).sum(0, dtype=np.float64)
        self.turn += 1
        if self.turn % 2 and self.turn > 1:
            self.kept.append(rows[:: -(-len(rows) // ROWS_A_RUN)])
            return
        self.kept = self.kept or [rows[:: -(-len(rows) // ROWS_A_RUN)]]
        self.moment_rows += len(rows)
        blocked = np.pad(rows, ((0, 0), (0, -rows.shape[1] % self.block_size))).reshape(len(rows), -1, self.block_size).transpose(1, 2, 0)
        self.moments = self.moments + (blocked @ blocked.transpose(0, 2, 1)).astype(np.float64)

    def damped_moments(self) -> NDArray[np.float64]:
        """Mean second moments; with few rows, nearer to those of channels that have nothing to do with each other."""
        moments: NDArray[np.float64] = self.moments / self.moment_rows
        own = np.trace(moments, axis1=1, axis2=2)[:, None, None] / self.block_size * np.eye(self.block_size)
        trust = self.moment_rows / (self.moment_rows + 2 * self.block_size)
        return np.asarray(trust * moments + (1 - trust) * own)

    def usable(self, channels: int) -> bool:
        """Whether it is finite, and has as many channels as the weight that it is to meet."""
        return np.shape(self.sizes) == (channels,) and bool(np.isfinite(self.sizes).all() and np.isfinite(self.moments).all())

    def sample(self) -> NDArray[np.float32]:
        """At most `SAMPLE_ROWS` rows, from all over what was seen."""
        rows = np.concatenate(self.kept)
        return rows[:: -(-len(rows) // SAMPLE_ROWS)]

    def divide(self, scales: NDArray[np.float32]) -> None:
        """Follow the value, whose channels were divided by these."""
        self.sizes = self.sizes / scales
        self.kept = [rows / scales for rows in self.kept]
        filled = np.pad(scales, (0, -len(scales) % self.block_size), constant_values=1).reshape(-1, self.block_size)
        self.moments = self.moments / (filled[:, :, None] * filled[:, None, :])
