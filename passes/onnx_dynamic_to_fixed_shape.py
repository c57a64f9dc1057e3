"""OnnxDynamicToFixedShape: give axes that have a name only a size, and inputs a value, so that a runtime can plan for one shape and one use.

Execution providers for NPUs need it; on CPUs it lets later passes fold what is computed from shapes. Shapes of inner values and outputs
follow by onnx's shape inference. An input with a value, such as the sample rate of a speech model, settles which branch of an If runs.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autotune.errors import PassConfigError, PassError, nearest
from autotune.model import IoContract, ONNXModelHandler, TensorSpec
from autotune.passes.base import ONNX, AcceleratorSpec, ParamCategory, Pass, PassConfigParam, PassContract
from autotune.passes.known_branches import drop_dead, resolve_ifs
from autotune.passes.onnx_graph import fresh_name, graphs_of, library_errors, load_fixed, quiet, unchanged, value_names, weights_aside
from autotune.passes.onnx_outputs import NotComparable, compare, usable_feeds
from autotune.passes.registry import register

if TYPE_CHECKING:
    import onnx

WHO = "OnnxDynamicToFixedShape"
_ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
}  # fmt: skip


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _sizes_fault(value: Mapping[str, Any]) -> str:
    wrong = [f"{name}: {size!r}" for name, size in value.items() if not _is_size(size)]
    return f"axis names with whole numbers from 1 (not {wrong[0]})" if wrong else ""


def _shapes_fault(value: Mapping[str, Any]) -> str:
    wrong = [f"{name}: {shape!r}" for name, shape in value.items() if not isinstance(shape, list | tuple) or not all(map(_is_size, shape))]
    return f"input names with lists of whole numbers from 1 (not {wrong[0]})" if wrong else ""


def _inputs_fault(value: Mapping[str, Any]) -> str:
    def plain(given: object) -> bool:
        return all(map(plain, given)) if isinstance(given, list | tuple) else isinstance(given, bool | int | float | str)

    wrong = [f"{name}: {given!r}" for name, given in value.items() if not plain(given)]
    return f"input names with numbers, texts, or lists of them (not {wrong[0]})" if wrong else ""


@register
class OnnxDynamicToFixedShape(Pass):
    """Fix the sizes of dynamic axes, by the name of the axis or by the input's whole shape; and the values of inputs."""

    contract = PassContract(accepts=ONNX, returns=ONNX, data={"compare_data_dir": "calibration"}, version=2)

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        return {
            "dim_param": PassConfigParam(
                type_=dict[str, int], check=_sizes_fault,
                description="axis name to size, such as {batch: 1, sequence: 128}; the name is fixed wherever it stands. A list of these is searched",
            ),
            "input_shapes": PassConfigParam(
                type_=dict[str, list[int]], check=_shapes_fault,
                description="input name to its whole shape, such as {x: [1, 3, 224, 224]}; for axes without a name. At least one of the three "
                "must be given",
            ),
            "fixed_inputs": PassConfigParam(
                type_=dict[str, Any], check=_inputs_fault,
                description="input name to the one value that it will ever have, such as {sr: 16000}. Branches of If that it rules out are dropped. "
                "The model still takes the input, and no longer looks at it",
            ),
            "compare_data_dir": PassConfigParam(
                type_=str | Path, category=ParamCategory.DATA,
                description="rows on which outputs are compared before and after (an .npz, or a folder of them); without any, made-up inputs are",
            ),
        }  # fmt: skip

    @classmethod
    def validate_config(cls, config: Mapping[str, Any], accelerator_spec: AcceleratorSpec) -> None:
        """Refuse a config that fixes nothing."""
        if not any(config.get(name) for name in ("dim_param", "input_shapes", "fixed_inputs")):
            must = "dim_param, input_shapes or fixed_inputs must be given"
            raise PassConfigError(cls.__name__, must, "none of them", "Name the axes or inputs to fix, or leave this pass out.")

    def _run_for_config(self, model: ONNXModelHandler, config: Mapping[str, Any], output_model_path: Path) -> ONNXModelHandler:
        given = load_fixed(model)
        sizes, shapes = _asked(model.io, config.get("dim_param") or {}, config.get("input_shapes") or {})
        values = _values_asked(model.io, config.get("fixed_inputs") or {})
        inputs_before = {s.name: list(s.shape or ()) for s in model.io.inputs}
        if not values and not sizes and all(list(shape) == inputs_before[name] for name, shape in shapes.items()):
            return unchanged(model, output_model_path, "the inputs have these shapes already", notes={"inputs_before": inputs_before})

        result = type(given)()
        result.CopyFrom(given)
        for graph in graphs_of(result.graph):
            for value in (*graph.input, *graph.output, *graph.value_info):
                _fix_names(value, sizes)
        for value in result.graph.input:
            for dim, size in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False):
                dim.dim_value = size
        known_before = _share_known(given)
        resolved = _fix_inputs(result, values) if values else 0
        known_after = _infer(result)
        self._compare(model, given, result, config, values)
        fixed = model.written(output_model_path, proto=result)
        open_axes = {s.name: list(s.shape) for s in fixed.io.outputs if s.shape and any(not isinstance(d, int) for d in s.shape)}
        notes = {
            "changed": True, "fixed": dict(sorted(sizes.items())), "inputs_before": inputs_before,
            "fixed_inputs": {name: value.tolist() for name, value in sorted(values.items())}, "resolved_ifs": resolved,
            "inputs_after": {s.name: list(s.shape or ()) for s in fixed.io.inputs}, "outputs_still_dynamic": open_axes,
            "share_of_values_with_known_shape_before": known_before, "share_of_values_with_known_shape_after": known_after,
        }  # fmt: skip
        return ONNXModelHandler.from_folder(output_model_path, session=model.session, notes=notes)

    def _compare(
        self, model: ONNXModelHandler, given: onnx.ModelProto, result: onnx.ModelProto, config: Mapping[str, Any], values: Mapping[str, NDArray[Any]]
    ) -> None:
        """Both models must run on inputs of the fixed shape and values, and give the same."""
        io = IoContract(tuple(_spec_of(v, model.io) for v in result.graph.input), model.io.outputs)
        data = config.get("compare_data_dir")
        shown = ", ".join(f"{s.name} {list(s.shape or ())}" for s in io.inputs)
        try:
            # Sizes are made up until the model runs; where a value is fixed, the given model could take another branch meanwhile.
            feeds, _ = usable_feeds(result if values else given, io, data=None if data is None else Path(data), who=WHO)
            feeds = [{**feed, **values} for feed in feeds]
        except NotComparable as error:
            do = "Choose sizes that the model takes." if data else "Choose sizes that the model takes, or give calibration data to try them with."
            raise PassError(WHO, f"the model must run on inputs of the fixed shape ({shown})", str(error), do) from error
        with library_errors(WHO, f"the model must run on inputs of the fixed shape ({shown})"):
            comparison = compare(given, result, io, who=WHO, feeds_=feeds)
        if comparison.fault:
            raise PassError(WHO, "the model with fixed shapes must compute the same", comparison.fault, "Leave this pass out.")


def _asked(io: IoContract, names: Mapping[str, int], shapes: Mapping[str, list[int]]) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Sizes by axis name and whole shapes by input, each checked against the model. Raises `PassError`."""
    axes = {d for s in io.inputs for d in s.shape or () if isinstance(d, str)}
    specs = {s.name: s for s in io.inputs}
    sizes: dict[str, int] = {}
    for name, size in names.items():
        if name not in axes:
            every = axes | {d for s in io.outputs for d in s.shape or () if isinstance(d, str)}
            hint = "The model has no named axes; give input_shapes." if not axes else nearest(name, axes)
            if name in every:
                hint = f"It is the name of an output's axis only. {hint}"
            raise PassError(WHO, "dim_param must name axes of the model's inputs", repr(name), hint)
        sizes[name] = size
    for name, shape in shapes.items():
        if name not in specs:
            raise PassError(WHO, "input_shapes must name inputs of the model", repr(name), nearest(name, specs))
        present = specs[name].shape
        if present is None:
            raise PassError(WHO, f"input {name!r} must have a known number of axes", "none", "Leave it out.")
        if len(present) != len(shape):
            raise PassError(WHO, f"input_shapes of {name!r} must have {len(present)} axes, as in {list(present)}", f"{shape}")
        for axis, (have, want) in enumerate(zip(present, shape, strict=True)):
            if isinstance(have, str):
                if sizes.setdefault(have, want) != want:
                    raise PassError(WHO, f"axis {have!r} must get one size", f"{sizes[have]} and {want} (axis {axis} of {name!r})")
            elif have is not None and have > 0 and have != want:
                raise PassError(WHO, f"axis {axis} of input {name!r} is fixed at {have}", f"{want}", f"Give {have} there.")
    return sizes, dict(shapes)


def _values_asked(io: IoContract, given: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Values by input, each checked against the model. Raises `PassError`."""
    specs = {s.name: s for s in io.inputs}
    values = {}
    for name, value in given.items():
        spec = specs.get(name)
        if spec is None:
            raise PassError(WHO, "fixed_inputs must name inputs of the model", repr(name), nearest(name, specs))
        array = np.asarray(value, object) if spec.dtype == "string" else np.asarray(value)
        shape = spec.shape if spec.shape is not None else array.shape
        if array.ndim == 0 and all(d == 1 for d in shape):
            array = array.reshape((1,) * len(shape))
        fits = array.ndim == len(shape) and all(not isinstance(d, int) or d < 0 or d == n for d, n in zip(shape, array.shape, strict=False))
        if not fits:
            raise PassError(WHO, f"the value of input {name!r} must have shape {list(shape)}", f"{value!r}, of shape {list(array.shape)}")
        if spec.dtype != "string":
            try:
                kind = np.dtype(spec.dtype)
                exact = array.dtype.kind in "biuf" and (kind.kind == "f" or bool((array.astype(kind) == array).all()))
            except TypeError:
                exact = False
            if not exact:
                raise PassError(WHO, f"the value of input {name!r} must be {spec.dtype}", repr(value))
            array = array.astype(kind)
        values[name] = array
    return values


def _fix_inputs(proto: onnx.ModelProto, values: Mapping[str, NDArray[Any]]) -> int:
    """Give whoever takes one of these inputs its value instead, in place, and Ifs that this settles their branch; returns how many of these.

    ONNX Runtime would do the latter as it loads the model, and with 1.32 crashes on some that hold Ifs in Ifs.
    """
    from onnx import numpy_helper

    taken = value_names(proto)
    names = {}
    for name, value in values.items():
        names[name] = fresh_name(f"{name}_fixed", taken)
        taken.add(names[name])
        proto.graph.initializer.append(numpy_helper.from_array(value, names[name]))
    for graph in graphs_of(proto.graph):
        for node in graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]
    resolved = resolve_ifs(proto).resolved
    drop_dead(proto)
    return resolved


def _fix_names(value: onnx.ValueInfoProto, sizes: Mapping[str, int]) -> None:
    """Put sizes in the place of names, and of sums and products of names ("past + sequence")."""
    for dim in value.type.tensor_type.shape.dim:
        if dim.dim_param:
            size = sizes.get(dim.dim_param, _computed(dim.dim_param, sizes))
            if size is not None:
                dim.dim_value = size


def _computed(expression: str, sizes: Mapping[str, int]) -> int | None:
    """Value of an arithmetic expression of axis names; None when it is none, or a name has no size."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return _ARITHMETIC[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Name):
            return sizes[node.id]
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        raise ValueError(ast.dump(node))

    try:
        found = value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return found if found > 0 else None


def _values(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    yield from graph.value_info
    yield from graph.output


def _share_known(proto: onnx.ModelProto) -> float:
    """Share of the main graph's values whose every axis has a size, after inference; 0 where inference fails."""
    copied = type(proto)()
    copied.CopyFrom(proto)
    try:
        return _infer(copied)
    except PassError:
        return 0.0


def _infer(proto: onnx.ModelProto) -> float:
    """Infer shapes through the main graph, anew; what can't be inferred keeps what was written. Returns the share of values known whole."""
    import onnx

    written = {v.name: type(v).FromString(v.SerializeToString()) for v in _values(proto.graph)}
    small, _ = weights_aside(proto)
    for value in _values(small.graph):
        if value.type.WhichOneof("value") == "tensor_type":
            value.type.tensor_type.ClearField("shape")
    with quiet():
        try:
            inferred = onnx.shape_inference.infer_shapes(small, data_prop=True)
        except Exception:  # data propagation trips over some valid graphs; without it less is known
            with library_errors(WHO, "the model's shapes must be inferable", "Check the sizes given, or leave this pass out."):
                inferred = onnx.shape_inference.infer_shapes(small)
    found = {v.name: v for v in _values(inferred.graph)}
    for name, old in written.items():
        if name in found and _axes_known(found[name]) < _axes_known(old):
            found[name].CopyFrom(old)
    outputs = [found[v.name] for v in proto.graph.output]
    del proto.graph.value_info[:], proto.graph.output[:]
    proto.graph.value_info.extend(inferred.graph.value_info)
    proto.graph.output.extend(outputs)
    made = {name for node in proto.graph.node for name in node.output if name}
    whole = sum(v.name in made and _whole(v) for v in _values(proto.graph))
    return round(whole / max(len(made), 1), 4)


def _axes_known(value: onnx.ValueInfoProto) -> int:
    """How much a shape tells: nothing 0, its rank 1, each axis with a size one more."""
    tensor = value.type.tensor_type
    return 1 + sum(d.HasField("dim_value") for d in tensor.shape.dim) if tensor.HasField("shape") else 0


def _whole(value: onnx.ValueInfoProto) -> bool:
    tensor = value.type.tensor_type
    return tensor.HasField("shape") and all(d.HasField("dim_value") for d in tensor.shape.dim)


def _spec_of(value: onnx.ValueInfoProto, io: IoContract) -> TensorSpec:
    """An input as it is now fixed."""
    spec = next(s for s in io.inputs if s.name == value.name)
    if spec.shape is None:
        return spec
    dims = value.type.tensor_type.shape.dim
    return TensorSpec(spec.name, spec.dtype, tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in dims))
