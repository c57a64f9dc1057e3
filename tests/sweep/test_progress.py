"""What a sweep tells while it runs: counts, the best so far, an estimate, and a word when a stage is long."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.records import Interval, MetricValue, Status, TrialRecord
from autotune.sweep.progress import HEARTBEAT_S, JsonLines, PlainLines, Progress, line_for, status_line
from autotune.trial import STAGE_FILE, stage_now, tell_stage

LATENCY = MetricValue(3.61, 3.5, 3.7, "ms", ratio=Interval(0.698, 0.69, 0.705), samples=640)


def runs_since(run: Path, seconds: float, *, what: str = "t-0007", stage: str = "quantize") -> None:
    """Write the stage file of a stage that began that long ago."""
    (run / STAGE_FILE).write_text(json.dumps({"what": what, "stage": stage, "since": time.monotonic() - seconds}))


def told(run: Path) -> tuple[Progress, list[Mapping[str, Any]]]:
    events: list[Mapping[str, Any]] = []
    progress = Progress(events.append, run, "accuracy")
    progress._idle_since -= 1000  # as if it had run for long
    return progress, events


def test_a_stage_that_is_long_is_told_of_every_half_minute_by_name(tmp_path: Path) -> None:
    progress, events = told(tmp_path)
    for seconds in (1, HEARTBEAT_S - 1, HEARTBEAT_S + 1, HEARTBEAT_S + 2, 2 * HEARTBEAT_S + 1.5):
        runs_since(tmp_path, seconds)
        progress.tick()

    lines = [line_for(e) for e in events if e["event"] == "heartbeat"]
    assert lines == ["t-0007: quantize has been running for 31 s", "t-0007: quantize has been running for 62 s"]


def test_a_stage_that_ended_is_not_told_of(tmp_path: Path) -> None:
    progress, events = told(tmp_path)
    runs_since(tmp_path, 100.0)
    progress.search_started(trials=5, finished=0, failed=0, points=8, how="tpe")
    progress.tick()

    assert not [e for e in events if e["event"] == "heartbeat"]


def test_the_stage_is_named_by_the_folder_that_it_works_in(tmp_path: Path) -> None:
    begun = time.monotonic()
    tell_stage(tmp_path, tmp_path / "trials" / "t-0003" / "final" / "latency")
    trial = stage_now(tmp_path)
    tell_stage(tmp_path, tmp_path / "baseline" / "check")
    baseline = stage_now(tmp_path)

    assert trial is not None
    assert baseline is not None
    assert (trial["what"], trial["stage"], baseline["what"], baseline["stage"]) == ("t-0003", "final latency", "baseline", "check")
    assert begun <= trial["since"] <= time.monotonic()
    assert [p.name for p in tmp_path.iterdir()] == [STAGE_FILE]


def test_a_finished_trial_is_told_with_counts_best_and_intervals(tmp_path: Path) -> None:
    progress, events = told(tmp_path)
    record = TrialRecord(2, {"a": 1}, Status.OK, metrics={"latency": LATENCY}, seconds=2.5)
    progress.search_started(trials=5, finished=2, failed=1, points=8, how="tpe")
    progress.trial_finished(record, record, finished=3, failed=1, trials=5)

    event = events[-1]
    assert (event["trial"], event["status"], event["finished"], event["failed"], event["trials"]) == ("t-0002", "ok", 3, 1, 5)
    assert event["metrics"]["latency"]["ratio"] == {"value": 0.698, "low": 0.69, "high": 0.705}
    assert event["best"] == {"trial": "t-0002", "metrics": {"latency": LATENCY.to_json()}}
    assert event["eta_seconds"] >= 0
    assert line_for(event) == "t-0002 [3/5] ok  0.698x latency  2.5 s"


def test_the_live_line_has_what_matters_most_first_and_drops_what_does_not_fit() -> None:
    facts = {
        "trials": 28, "finished": 3, "failed": 1, "eta_seconds": 125.0, "what": "t-0003", "stage": "quantize", "stage_seconds": 61.4,
        "best": {"trial": "t-0000", "metrics": {"latency": LATENCY.to_json()}},
    }  # fmt: skip

    assert status_line(facts, 120) == "3/28 done, 1 failed | ETA 2:05 | t-0003 quantize 1:01 | best t-0000 0.698x (0.690 to 0.705)"
    assert status_line(facts, 60) == "3/28 done, 1 failed | ETA 2:05 | t-0003 quantize 1:01"
    assert status_line(facts, 10) == "3/28 done,"
    assert status_line({}, 80) == ""


def test_json_lines_hold_no_ticks_and_nothing_for_people() -> None:
    out = io.StringIO()
    lines = JsonLines(out)
    for event in ({"event": "tick"}, {"event": "trial-finished", "trial": "t-0000", "line": "ok"}, {"event": "note", "message": "ä"}):
        lines(event)

    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        {"event": "trial-finished", "trial": "t-0000"},
        {"event": "note", "message": "ä"},
    ]


def test_a_reader_that_left_stops_nothing() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as stream:
        lines = JsonLines(stream)
        for _ in range(3):
            lines({"event": "note", "message": "nobody reads this"})

    assert stream.closed


def test_plain_lines_leave_out_what_nobody_wants_to_read() -> None:
    lines: list[str] = []
    show = PlainLines(lines.append)
    for event in ({"event": "tick"}, {"event": "baseline", "metrics": {}}, {"event": "note", "message": "hello"}):
        show(event)

    assert lines == ["hello"]
