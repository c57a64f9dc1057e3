"""Models as PyTorch's users keep them: TorchScript files, torch.export programs, folders of Hugging Face; told apart without being loaded.

Source: PyTorch documentation, "torch.jit.save", "torch.export.save"; the layouts of their archives as torch 2.13 writes them.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import os
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.digest import digest_of, digest_tree
from autotune.errors import ConfigError, EnvironmentFault, nearest

if TYPE_CHECKING:
    import torch

ONNX_FILE = "ONNX file"
TORCHSCRIPT = "TorchScript file"
PROGRAM = "torch.export program"
HUGGING_FACE = "Hugging Face folder"
CONFIG_FILE = "config.json"
SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"  # one file, or `<name>.index.json` that names several
SAVE_ANOTHER_WAY = "Save the module with torch.export.save or torch.jit.save, or give script (a file that builds it) and weights."


def kind_of(path: Path) -> str:
    """Say what kind of model a path holds, from names and first bytes: nothing is loaded.

    Raises `ConfigError` for a path that isn't there, for pickles (which run code when they are read), and for weights without a model.
    """
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        near = nearest(path.name, _models_in(path.parent)) if path.parent.is_dir() else ""
        raise ConfigError("model", "the model file must exist", str(path), near or "Check the path.")
    with path.open("rb") as file:
        head = file.read(9)
    if head.startswith(b"PK\x03\x04"):
        return _archive(path)
    if head.startswith(b"\x80"):
        raise ConfigError("model", "a pickle is no model that can be read safely", f"{path.name}, a pickle", SAVE_ANOTHER_WAY)
    if len(head) == 9 and head.endswith(b"{") and 1 < struct.unpack("<Q", head[:8])[0] < 100_000_000:
        raise ConfigError(
            "model", "weights alone are no model", f"{path.name}, a safetensors file",
            f"Name the folder that holds it and its {CONFIG_FILE}, or give script (a file that builds the module) and weights.",
        )  # fmt: skip
    return ONNX_FILE


def _folder(path: Path) -> str:
    if (path / CONFIG_FILE).is_file():
        return HUGGING_FACE
    inside = _models_in(path)
    do = f"Name the file itself: {inside[0]}." if inside else "transformers' save_pretrained writes such a folder."
    raise ConfigError("model", f"a folder that is a model must be one of Hugging Face, with {CONFIG_FILE}", str(path), do)


def _models_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.suffix in (".onnx", ".pt2", ".pt", ".ts"))


def _archive(path: Path) -> str:
    names = _members(path)
    if any(re.fullmatch(r"models/[^/]+\.json", n) for n in names):
        return PROGRAM
    if "constants.pkl" in names and any(n.startswith("code/") for n in names):
        return TORCHSCRIPT
    if "archive_format" in names or "serialized_exported_program.json" in names:
        raise ConfigError(
            "model", "a .pt2 archive must hold a program as torch.export.save of torch 2.8 or later writes it", f"{path.name} without one",
            "Save the program again; a compiled package (AOTInductor) can't be converted.",
        )  # fmt: skip
    if "data.pkl" in names:
        raise ConfigError(
            "model", "weights alone, or a pickled module, are no model that can be read safely", f"{path.name}, from torch.save", SAVE_ANOTHER_WAY
        )
    raise ConfigError("model", "an archive must be a TorchScript file or a torch.export program", path.name)


def _members(path: Path) -> dict[str, str]:
    """Names in an archive without the folder that torch puts them into, to their full names."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {name.partition("/")[2]: name for name in archive.namelist()}
    except (zipfile.BadZipFile, OSError) as error:
        raise ConfigError("model", "the file must be a whole archive", f"{path.name}: {error}", "It may be cut off: copy it again.") from error


def source_digest(path: Path) -> str:
    """SHA-256 of what makes the model at a path: the file, or those files of a folder that are read, links followed."""
    if path.is_dir() and kind_of(path) == HUGGING_FACE:
        return digest_of({name: digest_tree(path / name) for name in huggingface_files(path)})
    return digest_tree(path)


def source_bytes(path: Path) -> int:
    """Bytes of a model that is no ONNX file."""
    return sum((path / name).stat().st_size for name in huggingface_files(path)) if path.is_dir() else path.stat().st_size


# ---------------------------------------------------------------------------------------------------------------- TorchScript


def load_torchscript(path: Path) -> torch.jit.ScriptModule:
    """Load a TorchScript file on the CPU, in eval mode. Its own format runs no pickled Python. Raises `ConfigError`."""
    import torch

    try:
        module = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call] # torch has no types here
    except Exception as error:  # the loader raises errors of many kinds
        raise ConfigError("model", "the TorchScript file must load", f"{path.name}: {_line(error)}", "Save it with this version of torch.") from error
    if hasattr(module, "training"):  # a frozen module has lost the attribute, and is in eval mode for good
        module.eval()
    return module  # type: ignore[no-any-return] # as above


def tensor_arguments(module: torch.jit.ScriptModule) -> list[str]:
    """Names of the tensors that `forward` takes, in order. Raises `ConfigError` where it needs anything else."""
    found = []
    forward: Any = module.forward
    for argument in forward.schema.arguments[1:]:
        if str(argument.type) == "Tensor":
            found.append(argument.name)
        elif not argument.has_default_value():
            raise ConfigError(
                "model", "forward of a TorchScript file must take tensors", f"{argument.name}: {argument.type}", "Wrap it in a module that does."
            )
    return found


# ---------------------------------------------------------------------------------------------------------------- torch.export


def load_program(path: Path) -> torch.export.ExportedProgram:
    """Load a torch.export program, after a look at everything in it that torch would unpickle or evaluate. Raises `ConfigError`."""
    import torch

    _vet(path)
    try:
        return torch.export.load(str(path))
    except Exception as error:  # the loader raises errors of many kinds
        do = "Save it with this version of torch."
        raise ConfigError("model", "the torch.export program must load", f"{path.name}: {_line(error)}", do) from error


# `torch.export.load` falls back to unpickling, evaluates the texts of sizes and guards, and follows the dotted names of operators.
_OPERATOR = re.compile(r"torch\.ops\.(?!__)\w+\.(?!__)\w+(\.\w+)?|_operator\.\w+|math\.\w+|torch\._?sym_\w+")
_TEXTS = ("expr_str", "guards_code", "target")
_EXPRESSION = (
    ast.Expression, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Constant, ast.Name, ast.Subscript, ast.Call, ast.Attribute,
    ast.keyword, ast.Tuple, ast.List, ast.boolop, ast.operator, ast.unaryop, ast.cmpop, ast.expr_context,
)  # fmt: skip
_METHODS = {"size", "stride", "storage_offset", "dim", "ndim", "shape"}
_NAME = re.compile(
    r"L|[suz]+f?\d+|Symbol|Integer|Float|Rational|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not|Min|Max|Mod|PythonMod|FloorDiv|CeilDiv|ModularIndexing|CleanDiv"
    r"|IntTrueDiv|FloatTrueDiv|TruncToInt|TruncToFloat|ToFloat|Where|PowByNatural|FloatPow|RoundToInt|LShift|RShift|floor|ceiling|Piecewise|Abs|Pow"
    r"|Add|Mul|max|min|oo|int_oo|true|false"
)


def _vet(path: Path) -> None:
    def refuse(what: str) -> ConfigError:
        return ConfigError(
            "model", "a torch.export program must hold nothing that runs as Python when it is read", f"{path.name} with {what}",
            "Save it again without objects of its own, or give script (a file that builds the module).",
        )  # fmt: skip

    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if len(set(names)) < len(names) or len({n.partition("/")[0] for n in names}) > 1:
            raise refuse("two files under one name")
        for full in names:
            name = full.partition("/")[2]
            if name.startswith("data/aotinductor"):
                raise refuse("native code")
            if name.startswith("data/") and name.endswith(".pt") and not _plain(archive, full):
                raise refuse(f"a pickle, {name}")
            if name.startswith("data/") and name.endswith("_config.json"):
                for entry in json.loads(archive.read(full)).get("config", {}).values():
                    if entry.get("use_pickle") or not str(entry.get("path_name")).startswith(("weight_", "tensor_")):
                        raise refuse(f"an object that is no plain tensor, {entry.get('path_name')}")
            elif re.fullmatch(r"models/[^/]+\.json", name):
                for key, text in _texts(json.loads(archive.read(full))):
                    if not (_OPERATOR.fullmatch(text) if key == "target" else _arithmetic(text)):
                        raise refuse(f"{key} {text[:80]!r}")


def _plain(archive: zipfile.ZipFile, name: str) -> bool:
    """Whether the tensors of a member can be read without unpickling anything else."""
    import torch

    content = archive.read(name)
    if not content:
        return True
    try:
        torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception:  # whatever it is that hinders the careful reader
        return False
    return True


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, key)
    elif isinstance(value, str) and key in _TEXTS:
        yield key, value


def _arithmetic(text: str) -> bool:
    """Whether an expression is no more than arithmetic and comparisons of sizes."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    for node in ast.walk(tree):
        if not isinstance(node, _EXPRESSION):
            return False
        if isinstance(node, ast.Name) and not _NAME.fullmatch(node.id):
            return False
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not re.fullmatch(r"\w*", node.value):
            return False  # sympy evaluates texts among its arguments too
        if isinstance(node, ast.Attribute) and node.attr not in _METHODS:
            return False
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name | ast.Attribute):
            return False
    return True


# ---------------------------------------------------------------------------------------------------------------- Hugging Face


def huggingface_files(folder: Path) -> list[str]:
    """Names of the files that make the model: its config and its weights. Raises `ConfigError` for a folder without weights."""
    for name in (SAFETENSORS, PICKLED):
        if (folder / name).is_file():
            return [CONFIG_FILE, name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return [CONFIG_FILE, index.name, *_parts(index)]
    there = sorted(p.name for p in folder.iterdir())
    raise ConfigError(
        "model", f"a Hugging Face folder must hold weights: {SAFETENSORS} (or {SAFETENSORS}.index.json and its parts)",
        ", ".join(there[:6]) + (" ..." if len(there) > 6 else ""), "Download the weights too, or save the model with save_pretrained.",
    )  # fmt: skip


def _parts(index: Path) -> list[str]:
    try:
        parts = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError("model", "the index of the weights must name their files", f"{index.name}: {_line(error)}") from error
    for part in parts:
        if not isinstance(part, str) or Path(part).name != part:
            raise ConfigError("model", "files of weights must lie in the model's folder", repr(part))
        if not (index.parent / part).is_file():
            raise ConfigError("model", "every file of weights must be there", f"no {part!r} beside {index.name}", "Download it too.")
    return parts


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `config.json`. Raises `ConfigError`."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("model", f"{CONFIG_FILE} must be a JSON file", f"{folder.name}: {_line(error)}") from error
    if not isinstance(config, dict):
        raise ConfigError("model", f"{CONFIG_FILE} must describe a model", type(config).__name__)
    return config


def huggingface_class(folder: Path) -> type[Any]:
    """The class of transformers that `config.json` names; its own code is never run.

    Raises `ConfigError` for a class that transformers hasn't, `EnvironmentFault` when transformers isn't installed.
    """
    config = read_config(folder)
    quantized = config.get("quantization_config")
    if quantized:
        kind = quantized.get("quant_method", "quantized") if isinstance(quantized, Mapping) else "quantized"
        raise ConfigError("model", "weights must be those of the model before it was quantized", f"{kind} weights", "Take the original checkpoint.")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the folder; nothing is to be looked up elsewhere
    try:
        import transformers
    except ImportError as error:
        raise EnvironmentFault(
            "model", "a Hugging Face folder needs the package transformers", "none installed here", "Run pip install 'passtune[huggingface]'."
        ) from error
    names = config.get("architectures") or []
    if not isinstance(names, list) or not names:
        raise ConfigError(
            "model", f"{CONFIG_FILE} must name the model's class in architectures", "none", "Save the model with save_pretrained, which writes it."
        )
    found = getattr(transformers, str(names[0]), None)
    if isinstance(found, type) and hasattr(found, "from_pretrained"):
        return found
    own = bool(config.get("auto_map"))
    known = [n for n in dir(transformers) if n.startswith(str(names[0])[:3])]
    raise ConfigError(
        "model", f"the class in architectures must be one of transformers {transformers.__version__}", repr(names[0]),
        "Code that comes with a model is not run: build it in a script of yours (model: {script: ...})." if own
        else nearest(str(names[0]), known) or "Update transformers, or build the model in a script of yours (model: {script: ...}).",
    )  # fmt: skip


def load_huggingface(folder: Path, *, without_weights: bool = False) -> torch.nn.Module:
    """Build the model of a folder in float32 and eval mode, on the CPU, as it is run once: without a cache of earlier tokens.

    `without_weights`: its layers alone, for weights that come from elsewhere. Raises `ConfigError` when weights are missing, or others.
    """
    import torch

    made_by: Any = huggingface_class(folder)
    import transformers
    from transformers import AutoConfig

    words: Any = transformers.utils.logging
    words.disable_progress_bar()
    eager = {"attn_implementation": "eager", "dtype": torch.float32}  # plain operators: what exporters write and runtimes fuse
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        if without_weights:
            module = made_by._from_config(config, **eager)  # noqa: SLF001 # the one way to a class's model without weights
            return _for_one_run(module)
        safe = SAFETENSORS in huggingface_files(folder)[1]
        module, told = made_by.from_pretrained(
            str(folder), config=config, local_files_only=True, use_safetensors=safe, weights_only=True, output_loading_info=True, **eager
        )
    except ConfigError:
        raise
    except Exception as error:  # transformers raises errors of many kinds
        raise ConfigError("model", "the Hugging Face folder must load", f"{folder.name}: {_line(error)}") from error
    missing = sorted(told["missing_keys"])
    if missing:  # transformers fills them with random numbers
        raise ConfigError(
            "model", f"the weights must hold every tensor of {made_by.__name__}", f"none for {', '.join(missing[:3])}{' ...' if missing[3:] else ''}",
            f"Name the class that the weights were saved from in architectures of {CONFIG_FILE}, or train the missing layers first.",
        )  # fmt: skip
    return _for_one_run(module)


def _for_one_run(module: Any) -> torch.nn.Module:
    """Eval mode, and no cache of keys and values among the outputs."""
    for part in module.modules():  # a decoder has a config of its own
        if hasattr(getattr(part, "config", None), "use_cache"):
            part.config.use_cache = False
    return module.eval()  # type: ignore[no-any-return] # transformers has no types for it


def forward_parameters(made_by: Any) -> list[str]:
    """Names that `forward` of a class or a module takes."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [n for n, p in inspect.signature(made_by.forward).parameters.items() if p.kind in kinds and n != "self"]


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
