"""Selection: feasibility, front by intervals, ties, picks, near misses and the sentence that says it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.constraints import Constraint, parse_constraint
from autotune.digest import dump_json
from autotune.errors import ConfigError
from autotune.records import Cause, Interval, MetricValue, Status, TrialRecord
from autotune.selection import (
    Membership,
    Objective,
    Selection,
    State,
    changed_values,
    latency_words,
    parse_objective,
    passes_in,
    select,
    size_words,
    speed_words,
    verdict_sentence,
)

UNITS = {"accuracy": "share", "latency": "ms", "size": "bytes", "throughput": "/s", "mse": ""}
LATENCY, ACCURACY, SIZE = Objective("latency"), Objective("accuracy", minimize=False), Objective("size")
BASE_MS, BASE_ACCURACY, BASE_BYTES = 8.0, 0.98, 100_000.0
ONE_POINT = parse_constraint("accuracy >= baseline - 1.0pt", metrics=UNITS)
HALF_TIME = parse_constraint("latency <= 0.5x", metrics=UNITS)


def metrics(ratio: float, drop: float, size: float, *, time_noise: float, score_noise: float) -> dict[str, MetricValue]:
    """Latency and size as multiples of the baseline, accuracy as a difference from it; noise as half-widths."""
    ms, accuracy, size_bytes = BASE_MS * ratio, BASE_ACCURACY + drop, BASE_BYTES * size
    paired = Interval(ratio, ratio * (1 - time_noise), ratio * (1 + time_noise))
    return {
        "latency": MetricValue(ms, ms * 0.5, ms * 2, "ms", ratio=paired, samples=400),
        "accuracy": MetricValue(
            accuracy, accuracy - 0.01, accuracy + 0.01, "share", delta=Interval(drop, drop - score_noise, drop + score_noise), samples=600
        ),
        "size": MetricValue(size_bytes, size_bytes, size_bytes, "bytes", ratio=Interval.exactly(size), samples=1),
    }


BASELINE = metrics(1.0, 0.0, 1.0, time_noise=0.0, score_noise=0.0)


def trial(
    number: int, ratio: float, drop: float, size: float = 1.0, *, point: Mapping[str, Any] | None = None, origin: str = "sampler",
    status: Status = Status.OK, time_noise: float = 0.01, score_noise: float = 0.001,
) -> TrialRecord:  # fmt: skip
    return TrialRecord(
        number=number, point={"quantize": "OnnxQuantization"} if point is None else point, status=status, origin=origin,
        metrics=metrics(ratio, drop, size, time_noise=time_noise, score_noise=score_noise),
    )  # fmt: skip


def untouched(number: int = 0) -> TrialRecord:
    return trial(number, 1.0, 0.0, point={"quantize": None}, origin="untouched", time_noise=0.0, score_noise=0.0)


def chosen(
    *records: TrialRecord, objectives: tuple[Objective, ...] = (LATENCY, ACCURACY), constraints: tuple[Constraint, ...] = (ONE_POINT,), **options: Any
) -> Selection:  # fmt: skip
    return select(records, objectives, constraints, baseline=BASELINE, score="accuracy", **options)


# ---- objectives


def test_objectives_are_read_with_or_without_their_direction() -> None:
    def read(text: str) -> Objective:
        return parse_objective(text, metrics=UNITS, score="accuracy", higher_is_better={"accuracy": True, "mse": False})

    assert read("latency") == read("min latency") == read("latency.p50") == LATENCY
    assert read("score") == read("max accuracy") == read("accuracy") == ACCURACY
    assert read("throughput") == Objective("throughput", minimize=False)
    assert read("mse") == Objective("mse", minimize=True)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("max latency", "Write `min latency`"), ("latncy", "Did you mean 'latency'?"), ("min", "must name a metric"), ("", "must name a metric"),
        ("mse", "`min mse` or `max mse`"),
    ],
)  # fmt: skip
def test_objectives_that_make_models_worse_or_cannot_be_known_are_refused(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_objective(text, metrics=UNITS)

    assert part in str(caught.value)


# ---- feasibility


def test_only_trials_that_ended_well_and_meet_every_constraint_are_feasible() -> None:
    failed = TrialRecord(5, {}, Status.FAILED, cause=Cause.SIGNAL)
    found = chosen(
        untouched(), trial(1, 0.5, -0.004), trial(2, 0.3, -0.05, status=Status.INFEASIBLE), trial(3, 0.2, 0.0, status=Status.INVALID), failed
    )

    assert found.feasible == ("t-0000", "t-0001")
    assert found.best == "t-0001"


def test_a_trial_that_breaks_a_constraint_is_never_chosen_whatever_its_record_says() -> None:
    found = chosen(untouched(), trial(1, 0.2, -0.05, status=Status.OK))

    assert found.best == "t-0000"
    assert [m.id for m in found.near_misses] == ["t-0001"]


def test_a_trial_that_fell_on_its_last_measurement_is_not_chosen_again_whatever_its_metrics_say() -> None:
    fallen = trial(1, 0.2, 0.0, status=Status.INFEASIBLE)

    found = chosen(untouched(), fallen, trial(2, 0.4, 0.0))

    assert found.best == "t-0002"
    assert "t-0001" not in found.feasible


def test_strict_takes_certain_models_only() -> None:
    doubtful = trial(1, 0.2, -0.008, score_noise=0.005)
    certain = trial(2, 0.5, -0.004, score_noise=0.005)

    assert chosen(untouched(), doubtful, certain).best == "t-0001"
    assert chosen(untouched(), doubtful, certain, strict=True).best == "t-0002"


def test_a_trial_without_a_number_for_an_objective_is_not_feasible() -> None:
    without = trial(1, 0.2, 0.0)
    without = replace(without, metrics={k: v for k, v in without.metrics.items() if k != "latency"})

    assert chosen(untouched(), without).feasible == ("t-0000",)


# ---- front and ties


def test_a_model_slower_beyond_noise_and_no_more_accurate_is_off_the_front() -> None:
    found = chosen(untouched(), trial(1, 0.3, -0.002), trial(2, 0.6, -0.002))

    assert found.front == ("t-0001", "t-0000")
    assert found.off_front == {"t-0002": "t-0001"}


def test_noise_alone_puts_nobody_off_the_front() -> None:
    found = chosen(untouched(), trial(1, 0.50, -0.002, time_noise=0.2), trial(2, 0.60, -0.002, time_noise=0.2))

    assert found.off_front == {}
    assert set(found.groups["t-0001"]) == {"t-0001", "t-0002"}


def test_a_difference_below_the_tolerance_is_a_tie_however_well_it_is_measured() -> None:
    found = chosen(untouched(), trial(1, 0.500, -0.002, time_noise=1e-4), trial(2, 0.510, -0.002, time_noise=1e-4))

    assert found.front == ("t-0001", "t-0000")
    assert found.groups["t-0001"] == ("t-0001", "t-0002")


def test_latency_is_compared_by_the_paired_ratio_and_not_by_milliseconds() -> None:
    # The slower by the clock was measured beside a slower baseline: its ratio is the better one.
    fast = trial(1, 0.3, -0.002)
    shown_slow = replace(
        fast, number=2, metrics={**fast.metrics, "latency": replace(fast.metrics["latency"], value=20.0, ratio=Interval(0.2, 0.19, 0.21))}
    )

    found = chosen(untouched(), fast, shown_slow)

    assert found.best == "t-0002"


def place_of(found: Selection, number: int) -> Membership:
    return found.membership[f"t-{number:04d}"]


def test_a_place_is_certain_where_no_box_allows_another_to_be_better_and_excluded_where_one_must_be() -> None:
    fast, accurate = trial(1, 0.3, -0.005, score_noise=1e-4), trial(2, 0.6, -0.001, score_noise=1e-4)
    worse = trial(3, 0.9, -0.009, score_noise=1e-4)

    found = chosen(untouched(), fast, accurate, worse)

    assert [place_of(found, n).state for n in (0, 1, 2, 3)] == [State.CERTAIN, State.CERTAIN, State.CERTAIN, State.EXCLUDED]
    assert place_of(found, 3).rivals == ("t-0001", "t-0002")  # the best first
    assert found.not_resolved == found.to_measure == ()


def test_a_slower_model_as_accurate_but_for_the_tolerance_is_covered_and_one_no_slower_either_is_certain() -> None:
    found = chosen(untouched(), trial(1, 0.3, -0.002, score_noise=2e-4), trial(2, 0.6, -0.002, score_noise=2e-4), eps_score=0.005)
    alike = chosen(trial(1, 0.3, -0.002, score_noise=2e-4, time_noise=1e-4), trial(2, 0.3, -0.002, score_noise=2e-4, time_noise=1e-4))

    assert place_of(found, 2).state is State.COVERED
    assert place_of(found, 2).rivals == ("t-0001",)
    assert [place_of(alike, n).state for n in (1, 2)] == [State.CERTAIN, State.CERTAIN]


def test_narrow_boxes_that_overlap_are_tied_and_wide_ones_are_not_resolved() -> None:
    def pair(noise: float) -> Selection:
        return chosen(trial(1, 0.300, -0.002, time_noise=noise, score_noise=2e-4), trial(2, 0.304, -0.002, time_noise=noise, score_noise=2e-4))

    tied, wide = pair(0.008), pair(0.03)

    assert place_of(tied, 2).state is State.TIED
    assert tied.to_measure == tied.not_resolved == ()
    assert place_of(wide, 2).state is State.AMBIGUOUS
    assert place_of(wide, 2).open == ("latency",)
    assert set(wide.to_measure) == {"t-0001", "t-0002"}


def test_what_only_more_rows_can_tell_is_not_timed_again() -> None:
    found = chosen(trial(1, 0.3, -0.002, score_noise=0.01), trial(2, 0.6, -0.001, score_noise=0.01), constraints=())

    assert place_of(found, 2).open == ("accuracy",)
    assert found.not_resolved == ("t-0002",)
    assert found.to_measure == ()


def test_the_widest_is_timed_first_and_models_of_one_measurement_once() -> None:
    narrow, wide = trial(1, 0.30, -0.002, time_noise=0.03), trial(2, 0.31, -0.0015, time_noise=0.05)
    wide = replace(wide, model_digest="abc")
    twin = replace(wide, number=3, shares_with=2)

    found = chosen(untouched(), narrow, wide, twin)

    assert found.to_measure == ("t-0002", "t-0001")
    assert "t-0003" not in place_of(found, 2).rivals  # it is the same model


def test_the_more_models_are_compared_the_more_a_difference_must_show() -> None:
    others = [trial(n, 0.9, -0.005) for n in range(10, 60)]
    quick, slow = trial(1, 0.50, -0.002, time_noise=0.03), trial(2, 0.55, -0.002, time_noise=0.03)

    few, many, looks = chosen(quick, slow), chosen(quick, slow, *others), chosen(quick, slow, looks=30)

    assert few.off_front == {"t-0002": "t-0001"}
    assert "t-0002" not in many.off_front
    assert looks.off_front == {}


def test_among_ties_fewer_passes_win_then_fewer_changed_values_then_the_lower_number() -> None:
    default = trial(9, 0.9, -0.002, point={"quantize": "OnnxQuantization", "quantize.mode": "static"}, origin="default")
    two_passes = trial(1, 0.5, -0.002, point={"prune": "TorchPruning", "quantize": "OnnxQuantization"})
    changed = trial(2, 0.5, -0.002, point={"prune": None, "quantize": "OnnxQuantization", "quantize.mode": "dynamic"})
    plain = trial(3, 0.5, -0.002, point={"prune": None, "quantize": "OnnxQuantization", "quantize.mode": "static"})
    same_again = replace(plain, number=4)

    found = chosen(untouched(), default, two_passes, changed, plain, same_again)

    assert found.groups["t-0003"] == ("t-0003", "t-0001", "t-0002", "t-0004")
    assert found.best == "t-0003"


def test_among_ties_the_one_that_is_certain_of_its_constraints_comes_before_the_simpler_one() -> None:
    simpler = trial(1, 0.5, -0.009, score_noise=0.008)
    certain = trial(2, 0.5, -0.006, score_noise=0.003, point={"prune": "TorchPruning", "quantize": "OnnxQuantization"})

    assert chosen(untouched(), simpler, certain).best == "t-0002"


def test_equal_measurements_are_one_group() -> None:
    first = trial(3, 0.5, -0.002)
    shared = replace(first, number=7, shares_with=3)

    found = chosen(untouched(), first, shared)

    assert found.groups["t-0003"] == ("t-0003", "t-0007")


def test_simplicity_counts_slots_in_use_and_values_by_type() -> None:
    point = {"prune": None, "quantize": "OnnxQuantization", "quantize.per_channel": True, "session": "OrtPerfTuning", "session.threads": 1}

    assert passes_in(point) == 2
    assert changed_values(point, {"quantize.per_channel": True, "session.threads": 1}) == 0
    assert changed_values(point, {"quantize.per_channel": 1, "session.threads": 1}) == 1
    assert changed_values(point, {"session.threads": 1}) == 1


TRIALS = st.lists(
    st.tuples(st.integers(1, 6), st.integers(-4, 2), st.integers(1, 3), st.sampled_from([0.0, 0.02, 0.3]), st.sampled_from([0.0, 0.002, 0.01])),
    min_size=0, max_size=12,
)  # fmt: skip


@given(TRIALS, st.sampled_from([(LATENCY,), (LATENCY, ACCURACY), (LATENCY, ACCURACY, SIZE)]))
@settings(max_examples=150)
def test_the_laws_of_a_selection_hold_for_any_measurements(rows: list[tuple[int, int, int, float, float]], objectives: tuple[Objective, ...]) -> None:
    records = [untouched()] + [
        trial(i, ratio * 0.25, drop * 0.002, size * 0.5, time_noise=noise, score_noise=doubt)
        for i, (ratio, drop, size, noise, doubt) in enumerate(rows, start=1)
    ]

    found = select(records, objectives, [ONE_POINT], baseline=BASELINE, score="accuracy")

    assert found.best is not None
    assert set(found.picks.values()) | {found.best} <= set(found.feasible)
    grouped = [member for group in found.groups.values() for member in group]
    assert sorted([*grouped, *found.off_front]) == sorted(found.feasible)  # each exactly once
    assert list(found.groups) == list(found.front)
    assert all(representative == group[0] for representative, group in found.groups.items())
    assert found.hypervolume >= 0
    again = select(reversed(records), objectives, [ONE_POINT], baseline=BASELINE, score="accuracy")
    assert again == found  # the order of the records means nothing


# ---- picks


def test_the_picks_are_the_ends_and_the_knee_of_the_front() -> None:
    found = chosen(untouched(), trial(1, 0.10, -0.009, 0.2), trial(2, 0.15, -0.002, 0.3), trial(3, 0.60, 0.006, 0.9), trial(4, 0.5, -0.003, 0.1))

    assert found.picks == {
        "fastest": "t-0001", "most_accurate": "t-0003", "smallest": "t-0004", "knee": "t-0002", "nearest_to_baseline": "t-0002",
    }  # fmt: skip


def test_the_best_is_the_pick_asked_for() -> None:
    records = (untouched(), trial(1, 0.10, -0.009), trial(2, 0.15, -0.001), trial(3, 0.60, 0.006))

    assert chosen(*records).best == "t-0001"
    assert chosen(*records, pick="most_accurate").best == "t-0003"
    assert chosen(*records, pick="knee").best == "t-0002"
    assert chosen(*records, pick="nearest_to_baseline").best == "t-0002"


def test_a_pick_that_does_not_exist_falls_back_to_the_fastest_and_says_so() -> None:
    found = chosen(untouched(), trial(1, 0.10, 0.0), pick="knee")

    assert found.best == "t-0001"
    assert "no knee pick" in found.notes[0]


def test_an_unknown_pick_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'fastest'"):
        chosen(untouched(), pick="fastst")


def test_of_two_equally_fast_models_the_one_clearly_more_accurate_is_the_fastest_pick() -> None:
    simpler = trial(1, 0.300, -0.009)
    better = trial(2, 0.305, -0.001, point={"prune": "TorchPruning", "quantize": "OnnxQuantization"})

    found = chosen(untouched(), simpler, better)

    assert found.picks["fastest"] == "t-0002"


def test_a_tie_goes_to_the_untouched_model_even_if_another_is_surer_of_a_limit() -> None:
    limit = parse_constraint("accuracy >= 0.975", metrics=UNITS)
    other = trial(1, 1.0, 0.0)
    surer = replace(other, metrics={**other.metrics, "accuracy": replace(other.metrics["accuracy"], low=0.979, high=0.981)})

    assert chosen(untouched(), surer, constraints=(limit,)).best == "t-0000"


def test_a_tie_with_the_untouched_model_goes_to_the_untouched_model() -> None:
    found = chosen(untouched(), trial(1, 0.97, 0.0, time_noise=0.05), trial(2, 0.98, 0.0, time_noise=0.001))

    assert found.best == "t-0000"
    assert found.untouched_is_best
    assert found.runner_up == "t-0001"


def test_a_speed_up_that_noise_can_explain_is_not_bought_with_a_certain_loss_of_accuracy() -> None:
    found = chosen(untouched(), trial(1, 0.9, -0.008, time_noise=0.15, score_noise=0.001))

    assert found.best == "t-0000"


def test_a_model_only_smaller_wins_where_size_is_an_objective_and_not_where_it_is_none() -> None:
    smaller = trial(1, 1.0, 0.0, 0.25, time_noise=0.02)

    assert chosen(untouched(), smaller, objectives=(LATENCY, ACCURACY, SIZE)).best == "t-0001"
    assert chosen(untouched(), smaller).best == "t-0000"
    assert chosen(untouched(), smaller).picks["smallest"] == "t-0001"


def test_without_a_feasible_untouched_model_the_fastest_feasible_one_is_chosen() -> None:
    found = chosen(replace(untouched(), status=Status.INFEASIBLE), trial(1, 0.45, 0.0), trial(2, 0.40, 0.0), constraints=(HALF_TIME,))

    assert found.best == "t-0002"


# ---- nothing feasible


def test_near_misses_come_by_size_of_violation_with_what_blocks_and_what_relaxing_buys() -> None:
    found = chosen(
        replace(untouched(), status=Status.INFEASIBLE),
        trial(1, 0.25, -0.03, 0.25, status=Status.INFEASIBLE),
        trial(2, 0.40, -0.0151, 0.25, status=Status.UNDECIDED, score_noise=0.007),
        trial(3, 0.90, 0.0, status=Status.INFEASIBLE),
        constraints=(ONE_POINT, HALF_TIME),
    )

    assert found.best is None
    assert found.front == ()
    assert [m.id for m in found.near_misses] == ["t-0002", "t-0003", "t-0001"]
    nearest = found.near_misses[0]
    assert [j.constraint.text for j in nearest.blocking] == ["accuracy >= baseline - 1.0pt"]
    assert nearest.violation == pytest.approx(0.51)
    assert "2.5x faster" in nearest.buys
    assert nearest.to_json()["relaxed"] == ["accuracy >= baseline - 1.6pt"]


def test_nothing_measured_selects_nothing() -> None:
    found = chosen(TrialRecord(0, {}, Status.FAILED, cause=Cause.OOM))

    assert (found.best, found.front, found.near_misses) == (None, (), ())
    assert verdict_sentence(found, [], baseline=BASELINE, score="accuracy") == "No candidate could be measured"


# ---- hypervolume


def test_the_hypervolume_runs_to_a_tenth_above_the_baseline_and_the_worst_score_allowed() -> None:
    found = chosen(trial(1, 0.5, 0.0))

    assert found.reference == pytest.approx((1.1, 0.01))
    assert found.hypervolume == pytest.approx((1.1 - 0.5) * 0.01, rel=1e-6)


def test_another_front_member_adds_its_own_rectangle() -> None:
    found = chosen(trial(1, 0.5, 0.0), trial(2, 0.2, -0.004))

    assert found.hypervolume == pytest.approx(0.6 * 0.01 + 0.3 * 0.006, rel=1e-6)


# ---- scale


def test_two_thousand_trials_are_selected_from() -> None:
    random = np.random.default_rng(0)
    records = [untouched()] + [
        trial(i, float(r), float(d), float(s), time_noise=0.05, score_noise=0.005)
        for i, (r, d, s) in enumerate(
            zip(random.uniform(0.2, 1.2, 2000), random.uniform(-0.009, 0.002, 2000), random.choice([0.25, 0.5, 1.0], 2000), strict=True), start=1
        )
    ]

    found = chosen(*records, objectives=(LATENCY, ACCURACY, SIZE))

    assert found.best in found.front
    assert len(found.front) + len(found.off_front) <= 2001
    assert all(found.off_front[i] in found.feasible for i in found.off_front)


# ---- in words


def test_the_verdict_gives_the_baseline_first_then_gain_cost_and_how_sure_it_is() -> None:
    best = trial(42, 0.43, -0.004, 0.25, time_noise=0.02, score_noise=0.007)
    found = chosen(untouched(), best)

    said = verdict_sentence(found, [untouched(), best], baseline=BASELINE, score="accuracy")

    assert said == (
        "t-0042: p50 8.00 → 3.44 ms (2.3x faster, 2.3 to 2.4), accuracy -0.4 pt of -1.0 pt allowed (met; interval -1.1 to +0.3 pt), 4.0x smaller"
    )


def test_without_a_constraint_on_it_the_score_is_said_with_its_interval() -> None:
    best = trial(1, 0.5, -0.004, score_noise=0.002)

    said = verdict_sentence(chosen(untouched(), best, constraints=()), [best], baseline=BASELINE, score="accuracy")

    assert "accuracy -0.4 pt (-0.6 to -0.2)" in said


def test_when_nothing_helps_the_verdict_says_so_plainly_and_names_the_nearest() -> None:
    other = trial(7, 1.02, -0.001, time_noise=0.03)
    records = [untouched(), other]

    said = verdict_sentence(chosen(*records), records, baseline=BASELINE, score="accuracy")

    assert said.startswith("No pass helps here: the untouched model is delivered (p50 8.00 ms, accuracy 0.9800); the nearest candidate was t-0007: ")
    assert "as fast within noise" in said
    assert said.endswith(", a tie")


def test_when_every_candidate_breaks_a_limit_the_untouched_verdict_names_the_nearest_and_its_limit() -> None:
    other = trial(7, 0.3, -0.05, status=Status.INFEASIBLE)
    records = [untouched(), other]

    said = verdict_sentence(chosen(*records), records, baseline=BASELINE, score="accuracy")

    assert "the nearest candidate was t-0007: 3.3x faster" in said
    assert said.endswith("which misses `accuracy >= baseline - 1.0pt`")


def test_when_nothing_is_feasible_the_verdict_says_what_blocks_and_what_would_do() -> None:
    records = [replace(untouched(), status=Status.INFEASIBLE), trial(1, 0.7, 0.0, 0.5, status=Status.INFEASIBLE)]

    said = verdict_sentence(chosen(*records, constraints=(HALF_TIME,)), records, baseline=BASELINE, score="accuracy")

    assert said.startswith("No candidate meets every constraint; the nearest is t-0001: latency 0.700x of 0.500x allowed (violated)")
    assert "with `latency <= 0.7x` it would be" in said
    assert "2.0x smaller" in said


def test_speed_and_size_are_said_as_a_person_would() -> None:
    assert speed_words(Interval(0.5, 0.4, 0.8)) == "2.0x faster, 1.2 to 2.5"
    assert speed_words(Interval(2.0, 1.9, 2.1)) == "2.0x slower, 1.9 to 2.1"
    assert speed_words(Interval(0.99, 0.95, 1.03)).startswith("as fast within noise")
    assert speed_words(Interval.exactly(1.0)) == "as fast"
    assert size_words(Interval.exactly(0.25)) == "4.0x smaller"
    assert size_words(Interval.exactly(1.001)) == "same size"
    assert latency_words(MetricValue(0.05, 0.05, 0.05, "ms"), MetricValue(2.0, 2.0, 2.0, "ms")) == "p50 2.00 ms → 50.0 µs (40x faster, 40 to 40)"


def test_a_selection_can_be_written_as_json() -> None:
    found = chosen(untouched(), trial(1, 0.5, -0.002), trial(2, 0.4, -0.05, status=Status.INFEASIBLE))

    data = json.loads(dump_json(found.to_json()))

    assert data["best"] == "t-0001"
    assert data["objectives"] == ["min latency", "max accuracy"]
    assert data["near_misses"][0]["blocking"][0]["verdict"] == "violated"
