"""Rows of a data set and how a model takes them: one file of arrays, one feed after another."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.errors import ConfigError, nearest
from autotune.model import IoContract

Arrays = dict[str, NDArray[Any]]
LABELS = "labels"
RANDOM = "random"  # stands where the path of calibration data would: random numbers, asked for by name


def load_arrays(path: Path, *, who: str = "data") -> Arrays:
    """Read an `.npz`, or every `.npz` of a folder joined along the first axis in name order. Pickles are refused.

    Raises `ConfigError` for a missing or damaged file, a pickled array, or arrays of unequal length.
    """
    if path.is_dir():
        parts = [load_arrays(p, who=who) for p in sorted(path.glob("*.npz"))]
        if not parts:
            raise ConfigError(who, "a data folder must hold .npz files", f"none in {path}", "Write one array per model input with numpy.savez.")
        names = set(parts[0])
        if any(set(p) != names for p in parts):
            raise ConfigError(who, f"all .npz files of {path} must hold the same arrays", ", ".join(sorted(set().union(*parts) - names)))
        return {n: np.concatenate([p[n] for p in parts]) for n in parts[0]}
    if not path.exists():
        near = nearest(path.name, [p.name for p in path.parent.glob("*")]) if path.parent.is_dir() else ""
        raise ConfigError(who, "the data file must exist", str(path), near if near.startswith("Did") else "Check the path.")
    try:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise ValueError("one array without a name")
        with loaded as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(
            who, "data must be an .npz of plain arrays", f"{path}: {error}", "Write it with numpy.savez, without object arrays."
        ) from error
    lengths = {n: (len(a) if a.ndim else None) for n, a in arrays.items()}
    if None in lengths.values() or len(set(lengths.values())) > 1:
        shown = ", ".join(f"{n} {a.shape}" for n, a in arrays.items())
        raise ConfigError(who, f"all arrays of {path} must have one row per example", shown, "The first axis is the example.")
    if not arrays or next(iter(lengths.values())) == 0:
        raise ConfigError(who, "data must hold at least one example", f"none in {path}")
    return arrays


@dataclass(frozen=True)
class Feeding:
    """How rows go into a model: `batched` means that `array[i:i + n]` is one run of n examples, else `array[i]` is one run."""

    batched: bool
    batch_size: int = 1

    def rows_per_run(self) -> int:
        return self.batch_size if self.batched else 1


def plan_feeding(arrays: Mapping[str, NDArray[Any]], io: IoContract, *, batch_size: int = 1, who: str = "data") -> Feeding:
    """Find out how rows feed a model from the ranks of its inputs.

    Raises `ConfigError` when an input has no array, or its rank or a fixed axis does not fit.
    """
    votes = {}
    for spec in io.inputs:
        if spec.name not in arrays:
            raise ConfigError(
                who, f"the data must hold an array for each model input ({', '.join(s.name for s in io.inputs)})",
                f"arrays {', '.join(sorted(arrays))}", nearest(spec.name, arrays),
            )  # fmt: skip
        if spec.dtype == "other":
            raise ConfigError(
                who, f"input {spec.name!r} must be a tensor of numbers or text", "another type", "Sequences, maps and optional inputs can't be fed."
            )
        if spec.shape is None:
            continue
        rank = arrays[spec.name].ndim
        if rank == len(spec.shape):
            votes[spec.name] = True
        elif rank == len(spec.shape) + 1:
            votes[spec.name] = False
        else:
            raise ConfigError(
                who, f"input {spec.name!r} takes shape {list(spec.shape)}, so its array needs that rank (or one more, one example a run)",
                f"shape {list(arrays[spec.name].shape)}",
            )  # fmt: skip
    batched = all(votes.values())
    if not batched and any(votes.values()):
        whole = sorted(n for n, v in votes.items() if v)
        raise ConfigError(
            who, "either every array is a batch along its first axis, or every array[i] is one run's input",
            f"a mixture: {', '.join(whole)} would be a batch", "Give scalars and states one row per example too.",
        )  # fmt: skip
    size = batch_size
    if batched:
        for spec in io.inputs:
            fixed = spec.shape[0] if spec.shape else None
            if isinstance(fixed, int) and fixed > 0:
                size = fixed
    for spec in io.inputs:
        array = arrays[spec.name]
        shape = array.shape[1:] if not batched else (size, *array.shape[1:])
        for axis, (have, want) in enumerate(zip(shape, spec.shape or shape, strict=True)):
            if isinstance(want, int) and want > 0 and have != want:
                raise ConfigError(who, f"axis {axis} of input {spec.name!r} must be {want}", f"{have}", "Fix the data, or the model's shape.")
    return Feeding(batched=batched, batch_size=size)


def feeds(
    arrays: Mapping[str, NDArray[Any]], io: IoContract, feeding: Feeding, rows: Sequence[int] | NDArray[np.int64] | None = None
) -> Iterator[tuple[Arrays, int]]:
    """Yield `(feed, number of real rows in it)` in the order of `rows` (all, when None).

    With a batch that the last rows don't fill, the last row is repeated and its extra results are to be dropped.
    """
    count = len(next(iter(arrays.values())))
    order = np.arange(count) if rows is None else np.asarray(rows, np.int64)
    step = feeding.rows_per_run()
    for start in range(0, len(order), step):
        part = order[start : start + step]
        real = len(part)
        if feeding.batched:
            if real < step:
                part = np.concatenate([part, np.repeat(part[-1:], step - real)])
            yield {s.name: _as_input(arrays[s.name][part], s.dtype) for s in io.inputs}, real
        else:
            yield {s.name: _as_input(np.asarray(arrays[s.name][int(part[0])]), s.dtype) for s in io.inputs}, 1


def _as_input(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    if dtype == "string":
        return array.astype(object)
    wanted = np.dtype(dtype) if dtype != "bfloat16" else array.dtype
    return array if array.dtype == wanted else array.astype(wanted)


def count_rows(arrays: Mapping[str, NDArray[Any]]) -> int:
    """Number of examples."""
    return len(next(iter(arrays.values())))
