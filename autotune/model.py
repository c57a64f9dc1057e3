"""Model handlers: a folder that needs nothing outside it, what goes in and out, and the digest of every byte."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import shutil
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.digest import digest_tree, files_under
from autotune.errors import ConfigError, nearest
from autotune.session import SessionSettings
from autotune.torch_files import CONFIG_FILE, HUGGING_FACE, TORCHSCRIPT, huggingface_files, load_huggingface, load_program, load_torchscript

if TYPE_CHECKING:
    import onnx
    import torch
    from numpy.typing import NDArray

MODEL_FILE = "model.onnx"
WEIGHTS_FILE = "weights.pt"
PROGRAM_FILE = "program.pt"  # a TorchScript file or a torch.export program
EXAMPLES_FILE = "examples.npz"  # a few rows of inputs, for models that come without a script of the user's
ONNX = "onnx"
PYTORCH = "pytorch"
TORCH_PROGRAM = "torch program"  # a module saved with its code: it can be run and converted, its layers can't be changed
USER_MODULE = "_autotune_user_"  # begins the names of modules made from users' scripts


@dataclass(frozen=True)
class TensorSpec:
    """One input or output: numpy dtype name (or `string`, `bfloat16`, `other`), axes as sizes, names, or None when unknown."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "dtype": self.dtype, "shape": None if self.shape is None else list(self.shape)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorSpec:
        shape = data["shape"]
        return cls(data["name"], data["dtype"], None if shape is None else tuple(shape))


@dataclass(frozen=True)
class IoContract:
    """What must be fed and what comes back, in order."""

    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"inputs": [s.to_json() for s in self.inputs], "outputs": [s.to_json() for s in self.outputs]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> IoContract:
        return cls(tuple(map(TensorSpec.from_json, data["inputs"])), tuple(map(TensorSpec.from_json, data["outputs"])))


@dataclass(frozen=True)
class ModelHandler:
    """A model on disk. `folder` is self-contained; `notes` are facts that passes leave for the evidence."""

    folder: Path
    io: IoContract = IoContract()
    session: SessionSettings = field(default_factory=SessionSettings)
    notes: Mapping[str, Any] = field(default_factory=dict)

    format: ClassVar[str] = ""

    @cached_property
    def digest(self) -> str:
        """SHA-256 over name and bytes of every file in the folder."""
        return digest_tree(self.folder)

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all files in the folder."""
        return sum((self.folder / name).stat().st_size for name in files_under(self.folder))

    def to_json(self) -> dict[str, Any]:
        return {
            "format": self.format, "folder": str(self.folder), "io": self.io.to_json(), "session": self.session.to_json(), "notes": dict(self.notes),
        }  # fmt: skip


@dataclass(frozen=True)
class ONNXModelHandler(ModelHandler):
    """An ONNX file `model.onnx` in its folder, with any external data beside it, and the session settings it is to run under."""

    opset: int = 0
    format: ClassVar[str] = ONNX

    @property
    def path(self) -> Path:
        return self.folder / MODEL_FILE

    @classmethod
    def from_folder(cls, folder: Path, *, session: SessionSettings | None = None, notes: Mapping[str, Any] | None = None) -> ONNXModelHandler:
        """Open a folder that holds `model.onnx`; reads the graph's head only, no weights.

        Raises `ConfigError` when there is no such file or it is no ONNX model.
        """
        io, opset = read_onnx_head(folder / MODEL_FILE)
        return cls(folder=folder, io=io, session=session or SessionSettings(), notes=dict(notes or {}), opset=opset)

    def load(self) -> onnx.ModelProto:
        """Read the whole model with its external data (a new object each time: change it freely)."""
        import onnx

        return onnx.load(str(self.path))

    def written(self, folder: Path, *, proto: onnx.ModelProto | None = None, notes: Mapping[str, Any] | None = None) -> ONNXModelHandler:
        """Return the handler of a model that took this one's place in `folder`, same session settings.

        `proto`, when given, is saved there first (external data beyond 1.5 GB). Else the caller has written `model.onnx`.
        """
        if proto is not None:
            save_onnx(proto, folder / MODEL_FILE)
        return ONNXModelHandler.from_folder(folder, session=self.session, notes=notes)

    def with_session(self, session: SessionSettings) -> ONNXModelHandler:
        """Return the same files under other session settings."""
        return replace(self, session=session)


@dataclass(frozen=True)
class PyTorchModelHandler(ModelHandler):
    """A torch module: a user's loader function builds it, `weights.pt` in the folder (if there) holds its tensors.

    Tensors may be smaller than the loader's: a pruned module is the loader's module cut to the shapes of its weights. So no
    pickled code is ever read back.
    """

    script: Path = Path()
    loader: str = ""
    format: ClassVar[str] = PYTORCH

    def load(self) -> torch.nn.Module:
        """Build the module and load its weights (`weights_only=True`); in eval mode, on the CPU."""
        import torch

        module = load_object(self.script, self.loader, who="model")()
        if not isinstance(module, torch.nn.Module):
            raise ConfigError("model", f"{self.loader} in {self.script.name} must return a torch.nn.Module", type(module).__name__)
        weights = self.folder / WEIGHTS_FILE
        if weights.exists():
            load_fitting(module, torch.load(weights, weights_only=True, map_location="cpu"))
        return module.eval()

    def written(self, folder: Path, *, module: torch.nn.Module, notes: Mapping[str, Any] | None = None) -> PyTorchModelHandler:
        """Save the module's tensors into `folder` and return its handler: same loader, same inputs and outputs, same session settings.

        Equal tensors give equal bytes.
        """
        import torch

        # A view would bring its whole storage along, a device or a graph has no place in a file.
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
        exact = {n: t if t.untyped_storage().nbytes() == t.numel() * t.element_size() else t.clone() for n, t in state.items()}
        torch.save(exact, folder / WEIGHTS_FILE)
        return replace(self, folder=folder, notes=dict(notes or {}))

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "script": str(self.script), "loader": self.loader}


@dataclass(frozen=True)
class HuggingFaceModelHandler(PyTorchModelHandler):
    """A model of transformers: `config.json` in the folder builds it; its weights, or `weights.pt` of a changed module, fill it."""

    def load(self) -> torch.nn.Module:
        """Build the model with its weights, in float32 and eval mode, on the CPU. Raises `ConfigError`."""
        import torch

        weights = self.folder / WEIGHTS_FILE
        if not weights.exists():
            return load_huggingface(self.folder)
        module = load_huggingface(self.folder, without_weights=True)
        load_fitting(module, torch.load(weights, weights_only=True, map_location="cpu"))
        return module.eval()

    def written(self, folder: Path, *, module: torch.nn.Module, notes: Mapping[str, Any] | None = None) -> PyTorchModelHandler:
        """Save the module's tensors into `folder`, and what builds it."""
        for name in (CONFIG_FILE, EXAMPLES_FILE):
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, folder / name)
        return super().written(folder, module=module, notes=notes)

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "kind": HUGGING_FACE}


@dataclass(frozen=True)
class TorchProgramHandler(ModelHandler):
    """A TorchScript file or a torch.export program (`kind`), `program.pt` in the folder."""

    kind: str = TORCHSCRIPT
    format: ClassVar[str] = TORCH_PROGRAM

    def load(self) -> torch.jit.ScriptModule | torch.export.ExportedProgram:
        """Load it on the CPU, in eval mode. Raises `ConfigError`."""
        path = self.folder / PROGRAM_FILE
        return load_torchscript(path) if self.kind == TORCHSCRIPT else load_program(path)

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "kind": self.kind}


def ingest_torch(
    source: Path, kind: str, folder: Path, *, io: IoContract, session: SessionSettings, examples: Mapping[str, NDArray[Any]]
) -> HuggingFaceModelHandler | TorchProgramHandler:
    """Copy a model of torch that needs no script into a folder of its own, with a few rows of its inputs; links are resolved.

    `kind` as `torch_files.kind_of` tells it. Raises `ConfigError` for a folder without weights.
    """
    import numpy as np

    if kind == HUGGING_FACE:
        for name in huggingface_files(source):
            shutil.copyfile(source / name, folder / name)
    else:
        shutil.copyfile(source, folder / PROGRAM_FILE)
    if examples:
        np.savez(folder / EXAMPLES_FILE, allow_pickle=False, **{n: np.asarray(a) for n, a in examples.items()})
    if kind == HUGGING_FACE:
        return HuggingFaceModelHandler(folder, io, session)
    return TorchProgramHandler(folder, io, session, kind=kind)


def load_examples(model: ModelHandler) -> dict[str, NDArray[Any]]:
    """Rows of inputs that lie beside a model of torch, by input name; none for other models."""
    import numpy as np

    path = model.folder / EXAMPLES_FILE
    if not path.is_file():
        return {}
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def load_fitting(module: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Load a state dict whose tensors may be smaller than the module's, as structured pruning leaves them.

    Parameters and buffers are cut to the tensors' sizes, and the layers' own records of their sizes follow. Raises `ConfigError`
    when the names differ, or the tensors can't be those of this module cut down.
    """
    import torch

    modules = dict(module.named_modules())
    for name, tensor in state.items():
        owner_name, _, leaf = name.rpartition(".")
        current = getattr(modules.get(owner_name), leaf, None)
        if not isinstance(current, torch.Tensor) or current.shape == tensor.shape:
            continue
        if current.ndim != tensor.ndim or any(small > large for small, large in zip(tensor.shape, current.shape, strict=True)):
            raise ConfigError(
                "model", f"weights must fit the module that the loader builds: {name} has shape {list(current.shape)} there",
                f"{list(tensor.shape)}", "Build the same network as the one that was saved; weights may only be smaller than it.",
            )  # fmt: skip
        fitting = torch.empty_like(tensor)
        setattr(modules[owner_name], leaf, torch.nn.Parameter(fitting, current.requires_grad) if isinstance(current, torch.nn.Parameter) else fitting)
    try:
        module.load_state_dict(dict(state))
    except RuntimeError as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            "model", "weights must have the names of the loader's module", text[:400], "Build the same network as was saved."
        ) from error
    for part in modules.values():
        _note_sizes(part)


def _note_sizes(part: torch.nn.Module) -> None:
    """Make a layer's attributes say what its tensors are: some are only shown, but groups and normalized shapes are computed with."""
    import torch
    from torch.nn.modules.batchnorm import _NormBase
    from torch.nn.modules.conv import _ConvNd

    weight = getattr(part, "weight", None)
    if isinstance(part, _NormBase):  # batch and instance norms; without affine weights only the statistics tell
        tensor = weight if isinstance(weight, torch.Tensor) else part.running_mean
        if isinstance(tensor, torch.Tensor):
            part.num_features = tensor.shape[0]
    if not isinstance(weight, torch.Tensor):
        return
    if isinstance(part, _ConvNd):
        # Pruning takes whole groups of a depthwise layer and channels within the groups of any other.
        if part.groups > 1 and part.groups == part.out_channels and part.groups == part.in_channels:
            part.groups = weight.shape[0]
        first, second = weight.shape[0], weight.shape[1]
        part.in_channels, part.out_channels = (first, second * part.groups) if part.transposed else (second * part.groups, first)
    elif isinstance(part, torch.nn.Linear):
        part.out_features, part.in_features = weight.shape
    elif isinstance(part, torch.nn.LayerNorm):
        part.normalized_shape = tuple(weight.shape)
    elif isinstance(part, torch.nn.GroupNorm):
        part.num_channels = weight.shape[0]
    elif isinstance(part, torch.nn.PReLU):
        part.num_parameters = weight.shape[0]
    elif isinstance(part, torch.nn.Embedding):
        part.embedding_dim = weight.shape[1]


def handler_from_json(data: Mapping[str, Any]) -> ModelHandler:
    """Rebuild the handler that `to_json` wrote."""
    common = {
        "folder": Path(data["folder"]), "io": IoContract.from_json(data["io"]),
        "session": SessionSettings.from_json(data["session"]), "notes": data["notes"],
    }  # fmt: skip
    if data["format"] == TORCH_PROGRAM:
        return TorchProgramHandler(**common, kind=data["kind"])
    if data.get("kind") == HUGGING_FACE:
        return HuggingFaceModelHandler(**common)
    if data["format"] == PYTORCH:
        return PyTorchModelHandler(**common, script=Path(data["script"]), loader=data["loader"])
    _, opset = read_onnx_head(common["folder"] / MODEL_FILE)
    return ONNXModelHandler(**common, opset=opset)


_in_use: dict[Path, str] = {}  # users' scripts to the modules made from them


def scripts_in_use() -> Mapping[str, Path]:
    """Return the modules made from users' scripts with the files they come from, the one loaded last at the end; one for each file."""
    return {module: path for path, module in _in_use.items()}


def load_script(script: Path, *, who: str) -> ModuleType:
    """Run a user's Python file in this process, once as long as it stays the same, and return its module.

    The script is then the latest in `scripts_in_use`, in that content. Raises `ConfigError` when there is none, or when it raises.
    """
    if not script.is_file():
        raise ConfigError(who, "the script must exist", str(script), "Paths are relative to the sweep file.")
    file = script.resolve()
    digest = hashlib.sha256(str(file).encode() + b"/" + script.read_bytes()).hexdigest()
    module_name = f"{USER_MODULE}{script.stem}_{digest[:8]}"
    module = sys.modules.get(module_name)
    _in_use.pop(file, None)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, script)
        if spec is None or spec.loader is None:
            raise ConfigError(who, "the script must be a Python file", str(script))
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        _in_use[file] = module_name  # a script may use what it registers
        sys.path.insert(0, str(script.parent))  # a script may import its neighbours
        try:
            spec.loader.exec_module(module)
        except KeyboardInterrupt:
            del sys.modules[module_name], _in_use[file]
            raise
        except BaseException as error:  # whatever a user's file raises, or sys.exit, is his to mend
            del sys.modules[module_name], _in_use[file]
            line = next((f.lineno for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == str(script)), None)
            place = f"{script.name}:{error.lineno if isinstance(error, SyntaxError) else line}"
            raise ConfigError(who, "the script must run when it is imported", f"{type(error).__name__}: {error} ({place})") from error
        finally:
            sys.path.remove(str(script.parent))
    _in_use[file] = module_name
    return module


def load_object(script: Path, name: str, *, who: str) -> Any:
    """Fetch `name` from a user's Python file. Raises `ConfigError` when the file or the name is missing."""
    module = load_script(script, who=who)
    if not hasattr(module, name):
        raise ConfigError(who, f"{script.name} must define {name!r}", "no such name", nearest(name, [n for n in vars(module) if n[0] != "_"]))
    return getattr(module, name)


_ONNX_DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "string", 9: "bool",
    10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bfloat16",
}  # fmt: skip


def read_onnx_head(path: Path) -> tuple[IoContract, int]:
    """Read inputs, outputs and the default-domain opset of an ONNX file without its external data."""
    import onnx

    try:
        proto = onnx.load(str(path), load_external_data=False)
    except FileNotFoundError as error:
        near = nearest(path.name, [p.name for p in path.parent.glob("*.onnx")]) if path.parent.is_dir() else ""
        raise ConfigError("model", "the model file must exist", str(path), near or "Check the path.") from error
    except Exception as error:  # protobuf raises errors of many kinds for a file that is no model
        raise ConfigError("model", "the file must be an ONNX model", f"{path}: {str(error).splitlines()[0] if str(error) else error!r}") from error
    if not proto.HasField("graph") or not proto.graph.node:
        raise ConfigError("model", "an ONNX model must hold a graph with nodes", str(path), "Is it a file of another kind?")
    given = {i.name for i in proto.graph.initializer} | {i.values.name for i in proto.graph.sparse_initializer}
    inputs = tuple(_tensor_spec(v) for v in proto.graph.input if v.name not in given)
    outputs = tuple(_tensor_spec(v) for v in proto.graph.output)
    opset = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 0)
    return IoContract(inputs, outputs), opset


def _tensor_spec(value: onnx.ValueInfoProto) -> TensorSpec:
    if value.type.WhichOneof("value") != "tensor_type":
        return TensorSpec(value.name, "other", None)
    tensor = value.type.tensor_type
    shape = None
    if tensor.HasField("shape"):
        shape = tuple(
            d.dim_value if d.WhichOneof("value") == "dim_value" else (d.dim_param or None) if d.WhichOneof("value") else None
            for d in tensor.shape.dim
        )
    return TensorSpec(value.name, _ONNX_DTYPES.get(tensor.elem_type, "other"), shape)


LARGE_BYTES = 1_500_000_000  # one protobuf message ends at 2 GiB


def message_bytes(proto: onnx.ModelProto) -> int:
    """About how many bytes a model's tensors take in one message: protobuf's own count fails beyond 2 GiB, after long work."""
    from onnx import TensorProto, helper

    total = 0
    for tensor in _all_tensors(proto):
        if tensor.data_location == TensorProto.EXTERNAL and not tensor.HasField("raw_data"):
            continue
        if tensor.data_type in (TensorProto.UNDEFINED, TensorProto.STRING):
            total += tensor.ByteSize()
        else:
            total += math.prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return total


def save_onnx(proto: onnx.ModelProto, path: Path, *, below: int = LARGE_BYTES) -> None:
    """Write a model as one file when its tensors take less than `below` bytes, else with one data file beside it."""
    import onnx

    if message_bytes(proto) < min(below, LARGE_BYTES):
        onnx.save(proto, str(path))
    else:
        onnx.save(proto, str(path), save_as_external_data=True, location=f"{path.name}.data", size_threshold=1024)


def ingest_onnx(source: Path, folder: Path) -> ONNXModelHandler:
    """Copy a user's model into a self-contained folder as `model.onnx`; links are resolved, external data comes along.

    Refuses (`ConfigError`) external data that is missing, absolute, or outside the model's own folder.
    """
    import onnx
    from onnx.external_data_helper import uses_external_data

    read_onnx_head(source)
    proto = onnx.load(str(source), load_external_data=False)
    real = source.resolve()
    locations = sorted({e.value for t in _all_tensors(proto) if uses_external_data(t) for e in t.external_data if e.key == "location"})
    # A Hugging Face cache links model and data out of one folder each: the link's own folder is the model's folder.
    homes = (source.parent, real.parent)
    for location in locations:
        relative = Path(location)
        if relative.is_absolute() or ".." in relative.parts:
            raise ConfigError(
                "model", "external data must lie inside the model's folder", f"{location!r}", "Save the model again with relative data paths."
            )
        if relative == Path(MODEL_FILE):  # the model itself takes this name in its new folder
            raise ConfigError(
                "model", f"external data can't be named {MODEL_FILE}", f"{location!r}", "Save the model again with another data file name."
            )
        home = next((h for h in homes if (h / relative).is_file()), None)
        if home is None:
            raise ConfigError("model", "every external data file must be there", f"no {location!r} beside {source.name}")
        data = (home / relative).resolve()
        if not data.is_relative_to(home.resolve()) and data.parent != real.parent:
            raise ConfigError("model", "external data must lie inside the model's folder", f"{location!r}, a link to {data}")
        target = folder / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(data, target)
    shutil.copyfile(source, folder / MODEL_FILE)
    return ONNXModelHandler.from_folder(folder)


def _all_tensors(proto: onnx.ModelProto) -> list[onnx.TensorProto]:
    """Initializers and tensor attributes of the graph, its subgraphs and the model's own functions."""
    tensors: list[onnx.TensorProto] = []

    def visit_nodes(nodes: Any) -> None:
        for node in nodes:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    tensors.append(attribute.t)
                tensors.extend(attribute.tensors)
                if attribute.HasField("g"):
                    visit_graph(attribute.g)
                for graph in attribute.graphs:
                    visit_graph(graph)

    def visit_graph(graph: Any) -> None:
        tensors.extend(graph.initializer)
        visit_nodes(graph.node)

    visit_graph(proto.graph)
    for function in proto.functions:
        visit_nodes(function.node)
    return tensors
