"""Passes on real models: size, latency beside the float model at one and two threads, score over all rows, share changed, and how it ended.

    python benchmarks/comparisons/real_models.py --models FOLDER [--only NAME ...] [--seconds 3] [--out OUT] [--write [docs/real-models.md]]

FOLDER holds a folder for each model with `model.onnx`, `eval.npz` (one array per input, and `labels`), `calib.npz` (inputs only) and
`meta.json` (its `metric`, and `task`, which chooses the chains of passes below). Each pass runs as in a sweep: in a child process with limits,
then the check that stands before every measurement. Prints the tables and writes `real_models.json` into OUT; with `--write`, a page for people.
What is measured is kept in OUT row by row, so that the same command goes on where a run was stopped, and measures anew only what a changed
model, chain, pass or library asks for.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from model_folders import LIMITS, ModelFolder, check_model, folders_in, score_model, time_model  # type: ignore[import-not-found]  # beside this program
from pass_matrix import PRELOAD, said_in_words  # type: ignore[import-not-found]  # beside this program

from autotune.benchmarks.lane import lane
from autotune.digest import digest_of, digest_tree, dump_json
from autotune.errors import AutotuneError
from autotune.model import ONNXModelHandler, handler_from_json, ingest_onnx
from autotune.passes.registry import get_pass
from autotune.session import SessionSettings
from autotune.stages import StageRunner
from autotune.target import AcceleratorSpec, library_versions, surroundings
from autotune.trial import PASS_STAGE

FLOAT = "float"
THREADS = (1, 2)
SCORE_THREADS = 2
PAST_STEPS = 64  # before the one that is timed, for a model that is given the past
PAST_ROWS = 8


@dataclass(frozen=True)
class Chain:
    """Passes with their configs, one after another."""

    steps: tuple[tuple[str, Mapping[str, Any]], ...]

    def words(self) -> str:
        return " > ".join(f"{name}({', '.join(f'{k}={v}' for k, v in config.items())})" if config else name for name, config in self.steps)


def chain(*steps: tuple[str, Mapping[str, Any]] | str) -> Chain:
    return Chain(tuple((s, {}) if isinstance(s, str) else s for s in steps))


def static(**config: Any) -> tuple[str, dict[str, Any]]:
    return "OnnxStaticQuantization", config


def dynamic(**config: Any) -> tuple[str, dict[str, Any]]:
    return "OnnxDynamicQuantization", config


def blocks(**config: Any) -> tuple[str, dict[str, Any]]:
    return "OnnxBlockwiseQuantization", config


UPGRADE = ("OnnxOpsetUpgrade", {"target_opset": 17})
FUSED = ("OrtTransformersOptimization", {"attention": False, "embed_layer_norm": False})
PRODUCTS = {"op_types_to_quantize": "matmul", "op_types_to_exclude_output_quantization": "matmul"}
WITH_CONVS = {**PRODUCTS, "op_types_to_quantize": "conv+matmul"}
SMALL = {**PRODUCTS, "op_types_to_quantize": "matmul+Gather"}
BASIC = [chain(dynamic()), chain(static())]
AT_16_KHZ = ("OnnxDynamicToFixedShape", {"fixed_inputs": {"sr": 16000}})
IN_BODIES = [*BASIC, chain(AT_16_KHZ, static()), chain(AT_16_KHZ, static(exclude_top_k=0.25)), chain(AT_16_KHZ, dynamic())]
# By the beginning of a model's task; the longest that fits counts.
CHAINS: Mapping[str, Sequence[Chain]] = {
    "": BASIC,
    "digits": [*BASIC, chain("OnnxFloatToFloat16")],
    "mnist": [*BASIC, chain("OnnxFloatToFloat16"), chain(("OnnxPruning", {"sparsity": 0.2}))],
    "efficientnet": [
        *BASIC,
        chain(static(per_channel=False)),
        chain(static(calibrate_method="percentile")),
        chain(static(calibrate_method="entropy")),
        chain(static(exclude_top_k=0.03)),
        chain(static(exclude_top_k=0.1)),
        chain(static(op_types_to_quantize="conv")),
    ],
    "ocr_rec": [
        chain(dynamic(op_types_to_quantize="matmul", per_channel=False)),
        chain(static()),
        chain(static(per_channel=False)),
        chain(UPGRADE, static()),
        chain(UPGRADE, static(calibrate_method="percentile")),
        chain(UPGRADE, static(op_types_to_quantize="conv+matmul")),
        chain(UPGRADE, static(**WITH_CONVS)),
        chain(UPGRADE, static(**WITH_CONVS, calibrate_method="percentile")),
        chain(UPGRADE, static(op_types_to_quantize="conv+matmul", exclude_top_k=0.1)),
    ],
    "minilm": [
        chain("OrtTransformersOptimization"),
        chain(dynamic(op_types_to_quantize="matmul")),
        chain(static()),
        chain(static(op_types_to_quantize="matmul")),
        chain(static(**PRODUCTS)),
        chain(FUSED, static(**SMALL)),
        chain(static(**SMALL, exclude_top_k=0.1)),
        chain(("SmoothQuant", {"unfoldable": "insert"}), static(**PRODUCTS)),
        chain(blocks(accuracy_level=4)),
    ],
    "smollm2": [
        chain(blocks()),
        chain(blocks(accuracy_level=4)),
        chain(blocks(algorithm="k_quant", accuracy_level=4)),
        chain(blocks(bits=8)),
    ],
    "smollm2_cache": [chain(blocks()), chain(blocks(accuracy_level=4)), chain(blocks(bits=8))],
    "speech_vad": IN_BODIES,
    "speech_vad_half": [*BASIC, chain("OnnxModelOptimizer", static())],
    "speech_vad_sequence": [*BASIC, chain(static(calibrate_method="percentile"))],
    "magika": [
        *BASIC,
        chain(static(op_types_to_quantize="matmul")),
        chain(static(op_types_to_quantize="conv+matmul")),
        chain(static(op_types_to_quantize="conv+matmul", calibrate_method="percentile", per_channel=False)),
        chain(static(exclude_top_k=0.25)),
    ],
}


def chains_for(task: str) -> Sequence[Chain]:
    """The chains of the longest task that the model's begins with."""
    return CHAINS[max((known for known in CHAINS if task.startswith(known)), key=len)]


@dataclass
class Row:
    """How a chain ended on a model, as plain data."""

    model: str
    chain: str
    key: str
    status: str = "ok"
    message: str = ""
    size_bytes: int = 0
    build_s: float = 0.0
    seconds: float = 0.0
    coverage: dict[str, Any] = field(default_factory=dict)
    score: dict[str, Any] | None = None
    latency: dict[str, Any] = field(default_factory=dict)  # by number of threads


@dataclass(frozen=True)
class Place:
    """Where rows are kept, and for how long at most each is timed at each number of threads."""

    out: Path
    seconds: float
    threads: Sequence[int] = THREADS

    def key(self, folder: ModelFolder, steps: Chain) -> str:
        """What a row belongs to."""
        passes = [[name, get_pass(name).contract.version, dict(config)] for name, config in steps.steps]
        model = {f.name: digest_tree(f) for f in sorted(folder.path.glob("*")) if f.suffix in (".onnx", ".data", ".npz")}
        facts = {"passes": passes, "model": model, "seconds": self.seconds, "threads": list(self.threads), "libraries": library_versions()}
        return digest_of({**facts, "metric": folder.metric})

    def path(self, row: Row) -> Path:
        return self.out / row.model / "rows" / f"{row.key[:24]}.json"

    def known(self, row: Row) -> Row | None:
        """The row as it was measured before, if it was."""
        try:
            kept = Row(**json.loads(self.path(row).read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return kept if kept.key == row.key else None

    def keep(self, row: Row) -> None:
        path = self.path(row)
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        fresh.write_text(dump_json(vars(row)))
        fresh.replace(path)


class Bench:
    """Measures the chains of one model, each row in children of one server, in a folder that goes when it is done."""

    def __init__(self, runner: StageRunner, folder: ModelFolder, place: Place) -> None:
        self.runner, self.folder, self.place = runner, folder, place
        self.work = place.out / folder.name / "work"
        self.base: ONNXModelHandler | None = None
        self.timed_on = folder.path / "eval.npz"
        self.before: dict[int, list[float]] = {count: [] for count in place.threads}  # the float model's latencies so far, ms

    def rows(self) -> Iterator[tuple[Row, bool]]:
        """Each row, the float model's first, and whether it was measured now."""
        self.close()
        for steps in (Chain(()), *chains_for(self.folder.task)):
            row = Row(self.folder.name, steps.words() or FLOAT, self.place.key(self.folder, steps))
            known = self.place.known(row)
            if known is None:
                began = time.monotonic()
                self._measure(row, steps)
                row.seconds = time.monotonic() - began
                self.place.keep(row)
            yield known or row, known is None
        self.close()

    def close(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)

    def _measure(self, row: Row, steps: Chain) -> None:
        base, outputs = self._float()
        model = self._built(row, steps, base)
        if model is None:
            return
        row.size_bytes = model.size_bytes
        own = not steps.steps
        place = self.work / digest_of(row.chain)[:8]
        checked = check_model(self.runner, at(model, 1), None if own else at(base, 1), self.folder, place / "check")
        row.status, row.message = checked.status, f"{checked.cause}: {checked.message}" if checked.cause else row.message
        if checked.value is None:
            return
        scored = score_model(self.runner, at(model, SCORE_THREADS), self.folder, place / "score", baseline=None if own else outputs)
        if scored.value is None:
            row.status, row.message = scored.status, f"{scored.cause}: {scored.message}"
            return
        row.score = scored.value["metric"]
        for count in self.place.threads:
            beside = None if own else at(base, count)
            timed = time_model(
                self.runner, at(model, count), beside, self.timed_on, place / f"time{count}", seconds=self.place.seconds, before=self.before[count]
            )
            if timed.value is None:
                row.status, row.message = timed.status, f"{timed.cause}: {timed.message}"
                return
            row.latency[str(count)] = timed.value["metrics"]["latency"]
            self.before[count].append(timed.value["baseline_metrics"]["latency"]["value"])
        shutil.rmtree(place, ignore_errors=True)

    def _float(self) -> tuple[ONNXModelHandler, Path]:
        """The float model, its outputs on all rows, and what to time on; made once."""
        outputs = self.work / "float" / "outputs.npz"
        if self.base is None:
            (self.work / "input").mkdir(parents=True, exist_ok=True)
            self.base = ingest_onnx(self.folder.path / "model.onnx", self.work / "input")
            scored = score_model(self.runner, at(self.base, SCORE_THREADS), self.folder, outputs.parent, baseline=None)
            if scored.value is None:
                raise SystemExit(f"{self.folder.name}: the float model can't be scored: {scored.cause}: {scored.message}")
            if takes_the_past(self.folder.path / "eval.npz"):
                self.timed_on = self.work / "one_step.npz"
                command = [sys.executable, __file__, "--one-step", str(self.base.path), str(self.folder.path / "eval.npz"), str(self.timed_on)]
                subprocess.run(command, check=True)
        return self.base, outputs

    def _built(self, row: Row, steps: Chain, base: ONNXModelHandler) -> ONNXModelHandler | None:
        """What the chain makes of the model, or None with the row saying why."""
        model, reasons = base, []
        for number, (name, config) in enumerate(steps.steps):
            data = {key: str(self.folder.path / "calib.npz") for key in get_pass(name).contract.data}
            try:
                get_pass(name).resolve(AcceleratorSpec(), {**data, **config})
            except AutotuneError as error:
                row.status, row.message = "refused", str(error)
                return None
            where = self.work / "built" / f"{digest_of(row.chain)[:8]}-{number}"
            shutil.rmtree(where, ignore_errors=True)
            (where / "files").mkdir(parents=True)
            args = {
                "pass": name,
                "config": {**data, **config},
                "accelerator": ["cpu", "CPUExecutionProvider"],
                "model": model.to_json(),
                "out": str(where / "files"),
                "findings": str(self.work / "findings"),
            }
            self.runner.start()
            with lane("CPUExecutionProvider", exclusive=False):
                ended = self.runner.run(PASS_STAGE, args, folder=where, limits=LIMITS)
            row.build_s += ended.seconds
            if ended.value is None:
                row.status = "refused" if said_in_words(ended.output_tail) else "failed"
                row.message = ended.message if row.status == "refused" else f"{ended.cause}: {ended.message}"
                return None
            made = handler_from_json(ended.value["model"])
            assert isinstance(made, ONNXModelHandler)
            if made.notes.get("changed") is False:
                reasons.append(f"{name}: {made.notes.get('reason', '')}")
            row.coverage = dict(made.notes.get("coverage") or row.coverage)
            model = made
        if steps.steps and len(reasons) == len(steps.steps):
            row.status, row.message, row.size_bytes = "unchanged", "; ".join(reasons), model.size_bytes
            return None
        row.message = "; ".join(reasons)
        return model


def at(model: ONNXModelHandler, threads: int) -> ONNXModelHandler:
    """The model to be opened with so many threads."""
    return model.with_session(SessionSettings(intra_op_num_threads=threads))


def takes_the_past(data: Path) -> bool:
    """Whether some array has an axis of length 0, as a model's past has before the first step."""
    with np.load(data, allow_pickle=False) as arrays:
        return any(0 in arrays[name].shape for name in arrays.files)


def write_one_step(model: Path, data: Path, target: Path) -> None:
    """Write rows of one token after 64, with the past that the float model leaves; runs in a process of its own."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    with np.load(data, allow_pickle=False) as file:
        given = {name: file[name][:PAST_ROWS] for name in file.files if name != "labels"}
    outputs = [o.name for o in session.get_outputs()]
    rows: list[dict[str, Any]] = []
    for row in range(len(given["input_ids"])):
        feed = {name: a[row : row + 1] for name, a in given.items()}
        feed["input_ids"] = feed["input_ids"][:, :PAST_STEPS]
        feed["attention_mask"] = np.ones((1, PAST_STEPS), np.int64)
        left = {name.replace("present", "past_key_values"): a for name, a in zip(outputs, session.run(None, feed), strict=True)}
        token = given["input_ids"][row : row + 1, PAST_STEPS : PAST_STEPS + 1]
        rows.append({**{n: left[n] for n in given if n in left}, "input_ids": token, "attention_mask": np.ones((1, PAST_STEPS + 1), np.int64)})
    np.savez(target, allow_pickle=False, **{name: np.concatenate([r[name] for r in rows]) for name in rows[0]})


# ---- tables


def megabytes(size: int) -> str:
    return f"{size / 1e6:.3g}" if size else "-"


def ratio_cell(value: Mapping[str, Any] | None) -> str:
    """The ratio to the float model's latency, with its interval."""
    ratio = (value or {}).get("ratio")
    return f"{ratio['value']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})" if ratio else "-"


def change_cell(score: Mapping[str, Any] | None) -> str:
    """What the score gained, with its interval: in points where it is a share."""
    delta = (score or {}).get("delta")
    if not score or not delta:
        return "-"
    factor, digits, unit = (100, 2, " pt") if score["unit"] == "share" else (1, 4, "")
    value, low, high = (delta[k] * factor + 0.0 for k in ("value", "low", "high"))
    return f"{value:+.{digits}f}{unit} ({low:+.{digits}f} to {high:+.{digits}f})"


def coverage_cell(coverage: Mapping[str, Any]) -> str:
    """Shares of operators and of bytes of weights that the last pass changed, and nodes with weights quantized where it tells."""
    parts = []
    for what, name in (("operators", "operators"), ("weight_bytes", "weights")):
        if coverage.get(f"of_{what}"):
            parts.append(f"{name} {coverage[what] / coverage[f'of_{what}']:.0%}")
    if coverage.get("of_nodes"):
        parts.append(f"{coverage['nodes']} of {coverage['of_nodes']} nodes")
    return ", ".join(parts) or "-"


def table(rows: Sequence[Row], threads: Sequence[int] = THREADS) -> str:
    """One model's rows for people, and below them the words of those that have some."""
    base = rows[0]
    timed = " | ".join(f"ratio, {n} thread{'s' if n > 1 else ''}" for n in threads)
    lines = [
        f"| passes | MB | {timed} | score (95 %) | change of score | changed by the last pass | status |",
        "|" + "---|" * (6 + len(threads)),
    ]
    for row in rows:
        score = row.score
        shown = f"{score['value']:.4f} ({score['low']:.4f}-{score['high']:.4f})" if score else "-"
        if row is base:
            times = [f"{row.latency[str(n)]['value']:.3f} ms" if str(n) in row.latency else "-" for n in threads]
        else:
            times = [ratio_cell(row.latency.get(str(n))) for n in threads]
        change = "-" if row is base else change_cell(score)
        name = row.chain.replace("|", "\\|")
        size = megabytes(row.size_bytes)
        lines.append(f"| {name} | {size} | {' | '.join(times)} | {shown} | {change} | {coverage_cell(row.coverage)} | {row.status} |")
    told = [f"- {row.chain}: {row.status}: {' '.join(row.message.split())}" for row in rows if row.message]
    return "\n".join([*lines, *([""] if told else []), *told])


PAGE = """# Passes on real models

Made by `benchmarks/comparisons/real_models.py`, row by row. Each chain of passes runs as in a sweep, in a child process; then its result is
checked, scored over all evaluation rows, and timed beside the float model, batch 1, in fresh sessions in turns. A ratio is the latency over the
float model's, paired, with its 95 % interval: below 1 is faster. The change of the score is paired by row, again with its 95 % interval, in
points where the score is a share; perplexity is given as its logarithm, the loss in nats a token. *refused* and *unchanged* say below why;
*invalid* is what a sweep would not measure either. No search chose these rows: they are one config each, the good and the bad, and
[the main job](main-job.md) has what a sweep finds.

{machine}

{sections}
"""


def page(content: Mapping[str, Any]) -> str:
    """The page for people, from what is written to `real_models.json`."""
    here = content["surroundings"]
    versions = ", ".join(f"{k} {v}" for k, v in here["versions"].items())
    machine = f"Machine: {here['cpu_model']}, {here['effective_cpus']} CPUs ({', '.join(here['cpu_flags'])}); Python {here['python']}; {versions}."
    return PAGE.format(machine=machine, sections="\n\n".join(sections(content))).rstrip() + "\n"


def sections(content: Mapping[str, Any]) -> list[str]:
    """A heading and a table for each model."""
    found = []
    for model in content["models"]:
        rows = [Row(**row) for row in model["rows"]]
        better = "higher is better" if model["higher_is_better"] else "lower is better"
        what = f" Timed: one token after {PAST_STEPS}." if model["takes_the_past"] else ""
        heading = f"## {model['name']}\n\nScore: {model['metric']}, {better}, over {model['evaluation_rows']} rows.{what}"
        found.append(f"{heading}\n\n{table(rows, content['threads'])}")
    return found


def run(folders: Sequence[ModelFolder], place: Place) -> dict[str, Any]:
    """Measure all rows, telling each as it ends; what is there after each model is in `real_models.json`."""
    content: dict[str, Any] = {"surroundings": surroundings().to_json(), "threads": list(place.threads), "seconds": place.seconds, "models": []}
    with StageRunner(PRELOAD) as runner:
        for folder in folders:
            rows = []
            for row, fresh in Bench(runner, folder, place).rows():
                rows.append(vars(row))
                ratios = " ".join(ratio_cell(row.latency.get(str(n))) for n in place.threads if row.chain != FLOAT)
                told = f"{row.score['value']:.4f}" if row.score else row.message
                print(f"{row.model}: {row.chain}: {row.status} {ratios} {told} [{row.seconds:.0f} s{'' if fresh else ', kept'}]", flush=True)
            facts = {"name": folder.name, "metric": folder.metric.rpartition(":")[2].replace("_", " "), "evaluation_rows": folder.row_count()}
            better, past = folder.metric_facts().higher_is_better, takes_the_past(folder.path / "eval.npz")
            content["models"].append({**facts, "higher_is_better": better, "takes_the_past": past, "rows": rows})
            (place.out / "real_models.json").write_text(dump_json(content))
    return content


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="folder with a folder for each model")
    parser.add_argument("--only", nargs="*", default=[], help="names of models; without any, all")
    parser.add_argument("--seconds", type=float, default=3.0, help="bound on each timing; there is one for each number of threads")
    parser.add_argument("--out", type=Path, default=Path("runs/real_models"))
    parser.add_argument("--write", type=Path, nargs="?", const=Path("docs/real-models.md"), help="write the page for people")
    parser.add_argument("--one-step", nargs=3, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_step:
        write_one_step(*options.one_step)
        return 0
    if options.models is None:
        parser.error("--models is needed")
    folders = folders_in(options.models, options.only)
    if not folders:
        parser.error(f"no folder with model.onnx, eval.npz, calib.npz and meta.json in {options.models}")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    content = run(folders, Place(out, options.seconds))
    print("\n\n".join(sections(content)))
    if options.write:
        options.write.write_text(page(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
