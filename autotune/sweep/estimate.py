"""What a sweep will cost in time and disk, and on what that estimate rests: an earlier run of it, or a few runs of the model now."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.config import seconds
from autotune.data import feeds, load_arrays, plan_feeding
from autotune.model import ONNX, read_onnx_head
from autotune.session import SessionSettings, create_session
from autotune.stages import StageLimits, StageRunner
from autotune.sweep.finalists import FINALISTS
from autotune.sweep.prepare import Prepared
from autotune.torch_files import source_bytes
from autotune.trial import TRIAL_FILE

PROBE_S = 1.0  # for runs of the model, after it is loaded
PROBE_LIMIT_S = 60.0
PROBE_RUNS = 20
STAGES_S = 0.5  # opening sessions, checks and records of a trial beside its timing; the demonstration's trials took 0.3 to 0.6 s
RECORD_BYTES = 64 * 1024  # of a trial: its record, outputs of small models, logs
SAMPLE_BYTES = 8  # of a run that was timed; every one is kept
FASTEST_S = 5e-6  # a run of the smallest models


def estimate(prepared: Prepared, *, trials: int, run: Path | None = None) -> dict[str, Any]:
    """Estimate `seconds` (None where nothing can be said) and `disk_bytes` (at most) of a sweep, each with its basis in words.

    `run`: the folder that the sweep would write into; trials of an earlier run of the same model there are the best basis.
    """
    earlier = _earlier_seconds(prepared, run)
    probe = _probe(prepared) if prepared.facts.format == ONNX and not earlier else {}
    return {"time": _time(prepared, trials, run, earlier, probe), "disk": _disk(prepared, trials, run, probe.get("run_s", 0.0))}


def _time(prepared: Prepared, trials: int, run: Path | None, earlier: list[float], probe: Mapping[str, Any]) -> dict[str, Any]:
    config = prepared.sweep.config
    final = seconds(config.measure.final_time)
    # Those whose place on the front is open, in turns; the finalists; and the delivered files once more.
    finals = min(seconds(config.measure.final_budget), trials * final) + min(FINALISTS, trials) * final + final
    limit = seconds(config.budget.time) if config.budget.time else None
    if earlier:
        each = statistics.mean(earlier)
        basis = f"{len(earlier)} trials of this model in {run} took {each:.1f} s each"
        return _within(trials * each + finals, limit, basis)
    timing = seconds(config.measure.max_time)
    if prepared.facts.format != ONNX:
        basis = f"timing alone, at most {timing:g} s a trial: conversion, training and accuracy are not known before the first trial"
        return _within((trials + 1) * (timing + STAGES_S) + finals, limit, basis)
    if "why" in probe:
        return {"seconds": limit, "budget_s": limit, "basis": f"the model was not run here: {probe['why']}"}
    rows = prepared.rows
    runs = math.ceil(len(rows.search) / probe["rows_a_run"])
    scoring = runs * probe["run_s"]
    whole = (trials + 1) * (timing + scoring + probe["open_s"] * 4 + STAGES_S) + finals
    basis = (
        f"at most {timing:g} s of timing a trial, and {scoring:.2g} s for {runs} runs to score it ({probe['run_s'] * 1e3:.3g} ms a run of the "
        "model, seen just now); what passes need is not known before the first trial"
    )
    return _within(whole, limit, basis)


def _within(wanted: float, limit: float | None, basis: str) -> dict[str, Any]:
    """The search ends with its time budget, whatever is left to try."""
    return {"seconds": min(wanted, limit) if limit else wanted, "budget_s": limit, "basis": basis}


def _earlier_seconds(prepared: Prepared, run: Path | None) -> list[float]:
    """Seconds of trials that an earlier run of the same model on the same target left, cut short to what they say."""
    if run is None:
        return []
    try:
        identity = json.loads((run / "run.json").read_text())["identity"]["sweep"]
        now = prepared.sweep.absolute().to_json()
        if any(identity.get(key) != now[key] for key in ("model", "target", "measure")):
            return []
        records = [json.loads(path.read_text()) for path in sorted((run / "trials").glob(f"t-*/{TRIAL_FILE}"))]
        return [float(r["seconds"]) for r in records if r["metrics"] and not r["unchanged"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _probe(prepared: Prepared) -> dict[str, Any]:
    """Open the model in a child process and run it for a second."""
    config, settings = prepared.sweep.config, prepared.settings
    assert config.model.path is not None
    args = {
        "model": str(prepared.sweep.path(config.model.path)), "data": str(prepared.sweep.path(config.data.eval)),
        "batch_size": prepared.sweep.target.batch_size, "session": settings.to_json(), "rows": list(prepared.rows.search[:8]),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place, StageRunner(("numpy", "onnx", "onnxruntime")) as runner:
        outcome = runner.run("autotune.sweep.estimate:time_model", args, folder=Path(place), limits=StageLimits(PROBE_LIMIT_S))
    return outcome.value or {"why": f"{outcome.cause}: {outcome.message}"[:200]}


def time_model(args: Mapping[str, Any]) -> dict[str, Any]:
    """Stage: open a model and run it. Returns {open_s, run_s (median), rows_a_run}, or {why}."""
    from autotune.errors import EnvironmentFault

    path = Path(args["model"])
    arrays, (io, _) = load_arrays(Path(args["data"])), read_onnx_head(path)
    feeding = plan_feeding(arrays, io, batch_size=args["batch_size"])
    fed = [feed for feed, _ in feeds(arrays, io, feeding, args["rows"])]
    began = time.perf_counter()
    try:
        session = create_session(path, SessionSettings.from_json(args["session"]))
    except EnvironmentFault as error:
        return {"why": error.got or str(error)}
    session.run(None, fed[0])
    opened = time.perf_counter() - began
    took: list[float] = []
    while len(took) < PROBE_RUNS and (not took or sum(took) < PROBE_S):
        began = time.perf_counter()
        session.run(None, fed[len(took) % len(fed)])
        took.append(time.perf_counter() - began)
    return {"open_s": opened, "run_s": statistics.median(took), "rows_a_run": feeding.rows_per_run()}


def _disk(prepared: Prepared, trials: int, run: Path | None, run_s: float) -> dict[str, Any]:
    """At most: every trial leaves an artifact of the model's size for each slot that changes files, and nothing is shared.

    `run_s`: what a run of the model takes, 0 where that is not known; candidates may be four times as fast.
    """
    pipeline, config = prepared.pipeline, prepared.sweep.config
    place = (run or Path.cwd()).resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    size = model_bytes(prepared)
    changing = sum(any(not pipeline.classes[a.name].contract.session_only for a in slot.alternatives) for slot in pipeline.space.slots)
    if not size:
        return {"at_most_bytes": None, "free_bytes": free, "basis": "the size of the model is not known before it is converted"}
    timed_s = trials * seconds(config.measure.max_time) + seconds(config.measure.final_budget) + (FINALISTS + 1) * seconds(config.measure.final_time)
    samples = int(SAMPLE_BYTES * timed_s / max(run_s / 4, FASTEST_S))
    # The model itself and the bundle are copies too; so are the bundle's samples.
    at_most = size * (trials * changing + 2) + trials * RECORD_BYTES + 2 * samples
    basis = f"{size:,} bytes of model, for each of {trials} trials and {changing} slots that change files, and for the copy and the bundle"
    basis += f"; {samples / 1e6:.1f} MB of samples"
    if prepared.facts.format != ONNX:
        basis += "; the weights file stands for the converted model"
    return {"at_most_bytes": at_most, "free_bytes": free, "basis": basis}


def model_bytes(prepared: Prepared) -> int:
    """Bytes of the user's model with its external data; of the weights file for a torch module of a script, 0 where it has none."""
    section, path = prepared.sweep.config.model, prepared.sweep.path
    if prepared.facts.format != ONNX:
        if section.path is not None:
            return source_bytes(path(section.path))
        return path(section.weights).stat().st_size if section.weights else 0
    import onnx
    from onnx.external_data_helper import uses_external_data

    assert section.path is not None
    model = path(section.path)
    proto = onnx.load(str(model), load_external_data=False)
    beside = {
        entry.value for tensor in proto.graph.initializer if uses_external_data(tensor) for entry in tensor.external_data if entry.key == "location"
    }
    sizes = [(model.parent / name).stat().st_size for name in beside if (model.parent / name).is_file()]
    return int(model.stat().st_size + sum(sizes))
