"""The bundle: a plain folder with the chosen model, how to run it, what it promises, and the proof. Loads with onnxruntime and numpy.

`bundle.json` is written last and holds the hash of every other file and of itself; without it the folder is no bundle.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from autotune.data import feeds, load_arrays, plan_feeding
from autotune.digest import canonical, digest_file, digest_of, dump_json, files_under, write_durably
from autotune.disk import fault_in
from autotune.errors import VerificationError
from autotune.model import MODEL_FILE, ONNXModelHandler
from autotune.session import SessionSettings, create_session, falls_back_to_cpu, not_applied, read_back, thread_count
from autotune.stages import StageLimits, StageRunner
from autotune.target import effective_cpus, surroundings

BUNDLE_FILE = "bundle.json"
SCHEMA = "bundle/1.0"
SAMPLES = 4
ANYWHERE, SAME_MACHINE_CLASS = "any", "same machine class"

README = """# {id}

{verdict}{warning}

Run it (onnxruntime and numpy; from this folder):

```python
import json, numpy as np, onnxruntime as ort
s, o = json.load(open("session.json")), ort.SessionOptions()
for k in ("intra_op_num_threads", "inter_op_num_threads", "enable_cpu_mem_arena", "enable_mem_pattern", "enable_mem_reuse"): setattr(o, k, s[k])
o.execution_mode = getattr(ort.ExecutionMode, s["ort_execution_mode"])
o.execution_order = getattr(ort.ExecutionOrder, s["ort_execution_order"])
o.graph_optimization_level = getattr(ort.GraphOptimizationLevel, s["ort_graph_optimization_level"])
for k, v in s["config_entries"].items(): o.add_session_config_entry(k, v)
r = ort.RunOptions()
for k, v in s["run_config_entries"].items(): r.add_run_config_entry(k, v)
session = ort.InferenceSession("model/model.onnx", o, providers=[(p, dict(x)) for p, x in s["providers"]])
print(session.run(None, dict(np.load("sample/inputs_0.npz")), r))
```

Files: `bundle.json` what this is and the SHA-256 of every file; `model/` the model; `session.json` session settings with their
read-back; `io.json` inputs and outputs; `recipe.yaml` the passes with every parameter; `evidence/` raw samples behind each number;
`env.json` the machine and versions; `sample/` inputs with expected outputs. `autotune verify FOLDER` checks all of it.
"""


VERIFIED, NOT_REPRODUCED = "verified", "not-reproduced"


@dataclass(frozen=True)
class Proof:
    """What came out when the bundle's own bytes were scored and timed once more: in words what differs, the figures, and their raw samples."""

    differs: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    evidence: Mapping[str, Path] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"status": NOT_REPRODUCED if self.differs else VERIFIED, "differs": list(self.differs), **self.facts}


def make_samples(args: Mapping[str, Any]) -> dict[str, Any]:
    """Stage: run the first rows as deployed; write inputs and outputs as npz files; read the settings back."""
    out = Path(args["out"])
    folder = Path(args["model_folder"])
    settings = SessionSettings.from_json(args["session"])
    model = ONNXModelHandler.from_folder(folder, session=settings)
    arrays = load_arrays(Path(args["data"]))
    feeding = plan_feeding(arrays, model.io, batch_size=args["batch_size"])
    before = thread_count()
    session = create_session(model.path, settings)
    extra_threads = thread_count() - before
    names = [o.name for o in session.get_outputs()]
    count = 0
    for feed, _ in feeds(arrays, model.io, feeding, args["rows"]):
        outputs = session.run(None, feed)
        plain = {k: v.astype(str) if v.dtype == object else v for k, v in feed.items()}
        np.savez(out / f"inputs_{count}.npz", **plain)  # type: ignore[arg-type] # names are keys of the file, never options here
        kept = {k: np.asarray(v) for k, v in zip(names, outputs, strict=True) if isinstance(v, np.ndarray) and v.dtype != object}
        np.savez(out / f"outputs_{count}.npz", **kept)  # type: ignore[arg-type] # as above
        count += 1
        if count == SAMPLES:
            break
    return {"read_back": read_back(session, settings), "extra_threads": extra_threads, "samples": count}


def write_bundle(
    folder: Path,
    *,
    model: ONNXModelHandler,
    model_digest: str,
    data: Path,
    rows: Sequence[int],
    batch_size: int,
    recipe: Mapping[str, Any],
    summary: Mapping[str, Any],
    evidence: Mapping[str, Path],
    runner: StageRunner,
    limits: StageLimits,
    prove: Callable[[ONNXModelHandler], Proof] | None = None,
) -> dict[str, Any]:
    """Write the bundle of a measured model into `folder` (replaced at the end) and return the content of `bundle.json`.

    `evidence` maps names in the bundle to files of the run. `prove` measures the model once more as it stands in the bundle, by the settings
    that the bundle holds, before anything is called a bundle; where that differs the bundle says so, and `verify` fails. Raises
    `VerificationError` when the model's bytes are no longer those measured, or its samples can't be run.
    """
    building = folder.with_name(f".{folder.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    with contextlib.ExitStack() as unfinished:
        unfinished.callback(shutil.rmtree, building, ignore_errors=True)  # a disk that is full needs the room
        for name in ("model", "sample", "evidence"):
            (building / name).mkdir(parents=True)
        for name in files_under(model.folder):
            target = building / "model" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(model.folder / name, target)
        copied = digest_of({n: digest_file(building / "model" / n) for n in files_under(building / "model")})
        if copied != model_digest:
            raise VerificationError(
                "bundle", "the delivered model must be byte for byte the model measured", f"digest {copied[:12]}, measured {model_digest[:12]}"
            )
        args = {
            "model_folder": str(building / "model"), "session": model.session.to_json(), "data": str(data), "rows": list(rows),
            "batch_size": batch_size, "out": str(building / "sample"),
        }  # fmt: skip
        outcome = runner.run("autotune.bundle:make_samples", args, folder=building.with_name(".samples"), limits=limits)
        shutil.rmtree(building.with_name(".samples"), ignore_errors=True)
        if outcome.value is None:
            if (fault := fault_in(f"{outcome.message}\n{outcome.output_tail}", folder.parent)) is not None:
                raise fault
            raise VerificationError("bundle", "the delivered model must run its samples", f"{outcome.cause}: {outcome.message}")
        session = session_document(model.session, outcome.value)
        proof = None
        if prove is not None:
            written = json.loads(dump_json(session))
            proof = prove(ONNXModelHandler.from_folder(building / "model", session=_settings_in(written)))
            evidence = {**evidence, **proof.evidence}
        for name, source in evidence.items():
            target = building / "evidence" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        documents = {
            "session.json": dump_json(session),
            "io.json": dump_json({**model.io.to_json(), "batch_size": batch_size, "opset": model.opset}),
            "recipe.yaml": yaml.safe_dump(json.loads(canonical(recipe)), sort_keys=False, allow_unicode=True, width=120),
            "env.json": dump_json(surroundings().to_json()),
            "README.md": README.format(id=summary["id"], verdict=summary["verdict"], warning=_warning(proof)),
            "MODEL_CARD.md": model_card(summary, recipe),
        }
        for name, text in documents.items():
            (building / name).write_text(text, encoding="utf-8")
        content = {
            "schema": SCHEMA, **summary, "model_digest": model_digest, "samples": outcome.value["samples"],
            "delivery": proof.to_json() if proof else None,
            "files": {name: _file_facts(building, name) for name in files_under(building)},
        }  # fmt: skip
        content["self"] = digest_of(content)
        write_durably(building / BUNDLE_FILE, dump_json(content))
        unfinished.pop_all()
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    building.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    return content


def _warning(proof: Proof | None) -> str:
    return f"\n\n**Not verified; do not deploy it.** {'; '.join(proof.differs)}." if proof and proof.differs else ""


def _settings_in(document: Mapping[str, Any]) -> SessionSettings:
    """Session settings from the content of a `session.json`."""
    known = SessionSettings().to_json()
    return SessionSettings.from_json({k: v for k, v in document.items() if k in known})


def session_document(settings: SessionSettings, facts: Mapping[str, Any]) -> dict[str, Any]:
    """`session.json`: the settings, in ONNX Runtime's own names too, and what the live session had."""
    providers: list[list[Any]] = [[settings.execution_provider, dict(settings.provider_options)]]
    if falls_back_to_cpu(settings):
        providers.append(["CPUExecutionProvider", {}])
    level = {"disable": "ORT_DISABLE_ALL"}.get(settings.graph_optimization_level, f"ORT_ENABLE_{settings.graph_optimization_level.upper()}")
    return {
        **settings.to_json(), "ort_execution_mode": f"ORT_{settings.execution_mode.upper()}", "ort_graph_optimization_level": level,
        "ort_execution_order": settings.execution_order.upper(),
        "providers": providers, "tuned_on_cpus": effective_cpus(), "read_back": facts["read_back"], "extra_threads": facts["extra_threads"],
    }  # fmt: skip


def _file_facts(folder: Path, name: str) -> dict[str, Any]:
    machine_bound = name in ("session.json", "env.json") or name.startswith("evidence/")
    return {
        "size": (folder / name).stat().st_size, "sha256": digest_file(folder / name),
        "portability": SAME_MACHINE_CLASS if machine_bound else ANYWHERE,
    }  # fmt: skip


def model_card(summary: Mapping[str, Any], recipe: Mapping[str, Any]) -> str:
    """A short model card in Markdown: what, how well, how made, limits."""
    table = [(name, value, summary["baseline"].get(name)) for name, value in summary["metrics"].items()]
    if summary.get("holdout"):  # first: no choice was made on these rows
        name = f"{summary['metric']}, {summary['holdout']['samples']} held-out rows"
        table.insert(0, (name, summary["holdout"], summary["baseline_holdout"]))
    rows = "\n".join(f"| {name} | {_number(value)} | {_number(base)} |" for name, value, base in table)
    passes = "\n".join(f"{i}. {s['pass']}" for i, s in enumerate(recipe["passes"], 1)) or "none: this is the untouched model"
    return f"""# Model card

{summary["verdict"]}

| metric (95 % interval) | this model | baseline |
|---|---|---|
{rows}

Passes, in order:

{passes}

Measured on {summary["measured_on"]}. Latency holds for that machine class; accuracy for data like the evaluation set.
"""


def _number(value: Mapping[str, Any] | None) -> str:
    if not value:
        return "-"
    return f"{value['value']:.4g} ({value['low']:.4g} to {value['high']:.4g}) {value.get('unit', '')}".strip()


# ------------------------------------------------------------------------------------------------------------------ verify


@dataclass(frozen=True)
class Check:
    """One thing that `verify` looked at: `ok`, `warning` or `failed`, with words."""

    name: str
    state: str
    message: str

    def to_json(self) -> dict[str, str]:
        return {"name": self.name, "state": self.state, "message": self.message}


def run_samples(args: Mapping[str, Any]) -> dict[str, Any]:
    """Stage: load a bundle's model as its session.json says, run the samples, compare, read the settings back."""
    folder = Path(args["bundle"])
    document = json.loads((folder / "session.json").read_text())
    settings = _settings_in(document)
    session = create_session(folder / "model" / MODEL_FILE, settings)
    names = [o.name for o in session.get_outputs()]
    inputs = {i.name: i.type for i in session.get_inputs()}
    worst, wrong = 0.0, []
    for index in range(args["samples"]):
        with np.load(folder / "sample" / f"inputs_{index}.npz", allow_pickle=False) as file:
            feed = {k: file[k].astype(object) if inputs.get(k) == "tensor(string)" else file[k] for k in file.files}
        with np.load(folder / "sample" / f"outputs_{index}.npz", allow_pickle=False) as file:
            expected = {k: file[k] for k in file.files}
        for name, got in zip(names, session.run(None, feed), strict=True):
            if name not in expected:
                continue
            want = expected[name]
            if np.shape(got) != want.shape:
                wrong.append(f"sample {index}, {name}: shape {list(np.shape(got))} instead of {list(want.shape)}")
            elif want.size and want.dtype.kind == "f":
                peak = float(np.abs(want).max()) or 1.0
                difference = float(np.abs(np.asarray(got, np.float64) - want.astype(np.float64)).max()) / peak
                worst = max(worst, difference if np.isfinite(difference) else np.inf)
                if not difference <= args["tolerance"]:
                    wrong.append(f"sample {index}, {name}: off by {difference:.2g} of the peak value")
            elif want.size and not np.array_equal(got, want) and args["exact"]:
                wrong.append(f"sample {index}, {name}: {int((np.asarray(got) != want).sum())} of {want.size} values differ")
    return {"worst": worst, "wrong": wrong, "not_applied": not_applied(settings, read_back(session, settings))}


def verify_bundle(folder: Path) -> list[Check]:
    """Check a bundle: schema, every byte, loading, samples, settings. Untrusted: the model is only opened in a child process.

    Raises `VerificationError` when the folder is no bundle at all.
    """
    checks, content = _check_bytes(folder)
    if any(c.state == "failed" for c in checks):
        return checks  # what is not what it says it is isn't loaded
    delivery = content.get("delivery")
    if delivery:
        differs = "; ".join(str(d) for d in delivery["differs"])
        checks.append(Check("delivery", "failed" if differs else "ok", differs or "measured again as it stands here: as it was measured before"))
    return [*checks, *_check_running(folder, int(content["samples"]))]


def damage(folder: Path) -> list[str]:
    """Say what of a bundle's bytes is not as it was written; empty for a whole one. Raises `VerificationError` when the folder is no bundle."""
    return [c.message for c in _check_bytes(folder)[0] if c.state == "failed"]


def _check_bytes(folder: Path) -> tuple[list[Check], dict[str, Any]]:
    """Check schema and every byte; also the content of `bundle.json`, to be used only when nothing failed."""
    path = folder / BUNDLE_FILE
    if not path.is_file():
        raise VerificationError(
            "verify", f"a bundle must hold {BUNDLE_FILE}", f"none in {folder}", "Give the bundle's folder, such as RUN/best.bundle."
        )
    raw = path.read_bytes()
    try:
        content = json.loads(raw)
        described = {k: v for k, v in content.items() if k != "self"}
        intact = content["self"] == digest_of(described) and dump_json(content).encode() == raw
        schema, files, _ = content["schema"], content["files"], int(content["samples"])
        expected = {str(n): (int(f["size"]), str(f["sha256"])) for n, f in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return [Check("bundle.json", "failed", f"{BUNDLE_FILE} is damaged: {error}")], {}
    if not intact:
        return [Check("bundle.json", "failed", f"{BUNDLE_FILE} has changed since it was written")], {}
    if str(schema).partition(".")[0] != SCHEMA.partition(".")[0]:
        return [Check("schema", "failed", f"schema {schema} is not one of {SCHEMA.partition('.')[0]}.x; use the version that wrote it")], {}
    return [Check("bundle.json", "ok", f"schema {schema}, intact"), *_check_files(folder, expected)], content


def _check_files(folder: Path, expected: Mapping[str, tuple[int, str]]) -> list[Check]:
    present = [n for n in files_under(folder) if n != BUNDLE_FILE]
    links = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink()]
    problems = [Check("files", "failed", f"{n} is missing") for n in sorted(set(expected) - set(present))]
    problems += [Check("files", "failed", f"{n} does not belong to the bundle") for n in sorted(set(present) - set(expected))]
    problems += [Check("files", "failed", f"{n} is a link; a bundle holds regular files only") for n in sorted(links)]
    for name in sorted(set(present) & set(expected)):
        size, sha256 = expected[name]
        if (folder / name).stat().st_size != size or digest_file(folder / name) != sha256:
            problems.append(Check("files", "failed", f"{name} has changed since it was written"))
    return problems or [Check("files", "ok", f"{len(expected)} files, all as written")]


def _check_running(folder: Path, samples: int) -> list[Check]:
    env = json.loads((folder / "env.json").read_text())
    here = surroundings()
    same_machine = env["cpu_model"] == here.cpu_model and env["versions"].get("onnxruntime") == here.versions.get("onnxruntime")
    session = json.loads((folder / "session.json").read_text())
    args = {"bundle": str(folder.resolve()), "samples": samples, "tolerance": 1e-4 if same_machine else 0.1, "exact": same_machine}
    with StageRunner(("numpy", "onnxruntime")) as runner:
        import tempfile

        with tempfile.TemporaryDirectory() as place:
            outcome = runner.run("autotune.bundle:run_samples", args, folder=Path(place), limits=StageLimits(300.0))
    if outcome.value is None:
        return [Check("load", "failed", f"the model must load and run: {outcome.cause}: {outcome.message}")]
    value = outcome.value
    checks = [Check("load", "ok", f"opens on {session['execution_provider']}")]
    if value["wrong"]:
        checks.append(Check("samples", "failed", "; ".join(value["wrong"][:3])))
    else:
        checks.append(Check("samples", "ok", f"{samples} of {samples} within tolerance (largest difference {value['worst']:.1e} of the peak value)"))
    if value["not_applied"]:
        checks.append(Check("settings", "failed", "; ".join(value["not_applied"])))
    else:
        checks.append(Check("settings", "ok", "read back from the live session as written"))
    if session["tuned_on_cpus"] != here.effective_cpus:
        checks.append(
            Check(
                "machine",
                "warning",
                f"tuned on {session['tuned_on_cpus']} CPUs, here are {here.effective_cpus}: thread counts may not fit; measure again",
            )
        )
    elif not same_machine:
        checks.append(
            Check(
                "machine",
                "warning",
                f"measured on {env['cpu_model']} with onnxruntime {env['versions'].get('onnxruntime')}: latency will differ here",
            )
        )
    return checks
