"""Where passes are found by name: built in, registered by decorator, or brought by other distributions (entry points).

The registry holds finished classes and loads a module only when its pass is used.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import TypeVar

from autotune.errors import ConfigError, nearest
from autotune.model import USER_MODULE
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
P = TypeVar("P", bound=type[Pass])


def register(pass_class: P) -> P:
    """Class decorator: make a finished pass known by its class name. A second class of that name is refused.

    But for two users' scripts, of two sweeps in one process: the script loaded last is the one that is meant.
    """
    name = pass_class.__name__
    known = _registered.get(name)
    scripts = known is not None and known.__module__.startswith(USER_MODULE) and pass_class.__module__.startswith(USER_MODULE)
    if known is not None and known.__module__ != pass_class.__module__ and not scripts:
        raise ConfigError("passes", f"pass names must be unique: {name} is already that of {known.__module__}", pass_class.__module__)
    _registered[name] = pass_class
    return pass_class


def pass_names() -> list[str]:
    """Names of all passes that can be used, without loading any: built-in ones in chain order, then the others by name."""
    others = {e.name for e in metadata.entry_points(group=ENTRY_POINTS)} | set(_registered)
    return [*BUILT_IN, *sorted(others - set(BUILT_IN))]


def get_pass(name: str) -> type[Pass]:
    """Load a pass by name. Raises `ConfigError` with the nearest name for an unknown one."""
    name = ALIASES.get(name, name)
    if name not in _registered:
        if name in BUILT_IN:
            importlib.import_module(f"autotune.passes.{BUILT_IN[name]}")
        else:
            for entry in metadata.entry_points(group=ENTRY_POINTS, name=name):
                register(entry.load())
    if name not in _registered:
        raise ConfigError("passes", "a pass must be a known name", repr(name), nearest(name, pass_names()))
    return _registered[name]
