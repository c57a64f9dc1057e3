"""OnnxConversion: from a model of PyTorch to an ONNX model, by either of torch's exporters.

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
from autotune.model import LARGE_BYTES, ONNX, PYTORCH, TORCH_PROGRAM, IoContract, ModelHandler, ONNXModelHandler, TensorSpec, save_onnx
from autotune.passes.base import ModelTraits, Pass, PassConfigParam, PassContract
from autotune.passes.registry import register
from autotune.passes.torch_inputs import (
    FIRST_AXIS_SIZE,
    OTHER_AXIS_SIZE,
    Axes,
    Sizes,
    example_inputs,
    first_lines,
    named_outputs,
    quiet,
    symbolic_axes,
    usual_sizes,
)
from autotune.passes.torch_sources import LARGEST_SIZE, ProgramSource, Ranges, ScriptSource, TorchSource, fitted, open_source
from autotune.session import SessionSettings, create_session
from autotune.target import AcceleratorSpec

if TYPE_CHECKING:
    import onnx
    import torch

OPSETS = {"torchscript": (7, 23), "dynamo": (18, 28)}  # beyond these torch 2.13 refuses, or quietly writes another opset
TOLERANCE = 1e-3  # of an output's largest magnitude; float32 sums in another order stay below 1e-5
COARSE_TOLERANCE = 2e-2  # for 16-bit floats
AUTO = "auto"


@register
class OnnxConversion(Pass):
    """Export the model and prove that the graph computes what the model does.

    Wherever it can, `auto` traces (`torchscript`): 20 to 50 ms for a small net where `dynamo` takes a second or more, graphs of the
    same speed, and attention that the runtime's optimizer recognizes. `dynamo` follows control flow that tracing freezes. The
    default opset, 18, is the first that both write without converting, and that every runtime of the last years reads.
    """

    contract = PassContract(accepts=PYTORCH, accepts_too=(TORCH_PROGRAM,), returns=ONNX, version=2)

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {
            "exporter": PassConfigParam(
                type_=Literal["auto", "torchscript", "dynamo"],
                default_value=AUTO,
                description="which of torch's exporters writes the graph; auto: dynamo for torch.export programs, for dynamic_shapes and above "
                "opset 23, else torchscript. Results run equally fast, so it is searched only when listed",
            ),
            "target_opset": PassConfigParam(
                type_=int, default_value=18, minimum=7, maximum=28,
                description="version of the ONNX operator set: 7 to 23 with torchscript, 18 to 28 with dynamo",
            ),
            "dynamic_axes": PassConfigParam(
                type_=dict | None,
                description="input name to {axis: label} for each axis that may change; left out: every axis without a fixed size; {}: none",
            ),
            "dynamic_shapes": PassConfigParam(
                type_=dict | None,
                description="the same for the dynamo exporter, with ranges: input name to {axis: label}, {axis: {name, min, max}} or a list with "
                "one of these, or null, for each axis",
            ),
            "input_shapes": PassConfigParam(
                type_=dict | list | None,
                description="shapes to trace with, by input name or in order; left out: the known sizes, 2 examples, 16 and up for other axes",
            ),
            "external_data_above": PassConfigParam(
                type_=int, default_value=LARGE_BYTES, minimum=0, maximum=LARGE_BYTES,
                description="bytes of weights above which they lie in a file beside the model; a model file of more than 2 GiB can't be",
            ),
        }  # fmt: skip

    @classmethod
    def validate_config(cls, config: Mapping[str, Any], accelerator_spec: AcceleratorSpec) -> None:
        """Refuse an opset that the exporter can't write, and two ways of naming the axes."""
        exporter = _exporter(config)
        low, high = OPSETS[exporter]
        if not low <= config["target_opset"] <= high:
            named = f"exporter {exporter!r}" if config["exporter"] != AUTO else f"exporter {exporter!r}, which dynamic_shapes need"
            raise PassConfigError(
                "OnnxConversion", f"target_opset must be from {low} to {high} with {named}", str(config["target_opset"]),
                "Choose another opset, or the other exporter.",
            )  # fmt: skip
        if config["dynamic_shapes"] is not None:
            if exporter != "dynamo":
                raise PassConfigError(
                    "OnnxConversion", "dynamic_shapes is for exporter 'dynamo'", f"exporter {exporter!r}", "Give dynamic_axes, or take dynamo."
                )
            if config["dynamic_axes"] is not None:
                raise PassConfigError("OnnxConversion", "axes must be named once", "dynamic_axes and dynamic_shapes", "Leave one of them out.")

    @classmethod
    def traits(cls, config: Mapping[str, Any]) -> ModelTraits:
        """A model of the opset asked for."""
        return ModelTraits(opset=config["target_opset"])

    def _run_for_config(self, model: ModelHandler, config: Mapping[str, Any], output_model_path: Path) -> ONNXModelHandler:
        import onnx
        import torch

        with quiet():
            source = open_source(model)
        exporter = _exporter(config, source)
        contract = _with_shapes(source.io, config["input_shapes"])
        axes, ranges = _chosen_axes(source, contract, config)
        sizes = _sizes(source, contract, axes, ranges)
        others = {label: _another(label, size, source, axes, ranges) for label, size in sizes.items()}
        contract = _free(contract, axes)
        inputs = _inputs(source, contract, axes, sizes, turn=0)
        at_others = _inputs(source, contract, axes, others, turn=1)
        with quiet() as said, torch.no_grad(), _plain_attention():
            returned = _reference(source, inputs)
            names, expected = _output_names(source.io, named_outputs(returned), contract)
            try:
                expected_at_others = [t for _, t in named_outputs(source.run(at_others))] if others != sizes else []
            except Exception:  # the module itself takes only some sizes: nothing to compare there
                expected_at_others = []
            output_axes = _output_axes(names, expected, expected_at_others, inputs, at_others, axes)
            proto = _export(source, returned, inputs, axes, ranges, {**config, "exporter": exporter}, names, output_axes, output_model_path)
        source.finish(proto, exporter)
        _forget_the_author(proto)
        save_onnx(proto, output_model_path / "model.onnx", below=config["external_data_above"] + 1)
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
            largest = max(largest, _compare(result, at_others, expected_at_others, exporter, "on other sizes of its dynamic axes"))
        notes: dict[str, Any] = {
            "changed": True, "exporter": exporter, "opset": result.opset, "largest_error": float(f"{largest:.3g}"),
            "other_sizes_checked": bool(expected_at_others), "external_data": any(p.name != "model.onnx" for p in output_model_path.iterdir()),
        }  # fmt: skip
        frozen = sorted({str(w.message).splitlines()[0] for w in said if w.category.__name__ == "TracerWarning"})
        if frozen:  # a branch or a size that tracing turned into a constant: perhaps harmless, never to be hushed up
            notes["traced_as_constant"] = frozen[:10]
        return replace(result, notes=notes)


def _exporter(config: Mapping[str, Any], source: TorchSource | None = None) -> str:
    """The exporter to use; for a source that only one of them takes, that one. Raises `PassError` where it is not the one asked for."""
    asked: str = config["exporter"]
    needed = "dynamo" if isinstance(source, ProgramSource) else "torchscript" if isinstance(source, ScriptSource) else ""
    if asked == AUTO:
        late = config["dynamic_shapes"] is not None or config["target_opset"] > OPSETS["torchscript"][1]
        asked = "dynamo" if late or needed == "dynamo" else "torchscript"
    if needed and asked != needed:
        kind = "a torch.export program" if needed == "dynamo" else "a TorchScript file"
        raise PassError("OnnxConversion", f"{kind} is written by exporter {needed!r} alone", f"exporter {asked!r}", f"Take exporter {needed!r}.")
    if source is not None and not OPSETS[asked][0] <= config["target_opset"] <= OPSETS[asked][1]:
        low, high = OPSETS[asked]
        raise PassError("OnnxConversion", f"target_opset must be from {low} to {high} with exporter {asked!r}", str(config["target_opset"]))
    return asked


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


def _chosen_axes(source: TorchSource, contract: IoContract, config: Mapping[str, Any]) -> tuple[Axes, Ranges]:
    """Label the axes that may change, with their ranges: those the user named, or all without a fixed size before he gave shapes to trace with."""
    name_of = "dynamic_axes" if config["dynamic_shapes"] is None else "dynamic_shapes"
    given = config[name_of]
    if given is None:
        return symbolic_axes(source.io), dict(source.ranges)
    if isinstance(source, ProgramSource):
        raise PassError("OnnxConversion", "the axes of a torch.export program change as it says itself", name_of, f"Leave {name_of} out.")
    ranks = {s.name: len(s.shape) for s in contract.inputs if s.shape is not None}
    axes: Axes = {}
    ranges: Ranges = {}
    for name, labels in given.items():
        if name in [s.name for s in contract.outputs]:
            continue  # axes of outputs follow from those of the inputs
        if name not in ranks:
            raise PassError("OnnxConversion", f"{name_of} must name inputs of the model", repr(name), nearest(str(name), ranks))
        axes[name] = {}
        for axis, said in _pairs(name, labels, name_of):
            if not 0 <= axis < ranks[name]:
                raise PassError("OnnxConversion", f"{name_of} of {name!r} must be from 0 to {ranks[name] - 1}", str(axis))
            label, bounds = _label(f"{name_of} of {name!r}", said, f"{name}_dim_{axis}")
            axes[name][axis] = label
            if bounds is not None and ranges.setdefault(label, bounds) != bounds:
                raise PassError("OnnxConversion", f"axes of one label must have one range, {label!r} too", f"{ranges[label]} and {bounds}")
    for spec in contract.inputs:
        for axis, size in enumerate(spec.shape or ()):
            if not isinstance(size, int) and axis not in axes.get(spec.name, {}):
                raise PassError(
                    "OnnxConversion", f"axis {axis} of {spec.name!r} must have a size when {name_of} leaves it fixed", "none",
                    f"Give input_shapes, or name the axis in {name_of}.",
                )  # fmt: skip
    return axes, ranges


def _pairs(name: str, labels: Any, name_of: str) -> list[tuple[int, Any]]:
    """Axes and what is said of each: a mapping by axis; a list of axes (dynamic_axes), or of what is said of each (dynamic_shapes)."""
    if not isinstance(labels, Mapping):
        labels = dict(enumerate(labels or ())) if name_of == "dynamic_shapes" else {a: f"{name}_dim_{a}" for a in labels}
    return [(int(axis), said) for axis, said in labels.items() if said is not None]


def _label(who: str, said: Any, usual: str) -> tuple[str, tuple[int, int] | None]:
    """The label of an axis, and its range where one is given."""
    if not isinstance(said, Mapping):
        return str(said), None
    unknown = [key for key in said if key not in ("name", "min", "max")]
    if unknown:
        near = nearest(str(unknown[0]), ["name", "min", "max"])
        raise PassError("OnnxConversion", f"an axis in {who} takes name, min and max", repr(unknown[0]), near)
    label, low, high = str(said.get("name", usual)), said.get("min", 1), said.get("max", LARGEST_SIZE)
    if not (isinstance(low, int) and isinstance(high, int) and 1 <= low < high):
        raise PassError("OnnxConversion", f"{who} must have whole numbers from 1 on, min below max", f"min {low}, max {high}")
    if not label.isidentifier():
        raise PassError("OnnxConversion", f"a label with a range in {who} must be made of letters, digits and _", repr(label))
    return label, (low, high)


def _sizes(source: TorchSource, contract: IoContract, axes: Axes, ranges: Ranges) -> Sizes:
    """Sizes to trace with: the user's where he gave one for a dynamic axis, else those of the examples, else usual ones; all within their ranges."""
    sizes = usual_sizes(axes)
    for spec in contract.inputs:
        for axis, label in axes.get(spec.name, {}).items():
            size = spec.shape[axis] if spec.shape is not None else None
            if axis > 0 and size is not None and not isinstance(size, int) and spec.name in source.examples:
                size = source.examples[spec.name].shape[axis]
            if isinstance(size, int):
                sizes[label] = max(size, FIRST_AXIS_SIZE)  # an axis of size 1 would be taken for fixed
    return {label: min(max(size, ranges[label][0]), ranges[label][1]) if label in ranges else size for label, size in sizes.items()}


def _another(label: str, size: int, source: TorchSource, axes: Axes, ranges: Ranges) -> int:
    """Another size for a label: larger, but smaller than an example's, which may be as long as the model takes; within its range."""
    examples = any(axis > 0 and named == label and name in source.examples for name, labels in axes.items() for axis, named in labels.items())
    usual = size + (1 if size < OTHER_AXIS_SIZE else OTHER_AXIS_SIZE // 2)
    low, high = ranges.get(label, (1, LARGEST_SIZE))
    wanted = [max(size // 2, FIRST_AXIS_SIZE), usual] if examples else [usual]
    return next((s for s in (*wanted, size + 1, size - 1, low, high) if s != size and low <= s <= high and (s > 1 or low == s)), size)


def _inputs(source: TorchSource, contract: IoContract, axes: Axes, sizes: Sizes, *, turn: int) -> dict[str, torch.Tensor]:
    """Inputs of these sizes: of the examples where there are any, else made."""
    import torch

    made = example_inputs(contract, axes, sizes, who="OnnxConversion", seed=turn)
    for name, tensor in made.items():
        example = source.examples.get(name)
        if example is not None and example.ndim == tensor.ndim and example.size:
            made[name] = torch.from_numpy(np.ascontiguousarray(fitted(example, tensor.shape, turn=turn))).to(tensor.dtype)
    return made


def _free(contract: IoContract, axes: Axes) -> IoContract:
    """The same contract with labels on the dynamic axes."""
    specs = [
        replace(s, shape=None if s.shape is None else tuple(axes.get(s.name, {}).get(i, d) for i, d in enumerate(s.shape))) for s in contract.inputs
    ]
    return IoContract(tuple(specs), contract.outputs)


def _reference(source: TorchSource, inputs: Mapping[str, torch.Tensor]) -> Any:
    """What the module returns."""
    try:
        returned = source.run(inputs)
    except Exception as error:
        shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in inputs.items())
        raise PassError("OnnxConversion", f"the module must run on {shapes}", first_lines(error), "Give input_shapes that it takes.") from error
    if not named_outputs(returned):
        raise PassError("OnnxConversion", "the module must return tensors", "none")
    return returned


def _output_names(original: IoContract, found: Sequence[tuple[str, torch.Tensor]], contract: IoContract) -> tuple[list[str], list[torch.Tensor]]:
    """Names for the outputs: the user's, else the keys under which the module returns them."""
    inputs = {s.name for s in contract.inputs}
    names = [s.name for s in original.outputs] or [f"{name}_out" if name in inputs else name for name, _ in found]
    if len(names) != len(found):
        raise PassError(
            "OnnxConversion", f"outputs must name each of the {len(found)} tensors that the module returns", ", ".join(names), "Name all, or none."
        )
    return names, [tensor for _, tensor in found]


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
    source: TorchSource, returned: object, inputs: Mapping[str, torch.Tensor], axes: Axes, ranges: Ranges, config: Mapping[str, Any],
    names: Sequence[str], output_axes: Axes, place: Path,
) -> onnx.ModelProto:  # fmt: skip
    import onnx
    import torch

    exporter = config["exporter"]
    by_name = source.by_name(exporter)
    args = () if by_name or isinstance(source, ProgramSource) else tuple(inputs.values())
    options: dict[str, Any] = {}
    if exporter == "dynamo":
        # One file where it fits: quantizers and other libraries stumble over external data that needs not be.
        options["external_data"] = source.weight_bytes() > LARGE_BYTES
        if not isinstance(source, ProgramSource):
            dims = {label: torch.export.Dim(label, min=low, max=high) for label, (low, high) in ranges.items()}
            shapes = {n: {a: dims.get(label, label) for a, label in axes[n].items()} if axes.get(n) else None for n in inputs}
            options["dynamic_shapes"] = shapes if by_name else tuple(shapes.values())
    else:
        options["dynamic_axes"] = {**axes, **output_axes}
    with tempfile.TemporaryDirectory(prefix="export-", dir=place) as folder:
        path = Path(folder, "model.onnx")
        try:
            torch.onnx.export(
                source.exportable(returned, exporter), args, str(path), kwargs=dict(inputs) if by_name else None,
                input_names=list(inputs), output_names=list(names), opset_version=config["target_opset"], dynamo=exporter == "dynamo",
                verbose=False, **options,
            )  # fmt: skip
            return onnx.load(str(path))
        except Exception as error:  # the exporters raise errors of every kind
            do = _other(exporter) if type(source) is TorchSource else ""
            raise PassError("OnnxConversion", f"{exporter} must be able to export the module", first_lines(error), do) from error


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
