"""What a sweep leaves behind: its result, read back or fresh, as tables, lines and files."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.digest import dump_json, write_durably
from autotune.errors import ConfigError
from autotune.records import TrialRecord

if TYPE_CHECKING:
    import pandas as pd

RESULT_FILE = "result.json"
DELIVERED, NONE_FEASIBLE, INTERRUPTED, NOT_REPRODUCED = "delivered", "none-feasible", "interrupted", "not-reproduced"
EXIT = {DELIVERED: 0, NONE_FEASIBLE: 4, NOT_REPRODUCED: 5, INTERRUPTED: 130}


@dataclass(frozen=True)
class SweepResult:
    """What a sweep left behind. `status` is delivered, none-feasible, not-reproduced or interrupted; `summary` is what `--json` prints."""

    run: Path
    status: str
    summary: Mapping[str, Any]
    records: tuple[TrialRecord, ...]

    @property
    def exit_status(self) -> int:
        """0 delivered, 4 none feasible, 5 the delivered model is not as it was measured, 130 interrupted."""
        return EXIT[self.status]

    @property
    def best(self) -> TrialRecord | None:
        """The record of the delivered model."""
        chosen = self.summary.get("best")
        return next((r for r in self.records if chosen and r.id == chosen["id"]), None)

    @property
    def trials(self) -> pd.DataFrame:
        """All trials, failed ones too, one row each: `param.*`, `metric.*`, status and reason."""
        import pandas as pd

        return pd.DataFrame([flat(r) for r in self.records])

    @property
    def front(self) -> pd.DataFrame:
        """The rows of `trials` that are on the Pareto front."""
        table = self.trials
        return table[table["id"].isin(self.summary["front"])] if len(table) else table

    def report(self) -> str:
        """The report as text."""
        from autotune.report import render_report

        return render_report(dict(self.summary), self.records)

    def bundle(self) -> Path | None:
        """The bundle's folder, None when nothing was delivered."""
        return Path(self.summary["bundle"]) if self.summary.get("bundle") else None


def read_result(folder: Path) -> SweepResult:
    """Read a run folder back: its summary and every trial's record. Raises `ConfigError` when there is none."""
    path = folder / RESULT_FILE
    if not path.is_file():
        raise ConfigError("report", f"the run folder must hold a {RESULT_FILE}", str(folder), "Give the --out folder of a run.")
    summary = json.loads(path.read_text())
    records = []
    for trial in sorted((folder / "trials").glob("t-*")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            last = trial / "final" / "trial.json"
            data = json.loads((last if last.exists() else trial / "trial.json").read_text())
            data.pop("holdout", None)
            records.append(TrialRecord.from_json(data))
    return SweepResult(folder, summary["status"], summary, tuple(records))


def write_exports(result: SweepResult) -> None:
    """Write `trials.json`, `trials.csv` and `trials.parquet`, failed trials included."""
    write_durably(result.run / "trials.json", dump_json([flat(r) for r in result.records]))
    table = result.trials
    if not len(table):
        return
    for column in table.columns:  # a parameter may be text in one trial and a number in another
        if column.startswith("param."):
            table[column] = table[column].map(lambda v: None if v is None or v != v else str(v))
    write_durably(result.run / "trials.csv", table.to_csv(index=False))
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False)
    write_durably(result.run / "trials.parquet", buffer.getvalue())


def line_of(record: TrialRecord, metric: str) -> str:
    """One line on a finished trial, for people who watch."""
    if not record.measured:
        return f"{record.reason} in {record.stage}: {record.message[:160]}" if record.stage else record.reason
    parts = [str(record.status)]
    latency = record.metrics.get("latency")
    if latency is not None and latency.ratio is not None:
        parts.append(f"{latency.ratio.value:.3f}x latency")
    score = record.metrics.get(metric)
    if score is not None:
        change = f" ({score.delta.value * 100:+.2f}pt)" if score.delta is not None and score.unit == "share" else ""
        rows = f" on {score.samples} rows" if record.partial else ""
        parts.append(f"{metric} {score.value:.4g}{change}{rows}")
    if record.unchanged:
        parts.append("unchanged")
    elif record.shares_with is not None:
        parts.append(f"same bytes as t-{record.shares_with:04d}")
    return "  ".join(parts) + f"  {record.seconds:.1f} s"


def flat(record: TrialRecord) -> dict[str, Any]:
    """One row for tables: `param.*`, `metric.*`, status, reason."""
    row: dict[str, Any] = {
        "id": record.id, "status": str(record.status), "cause": str(record.cause) if record.cause else "", "stage": record.stage,
        "message": record.message, "origin": record.origin, "unchanged": record.unchanged, "shares_with": record.shares_with,
        "seconds": record.seconds, "partial": record.partial,
    }  # fmt: skip
    for name, value in record.point.items():
        row[f"param.{name}"] = value if isinstance(value, str | int | float | bool) or value is None else json.dumps(value)
    for name, metric in record.metrics.items():
        row |= {f"metric.{name}": metric.value, f"metric.{name}.low": metric.low, f"metric.{name}.high": metric.high}
        for kind in ("ratio", "delta"):
            interval = getattr(metric, kind)
            if interval is not None:
                row |= {
                    f"metric.{name}.{kind}": interval.value,
                    f"metric.{name}.{kind}.low": interval.low,
                    f"metric.{name}.{kind}.high": interval.high,
                }
    return row
