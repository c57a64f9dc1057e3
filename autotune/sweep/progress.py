"""What a sweep tells while it runs: events, and those who show them - a live line, plain lines, JSON lines, nobody.

Events are plain mappings with `event` and `seconds` (since the sweep began). What else they carry:

- `sweep-started`: `run`, `metric`, `objectives`, `constraints`
- `note`: `message`, a line for people
- `baseline`: `metrics`
- `search-started`: `trials` (how many there will be), `finished`, `failed`, `points`, `how` (enumeration, tpe, random)
- `trial-started`: `trial`, `number`, `origin`, `attempt`, `point`, `choosing_seconds` (what it took to choose the point)
- `trial-finished`: `trial`, `status`, `cause`, `stage`, `message`, `metrics`, `trial_seconds`, `finished`, `failed`, `trials`, `best`,
  `eta_seconds`; `line`, the same for people (not in JSON lines)
- `heartbeat`: `what` (a trial, or baseline), `stage`, `stage_seconds`; every half minute while one stage runs
- `tick`: the same, every second or so (not in JSON lines)
- `finished`: `summary`, what `--json` prints
- `error`: `error`, `exit_status`, `resumable`

`metrics` maps names to {value, low, high, unit, ratio, delta, samples, method}; `best` is {trial, metrics} or null. New events and keys
may come; those that are there stay.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from autotune.digest import dump_json
from autotune.records import MetricValue, TrialRecord
from autotune.sweep.result import line_of
from autotune.sweep.streams import write_line
from autotune.trial import stage_now

if TYPE_CHECKING:
    from rich.console import Console

HEARTBEAT_S = 30.0
Event = Mapping[str, Any]
Listener = Callable[[Event], None]


class Progress:
    """Keeps count of a sweep and tells a listener of it. `tick` is to be called every second or so."""

    def __init__(self, listener: Listener, run: Path, metric: str) -> None:
        self._tell, self._run, self._metric = listener, run, metric
        self._started = time.monotonic()
        self._beat = ("", "", 0.0)  # the stage that was told of last, and when
        self._search_started = 0.0
        self._idle_since = self._started  # stages that began before this have ended, whatever stands on disk
        self._begun_with = 0

    def tell(self, event: str, **content: Any) -> None:
        """Tell of one event."""
        self._tell({"event": event, "seconds": round(time.monotonic() - self._started, 3), **content})

    def say(self, message: str) -> None:
        """Tell people a line."""
        self.tell("note", message=message)

    def search_started(self, *, trials: int, finished: int, failed: int, points: int, how: str) -> None:
        """The search begins, or goes on."""
        self._search_started = self._idle_since = time.monotonic()
        self._begun_with = finished
        self.tell("search-started", trials=trials, finished=finished, failed=failed, points=points, how=how)

    def trial_finished(self, record: TrialRecord, best: TrialRecord | None, *, finished: int, failed: int, trials: int) -> None:
        """A trial has ended."""
        self._idle_since = time.monotonic()
        here = finished - self._begun_with
        each = (time.monotonic() - self._search_started) / here if here else 0.0
        self.tell(
            "trial-finished", trial=record.id, status=str(record.status), cause=str(record.cause) if record.cause else None, stage=record.stage,
            message=record.message, metrics={k: v.to_json() for k, v in record.metrics.items()}, trial_seconds=round(record.seconds, 3),
            finished=finished, failed=failed, trials=trials,
            best={"trial": best.id, "metrics": {k: v.to_json() for k, v in best.metrics.items()}} if best else None,
            eta_seconds=round(each * max(0, trials - finished), 1), line=line_of(record, self._metric),
        )  # fmt: skip

    def tick(self) -> None:
        """Look at what runs now: tell the listener's live line every time, and everybody when a stage has been running for long."""
        now = stage_now(self._run)
        running_s = time.monotonic() - float(now["since"]) if now else 0.0
        if now is None or running_s < 0 or float(now["since"]) < self._idle_since:  # nothing yet, or something that has ended
            self._tell({"event": "tick"})
            return
        self._tell({"event": "tick", "what": now["what"], "stage": now["stage"], "stage_seconds": running_s})
        what, stage, told_s = self._beat
        if (what, stage) != (now["what"], now["stage"]) or running_s < told_s:
            what, stage, told_s = now["what"], now["stage"], 0.0
        if running_s - told_s >= HEARTBEAT_S:
            told_s = running_s
            self.tell("heartbeat", what=what, stage=stage, stage_seconds=round(running_s, 1))
        self._beat = (what, stage, told_s)


class Display(Protocol):
    """Shows events to somebody. Never raises because nobody reads any more."""

    def __call__(self, event: Event) -> None: ...

    def close(self) -> None:
        """Leave the terminal as it was."""


class PlainLines:
    """One line for each event that people want to know of, through `write`."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def __call__(self, event: Event) -> None:
        if line := line_for(event):
            self._write(line)

    def close(self) -> None: ...


class JsonLines:
    """Each event as a JSON object on a line of its own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, event: Event) -> None:
        if event["event"] != "tick":
            write_line(dump_json({k: v for k, v in event.items() if k != "line"}, indent=None), self._stream)

    def close(self) -> None: ...


class Silent:
    """Shows nothing."""

    def __call__(self, event: Event) -> None: ...

    def close(self) -> None: ...


class LiveLine:
    """Plain lines that scroll by, and below them one line that is kept up to date."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._facts: dict[str, Any] = {}
        # Nothing of rich's runs beside the sweep: it is asked to draw when there is something new.
        self._live = Live("", console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
        self._gone = False
        with self._or_gone():
            self._live.start()

    def __call__(self, event: Event) -> None:
        if self._gone:
            return
        kind = event["event"]
        self._facts |= {k: event[k] for k in ("trials", "finished", "failed", "best", "eta_seconds") if k in event}
        if kind in ("tick", "trial-started"):
            self._facts |= {
                "what": event.get("what", event.get("trial", "")),
                "stage": event.get("stage", ""),
                "stage_seconds": event.get("stage_seconds"),
            }
        with self._or_gone():
            from rich.text import Text

            if (line := line_for(event)) and kind != "heartbeat":  # the live line tells that all the time
                self._console.print(Text(line), soft_wrap=True)
            if kind == "finished":
                self.close()
                return
            self._live.update(Text(status_line(self._facts, self._console.width - 1), no_wrap=True), refresh=True)

    @contextlib.contextmanager
    def _or_gone(self) -> Any:
        try:
            yield
        except (OSError, ValueError):  # the terminal was closed
            self._gone = True

    def close(self) -> None:
        with self._or_gone():
            self._live.stop()


def display_for(*, json_lines: bool, quiet: bool) -> Display:
    """Choose how to show a sweep's progress: on a terminal a live line, plain lines without one; both on stderr."""
    if json_lines:
        return JsonLines(sys.stdout)
    if quiet:
        return Silent()
    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if console.is_terminal and not console.is_dumb_terminal and sys.stderr.isatty():
        return LiveLine(console)
    return PlainLines(lambda line: write_line(line, sys.stderr))


# ---------------------------------------------------------------------------------------------------------------- words


def line_for(event: Event) -> str:
    """An event as a line for people; empty for those that nobody wants to read."""
    kind = event["event"]
    if kind == "note":
        return str(event["message"])
    if kind == "search-started":
        how = "all of them" if event["how"] == "enumeration" else f"by {event['how']}"
        return f"search: {event['trials']} trials of {event['points']} points, {how}"
    if kind == "trial-finished":
        return f"{event['trial']} [{event['finished']}/{event['trials']}] {event['line']}"
    if kind == "heartbeat":
        return f"{event['what']}: {event['stage'] or 'it'} has been running for {event['stage_seconds']:.0f} s"
    return ""


def status_line(facts: Mapping[str, Any], width: int) -> str:
    """The live line: the parts that matter most come first, and as many stand there as the width takes."""
    parts = []
    if facts.get("trials"):
        failed = f", {facts['failed']} failed" if facts.get("failed") else ""
        parts.append(f"{facts.get('finished', 0)}/{facts['trials']} done{failed}")
        if facts.get("eta_seconds") and facts.get("finished", 0) < facts["trials"]:
            parts.append(f"ETA {_clock(facts['eta_seconds'])}")
    if facts.get("what"):
        doing = f"{facts['what']} {facts.get('stage') or ''}".strip()
        parts.append(doing + (f" {_clock(facts['stage_seconds'])}" if facts.get("stage_seconds") is not None else ""))
    if facts.get("best"):
        parts.append(best_in_words(facts["best"]))
    line = ""
    for part in parts:
        longer = f"{line} | {part}" if line else part
        if len(longer) > width:
            return line or part[: max(0, width)]
        line = longer
    return line


def best_in_words(best: Mapping[str, Any]) -> str:
    """The best trial so far with its latency, as a ratio to the baseline with its interval."""
    words = f"best {best['trial']}"
    if latency := best["metrics"].get("latency"):
        value = MetricValue.from_json(latency)
        if value.ratio is not None:
            return f"{words} {value.ratio.value:.3f}x ({value.ratio.low:.3f} to {value.ratio.high:.3f})"
        return f"{words} {value.value:.4g} {value.unit}"
    return words


def _clock(seconds: float) -> str:
    """A duration as people say it: 12 s, 2:05, 1:02:03."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, hours = divmod(whole, 60)[0], whole // 3600
    return f"{hours}:{minutes % 60:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
