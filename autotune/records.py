"""What a sweep writes down: measured values with their intervals, statuses, and one record a trial. Plain data, JSON both ways."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % limits, `low <= value <= high`."""

    value: float
    low: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> Interval:
        return cls(value, value, value)

    def to_json(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Interval:
        return cls(*(_number(data[k]) for k in ("value", "low", "high")))


def _number(value: float | None) -> float:
    """Read a number back; JSON holds null for one that was not finite."""
    return math.nan if value is None else float(value)


@dataclass(frozen=True)
class MetricValue:
    """One metric of one model: the value itself, and the paired comparison with the baseline where there is one.

    `ratio` (value / baseline) and `delta` (value - baseline) come from paired samples: judge limits relative to the baseline
    on them, never on two separate intervals. `samples` counts runs (latency) or examples (accuracy), `units` the values that the interval
    of the comparison rests on: session pairs, examples; 0 where that is not told.
    """

    value: float
    low: float
    high: float
    unit: str = ""  # ms, share, bytes, or none
    ratio: Interval | None = None
    delta: Interval | None = None
    samples: int = 0
    method: str = ""
    units: int = 0

    @property
    def interval(self) -> Interval:
        return Interval(self.value, self.low, self.high)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MetricValue:
        paired = {k: Interval.from_json(data[k]) if data.get(k) else None for k in ("ratio", "delta")}
        return cls(
            value=_number(data["value"]), low=_number(data["low"]), high=_number(data["high"]), unit=data.get("unit", ""),
            samples=int(data.get("samples", 0)), method=data.get("method", ""), units=int(data.get("units", 0)), **paired,
        )  # fmt: skip


class Status(enum.StrEnum):
    """How a trial ended. The list is closed."""

    OK = "ok"
    INVALID = "invalid"
    FAILED = "failed"
    PRUNED = "pruned"
    INFEASIBLE = "infeasible"
    UNDECIDED = "undecided"
    CANCELLED = "cancelled"


class Cause(enum.StrEnum):
    """Why a trial is invalid or failed. The list is closed."""

    NOT_FINITE = "not_finite"
    BAD_OUTPUT = "bad_output"
    EP_FALLBACK = "ep_fallback"
    NOT_APPLIED = "not_applied"
    EXCEPTION = "exception"
    SIGNAL = "signal"
    EXIT = "exit"
    TIMEOUT = "timeout"
    OOM = "oom"
    INFRA = "infra"


@dataclass(frozen=True)
class StageRecord:
    """One stage of a trial: its name (`ingest`, a slot's name, `check`, `accuracy`, `latency`), what it cost, whether the store had it."""

    name: str
    seconds: float
    cached: bool = False
    pass_name: str = ""
    digest: str = ""  # of the artifact it left
    key: str = ""  # of that artifact in the store
    notes: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StageRecord:
        return cls(**data)


@dataclass(frozen=True)
class TrialRecord:
    """Everything known of one trial. `point` holds active parameters only; `metrics` is empty unless it was measured."""

    number: int
    point: Mapping[str, Any]
    status: Status
    origin: str = "sampler"  # default, untouched, sampler, enumeration
    cause: Cause | None = None
    stage: str = ""  # where it ended, when it did not end well
    message: str = ""
    metrics: Mapping[str, MetricValue] = field(default_factory=dict)
    constraints: tuple[Mapping[str, Any], ...] = ()  # {expr, verdict, amount, needed}
    stages: tuple[StageRecord, ...] = ()
    model_digest: str = ""
    session: Mapping[str, Any] = field(default_factory=dict)
    unchanged: str = ""  # why the chain changed nothing, when it didn't
    shares_with: int | None = None  # the trial whose measurement this one has, equal bytes and settings
    seconds: float = 0.0
    work_s: float = 0.0  # of these, what the stages' own functions took inside their child processes
    output: str = ""  # the last lines that the stage printed in which the trial ended, when it did not end well
    attempts: int = 1
    rungs: tuple[Mapping[str, Any], ...] = ()  # of the ladder of cheaper answers: where it took one, what that saved, where it ended

    @property
    def id(self) -> str:
        return f"t-{self.number:04d}"

    @property
    def measured(self) -> bool:
        return bool(self.metrics) and self.status in (Status.OK, Status.INFEASIBLE, Status.UNDECIDED)

    @property
    def partial(self) -> bool:
        """Whether its score or its latency was not measured to the end: the rest could not have changed how it ends."""
        return any("rule" in r for r in self.rungs)

    @property
    def reason(self) -> str:
        """Status and cause as one word pair, such as `failed: signal`."""
        return f"{self.status}: {self.cause}" if self.cause else str(self.status)

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id, "number": self.number, "point": dict(self.point), "status": str(self.status), "origin": self.origin,
            "cause": str(self.cause) if self.cause else None, "stage": self.stage, "message": self.message,
            "metrics": {k: v.to_json() for k, v in self.metrics.items()}, "constraints": [dict(c) for c in self.constraints],
            "stages": [s.to_json() for s in self.stages], "model_digest": self.model_digest, "session": dict(self.session),
            "unchanged": self.unchanged, "shares_with": self.shares_with, "seconds": self.seconds, "work_s": self.work_s,
            "output": self.output, "attempts": self.attempts, "rungs": [dict(r) for r in self.rungs],
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TrialRecord:
        known = {k: v for k, v in data.items() if k != "id"}
        known["status"] = Status(data["status"])
        known["cause"] = Cause(data["cause"]) if data.get("cause") else None
        known["metrics"] = {k: MetricValue.from_json(v) for k, v in data["metrics"].items()}
        known["constraints"] = tuple(data["constraints"])
        known["stages"] = tuple(StageRecord.from_json(s) for s in data["stages"])
        known["rungs"] = tuple(data.get("rungs", ()))
        return cls(**known)
