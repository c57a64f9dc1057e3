"""The main job on real models, beside what ONNX Runtime's own quantizer makes of them in one call; all measured in one run.

    python benchmarks/comparisons/main_job.py FOLDER... [--trials 30] [--threads 1] [--out OUT] [--docs docs/main-job.md]

A FOLDER holds `model.onnx`, `eval.npz` (one array per input, and `labels`), `calib.npz` (inputs only) and `meta.json` (its `metric`).
For each: `autotune run` with default settings, `autotune verify`, and then, in fresh sessions and over all evaluation rows, the
delivered model and two references against the float model: `quantize_dynamic` (uint8 weights, default operators) and
`quantize_static` after pre-processing (QDQ, uint8 activations, int8 weights per channel, min-max over at most 100 rows). Prints a
table, writes `main_job.json` into OUT, and a page for people with `--docs`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model_folders import ModelFolder, score_model, time_model  # type: ignore[import-not-found]  # beside this program

from autotune.data import count_rows, load_arrays
from autotune.digest import dump_json
from autotune.model import ONNXModelHandler, ingest_onnx
from autotune.session import SessionSettings
from autotune.stages import StageRunner
from autotune.target import surroundings

REFERENCES = ("dynamic", "static")


def quantize(folder: Path, variant: str, target: Path) -> None:
    """Make a reference model; runs in a process of its own."""
    from onnxruntime import quantization as q
    from onnxruntime.quantization.shape_inference import quant_pre_process

    if variant == "dynamic":
        q.quantize_dynamic(folder / "model.onnx", target, weight_type=q.QuantType.QUInt8)
        return
    from autotune.data import feeds, plan_feeding

    io = ONNXModelHandler.from_folder(folder).io
    arrays = load_arrays(folder / "calib.npz")
    rows = range(min(100, count_rows(arrays)))

    class Reader(q.CalibrationDataReader):  # type: ignore[misc] # onnxruntime has no types
        def __init__(self) -> None:
            self.feeds = (feed for feed, _ in feeds(arrays, io, plan_feeding(arrays, io), list(rows)))

        def get_next(self) -> Any:
            return next(self.feeds, None)

    prepared = target.with_suffix(".pre.onnx")
    try:
        quant_pre_process(str(folder / "model.onnx"), str(prepared), auto_merge=True)
    except Exception:  # shapes that can't be inferred: quantize the model as it is
        shutil.copyfile(folder / "model.onnx", prepared)
    q.quantize_static(
        prepared,
        target,
        Reader(),
        quant_format=q.QuantFormat.QDQ,
        activation_type=q.QuantType.QUInt8,
        weight_type=q.QuantType.QInt8,
        per_channel=True,
    )
    prepared.unlink()


def reference_model(folder: Path, variant: str, out: Path) -> tuple[Path | None, str]:
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--quantize", str(folder), variant, str(out / "model.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0 and (out / "model.onnx").exists():
        return out, ""
    return None, (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:120]


def measured(
    runner: StageRunner, model: ONNXModelHandler, base: ONNXModelHandler, folder: ModelFolder, place: Path, baseline: Path | None,
    before: Sequence[float],
) -> dict[str, Any]:  # fmt: skip
    """Score over all rows and latency against the float model, or the words of what went wrong. `before`: see `time_model`."""
    found: dict[str, Any] = {"size_bytes": model.size_bytes}
    data = folder.path / "eval.npz"
    for name in ("accuracy", "latency"):
        if name == "accuracy":
            ended = score_model(runner, model, folder, place / name, baseline=baseline)
        else:
            ended = time_model(runner, model, base if baseline else None, data, place / name, seconds=10, before=before)
        if ended.value is None:
            found["fault"] = f"{ended.cause}: {ended.message}"
            return found
        found[name] = ended.value["metric"] if name == "accuracy" else ended.value["metrics"]["latency"]
    return found


def one(given: ModelFolder, out: Path, *, trials: int, threads: int, reuse: bool) -> dict[str, Any]:
    folder, name = given.path, given.name
    began = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "autotune",
        "run",
        "--model",
        folder,
        "--threads",
        threads,
        "--trials",
        trials,
        "--seed",
        0,
        "--out",
        out / name,
        "--json",
    ]
    command += [] if reuse else ["--fresh"]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    row: dict[str, Any] = {"model": name, "metric": given.metric, "exit_status": done.returncode, "seconds": time.monotonic() - began}
    if done.returncode not in (0, 4):
        return {**row, "error": done.stderr.strip().splitlines()[-1:]}
    result = json.loads(done.stdout.splitlines()[-1])
    row |= {k: result[k] for k in ("status", "verdict", "trials", "space", "notes")}
    bundle = result["bundle"]
    settings = SessionSettings(intra_op_num_threads=threads)
    place = out / f"{name}.check"
    shutil.rmtree(place, ignore_errors=True)
    (place / "float").mkdir(parents=True)
    base = ingest_onnx(folder / "model.onnx", place / "float").with_session(settings)
    told = (out / name / "measured" / "baseline.jsonl").read_text().split("\n")
    before = [json.loads(line)["ms"] for line in told if line]
    with StageRunner(("numpy", "onnx", "onnxruntime")) as runner:
        row["float"] = measured(runner, base, base, given, place / "of_float", None, before)
        kept = place / "of_float" / "accuracy" / "outputs.npz"
        if bundle:
            verified = subprocess.run([sys.executable, "-m", "autotune", "verify", bundle], capture_output=True, text=True, check=False)
            document = json.loads((Path(bundle) / "session.json").read_text())
            known = {k: v for k, v in document.items() if k in settings.to_json()}
            model = ONNXModelHandler.from_folder(Path(bundle) / "model", session=SessionSettings.from_json(known))
            best = result["best"]
            row |= {"verified": verified.returncode == 0, "best": best, "unchanged": bool(best["unchanged"])}
            row["delivered"] = measured(runner, model, base, given, place / "of_delivered", kept, before)
        for variant in REFERENCES:
            made, why = reference_model(folder, variant, place / variant)
            if made is None:
                row[variant] = {"fault": why}
                continue
            model = ONNXModelHandler.from_folder(made, session=settings)
            row[variant] = measured(runner, model, base, given, place / f"of_{variant}", kept, before)
    row["higher_is_better"] = given.metric_facts().higher_is_better
    return row


def cell(found: dict[str, Any] | None) -> str:
    """Ratio with its interval, then the score."""
    if not found:
        return "-"
    if "fault" in found:
        return "fails"
    ratio = found["latency"]["ratio"]
    return f"{ratio['value']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f}), {found['accuracy']['value']:.4f}"


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | metric | float: ms, score | delivered: ratio (95 %), score | passes | dynamic: ratio, score | static: ratio, score |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "float" not in row:
            lines.append(f"| {row['model']} | {row['metric']} | exit {row['exit_status']}: {row.get('error')} | | | | |")
            continue
        base = row["float"]
        shown = "-" if "fault" in base else f"{base['latency']['value']:.3f}, {base['accuracy']['value']:.4f}"
        passes = "untouched" if row.get("unchanged") else chain(row)
        cells = [row["model"], row["metric"], shown, cell(row.get("delivered")), passes, cell(row["dynamic"]), cell(row["static"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def chain(row: dict[str, Any]) -> str:
    """The passes of the delivered model with what makes them special."""
    best = row.get("best")
    if not best:
        return "none feasible"
    passes = [str(v) for k, v in best["point"].items() if "." not in k and v is not None]
    values = [f"{k.partition('.')[2]}={v}" for k, v in best["changed"].items()]
    return " > ".join(passes) + (f" ({', '.join(values)})" if values else "")


PAGE = """# The main job on real models

Made by `benchmarks/comparisons/main_job.py` in one run: `autotune run --model FOLDER --threads {threads} --trials {trials} --seed 0`, then everything
measured afresh over all evaluation rows. Ratios are latency over the float model's, paired, with 95 % intervals, {threads} thread, batch 1; below 1
is faster. *dynamic* and *static* are one call each of ONNX Runtime's own quantizer, without a search. Default limit: at most 1 point of
the score lost (for scores that are no shares, 1 %), judged on the search rows, on all rows and on the hold-out.

{machine}

{table}

What each sweep said:

{verdicts}
"""


def page(content: dict[str, Any]) -> str:
    """The page for people, from what is written to `main_job.json`."""
    here, rows = content["surroundings"], content["rows"]
    versions = ", ".join(f"{k} {v}" for k, v in here["versions"].items())
    machine = f"Machine: {here['cpu_model']}, {here['effective_cpus']} CPUs ({', '.join(here['cpu_flags'])}); Python {here['python']}; {versions}."
    verdicts = "\n".join(f"- **{r['model']}** ({r['seconds']:.0f} s): {r.get('verdict') or r.get('error')}" for r in rows)
    return PAGE.format(threads=content["threads"], trials=content["trials"], machine=machine, table=table(rows), verdicts=verdicts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/main_job"))
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--reuse", action="store_true", help="take finished runs in --out as they are")
    parser.add_argument("--quantize", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quantize:
        quantize(Path(args.quantize[0]), args.quantize[1], Path(args.quantize[2]))
        return
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for folder in args.folders:
        row = one(ModelFolder.open(folder.resolve()), out, trials=args.trials, threads=args.threads, reuse=args.reuse)
        rows.append(row)
        print(f"{row['model']}: exit {row['exit_status']}, {row['seconds']:.0f} s: {row.get('verdict') or row.get('error')}", flush=True)
        content = {"surroundings": surroundings().to_json(), "threads": args.threads, "trials": args.trials, "rows": rows}
        (out / "main_job.json").write_text(dump_json(content))
        if args.docs:
            args.docs.write_text(page(content))
    print(table(rows))


if __name__ == "__main__":
    main()
