"""How long one run takes: of a model alone, and of a candidate and the baseline side by side.

Sessions of one model differ (by 1 % and more for small models, from one session to the next of the same file), and the machine drifts. So candidate
and baseline are timed in turns, in fresh sessions, and it is session pairs that the intervals count, never single runs.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autotune.benchmarks import statistics
from autotune.errors import ConfigError, nearest
from autotune.records import Interval, MetricValue

RunOnce = Callable[[], object]
Nanoseconds = NDArray[np.int64]

PERCENTILES = {"p90": 0.90, "p95": 0.95, "p99": 0.99}
NOISY_WIDTH = 0.10
LEAST_SESSIONS = 3  # even when the time is over: fewer give no interval worth the name
MOST_ROUNDS_A_SESSION = 5
LEAST_RUNS_A_BLOCK = 3
LONG_RUN_NS = 500_000_000  # runs this long are timed one a block


@dataclass(frozen=True)
class LatencyProtocol:
    """How a latency was measured; kept with the result. Results under different protocols don't compare.

    One model alone: warm-up lasts `warmup_runs` runs and `warmup_time_ns`; then runs are kept until there are `min_runs` of them and
    they have lasted `min_time_ns`. Pairs: a round is a block of equally many runs of each, `block_time_ns` long on average; a pair of
    fresh sessions serves `fresh_sessions_every` rounds (0: as many as take about the time of opening it, at most 5). Rounds end when
    the ratio's interval is narrower than `ratio_width` times the ratio, after at least `min_rounds` rounds, 6 session pairs and
    `min_runs` runs of each; at the latest after `max_rounds` rounds or `max_time_ns`, whichever comes first, but not before 3 session pairs.
    A slow model warms up by fewer runs, at least one: as many as `block_time_ns` holds.
    """

    warmup_runs: int = 5
    warmup_time_ns: int = 0
    min_runs: int = 64  # what p90 needs; 662 for p99
    min_time_ns: int = 0
    min_rounds: int = 7
    max_rounds: int = 200
    block_time_ns: int = 30_000_000
    max_time_ns: int = 6_000_000_000
    ratio_width: float = 0.01
    fresh_sessions_every: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, whole = getattr(self, field.name), field.name != "ratio_width"
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or value < 0:
                raise ConfigError("latency protocol", f"{field.name} must be a {'whole ' if whole else ''}number from 0", repr(value))
        if self.max_rounds < LEAST_SESSIONS:
            raise ConfigError("latency protocol", f"max_rounds must be at least {LEAST_SESSIONS}", str(self.max_rounds))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LatencyProtocol:
        """Rebuild a protocol; what is left out has its default, an unknown field is a `ConfigError`."""
        names = [f.name for f in dataclasses.fields(cls)]
        for key in data:
            if key not in names:
                raise ConfigError("latency protocol", "settings must be known fields", repr(key), nearest(key, names))
        return cls(**data)


@dataclass(frozen=True)
class LatencySamples:
    """Every kept run of one model, in order, integer nanoseconds, and the first run of all, warm-up included."""

    runs_ns: tuple[int, ...]
    first_run_ns: int


def measure_latency(run_once: RunOnce, protocol: LatencyProtocol, *, clock_ns: Callable[[], int] = time.perf_counter_ns) -> LatencySamples:
    """Time one model alone until the protocol is satisfied; prints nothing, drops nothing but the warm-up."""
    runs: list[int] = []
    with _no_garbage_collection():
        began = clock_ns()
        first, warm = None, 0
        while warm < protocol.warmup_runs or clock_ns() - began < protocol.warmup_time_ns:
            took = _timed(run_once, clock_ns)
            first, warm = took if first is None else first, warm + 1
        began = clock_ns()
        while len(runs) < protocol.min_runs or clock_ns() - began < protocol.min_time_ns:
            runs.append(_timed(run_once, clock_ns))
    return LatencySamples(tuple(runs), first if first is not None else (runs[0] if runs else 0))


def _timed(run_once: RunOnce, clock_ns: Callable[[], int]) -> int:
    began = clock_ns()
    run_once()
    return clock_ns() - began


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class PairedSamples:
    """Every kept run of candidate and baseline, integer nanoseconds, shape (rounds, runs a block), rounds in order.

    `session` numbers the session pair of each round, `candidate_first` says who went first in it, and `*_first_ns` are the first
    runs after opening, shape (session pairs,). `foreign_load` is the share of all CPUs' time that other processes took meanwhile, or
    None where the system doesn't tell. `stopped_by`: `ratio_width`, `max_rounds` or `max_time`.
    """

    candidate_ns: Nanoseconds
    baseline_ns: Nanoseconds
    session: NDArray[np.int64]
    candidate_first: NDArray[np.bool_]
    candidate_first_ns: Nanoseconds
    baseline_first_ns: Nanoseconds
    elapsed_ns: int
    stopped_by: str
    foreign_load: float | None = None

    @property
    def rounds(self) -> int:
        return len(self.session)

    def session_medians(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Medians of the block medians of candidate and baseline, one a session pair, nanoseconds."""
        return _by_session(self.candidate_ns, self.session), _by_session(self.baseline_ns, self.session)

    def ratio(self) -> Interval:
        """Latency of the candidate over the baseline's: the median of the session pairs' ratios, each the median of its rounds' ratios."""
        logs = _session_log_ratios(self.candidate_ns, self.baseline_ns, self.session)
        found = statistics.median_interval(logs)
        return Interval(math.exp(found.value), math.exp(found.low), math.exp(found.high))

    @property
    def noisy(self) -> bool:
        """Say whether the ratio's interval is wider than 10 % of the ratio: a verdict on the measurement, not on the candidate."""
        return relative_width(self.ratio()) > NOISY_WIDTH


def relative_width(interval: Interval) -> float:
    """Width of an interval as a share of its value."""
    return (interval.high - interval.low) / interval.value


def _by_session(runs_ns: Nanoseconds, session: NDArray[np.int64]) -> NDArray[np.float64]:
    medians = np.median(runs_ns, axis=1)
    return np.array([np.median(medians[session == s]) for s in range(int(session[-1]) + 1)])


def _session_log_ratios(candidate_ns: Nanoseconds, baseline_ns: Nanoseconds, session: NDArray[np.int64]) -> NDArray[np.float64]:
    # A clock tick may read 0 for an empty model: 1 ns stands in, so that a ratio exists.
    logs = np.log(np.maximum(np.median(candidate_ns, axis=1), 1)) - np.log(np.maximum(np.median(baseline_ns, axis=1), 1))
    return np.array([np.median(logs[session == s]) for s in range(int(session[-1]) + 1)])


class _Pair:
    """A pair of fresh sessions, opened in random order and warmed up by equally many runs, so that both see the same feeds."""

    def __init__(
        self, open_candidate: Callable[[], RunOnce], open_baseline: Callable[[], RunOnce], rng: np.random.Generator,
        clock_ns: Callable[[], int], protocol: LatencyProtocol, warmup: int | None,
    ) -> None:  # fmt: skip
        began = clock_ns()
        if rng.random() < 0.5:
            self.candidate, self.baseline = open_candidate(), open_baseline()
        else:
            self.baseline, self.candidate = open_baseline(), open_candidate()
        self.candidate_first_ns, self.baseline_first_ns = _timed(self.candidate, clock_ns), _timed(self.baseline, clock_ns)
        if warmup is None:
            slower = max(self.candidate_first_ns, self.baseline_first_ns, 1)
            warmup = min(protocol.warmup_runs, max(1, math.ceil(protocol.block_time_ns / slower)))
        self.warmup = warmup
        self.run_ns = max(self.candidate_first_ns, 1), max(self.baseline_first_ns, 1)
        for _ in range(warmup - 1):
            self.run_ns = _timed(self.candidate, clock_ns), _timed(self.baseline, clock_ns)
        while clock_ns() - began < protocol.warmup_time_ns:
            self.run_ns = _timed(self.candidate, clock_ns), _timed(self.baseline, clock_ns)
        self.opening_ns = clock_ns() - began


def measure_paired(
    open_candidate: Callable[[], RunOnce],
    open_baseline: Callable[[], RunOnce],
    protocol: LatencyProtocol,
    *,
    seed: int,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> PairedSamples:
    """Time candidate and baseline in turns, in random order (seeded), until the protocol's rule ends it.

    `open_candidate` and `open_baseline` open a fresh session each and return a function that makes one run; both are run equally
    often, so feeds cycled in the same order meet both alike. What a session costs to open counts into the time limit.
    """
    rng = np.random.default_rng(seed)
    load = CpuTimes.now()
    began = clock_ns()
    candidate: list[Nanoseconds] = []
    baseline: list[Nanoseconds] = []
    session: list[int] = []
    candidate_first: list[bool] = []
    first_runs: list[tuple[int, int]] = []
    block_runs: int | None = None
    rounds_a_session = protocol.fresh_sessions_every
    warmup: int | None = None
    stopped_by = ""
    with _no_garbage_collection():
        while not stopped_by:
            pair = _Pair(open_candidate, open_baseline, rng, clock_ns, protocol, warmup)
            warmup = pair.warmup
            first_runs.append((pair.candidate_first_ns, pair.baseline_first_ns))
            if block_runs is None:
                block_runs = _block_runs(pair.run_ns, protocol)
            rounds_here = 0
            while not stopped_by and rounds_here < max(rounds_a_session, 1):
                at = clock_ns()
                goes_first = bool(rng.random() < 0.5)
                blocks = {}
                for who in (goes_first, not goes_first):
                    blocks[who] = _block(pair.candidate if who else pair.baseline, block_runs, clock_ns)
                candidate.append(blocks[True])
                baseline.append(blocks[False])
                session.append(len(first_runs) - 1)
                candidate_first.append(goes_first)
                rounds_here += 1
                if not rounds_a_session:
                    rounds_a_session = min(max(round(pair.opening_ns / max(clock_ns() - at, 1)), 1), MOST_ROUNDS_A_SESSION)
                stopped_by = _stop(candidate, baseline, session, protocol, clock_ns() - began)
                if clock_ns() - began >= protocol.max_time_ns:
                    break  # not stopped: too few session pairs, so on to the next
            del pair  # the old sessions go before the next ones come: three at once would crowd the memory
    return PairedSamples(
        candidate_ns=np.stack(candidate), baseline_ns=np.stack(baseline), session=np.array(session), candidate_first=np.array(candidate_first),
        candidate_first_ns=np.array([f[0] for f in first_runs]), baseline_first_ns=np.array([f[1] for f in first_runs]),
        elapsed_ns=clock_ns() - began, stopped_by=stopped_by, foreign_load=load.foreign_share(CpuTimes.now()) if load else None,
    )  # fmt: skip


def _block_runs(run_ns: tuple[int, int], protocol: LatencyProtocol) -> int:
    slower = max(run_ns)
    if slower >= LONG_RUN_NS:
        return 1
    return max(LEAST_RUNS_A_BLOCK, math.ceil(2 * protocol.block_time_ns / max(sum(run_ns), 1)))


def _block(run_once: RunOnce, runs: int, clock_ns: Callable[[], int]) -> Nanoseconds:
    taken = [0] * runs
    for i in range(runs):
        began = clock_ns()
        run_once()
        taken[i] = clock_ns() - began
    return np.array(taken, np.int64)


def _stop(
    candidate: list[Nanoseconds], baseline: list[Nanoseconds], session: list[int], protocol: LatencyProtocol, elapsed_ns: int
) -> Literal["", "ratio_width", "max_rounds", "max_time"]:
    sessions = session[-1] + 1
    if sessions < LEAST_SESSIONS:
        return ""
    rounds = len(session)
    if rounds >= protocol.max_rounds:
        return "max_rounds"
    if elapsed_ns >= protocol.max_time_ns:
        return "max_time"
    enough = sessions >= statistics.LEAST_FOR_ORDER_INTERVAL and rounds >= protocol.min_rounds
    if enough and rounds * len(candidate[0]) >= protocol.min_runs:
        logs = _session_log_ratios(np.stack(candidate), np.stack(baseline), np.array(session))
        found = statistics.median_interval(logs)
        if math.exp(found.high - found.value) - math.exp(found.low - found.value) <= protocol.ratio_width:
            return "ratio_width"
    return ""


# Summaries ------------------------------------------------------------------------------------------------------------------


def summarize(samples: PairedSamples, *, examples_a_run: int = 1, seed: int = 0, itself: bool = False) -> dict[str, MetricValue]:
    """Return `latency` (p50, ms), `latency.p90`, `.p95`, `.p99` where the runs suffice, `latency.first_run` and `throughput`.

    `latency` and its ratio count session pairs. Limits of p90 and above are order statistics of all runs, which takes runs as
    independent; their ratios are bootstrapped by session pair. `throughput` is examples a second of one stream. With `itself` the
    candidate is the baseline, and all ratios are exactly 1.
    """
    ratio, delta = samples.ratio(), _delta_ms(samples)
    found = {"latency": _p50(samples.candidate_ns, samples.session, ratio, delta)}
    limits_of = {q: statistics.quantile_interval(samples.candidate_ns.ravel(), q) for q in PERCENTILES.values()}
    ratios = _quantile_ratios(samples, [q for q, limits in limits_of.items() if limits is not None], seed)
    for name, quantile in PERCENTILES.items():
        limits = limits_of[quantile]
        if limits is not None:
            found[f"latency.{name}"] = MetricValue(
                limits.value / 1e6, limits.low / 1e6, limits.high / 1e6, unit="ms", ratio=ratios[quantile],
                samples=samples.candidate_ns.size, method="order statistics of all runs; ratio by bootstrap over session pairs",
            )  # fmt: skip
    if len(samples.candidate_first_ns):  # a user's measurer tells nothing of first runs
        first = statistics.median_interval(samples.candidate_first_ns / 1e6)
        found["latency.first_run"] = MetricValue(
            first.value, max(first.low, 0.0), first.high, unit="ms", samples=len(samples.candidate_first_ns),
            ratio=statistics.ratio_interval(np.maximum(samples.candidate_first_ns, 1), np.maximum(samples.baseline_first_ns, 1)),
            method="median over sessions of the first run after opening",
        )  # fmt: skip
    p50 = found["latency"]
    per_second = examples_a_run * 1e3
    found["throughput"] = MetricValue(
        per_second / p50.value, per_second / p50.high, per_second / max(p50.low, 1e-9), unit="examples/s",
        ratio=Interval(1 / ratio.value, 1 / ratio.high, 1 / ratio.low), samples=p50.samples, method="one stream, from the median latency",
    )  # fmt: skip
    if itself:
        one = Interval.exactly(1.0)
        found = {
            n: dataclasses.replace(v, ratio=one if v.ratio else None, delta=Interval.exactly(0.0) if v.delta else None) for n, v in found.items()
        }
    return found


def summarize_baseline(samples: PairedSamples) -> MetricValue:
    """p50 of the baseline in the same rounds, ms."""
    return _p50(samples.baseline_ns, samples.session, Interval.exactly(1.0), Interval.exactly(0.0))


def missing_percentiles(samples: PairedSamples) -> dict[str, str]:
    """Say, for each percentile that the runs don't support, how many it needs."""
    count = samples.candidate_ns.size
    return {
        f"latency.{name}": f"{name} needs {statistics.runs_needed(q)} runs; {count} were made"
        for name, q in PERCENTILES.items()
        if count < statistics.runs_needed(q)
    }


def _p50(runs_ns: Nanoseconds, session: NDArray[np.int64], ratio: Interval, delta: Interval) -> MetricValue:
    limits = statistics.median_interval(np.maximum(_by_session(runs_ns, session), 1) / 1e6)
    sessions = int(session[-1]) + 1
    return MetricValue(
        limits.value, max(limits.low, 0.0), limits.high, unit="ms", ratio=ratio, delta=delta, samples=runs_ns.size,
        method=f"median of {sessions} session pairs, {len(session)} rounds of {runs_ns.shape[1]} runs, sign-test limits",
    )  # fmt: skip


def _delta_ms(samples: PairedSamples) -> Interval:
    candidate, baseline = samples.session_medians()
    return statistics.median_interval((candidate - baseline) / 1e6)


def _quantile_ratios(samples: PairedSamples, quantiles: Sequence[float], seed: int) -> dict[float, Interval | None]:
    """Ratios of percentiles over all runs, candidate to baseline, bootstrapped by session pair.

    A resample only weighs the sessions anew: both sides are sorted once, and a percentile is where the running sum of weights gets to its
    share (the inverse of the empirical distribution).
    """
    if not quantiles:
        return {}
    sessions = int(samples.session[-1]) + 1
    session_of_run = np.repeat(samples.session, samples.candidate_ns.shape[1])
    sides = []
    for runs in (samples.candidate_ns.ravel(), samples.baseline_ns.ravel()):
        order = np.argsort(runs, kind="stable")
        sides.append((runs[order], session_of_run[order]))

    def statistic(drawn: NDArray[np.int64]) -> tuple[float, ...]:
        weights = np.bincount(drawn, minlength=sessions)
        found = []
        for runs, owners in sides:
            reached = np.cumsum(weights[owners])
            found.append([float(runs[np.searchsorted(reached, q * reached[-1])]) for q in quantiles])
        return tuple(a / max(b, 1.0) for a, b in zip(*found, strict=True))

    replicates = statistics.bootstrap_replicates(statistic, sessions, seed=seed, resamples=statistics.FEW_REPLICATES, max_time_s=5.0)
    estimates = statistic(np.arange(sessions))
    enough = len(replicates) >= 20
    return {q: statistics.bootstrap_interval(estimates[i], replicates[:, i]) if enough else None for i, q in enumerate(quantiles)}


# What else ran --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CpuTimes:
    """Seconds that all CPUs were busy, seconds of this process, seconds of the wall clock, and the number of CPUs."""

    busy_s: float
    own_s: float
    wall_s: float
    cpus: int

    @classmethod
    def now(cls) -> CpuTimes | None:
        """Read /proc/stat (time that the hypervisor took away counts as busy); None where there is none."""
        try:
            fields = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return None
        user, nice, system, _idle, _waiting, irq, softirq, stolen = fields
        ticks = user + nice + system + irq + softirq + stolen
        return cls(ticks / os.sysconf("SC_CLK_TCK"), time.process_time(), time.monotonic(), os.cpu_count() or 1)

    def foreign_share(self, later: CpuTimes | None) -> float | None:
        """Share of all CPUs' time between two readings that went to other processes, 0 to 1; ticks of 10 ms limit its precision."""
        if later is None:
            return None
        available = (later.wall_s - self.wall_s) * self.cpus
        foreign = (later.busy_s - self.busy_s) - (later.own_s - self.own_s)
        return min(max(foreign / available, 0.0), 1.0) if available > 0 else 0.0
