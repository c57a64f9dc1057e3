"""What can be exported: modules, TorchScript files, torch.export programs, models of Hugging Face; each with its inputs, its run, its names."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autotune.errors import AutotuneError, ConfigError, EnvironmentFault, PassError, nearest
from autotune.model import HuggingFaceModelHandler, IoContract, ModelHandler, PyTorchModelHandler, TensorSpec, TorchProgramHandler, load_examples
from autotune.passes.torch_inputs import OTHER_AXIS_SIZE, call, takes_by_name
from autotune.torch_files import (
    HUGGING_FACE,
    PROGRAM,
    TORCHSCRIPT,
    forward_parameters,
    huggingface_class,
    huggingface_files,
    load_program,
    load_torchscript,
    read_config,
    tensor_arguments,
)

if TYPE_CHECKING:
    import onnx
    import torch

Ranges = dict[str, tuple[int, int]]  # label of an axis -> smallest and largest size
LARGEST_SIZE = 2**31 - 1
INNER = "module"  # what a TorchScript module is called within the one that is exported in its place
AUDIO_SECONDS = 1


@dataclass(frozen=True)
class TorchSource:
    """A module and how it is fed. `io`: inputs in the order in which the exporter takes them."""

    module: Any  # torch.nn.Module
    io: IoContract
    examples: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    ranges: Ranges = field(default_factory=dict)

    def run(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        """Run the module on named inputs."""
        return call(self.module, inputs)

    def by_name(self, exporter: str) -> bool:
        """Whether the exporter gets the inputs by name, else in order."""
        return takes_by_name(self.module, [s.name for s in self.io.inputs]) and not self._hidden(exporter)

    def exportable(self, outputs: object, exporter: str) -> Any:
        """What the exporter gets; `outputs` as `run` gave them."""
        return _inside(self.module, [s.name for s in self.io.inputs]) if self._hidden(exporter) else self.module

    def _hidden(self, exporter: str) -> bool:
        """Whether tracing has to be kept from arguments that are not given: it makes inputs of defaults that are numbers."""
        names = {s.name for s in self.io.inputs}
        if exporter != "torchscript" or not takes_by_name(self.module, list(names)):
            return False
        parameters = inspect.signature(self.module.forward).parameters.values()
        return any(p.name not in names and p.default is not p.empty and p.default is not None for p in parameters)

    def weight_bytes(self) -> int:
        """Bytes of the parameters and buffers."""
        return sum(t.numel() * t.element_size() for t in [*self.module.parameters(), *self.module.buffers()])

    def finish(self, proto: onnx.ModelProto, exporter: str) -> None:
        """Take back from the graph what the way of exporting brought into it."""
        if self._hidden(exporter):
            _drop_prefix(proto, f"{INNER}.")


def _inside(module: Any, names: Sequence[str]) -> Any:
    """A module around another that takes its inputs in order and hands them on by name."""
    import torch

    class Around(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(INNER, module)

        def forward(self, *inputs: torch.Tensor) -> Any:
            return module(**dict(zip(names, inputs, strict=True)))

    return Around().eval()


def _drop_prefix(proto: onnx.ModelProto, prefix: str) -> None:
    """Give weights the names that they have in the module itself."""
    names = {i.name: i.name.removeprefix(prefix) for i in proto.graph.initializer if i.name.startswith(prefix)}
    for weight in proto.graph.initializer:
        weight.name = names.get(weight.name, weight.name)
    _rename_uses(proto.graph, names)


def _rename_uses(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    for node in graph.node:
        node.input[:] = [names.get(n, n) for n in node.input]
        for attribute in node.attribute:
            for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                _rename_uses(inner, names)


@dataclass(frozen=True)
class ScriptSource(TorchSource):
    """A TorchScript module: inputs by position."""

    def run(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        return self.module(*inputs.values())

    def by_name(self, exporter: str) -> bool:
        return False

    def exportable(self, outputs: object, exporter: str) -> Any:
        """A module around it that takes the tensors only and returns a flat tuple: the exporter knows no dicts and no other arguments."""
        import torch

        names = ", ".join(f"x{i}" for i in range(len(self.io.inputs)))
        around = torch.nn.Module()
        around.add_module(INNER, self.module)
        scripted = torch.jit.script(around)
        result = "y" if isinstance(outputs, torch.Tensor) else f"({', '.join(_paths(outputs, 'y'))},)"
        scripted.define(f"def forward(self, {names}):\n    y = self.{INNER}({names})\n    return {result}\n")
        return scripted

    def finish(self, proto: onnx.ModelProto, exporter: str) -> None:
        """Give weights their names, and make initializers of the constants that a frozen module holds."""
        from autotune.passes.onnx_graph import lift_constants

        _drop_prefix(proto, f"{INNER}.")
        lift_constants(proto, least_bytes=OTHER_AXIS_SIZE)


def _paths(outputs: object, at: str) -> list[str]:
    """How the tensors in what a TorchScript module returns are reached, in TorchScript."""
    import torch

    if isinstance(outputs, torch.Tensor):
        return [at]
    if isinstance(outputs, Mapping):
        return [p for key, value in outputs.items() for p in _paths(value, f"{at}[{key!r}]")]
    if isinstance(outputs, list | tuple):
        return [p for i, value in enumerate(outputs) for p in _paths(value, f"{at}[{i}]")]
    return []


@dataclass(frozen=True)
class ProgramSource(TorchSource):
    """A torch.export program: sizes, ranges and order of inputs are its own."""

    program: Any = None  # torch.export.ExportedProgram
    symbols: Mapping[str, str] = field(default_factory=dict)  # torch's names of sizes -> labels

    def run(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        from torch.utils._pytree import tree_unflatten

        args, kwargs = tree_unflatten([inputs.get(name, value) for name, value in _arguments(self.program)], self.program.call_spec.in_spec)
        return self.module(*args, **kwargs)

    def by_name(self, exporter: str) -> bool:
        return False

    def exportable(self, outputs: object, exporter: str) -> Any:
        return self.program

    def finish(self, proto: onnx.ModelProto, exporter: str) -> None:
        """Write the labels in the place of torch's symbols."""
        if not self.symbols:
            return
        symbol = re.compile("|".join(rf"\b{re.escape(s)}\b" for s in self.symbols))
        for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_param = symbol.sub(lambda m: self.symbols[m[0]], dim.dim_param)


def open_source(model: ModelHandler) -> TorchSource:
    """Load a model of torch for export. Raises `ConfigError` for one that can't be loaded, `PassError` for inputs that aren't known."""
    examples = load_examples(model)
    if isinstance(model, TorchProgramHandler):
        module: Any = model.load()
        if model.kind == PROGRAM:
            io, ranges, symbols = _program_io(module)
            io = IoContract(io.inputs, model.io.outputs)
            return ProgramSource(module.module(), io, examples, ranges, program=module, symbols=symbols)
        return ScriptSource(module, model.io, examples)
    assert isinstance(model, PyTorchModelHandler)
    module, io = model.load(), model.io
    if isinstance(model, HuggingFaceModelHandler) and not io.inputs:
        found, examples = huggingface_inputs(model.folder, module)
        io = IoContract(found, io.outputs)
    examples = _with_padding(examples)
    names = [s.name for s in io.inputs]
    if takes_by_name(module, names):  # the exporter goes by the order of forward, whatever order they are given in
        order = forward_parameters(module)
        io = IoContract(tuple(sorted(io.inputs, key=lambda s: order.index(s.name))), io.outputs)
    return TorchSource(module, io, examples)


# ---------------------------------------------------------------------------------------------------------------- torch.export


def _arguments(program: Any) -> list[tuple[str, Any]]:
    """Flat arguments of a program in order: names of tensors, and the values of those that were fixed when it was exported."""
    from torch.export.graph_signature import InputKind, TensorArgument

    arguments = [s.arg for s in program.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
    return [(a.name, None) if isinstance(a, TensorArgument) else (a.name, getattr(a, "value", None)) for a in arguments]


def _program_io(program: Any) -> tuple[IoContract, Ranges, dict[str, str]]:
    """Inputs of a program with labels on its dynamic axes, the sizes that these may have, and torch's symbols for them.

    Raises `ConfigError` for an axis whose size is computed from another's.
    """
    from torch.export.graph_signature import InputKind, TensorArgument

    wanted = [s.arg.name for s in program.graph_signature.input_specs if s.kind == InputKind.USER_INPUT and isinstance(s.arg, TensorArgument)]
    values = {n.name: n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"}
    labels: dict[str, str] = {}
    specs = []
    for name in wanted:
        value = values[name]
        shape: list[int | str | None] = []
        for axis, size in enumerate(value.shape):
            if isinstance(size, int):
                shape.append(size)
                continue
            expression = size.node.expr
            if not expression.is_Symbol:
                raise ConfigError(
                    "model", "each dynamic axis of a torch.export program must have a size of its own", f"{expression} for axis {axis} of {name!r}",
                    "Export it with one Dim for each such axis, or give script (a file that builds the module).",
                )  # fmt: skip
            usual = "batch" if axis == 0 and "batch" not in labels.values() else f"{name}_dim_{axis}"
            shape.append(labels.setdefault(str(expression), usual))
        specs.append(TensorSpec(name, str(value.dtype).removeprefix("torch."), tuple(shape)))
    ranges = {}
    for symbol, bounds in program.range_constraints.items():
        if str(symbol) in labels:
            upper = int(bounds.upper) if bounds.upper.is_finite and bounds.upper < LARGEST_SIZE else LARGEST_SIZE
            ranges[labels[str(symbol)]] = (max(int(bounds.lower), 1), upper)
    return IoContract(tuple(specs)), ranges, labels


# ---------------------------------------------------------------------------------------------------------------- Hugging Face

# Axes beside the batch that may have any length, by input name; other axes have the sizes of the data.
_TOKENS = {"input_ids", "attention_mask", "token_type_ids", "position_ids", "special_tokens_mask", "bbox"}
_LENGTHS = {
    **dict.fromkeys(_TOKENS, "sequence"), "decoder_input_ids": "decoder_sequence", "decoder_attention_mask": "decoder_sequence",
    "input_values": "samples",
}  # fmt: skip


def _with_padding(examples: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The examples with a padded row: transformers leaves a mask out that masks nothing, and tracing would take that for the rule."""
    mask = examples.get("attention_mask")
    if mask is None or mask.ndim != 2 or mask.shape[1] < 2 or not mask.all():
        return dict(examples)
    padded = np.concatenate([mask[:1], mask[:1], mask[2:]])
    padded[1, -1] = 0
    return {**{n: np.concatenate([a[:1], a[:1], a[2:]]) if len(a) == 1 else a for n, a in examples.items()}, "attention_mask": padded}


def _spec(name: str, dtype: str, rank: int, shape: Sequence[int]) -> TensorSpec:
    axes: list[int | str | None] = ["batch", *shape[1:rank]]
    if rank > 1 and name in _LENGTHS:
        axes[1] = _LENGTHS[name]
    return TensorSpec(name, dtype, tuple(axes))


def _as_fed(dtype: str) -> str:
    """The dtype that transformers' models take: 64-bit whole numbers, 32-bit floats."""
    kind = np.dtype(dtype).kind
    return "int64" if kind in "iu" else "float32" if kind == "f" else dtype


def huggingface_inputs(folder: Path, module: Any) -> tuple[tuple[TensorSpec, ...], dict[str, NDArray[Any]]]:
    """Inputs of a model whose data nobody named, with two examples: by the folder's tokenizer, its image processor, else its config.

    Raises `PassError` where none of them tells.
    """
    known = forward_parameters(module)
    made = _tokenized(folder) if "input_ids" in known else {}
    config, main = module.config, module.main_input_name
    if not made and main == "input_ids":
        rows = np.tile(np.arange(OTHER_AXIS_SIZE) % max(int(getattr(config, "vocab_size", 2)) - 1, 1), (2, 1))
        made = {"input_ids": rows, "attention_mask": np.ones_like(rows)}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in known:
        made["decoder_input_ids"] = np.full((2, 4), int(getattr(config, "decoder_start_token_id", None) or 0))
    if "pixel_values" in known:
        height, width = _image_size(folder, config)
        if height:
            size = (2, int(getattr(getattr(config, "vision_config", config), "num_channels", 3)), height, width)
            made["pixel_values"] = np.random.default_rng(0).normal(size=size).astype(np.float32)
    if main == "input_values":
        rate = int(_preprocessing(folder).get("sampling_rate", 16000))
        made["input_values"] = np.random.default_rng(0).normal(size=(2, rate * AUDIO_SECONDS)).astype(np.float32)
    examples = {n: a.astype(_as_fed(str(a.dtype))) for n, a in made.items() if n in known}
    if main not in examples:
        raise PassError("OnnxConversion", f"inputs of {type(module).__name__} must be known", "none", "Name them in the model's inputs and outputs.")
    return tuple(_spec(n, str(a.dtype), a.ndim, a.shape) for n, a in examples.items()), examples


def _tokenized(folder: Path) -> dict[str, NDArray[Any]]:
    """Two texts as the folder's tokenizer writes them; empty where it has none that can be used."""
    if not any((folder / n).is_file() for n in ("tokenizer.json", "tokenizer_config.json")):
        return {}
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        one = dict(tokenizer("The quick brown fox jumps over the lazy dog, twice.", return_tensors="np"))
    except Exception:  # a tokenizer that needs a package or a file that isn't here: the config tells enough
        return {}
    return {name: np.repeat(np.asarray(row), 2, axis=0) for name, row in one.items()}


def _preprocessing(folder: Path) -> dict[str, Any]:
    path = folder / "preprocessor_config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _image_size(folder: Path, config: Any) -> tuple[int, int]:
    """Height and width of images: what the processor makes, else what the config says; zeros where neither does."""
    said = _preprocessing(folder)
    for size in (said.get("crop_size") if said.get("do_center_crop") else None, said.get("size"), said.get("crop_size")):
        if isinstance(size, Mapping) and {"height", "width"} <= set(size):
            return int(size["height"]), int(size["width"])
        if isinstance(size, int):
            return size, size
    size = getattr(getattr(config, "vision_config", config), "image_size", 0)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(height or 0), int(width or 0)


# ---------------------------------------------------------------------------------------------------------------- before the sweep


def describe(args: Mapping[str, Any]) -> dict[str, Any]:
    """Stage: look at a model that needs no script. `path`, `kind`, `arrays` (name to dtype and shape), `outputs` (names).

    Returns {io}, or {error: [environment or config, who, must, got, do]} for what the user can mend.
    """
    try:
        arrays = {name: (str(dtype), tuple(shape)) for name, (dtype, shape) in args["arrays"].items()}
        inputs = _DESCRIBERS[args["kind"]](Path(args["path"]), arrays)
    except AutotuneError as error:
        return {"error": [type(error).__name__, error.who, error.must, error.got, error.do]}
    return {"io": IoContract(inputs, tuple(TensorSpec(n, "float32", None) for n in args["outputs"])).to_json()}


_Arrays = Mapping[str, tuple[str, tuple[int, ...]]]


def _describe_huggingface(folder: Path, arrays: _Arrays) -> tuple[TensorSpec, ...]:
    huggingface_files(folder)
    made_by = huggingface_class(folder)
    known = forward_parameters(made_by)
    taken = [n for n in known if n in arrays]
    needed = getattr(made_by, "main_input_name", "input_ids")
    if needed not in taken and "inputs_embeds" not in taken:
        raise ConfigError(
            "data.eval", f"the data must hold the inputs of {made_by.__name__}, {needed} first of all", f"arrays {', '.join(sorted(arrays))}",
            nearest(needed, arrays) if any(n[:4] == needed[:4] for n in arrays) else f"It may take {', '.join(known[:6])}.",
        )  # fmt: skip
    if read_config(folder).get("is_encoder_decoder") and "decoder_input_ids" in known and "decoder_input_ids" not in taken:
        taken_by_labels = made_by.__name__.endswith("Classification")  # such make the decoder's inputs from the encoder's
        if not taken_by_labels:
            raise ConfigError("data.eval", f"the data must hold decoder_input_ids for {made_by.__name__}", f"arrays {', '.join(sorted(arrays))}")
    return tuple(_spec(n, _as_fed(arrays[n][0]), len(arrays[n][1]), arrays[n][1]) for n in taken)


def _describe_torchscript(path: Path, arrays: _Arrays) -> tuple[TensorSpec, ...]:
    module = load_torchscript(path)
    names = tensor_arguments(module)
    if set(names) <= set(arrays):
        order = names
    elif len(names) == len(arrays) == 1:
        order = list(arrays)
    else:
        missing = next(n for n in names if n not in arrays)
        raise ConfigError(
            "data.eval", f"the data must hold an array for each tensor that forward takes ({', '.join(names)})",
            f"arrays {', '.join(sorted(arrays))}", nearest(missing, [n for n in arrays if n not in names]),
        )  # fmt: skip
    floats = {str(t.dtype).removeprefix("torch.") for t in module.parameters() if t.dtype.is_floating_point} or {"float32"}
    dtypes = {n: next(iter(floats)) if np.dtype(arrays[n][0]).kind == "f" and len(floats) == 1 else arrays[n][0] for n in order}
    return tuple(TensorSpec(n, dtypes[n], ("batch", *arrays[n][1][1:])) for n in order)


def _describe_program(path: Path, arrays: _Arrays) -> tuple[TensorSpec, ...]:
    io, _, _ = _program_io(load_program(path))
    if len(io.inputs) == len(arrays) == 1 and io.inputs[0].name not in arrays:
        got = next(iter(arrays))
        raise ConfigError("data.eval", f"the data must hold the program's input {io.inputs[0].name!r}", repr(got), "Name the array so.")
    return io.inputs


_DESCRIBERS = {HUGGING_FACE: _describe_huggingface, TORCHSCRIPT: _describe_torchscript, PROGRAM: _describe_program}


def example_rows(io: IoContract, arrays: Mapping[str, NDArray[Any]], *, rows: int = 4) -> dict[str, NDArray[Any]]:
    """The first rows of the data as the model takes them, to be traced and compared with. Empty where one row is a whole run."""
    if any(s.shape is not None and arrays[s.name].ndim != len(s.shape) for s in io.inputs):
        return {}
    return {s.name: arrays[s.name][:rows].astype(s.dtype) for s in io.inputs}


def fitted(example: NDArray[Any], shape: Sequence[int], *, turn: int = 0) -> NDArray[Any]:
    """Cut or repeat an example along each axis until it has a shape; `turn` begins with a later row."""
    for axis, size in enumerate(shape):
        example = example.take((np.arange(size) + (turn if axis == 0 else 0)) % example.shape[axis], axis=axis)
    return example


def error_from(parts: Sequence[str]) -> AutotuneError:
    """The error that `describe` told of."""
    kind, who, must, got, do = parts
    return {e.__name__: e for e in (EnvironmentFault, PassError)}.get(kind, ConfigError)(who, must, got, do)
