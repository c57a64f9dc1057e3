"""Every pass on every awkward model: which cells end in a correct model, which say why not, and which are wrong.

    python benchmarks/comparisons/pass_matrix.py [--every] [--models FOLDER] [--passes NAME ...] [--only NAME ...] [--json FILE]

Prints a matrix, model by pass, and below it the words of every cell that is no correct model; with `--json`, writes all of it. Each cell is run
as a sweep runs it: the pass in a child process with limits, then the check that stands before every measurement. The models are those that
tests/failure_kinds/awkward.py makes, or a folder of NAME.onnx and NAME.npz (the rows to calibrate with and compare on, an array an input).
The exit status is 1 when a cell is wrong.

    +  changed, and computes what the input model computes, within what the pass may lose
    =  left as it was, with the reason
    r  refused by name, with what to do
    c  changed; the input model does not run here, so nothing can be compared
    i  changed, and the check before a measurement calls it invalid, with the cause
    D  the input model kills the process that runs it, and so did the pass's own trial run: failed, with the signal
    W  wrong: changed, and computes something else, or left as it was without a reason or without the same bytes
    T  an error that is not said in words, the end of a process, or no end
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.benchmarks.accuracy import load_outputs
from autotune.errors import AutotuneError
from autotune.model import ONNXModelHandler, handler_from_json, ingest_onnx
from autotune.passes.registry import BUILT_IN, get_pass
from autotune.records import Cause
from autotune.session import SessionSettings
from autotune.stages import StageLimits, StageOutcome, StageRunner
from autotune.target import AcceleratorSpec
from autotune.trial import PASS_STAGE

GENERATOR = Path(__file__).resolve().parents[2] / "tests" / "failure_kinds" / "awkward.py"
LIMITS = StageLimits(timeout_s=120.0)
CHECKED_ROWS = 6
EXACT, HALF, EIGHT_BITS, FOUR_BITS, ANY = 1e-3, 2e-2, 0.2, 0.5, float("inf")
WRONG = ("W", "T")


@dataclass(frozen=True)
class Column:
    """A pass with a config, and how much it may change outputs: the norm of the difference as a share of the outputs' norm."""

    name: str
    pass_name: str
    config: Mapping[str, Any]
    bound: float = EXACT


@dataclass(frozen=True)
class Cell:
    """How a pass ended on a model: one letter, the words, and the largest difference of an output where it was compared."""

    model: str
    column: str
    letter: str
    words: str = ""
    error: float | None = None


# torch is left out: hardly a pass here needs it, and every fork pays for what its server holds.
PRELOAD = (
    *("numpy", "numpy.random", "numpy.ma", "onnx", "onnxruntime", "onnxruntime.quantization", "onnxruntime.tools.symbolic_shape_infer"),
    *("onnxruntime.transformers.optimizer", "onnxscript.optimizer", "onnxscript.version_converter", "onnxslim", "autotune.benchmarks.stages"),
    *("autotune.passes.run", *(f"autotune.passes.{module}" for module in BUILT_IN.values())),
)
COLUMNS = (
    Column("opset", "OnnxOpsetUpgrade", {}),
    Column("fixed", "OnnxDynamicToFixedShape", {}),
    Column("slim", "OnnxModelOptimizer", {}),
    Column("prune", "OnnxPruning", {"sparsity": 0.3}, ANY),
    Column("fuse", "OrtTransformersOptimization", {}),
    Column("fp16", "OnnxFloatToFloat16", {}, HALF),
    Column("mixed", "OnnxMixedPrecision", {}, HALF),
    Column("smooth", "SmoothQuant", {"unfoldable": "insert"}),
    Column("static", "OnnxStaticQuantization", {}, EIGHT_BITS),
    Column("dynamic", "OnnxDynamicQuantization", {}, EIGHT_BITS),
    Column("block", "OnnxBlockwiseQuantization", {"op_types_to_quantize": "all"}, FOUR_BITS),
    Column("data", "OnnxExternalData", {"size_threshold": 128}),
    Column("session", "OrtPerfTuning", {}),
)
MORE_COLUMNS = (
    Column("ort", "OnnxModelOptimizer", {"optimizer": "ort_basic"}),
    Column("script", "OnnxModelOptimizer", {"optimizer": "onnxscript"}),
    Column("zeros", "OnnxPruning", {"method": "unstructured", "sparsity": 0.5}, ANY),
    Column("qop", "OnnxStaticQuantization", {"quant_format": "QOperator"}, EIGHT_BITS),
    Column("one", "OnnxStaticQuantization", {"per_channel": False, "quant_preprocess": False}, EIGHT_BITS),
    Column("worst", "OnnxStaticQuantization", {"exclude_top_k": 1, "calibrate_method": "entropy"}, EIGHT_BITS),
    Column("uint8", "OnnxDynamicQuantization", {"weight_type": "uint8", "op_types_to_quantize": "all+Conv"}, EIGHT_BITS),
    Column("hqq", "OnnxBlockwiseQuantization", {"algorithm": "hqq"}, FOUR_BITS),
    Column("inside", "OnnxExternalData", {"size_threshold": 1 << 30}),
)


@dataclass(frozen=True)
class Input:
    """A model that the passes get: its handler as JSON, the rows, and what the check said of it as it is."""

    name: str
    model: ONNXModelHandler
    rows: Path
    outputs: Path | None  # None where it does not run
    died: bool = False
    delicate: bool = False


class Matrix:
    """Runs cells, each in child processes of one server, under a folder that it may fill."""

    def __init__(self, runner: StageRunner, work: Path) -> None:
        self.runner, self.work, self.count = runner, work, 0

    def open(self, name: str, onnx_file: Path, rows: Path, *, delicate: bool = False) -> Input:
        """Take a model in and check it as the baseline of a sweep is checked."""
        folder = self.work / name / "input"
        folder.mkdir(parents=True)
        model = ingest_onnx(onnx_file, folder).with_session(SessionSettings(intra_op_num_threads=1))
        checked, out = self._check(model, None, rows)
        sound = checked.ok and checked.value is not None and checked.value["verdict"] == "ok"
        return Input(name, model, rows, out if sound else None, checked.cause is Cause.SIGNAL, delicate)

    def cell(self, given: Input, column: Column) -> Cell:
        """Run one pass on one model and judge what came of it."""
        try:
            config = self._config(given, column)
            get_pass(column.pass_name).resolve(AcceleratorSpec(), config)
        except AutotuneError as error:
            return Cell(given.name, column.name, "r", str(error))
        out = self._folder()
        args = {
            "pass": column.pass_name,
            "config": config,
            "accelerator": ["cpu", "CPUExecutionProvider"],
            "model": given.model.to_json(),
            "out": str(out),
        }
        ended = self.runner.run(PASS_STAGE, args, folder=self._folder(), limits=LIMITS)
        if ended.value is None:
            died = given.died and ended.cause is Cause.SIGNAL
            letter = "D" if died else "r" if ended.cause is Cause.EXCEPTION and said_in_words(ended.output_tail) else "T"
            return Cell(given.name, column.name, letter, ended.message if letter == "r" else f"{ended.cause}: {ended.message}")
        return self._judged(given, column, handler_from_json(ended.value["model"]))

    def _judged(self, given: Input, column: Column, result: Any) -> Cell:
        if result.notes.get("changed") is False:
            reason, same = result.notes.get("reason", ""), result.digest == given.model.digest
            if reason and same:
                return Cell(given.name, column.name, "=", reason)
            return Cell(given.name, column.name, "W", f"says unchanged with the reason {reason!r}, and has {'the same' if same else 'other'} bytes")
        if given.outputs is None:
            return Cell(given.name, column.name, "c", "the input model does not run here")
        checked, out = self._check(result, given, given.rows)
        if checked.value is None:
            return Cell(given.name, column.name, "T", f"its result: {checked.cause}: {checked.message}")
        if checked.value["verdict"] != "ok":
            return Cell(given.name, column.name, "i", f"{checked.value['cause']}: {checked.value['message']}")
        error = difference(load_outputs(given.outputs / "outputs.npz").arrays, load_outputs(out / "outputs.npz").arrays)
        takes_digits = column.bound != EXACT and column.pass_name != "OnnxMixedPrecision"  # which looks at the ranges first
        bound = ANY if given.name == "random_output" or (given.delicate and takes_digits) else column.bound
        loose = max(bound, HALF) if "float16" in given.name else bound
        letter = "+" if error <= loose else "W"
        return Cell(given.name, column.name, letter, "" if letter == "+" else f"outputs differ by {error:.2g} of their norm", error)

    def _config(self, given: Input, column: Column) -> dict[str, Any]:
        contract = get_pass(column.pass_name).contract
        config = {name: str(given.rows) for name in contract.data} | dict(column.config)
        if column.pass_name == "OnnxDynamicToFixedShape":
            named = {d for s in given.model.io.inputs for d in s.shape or () if isinstance(d, str)}
            arrays = np.load(given.rows)
            found = {}
            for spec in given.model.io.inputs:
                batched = len(spec.shape or ()) == arrays[spec.name].ndim
                shape = (1, *arrays[spec.name].shape[1:]) if batched else arrays[spec.name].shape[1:]
                found.update({d: int(n) for d, n in zip(spec.shape or (), shape, strict=False) if d in named})
            config |= {"dim_param": found} if found else {"input_shapes": self._whole_shapes(given)}
        return config

    def _whole_shapes(self, given: Input) -> dict[str, list[int]]:
        arrays = np.load(given.rows)
        shapes = {}
        for spec in given.model.io.inputs:
            array = arrays[spec.name]
            shapes[spec.name] = [1, *array.shape[1:]] if len(spec.shape or ()) == array.ndim else list(array.shape[1:])
        return shapes

    def _check(self, model: Any, baseline: Input | None, rows: Path) -> tuple[StageOutcome, Path]:
        out = self._folder()
        count = len(next(iter(np.load(rows).values())))
        args: dict[str, Any] = {
            "model": model.to_json(),
            "baseline": baseline.model.to_json() if baseline else None,
            "data": str(rows),
            "rows": list(range(min(count, CHECKED_ROWS))),
            "batch_size": 1,
            "out": str(out),
        }
        return self.runner.run("autotune.benchmarks.stages:check", args, folder=self._folder(), limits=LIMITS), out

    def _folder(self) -> Path:
        self.count += 1
        folder = self.work / f"{self.count:05d}"
        folder.mkdir(parents=True)
        return folder


def said_in_words(output: str) -> bool:
    """Whether the last traceback that a stage printed is of an error that is meant for users."""
    last = output.rpartition("Traceback (most recent call last)")[2]
    raised = next((line for line in last.splitlines()[1:] if line and not line.startswith((" ", "\t"))), "")
    return raised.startswith("autotune.errors.")


def difference(wanted: Mapping[str, NDArray[Any]], got: Mapping[str, NDArray[Any]]) -> float:
    """Largest norm of a difference as a share of the output's norm, values that are not finite left out; of whole numbers the share that differs."""
    largest = 0.0
    for name, one in wanted.items():
        other = got[name]
        if one.shape != other.shape:
            return float("inf")
        if one.dtype.kind != "f":
            largest = max(largest, float((one != other).mean()) if one.size else 0.0)
            continue
        kept = np.isfinite(one) & np.isfinite(other)
        a, b = one[kept].astype(np.float64), other[kept].astype(np.float64)
        largest = max(largest, float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(a)), 1e-12))
    return largest


def generator() -> ModuleType:
    """The module that makes the models; it stands among the tests."""
    spec = importlib.util.spec_from_file_location("awkward_models", GENERATOR)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up here
    spec.loader.exec_module(module)
    return module


def open_model(matrix: Matrix, models: Path, name: str, facts: Mapping[str, Any]) -> Input:
    """A model of a folder; `facts` are what the generator says of its own models."""
    return matrix.open(name, models / f"{name}.onnx", models / f"{name}.npz", delicate=getattr(facts.get(name), "delicate", False))


def run_matrix(models: Path, facts: Mapping[str, Any], columns: Sequence[Column], work: Path, only: Sequence[str] = ()) -> list[Cell]:
    """All cells over the models of a folder."""
    names = [p.stem for p in sorted(models.glob("*.onnx")) if not only or p.stem in only]
    cells = []
    with StageRunner(PRELOAD) as runner:
        matrix = Matrix(runner, work)
        for name in names:
            given = open_model(matrix, models, name, facts)
            cells += [matrix.cell(given, column) for column in columns]
    return cells


def grid(cells: Sequence[Cell]) -> list[str]:
    """The matrix, and what its letters count to."""
    columns, models = (list(dict.fromkeys(getattr(c, field) for c in cells)) for field in ("column", "model"))
    letters = {(c.model, c.column): c.letter for c in cells}
    lines = [f"{'':26}" + "".join(f"{c:>8}" for c in columns)]
    lines += [f"{m:26}" + "".join(f"{letters.get((m, c), ''):>8}" for c in columns) for m in models]
    counts = {letter: sum(c.letter == letter for c in cells) for letter in "+=rciDWT"}
    return [*lines, "", ", ".join(f"{letter} {count}" for letter, count in counts.items())]


def table(cells: Sequence[Cell]) -> str:
    """The matrix, and the words of what is no correct model, equal words together."""
    lines = grid(cells)
    for letter in "WTDic=r":
        told: dict[tuple[str, str], list[str]] = {}
        for cell in cells:
            if cell.letter == letter:
                told.setdefault((cell.column, cell.words), []).append(cell.model)
        lines += [f"{letter} {column}: {', '.join(names)}: {words}" for (column, words), names in told.items()]
    return "\n".join(lines)


def chosen(passes: Iterable[str], every: bool) -> list[Column]:
    known = [*COLUMNS, *(MORE_COLUMNS if every else ())]
    wanted = set(passes)
    return [c for c in known if not wanted or wanted & {c.name, c.pass_name}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="folder of NAME.onnx and NAME.npz; without it, models are made")
    parser.add_argument("--passes", nargs="*", default=[], help="names of passes or columns; without any, all")
    parser.add_argument("--only", nargs="*", default=[], help="names of models; without any, all")
    parser.add_argument("--every", action="store_true", help="more columns: other parameters of the same passes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="autotune-matrix-") as name:
        folder, facts = options.models, {}
        if folder is None:
            folder = Path(name, "models")
            facts = generator().write_models(folder, options.only or None)
        cells = run_matrix(folder, facts, chosen(options.passes, options.every), Path(name, "work"), options.only)
    print(table(cells))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=2) + "\n")
    return int(any(cell.letter in WRONG for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
