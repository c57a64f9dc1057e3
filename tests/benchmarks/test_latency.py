from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from autotune.benchmarks.latency import (
    LatencyProtocol,
    PairedSamples,
    StopAbove,
    measure_latency,
    measure_paired,
    missing_percentiles,
    summarize,
    summarize_baseline,
    wait_until,
)
from autotune.benchmarks.watch import Reading
from autotune.errors import ConfigError

MS = 1_000_000


class FakeClock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class FakeModel:
    """Opens sessions whose runs take as long as `run_ns(session number, run number)` says."""

    def __init__(
        self, clock: FakeClock, run_ns: Callable[[int, int], float], opening_ns: int = 0, log: list[str] | None = None, name: str = ""
    ) -> None:
        self.clock, self.run_ns, self.opening_ns, self.name = clock, run_ns, opening_ns, name
        self.log = log if log is not None else []
        self.sessions = 0

    def open(self) -> Callable[[], None]:
        session, runs = self.sessions, 0
        self.sessions += 1
        self.clock.now_ns += self.opening_ns

        def run_once() -> None:
            nonlocal runs
            self.clock.now_ns += int(self.run_ns(session, runs))
            runs += 1
            self.log.append(self.name)

        return run_once


def paired(
    candidate_ns: Callable[[int, int], float],
    baseline_ns: Callable[[int, int], float],
    protocol: LatencyProtocol,
    *,
    seed: int = 0,
    opening_ns: int = 0,
) -> PairedSamples:
    clock = FakeClock()
    candidate, baseline = FakeModel(clock, candidate_ns, opening_ns), FakeModel(clock, baseline_ns, opening_ns)
    return measure_paired(candidate.open, baseline.open, protocol, seed=seed, clock_ns=clock)


# One model alone ------------------------------------------------------------------------------------------------------------


def test_warmup_runs_are_not_kept() -> None:
    clock = FakeClock()
    durations_ns = iter([9_000_000] * 2 + [1_000_000] * 3)  # a slow start, then steady

    def run_once() -> None:
        clock.now_ns += next(durations_ns)

    protocol = LatencyProtocol(warmup_runs=2, min_runs=3, min_time_ns=0)
    samples = measure_latency(run_once, protocol, clock_ns=clock)

    assert samples.runs_ns == (1_000_000,) * 3
    assert samples.first_run_ns == 9_000_000


def test_runs_go_on_until_the_least_time_has_passed() -> None:
    clock = FakeClock()
    model = FakeModel(clock, lambda _, __: MS)

    samples = measure_latency(model.open(), LatencyProtocol(warmup_runs=0, min_runs=3, min_time_ns=10 * MS), clock_ns=clock)

    assert samples.runs_ns == (MS,) * 10
    assert samples.first_run_ns == MS


def test_warm_up_lasts_the_least_time_too() -> None:
    clock = FakeClock()
    model = FakeModel(clock, lambda _, run: 2 * MS if run < 5 else MS)

    samples = measure_latency(model.open(), LatencyProtocol(warmup_runs=1, warmup_time_ns=10 * MS, min_runs=2), clock_ns=clock)

    assert samples.runs_ns == (MS, MS)


def test_garbage_is_not_collected_while_runs_are_timed_and_is_again_afterwards() -> None:
    seen = []

    measure_latency(lambda: seen.append(gc.isenabled()), LatencyProtocol(warmup_runs=1, min_runs=2))

    assert seen == [False] * 3
    assert gc.isenabled()


def test_garbage_collection_comes_back_when_a_run_fails() -> None:
    def run_once() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        measure_latency(run_once, LatencyProtocol())

    assert gc.isenabled()


# The protocol ---------------------------------------------------------------------------------------------------------------


def test_a_protocol_comes_back_from_json() -> None:
    protocol = LatencyProtocol(min_runs=662, ratio_width=0.02)

    assert LatencyProtocol.from_json(protocol.to_json()) == protocol


def test_an_unknown_protocol_field_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"got 'min_run'\. Did you mean 'min_runs'\?"):
        LatencyProtocol.from_json({"min_run": 3})


@pytest.mark.parametrize("wrong", [{"min_runs": -1}, {"warmup_runs": 2.5}, {"ratio_width": "1 %"}, {"min_rounds": True}, {"max_rounds": 2}])
def test_a_protocol_that_cannot_be_followed_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"latency protocol: {next(iter(wrong))} must be"):
        LatencyProtocol(**wrong)  # type: ignore[arg-type]


# Pairs ----------------------------------------------------------------------------------------------------------------------


def test_a_steady_pair_stops_as_soon_as_the_ratio_is_known_well_enough() -> None:
    samples = paired(lambda _, __: MS, lambda _, __: 2 * MS, LatencyProtocol(min_rounds=8, min_runs=0))

    assert samples.stopped_by == "ratio_width"
    assert samples.rounds == 8
    assert samples.ratio().value == pytest.approx(0.5)
    assert not samples.noisy


def test_runs_that_a_percentile_needs_are_made_even_when_the_ratio_is_known() -> None:
    samples = paired(lambda _, __: MS, lambda _, __: 2 * MS, LatencyProtocol(min_runs=662, max_time_ns=10**12))

    assert 662 <= samples.candidate_ns.size < 662 + samples.candidate_ns.shape[1]
    assert "latency.p99" in summarize(samples)


def test_drift_of_the_machine_cancels_out_of_the_ratio() -> None:
    clock = FakeClock()

    def slower_and_slower(base_ns: int) -> Callable[[int, int], float]:
        return lambda _, __: base_ns * (1 + clock.now_ns / 1e10)

    candidate, baseline = FakeModel(clock, slower_and_slower(MS)), FakeModel(clock, slower_and_slower(2 * MS))
    samples = measure_paired(candidate.open, baseline.open, LatencyProtocol(min_rounds=30, max_time_ns=10**12), seed=1, clock_ns=clock)

    assert np.median(samples.candidate_ns[-1]) > 1.1 * np.median(samples.candidate_ns[0])
    assert samples.ratio().value == pytest.approx(0.5, rel=0.01)


def test_a_difference_between_sessions_is_counted_as_doubt_though_each_session_is_steady() -> None:
    jitter = np.random.default_rng(0).normal(0, 0.05, 1000)

    samples = paired(
        lambda session, _: MS * (1 + jitter[session]), lambda _, __: MS,
        LatencyProtocol(fresh_sessions_every=5, max_rounds=50, max_time_ns=10**12),
    )  # fmt: skip

    assert (samples.rounds, samples.stopped_by) == (50, "max_rounds")
    assert samples.session.tolist() == [i // 5 for i in range(50)]
    interval = samples.ratio()
    assert interval.high - interval.low > 0.03
    assert interval.low <= 1 <= interval.high


def test_a_noisy_pair_ends_with_the_time_and_says_that_it_is_noisy() -> None:
    rng = np.random.default_rng(0)

    samples = paired(lambda _, __: MS * rng.lognormal(0, 1), lambda _, __: MS * rng.lognormal(0, 1), LatencyProtocol(max_time_ns=300 * MS))

    assert samples.stopped_by == "max_time"
    assert samples.noisy


def test_a_very_slow_pair_still_gets_three_session_pairs() -> None:
    samples = paired(lambda _, __: 3_000 * MS, lambda _, __: 4_000 * MS, LatencyProtocol(max_time_ns=1_000 * MS), opening_ns=500 * MS)

    assert samples.candidate_ns.shape == (3, 1)
    assert samples.session.tolist() == [0, 1, 2]
    assert samples.ratio().value == pytest.approx(0.75)


def test_sessions_that_are_dear_to_open_serve_more_rounds() -> None:
    cheap = paired(lambda _, __: MS, lambda _, __: MS, LatencyProtocol(min_rounds=10))
    dear = paired(lambda _, __: MS, lambda _, __: MS, LatencyProtocol(min_rounds=10, max_time_ns=10**12), opening_ns=90 * MS)

    assert np.bincount(cheap.session).max() == 1
    assert np.bincount(dear.session)[:-1].min() > 1
    assert dear.session[-1] + 1 >= 6


def test_both_make_equally_many_runs_so_that_they_meet_the_same_feeds() -> None:
    clock = FakeClock()
    log: list[str] = []
    candidate = FakeModel(clock, lambda _, __: MS, log=log, name="candidate")
    baseline = FakeModel(clock, lambda _, __: 20 * MS, log=log, name="baseline")

    samples = measure_paired(candidate.open, baseline.open, LatencyProtocol(max_rounds=9), seed=0, clock_ns=clock)

    assert log.count("candidate") == log.count("baseline")
    assert samples.candidate_ns.shape == samples.baseline_ns.shape


def test_who_goes_first_is_drawn_anew_each_round_and_the_same_for_the_same_seed() -> None:
    def order(seed: int) -> list[bool]:
        return paired(lambda _, __: MS, lambda _, __: MS, LatencyProtocol(min_rounds=40, max_time_ns=10**12), seed=seed).candidate_first.tolist()

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert 8 <= sum(order(1)) <= 32


def test_first_runs_are_kept_apart() -> None:
    samples = paired(lambda _, run: 9 * MS if run == 0 else MS, lambda _, run: 6 * MS if run == 0 else MS, LatencyProtocol())

    assert set(samples.candidate_first_ns.tolist()) == {9 * MS}
    assert samples.candidate_ns.max() == MS
    first = summarize(samples)["latency.first_run"]
    assert (first.value, first.ratio.value if first.ratio else None) == (9.0, pytest.approx(1.5))


def test_samples_are_whole_nanoseconds() -> None:
    samples = paired(lambda _, __: 1_234_567, lambda _, __: 2_345_678, LatencyProtocol())

    assert samples.candidate_ns.dtype == samples.baseline_ns.dtype == np.int64
    assert set(samples.candidate_ns.ravel().tolist()) == {1_234_567}


# Summaries ------------------------------------------------------------------------------------------------------------------


def test_a_summary_gives_milliseconds_ratios_and_throughput() -> None:
    samples = paired(lambda _, __: MS, lambda _, __: 2 * MS, LatencyProtocol())

    found = summarize(samples, examples_a_run=8)

    latency = found["latency"]
    assert (latency.value, latency.low, latency.high, latency.unit) == (1.0, 1.0, 1.0, "ms")
    assert latency.samples == samples.candidate_ns.size
    assert latency.ratio is not None
    assert latency.ratio.value == pytest.approx(0.5)
    assert latency.delta is not None
    assert latency.delta.value == -1.0
    assert found["throughput"].value == 8000
    assert found["throughput"].ratio is not None
    assert found["throughput"].ratio.value == pytest.approx(2.0)
    assert summarize_baseline(samples).value == 2.0


def test_percentiles_that_the_runs_do_not_support_are_left_out_and_named() -> None:
    samples = paired(lambda _, __: 20 * MS, lambda _, __: 20 * MS, LatencyProtocol(min_runs=64, max_time_ns=10**12))

    assert samples.candidate_ns.size < 130
    assert "latency.p90" in summarize(samples)
    assert "latency.p99" not in summarize(samples)
    assert missing_percentiles(samples)["latency.p99"] == f"p99 needs 662 runs; {samples.candidate_ns.size} were made"


def test_a_percentile_of_runs_with_a_slow_tenth_shows_it() -> None:
    samples = paired(lambda _, run: 5 * MS if run % 8 == 0 else MS, lambda _, __: MS, LatencyProtocol(min_runs=200))

    found = summarize(samples)

    assert found["latency"].value == 1.0
    assert found["latency.p90"].value == 5.0
    assert found["latency.p90"].ratio is not None
    assert found["latency.p90"].ratio.value == pytest.approx(5.0)


def test_the_baseline_beside_itself_is_exactly_as_fast_as_itself() -> None:
    rng = np.random.default_rng(0)
    samples = paired(lambda _, __: MS * rng.lognormal(0, 0.2), lambda _, __: MS * rng.lognormal(0, 0.2), LatencyProtocol())

    found = summarize(samples, itself=True)

    assert {v.ratio.value for v in found.values() if v.ratio} == {1.0}
    assert found["latency"].ratio is not None
    assert found["latency"].ratio.low == found["latency"].ratio.high == 1.0


# Rounds that something disturbed --------------------------------------------------------------------------------------------


class FakeMachine:
    """Readings of a machine on which others compute whenever `busy(time in ns)` says so; one CPU, and runs that take longer then."""

    def __init__(self, clock: FakeClock, busy: Callable[[int], bool]) -> None:
        self.clock, self.busy, self.foreign_s, self.own_s = clock, busy, 0.0, 0.0

    def run(self, nominal_ns: int) -> Callable[[], None]:
        def run_once() -> None:
            slow = self.busy(self.clock.now_ns)
            self.clock.now_ns += nominal_ns * (3 if slow else 1)
            self.own_s += nominal_ns / 1e9
            self.foreign_s += 2 * nominal_ns / 1e9 if slow else 0.0

        return run_once

    def reading(self) -> Reading:
        now = self.clock.now_ns / 1e9
        return Reading(
            wall_s=now, boot_s=now, own_s=self.own_s, waiting_s=self.foreign_s, busy_s=self.own_s + self.foreign_s, stolen_s=0.0,
            throttled_s=0.0, hot=0.0, mhz=2000.0, cpus=1,
        )  # fmt: skip


def watched(busy: Callable[[int], bool], protocol: LatencyProtocol, *, candidate_ns: int = MS) -> PairedSamples:
    clock = FakeClock()
    machine = FakeMachine(clock, busy)
    return measure_paired(
        lambda: machine.run(candidate_ns), lambda: machine.run(2 * MS), protocol, seed=0, clock_ns=clock, watch=machine.reading
    )  # fmt: skip


def test_disturbed_rounds_are_kept_flagged_and_repeated() -> None:
    protocol = LatencyProtocol(fresh_sessions_every=1, max_time_ns=10**12)
    quiet = watched(lambda _: False, protocol)

    samples = watched(lambda now: 200 * MS < now < 400 * MS, protocol)

    assert samples.disturbed is not None
    bad = samples.disturbed
    assert 2 <= bad.sum() <= 4
    assert samples.rounds == quiet.rounds + bad.sum()
    assert samples.candidate_ns[bad].max() == 3 * MS
    assert samples.candidate_ns[samples.used].max() == MS
    assert samples.used.tolist() == (~bad).tolist()
    found = summarize(samples)
    assert found["latency"].value == 1.0
    assert found["latency"].samples == samples.candidate_ns[samples.used].size
    assert samples.session_pairs == quiet.session_pairs


def test_a_slow_round_that_nothing_explains_stays() -> None:
    clock = FakeClock()
    machine = FakeMachine(clock, lambda _: False)
    slow_sessions = FakeModel(clock, lambda session, _: 5 * MS if session == 3 else MS)

    samples = measure_paired(
        slow_sessions.open, lambda: machine.run(MS), LatencyProtocol(fresh_sessions_every=1), seed=0, clock_ns=clock,
        watch=lambda: replace(machine.reading(), own_s=clock.now_ns / 1e9, busy_s=clock.now_ns / 1e9),
    )  # fmt: skip

    assert samples.disturbed is not None
    assert not samples.disturbed.any()
    assert samples.candidate_ns.max() == 5 * MS


def test_repeats_get_half_the_time_more_and_no_longer() -> None:
    def second_half_of_each_second(now: int) -> bool:
        return now % (1_000 * MS) >= 300 * MS

    protocol = LatencyProtocol(fresh_sessions_every=1, min_runs=10**9, max_time_ns=4_000 * MS)
    plain, samples = watched(lambda _: False, protocol), watched(second_half_of_each_second, protocol)

    assert plain.elapsed_ns < 4_000 * MS + 300 * MS
    assert 5_900 * MS <= samples.elapsed_ns < 6_000 * MS + 300 * MS
    assert samples.stopped_by == "max_time"


def test_a_machine_that_is_always_busy_still_gives_a_number_and_says_how_busy_it_was() -> None:
    samples = watched(lambda _: True, LatencyProtocol(fresh_sessions_every=1))

    assert samples.foreign_load == pytest.approx(2 / 3)
    assert samples.used.all()
    assert samples.ratio().value == pytest.approx(0.5)


def test_when_too_few_rounds_are_left_all_of_them_count() -> None:
    session, disturbed = np.arange(10), np.ones(10, bool)
    disturbed[:2] = False
    steady = np.full((10, 3), MS)

    samples = PairedSamples(
        candidate_ns=steady, baseline_ns=steady, session=session, candidate_first=disturbed, candidate_first_ns=steady[:, 0],
        baseline_first_ns=steady[:, 0], elapsed_ns=0, stopped_by="max_time", disturbed=disturbed,
    )  # fmt: skip

    assert samples.used.all()
    assert replace(samples, disturbed=session < 4).used.tolist() == (session >= 4).tolist()


def test_without_a_watch_nothing_is_flagged() -> None:
    samples = paired(lambda _, __: MS, lambda _, __: MS, LatencyProtocol())

    assert (samples.load, samples.disturbed, samples.foreign_load) == (None, None, None)


# Limits ---------------------------------------------------------------------------------------------------------------------

FOUR_TENTHS, TWO_MS = StopAbove("ratio", 0.4, "latency <= 0.4x"), StopAbove("ms", 2.0, "latency <= 2ms")
FOUR_TIMES = StopAbove("ratio", 4.0, "latency <= 4x")


@pytest.mark.parametrize("limit", [FOUR_TENTHS, TWO_MS])
def test_a_candidate_that_is_certainly_above_a_limit_is_timed_no_longer(limit: StopAbove) -> None:
    rng = np.random.default_rng(0)
    protocol = LatencyProtocol(ratio_width=0.0001, max_time_ns=10**12)
    clock = FakeClock()
    candidate = FakeModel(clock, lambda _, __: 3 * MS * rng.lognormal(0, 0.1))
    baseline = FakeModel(clock, lambda _, __: 6 * MS * rng.lognormal(0, 0.1))

    samples = measure_paired(candidate.open, baseline.open, protocol, seed=0, limits=[limit], clock_ns=clock)

    assert (samples.stopped_by, samples.why) == ("limit", limit.why)
    assert samples.session_pairs == 8
    assert samples.ratio().low > 0.4


def test_a_candidate_that_may_meet_its_limits_is_timed_to_the_end() -> None:
    rng = np.random.default_rng(0)
    clock = FakeClock()
    candidate, baseline = FakeModel(clock, lambda _, __: MS * rng.lognormal(0, 0.1)), FakeModel(clock, lambda _, __: 2.5 * MS)

    samples = measure_paired(
        candidate.open, baseline.open, LatencyProtocol(ratio_width=0.0, max_rounds=60), seed=0, limits=[FOUR_TENTHS, TWO_MS], clock_ns=clock
    )

    assert (samples.stopped_by, samples.why) == ("max_rounds", "")


def test_a_candidate_that_a_rival_beats_for_sure_is_timed_no_longer_and_said_to_be_stopped_by_that_rule() -> None:
    rng = np.random.default_rng(0)
    clock = FakeClock()
    candidate, baseline = (FakeModel(clock, lambda _, __, ms=ms: ms * MS * rng.lognormal(0, 0.02)) for ms in (3, 2))
    beaten = StopAbove("ratio", 1.1, "t-0003 is better in latency", rule="off-front", error=1e-5)
    protocol = LatencyProtocol(ratio_width=0.0001, max_time_ns=10**12)

    samples = measure_paired(candidate.open, baseline.open, protocol, seed=0, limits=[FOUR_TIMES, beaten], clock_ns=clock)

    assert (samples.stopped_by, samples.why) == ("off-front", "t-0003 is better in latency")
    assert samples.session_pairs == 8
    assert samples.ratio().low > 1.1


@pytest.mark.parametrize("error", [0.0, 1.0, float("nan")])
def test_an_error_that_is_no_probability_is_refused(error: float) -> None:
    with pytest.raises(ConfigError, match="its error must be above 0 and below 1"):
        StopAbove("ratio", 1.0, "", error=error)


@pytest.mark.parametrize(("of", "limit"), [("seconds", 1.0), ("ms", 0.0), ("ratio", float("nan"))])
def test_a_limit_that_is_none_is_refused(of: str, limit: float) -> None:
    with pytest.raises(ConfigError, match="it must be a ratio or ms above 0"):
        StopAbove(of, limit, "")


# Patterns, clocks, threads --------------------------------------------------------------------------------------------------


def test_paced_runs_start_one_every_interval() -> None:
    clock = FakeClock()
    starts: list[int] = []

    def run_once() -> None:
        starts.append(clock.now_ns)
        clock.now_ns += MS

    def wait(due_ns: int, _: Callable[[], int]) -> None:
        clock.now_ns = due_ns

    protocol = LatencyProtocol(pattern="paced", interval_ns=10 * MS, max_time_ns=2_000 * MS, fresh_sessions_every=1)
    samples = measure_paired(lambda: run_once, lambda: run_once, protocol, seed=0, clock_ns=clock, wait=wait)

    assert set(samples.candidate_ns.ravel().tolist()) == {MS}
    gaps = np.diff(starts)
    assert set(gaps[gaps > 2 * MS].tolist()) <= {10 * MS, 11 * MS}  # 11 at the start of a block, after the run before it
    assert samples.late == 0.0
    assert "one every 10 ms" in summarize(samples)["latency"].method


def test_paced_runs_that_take_longer_than_the_interval_are_counted_as_late() -> None:
    clock = FakeClock()

    def run_once() -> None:
        clock.now_ns += 30 * MS

    def wait(due_ns: int, _: Callable[[], int]) -> None:
        clock.now_ns = due_ns

    protocol = LatencyProtocol(pattern="paced", interval_ns=10 * MS, max_time_ns=2_000 * MS, fresh_sessions_every=1)
    samples = measure_paired(lambda: run_once, lambda: run_once, protocol, seed=0, clock_ns=clock, wait=wait)

    assert samples.late is not None
    assert samples.late > 0.5
    assert set(samples.candidate_ns.ravel().tolist()) == {30 * MS}


def test_waiting_ends_when_the_clock_says_so() -> None:
    due = time.perf_counter_ns() + 5 * MS

    wait_until(due, time.perf_counter_ns)

    assert time.perf_counter_ns() >= due


def test_cold_runs_are_the_first_of_fresh_sessions() -> None:
    samples = paired(
        lambda _, run: 9 * MS if run == 0 else MS, lambda _, run: 6 * MS if run == 0 else MS, LatencyProtocol(pattern="cold"), opening_ns=MS
    )

    assert samples.candidate_ns.shape == (samples.rounds, 1)
    assert samples.session.tolist() == list(range(samples.rounds))
    assert samples.rounds >= 64
    found = summarize(samples)
    assert found["latency"].value == found["latency.first_run"].value == 9.0
    assert found["latency"].ratio is not None
    assert found["latency"].ratio.value == pytest.approx(1.5)
    assert "first of a fresh session" in found["latency"].method


def test_cpu_time_times_the_runs_and_elapsed_time_the_budget() -> None:
    clock, cpu = FakeClock(), FakeClock()

    def run_once() -> None:
        clock.now_ns += 7 * MS  # much of it spent waiting for a CPU
        cpu.now_ns += MS

    protocol = LatencyProtocol(clock="cpu", ratio_width=0.0, max_time_ns=500 * MS)
    samples = measure_paired(lambda: run_once, lambda: run_once, protocol, seed=0, clock_ns=clock, timer_ns=cpu)

    assert set(samples.candidate_ns.ravel().tolist()) == {MS}
    assert samples.elapsed_ns >= 500 * MS
    assert "CPU time instead of elapsed time" in summarize(samples)["latency"].method


def test_throughput_of_several_threads_is_their_runs_by_the_time_of_all() -> None:
    protocol = LatencyProtocol(concurrency=3, block_time_ns=2 * MS, fresh_sessions_every=1, min_runs=0)
    at_once: list[int] = []
    inside = 0
    lock = threading.Lock()

    def run_once() -> None:
        nonlocal inside
        with lock:
            inside += 1
            at_once.append(inside)
        time.sleep(0.001)
        with lock:
            inside -= 1

    samples = measure_paired(lambda: run_once, lambda: run_once, protocol, seed=0)

    found = summarize(samples, examples_a_run=4)["throughput"]
    assert max(at_once) == 3
    assert samples.crowd_runs % 3 == 0
    assert len(samples.candidate_crowd_ns) == samples.session_pairs
    assert found.value == pytest.approx(4 * samples.crowd_runs / np.median(samples.candidate_crowd_ns) * 1e9, rel=0.01)
    assert found.low <= found.value <= found.high
    assert found.value > 1.5 * 4 * 1e3 / summarize(samples)["latency"].value  # sleeping runs do not hinder each other
    assert found.method.startswith("3 threads on one session")


def test_a_run_that_fails_in_a_thread_is_raised() -> None:
    def run_once() -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        measure_paired(lambda: run_once, lambda: run_once, LatencyProtocol(concurrency=2), seed=0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pattern": "burst"}, "pattern must be one of steady, paced, cold"),
        ({"clock": "gpu"}, "clock must be one of wall, cpu"),
        ({"pattern": "paced"}, "interval_ns must be above 0 for paced runs"),
        ({"interval_ns": 5}, "and 0 for others; got 5 with steady runs"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"concurrency": 2, "pattern": "cold"}, "got cold runs"),
        ({"concurrency": 2, "clock": "cpu"}, "got CPU time"),
    ],
)
def test_ways_of_timing_that_do_not_go_together_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        LatencyProtocol(**fields)  # type: ignore[arg-type]

    assert words in str(error.value)
