"""How long one run takes: of a model alone, and of a candidate and the baseline side by side.

Sessions of one model differ (by 1 % and more for small models, from one session to the next of the same file), and the machine drifts. So candidate
and baseline are timed in turns, in fresh sessions, and it is session pairs that the intervals count, never single runs. Rounds that
something else on the machine disturbed are kept, flagged and repeated.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.benchmarks import statistics
from autotune.benchmarks.watch import Load, Reading, Seen, between
from autotune.errors import ConfigError, nearest
from autotune.records import Interval, MetricValue

RunOnce = Callable[[], object]
Nanoseconds = NDArray[np.int64]


def _none() -> Nanoseconds:
    return np.empty(0, np.int64)


PERCENTILES = {"p90": 0.90, "p95": 0.95, "p99": 0.99}
PATTERNS = ("steady", "paced", "cold")
CLOCKS = ("wall", "cpu")
NOISY_WIDTH = 0.10
LEAST_SESSIONS = 3  # even when the time is over: fewer give no interval worth the name
MOST_ROUNDS_A_SESSION = 5
LEAST_RUNS_A_BLOCK = 3
LONG_RUN_NS = 500_000_000  # runs this long are timed one a block
MORE_FOR_REPEATS = 0.5  # share of the time and of the rounds that may be added to repeat disturbed rounds
LIMIT_ERROR = (1 - statistics.CONFIDENCE) / 2  # of ending early for a limit that is met, over all looks: one side of a 95 % interval


@dataclass(frozen=True)
class LatencyProtocol:
    """How a latency was measured; kept with the result. Results under different protocols don't compare.

    One model alone: warm-up lasts `warmup_runs` runs and `warmup_time_ns`; then runs are kept until there are `min_runs` of them and
    they have lasted `min_time_ns`. Pairs: a round is a block of equally many runs of each, `block_time_ns` long on average; a pair of
    fresh sessions serves `fresh_sessions_every` rounds (0: as many as take about the time of opening it, at most 5). Rounds end when
    the ratio's interval is narrower than `ratio_width` times the ratio, after at least `min_rounds` rounds, 8 session pairs and
    `min_runs` runs of each, looked at whenever there are 1.4 times as many session pairs as at the last look; at the latest after
    `max_rounds` rounds or `max_time_ns`, whichever comes first, but not before 3 session pairs.
    A slow model warms up by fewer runs, at least one: as many as `block_time_ns` holds.

    `pattern`: `steady` runs follow each other at once; `paced` ones start every `interval_ns`, so that caches and frequency are those of
    a server with little to do; a `cold` one is the first of a fresh session, the only one. `concurrency` threads share a session for
    `throughput`; latencies are always those of one run at a time. `clock`: `wall`, or the `cpu` time of this process.
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
    pattern: str = "steady"
    interval_ns: int = 0
    concurrency: int = 1
    clock: str = "wall"

    def __post_init__(self) -> None:
        who = "latency protocol"
        for name, known in (("pattern", PATTERNS), ("clock", CLOCKS)):
            if getattr(self, name) not in known:
                raise ConfigError(who, f"{name} must be one of {', '.join(known)}", repr(getattr(self, name)))
        for field in dataclasses.fields(self):
            value, whole = getattr(self, field.name), field.name != "ratio_width"
            if field.name in ("pattern", "clock"):
                continue
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or value < 0:
                raise ConfigError(who, f"{field.name} must be a {'whole ' if whole else ''}number from 0", repr(value))
        if self.max_rounds < LEAST_SESSIONS:
            raise ConfigError(who, f"max_rounds must be at least {LEAST_SESSIONS}", str(self.max_rounds))
        if (self.pattern == "paced") != (self.interval_ns > 0):
            raise ConfigError(who, "interval_ns must be above 0 for paced runs, and 0 for others", f"{self.interval_ns} with {self.pattern} runs")
        if self.concurrency < 1:
            raise ConfigError(who, "concurrency must be at least 1", str(self.concurrency))
        if self.concurrency > 1 and (self.pattern == "cold" or self.clock == "cpu"):
            got = "cold runs" if self.pattern == "cold" else "CPU time"
            raise ConfigError(who, "concurrency above 1 needs warm sessions and the wall clock", got)

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
class StopAbove:
    """A limit that ends a measurement once the candidate is certainly above it: `of` a `ratio` to the baseline, or `ms`; `why` in words.

    `rule` is what the measurement is said to be stopped by. `error`: with what probability, over all looks, it may be ended wrongly. None: it
    has its part of 2.5 %, by the sign test. A smaller one is that of the choice at the end, which compares many models: then the intervals are
    those of the choice.
    """

    of: str
    limit: float
    why: str
    rule: str = "limit"
    error: float | None = None

    def __post_init__(self) -> None:
        if self.of not in ("ratio", "ms") or not self.limit > 0:
            raise ConfigError("latency limit", "it must be a ratio or ms above 0", f"{self.of} {self.limit}")
        if self.error is not None and not 0 < self.error < 1:
            raise ConfigError("latency limit", "its error must be above 0 and below 1", repr(self.error))


@dataclass(frozen=True)
class PairedSamples:
    """Every kept run of candidate and baseline, integer nanoseconds, shape (rounds, runs a block), rounds in order.

    `session` numbers the session pair of each round, `candidate_first` says who went first in it, and `*_first_ns` are the first
    runs after opening, shape (session pairs,). `stopped_by`: `ratio_width`, `max_rounds`, `max_time`, or the rule of a limit; `why` says which.
    `load` is what was seen of the machine in each round, `disturbed` the rounds that it spoilt: they are kept, and repeated, and the
    estimates leave them out. `*_crowd_ns`, shape (session pairs,): how long `crowd_runs` runs took on one session by several threads;
    empty with one. `late`: share of the paced runs that began after their time.
    """

    candidate_ns: Nanoseconds
    baseline_ns: Nanoseconds
    session: NDArray[np.int64]
    candidate_first: NDArray[np.bool_]
    candidate_first_ns: Nanoseconds
    baseline_first_ns: Nanoseconds
    elapsed_ns: int
    stopped_by: str
    why: str = ""
    load: Load | None = None
    disturbed: NDArray[np.bool_] | None = None
    candidate_crowd_ns: Nanoseconds = dataclasses.field(default_factory=_none)
    baseline_crowd_ns: Nanoseconds = dataclasses.field(default_factory=_none)
    crowd_runs: int = 0
    late: float | None = None
    protocol: LatencyProtocol | None = None

    @property
    def rounds(self) -> int:
        return len(self.session)

    @property
    def foreign_load(self) -> float | None:
        """Share of our CPUs' time that others took meanwhile; None where nobody watched or the system doesn't tell."""
        return self.load.foreign_share() if self.load else None

    @property
    def used(self) -> NDArray[np.bool_]:
        """The rounds that estimates count: those not disturbed; all of them where too few are left for an interval."""
        return _used(self.session, self.disturbed)

    @property
    def session_pairs(self) -> int:
        """Number of session pairs that estimates count."""
        return len(np.unique(self.session[self.used]))

    def runs(self) -> tuple[Nanoseconds, Nanoseconds]:
        """Runs of candidate and baseline in the rounds that count, shape (rounds, runs a block)."""
        return self.candidate_ns[self.used], self.baseline_ns[self.used]

    def session_medians(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Medians of the block medians of candidate and baseline, one a session pair that counts, nanoseconds."""
        session = self.session[self.used]
        candidate, baseline = (_by_session(np.median(runs, axis=1), session) for runs in self.runs())
        return candidate, baseline

    def ratio(self) -> Interval:
        """Latency of the candidate over the baseline's: the median of the session pairs' ratios, each the median of its rounds' ratios."""
        candidate, baseline = (np.median(runs, axis=1) for runs in self.runs())
        found = statistics.median_interval(_by_session(_log_ratios(candidate, baseline), self.session[self.used]))
        return Interval(math.exp(found.value), math.exp(found.low), math.exp(found.high))

    @property
    def noisy(self) -> bool:
        """Say whether the ratio's interval is wider than 10 % of the ratio: a verdict on the measurement, not on the candidate."""
        return relative_width(self.ratio()) > NOISY_WIDTH


def relative_width(interval: Interval) -> float:
    """Width of an interval as a share of its value."""
    return (interval.high - interval.low) / interval.value


def _used(session: NDArray[np.int64], disturbed: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    everything = np.ones(len(session), np.bool_)
    if disturbed is None:
        return everything
    left, pairs = len(np.unique(session[~disturbed])), len(np.unique(session))
    return ~disturbed if left >= min(statistics.LEAST_FOR_A_LOOK, max(LEAST_SESSIONS, math.ceil(pairs / 2))) else everything


def _by_session(values: NDArray[Any], session: NDArray[np.int64]) -> NDArray[np.float64]:
    """Median of the rounds' values of each session pair, in order."""
    starts = np.flatnonzero(np.diff(session, prepend=-1))
    return np.array([np.median(part) for part in np.split(values, starts[1:])])


def _log_ratios(candidate: NDArray[np.float64], baseline: NDArray[np.float64]) -> NDArray[np.float64]:
    # A clock tick may read 0 for an empty model: 1 ns stands in, so that a ratio exists.
    logs: NDArray[np.float64] = np.log(np.maximum(candidate, 1)) - np.log(np.maximum(baseline, 1))
    return logs


def wait_until(due_ns: int, clock_ns: Callable[[], int]) -> None:
    """Sleep until the clock reads `due_ns`; the CPU idles meanwhile, as it would between requests."""
    while (left := due_ns - clock_ns()) > 0:
        time.sleep(left / 1e9)


@dataclass(frozen=True)
class _Means:
    """What timing needs of the world: the clock of budgets, the clock of runs, how to wait, and who watches the machine."""

    clock_ns: Callable[[], int]
    timer_ns: Callable[[], int]
    wait: Callable[[int, Callable[[], int]], None]
    watch: Callable[[], Reading] | None


class _Pair:
    """A pair of fresh sessions, opened in random order and warmed up by equally many runs, so that both see the same feeds."""

    def __init__(
        self, open_candidate: Callable[[], RunOnce], open_baseline: Callable[[], RunOnce], rng: np.random.Generator, means: _Means,
        protocol: LatencyProtocol, warmup: int | None,
    ) -> None:  # fmt: skip
        clock_ns, timer_ns = means.clock_ns, means.timer_ns
        began = clock_ns()
        self.candidate_first = bool(rng.random() < 0.5)
        if self.candidate_first:
            self.candidate, self.baseline = open_candidate(), open_baseline()
            self.candidate_first_ns, self.baseline_first_ns = _timed(self.candidate, timer_ns), _timed(self.baseline, timer_ns)
        else:
            self.baseline, self.candidate = open_baseline(), open_candidate()
            self.baseline_first_ns, self.candidate_first_ns = _timed(self.baseline, timer_ns), _timed(self.candidate, timer_ns)
        if warmup is None:
            slower = max(self.candidate_first_ns, self.baseline_first_ns, 1)
            warmup = min(protocol.warmup_runs, max(1, math.ceil(protocol.block_time_ns / slower)))
        self.warmup = warmup
        self.run_ns = max(self.candidate_first_ns, 1), max(self.baseline_first_ns, 1)
        if protocol.pattern != "cold":
            for _ in range(warmup - 1):
                self.run_ns = _timed(self.candidate, timer_ns), _timed(self.baseline, timer_ns)
            while clock_ns() - began < protocol.warmup_time_ns:
                self.run_ns = _timed(self.candidate, timer_ns), _timed(self.baseline, timer_ns)
        self.opening_ns = clock_ns() - began


def measure_paired(
    open_candidate: Callable[[], RunOnce],
    open_baseline: Callable[[], RunOnce],
    protocol: LatencyProtocol,
    *,
    seed: int,
    limits: Sequence[StopAbove] = (),
    clock_ns: Callable[[], int] = time.perf_counter_ns,
    timer_ns: Callable[[], int] | None = None,
    wait: Callable[[int, Callable[[], int]], None] = wait_until,
    watch: Callable[[], Reading] | None = None,
) -> PairedSamples:
    """Time candidate and baseline in turns, in random order (seeded), until the protocol's rule ends it.

    `open_candidate` and `open_baseline` open a fresh session each and return a function that makes one run; both are run equally
    often, so feeds cycled in the same order meet both alike. What a session costs to open counts into the time limit. `limits` end it
    early, wrongly in at most 2.5 % of the measurements (or in the share that a limit states itself), however often they are looked at.
    `watch` reads the state of the machine before and after each round: disturbed rounds are repeated, for which time and rounds may grow
    by half. `timer_ns` times the runs; by default it is what the protocol's clock says.
    """
    timer = timer_ns or (time.process_time_ns if protocol.clock == "cpu" else clock_ns)
    rng = np.random.default_rng(seed)
    rounds = _Rounds(protocol, limits, _Means(clock_ns, timer, wait, watch))
    warmup: int | None = None
    with _no_garbage_collection():
        while not rounds.stopped_by:
            before = watch() if watch else None
            pair = _Pair(open_candidate, open_baseline, rng, rounds.means, protocol, warmup)
            warmup = pair.warmup
            rounds.of_pair(pair, rng, before)
            del pair  # the old sessions go before the next ones come: three at once would crowd the memory
    return rounds.samples()


class _Rounds:
    """The rounds of one measurement so far, and whether they are enough."""

    def __init__(self, protocol: LatencyProtocol, limits: Sequence[StopAbove], means: _Means) -> None:
        self.protocol, self.limits, self.means = protocol, limits, means
        self.began = means.clock_ns()
        self.candidate: list[Nanoseconds] = []
        self.baseline: list[Nanoseconds] = []
        self.medians: list[tuple[float, float]] = []
        self.session: list[int] = []
        self.candidate_first: list[bool] = []
        self.first_runs: list[tuple[int, int]] = []
        self.crowds: list[tuple[int, int]] = []
        self.crowd_runs = 0
        self.seen: list[Seen] = []
        self.load: Load | None = None
        self.disturbed: NDArray[np.bool_] | None = None
        self.paced = self.late = 0
        self.paused_ns = 0
        self.block_runs = 0
        self.rounds_a_session = 1 if protocol.pattern == "cold" else protocol.fresh_sessions_every
        self.width_looks = statistics.Looks(statistics.LEAST_FOR_A_LOOK)
        self.limit_looks = statistics.Looks(statistics.LEAST_FOR_A_LOOK)
        self.stopped_by = self.why = ""

    def of_pair(self, pair: _Pair, rng: np.random.Generator, before: Reading | None) -> None:
        """Make the rounds of one pair of sessions. `before`: the machine as the pair was opened, where somebody watches."""
        clock_ns, protocol = self.means.clock_ns, self.protocol
        self.first_runs.append((pair.candidate_first_ns, pair.baseline_first_ns))
        if protocol.pattern == "cold":
            self._keep(np.array([pair.candidate_first_ns]), np.array([pair.baseline_first_ns]), pair.candidate_first, before)
            self._look(complete=True)
            return
        self.block_runs = self.block_runs or _block_runs(pair.run_ns, protocol)
        rounds_here, complete = 0, False
        while not complete and not self.stopped_by:
            at, before = clock_ns(), self.means.watch() if self.means.watch else None
            goes_first = bool(rng.random() < 0.5)
            blocks = {}
            for who in (goes_first, not goes_first):
                blocks[who] = self._block(pair.candidate if who else pair.baseline)
            self._keep(blocks[True], blocks[False], goes_first, before)
            rounds_here += 1
            if not self.rounds_a_session:
                self.rounds_a_session = min(max(round(pair.opening_ns / max(clock_ns() - at, 1)), 1), MOST_ROUNDS_A_SESSION)
            complete = rounds_here >= self.rounds_a_session or self._time_is_over()  # not stopped then: too few session pairs, so on to the next
            if rounds_here == 1 and protocol.concurrency > 1:
                self._crowd(pair, goes_first)
            self._look(complete=complete)

    def _keep(self, candidate: Nanoseconds, baseline: Nanoseconds, candidate_first: bool, before: Reading | None) -> None:
        if before is not None and self.means.watch is not None:
            self.seen.append(between(before, self.means.watch(), pause_s=self.paused_ns / 1e9))
            self.load = Load.of(self.seen)
            self.disturbed = self.load.disturbed()
        self.paused_ns = 0
        self.candidate.append(candidate)
        self.baseline.append(baseline)
        self.medians.append((float(np.median(candidate)), float(np.median(baseline))))
        self.session.append(len(self.first_runs) - 1)
        self.candidate_first.append(candidate_first)

    def _block(self, run_once: RunOnce) -> Nanoseconds:
        clock_ns, timer_ns, interval_ns = self.means.clock_ns, self.means.timer_ns, self.protocol.interval_ns
        taken = [0] * self.block_runs
        due = clock_ns() if interval_ns else 0
        for i in range(self.block_runs):
            if interval_ns:
                due = self._pause(due + interval_ns)
            began = timer_ns()
            run_once()
            taken[i] = timer_ns() - began
        return np.array(taken, np.int64)

    def _pause(self, due: int) -> int:
        """Wait for a paced run's time; returns when it began: a run that is late moves those after it."""
        now = self.means.clock_ns()
        self.paced += 1
        if now > due:
            self.late += 1
            return now
        self.means.wait(due, self.means.clock_ns)
        self.paused_ns += self.means.clock_ns() - now
        return due

    def _crowd(self, pair: _Pair, candidate_first: bool) -> None:
        """Time many runs of each on one session by several threads at once."""
        threads = self.protocol.concurrency
        self.crowd_runs = self.crowd_runs or threads * max(LEAST_RUNS_A_BLOCK, math.ceil(2 * self.protocol.block_time_ns / max(sum(pair.run_ns), 1)))
        taken = {}
        for who in (candidate_first, not candidate_first):
            taken[who] = _crowd_ns(pair.candidate if who else pair.baseline, threads, self.crowd_runs // threads, self.means.timer_ns)
        self.crowds.append((taken[True], taken[False]))

    # ---- is it enough?

    def _set_aside_ns(self) -> int:
        return 0 if self.load is None else int(1e9 * self.load.wall_s[self.disturbed].sum())

    def _time_is_over(self) -> bool:
        more = min(self._set_aside_ns(), int(MORE_FOR_REPEATS * self.protocol.max_time_ns))
        return self.means.clock_ns() - self.began >= self.protocol.max_time_ns + more

    def _look(self, *, complete: bool) -> None:
        """Find out whether to stop. By the figures only after a complete session pair, and only every now and then: see `Looks`."""
        protocol = self.protocol
        session = np.array(self.session)
        clean = np.ones(len(session), np.bool_) if self.disturbed is None else ~self.disturbed
        pairs, most = len(np.unique(session[clean])), int((1 + MORE_FOR_REPEATS) * protocol.max_rounds)
        if pairs < LEAST_SESSIONS and (len(self.first_runs) < LEAST_SESSIONS or not self._hopeless()):
            return
        if clean.sum() >= protocol.max_rounds or len(session) >= most:
            self.stopped_by = "max_rounds"
        elif self._time_is_over():
            self.stopped_by = "max_time"
        elif complete and pairs >= statistics.LEAST_FOR_A_LOOK:
            medians = np.array(self.medians)[clean]
            logs = _by_session(_log_ratios(medians[:, 0], medians[:, 1]), session[clean])
            if self.limits and self.limit_looks.due(pairs):
                self._look_at_limits(logs, _by_session(medians[:, 0], session[clean]) / 1e6)
            enough = clean.sum() >= protocol.min_rounds and clean.sum() * len(self.candidate[0]) >= protocol.min_runs
            if not self.stopped_by and enough and self.width_looks.due(pairs) and statistics.narrow_enough(logs, protocol.ratio_width):
                self.stopped_by = "ratio_width"

    def _hopeless(self) -> bool:
        """Whether even the time and the rounds added for repeats have left fewer than 3 session pairs undisturbed."""
        over = self.means.clock_ns() - self.began >= (1 + MORE_FOR_REPEATS) * self.protocol.max_time_ns
        return over or len(self.session) >= (1 + MORE_FOR_REPEATS) * self.protocol.max_rounds

    def _look_at_limits(self, logs: NDArray[np.float64], milliseconds: NDArray[np.float64]) -> None:
        sharing = sum(limit.error is None for limit in self.limits)
        for limit in self.limits:
            values, bound = (logs, math.log(limit.limit)) if limit.of == "ratio" else (milliseconds, limit.limit)
            certainly_above = statistics.median_above if limit.error is None else statistics.median_far_above
            whole = LIMIT_ERROR / sharing if limit.error is None else limit.error
            if certainly_above(values, bound, error=statistics.error_at_look(self.limit_looks.made, whole)):
                self.stopped_by, self.why = limit.rule, limit.why
                return

    def samples(self) -> PairedSamples:
        """All of it."""
        first, crowds = np.array(self.first_runs, np.int64), np.array(self.crowds, np.int64).reshape(-1, 2)
        return PairedSamples(
            candidate_ns=np.stack(self.candidate), baseline_ns=np.stack(self.baseline), session=np.array(self.session),
            candidate_first=np.array(self.candidate_first), candidate_first_ns=first[:, 0], baseline_first_ns=first[:, 1],
            elapsed_ns=self.means.clock_ns() - self.began, stopped_by=self.stopped_by, why=self.why, load=self.load,
            disturbed=self.disturbed, candidate_crowd_ns=crowds[:, 0], baseline_crowd_ns=crowds[:, 1], crowd_runs=self.crowd_runs,
            late=self.late / self.paced if self.paced else None, protocol=self.protocol,
        )  # fmt: skip


def _block_runs(run_ns: tuple[int, int], protocol: LatencyProtocol) -> int:
    if max(run_ns) >= LONG_RUN_NS:
        return 1
    return max(LEAST_RUNS_A_BLOCK, math.ceil(2 * protocol.block_time_ns / max(sum(max(ns, protocol.interval_ns) for ns in run_ns), 1)))


def _crowd_ns(run_once: RunOnce, threads: int, runs_each: int, timer_ns: Callable[[], int]) -> int:
    """How long it takes several threads to make their runs on one session, from the moment that all are there."""
    gate = threading.Barrier(threads + 1)
    faults: list[BaseException] = []

    def work() -> None:
        gate.wait()
        try:
            for _ in range(runs_each):
                run_once()
        except BaseException as fault:
            faults.append(fault)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    gate.wait()
    began = timer_ns()
    for worker in workers:
        worker.join()
    taken = timer_ns() - began
    if faults:
        raise faults[0]
    return taken


# Summaries ------------------------------------------------------------------------------------------------------------------


def summarize(samples: PairedSamples, *, examples_a_run: int = 1, seed: int = 0, itself: bool = False) -> dict[str, MetricValue]:
    """Return `latency` (p50, ms), `latency.p90`, `.p95`, `.p99` where the runs suffice, `latency.first_run` and `throughput`.

    `latency` and its ratio count session pairs. Limits of p90 and above are order statistics of all runs, which takes runs as
    independent; their ratios are bootstrapped by session pair. `throughput` is examples a second of one stream, or of the protocol's
    threads on one session. Disturbed rounds are left out. With `itself` the candidate is the baseline, and all ratios are exactly 1.
    """
    ratio, delta = samples.ratio(), _delta_ms(samples)
    runs, _ = samples.runs()
    how = _how(samples.protocol)
    found = {"latency": _p50(samples, samples.session_medians()[0], ratio, delta)}
    limits_of = {q: statistics.quantile_interval(runs.ravel(), q) for q in PERCENTILES.values()}
    ratios = _quantile_ratios(samples, [q for q, limits in limits_of.items() if limits is not None], seed)
    for name, quantile in PERCENTILES.items():
        limits = limits_of[quantile]
        if limits is not None:
            found[f"latency.{name}"] = MetricValue(
                limits.value / 1e6, limits.low / 1e6, limits.high / 1e6, unit="ms", ratio=ratios[quantile],
                samples=runs.size, method=f"order statistics of all runs{how}; ratio by bootstrap over session pairs",
                units=samples.session_pairs,
            )  # fmt: skip
    if len(samples.candidate_first_ns):  # a user's measurer tells nothing of first runs
        first = statistics.median_interval(samples.candidate_first_ns / 1e6)
        found["latency.first_run"] = MetricValue(
            first.value, max(first.low, 0.0), first.high, unit="ms", samples=len(samples.candidate_first_ns),
            ratio=statistics.ratio_interval(np.maximum(samples.candidate_first_ns, 1), np.maximum(samples.baseline_first_ns, 1)),
            method="median over sessions of the first run after opening", units=len(samples.candidate_first_ns),
        )  # fmt: skip
    found["throughput"] = _crowd_throughput(samples, examples_a_run) if samples.crowd_runs else _one_stream(found["latency"], ratio, examples_a_run)
    if itself:
        one = Interval.exactly(1.0)
        found = {
            n: dataclasses.replace(v, ratio=one if v.ratio else None, delta=Interval.exactly(0.0) if v.delta else None) for n, v in found.items()
        }
    return found


def _how(protocol: LatencyProtocol | None) -> str:
    """What a reader must know of a number's kind, for its method; nothing for steady runs by the wall clock."""
    if protocol is None:
        return ""
    pattern = {
        "steady": "",
        "paced": f", one every {protocol.interval_ns / 1e6:g} ms",
        "cold": ", each the first of a fresh session",
    }[protocol.pattern]
    return pattern + (", CPU time instead of elapsed time" if protocol.clock == "cpu" else "")


def _one_stream(p50: MetricValue, ratio: Interval, examples_a_run: int) -> MetricValue:
    per_second = examples_a_run * 1e3
    return MetricValue(
        per_second / p50.value, per_second / p50.high, per_second / max(p50.low, 1e-9), unit="examples/s",
        ratio=Interval(1 / ratio.value, 1 / ratio.high, 1 / ratio.low), samples=p50.samples, method="one stream, from the median latency",
        units=p50.units,
    )  # fmt: skip


def _crowd_throughput(samples: PairedSamples, examples_a_run: int) -> MetricValue:
    """Examples a second of several threads on one session: the median over the session pairs that count."""
    kept = np.unique(samples.session[samples.used])
    candidate, baseline = (np.maximum(ns[kept], 1) for ns in (samples.candidate_crowd_ns, samples.baseline_crowd_ns))
    found = statistics.median_interval(1e9 * samples.crowd_runs * examples_a_run / candidate)
    threads = samples.protocol.concurrency if samples.protocol else 1
    return MetricValue(
        found.value, max(found.low, 0.0), found.high, unit="examples/s", ratio=statistics.ratio_interval(baseline, candidate),
        samples=samples.crowd_runs * len(kept), method=f"{threads} threads on one session, median of {len(kept)} session pairs",
        units=len(kept),
    )  # fmt: skip


def summarize_baseline(samples: PairedSamples) -> MetricValue:
    """p50 of the baseline in the same rounds, ms."""
    return _p50(samples, samples.session_medians()[1], Interval.exactly(1.0), Interval.exactly(0.0))


def missing_percentiles(samples: PairedSamples) -> dict[str, str]:
    """Say, for each percentile that the runs don't support, how many it needs."""
    count = samples.runs()[0].size
    return {
        f"latency.{name}": f"{name} needs {statistics.runs_needed(q)} runs; {count} were made"
        for name, q in PERCENTILES.items()
        if count < statistics.runs_needed(q)
    }


def _p50(samples: PairedSamples, medians_ns: NDArray[np.float64], ratio: Interval, delta: Interval) -> MetricValue:
    limits = statistics.median_interval(np.maximum(medians_ns, 1) / 1e6)
    runs, _ = samples.runs()
    return MetricValue(
        limits.value, max(limits.low, 0.0), limits.high, unit="ms", ratio=ratio, delta=delta, samples=runs.size,
        method=f"median of {len(medians_ns)} session pairs, {len(runs)} rounds of {runs.shape[1]} runs{_how(samples.protocol)}, sign-test limits",
        units=len(medians_ns),
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
    both = samples.runs()
    kept, number = np.unique(samples.session[samples.used], return_inverse=True)
    sessions = len(kept)
    session_of_run = np.repeat(number, both[0].shape[1])
    sides = []
    for runs in (both[0].ravel(), both[1].ravel()):
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
