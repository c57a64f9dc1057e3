"""What no single measurement can see: between one measurement and the next the machine is not quite the same.

Other tenants of the host use its caches and memory for seconds to minutes; the baseline, which is timed beside every candidate, shows it: its
latency moves more from measurement to measurement than the interval of each allows for. A model's own latency moves as much. A
ratio moves less, since both sides are met, but not nothing: a model whose weights fit a cache is met otherwise than one whose weights don't.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.benchmarks.statistics import CONFIDENCE, student_t_quantile
from autotune.records import Interval, MetricValue

TIMES = ("ms", "examples/s")
USUAL_SD, USUAL_WEIGHT = 0.01, 2  # what is taken for the spread before there is a history, and for how many measurements it counts
RATIO_SHARE = 0.5  # of the baseline's spread: a ratio's. Found to be up to 0.35; see docs/measuring.md


@dataclass(frozen=True)
class Occasions:
    """How far the baseline's latency moved between measurements: `sd` of its logarithm, from `count` of them.

    `away`: how far from their median it was in the measurement in question, as a logarithm. `together`: of how many measurements, pooled, a
    value is. Spread is half the distance between the 16th and the 84th percentile, so that one odd measurement does not widen all the others.
    """

    sd: float
    count: int
    away: float = 0.0
    together: int = 1

    @classmethod
    def of(cls, before_ms: Sequence[float], now_ms: Sequence[float]) -> Occasions:
        """From the baseline's latencies in earlier measurements, and in those in question: ms, above 0, at least one now."""
        logs, now = np.log([*before_ms, *now_ms]), np.log(now_ms)
        low, high = np.quantile(logs, (0.16, 0.84), method="weibull")  # of a few the whole range: else too small
        degrees = USUAL_WEIGHT + len(logs) - 1
        sd = math.sqrt((USUAL_WEIGHT * USUAL_SD**2 + (len(logs) - 1) * float(high - low) ** 2 / 4) / degrees)
        return cls(sd, len(logs), float(abs(np.median(now) - np.median(logs))), len(now))

    @property
    def half_width(self) -> float:
        """How far a latency may be, as a logarithm, from what it is over all such measurements, with 95 % confidence."""
        t = student_t_quantile((1 + CONFIDENCE) / 2, USUAL_WEIGHT + self.count - 1)
        return max(t * self.sd / math.sqrt(self.together), self.away)

    @property
    def ratio_half_width(self) -> float:
        """The same for a ratio to the baseline."""
        return RATIO_SHARE * self.half_width

    def widen(self, value: MetricValue) -> MetricValue:
        """The metric with this doubt added to its intervals, and said in its method. What is no time, or exactly 1 of the baseline, stays."""
        if value.unit not in TIMES:
            return value
        ratio, delta = value.ratio, value.delta
        if ratio is not None and ratio.low < ratio.high:
            ratio = _wider(ratio, self.ratio_half_width)
        if delta is not None and delta.low < delta.high:
            more = value.value * self.ratio_half_width
            below, above = (math.hypot(d, more) for d in (delta.value - delta.low, delta.high - delta.value))
            delta = Interval(delta.value, delta.value - below, delta.value + above)
        own = _wider(value.interval, self.half_width)
        return replace(
            value, low=own.low, high=own.high, ratio=ratio, delta=delta,
            method=f"{value.method}; widened by how far the baseline moved between {self.count} measurements",
        )  # fmt: skip

    def to_json(self) -> dict[str, float]:
        return {"sd": self.sd, "count": self.count, "away": self.away, "half_width": self.half_width}


def widen_all(metrics: Mapping[str, MetricValue], occasions: Occasions) -> dict[str, MetricValue]:
    """All metrics with that doubt added."""
    return {name: occasions.widen(value) for name, value in metrics.items()}


def _wider(interval: Interval, half_width: float) -> Interval:
    """A positive interval with an independent doubt of that half-width, as a logarithm, added in squares. A limit at 0 stays."""
    below, above = (math.log(a / b) if b > 0 else math.inf for a, b in ((interval.value, interval.low), (interval.high, interval.value)))
    low, high = math.hypot(below, half_width), math.hypot(above, half_width)
    return Interval(interval.value, interval.value * math.exp(-low), interval.value * math.exp(high))
