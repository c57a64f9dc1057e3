"""Whether two ONNX models compute the same: inputs to try, made up or real, and outputs compared at the lowest and the highest level."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autotune.data import Arrays, feeds, load_arrays, plan_feeding
from autotune.errors import AutotuneError
from autotune.model import IoContract, TensorSpec, save_onnx
from autotune.passes.onnx_graph import quiet, short_message
from autotune.session import SessionSettings, session_options

if TYPE_CHECKING:
    import onnx
    import onnxruntime as ort

LEVELS = ("disable", "all")
REAL_FEEDS = 2
FLOAT32_TOLERANCE = 1e-3  # of an output's largest magnitude; the same sums in another order differ by less than 1e-5 of it
FLOAT16_TOLERANCE = 2e-2
# Sizes for axes that have a name only: those of first axes, those of the others (each further name 8 more, so that no two are mixed
# up; or all the same). The first that the model runs on is taken.
SIZES_TO_TRY: Sequence[tuple[int, int, int]] = ((2, 16, 8), (1, 16, 8), (1, 1, 0), (2, 64, 0), (1, 256, 0), (1, 2048, 0))


@dataclass(frozen=True)
class Comparison:
    """What came of comparing two models: `fault` says in words where they differ ("" when they don't), `inputs` what they were fed with.

    `error` is the largest difference of a float output, as a share of its largest magnitude.
    """

    fault: str
    error: float
    inputs: str


class NotComparable(Exception):
    """The first model can't be run here, or on no inputs that were tried; the message says why."""


def made_up_feeds(io: IoContract, sizes: tuple[int, int, int], *, seed: int = 0) -> list[Arrays]:
    """Two feeds: floats from 0 to 1 and about 0, whole numbers 0 or 1 (any table has these two rows), booleans, short texts.

    Raises `NotComparable` for an input that is no tensor or has an unknown number of axes.
    """
    first, other, step = sizes
    named: dict[str, int] = {}

    def size(spec: TensorSpec, axis: int, dim: int | str | None) -> int:
        if isinstance(dim, int) and dim >= 0:  # -1 is how some exporters write "any"
            return dim
        label = dim if isinstance(dim, str) else f"{spec.name}[{axis}]"
        if label not in named:
            named[label] = first if axis == 0 else other + step * sum(v >= other for v in named.values())
        return named[label]

    shapes: dict[str, tuple[int, ...]] = {}
    for spec in io.inputs:
        if spec.dtype == "other" or spec.shape is None:
            raise NotComparable(f"input {spec.name!r} is {'no tensor' if spec.dtype == 'other' else 'of unknown rank'}")
        shapes[spec.name] = tuple(size(spec, axis, dim) for axis, dim in enumerate(spec.shape))
    rng = np.random.default_rng(seed)
    return [{s.name: _values(s.dtype, shapes[s.name], rng, around_zero=turn) for s in io.inputs} for turn in (False, True)]


def _values(dtype: str, shape: tuple[int, ...], rng: np.random.Generator, *, around_zero: bool) -> NDArray[Any]:
    if dtype == "string":
        return np.array(rng.choice(["a", "b", "1"], size=shape), dtype=object).reshape(shape)
    if dtype == "bool":
        return np.asarray(rng.random(shape) < 0.5)
    if dtype == "bfloat16":
        import ml_dtypes

        return np.asarray(rng.random(shape)).astype(ml_dtypes.bfloat16)
    wanted = np.dtype(dtype)
    if wanted.kind in "iu":
        return np.asarray(rng.integers(0, 2, shape)).astype(wanted)
    return np.asarray(rng.standard_normal(shape) if around_zero else rng.random(shape)).astype(wanted)


def real_feeds(path: Path, io: IoContract, *, who: str, count: int = REAL_FEEDS) -> list[Arrays]:
    """The first feeds of a data set. Raises `ConfigError` for data that does not fit the inputs."""
    arrays = load_arrays(path, who=who)
    return [feed for feed, _ in islice(feeds(arrays, io, plan_feeding(arrays, io, who=who)), count)]


def run_at(proto: onnx.ModelProto, feeds_: Sequence[Mapping[str, NDArray[Any]]], level: str) -> list[list[Any]]:
    """Outputs of a model on each feed, on the CPU in one thread. Raises what ONNX Runtime raises."""
    with _session(proto, level) as session, quiet():
        return [session.run(None, dict(feed)) for feed in feeds_]


class _session:  # noqa: N801 -- used as a function
    """A session on a model that lies in a folder only as long as the block runs."""

    def __init__(self, proto: onnx.ModelProto, level: str) -> None:
        self.proto = proto
        self.settings = SessionSettings(graph_optimization_level=level, intra_op_num_threads=1)
        self.folder = tempfile.TemporaryDirectory(prefix="autotune-compare-")

    def __enter__(self) -> ort.InferenceSession:
        import onnxruntime as ort

        path = Path(self.folder.name, "model.onnx")
        try:
            copied = type(self.proto)()
            copied.CopyFrom(self.proto)  # saving beside a data file empties the tensors
            save_onnx(copied, path)
            options = session_options(self.settings)
            options.log_severity_level = 4  # what goes wrong is said by who compares
            with quiet():
                return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except BaseException:
            self.folder.cleanup()
            raise

    def __exit__(self, *exception: object) -> None:
        self.folder.cleanup()


def usable_feeds(proto: onnx.ModelProto, io: IoContract, *, data: Path | None = None, who: str) -> tuple[list[Arrays], str]:
    """Feeds that the model runs on, and in words where they are from: real rows when `data` is given, else made up.

    Raises `NotComparable` when the model does not load, or runs on nothing that was tried.
    """
    try:
        opened = _session(proto, "disable")
        with opened as session, quiet():
            if data is not None:
                given = real_feeds(data, io, who=who)
                for feed in given:
                    session.run(None, dict(feed))
                return given, f"real rows ({len(given)} runs)"
            complaint: Exception | None = None
            for sizes in SIZES_TO_TRY:
                made = made_up_feeds(io, sizes)
                try:
                    for feed in made:
                        session.run(None, dict(feed))
                except Exception as error:  # sizes that don't fit each other fail in any operator
                    complaint = complaint or error
                    continue
                return made, f"made-up numbers ({len(made)} runs)"
            raise NotComparable(f"it runs on none of the inputs made up for it ({short_message(complaint, 160) if complaint else 'no sizes'})")
    except (AutotuneError, NotComparable):
        raise
    except Exception as error:  # ONNX Runtime's errors have no common base
        raise NotComparable(f"it does not run here ({short_message(error, 200)})") from error


def compare(
    before: onnx.ModelProto, after: onnx.ModelProto, io: IoContract, *, data: Path | None = None, who: str,
    feeds_: Sequence[Arrays] | None = None, levels: Sequence[str] = LEVELS,
) -> Comparison:  # fmt: skip
    """Run both models on the same inputs, at the lowest and at the highest level (or `levels`), and say where their outputs differ.

    An output that differs between two runs of the first model (random numbers) is compared by its shape only. Raises `NotComparable`
    when the first model can't be run; a second model that can't be is a fault.
    """
    given, words = (list(feeds_), f"{len(feeds_)} runs") if feeds_ is not None else usable_feeds(before, io, data=data, who=who)
    largest = 0.0
    names = [s.name for s in io.outputs]
    for level in levels:
        try:
            wanted, again = run_at(before, given, level), run_at(before, given, level)
        except Exception:  # a level that the runtime can't do for the first model tells nothing about the second
            if level == levels[0]:
                raise
            continue
        try:
            got = run_at(after, given, level)
        except Exception as error:  # as above
            return Comparison(f"it does not run at optimization level {level}: {short_message(error)}", largest, words)
        for old, once_more, new in zip(wanted, again, got, strict=True):
            for name, a, b, c in zip(names, old, once_more, new, strict=True):
                fault, error_ = _difference(a, c, random=_difference(a, b)[0] != "")
                largest = max(largest, error_)
                if fault:
                    return Comparison(f"output {name!r} at optimization level {level} {fault}", largest, words)
    return Comparison("", largest, words)


def _flat(value: Any) -> Iterator[NDArray[Any]]:
    """Arrays in an output: a tensor, or a list of maps as classifiers give."""
    if isinstance(value, Mapping):
        for key in value:
            yield from _flat(value[key])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _flat(part)
    else:
        yield np.asarray(value)


def _difference(wanted: Any, got: Any, *, random: bool = False) -> tuple[str, float]:
    """Say how an output differs ("" for not at all), and by how much of its largest magnitude."""
    old, new = list(_flat(wanted)), list(_flat(got))
    if len(old) != len(new):
        return f"has {len(new)} parts instead of {len(old)}", 0.0
    largest = 0.0
    for a, b in zip(old, new, strict=True):
        if a.size == b.size == 0 and a.ndim == b.ndim and a.dtype == b.dtype:  # the sizes of an empty tensor's other axes are anyone's guess
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"is {b.dtype} {list(b.shape)} instead of {a.dtype} {list(a.shape)}", largest
        if random:
            continue
        if a.dtype.kind not in "fV" and a.dtype.name != "bfloat16":
            if not np.array_equal(a, b):
                return f"has {int((a != b).sum())} of {a.size} values that differ", largest
            continue
        narrow = a.dtype.itemsize == 2
        x, y = a.astype(np.float64), b.astype(np.float64)
        if not np.array_equal(np.isfinite(x), np.isfinite(y)):
            return "is not finite in the same places", largest
        finite = np.isfinite(x)
        if not finite.any():
            continue
        error = float(np.abs(x[finite] - y[finite]).max()) / max(float(np.abs(x[finite]).max()), 1e-6)
        largest = max(largest, error)
        if error > (FLOAT16_TOLERANCE if narrow else FLOAT32_TOLERANCE):
            return f"differs by {error:.2g} of its largest value", largest
    return "", largest


def first_difference(before: onnx.ModelProto, after: onnx.ModelProto, feeds_: Sequence[Arrays]) -> str:
    """Name the first node of the main graph whose value differs between two models that kept the names of values ("" when none is found)."""
    after_names = {name for node in after.graph.node for name in node.output if name}
    nodes = [(node, name) for node in before.graph.node for name in node.output if name in after_names]
    shown = [name for _, name in nodes]
    try:
        old, new = (run_at(_showing(proto, shown), feeds_[:1], LEVELS[0])[0] for proto in (before, after))
    except Exception:  # not every value can be an output; then the operator stays unnamed
        return ""
    for (node, name), a, b in zip(nodes, old, new, strict=True):
        if _difference(a, b)[0]:
            return f"{node.op_type} (node {node.name!r})" if node.name else f"{node.op_type} (which makes {name!r})"
    return ""


def _showing(proto: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """A copy whose outputs are these values, in this order."""
    copied = type(proto)()
    copied.CopyFrom(proto)
    typed = {v.name: v for v in (*proto.graph.output, *proto.graph.value_info)}
    del copied.graph.output[:]
    for name in names:
        added = copied.graph.output.add()
        if name in typed:
            added.CopyFrom(typed[name])
        added.name = name
    return copied
