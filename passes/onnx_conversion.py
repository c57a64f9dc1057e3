"""OnnxConversion: from a PyTorch module to an ONNX model, by either of torch's exporters.

Source: PyTorch documentation, "torch.onnx"; behaviour of torch 2.13 as measured with it.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from autotune.errors import PassConfigError, PassError, nearest
from autotune.model import ONNX, PYTORCH, IoContract, ONNXModelHandler, PyTorchModelHandler, TensorSpec, save_onnx
from autotune.passes.base import ModelTraits, Pass, PassConfigParam, PassContract
from autotune.passes.registry import register
from autotune.passes.torch_inputs import (
    FIRST_AXIS_SIZE,
    Axes,
    Sizes,
    call,
    example_inputs,
    first_lines,
    flat_outputs,
    quiet,
    symbolic_axes,
    takes_by_name,
    usual_sizes,
)
from autotune.session import SessionSettings, create_session
from autotune.target import AcceleratorSpec

if TYPE_CHECKING:
    import onnx
    import torch

OPSETS = {"torchscript": (7, 23), "dynamo": (18, 28)}  # beyond these torch 2.13 refuses, or quietly writes another opset
TOLERANCE = 1e-3  # of an output's largest magnitude; float32 sums in another order stay below 1e-5
COARSE_TOLERANCE = 2e-2  # for 16-bit floats
ONE_FILE_BYTES = 1_500_000_000  # more parameters than this don't fit into one protobuf message with the graph


@register
class OnnxConversion(Pass):
    """Export the module and prove that the graph computes what the module does.

    The default exporter traces (`torchscript`): 20 to 50 ms for a small net where `dynamo` takes a second or more, graphs of the
    same speed, and attention that the runtime's optimizer recognizes. `dynamo` follows control flow that tracing freezes. The
    default opset, 18, is the first that both write without converting, and that every runtime of the last years reads.
    """

    contract = PassContract(accepts=PYTORCH, returns=ONNX, version=1)

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {
            "exporter": PassConfigParam(
                type_=Literal["torchscript", "dynamo"],
                default_value="torchscript",
                description="which of torch's exporters writes the graph; results run equally fast, so it is searched only when listed",
            ),
            "target_opset": PassConfigParam(
                type_=int, default_value=18, minimum=7, maximum=28,
                description="version of the ONNX operator set: 7 to 23 with torchscript, 18 to 28 with dynamo",
            ),
            "dynamic_axes": PassConfigParam(
                type_=dict | None,
                description="input name to {axis: label} for each axis that may change; left out: every axis without a fixed size; {}: none",
            ),
            "input_shapes": PassConfigParam(
                type_=dict | list | None,
                description="shapes to trace with, by input name or in order; left out: the known sizes, 2 examples, 16 and up for other axes",
            ),
        }  # fmt: skip

    @classmethod
    def validate_config(cls, config: Mapping[str, Any], accelerator_spec: AcceleratorSpec) -> None:
        """Refuse an opset that the exporter can't write."""
        low, high = OPSETS[config["exporter"]]
        if not low <= config["target_opset"] <= high:
            raise PassConfigError(
                "OnnxConversion", f"target_opset must be from {low} to {high} with exporter {config['exporter']!r}", str(config["target_opset"]),
                "Choose another opset, or the other exporter.",
            )  # fmt: skip

    @classmethod
    def traits(cls, config: Mapping[str, Any]) -> ModelTraits:
        """A model of the opset asked for."""
        return ModelTraits(opset=config["target_opset"])

    def _run_for_config(self, model: PyTorchModelHandler, config: Mapping[str, Any], output_model_path: Path) -> ONNXModelHandler:
        import onnx
        import torch

        contract = _with_shapes(model.io, config["input_shapes"])
        axes = _chosen_axes(model.io, contract, config["dynamic_axes"])
        sizes = _sizes(contract, axes)
        contract = _free(contract, axes)
        exporter = config["exporter"]
        module = model.load()
        inputs = example_inputs(contract, axes, sizes, who="OnnxConversion")
        others = example_inputs(contract, axes, {k: v + (1 if v < 16 else 8) for k, v in sizes.items()}, who="OnnxConversion", seed=1)
        with quiet() as said, torch.no_grad(), _plain_attention():
            expected = _reference(module, inputs)
            try:
                expected_at_others = flat_outputs(call(module, others)) if sizes else []
            except Exception:  # the module itself takes only some sizes: nothing to compare there
                expected_at_others = []
            names = _output_names(model.io, len(expected))
            proto = _export(module, inputs, axes, config, names, _output_axes(names, expected, expected_at_others, inputs, others, axes))
        _forget_the_author(proto)
        save_onnx(proto, output_model_path / "model.onnx")
        result = ONNXModelHandler.from_folder(output_model_path, session=model.session)
        if result.opset != config["target_opset"]:
            raise PassError(
                "OnnxConversion", f"{exporter} must write opset {config['target_opset']}", f"opset {result.opset}", "Choose another target_opset."
            )
        try:
            onnx.checker.check_model(str(result.path))
        except onnx.checker.ValidationError as error:
            raise PassError("OnnxConversion", "the exported graph must be valid ONNX", first_lines(error), _other(exporter)) from error
        largest = _compare(result, inputs, expected, exporter, "on the traced shapes")
        if expected_at_others:
            largest = max(largest, _compare(result, others, expected_at_others, exporter, "on other sizes of its dynamic axes"))
        notes: dict[str, Any] = {
            "changed": True, "exporter": exporter, "opset": result.opset, "largest_error": float(f"{largest:.3g}"),
            "other_sizes_checked": bool(expected_at_others),
        }  # fmt: skip
        frozen = sorted({str(w.message).splitlines()[0] for w in said if w.category.__name__ == "TracerWarning"})
        if frozen:  # a branch or a size that tracing turned into a constant: perhaps harmless, never to be hushed up
            notes["traced_as_constant"] = frozen[:10]
        return replace(result, notes=notes)


@contextlib.contextmanager
def _plain_attention() -> Iterator[None]:
    """Keep torch from its fused attention kernels, which no exporter knows; the plain operators compute the same."""
    import torch

    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _with_shapes(contract: IoContract, given: Mapping[str, Any] | Sequence[Any] | None) -> IoContract:
    """Put the shapes that the user gave in the place of those known; None and names in a shape keep what was known."""
    if given is None:
        return contract
    known = [s.name for s in contract.inputs]
    if not isinstance(given, Mapping):
        shapes = [given] if given and all(isinstance(d, int) for d in given) else list(given)
        if len(shapes) != len(known):
            raise PassError("OnnxConversion", f"input_shapes must hold one shape for each input ({', '.join(known)})", f"{len(shapes)} shapes")
        given = dict(zip(known, shapes, strict=True))
    for name in given:
        if name not in known:
            raise PassError("OnnxConversion", "input_shapes must name inputs of the model", repr(name), nearest(str(name), known))
    specs = []
    for spec in contract.inputs:
        shape: tuple[int | str | None, ...] | None = spec.shape
        if spec.name in given:
            wanted = tuple(given[spec.name])
            if spec.shape is not None and len(wanted) != len(spec.shape):
                raise PassError(
                    "OnnxConversion", f"input {spec.name!r} has {len(spec.shape)} axes", f"shape {list(wanted)}", "Give one size for each axis."
                )
            before = spec.shape or (None,) * len(wanted)
            shape = tuple(w if isinstance(w, int) else b for w, b in zip(wanted, before, strict=True))
        specs.append(TensorSpec(spec.name, spec.dtype, shape))
    return IoContract(tuple(specs), contract.outputs)


def _chosen_axes(original: IoContract, contract: IoContract, given: Mapping[str, Any] | None) -> Axes:
    """Label the axes that may change: those the user named, or all without a fixed size before he gave shapes to trace with."""
    if given is None:
        return symbolic_axes(original)
    ranks = {s.name: len(s.shape) for s in contract.inputs if s.shape is not None}
    axes: Axes = {}
    for name, labels in given.items():
        if name in [s.name for s in contract.outputs]:
            continue  # axes of outputs follow from those of the inputs
        if name not in ranks:
            raise PassError("OnnxConversion", "dynamic_axes must name inputs of the model", repr(name), nearest(str(name), ranks))
        pairs = labels.items() if isinstance(labels, Mapping) else [(a, f"{name}_dim_{a}") for a in labels]
        axes[name] = {int(axis): str(label) for axis, label in pairs}
        for axis in axes[name]:
            if not 0 <= axis < ranks[name]:
                raise PassError("OnnxConversion", f"dynamic_axes of {name!r} must be from 0 to {ranks[name] - 1}", str(axis))
    for spec in contract.inputs:
        for axis, size in enumerate(spec.shape or ()):
            if not isinstance(size, int) and axis not in axes.get(spec.name, {}):
                raise PassError(
                    "OnnxConversion", f"axis {axis} of {spec.name!r} must have a size when dynamic_axes leaves it fixed", "none",
                    "Give input_shapes, or name the axis in dynamic_axes.",
                )  # fmt: skip
    return axes


def _sizes(contract: IoContract, axes: Axes) -> Sizes:
    """Sizes to trace with: the user's where he gave one for a dynamic axis, else usual ones."""
    sizes = usual_sizes(axes)
    for spec in contract.inputs:
        for axis, label in axes.get(spec.name, {}).items():
            size = spec.shape[axis] if spec.shape is not None else None
            if isinstance(size, int):
                sizes[label] = max(size, FIRST_AXIS_SIZE)  # an axis of size 1 would be taken for fixed
    return sizes


def _free(contract: IoContract, axes: Axes) -> IoContract:
    """The same contract with labels on the dynamic axes."""
    specs = [
        replace(s, shape=None if s.shape is None else tuple(axes.get(s.name, {}).get(i, d) for i, d in enumerate(s.shape))) for s in contract.inputs
    ]
    return IoContract(tuple(specs), contract.outputs)


def _reference(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    try:
        outputs = flat_outputs(call(module, inputs))
    except Exception as error:
        shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in inputs.items())
        raise PassError("OnnxConversion", f"the module must run on {shapes}", first_lines(error), "Give input_shapes that it takes.") from error
    if not outputs:
        raise PassError("OnnxConversion", "the module must return tensors", "none")
    return outputs


def _output_names(contract: IoContract, count: int) -> list[str]:
    names = [s.name for s in contract.outputs] or ["output", *(f"output_{i}" for i in range(1, count))]
    if len(names) != count:
        raise PassError(
            "OnnxConversion", f"outputs must name each of the {count} tensors that the module returns", ", ".join(names), "Name all, or none."
        )
    return names


def _output_axes(
    names: Sequence[str],
    expected: Sequence[torch.Tensor],
    at_others: Sequence[torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    others: Mapping[str, torch.Tensor],
    axes: Axes,
) -> Axes:
    """Label the axes of outputs that change size with those of the inputs: by the input's label where the sizes agree."""
    by_sizes = {(inputs[n].shape[a], others[n].shape[a]): label for n, labels in axes.items() for a, label in labels.items()}
    found: Axes = {}
    for name, before, after in zip(names, expected, at_others, strict=False):
        pairs = enumerate(zip(before.shape, after.shape, strict=False))
        found[name] = {axis: by_sizes.get(sizes, f"{name}_dim_{axis}") for axis, sizes in pairs if sizes[0] != sizes[1]}
    return found


def _export(
    module: torch.nn.Module, inputs: Mapping[str, torch.Tensor], axes: Axes, config: Mapping[str, Any], names: Sequence[str], output_axes: Axes
) -> onnx.ModelProto:
    import onnx
    import torch

    exporter = config["exporter"]
    by_name = takes_by_name(module, list(inputs))
    large = sum(t.numel() * t.element_size() for t in [*module.parameters(), *module.buffers()]) > ONE_FILE_BYTES
    options: dict[str, Any] = {}
    if exporter == "dynamo":
        shapes = {n: axes.get(n) or None for n in inputs}
        options["dynamic_shapes"] = shapes if by_name else tuple(shapes.values())
        # One file where it fits: quantizers and other libraries stumble over external data that needs not be.
        options["external_data"] = large
    else:
        options["dynamic_axes"] = {**axes, **output_axes}
    with tempfile.TemporaryDirectory(prefix="export-") as folder:
        path = Path(folder, "model.onnx")
        try:
            torch.onnx.export(
                module, () if by_name else tuple(inputs.values()), str(path), kwargs=dict(inputs) if by_name else None,
                input_names=list(inputs), output_names=list(names), opset_version=config["target_opset"], dynamo=exporter == "dynamo",
                verbose=False, **options,
            )  # fmt: skip
            return onnx.load(str(path))
        except Exception as error:  # the exporters raise errors of every kind
            raise PassError("OnnxConversion", f"{exporter} must be able to export the module", first_lines(error), _other(exporter)) from error


def _other(exporter: str) -> str:
    return f"Try exporter {'dynamo' if exporter == 'torchscript' else 'torchscript'!r}."


def _forget_the_author(proto: onnx.ModelProto) -> None:
    """Clear stack traces and notes of the exporter: they hold paths of this machine, and nothing that a runtime reads."""

    def clear(graph: Any) -> None:
        for part in (graph, *graph.node, *graph.initializer, *graph.input, *graph.output, *graph.value_info):
            part.ClearField("doc_string")
            part.ClearField("metadata_props")
        for node in graph.node:
            for attribute in node.attribute:
                attribute.ClearField("doc_string")
                for nested in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                    clear(nested)

    proto.ClearField("doc_string")
    proto.ClearField("metadata_props")
    clear(proto.graph)
    for function in proto.functions:
        function.ClearField("doc_string")
        function.ClearField("metadata_props")
        for node in function.node:
            node.ClearField("doc_string")
            node.ClearField("metadata_props")


def _compare(result: ONNXModelHandler, inputs: Mapping[str, torch.Tensor], expected: Sequence[torch.Tensor], exporter: str, where: str) -> float:
    """Run the graph; return its largest error as a share of the output's largest magnitude, or raise `PassError`."""
    # Plain settings: the graph is judged here, not the session that it is meant for.
    try:
        session = create_session(result.path, SessionSettings(intra_op_num_threads=1))
        wanted = {i.name for i in session.get_inputs()}
        outputs = session.run(None, {n: t.numpy() for n, t in inputs.items() if n in wanted})
    except Exception as error:  # the runtime raises errors of many kinds
        raise PassError("OnnxConversion", f"the exported graph must run {where}", first_lines(error), _other(exporter)) from error
    largest = 0.0
    for spec, value, tensor in zip(result.io.outputs, outputs, expected, strict=True):
        reference = tensor.float().numpy() if tensor.dtype.is_floating_point else tensor.numpy()
        actual = np.asarray(value)
        if actual.shape != reference.shape:
            raise PassError(
                "OnnxConversion",
                f"output {spec.name!r} must have the module's shape {list(reference.shape)} {where}",
                str(list(actual.shape)),
                _other(exporter),
            )
        tolerance = COARSE_TOLERANCE if tensor.dtype.is_floating_point and tensor.element_size() < 4 else TOLERANCE
        differs = _relative_error(actual, reference)
        if not differs <= tolerance:
            must = f"output {spec.name!r} must be the module's within {tolerance:g} of its largest magnitude {where}"
            advice = f"{_other(exporter)} A module that draws random numbers can't be compared."
            raise PassError("OnnxConversion", must, f"an error of {differs:.3g}", advice)
        largest = max(largest, differs)
    return largest


def _relative_error(actual: Any, reference: Any) -> float:
    """Largest difference over largest magnitude; equal infinities and NaN in the same places count as equal."""
    if actual.size == 0:
        return 0.0
    if reference.dtype == bool or actual.dtype == bool:
        return float(np.mean(actual != reference))
    a, b = actual.astype(np.float64), reference.astype(np.float64)
    equal = (a == b) | (np.isnan(a) & np.isnan(b))
    if equal.all():
        return 0.0
    difference = np.abs(np.where(equal, 0.0, a) - np.where(equal, 0.0, b))
    finite = np.abs(b[np.isfinite(b)])
    return float(np.max(difference) / max(float(finite.max()) if finite.size else 0.0, 1e-6))
