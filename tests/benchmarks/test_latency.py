from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest

from autotune.benchmarks.latency import (
    CpuTimes,
    LatencyProtocol,
    PairedSamples,
    measure_latency,
    measure_paired,
    missing_percentiles,
    summarize,
    summarize_baseline,
)
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


def test_foreign_load_is_what_the_cpus_did_besides_this_process() -> None:
    before = CpuTimes(busy_s=100.0, own_s=10.0, wall_s=50.0, cpus=2)

    assert before.foreign_share(CpuTimes(busy_s=112.0, own_s=18.0, wall_s=60.0, cpus=2)) == pytest.approx(0.2)
    assert before.foreign_share(CpuTimes(busy_s=107.9, own_s=18.0, wall_s=60.0, cpus=2)) == 0.0
    assert before.foreign_share(None) is None


def test_the_machine_tells_its_load_where_it_has_a_proc_file_system() -> None:
    times = CpuTimes.now()

    assert times is not None
    assert times.busy_s > 0
    assert times.cpus >= 1
