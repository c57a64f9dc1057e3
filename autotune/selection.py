"""Choose: who is feasible, who is on the front, which are ties, and which one is delivered. Plain functions of finished records.

How models are compared. Latency, throughput, memory and size by their ratio to the baseline (on a log scale), scores by their difference
from it: paired values with their intervals. These are widened (`widened`) so that the intervals of all candidates in all objectives hold
*together* with 95 % (Bonferroni): the box of a model. One model is **better beyond doubt** in an objective when the boxes do not overlap there
and the estimates differ by more than the tolerance (3 % of latency, 0.3 points of a score; finer differences are not worth a more complex model).

* A feasible model is **off the front** when some other is no worse in every objective by estimate, and better beyond doubt in one.
  So doubt never puts a model off the front, and a model that is only slower, by more than noise, is never on it.
* Two models **tie** when neither is better beyond doubt in any objective. Ties on the front form groups: the simplest member stands for the
  group. The untouched model is the simplest, then come those certain of every constraint, then fewer passes, fewer values that
  are not the default, the better sum of estimates in units of the tolerances, the lower trial number.
* A feasible model's **membership** says how sure its place is. *excluded*: the box of some other is no worse in every objective and better in one.
  *certain*: no box allows another to be no worse in every objective and better by more than the tolerance in one. *covered*: some other is,
  for sure, worse in no objective by more than the tolerance. *tied*: those that may beat it overlap with it, and all these boxes are
  narrower than the tolerance. *ambiguous*: the rest, not resolved. So with 95 % no true member of the front is excluded, and nobody certain or
  tied is truly beaten by more than the tolerance, or by twice that. The front that is shown goes by estimates, as above; it may hold
  ambiguous members and leave out others, and both are named.
* A **pick** looks at the members of the front within the tolerance of the best estimate (or in a tie with it), drops those that
  another of them beats beyond doubt in another objective, and takes the simplest. Whoever does not beat the untouched model beyond doubt in
  any objective is never picked before it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.benchmarks.statistics import CONFIDENCE, normal_quantile, widening
from autotune.constraints import (
    SCORE,
    Constraint,
    Judgement,
    Relative,
    Verdict,
    describe,
    difference_from,
    digits,
    feasible,
    is_cost,
    judge_all,
    kind_of,
    metric_named,
    ratio_to,
    relaxed,
    shown,
    shown_difference,
    violation,
)
from autotune.digest import canonical
from autotune.errors import ConfigError, nearest
from autotune.pareto import hypervolume, knee, pareto_front
from autotune.records import Interval, MetricValue, Status, TrialRecord

PICKS = ("fastest", "most_accurate", "smallest", "knee", "nearest_to_baseline")
UNTOUCHED = "untouched"  # origin of the trial that measures the baseline itself
DEFAULT = "default"  # origin of the trial with every parameter at its default
EPS_LATENCY = 0.03  # finer differences are not worth a more complex model: of latency, relative,
EPS_SCORE = 0.003  # and of a score
EPS_SIZE = 0.005  # size has no noise; half a per cent of it is still nothing to choose by
NEAR_MISSES = 5
RIVALS_NAMED = 5  # of one model
SMALLEST_RATIO = 1e-9  # stands for zero on the log scale
WORSE_THAN_BASELINE = 1.1  # the reference point of the hypervolume: ratios
NO_LIMIT_DROP = 0.1  # and scores, where no constraint says how far they may fall


@dataclass(frozen=True)
class Objective:
    """One thing to make small or large."""

    name: str
    minimize: bool = True

    def __str__(self) -> str:
        return f"{'min' if self.minimize else 'max'} {self.name}"


def parse_objective(text: str, *, metrics: Mapping[str, str], score: str = "", higher_is_better: Mapping[str, bool] | None = None) -> Objective:
    """Read `latency`, `min latency`, `max accuracy`, `score`; without `min` or `max` the metric's own direction holds.

    `metrics` maps names to units; `higher_is_better` gives the direction where the unit doesn't tell. Raises `ConfigError` for an unknown
    metric, a direction that makes models worse, or one that can't be known.
    """
    words = text.split(maxsplit=1) if isinstance(text, str) else []
    asked = {"min": True, "minimize": True, "max": False, "maximize": False}.get(words[0]) if len(words) == 2 else None
    if not words or (words[0] in ("min", "max", "minimize", "maximize") and len(words) == 1):
        raise ConfigError("objectives", "an objective must name a metric", repr(text), "Examples: latency, min size, max accuracy")
    name = metric_named(words[1].strip() if asked is not None else text.strip(), metrics, score=score, who="objectives")
    natural = is_cost(metrics[name])
    if natural is None and higher_is_better is not None and name in higher_is_better:
        natural = not higher_is_better[name]
    if natural is None and asked is None:
        raise ConfigError(
            "objectives", f"it must be known whether {name} is better small or large", repr(text), f"Write `min {name}` or `max {name}`."
        )
    if natural is not None and asked is not None and asked != natural:
        right = "min" if natural else "max"
        raise ConfigError("objectives", f"{name} is better when {'lower' if natural else 'higher'}", repr(text), f"Write `{right} {name}`.")
    return Objective(name, minimize=bool(asked if asked is not None else natural))


@dataclass(frozen=True)
class NearMiss:
    """A measured model that is not feasible: how far off (sum of violations), what blocks it, and what relaxing that would buy."""

    id: str
    violation: float
    blocking: tuple[Judgement, ...]
    buys: str

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id, "violation": self.violation, "blocking": [j.to_json() for j in self.blocking],
            "relaxed": [relaxed(j) for j in self.blocking], "buys": self.buys,
        }  # fmt: skip


class State(enum.StrEnum):
    """How sure a feasible model's place on the front is; the module's text defines each."""

    CERTAIN = "certain"
    EXCLUDED = "excluded"
    COVERED = "covered"
    TIED = "tied"
    AMBIGUOUS = "ambiguous"


@dataclass(frozen=True)
class Membership:
    """A model's place on the front: its state, who makes it so, the objectives that leave it open, and its layer of the front by estimates.

    `rivals`: who excludes or covers it, or may beat it, the best first. `layer`: 1 for the front, 2 for the front without those, 0 beyond.
    """

    state: State
    rivals: tuple[str, ...] = ()
    open: tuple[str, ...] = ()
    layer: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"state": str(self.state), "rivals": list(self.rivals), "open": list(self.open), "layer": self.layer}


@dataclass(frozen=True)
class Selection:
    """What `select` found. `front` holds one trial id per group, the simplest, in order of the first objective; `groups` the ties of each.

    `to_measure` names those whose place more timing may settle, the widest box first: ambiguous ones of the first two layers, and their rivals.
    """

    objectives: tuple[Objective, ...]
    feasible: tuple[str, ...] = ()
    front: tuple[str, ...] = ()
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    off_front: Mapping[str, str] = field(default_factory=dict)  # who is beaten, by whom
    picks: Mapping[str, str] = field(default_factory=dict)
    best: str | None = None
    pick: str = "fastest"  # by which `best` was chosen
    untouched: str | None = None
    runner_up: str | None = None  # the nearest candidate other than the untouched model and the best
    near_misses: tuple[NearMiss, ...] = ()
    judgements: Mapping[str, tuple[Judgement, ...]] = field(default_factory=dict)
    hypervolume: float = 0.0
    reference: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()
    membership: Mapping[str, Membership] = field(default_factory=dict)  # of every feasible model
    to_measure: tuple[str, ...] = ()
    eps: Mapping[str, float] = field(default_factory=dict)  # the tolerances: latency (ratio), score (share)

    @property
    def untouched_is_best(self) -> bool:
        return self.best is not None and self.best == self.untouched

    @property
    def not_resolved(self) -> tuple[str, ...]:
        """The ambiguous in the first two layers of the front: who is on it is not settled among these."""
        return tuple(i for i, m in self.membership.items() if m.state is State.AMBIGUOUS and m.layer)

    def to_json(self) -> dict[str, Any]:
        return {
            "objectives": [str(o) for o in self.objectives], "feasible": list(self.feasible), "front": list(self.front),
            "groups": {k: list(v) for k, v in self.groups.items()}, "off_front": dict(self.off_front), "picks": dict(self.picks),
            "best": self.best, "pick": self.pick, "untouched": self.untouched, "runner_up": self.runner_up,
            "near_misses": [n.to_json() for n in self.near_misses], "hypervolume": self.hypervolume,
            "reference": list(self.reference), "notes": list(self.notes),
            "membership": {k: m.to_json() for k, m in self.membership.items()}, "eps": dict(self.eps),
        }  # fmt: skip


def select(
    records: Iterable[TrialRecord],
    objectives: Sequence[Objective],
    constraints: Sequence[Constraint],
    *,
    baseline: Mapping[str, MetricValue],
    score: str = "",
    pick: str = "fastest",
    strict: bool = False,
    eps_latency: float = EPS_LATENCY,
    eps_score: float = EPS_SCORE,
    defaults: Mapping[str, Any] | None = None,
    looks: int = 1,
    places: bool = True,
) -> Selection:
    """Choose among finished trials; see the module's text for the rule, `Selector` for the options."""
    selector = Selector(
        objectives, constraints, baseline=baseline, score=score, pick=pick, strict=strict, eps_latency=eps_latency, eps_score=eps_score,
        defaults=defaults,
    )  # fmt: skip
    return selector.select(records, looks=looks, places=places)


@dataclass(frozen=True, slots=True)
class _Row:
    """What follows from one measured trial alone. `losses` are empty unless it is feasible; else six numbers an axis, see `_wide_limits`."""

    record: TrialRecord
    id: str
    judgements: tuple[Judgement, ...]
    blocking: tuple[Judgement, ...]
    missed: float  # the sum of its violations
    certain: bool  # of every constraint
    losses: Mapping[str, tuple[float, ...]]
    measurement: tuple[str, str]
    passes: int


class Selector:
    """Chooses among finished trials, again and again as they become more: what follows from a record alone is worked out once.

    `baseline` holds the untouched model's metrics, `score` the name of the accuracy metric (default: the first objective that has the unit
    of one). `defaults` maps variables (`slot.parameter`) to their default values; without it the point of the default trial serves.
    `strict` takes only models that are certain of every constraint. Raises `ConfigError` for an unknown pick or an objective that the
    baseline lacks.
    """

    def __init__(
        self, objectives: Sequence[Objective], constraints: Sequence[Constraint], *, baseline: Mapping[str, MetricValue], score: str = "",
        pick: str = "fastest", strict: bool = False, eps_latency: float = EPS_LATENCY, eps_score: float = EPS_SCORE,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if pick not in PICKS:
            raise ConfigError("pick", f"a pick must be one of {', '.join(PICKS)}", repr(pick), nearest(pick, PICKS))
        self.objectives, self.constraints, self.baseline = tuple(objectives), tuple(constraints), baseline
        for objective in self.objectives:
            if objective.name not in baseline:
                raise ConfigError("objectives", f"the baseline must have been measured for {objective.name}", ", ".join(sorted(baseline)))
        self.score = score or next((o.name for o in self.objectives if kind_of(baseline[o.name].unit) in ("share", "plain")), "")
        self.pick, self.strict, self.eps, self.defaults = pick, strict, (eps_latency, eps_score), defaults
        self.axes = list(self.objectives)  # and what only picks look at
        for name in ("latency", self.score, "size"):
            cost = is_cost(baseline[name].unit) if name in baseline else None
            if cost is not None and all(a.name != name for a in self.axes):  # a score that is no objective has no direction here
                self.axes.append(Objective(name, cost))
        self._rows: dict[int, _Row] = {}
        self._changed: tuple[Mapping[str, Any], dict[int, tuple[TrialRecord, int]]] = ({}, {})  # under these defaults

    def select(self, records: Iterable[TrialRecord], *, looks: int = 1, places: bool = True) -> Selection:
        """Choose among these records.

        `looks`: how often at most the records are looked at, while more is measured, before the choice stands; the intervals hold at all
        of them together. `places` False leaves `membership` out, whose cost grows with the square of the models.
        """
        rows = sorted((self._row(r) for r in records if r.measured), key=lambda row: row.record.number)
        good = [row for row in rows if row.losses]
        untouched = next((row.id for row in rows if row.record.origin == UNTOUCHED), None)
        misses = self._near_misses([row for row in rows if not row.losses and row.id != untouched])
        found = Selection(
            objectives=self.objectives, feasible=tuple(row.id for row in good), pick=self.pick, untouched=untouched, near_misses=misses,
            judgements={row.id: row.judgements for row in rows}, runner_up=misses[0].id if misses else None,
        )  # fmt: skip
        if not good:
            return found
        # All that were measured count, feasible or not: whoever is feasible was found by the same numbers.
        family = looks * len({row.measurement for row in rows if not row.record.unchanged and row.record.origin != UNTOUCHED})
        return _Chooser(self, good, self._changes(rows, good), family).complete(found, places=places)

    def _row(self, record: TrialRecord) -> _Row:
        kept = self._rows.get(record.number)
        if kept is not None and kept.record is record:
            return kept
        judgements = judge_all(self.constraints, record.metrics, self.baseline)
        blocking = tuple(j for j in judgements if not feasible([j], strict=self.strict))
        losses: dict[str, tuple[float, ...]] = {}
        if record.status is Status.OK and not blocking and all(_sound(record.metrics.get(o.name)) for o in self.objectives):
            for axis in self.axes:
                value = record.metrics.get(axis.name)
                if value is not None and _sound(value):
                    losses[axis.name] = _basis(compared(value, self.baseline[axis.name], minimize=axis.minimize), value)
        row = self._rows[record.number] = _Row(
            record, record.id, judgements, blocking, missed=sum(violation(j, strict=self.strict) for j in blocking),
            certain=all(j.verdict is Verdict.CERTAIN for j in judgements), losses=losses, measurement=measurement_of(record),
            passes=passes_in(record.point),
        )  # fmt: skip
        return row

    def _changes(self, rows: Sequence[_Row], good: Sequence[_Row]) -> list[int]:
        """How many values of each of the good are not the default."""
        defaults = self.defaults
        if defaults is None:
            defaults = next((row.record.point for row in rows if row.record.origin == DEFAULT), {})
        if self._changed[0] is not defaults:
            self._changed = (defaults, {})
        counted = self._changed[1]
        for row in good:
            kept = counted.get(row.record.number)
            if kept is None or kept[0] is not row.record:
                counted[row.record.number] = (row.record, changed_values(row.record.point, defaults))
        return [counted[row.record.number][1] for row in good]

    def _near_misses(self, rows: Iterable[_Row]) -> tuple[NearMiss, ...]:
        missed = sorted((row for row in rows if row.blocking), key=lambda row: (row.missed, row.id))
        return tuple(
            NearMiss(
                row.id, row.missed, row.blocking,
                gains(row.record.metrics, self.baseline, score=self.score, leave_out={j.constraint.metric for j in row.blocking}),
            )
            for row in missed[:NEAR_MISSES]
        )  # fmt: skip


def measurement_of(record: TrialRecord) -> tuple[str, str]:
    """What is equal for records that share one measurement: equal bytes under equal settings."""
    return (record.model_digest, canonical(record.session)) if record.model_digest else (record.id, "")


def _sound(value: MetricValue | None) -> bool:
    return value is not None and math.isfinite(value.value)


def passes_in(point: Mapping[str, Any]) -> int:
    """Count the slots of a point that hold a pass (names without a dot; None is a slot left out)."""
    return sum(1 for name, value in point.items() if "." not in name and value is not None)


def changed_values(point: Mapping[str, Any], defaults: Mapping[str, Any]) -> int:
    """Count the parameters (`slot.parameter`) of a point that are not at their default, by type and value."""
    return sum(1 for name, value in point.items() if "." in name and not (name in defaults and _same(value, defaults[name])))


def _same(a: Any, b: Any) -> bool:
    try:
        return canonical(a) == canonical(b)
    except (TypeError, ValueError):
        return a is b


def compared(value: MetricValue, baseline: MetricValue, *, minimize: bool) -> Interval:
    """Return a loss with its interval: the log of the ratio to the baseline for latency, rates and bytes, the difference for scores."""
    if kind_of(baseline.unit) in ("time", "bytes", "rate"):
        ratio = ratio_to(value, baseline)
        if ratio is not None:
            interval = Interval(*(math.log(max(v, SMALLEST_RATIO)) for v in (ratio.value, ratio.low, ratio.high)))
            return interval if minimize else _negated(interval)
    interval = difference_from(value, baseline)
    return interval if minimize else _negated(interval)


def tolerance(name: str, baseline: MetricValue, *, eps_latency: float = EPS_LATENCY, eps_score: float = EPS_SCORE) -> float:
    """Return the difference in a metric that is worth nothing, on the scale of `compared`."""
    kind = kind_of(baseline.unit)
    if name == "size":
        return math.log1p(EPS_SIZE)
    if kind in ("time", "bytes", "rate"):
        return math.log1p(eps_latency)
    if kind == "plain":
        return eps_score * (abs(baseline.value) or 1.0)
    return eps_score


def _negated(interval: Interval) -> Interval:
    return Interval(-interval.value, -interval.high, -interval.low)


def widened(interval: Interval, value: MetricValue, *, error: float) -> Interval:
    """Widen a 95 % interval of a metric to one that is wrong with a probability of at most `error`, from what the record tells.

    Differences of a share over `samples` examples as score intervals are: half² = z² (variance + half) / examples, where the variance
    follows from the half-width at 95 %. That is Tango's interval or a wider one, since its variance grows by at most 1 for each unit of the
    difference. All others, and shares with an interval narrower than Tango's can be (scores that are not 0 or 1), by the ratio of Student's
    t quantiles (`widening`) on the longer side, for both sides. That takes the values behind the interval (`units`: session pairs,
    examples) as about normal.
    """
    limits = _wide_limits(np.array([_basis(interval, value)]), error)[0]
    return Interval(interval.value, float(limits[0]), float(limits[1]))


def _basis(interval: Interval, value: MetricValue) -> tuple[float, ...]:
    """What `_wide_limits` needs of one interval."""
    return (interval.value, interval.low, interval.high, value.samples, value.units, kind_of(value.unit) == "share")


def _wide_limits(basis: NDArray[np.float64], error: float) -> NDArray[np.float64]:
    """Do what `widened` says for many: from rows of (value, low, high, samples, units, whether it is a share) to rows of (low, high)."""
    value, low, high, count, units, share = basis.T
    below, above = value - low, high - value
    longer = np.where(above > below, above, below)
    open_ = (below > 0) | (above > 0)
    limits = np.stack([low, high], axis=1)
    if error >= 1 - CONFIDENCE or not open_.any():
        return limits
    z0, z = normal_quantile((1 + CONFIDENCE) / 2), normal_quantile(1 - error / 2)
    scored = open_ & (share > 0) & (count > 1) & (longer >= 0.99 * z0 * z0 / (count + z0 * z0))
    if scored.any():
        before, after = z0 * z0 / count[scored], z * z / count[scored]
        limits[scored, 0] = value[scored] - _score_half(below[scored], before, after)
        limits[scored, 1] = value[scored] + _score_half(above[scored], before, after)
    others = open_ & ~scored
    for number in set(units[others].tolist()):
        rows = others & (units == number)
        half = widening(int(number), error) * longer[rows]
        limits[rows, 0], limits[rows, 1] = value[rows] - half, value[rows] + half
    return limits


def _score_half(half: NDArray[np.float64], before: NDArray[np.float64], after: NDArray[np.float64]) -> NDArray[np.float64]:
    """Half-widths of score intervals for another z² / count, from those that they have for `before`."""
    finite = np.isfinite(half)
    known = np.where(finite, half, 0.0)
    variance = np.maximum(known * known / before - known, 0.0)
    return np.where(finite, (after + np.sqrt(after * after + 4 * after * variance)) / 2, half)


class _Chooser:
    """The feasible trials as tables of losses: rows are trials, columns are axes (the objectives first, then what only picks look at)."""

    def __init__(self, selector: Selector, rows: Sequence[_Row], changed: Sequence[int], family: int) -> None:
        self.records = [row.record for row in rows]
        self.measurements = [row.measurement for row in rows]
        self.baseline, self.score, self.constraints = selector.baseline, selector.score, selector.constraints
        self.objectives = range(len(selector.objectives))
        self.axes = [a for k, a in enumerate(selector.axes) if k in self.objectives or all(a.name in row.losses for row in rows)]
        self.ids = [row.id for row in rows]
        self._set_losses(np.array([[row.losses[a.name] for a in self.axes] for row in rows], float), family)
        self.given_eps = selector.eps
        self.eps = np.array([
            tolerance(a.name, self.baseline[a.name], eps_latency=selector.eps[0], eps_score=selector.eps[1]) for a in self.axes
        ])  # fmt: skip
        self.untouched = next((i for i, r in enumerate(self.records) if r.origin == UNTOUCHED), None)
        count = len(self.objectives)
        sums = (self.value[:, :count] / np.maximum(self.eps[:count], 1e-12)).sum(axis=1).tolist()
        keys = [
            (row.record.origin != UNTOUCHED, not row.certain, row.passes, more, round(total, 6), row.record.number)
            for row, more, total in zip(rows, changed, sums, strict=True)
        ]
        self.simplest_first = sorted(range(len(rows)), key=lambda i: keys[i])

    def _set_losses(self, basis: NDArray[np.float64], family: int) -> None:
        """Set losses with intervals that hold together, for `family` models in all objectives (what only picks look at: also).

        `basis`: rows, axes, and what `_basis` tells of each.
        """
        self.value, self.low, self.high = basis[:, :, 0], basis[:, :, 1], basis[:, :, 2]
        noisy = int((self.low < self.high).any(axis=0).sum())
        if noisy and family:
            limits = _wide_limits(basis.reshape(-1, basis.shape[2]), (1 - CONFIDENCE) / (family * noisy))
            self.low, self.high = limits[:, 0].reshape(self.low.shape), limits[:, 1].reshape(self.high.shape)

    def beats(self, i: int, axis: int, others: Any = slice(None)) -> NDArray[np.bool_]:
        """Mark whom trial i beats beyond doubt on one axis."""
        clear: NDArray[np.bool_] = (self.high[i, axis] < self.low[others, axis]) & (self.value[others, axis] - self.value[i, axis] > self.eps[axis])
        return clear

    def loses(self, i: int, axis: int, others: Any = slice(None)) -> NDArray[np.bool_]:
        """Mark who beats trial i beyond doubt on one axis."""
        clear: NDArray[np.bool_] = (self.high[others, axis] < self.low[i, axis]) & (self.value[i, axis] - self.value[others, axis] > self.eps[axis])
        return clear

    def ties(self, i: int, among: Sequence[int], axes: Iterable[int]) -> list[int]:
        """Those among whom neither i nor they are better beyond doubt on any of the axes; i itself is one."""
        apart = np.zeros(len(among), bool)
        for axis in axes:
            apart |= self.beats(i, axis, among) | self.loses(i, axis, among)
        return [j for j, off in zip(among, apart, strict=True) if not off]

    def clear(self, axis: int, these: Any, others: Any = slice(None)) -> NDArray[np.bool_]:
        """Whom each of these beats beyond doubt on one axis: rows are these, columns the others."""
        value, high = self.value[these, axis][:, None], self.high[these, axis][:, None]
        found: NDArray[np.bool_] = (high < self.low[others, axis]) & (self.value[others, axis] - value > self.eps[axis])
        return found

    def beaten_by(self) -> dict[int, int]:
        """Map each trial that is off the front to one that puts it off (the best sum wins where several do)."""
        columns = list(self.objectives)
        value = self.value[:, columns]
        # Who is at most another's equal in every estimate, and in the upper limit on an axis, beats on that axis whomever that other beats:
        # the front of these figures is enough to look at.
        able = [pareto_front(np.column_stack([value, self.high[:, k]])) for k in columns]
        _, equal = np.unique(value, axis=0, return_inverse=True)
        candidates = np.flatnonzero(np.isin(equal.reshape(-1), equal.reshape(-1)[np.any(able, axis=0)]))  # and among equals, the first is named
        if not len(candidates):
            return {}
        candidates = candidates[np.argsort(value[candidates].sum(axis=1), kind="stable")]
        beats = np.any([self.clear(k, candidates) for k in columns], axis=0) & np.all(value[candidates][:, None] <= value[None], axis=2)
        first = candidates[np.argmax(beats, axis=0)]
        return {int(j): int(first[j]) for j in np.flatnonzero(beats.any(axis=0))}

    def layers(self) -> list[int]:
        """Number the first two layers of the front by estimates; 0 beyond."""
        values = self.value[:, list(self.objectives)]
        layer = np.zeros(len(values), int)
        for number in (1, 2):
            left = np.flatnonzero(layer == 0)
            if len(left):
                layer[left[pareto_front(values[left])]] = number
        return [int(n) for n in layer]

    def memberships(self) -> tuple[dict[str, Membership], tuple[str, ...]]:
        """Every trial's place on the front, and whom to time again, the widest first."""
        columns = list(self.objectives)
        low, high, eps = self.low[:, columns], self.high[:, columns], self.eps[columns]
        wide = (high - low) > eps
        timed = np.array([kind_of(self.baseline[self.axes[k].name].unit) in ("time", "rate") for k in columns])
        best_first = np.argsort(self.value[:, columns].sum(axis=1), kind="stable")
        same = np.array([hash(m) for m in self.measurements])
        layers = self.layers()
        found: dict[str, Membership] = {}
        again: set[int] = set()
        for i, record in enumerate(self.records):
            others = best_first[same[best_first] != same[i]]
            lows, highs = low[others], high[others]
            excluding = np.all(highs <= low[i], axis=1) & np.any(highs < low[i], axis=1)
            may_beat = np.all(lows <= high[i], axis=1) & np.any(high[i] - lows > eps, axis=1)
            covering = np.all(highs - low[i] <= eps, axis=1)
            # Open is an objective in which the rival is not better for sure, and in which narrower boxes could still tell.
            opens = may_beat[:, None] & ~(highs < low[i]) & (wide[i] | wide[others])
            names: tuple[str, ...] = ()
            if excluding.any():
                state, rivals = State.EXCLUDED, others[excluding]
            elif not may_beat.any():
                state, rivals = State.CERTAIN, others[:0]
            elif np.all(highs[may_beat] >= low[i]) and not wide[i].any() and not wide[others[may_beat]].any():
                state, rivals = State.TIED, others[may_beat]
            elif covering.any():
                state, rivals = State.COVERED, others[covering]
            else:
                state, rivals = State.AMBIGUOUS, others[may_beat]
                names = tuple(self.axes[k].name for k in columns if opens[:, k].any())
                if layers[i]:
                    by_time = [int(j) for j, row in zip(others, opens, strict=True) if (row & timed).any() and layers[j]]
                    again |= {i, *by_time} if by_time else set()
            found[record.id] = Membership(state, tuple(self.ids[j] for j in rivals[:RIVALS_NAMED]), names, layers[i])
        width = np.where(timed, high - low, -np.inf).max(axis=1)
        once: dict[int, int] = {}
        for i in sorted(again, key=lambda i: (-float(width[i]), self.records[i].number)):
            if self.records[i].origin != UNTOUCHED and not self.records[i].unchanged:
                once.setdefault(int(same[i]), i)
        return found, tuple(self.ids[i] for i in once.values())

    def complete(self, found: Selection, *, places: bool) -> Selection:
        beaten = self.beaten_by()
        members = [i for i in range(len(self.records)) if i not in beaten]
        groups: dict[int, list[int]] = {}
        waiting = [i for i in self.simplest_first if i not in beaten]
        while waiting:
            group = self.ties(waiting[0], waiting, self.objectives)
            groups[waiting[0]] = group
            taken = set(group)
            waiting = [i for i in waiting if i not in taken]
        front = sorted(groups, key=lambda i: (*self.value[i, : len(self.objectives)].tolist(), self.records[i].number))
        picks = self._picks(front, members)
        notes = []
        best = picks.get(found.pick)
        if best is None:
            best = picks.get("fastest", front[0])
            notes.append(f"there is no {found.pick.replace('_', ' ')} pick here; {self.ids[best]} was chosen in its place")
        volume, reference = self._hypervolume()
        membership, to_measure = self.memberships() if places else ({}, ())
        return Selection(
            objectives=found.objectives, feasible=found.feasible, front=tuple(self.ids[i] for i in front),
            groups={self.ids[i]: tuple(self.ids[j] for j in sorted(groups[i], key=lambda j: (j != i, j))) for i in front},
            off_front={self.ids[j]: self.ids[i] for j, i in sorted(beaten.items())},
            picks={name: self.ids[i] for name, i in picks.items()}, best=self.ids[best], pick=found.pick, untouched=found.untouched,
            runner_up=self._runner_up(best) or found.runner_up, near_misses=found.near_misses, judgements=found.judgements,
            hypervolume=volume, reference=reference, notes=tuple(notes), membership=membership, to_measure=to_measure,
            eps=dict(zip(("latency", "score"), self.given_eps, strict=True)),
        )  # fmt: skip

    def _axis(self, *names: str) -> int | None:
        return next((k for name in names for k, a in enumerate(self.axes) if name and a.name == name), None)

    def _picks(self, front: list[int], members: list[int]) -> dict[str, int]:
        picks: dict[str, int] = {}
        speed = self._axis("latency", *(a.name for a in self.axes if kind_of(self.baseline[a.name].unit) == "time"), "throughput")
        for name, axis in (("fastest", speed), ("most_accurate", self._axis(self.score)), ("smallest", self._axis("size"))):
            if axis is not None:
                picks[name] = self._best_on(axis, front, members)
        worthy = self._worthy(front, list(self.objectives))
        bend = knee(self.value[np.ix_(front, list(self.objectives))]) if len(self.objectives) > 1 else None
        if bend is not None:
            picks["knee"] = front[bend]
        if self._axis(self.score) is not None:
            picks["nearest_to_baseline"] = self._nearest(worthy)
        return picks

    def _worthy(self, candidates: list[int], axes: list[int]) -> list[int]:
        """Those that beat the untouched model beyond doubt somewhere, and that model itself; all, when it is not feasible."""
        if self.untouched is None:
            return candidates
        better = np.any([self.loses(self.untouched, k, candidates) for k in axes], axis=0)
        worthy = [i for i, some in zip(candidates, better.tolist(), strict=True) if some or i == self.untouched]
        return worthy or candidates

    def _best_on(self, axis: int, front: list[int], members: list[int]) -> int:
        # An axis that is no objective has its best member anywhere among the feasible.
        everyone = list(range(len(self.records)))
        pool, wider = (front, members) if axis in self.objectives else (everyone, everyone)
        axes = sorted({*self.objectives, axis})
        worthy = self._worthy(pool, axes)
        best_first = self._worthy(wider, axes)
        leader = best_first[int(np.argmin(self.value[best_first, axis]))]
        tied = set(self.ties(leader, worthy, axes))
        within = self.value[worthy, axis] - self.value[leader, axis] <= self.eps[axis]
        close = [i for i, near in zip(worthy, within.tolist(), strict=True) if near or i in tied] or worthy
        settled = self._settled(close, [k for k in axes if k != axis])
        kept = {i for i, off in zip(close, settled.tolist(), strict=True) if not off} or set(close)
        return next(i for i in self.simplest_first if i in kept)

    def _settled(self, among: list[int], axes: list[int]) -> NDArray[np.bool_]:
        """Mark those whom another of them beats beyond doubt on one of the axes without being beaten on any."""
        able = np.zeros(len(among), bool)  # to beat the worst of them on some axis
        for k in axes:
            able |= (self.high[among, k] < self.low[among, k].max()) & (self.value[among, k].max() - self.value[among, k] > self.eps[k])
        winners = [i for i, some in zip(among, able.tolist(), strict=True) if some]
        if not winners:
            return able
        wins = np.any([self.clear(k, winners, among) for k in axes], axis=0)
        losses = np.any([self.clear(k, among, winners).T for k in axes], axis=0)
        settled: NDArray[np.bool_] = (wins & ~losses).any(axis=0)
        return settled

    def _nearest(self, worthy: list[int]) -> int:
        """The member, other than the untouched model, whose score moved least; the first objective decides among equals."""
        axis = self._axis(self.score)
        candidates = [i for i in worthy if i != self.untouched] or worthy
        moved = np.abs(self.value[candidates, axis])
        near = [i for i, m in zip(candidates, moved, strict=True) if m <= moved.min() + 1e-12]
        return min(near, key=lambda i: (float(self.value[i, 0]), self.records[i].number))

    def _runner_up(self, best: int) -> str | None:
        """The next by the first objective, other than the best and the untouched model."""
        order = np.argsort(self.value[:, 0], kind="stable").tolist()  # and by number among equals, as they stand
        return next((self.ids[i] for i in order if i not in (best, self.untouched)), None)

    def _hypervolume(self) -> tuple[float, tuple[float, ...]]:
        """Volume in units of ratios and score differences, up to 1.1 times the baseline and the worst score allowed."""
        columns, reference = [], []
        for k in self.objectives:
            axis, base = self.axes[k], self.baseline[self.axes[k].name]
            sign = 1.0 if axis.minimize else -1.0
            if kind_of(base.unit) in ("time", "bytes", "rate") and base.value > 0:
                columns.append(sign * np.exp(sign * self.value[:, k]))
                reference.append(WORSE_THAN_BASELINE if axis.minimize else -1 / WORSE_THAN_BASELINE)
            else:
                columns.append(self.value[:, k])
                reference.append(_worst_allowed(axis, base, self.constraints))
        return hypervolume(np.stack(columns, axis=1), reference), tuple(reference)


def _worst_allowed(objective: Objective, baseline: MetricValue, constraints: Sequence[Constraint]) -> float:
    """The largest loss (difference from the baseline, as a cost) that the constraints allow; a tenth where they say nothing."""
    sign = 1.0 if objective.minimize else -1.0
    limits = []
    for constraint in constraints:
        if constraint.metric == objective.name and (constraint.sense == "<=") == objective.minimize:
            from_baseline = {
                Relative.DELTA: constraint.limit,
                Relative.RATIO: (constraint.limit - 1) * baseline.value,
                Relative.NONE: constraint.limit - baseline.value,
            }
            limits.append(sign * from_baseline[constraint.relative])
    if limits:
        return min(limits) + 1e-9  # a model just at the limit still counts for something in the other objectives
    return NO_LIMIT_DROP * (1.0 if kind_of(baseline.unit) == "share" else abs(baseline.value) or 1.0)


# ---------------------------------------------------------------------------------------------------------------- in words


def speed_words(ratio: Interval) -> str:
    """Say a latency ratio as a person would: `2.3x faster, 2.2 to 2.4`; within noise of the baseline it says so."""
    if not (math.isfinite(ratio.value) and ratio.value > 0):
        return "speed not known"
    if ratio.low == ratio.high == 1.0:
        return "as fast"
    if ratio.low <= 1.0 <= ratio.high:
        return f"as fast within noise, {digits(ratio.low)}x to {digits(ratio.high)}x the time"
    if ratio.value < 1:
        return f"{_times(1 / ratio.value)}x faster, {_times(1 / ratio.high)} to {_times(1 / ratio.low) if ratio.low > 0 else 'not known'}"
    return f"{_times(ratio.value)}x slower, {_times(ratio.low)} to {_times(ratio.high)}"


def size_words(ratio: Interval) -> str:
    """Say a size ratio as a person would: `4.0x smaller`, `same size`."""
    if not (math.isfinite(ratio.value) and ratio.value > 0):
        return "size not known"
    if abs(ratio.value - 1) <= EPS_SIZE:
        return "same size"
    return f"{_times(1 / ratio.value)}x smaller" if ratio.value < 1 else f"{_times(ratio.value)}x larger"


def _times(factor: float) -> str:
    """Two digits, or three where two would hide what is gained: 2.3, 12, 1.04."""
    return digits(factor, 3 if factor < 1.1 else 2)


def score_words(name: str, value: MetricValue, baseline: MetricValue) -> str:
    """Say how a score changed: `accuracy -0.4 pt (-0.9 to +0.1)`."""
    change = difference_from(value, baseline)
    if change.low == change.high == 0:
        return f"same {name}"
    limits = [shown_difference(v, baseline.unit).removesuffix(" pt") for v in (change.low, change.high)]
    return f"{name} {shown_difference(change.value, baseline.unit)} ({limits[0]} to {limits[1]})"


def gains(metrics: Mapping[str, MetricValue], baseline: Mapping[str, MetricValue], *, score: str = "", leave_out: Iterable[str] = ()) -> str:
    """Say in one line how a model differs from the baseline in speed, score and size, metrics to leave out apart."""
    parts = []
    skip = set(leave_out)
    ways: tuple[tuple[str, Callable[[MetricValue, MetricValue], str]], ...] = (
        ("latency", lambda v, b: speed_words(ratio_to(v, b) or Interval.exactly(math.nan))),
        (score, lambda v, b: score_words(score, v, b)),
        ("size", lambda v, b: size_words(ratio_to(v, b) or Interval.exactly(math.nan))),
    )
    for name, words in ways:
        if name and name in metrics and name in baseline and name not in skip:
            parts.append(words(metrics[name], baseline[name]))
    return ", ".join(parts)


def verdict_sentence(
    selection: Selection, records: Iterable[TrialRecord], *, baseline: Mapping[str, MetricValue], score: str = "",
    holdout: MetricValue | None = None,
) -> str:  # fmt: skip
    """Say in one sentence what came out, the baseline first: what is delivered, what it gains, what it costs, and how sure that is.

    `holdout`: the delivered model's score on the rows held out, which is said before the verdicts over all rows.
    """
    by_id = {r.id: r for r in records}
    score = score or next((o.name for o in selection.objectives if kind_of(baseline[o.name].unit) in ("share", "plain")), "")
    if selection.best is None:
        return _none_feasible(selection, by_id, baseline, score)
    best = by_id[selection.best]
    if selection.untouched_is_best:
        return _untouched_stays(selection, by_id, baseline, score)
    parts = []
    held = {j.constraint.metric for j in selection.judgements.get(best.id, ())}
    if "latency" in best.metrics and "latency" in baseline:
        parts.append(latency_words(best.metrics["latency"], baseline["latency"]))
    if holdout is not None and score in baseline:
        parts.append(f"{score_words(score, holdout, baseline[score])} on {holdout.samples:,} held-out rows")
    elif score in best.metrics and score not in held and score in baseline:
        parts.append(score_words(score, best.metrics[score], baseline[score]))
    parts += [describe(j) for j in selection.judgements.get(best.id, ())]
    if "size" in best.metrics and "size" in baseline:
        parts.append(size_words(ratio_to(best.metrics["size"], baseline["size"]) or Interval.exactly(math.nan)))
    return f"{best.id}: {', '.join(parts)}"


def latency_words(value: MetricValue, baseline: MetricValue) -> str:
    """Say `p50 8.40 → 3.61 ms (2.3x faster, 2.2 to 2.4)`: the baseline first, both in one unit."""
    before, after = shown(baseline.value, baseline.unit), shown(value.value, value.unit)
    unit = after.rpartition(" ")[2]
    if before.endswith(f" {unit}"):
        before = before.removesuffix(f" {unit}")
    ratio = ratio_to(value, baseline) or Interval.exactly(math.nan)
    return f"p50 {before} → {after} ({speed_words(ratio)})"


def _untouched_stays(selection: Selection, by_id: Mapping[str, TrialRecord], baseline: Mapping[str, MetricValue], score: str) -> str:
    facts = []
    if "latency" in baseline:
        facts.append(f"p50 {shown(baseline['latency'].value, baseline['latency'].unit)}")
    if score in baseline:
        facts.append(f"{score} {shown(baseline[score].value, baseline[score].unit)}")
    text = "No pass helps here: the untouched model is delivered"
    if facts:
        text += f" ({', '.join(facts)})"
    other = by_id.get(selection.runner_up or "")
    if other is None:
        return text
    text += f"; the nearest candidate was {other.id}: {gains(other.metrics, baseline, score=score)}"
    if other.id in selection.groups.get(selection.best or "", ()):
        text += ", a tie"
    blocking = [j for j in selection.judgements.get(other.id, ()) if not feasible([j])]
    if blocking:
        text += f", which misses `{blocking[0].constraint.text}`"
    return text


def _none_feasible(selection: Selection, by_id: Mapping[str, TrialRecord], baseline: Mapping[str, MetricValue], score: str) -> str:
    if not selection.near_misses:
        return "No candidate could be measured" if not selection.judgements else "No candidate meets every constraint, the untouched model included"
    miss = selection.near_misses[0]
    reasons = ", ".join(describe(j) for j in miss.blocking)
    text = f"No candidate meets every constraint; the nearest is {miss.id}: {reasons}"
    eased = [r for r in (relaxed(j) for j in miss.blocking) if r]
    if eased and miss.buys:
        text += f"; with `{'` and `'.join(eased)}` it would be {miss.buys}"
    return text


__all__ = [
    "PICKS", "SCORE", "Membership", "NearMiss", "Objective", "Selection", "State", "changed_values", "compared", "gains", "latency_words",
    "measurement_of", "parse_objective", "passes_in", "score_words", "select", "size_words", "speed_words", "tolerance", "verdict_sentence",
    "widened",
]  # fmt: skip
