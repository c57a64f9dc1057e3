"""Constraints: one line each, units required, judged on intervals.

    accuracy >= baseline - 1.0pt      latency <= 5ms      size <= 0.5x      throughput >= 200/s      mse <= baseline * 1.1

`x` and `baseline * k` are multiples of the baseline; `pt` is one hundredth of a share, for differences; `%` is never a unit, since
on a share it has two readings. Limits relative to the baseline are judged on paired comparisons with it.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import ConfigError, nearest
from autotune.records import Interval, MetricValue

WHO = "constraints"
SCORE = "score"  # names the accuracy metric, whatever it is called


class Relative(enum.StrEnum):
    """What a limit is held against: nothing, the difference from the baseline, or the ratio to it."""

    NONE = "none"
    DELTA = "delta"
    RATIO = "ratio"


class Verdict(enum.StrEnum):
    """How a constraint stands: the whole interval meets it, the estimate does, the estimate does not, the whole interval misses it."""

    CERTAIN = "certain"
    MET = "met"
    UNDECIDED = "undecided"
    VIOLATED = "violated"


@dataclass(frozen=True)
class Constraint:
    """One limit. `limit` is in the metric's own unit (ms, bytes, share, per second), a difference in it, or a factor."""

    text: str
    metric: str
    sense: str  # ">=" or "<="
    limit: float
    unit: str = ""  # of the metric
    relative: Relative = Relative.NONE


@dataclass(frozen=True)
class Judgement:
    """One constraint held against one model.

    `value` is what was compared: the metric, its difference or its ratio; None when it was not measured. `amount` is the margin at
    the estimate, in the same unit as `value`, positive where there is room left. `needed` says about how many more rows or runs
    would settle a verdict that is not certain. `scale` makes margins of different constraints comparable.
    """

    constraint: Constraint
    verdict: Verdict
    amount: float
    value: Interval | None
    needed: str = ""
    scale: float = 1.0

    @property
    def limit(self) -> float:
        return self.constraint.limit

    @property
    def lowest_amount(self) -> float:
        """The margin at the worse end of the interval; minus infinity when it is not known."""
        if self.value is None:
            return -math.inf
        return _margin(self.constraint, self.value).low

    def to_json(self) -> dict[str, Any]:
        return {
            "expr": self.constraint.text, "metric": self.constraint.metric, "verdict": str(self.verdict), "amount": self.amount,
            "needed": self.needed, "value": self.value.to_json() if self.value else None, "limit": self.limit,
            "unit": self.constraint.unit, "relative": str(self.constraint.relative),
        }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- reading

_TIME = {"ns": 1e-6, "us": 1e-3, "µs": 1e-3, "μs": 1e-3, "ms": 1.0, "s": 1e3}
_BYTES = {
    "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40,
}  # fmt: skip
_RATE = {"/s": 1.0, "/min": 1 / 60}
_POINTS = {"pt": 0.01, "pts": 0.01, "pp": 0.01}
_PLAIN = {"": 1.0}

_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_STATEMENT = re.compile(r"\s*(?P<name>.*?)\s*(?P<sense>>=|<=|≥|≤|=>|=<|==|!=|=|<|>)\s*(?P<limit>.*?)\s*", re.DOTALL)
_ABSOLUTE = re.compile(rf"(?P<number>[+-]?{_NUMBER})\s*(?P<unit>[^\d\s.]*)")
_DELTA = re.compile(rf"baseline\s*(?P<sign>[+-])\s*(?P<number>{_NUMBER})\s*(?P<unit>[^\d\s.]*)")
_RATIO = re.compile(rf"baseline\s*[*×]\s*(?P<after>{_NUMBER})|(?P<before>{_NUMBER})\s*[*×]\s*baseline")
EXAMPLES = "Examples: accuracy >= baseline - 1.0pt, latency <= 5ms, latency <= 0.5x, size <= 100MB"


def kind_of(unit: str) -> str:
    """Sort a metric's unit into `time`, `bytes`, `rate`, `share` or `plain`."""
    if unit.endswith("/s"):
        return "rate"
    return {"ms": "time", "bytes": "bytes", "share": "share"}.get(unit, "plain")


def is_cost(unit: str) -> bool | None:
    """Say whether less of it is better as far as the unit tells (time, bytes: yes; a rate: no; a score: None, it depends)."""
    return {"time": True, "bytes": True, "rate": False}.get(kind_of(unit))


def metric_named(name: str, metrics: Iterable[str], *, score: str = "", who: str = WHO) -> str:
    """Return the metric that a user's name stands for: its own name, `score` for the accuracy metric, `latency.p50` for `latency`.

    Raises `ConfigError` with the nearest name for an unknown one.
    """
    names = set(metrics)
    if name == "latency.p50" and "latency" in names:
        return "latency"  # the same number
    if name in names:
        return name
    if name == SCORE and score in names:
        return score
    raise ConfigError(who, "a metric must be one that is measured", repr(name), nearest(name, names | ({SCORE} if score in names else set())))


def parse_constraint(text: str, *, metrics: Mapping[str, str], score: str = "", higher_is_better: Mapping[str, bool] | None = None) -> Constraint:
    """Read one constraint. `metrics` maps the name of each metric to its unit; `score` names the accuracy metric.

    `higher_is_better` says it for metrics whose unit doesn't tell, so that a limit on the wrong side (an error rate that must be at
    least something) is refused. Raises `ConfigError` for an unknown metric, a missing or wrong unit, or a form that can't be read.
    """
    match = _STATEMENT.fullmatch(text) if isinstance(text, str) else None
    if match is None or not match["name"] or not match["limit"]:
        raise ConfigError(WHO, "a constraint must read `metric >= limit` or `metric <= limit`", repr(text), EXAMPLES)
    metric = metric_named(match["name"], metrics, score=score)
    unit = metrics[metric]
    sense = _sense(match["sense"], text)
    cost = is_cost(unit)
    if cost is None and higher_is_better is not None and metric in higher_is_better:
        cost = not higher_is_better[metric]
    if cost is not None and cost != (sense == "<="):
        better, right = ("lower", "<=") if cost else ("higher", ">=")
        raise ConfigError(
            WHO, f"{metric} is better when {better}, so its limit must be written with {right}", repr(text),
            "As it stands, the worst models would meet it.",
        )  # fmt: skip
    limit, relative = _read_limit(match["limit"], text, f"{match['name']} {sense}", metric, kind_of(unit), unit)
    return Constraint(text=" ".join(text.split()), metric=metric, sense=sense, limit=limit, unit=unit, relative=relative)


def _sense(written: str, text: str) -> str:
    sense = {"≥": ">=", "≤": "<="}.get(written, written)
    if sense not in (">=", "<="):
        raise ConfigError(WHO, "a constraint must use >= or <=", repr(text), "A limit that is just reached counts as met.")
    return sense


def _read_limit(limit: str, text: str, head: str, metric: str, kind: str, own_unit: str) -> tuple[float, Relative]:
    if limit == "baseline":
        return 0.0, Relative.DELTA
    if found := _RATIO.fullmatch(limit):
        return _factor(found["after"] or found["before"], text), Relative.RATIO
    if found := _DELTA.fullmatch(limit):
        if "%" in found["unit"]:
            _refuse_percent(text, head, kind, found["number"], found["sign"])
        number = _in_unit(found["number"], found["unit"], _difference_units(kind, own_unit), text, _difference_help(head, kind, found))
        if kind == "share" and number > 1:
            raise ConfigError(WHO, f"a difference of {metric} can be at most 100pt", repr(text), "1.0pt is one hundredth.")
        return (number if found["sign"] == "+" else -number), Relative.DELTA
    if found := _ABSOLUTE.fullmatch(limit):
        if found["unit"] in ("x", "X", "×"):
            return _factor(found["number"], text), Relative.RATIO
        if "%" in found["unit"]:
            _refuse_percent(text, head, kind, found["number"], "")
        number = _in_unit(found["number"], found["unit"], _absolute_units(kind, own_unit), text, _absolute_help(head, kind, found))
        if kind == "share" and not 0 <= number <= 1:
            raise ConfigError(WHO, f"a limit on {metric} must be a share from 0 to 1", repr(text), _absolute_help(head, kind, found))
        if kind in ("time", "bytes", "rate") and number <= 0:
            raise ConfigError(WHO, f"a limit on {metric} must be above 0", repr(text))
        return number, Relative.NONE
    raise ConfigError(WHO, "a limit must be a number with its unit, or relative to `baseline`", repr(text), EXAMPLES)


def _factor(number: str, text: str) -> float:
    factor = float(number)
    if not 0 < factor < math.inf:
        raise ConfigError(WHO, "a multiple of the baseline must be above 0", repr(text))
    return factor


def _absolute_units(kind: str, own_unit: str) -> Mapping[str, float]:
    plain = {**_PLAIN, own_unit.lower(): 1.0}
    return {"time": _TIME, "bytes": _BYTES, "rate": _RATE, "share": _PLAIN}.get(kind, plain)


def _difference_units(kind: str, own_unit: str) -> Mapping[str, float]:
    return _POINTS if kind == "share" else _absolute_units(kind, own_unit)


def _in_unit(number: str, unit: str, units: Mapping[str, float], text: str, help_: str) -> float:
    factor = units.get(unit.lower())
    value = float(number)
    if not math.isfinite(value):
        raise ConfigError(WHO, "a limit must be a finite number", repr(text))
    if factor is None:
        raise ConfigError(WHO, "a limit must be a number with a unit that the metric has", repr(text), help_)
    return value * factor


def _absolute_help(head: str, kind: str, found: re.Match[str]) -> str:
    number = found["number"]
    if kind == "share":
        share = float(number) / 100 if float(number) > 1 or found["unit"].lower() in _POINTS else float(number)
        return f"Write `{head} {share:g}` for a share of all examples, or `{head} baseline - 1.0pt` for a difference from the baseline."
    if kind == "plain":
        return f"Write `{head} {number}`, or `{head} baseline * 1.1` for a multiple of the baseline."
    unit, others = {"time": ("ms", "ns, us, s"), "bytes": ("MB", "B, KB, GB, KiB, MiB, GiB"), "rate": ("/s", "/min")}[kind]
    return f"Write `{head} {number}{unit}` (or in {others}), or `{head} {number}x` for a multiple of the baseline."


def _difference_help(head: str, kind: str, found: re.Match[str]) -> str:
    sign, number = found["sign"], found["number"]
    if kind == "share" and not found["unit"]:
        return (
            f"Write `{head} baseline {sign} {float(number) * 100:g}pt` if {number} is a share, "
            f"`{head} baseline {sign} {number}pt` if it is hundredths."
        )
    unit = {"share": "pt", "time": "ms", "bytes": "MB", "rate": "/s"}.get(kind, "")
    return f"Write `{head} baseline {sign} {number}{unit}`, or `{head} baseline * {1.1 if sign == '+' else 0.9}` for a multiple of it."


def _refuse_percent(text: str, head: str, kind: str, number: str, sign: str) -> None:
    """Refuse `%`, and write out each thing that it can mean here."""
    part = float(number) / 100
    multiple = {"": part, "+": 1 + part, "-": 1 - part}[sign]
    readings = [f"`{head} baseline * {multiple:.6g}`"]
    if kind == "share":
        readings.insert(0, f"`{head} baseline {sign} {float(number):g}pt`" if sign else f"`{head} {part:.6g}`")
    raise ConfigError(WHO, "a limit can't be in %, which may be read in more ways than one", repr(text), f"Write {' or '.join(readings)}.")


# ---------------------------------------------------------------------------------------------------------------- judging


def ratio_to(value: MetricValue, baseline: MetricValue) -> Interval | None:
    """Return value / baseline with its interval: the paired one where there is one, else the widest the two intervals allow.

    None when the baseline is not above zero.
    """
    if value.ratio is not None:
        return _open(value.ratio)
    if not baseline.value > 0:
        return None
    own, other = _open(value.interval), _open(baseline.interval)
    estimate = value.value / baseline.value
    if other.low <= 0:
        return Interval(estimate, min(estimate, 0.0) if own.low >= 0 else -math.inf, math.inf)
    corners = [a / b for a in (own.low, own.high) for b in (other.low, other.high) if not (math.isinf(a) and math.isinf(b))]
    return Interval(estimate, min([estimate, *corners]), max([estimate, *corners]))


def difference_from(value: MetricValue, baseline: MetricValue) -> Interval:
    """Return value - baseline with its interval: the paired one where there is one, else the widest the two intervals allow."""
    if value.delta is not None:
        return _open(value.delta)
    own, other = _open(value.interval), _open(baseline.interval)
    return Interval(value.value - baseline.value, own.low - other.high, own.high - other.low)


def _open(interval: Interval) -> Interval:
    """A limit that is no number is one that is not known."""
    return Interval(interval.value, -math.inf if math.isnan(interval.low) else interval.low, math.inf if math.isnan(interval.high) else interval.high)


def check_baseline(constraint: Constraint, baseline: MetricValue | None) -> None:
    """Raise `ConfigError` when a constraint makes no sense for this baseline: a multiple of nothing, or of a negative number."""
    if constraint.relative is not Relative.RATIO or baseline is None or baseline.value > 0:
        return
    raise ConfigError(
        WHO, f"`{constraint.text}` needs a baseline above 0, since it is a multiple of it", f"{constraint.metric} = {baseline.value:g}",
        f"Write an absolute limit, or a difference: `{constraint.metric} {constraint.sense} baseline + ...`.",
    )  # fmt: skip


def judge(constraint: Constraint, value: MetricValue | None, baseline: MetricValue | None) -> Judgement:
    """Hold one constraint against one model's metric. `value` None: not measured, which leaves the verdict undecided.

    A limit is reached, not missed, by a value equal to it up to one part in 10^9 of the scale (shares are quotients and carry rounding).
    Raises `ConfigError` for a multiple of a baseline that is not above zero.
    """
    check_baseline(constraint, baseline)
    compared = None if value is None else _compared(constraint, value, baseline)
    if value is None or compared is None:
        return Judgement(constraint, Verdict.UNDECIDED, math.nan, None, f"{constraint.metric} was not measured", 1.0)
    scale = _scale(constraint, baseline)
    if not math.isfinite(compared.value):
        return Judgement(constraint, Verdict.VIOLATED, -math.inf, compared, "", scale)
    margin = _margin(constraint, compared)
    slack = 1e-9 * max(scale, abs(compared.value))
    if margin.low >= -slack:
        verdict = Verdict.CERTAIN
    elif margin.high < -slack:
        verdict = Verdict.VIOLATED
    else:
        verdict = Verdict.MET if margin.value >= -slack else Verdict.UNDECIDED
    needed = _needed(margin, value, baseline) if verdict in (Verdict.MET, Verdict.UNDECIDED) else ""
    return Judgement(constraint, verdict, margin.value, compared, needed, scale)


def judge_all(constraints: Iterable[Constraint], metrics: Mapping[str, MetricValue], baseline: Mapping[str, MetricValue]) -> tuple[Judgement, ...]:
    """Hold every constraint against one model's metrics, in the order of the constraints."""
    return tuple(judge(c, metrics.get(c.metric), baseline.get(c.metric)) for c in constraints)


def feasible(judgements: Iterable[Judgement], *, strict: bool = False) -> bool:
    """Say whether all verdicts are certain or met; with `strict`, whether all are certain."""
    allowed = (Verdict.CERTAIN,) if strict else (Verdict.CERTAIN, Verdict.MET)
    return all(j.verdict in allowed for j in judgements)


NOT_MEASURED_VIOLATION = 0.1
POWER = 1 + 0.8416 / 1.96  # half-widths between estimate and limit, for a verdict that more samples settle in four of five cases
LARGEST_VIOLATION = 1e6


def violation(judgement: Judgement, *, strict: bool = False) -> float:
    """Return how far a constraint is missed, as samplers want it: at most 0 where it is feasible, finite always.

    The margin is divided by the constraint's scale (the limit; for a difference the larger of it and a hundredth of the baseline), so
    that violations of several constraints can be added. With `strict` the worse end of the interval counts.
    """
    if judgement.value is None:
        return NOT_MEASURED_VIOLATION
    amount = judgement.lowest_amount if strict else judgement.amount
    size = min(max(-amount / judgement.scale, -LARGEST_VIOLATION), LARGEST_VIOLATION) if not math.isnan(amount) else LARGEST_VIOLATION
    if feasible([judgement], strict=strict):
        return min(size, 0.0)
    return max(size, 1e-9)


def _compared(constraint: Constraint, value: MetricValue, baseline: MetricValue | None) -> Interval | None:
    if constraint.relative is Relative.NONE:
        return _open(value.interval)
    if constraint.relative is Relative.DELTA:
        if baseline is None:
            return None if value.delta is None else _open(value.delta)
        return difference_from(value, baseline)
    if baseline is None:
        return None if value.ratio is None else _open(value.ratio)
    return ratio_to(value, baseline)


def _margin(constraint: Constraint, compared: Interval) -> Interval:
    """Room left: positive where the limit is kept."""
    limit = constraint.limit
    if constraint.sense == ">=":
        return Interval(compared.value - limit, compared.low - limit, compared.high - limit)
    return Interval(limit - compared.value, limit - compared.high, limit - compared.low)


def _scale(constraint: Constraint, baseline: MetricValue | None) -> float:
    scale = abs(constraint.limit)
    if constraint.relative is Relative.DELTA and baseline is not None and math.isfinite(baseline.value):
        scale = max(scale, 0.01 * abs(baseline.value))
    return scale or 1.0


def _needed(margin: Interval, value: MetricValue, baseline: MetricValue | None) -> str:
    """Estimate how many more samples would settle it in four of five cases, if the truth is the estimate.

    The half-width shrinks as one over the root of the samples; it must leave room for a new estimate that falls short by .84 of its own
    standard errors, of which the half-width is 1.96.
    """
    room = abs(margin.value)
    half = margin.value - margin.low if margin.value >= 0 else margin.high - margin.value
    many, one = ("runs", "run") if kind_of(value.unit) in ("time", "bytes", "rate") else ("rows", "row")
    if not math.isfinite(half) or value.samples <= 0:
        return f"more {many} would narrow the interval"
    times = (POWER * half / room) ** 2 if room > 0 else math.inf
    if value.samples * times > 1e7:
        return f"the estimate lies on the limit: no practical number of {many} would settle it"
    more = _round_up(max(1, math.ceil(value.samples * (times - 1))))
    text = f"about {more:,} more {many if more != 1 else one} would settle it"
    if kind_of(value.unit) == "time":
        seconds = more * (value.value + (baseline.value if baseline else value.value)) / 1000
        text += f" (about {digits(max(seconds, 0.1), 2)} s)"
    return text


def _round_up(count: int) -> int:
    """Round up to two digits: the figure is an estimate."""
    step: int = 10 ** max(0, len(str(count)) - 2)
    return -(-count // step) * step


# ---------------------------------------------------------------------------------------------------------------- in words


def digits(number: float, count: int = 3) -> str:
    """Write a number with so many significant digits, never in exponent form between 10^-4 and 10^15."""
    if not math.isfinite(number):
        return "not known"
    if number == 0:
        return "0"
    if not 1e-4 <= abs(number) < 1e15:
        return f"{number:.{count - 1}e}"
    rounded = float(f"{number:.{count - 1}e}")
    return f"{rounded:,.{max(0, count - 1 - math.floor(math.log10(abs(rounded))))}f}"


def shown(number: float, unit: str) -> str:
    """Write a metric's value with its unit: 3.61 ms, 24.3 MB, 212/s, 0.953."""
    kind = kind_of(unit)
    if not math.isfinite(number):
        return "not known"
    if kind == "time":
        name, factor = _fitting(abs(number), {"ns": 1e-6, "µs": 1e-3, "ms": 1.0, "s": 1e3})
        return f"{digits(number / factor)} {name}"
    if kind == "bytes":
        name, factor = _fitting(abs(number), {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9})
        return f"{digits(number / factor)} {name}"
    if kind == "rate":
        return f"{digits(number)}/s"
    if kind == "share":
        return f"{number:.4f}"
    return f"{digits(number, 4)} {unit}".rstrip()


def shown_difference(number: float, unit: str) -> str:
    """Write a difference with its sign and unit: -0.4 pt, +0.32 ms."""
    if not math.isfinite(number):
        return "not known"
    if kind_of(unit) == "share":
        return f"{_signed_points(number)} pt"
    return ("+" if number > 0 else "") + shown(number, unit)


def _signed_points(share: float) -> str:
    points = round(share * 100, 2)
    decimals = 1 if abs(points * 10 - round(points * 10)) < 1e-9 else 2
    return f"{points + 0.0:+.{decimals}f}" if points else "0.0"


def _fitting(size: float, steps: Mapping[str, float]) -> tuple[str, float]:
    """The largest unit in which the number is at least one, else the smallest."""
    chosen = next(iter(steps.items()))
    for name, factor in steps.items():
        if size >= factor:
            chosen = (name, factor)
    return chosen


def shown_margin(amount: float, unit: str, relative: str) -> str:
    """Write the room left under a constraint, with sign: +0.6 pt, -1.2 ms, +0.26x."""
    if not math.isfinite(amount):
        return "not known"
    if relative == Relative.RATIO:
        return f"{amount:+.3g}x"
    return shown_difference(amount, unit)


def describe(judgement: Judgement) -> str:
    """Say in words how a model stands to a limit: `accuracy -0.4 pt of -1.0 pt allowed (met; interval -0.9 to +0.1 pt)`."""
    constraint, value = judgement.constraint, judgement.value
    if value is None:
        return f"{constraint.metric} not measured ({judgement.verdict})"
    if constraint.relative is Relative.RATIO:
        have, limit = f"{digits(value.value)}x", f"{digits(constraint.limit)}x"
        interval = f"{digits(value.low)}x to {digits(value.high)}x"
    elif constraint.relative is Relative.DELTA:
        have, limit = shown_difference(value.value, constraint.unit), shown_difference(constraint.limit, constraint.unit)
        interval = f"{shown_difference(value.low, constraint.unit).removesuffix(' pt')} to {shown_difference(value.high, constraint.unit)}"
    else:
        have, limit = shown(value.value, constraint.unit), shown(constraint.limit, constraint.unit)
        interval = f"{shown(value.low, constraint.unit)} to {shown(value.high, constraint.unit)}"
    kind = "allowed" if constraint.relative is Relative.DELTA or constraint.sense == "<=" else "asked"
    doubt = f"; interval {interval}" if judgement.verdict in (Verdict.MET, Verdict.UNDECIDED) else ""
    return f"{constraint.metric} {have} of {limit} {kind} ({judgement.verdict}{doubt})"


def relaxed(judgement: Judgement) -> str:
    """Write the constraint again with the nearest round limit that this model's estimate meets; empty when it was not measured."""
    constraint, value = judgement.constraint, judgement.value
    if value is None or not math.isfinite(value.value):
        return ""
    head = f"{constraint.metric} {constraint.sense}"
    up = constraint.sense == "<="
    kind = kind_of(constraint.unit)
    if constraint.relative is Relative.RATIO:
        return f"{head} {_outward(value.value, 2, up):g}x"
    if constraint.relative is Relative.DELTA:
        size = value.value * (100 if kind == "share" else 1)
        size = _tenths_outward(size, up) if kind == "share" else _outward(size, 3, up)
        unit = {"share": "pt", "time": "ms", "bytes": "B", "rate": "/s"}.get(kind, "")
        return f"{head} baseline {'-' if size < 0 else '+'} {abs(size):.12g}{unit}"
    unit = {"time": "ms", "bytes": "B", "rate": "/s"}.get(kind, "")
    return f"{head} {_outward(value.value, 3, up):.12g}{unit}"


def _tenths_outward(points: float, up: bool) -> float:
    """Round to a tenth away from the side that would miss the number, float noise apart."""
    tenths = (math.ceil if up else math.floor)(round(points * 10, 6))
    missed = (points - tenths / 10) * (1 if up else -1)
    return (tenths + (0 if missed <= 1e-9 * abs(points) else 1 if up else -1)) / 10


def _outward(number: float, count: int, up: bool) -> float:
    """Round away from the side that would miss the number, to so many significant digits."""
    if number == 0:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(abs(number))) - count + 1)
    steps = round(number / step, 6)
    return float(f"{(math.ceil(steps) if up else math.floor(steps)) * step:.12g}")
