"""autotune: search chains of optimization passes for an ONNX model, measure each result, deliver the Pareto-best as a bundle."""

from __future__ import annotations

import os as _os
from importlib import metadata as _metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.sweep.result import SweepResult
    from autotune.sweep.run import run

# ONNX Runtime 1.32 starts a telemetry thread and a database in the user's cache folder when it is imported. Nothing phones home
# from here; and a process that holds threads could not be forked safely (autotune.stages). Whoever wants it sets the variable to 0.
_os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = ["SweepResult", "__version__", "run"]

try:
    __version__ = _metadata.version("passtune")
except _metadata.PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    """Import the front door only when it is used: `import autotune` stays free of Ray, torch and onnxruntime."""
    if name in ("run", "SweepResult"):
        from autotune.sweep import run as module

        return getattr(module, name)
    raise AttributeError(f"module 'autotune' has no attribute {name!r}")
