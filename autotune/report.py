"""The terminal report of a sweep, from plain data: what came out, the front, the picks, what differs, what failed, where it was measured.

Names and messages come from models, scripts and libraries: they are data, stripped of everything that could steer a terminal. Without a
terminal the text is plain; where the stream can't hold Unicode it is ASCII.
"""

from __future__ import annotations

import io
import math
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, TextIO

from autotune.constraints import (
    Relative,
    Verdict,
    difference_from,
    digits,
    kind_of,
    parse_constraint,
    ratio_to,
    shown,
    shown_difference,
    shown_margin,
)
from autotune.digest import canonical
from autotune.errors import AutotuneError
from autotune.records import Interval, MetricValue, Status, TrialRecord
from autotune.selection import PICKS, State, verdict_sentence

__all__ = ["clean", "hints", "print_report", "render_report", "scatter", "verdict_sentence"]

RunSummary = Mapping[str, Any]

NARROW = 76  # below this many columns the tables become lists
LONGEST = 240  # characters of one message
LISTED = 5  # names in one sentence
MOVED, APART = 0.02, 0.1  # of the baseline's latency from measurement to measurement: its spread, and of one alone
BUSY = 0.1  # share of the CPUs' time taken by others that is worth a word
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-_]|\x9b[0-?]*[ -/]*[@-~]")
_ASCII = str.maketrans({
    "→": "->", "×": "x", "±": "+/-", "−": "-", "…": "...", "µ": "u", "μ": "u", "≤": "<=", "≥": ">=", "·": "-", "—": "-", "–": "-",
    "“": '"', "”": '"', "‘": "'", "’": "'", "\u00a0": " ",
})  # fmt: skip
_PICK_NAMES = {"most_accurate": "most accurate", "nearest_to_baseline": "nearest to baseline"}


def clean(text: object, *, ascii_only: bool = False, longest: int = LONGEST) -> str:
    """Make foreign text fit for a terminal: one line, no control, bidirectional or zero-width characters, no lone surrogates, not endless."""
    kept = []
    for character in _ESCAPE.sub("", str(text)):
        category = unicodedata.category(character)
        if character in "\n\r\t\v\f" or category in ("Zl", "Zp"):
            kept.append(" ")
        elif not category.startswith("C"):
            kept.append(character)
    line = " ".join("".join(kept).split())
    if ascii_only:
        line = line.translate(_ASCII).encode("ascii", "backslashreplace").decode()
    return line if len(line) <= longest else line[: longest - 3] + "..."


def print_report(summary: RunSummary, records: Iterable[TrialRecord], *, file: TextIO | None = None) -> None:
    """Write the report as the stream can take it: its width, its encoding, colour only on a terminal that wants it."""
    stream = file or sys.stdout
    terminal = bool(getattr(stream, "isatty", lambda: False)())
    color = terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM", "") != "dumb"
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower().replace("_", "-")
    width = shutil.get_terminal_size((100, 40)).columns
    text = render_report(summary, records, width=width, ascii_only=not encoding.startswith("utf"), color=color)
    stream.write(text)
    stream.flush()


def render_report(summary: RunSummary, records: Iterable[TrialRecord], *, width: int = 100, ascii_only: bool = False, color: bool = False) -> str:
    """Return the whole page. Lines are at most `width` columns, a path apart, which is never broken; the bundle's path comes last."""
    page = _Page(summary, list(records), max(width, 24), ascii_only, color)
    for section in (
        page.verdict, page.front, page.picks, page.differences, page.near_misses, page.ledger, page.hints, page.notes, page.surroundings,
        page.bundle,
    ):  # fmt: skip
        section()
    return page.text()


class _Page:
    """Writes the sections one after another, in columns where there is room, as lists where there is not."""

    def __init__(self, summary: RunSummary, records: list[TrialRecord], width: int, ascii_only: bool, color: bool) -> None:
        self.summary, self.records, self.width, self.ascii_only, self.color = summary, records, width, ascii_only, color
        self.by_id = {r.id: r for r in records}
        self.baseline = _metrics((summary.get("baseline") or {}).get("metrics"))
        self.best: Mapping[str, Any] = summary.get("best") or {}
        named = (str(summary.get(key) or "") for key in ("score", "metric"))
        self.score = next((n for n in named if n in self.baseline), "") or next(
            (n for n, m in self.baseline.items() if kind_of(m.unit) in ("share", "plain")), ""
        )
        self.names = [n for n in ("latency", self.score, "size") if n in self.baseline]
        self.out: list[str] = []

    def text(self) -> str:
        lines = [line.rstrip() for line in "\n".join(self.out).split("\n")]
        return "\n".join(lines).strip("\n") + "\n"

    def say(self, text: object, *, indent: str = "", hang: str = "") -> None:
        """Write one paragraph, wrapped; words longer than the line are broken."""
        self.out += textwrap.wrap(
            clean(text, ascii_only=self.ascii_only, longest=2000), self.width, initial_indent=indent, subsequent_indent=indent + hang
        )

    def heading(self, text: str) -> None:
        if self.out:
            self.out.append("")
        title = clean(text, ascii_only=self.ascii_only)
        self.out.append(f"\x1b[1m{title}\x1b[0m" if self.color else title)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write rows under headings; on a narrow page each row is a short list, its first cell the head."""
        cells = [[clean(cell, ascii_only=self.ascii_only) for cell in row] for row in rows]
        if self.width < NARROW:
            for row in cells:
                self.say(row[0])
                for column, cell in zip(columns[1:], row[1:], strict=True):
                    if cell:
                        self.say(f"{column}: {cell}", indent="  ", hang="  ")
            return
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(box=box.ASCII2 if self.ascii_only else box.SIMPLE, pad_edge=False, show_edge=False)
        for column in columns:
            table.add_column(clean(column, ascii_only=self.ascii_only), overflow="fold")
        for row in cells:
            table.add_row(*row)
        buffer = io.StringIO()
        Console(
            file=buffer, width=self.width, height=40, force_terminal=False, color_system=None, markup=False, highlight=False, emoji=False,
            legacy_windows=False,
        ).print(table)  # fmt: skip
        self.out += buffer.getvalue().rstrip("\n").split("\n")

    # ---- sections

    def verdict(self) -> None:
        self.say(self.summary.get("verdict") or f"The sweep ended: {self.summary.get('status', 'no status')}.")
        holdout = self.best.get("holdout")
        if holdout:
            value = _metric(holdout)
            change = ""
            if value.delta is not None:
                low, high = (shown_difference(v, value.unit) for v in (value.delta.low, value.delta.high))
                change = f", {shown_difference(value.delta.value, value.unit)} ({low.removesuffix(' pt')} to {high})"
            name = self.score or "score"
            rows = "rows that no choice was made on"
            if self.best.get("settled_on_all_rows"):
                rows = "rows that were also used, once, to settle this candidate"
            self.say(f"On the hold-out, {value.samples:,} {rows}: {name} {shown(value.value, value.unit)}{change}")
        facts = [self._baseline_words(name) for name in self.names]
        if facts:
            self.say(f"Baseline: {', '.join(facts)}")
        whole = self.best.get("baseline_all_rows")
        mine = _metrics(self.best.get("metrics")).get(self.score)
        if whole and mine is not None and mine.samples == _metric(whole).samples:
            before = _metric(whole)
            self.say(f"Over all {mine.samples:,} rows: {self.score} {shown(before.value, before.unit)} → {shown(mine.value, mine.unit)}")
        counts = self.summary.get("trials") or Counter(str(r.status) for r in self.records)
        if counts:
            total = sum(int(v) for v in counts.values())
            line = f"{total} trials: " + ", ".join(f"{v} {k}" for k, v in counts.items() if v)
            space = self.summary.get("space") or {}
            if space:
                line += f"; space: {_count(space.get('valid'))} valid points, {_count(space.get('invalid'))} refused"
            if self.summary.get("seconds") is not None:
                line += f"; {_duration(float(self.summary['seconds']))}"
            self.say(line)
        self.say((self.summary.get("ledger") or {}).get("words", ""))

    def _baseline_words(self, name: str) -> str:
        value = self.baseline[name]
        text = f"{name} {shown(value.value, value.unit)}"
        if not value.low < value.high:
            return text
        low, high = shown(value.low, value.unit), shown(value.high, value.unit)
        unit = high.rpartition(" ")[2]
        return f"{text} ({low.removesuffix(f' {unit}')} to {high})"

    def front(self) -> None:
        members = [self.by_id[i] for i in self.summary.get("front") or () if i in self.by_id]
        if not members:
            return
        self.heading("Front")
        groups = self.summary.get("groups") or {}
        columns = ["trial", *(_column(n, self.baseline[n]) for n in self.names), "limits", "passes"]
        rows = [["baseline", *(shown(self.baseline[n].value, self.baseline[n].unit) for n in self.names), "", ""]]
        for record in members:
            ties = len(groups.get(record.id, ())) - 1
            mark = " *" if record.id == self.best.get("id") else ""
            head = f"{record.id}{mark}" + (f" (+{ties} tied)" if ties > 0 else "")
            rows.append([head, *(self._against_baseline(record, n) for n in self.names), _worst_verdict(record.constraints), _chain(record)])
        self.table(columns, rows)
        self.say("* delivered" if self.best.get("id") in {r.id for r in members} else "")
        self._certainty()
        self._scatter(members)

    def _certainty(self) -> None:
        """Say how sure the front is, what counts for nothing, and what was spent to settle it."""
        membership: Mapping[str, Any] = self.summary.get("membership") or {}
        open_ = {i: m for i, m in membership.items() if m.get("state") == State.AMBIGUOUS and m.get("layer")}
        by_state = {state: [i for i, m in membership.items() if m.get("state") == state] for state in State}
        parts = [f"certain: {_named(by_state[State.CERTAIN])}"] if by_state[State.CERTAIN] else []
        parts += [f"tied within the tolerance: {_named(by_state[State.TIED])}"] if by_state[State.TIED] else []
        parts += [f"no better than another but for the tolerance: {_named(by_state[State.COVERED])}"] if by_state[State.COVERED] else []
        parts += [f"not resolved: {_named(open_)}"] if open_ else []
        if not parts:
            return
        eps: Mapping[str, Any] = self.summary.get("eps") or {}
        tolerance = f" (differences below {eps['latency'] * 100:.3g} % of latency and {eps['score'] * 100:.3g} pt count for nothing)" if eps else ""
        self.say(f"On the front, with 95 % for all together, {'; '.join(parts)}{tolerance}")
        for trial, place in list(open_.items())[:LISTED]:
            told = ", ".join(place.get("open") or ()) or "nothing that more samples could tell"
            self.say(f"{trial} may be beaten by {_named(place.get('rivals') or ())}; open: {told}", indent="  ", hang="  ")
        spent = self.summary.get("resolution")
        if spent:
            self.say(
                f"{len(spent['turns'])} models were timed again in turns to settle it: {_duration(float(spent['seconds']))} of at most "
                f"{_duration(float(spent['budget_s']))}"
            )

    def _against_baseline(self, record: TrialRecord, name: str) -> str:
        value = record.metrics.get(name)
        if value is None:
            return "not measured"
        baseline = self.baseline[name]
        if kind_of(baseline.unit) in ("time", "bytes", "rate"):
            ratio = ratio_to(value, baseline) or Interval.exactly(math.nan)
            text = f"{shown(value.value, value.unit)}, {digits(ratio.value)}x"
            return text if ratio.low == ratio.high else f"{text} ({digits(ratio.low)} to {digits(ratio.high)})"
        change = difference_from(value, baseline)
        text = shown_difference(change.value, baseline.unit)
        other_rows = value.samples != baseline.samples and value.delta is not None
        if not other_rows:  # on other rows the baseline has another value too: only the difference compares
            text = f"{shown(value.value, value.unit)}, {text}"
        low, high = (shown_difference(v, baseline.unit).removesuffix(" pt") for v in (change.low, change.high))
        text = text if change.low == change.high else f"{text} ({low} to {high})"
        return f"{text} on {value.samples:,} rows" if other_rows else text

    def _scatter(self, members: list[TrialRecord]) -> None:
        if "latency" not in self.baseline or not self.score:
            return
        points = []
        on_front, best = {r.id for r in members}, self.best.get("id")
        for record in self.records:
            value, score = record.metrics.get("latency"), record.metrics.get(self.score)
            if not record.measured or value is None or score is None:
                continue
            ratio = ratio_to(value, self.baseline["latency"])
            if ratio is None:
                continue
            mark = "#" if record.id == best else "o" if record.id in on_front else "." if record.status is Status.OK else "x"
            # By its difference: a finalist was scored on more rows than the others, where the baseline has another value.
            points.append((ratio.value, self.baseline[self.score].value + difference_from(score, self.baseline[self.score]).value, mark))
        points.append((1.0, self.baseline[self.score].value, "B"))
        wanted = [(x, y) for x, y, mark in points if mark in "#oB"]
        plot = scatter(points, keep=wanted, width=min(self.width, 72), height=10)
        if not plot:
            return
        self.out += ["", *(clean_line(line, self.ascii_only) for line in plot)]
        legend = "across: latency, times the baseline; up: " + self.score
        self.say(f"{legend}. # delivered, o front, . other, x not feasible, B baseline")

    def picks(self) -> None:
        picks: Mapping[str, str] = self.summary.get("picks") or {}
        chosen = [(name, self.by_id[picks[name]]) for name in PICKS if picks.get(name) in self.by_id]
        if not chosen:
            return
        self.heading("Picks")
        columns = ["pick", "trial", *(_column(n, self.baseline[n]) for n in self.names), "margin to each limit"]
        rows = []
        for name, record in chosen:
            margins = "; ".join(self._margin(c) for c in record.constraints) or "no limits set"
            rows.append([_PICK_NAMES.get(name, name), record.id, *(self._brief(record, n) for n in self.names), margins])
        self.table(columns, rows)

    def _brief(self, record: TrialRecord, name: str) -> str:
        value, baseline = record.metrics.get(name), self.baseline[name]
        if value is None:
            return "not measured"
        if kind_of(baseline.unit) in ("time", "bytes", "rate"):
            return f"{digits((ratio_to(value, baseline) or Interval.exactly(math.nan)).value)}x"
        return shown_difference(difference_from(value, baseline).value, baseline.unit)

    def _margin(self, constraint: Mapping[str, Any], *, with_expr: bool = True) -> str:
        """Say the room left under a limit: `accuracy >= baseline - 1.0pt: 0.6 pt of room (met)`."""
        verdict, amount = constraint.get("verdict", ""), constraint.get("amount")
        head = f"{constraint.get('expr')}: " if with_expr else ""
        if amount is None or not math.isfinite(float(amount)):
            return f"{head}not measured ({verdict})"
        unit, relative = constraint.get("unit"), constraint.get("relative")
        if unit is None or relative is None:  # written without them: the expression tells
            try:
                parsed = parse_constraint(str(constraint.get("expr")), metrics={n: m.unit for n, m in self.baseline.items()}, score=self.score)
                unit, relative = parsed.unit, parsed.relative
            except AutotuneError:
                unit, relative = "", Relative.NONE
        size = shown_margin(abs(float(amount)), unit, relative).lstrip("+")
        return f"{head}{size} {'of room' if float(amount) >= 0 else 'missing'} ({verdict})"

    def differences(self) -> None:
        point: Mapping[str, Any] | None = self.best.get("point")
        if not point:
            return
        default = next((r.point for r in self.records if r.origin == "default"), None)
        if default is None:
            self.heading(f"Configuration of {self.best.get('id')}")
            for name, value in point.items():
                self.say(f"{name}: {_value(value)}", indent="  ", hang="  ")
            return
        lines = []
        for name in [*point, *(n for n in default if n not in point)]:
            before, after = (_choice(p, name) for p in (default, point))
            if before != after:
                lines.append(f"{name}: {before} → {after}")
        self.heading(f"{self.best.get('id')} against the default configuration")
        for line in lines or ["It is the default configuration."]:
            self.say(line, indent="  ", hang="  ")

    def near_misses(self) -> None:
        misses = self.summary.get("near_misses") or ()
        if not misses or self.summary.get("front"):
            return
        self.heading("Nearest misses")
        for miss in misses:
            parts = []
            for blocking, eased in zip(miss.get("blocking", ()), miss.get("relaxed", ()) or [""] * len(miss.get("blocking", ())), strict=False):
                text = self._margin(blocking)
                if blocking.get("needed"):
                    text += f"; {blocking['needed']}"
                parts.append(f"{text}; meets {eased}" if eased else text)
            gain = f". It would give: {miss['buys']}" if miss.get("buys") else ""
            self.say(f"{miss.get('id')}: {'; '.join(parts)}{gain}", indent="  ", hang="  ")

    def ledger(self) -> None:
        """Trials that did not end well, by cause, with one message each."""
        causes: dict[str, list[tuple[str, str]]] = {}
        for record in self.records:
            if record.status is Status.OK:
                continue
            if record.status in (Status.INFEASIBLE, Status.UNDECIDED):
                blocking = [c for c in record.constraints if c.get("verdict") in (Verdict.VIOLATED, Verdict.UNDECIDED)]
                for c in blocking[:1]:
                    causes.setdefault(f"{record.status}: {c.get('expr')}", []).append((record.id, self._margin(c, with_expr=False)))
                if blocking:
                    continue
            head = record.reason + (f" in {record.stage}" if record.stage else "")
            causes.setdefault(head, []).append((record.id, record.message or "no message"))
        if not causes:
            return
        self.heading("What did not end well")
        for head, found in sorted(causes.items(), key=lambda item: (-len(item[1]), item[0])):
            trial, message = found[0]
            self.say(f"{len(found)} x {head}", indent="  ", hang="  ")
            self.say(f"{trial}: {clean(message)}", indent="      ", hang="  ")

    def hints(self) -> None:
        found = hints(self.records)
        if found:
            self.heading("Worth knowing")
            for hint in found:
                self.say(f"- {clean(hint)}", hang="  ")

    def notes(self) -> None:
        notes = [n for n in self.summary.get("notes") or () if n]
        best = self.by_id.get(str(self.best.get("id", "")))
        doubts = [c for c in (self.best.get("constraints") or (best.constraints if best else ())) if c.get("needed")]
        if not notes and not doubts:
            return
        self.heading("Notes")
        for note in notes:
            self.say(f"- {clean(note)}", hang="  ")
        for c in doubts:
            self.say(f"- {c.get('expr')} is {c.get('verdict')}: {c['needed']}", hang="  ")

    def surroundings(self) -> None:
        found: Mapping[str, Any] = self.summary.get("surroundings") or {}
        if not found:
            return
        self.heading("Measured on")
        cpus = found.get("effective_cpus")
        machine = [str(found.get("cpu_model", "")), f"{cpus} CPUs" if cpus else "", " ".join(found.get("cpu_flags") or ())]
        self.say(", ".join(m for m in machine if m), indent="  ", hang="  ")
        target: Mapping[str, Any] = self.summary.get("target") or {}
        asked = [str(target.get("ep", "")), f"threads: {target['threads']}" if target.get("threads") else ""]
        asked += [f"batch size {target['batch_size']}" if target.get("batch_size") else ""]
        self.say(", ".join(a for a in asked if a), indent="  ", hang="  ")
        system = [str(found.get("platform", "")), f"governor {found['governor']}" if found.get("governor") else ""]
        system += [f"Python {found['python']}" if found.get("python") else ""]
        self.say(", ".join(m for m in system if m), indent="  ", hang="  ")
        versions = found.get("versions") or {}
        if versions:
            self.say(", ".join(f"{k} {v}" for k, v in versions.items()), indent="  ", hang="  ")
        for name, value in (found.get("ort_variables") or {}).items():
            self.say(f"{name}={value}", indent="  ", hang="  ")

    def bundle(self) -> None:
        path = self.summary.get("bundle")
        if not path:
            return
        self.heading("Bundle")
        self.out.append(clean(path, ascii_only=self.ascii_only, longest=4096))  # whole, so that it can be copied


def hints(records: Iterable[TrialRecord]) -> list[str]:
    """Say what the evidence of the stages holds that no verdict tells: passes without effect, denormal numbers, a machine that was disturbed."""
    no_ops: dict[str, list[str]] = {}
    denormals: dict[str, list[str]] = {}
    disturbed: dict[str, tuple[int, int]] = {}
    counted_all_the_same, noisy, loads, rounds = [], [], [], 0
    occasions: list[tuple[int, float, str, float]] = []
    for record in records:
        made = any(stage.key for stage in record.stages)  # by a pass that makes a model; settings alone leave the bytes as they are
        notes = {stage.name: stage.notes for stage in record.stages}
        check, latency = notes.get("check", {}), notes.get("latency", {})
        no_op = record.unchanged or str(check.get("no_op") or "")
        if made and no_op:
            no_ops.setdefault(no_op, []).append(record.id)
        hint = (check.get("denormals") or {}).get("hint")
        if hint:
            denormals.setdefault(str(hint), []).append(record.id)
        spoilt, of = int(latency.get("rounds_disturbed") or 0), int(latency.get("rounds") or 0)
        rounds += of
        if spoilt:
            disturbed[record.id] = spoilt, of
            counted_all_the_same += [record.id] if latency.get("rounds_used") == of else []
        noisy += [record.id] if latency.get("noisy") else []
        loads += [float(latency["foreign_load"])] if latency.get("foreign_load") is not None else []
        moved = latency.get("occasions")
        occasions += [(int(moved["count"]), float(moved["sd"]), record.id, float(moved["away"]))] if moved else []
    found = [f"passes without effect in {_named(trials)}: {why}" for why, trials in no_ops.items()]
    found += [f"{_named(trials)}: {hint}" for hint, trials in denormals.items()]
    if disturbed:
        worst = sorted(disturbed, key=lambda i: -disturbed[i][0] / disturbed[i][1])
        shares = _named(f"{i} {disturbed[i][0]} of {disturbed[i][1]}" for i in worst)
        total = sum(spoilt for spoilt, _ in disturbed.values())
        found.append(f"{total:,} of {rounds:,} timed rounds were disturbed by something else on the machine, and repeated ({shares})")
    if counted_all_the_same:
        found.append(f"too few rounds were left undisturbed, so all of them count, in {_named(counted_all_the_same)}")
    if noisy:
        found.append(f"noisy, the interval of the ratio being wider than a tenth of it: {_named(noisy)}")
    if occasions and (spread := max(occasions)[1]) >= MOVED:
        found.append(f"the baseline's own latency moved by {spread:.0%} (standard deviation) between measurements; intervals are widened by that")
    if apart := [trial for _, _, trial, away in occasions if away >= APART]:
        found.append(f"timed while the baseline took {APART:.0%} longer or shorter than it usually did, so with wide intervals: {_named(apart)}")
    if loads and median(loads) >= BUSY:
        found.append(f"others took {median(loads):.0%} of the CPUs' time while models were timed (median of the trials)")
    return found


# ---------------------------------------------------------------------------------------------------------------- pieces


def clean_line(line: str, ascii_only: bool) -> str:
    """Make a drawn line fit for the stream without touching its spaces."""
    return line.translate(_ASCII).encode("ascii", "backslashreplace").decode() if ascii_only else line


def scatter(points: Sequence[tuple[float, float, str]], *, keep: Sequence[tuple[float, float]] = (), width: int = 60, height: int = 10) -> list[str]:
    """Draw `(x, y, mark)` points as text of at most `width` columns. Later points cover earlier ones.

    The axes span `keep` (all points, when empty) and a margin; points outside are left out and counted on the last line. Empty when
    nothing finite is to be shown or all of it lies in one spot.
    """
    finite = [p for p in points if math.isfinite(p[0]) and math.isfinite(p[1])]
    span = [p for p in keep if math.isfinite(p[0]) and math.isfinite(p[1])] or [(x, y) for x, y, _ in finite]
    if not span:
        return []
    (left, right), (bottom, top) = (_limits([p[axis] for p in span]) for axis in (0, 1))
    labels = [f"{digits(v, 4)}" for v in (top, bottom)]
    gutter = max(map(len, labels)) + 1
    columns = width - gutter - 1
    if len({(x, y) for x, y, _ in finite}) < 2 or columns < 10:
        return []
    grid = [[" "] * columns for _ in range(height)]
    outside = 0
    for x, y, mark in finite:
        if not (left <= x <= right and bottom <= y <= top):
            outside += 1
            continue
        column = round((x - left) / (right - left) * (columns - 1))
        row = round((top - y) / (top - bottom) * (height - 1))
        grid[row][column] = mark
    lines = []
    for i, cells in enumerate(grid):
        label = labels[0] if i == 0 else labels[1] if i == height - 1 else ""
        lines.append(f"{label:>{gutter - 1}} |{''.join(cells)}".rstrip())
    lines.append(" " * gutter + "+" + "-" * columns)
    first, last = f"{digits(left)}x", f"{digits(right)}x"
    lines.append(" " * (gutter + 1) + first + last.rjust(columns - len(first)))
    if outside:
        lines.append(f"{outside} more outside")
    return lines


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Span of the values and a twentieth on each side; never empty, and never below zero where no value is."""
    low, high = min(values), max(values)
    margin = (high - low) * 0.05 or max(abs(high), 1e-9) * 0.05
    return max(low - margin, 0.0) if low >= 0 else low - margin, high + margin


def _metric(value: Any) -> MetricValue:
    return value if isinstance(value, MetricValue) else MetricValue.from_json(value)


def _metrics(values: Mapping[str, Any] | None) -> dict[str, MetricValue]:
    return {k: _metric(v) for k, v in (values or {}).items()}


def _column(name: str, baseline: MetricValue) -> str:
    return {"latency": "latency p50"}.get(name, name) if baseline else name


def _named(trials: Iterable[str]) -> str:
    names = list(trials)
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


def _chain(record: TrialRecord) -> str:
    """The passes of a point in order, slots left out apart."""
    chain = [str(v) for k, v in record.point.items() if "." not in k and v is not None]
    return " > ".join(chain) or ("untouched" if record.origin == "untouched" else "none")


def _worst_verdict(constraints: Iterable[Mapping[str, Any]]) -> str:
    order = [Verdict.VIOLATED, Verdict.UNDECIDED, Verdict.MET, Verdict.CERTAIN]
    present = {str(c.get("verdict")) for c in constraints}
    return next((str(v) for v in order if str(v) in present), "")


def _choice(point: Mapping[str, Any], name: str) -> str:
    """The value of a variable in a point; a slot left out and a parameter that plays no part say so."""
    if name not in point:
        return "not in use"
    return "left out" if point[name] is None and "." not in name else _value(point[name])


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return canonical(value)
    except (TypeError, ValueError):
        return repr(value)


def _count(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{sum(int(v) for v in value.values()):,}"
    return f"{int(value):,}" if value is not None else "?"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
