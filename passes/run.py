"""The stages that run one pass, and look at its input, in a child process. Light on imports: a child has no time to lose."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.data import load_arrays
from autotune.model import ONNXModelHandler, handler_from_json, load_script
from autotune.passes.coverage import operator_times
from autotune.passes.findings import Findings
from autotune.passes.registry import get_pass
from autotune.target import AcceleratorSpec


def run_pass(args: Mapping[str, Any]) -> dict[str, Any]:
    """Stage: run one pass in this (child) process. Returns the handler of what it wrote."""
    if args.get("script"):
        load_script(Path(args["script"]), who="script")  # it may register passes of its own
    accelerator = AcceleratorSpec(*args["accelerator"])
    pass_class = get_pass(args["pass"])
    worker = pass_class(accelerator, args["config"], user_script=Path(args["script"]) if args.get("script") else None)
    worker.findings = Findings(Path(args["findings"]) if args.get("findings") else None)
    worker.operator_times = args.get("operator_times") or {}
    result = worker.run(handler_from_json(args["model"]), Path(args["out"]))
    return {"model": result.to_json()}


def time_operators(args: Mapping[str, Any]) -> dict[str, Any]:
    """Stage: find where the time of a model goes. `model` (handler as JSON), `data` (.npz). Returns {times}, see `operator_times`."""
    model = handler_from_json(args["model"])
    assert isinstance(model, ONNXModelHandler)
    return {"times": operator_times(model, load_arrays(Path(args["data"])))}
