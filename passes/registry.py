"""Where passes are found by name: built in, registered by decorator, or brought by other distributions (entry points).

The registry holds finished classes and loads a module only when its pass is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from autotune.errors import ConfigError, nearest
from autotune.model import USER_MODULE, scripts_in_use
from autotune.passes.base import Pass

BUILT_IN = {
    "TorchPruning": "torch_pruning",
    "OnnxConversion": "onnx_conversion",
    "OnnxOpsetUpgrade": "onnx_opset_upgrade",
    "OnnxDynamicToFixedShape": "onnx_dynamic_to_fixed_shape",
    "OnnxModelOptimizer": "onnx_model_optimizer",
    "OnnxPruning": "onnx_pruning",
    "OrtTransformersOptimization": "ort_transformers_optimization",
    "OnnxFloatToFloat16": "onnx_float_to_float16",
    "OnnxMixedPrecision": "onnx_mixed_precision",
    "SmoothQuant": "smooth_quant",
    "OnnxQuantization": "onnx_quantization",
    "OnnxStaticQuantization": "onnx_static_quantization",
    "OnnxDynamicQuantization": "onnx_dynamic_quantization",
    "OnnxBlockwiseQuantization": "onnx_blockwise_quantization",
    "OnnxExternalData": "onnx_external_data",
    "OrtPerfTuning": "ort_perf_tuning",
}
ALIASES = {"OrtSessionParamsTuning": "OrtPerfTuning"}
ENTRY_POINTS = "autotune.passes"

_registered: dict[str, type[Pass]] = {}
_of_scripts: dict[str, dict[str, type[Pass]]] = {}  # by name, then by the module made from the script
P = TypeVar("P", bound=type[Pass])


def register(pass_class: P) -> P:
    """Class decorator: make a finished pass known by its class name. A second class of that name is refused.

    But for users' scripts, of which one process may load several: what is registered there holds while its script is in use as it then was.
    """
    name, module = pass_class.__name__, pass_class.__module__
    known = _registered[name].__module__ if name in _registered else f"autotune.passes.{BUILT_IN[name]}" if name in BUILT_IN else module
    if known != module:
        raise ConfigError("passes", f"pass names must be unique: {name} is already that of {known}", module, "Give the class another name.")
    if module.startswith(USER_MODULE):
        _of_scripts.setdefault(name, {})[module] = pass_class
    else:
        _registered[name] = pass_class
    return pass_class


def _in_scripts(name: str) -> dict[Path, type[Pass]]:
    """Passes of this name in the users' scripts in use, by file; that of the script loaded last at the end."""
    found = _of_scripts.get(name, {})
    return {path: found[module] for module, path in scripts_in_use().items() if module in found}


def script_of_pass(name: str, scripts: Collection[Path]) -> Path | None:
    """Return which of a sweep's scripts a pass is registered by, None for one that comes from elsewhere.

    Raises `ConfigError` when several of them register a pass of that name, which could mean either.
    """
    if name in _registered or name in BUILT_IN:
        return None
    chosen = [path for path in _in_scripts(name) if path in {s.resolve() for s in scripts}]
    if len(chosen) > 1:
        files = " and ".join(str(path) for path in sorted(chosen))
        raise ConfigError("passes", f"{name} must be the name of one pass of a sweep", f"one in each of {files}", "Rename one of the two classes.")
    return chosen[0] if chosen else None


def pass_names() -> list[str]:
    """Names of all passes that can be used, without loading any: built-in ones in chain order, then the others by name."""
    scripts = {name for name in _of_scripts if _in_scripts(name)}
    others = {e.name for e in metadata.entry_points(group=ENTRY_POINTS)} | set(_registered) | scripts
    return [*BUILT_IN, *sorted(others - set(BUILT_IN))]


def get_pass(name: str) -> type[Pass]:
    """Load a pass by name. Raises `ConfigError` with the nearest name for an unknown one.

    Where scripts of several sweeps register the name, that of the script loaded last is meant.
    """
    name = ALIASES.get(name, name)
    if name not in _registered:
        scripts = _in_scripts(name)
        if scripts:
            return list(scripts.values())[-1]
        if name in BUILT_IN:
            importlib.import_module(f"autotune.passes.{BUILT_IN[name]}")
        else:
            for entry in metadata.entry_points(group=ENTRY_POINTS, name=name):
                register(entry.load())
    if name not in _registered:
        raise ConfigError("passes", "a pass must be a known name", repr(name), nearest(name, pass_names()))
    return _registered[name]
