"""Inputs for a torch module, made from what is known of its inputs: for tracing it, and for comparing it with what became of it."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.errors import PassError
from autotune.model import IoContract, TensorSpec

if TYPE_CHECKING:
    import torch

Axes = dict[str, dict[int, str]]  # input name -> axis -> label of its size
Sizes = dict[str, int]  # label -> size
FIRST_AXIS_SIZE = 2  # not 1: exporters take an axis of size 1 for one that never changes
OTHER_AXIS_SIZE = 16


def symbolic_axes(contract: IoContract) -> Axes:
    """Label every axis that has no fixed size; one without a name is called `<input>_dim_<axis>`."""
    found: Axes = {}
    for spec in contract.inputs:
        labels = {i: (d if isinstance(d, str) else f"{spec.name}_dim_{i}") for i, d in enumerate(spec.shape or ()) if not isinstance(d, int)}
        if labels:
            found[spec.name] = labels
    return found


def usual_sizes(axes: Axes) -> Sizes:
    """Choose a size for each label: 2 for first axes (batches), 16, 24, 32 ... for the others, so that no two are mixed up."""
    sizes: Sizes = {}
    for labels in axes.values():
        for axis, label in labels.items():
            if label not in sizes:
                others = sum(s >= OTHER_AXIS_SIZE for s in sizes.values())
                sizes[label] = FIRST_AXIS_SIZE if axis == 0 else OTHER_AXIS_SIZE + 8 * others
    return sizes


def example_inputs(contract: IoContract, axes: Axes, sizes: Mapping[str, int], *, who: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Make one seeded tensor per input: floats from 0 to 1, whole numbers 0 or 1 (any table of tokens has these two), booleans.

    Raises `PassError` for an input whose shape or dtype is not known.
    """
    import torch

    rng = np.random.default_rng(seed)
    found = {}
    for spec in contract.inputs:
        dtype = getattr(torch, spec.dtype, None)
        if spec.shape is None or not isinstance(dtype, torch.dtype):
            raise PassError(
                who, f"input {spec.name!r} must have a known shape and a numeric dtype", f"{spec.dtype} {spec.shape}", "Give input_shapes."
            )
        shape = _concrete(spec, axes.get(spec.name, {}), sizes)
        values = rng.random(shape) if dtype.is_floating_point or dtype.is_complex else rng.integers(0, 2, shape)
        found[spec.name] = torch.from_numpy(np.asarray(values)).to(dtype)
    return found


def _concrete(spec: TensorSpec, labels: Mapping[int, str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    shape = []
    for axis, size in enumerate(spec.shape or ()):
        label = labels.get(axis)
        shape.append(sizes[label] if label is not None else size if isinstance(size, int) else FIRST_AXIS_SIZE)
    return tuple(shape)


def takes_by_name(module: torch.nn.Module, names: Sequence[str]) -> bool:
    """Say whether `forward` has a parameter of each of these names; else inputs go in by position."""
    known = inspect.signature(module.forward).parameters
    return all(n in known and known[n].kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY) for n in names)


def call(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> Any:
    """Run the module on named inputs: by name where `forward` knows the names, else in order."""
    return module(**inputs) if takes_by_name(module, list(inputs)) else module(*inputs.values())


def flat_outputs(outputs: object) -> list[torch.Tensor]:
    """List the tensors in what a module gave back (tensor, tuple, list, dict, nested), in order."""
    return [tensor for _, tensor in named_outputs(outputs)]


def named_outputs(outputs: object) -> list[tuple[str, torch.Tensor]]:
    """The same with a name for each: its key in a dict, else `output`, `output_1`, ...; no name twice."""
    found: list[tuple[str, torch.Tensor]] = []
    for key, tensor in _flat(outputs, ""):
        taken = {name for name, _ in found}
        wanted = key or ("output" if not found else f"output_{len(found)}")
        free = next(name for name in (wanted, *(f"{wanted}_{i}" for i in range(1, len(found) + 2))) if name not in taken)
        found.append((free, tensor))
    return found


def _flat(outputs: object, key: str) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    if isinstance(outputs, torch.Tensor):
        yield key, outputs
    elif isinstance(outputs, Mapping):
        for name, value in outputs.items():
            yield from _flat(value, f"{key}_{name}" if key else str(name))
    elif isinstance(outputs, list | tuple):
        for value in outputs:
            yield from _flat(value, key)


def first_lines(error: BaseException, *, lines: int = 3, width: int = 400) -> str:
    """The beginning of an error's text, with its type, short enough for a message; of its cause where an error only wraps it."""
    while isinstance(error.__cause__, Exception) and "Error" in type(error).__name__ and type(error).__module__.startswith("torch.onnx"):
        error = error.__cause__
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    text = " ".join(" ".join(text.strip().splitlines()[:lines]).split())
    return f"{type(error).__name__}: {text[:width]}" if text else type(error).__name__


@contextlib.contextmanager
def quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Silence what the libraries say while they work: warnings, log lines below CRITICAL, standard output (native code's too).

    Yields the warnings that were held back. Standard error stays, for the last words of a crash.
    """
    before = logging.root.manager.disable
    sys.stdout.flush()
    kept = os.dup(1)
    sink = os.open(os.devnull, os.O_WRONLY)
    with warnings.catch_warnings(record=True) as held_back, contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("always")
        logging.disable(logging.ERROR)
        os.dup2(sink, 1)
        try:
            yield held_back
        finally:
            os.dup2(kept, 1)
            os.close(kept)
            os.close(sink)
            logging.disable(before)
