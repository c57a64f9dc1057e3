"""Whether a run folder's study and the records of its trials say the same."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from autotune.records import TrialRecord
from autotune.search_spaces.space import point_key


def told_values(record: TrialRecord, objectives: list[str]) -> list[float] | None:
    """What a study must hold for a record: latencies and sizes as ratios to the baseline, scores as they are."""
    if not record.measured:
        return None
    metrics = [record.metrics[name] for name in objectives]
    return [m.ratio.value if m.ratio is not None and m.unit in ("ms", "bytes") else m.value for m in metrics]


def disagreements(run: Path, objectives: list[str], directions: list[str]) -> list[str]:
    """Differences between the study and the trials' records, in words; empty when they agree.

    Each told trial has its record with equal point and values; each record's trial is told; no trial runs.
    """
    from autotune.sweep.search import open_study

    study, word = open_study(run, None, directions, objectives)  # type: ignore[arg-type] # two literals
    found = [word] if word else []
    records: dict[int, dict[str, Any]] = {int(p.parent.name[2:]): json.loads(p.read_text()) for p in run.glob("trials/t-*/trial.json")}
    trials = {t.number: t for t in study.get_trials(deepcopy=False)}
    if trials.keys() != records.keys():
        found.append(f"the study has {sorted(trials)}, the records are {sorted(records)}")
    for number in sorted(trials.keys() & records.keys()):
        trial, record = trials[number], TrialRecord.from_json(records[number])
        values = told_values(record, objectives)
        if point_key(json.loads(trial.user_attrs["point"])) != point_key(record.point):
            found.append(f"{record.id}: another point")
        if trial.state.name != ("PRUNED" if values is None else "COMPLETE"):
            found.append(f"{record.id}: {record.status} on record, {trial.state.name} in the study")
        elif values is not None and not all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(values, trial.values, strict=True)):
            found.append(f"{record.id}: {values} on record, {trial.values} in the study")
    return found
