"""The search without Ray: what is asked first, never twice, the same again after any interruption."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.errors import ConfigError
from autotune.pareto import dominates
from autotune.records import Cause, MetricValue, Status, TrialRecord
from autotune.search_spaces.parameters import INACTIVE, Categorical, Conditional
from autotune.search_spaces.space import Space, compile_space, enumerate_points, point_key
from autotune.sweep import search as search_module
from autotune.sweep.search import JOURNAL_FILE, Asked, Goals, Search, drop_torn_tail, log_density, open_study, seed_for

DIRECTIONS = ("minimize", "maximize")


def small_space() -> Space:
    return compile_space(
        {
            "mode": Categorical(["static", "dynamic", "float"]),
            "method": Conditional("mode", {("static",): Categorical(["minmax", "entropy", "percentile"])}, default=INACTIVE),
            "bits": Conditional("mode", {("static",): Categorical([8, 4]), ("dynamic",): Categorical([8, 4])}, default=INACTIVE),
            "level": Categorical(["all", "extended", "basic"]),
            "arena": Categorical([True, False]),
        }
    )


def evaluate(asked: Asked) -> TrialRecord:
    """A fixed made-up response: a pure function of the point; every 4-bit dynamic point fails."""
    point = asked.point
    if point.get("mode") == "dynamic" and point.get("bits") == 4:
        return TrialRecord(asked.number, point, Status.FAILED, asked.origin, cause=Cause.EXCEPTION, stage="quantize", message="no kernel")
    speed = {"static": 0.4, "dynamic": 0.7, "float": 1.0}[point["mode"]] * {"all": 1.0, "extended": 1.1, "basic": 1.3}[point["level"]]
    score = 0.98 - 0.01 * (point.get("bits") == 4) - 0.002 * (point.get("method") == "minmax")
    metrics = {"latency": MetricValue(speed, speed, speed), "accuracy": MetricValue(score, score, score)}
    violated = score < 0.972
    return TrialRecord(
        asked.number, point, Status.INFEASIBLE if violated else Status.OK, asked.origin, metrics=metrics,
        constraints=({"expr": "accuracy >= 0.972", "violation": 0.972 - score},),
    )  # fmt: skip


def values(record: TrialRecord) -> tuple[float, ...] | None:
    return (record.metrics["latency"].value, record.metrics["accuracy"].value) if record.measured else None


def limits(record: TrialRecord) -> tuple[float, ...]:
    return tuple(float(c["violation"]) for c in record.constraints)


GOALS = Goals(DIRECTIONS, values, limits)  # type: ignore[arg-type] # two literals
DEFAULT = {"mode": "static", "method": "minmax", "bits": 8, "level": "all", "arena": True}
UNTOUCHED = {"mode": "float", "level": "all", "arena": True}


def search_in(folder: Path, *, budget: int = 20, seed: int = 0, sampler: str = "tpe", first: Any = None) -> Search:
    folder.mkdir(exist_ok=True)
    study, _ = open_study(folder, None, DIRECTIONS, ["latency", "accuracy"])  # type: ignore[arg-type] # two literals
    starts = [(DEFAULT, "default"), (UNTOUCHED, "untouched")] if first is None else first
    return Search(small_space(), goals=GOALS, study=study, budget=budget, seed=seed, sampler=sampler, first=starts)


def run_to_end(search: Search, *, told: Callable[[TrialRecord], None] = lambda _r: None) -> list[Asked]:
    asked = []
    while (one := search.ask()) is not None:
        asked.append(one)
        record = evaluate(one)
        told(record)
        search.tell(record)
    return asked


def points(asked: list[Asked]) -> list[str]:
    return [point_key(a.point) for a in asked]


def test_the_default_and_the_untouched_point_come_first(tmp_path: Path) -> None:
    asked = run_to_end(search_in(tmp_path / "s", budget=4))

    assert [(a.number, a.point, a.origin) for a in asked[:2]] == [(0, DEFAULT, "default"), (1, UNTOUCHED, "untouched")]


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_no_point_is_asked_twice_and_the_budget_is_kept(tmp_path: Path, sampler: str) -> None:
    asked = run_to_end(search_in(tmp_path / "s", budget=30, sampler=sampler))

    assert len(asked) == 30
    assert len(set(points(asked))) == 30


def test_where_the_sampler_repeats_itself_a_point_one_decision_from_a_tried_one_is_taken(tmp_path: Path) -> None:
    asked = run_to_end(search_in(tmp_path / "s", budget=40))

    instead = [a for a in asked if a.repeats and a.origin == "sampler"]
    assert len(instead) > 5
    assert {a.repeats for a in instead} == {1}
    for each in instead:  # in this space a decision changes no other one's value: it starts or ends others, or leaves them
        before = [a.point for a in asked[: each.number]]
        assert any(sum(each.point[n] != p[n] for n in each.point.keys() & p.keys()) == 1 for p in before)


def test_a_space_is_used_up_but_for_one_point_without_a_repeat(tmp_path: Path) -> None:
    budget = small_space().valid - 1

    asked = run_to_end(search_in(tmp_path / "s", budget=budget))

    assert len(set(points(asked))) == len(asked) == budget


def test_the_density_of_points_sums_to_one_and_is_that_of_kernels_counted_by_hand() -> None:
    sizes = np.array([3, 2])
    every = np.array(list(product(range(3), range(2))))
    seen = np.array([[0, 1], [0, 0], [2, 1]])

    found = np.exp(log_density(every, seen, sizes))
    none_seen = np.exp(log_density(every, np.zeros((0, 2), np.int64), sizes))

    # four components, so a value that was seen weighs 5/4 and each other one 1/4: of 7/4 with three choices, of 6/4 with two
    at_0_1 = (1 / 6 + 5 / 7 * 5 / 6 + 5 / 7 * 1 / 6 + 1 / 7 * 5 / 6) / 4
    assert found.sum() == pytest.approx(1)
    assert found[1] == pytest.approx(at_0_1)
    assert none_seen == pytest.approx(np.full(6, 1 / 6))


def test_a_space_no_larger_than_the_budget_is_enumerated_whole(tmp_path: Path) -> None:
    space = small_space()
    asked = run_to_end(search_in(tmp_path / "s", budget=space.valid + 10))

    assert sorted(points(asked)) == sorted(point_key(p) for p in enumerate_points(space))
    assert {a.origin for a in asked[2:]} == {"enumeration"}


def test_the_same_seed_asks_for_the_same_points_and_another_one_does_not(tmp_path: Path) -> None:
    first, second, other = (points(run_to_end(search_in(tmp_path / name, seed=seed))) for name, seed in (("a", 7), ("b", 7), ("c", 8)))

    assert first == second
    assert first != other


def test_an_untouched_model_outside_the_space_is_tried_beyond_the_budget(tmp_path: Path) -> None:
    search = search_in(tmp_path / "s", budget=5, first=[(DEFAULT, "default"), ({}, "untouched")])

    asked = []
    while (one := search.ask()) is not None:
        asked.append(one)
        search.tell(
            evaluate(one) if one.point else TrialRecord(one.number, {}, Status.OK, "untouched", metrics=evaluate(Asked(0, UNTOUCHED, "")).metrics)
        )

    assert len(asked) == 6
    assert asked[1].point == {}


@pytest.mark.parametrize("stop_after", range(0, 20, 3))
def test_a_search_stopped_anywhere_goes_on_as_if_it_had_not_been(tmp_path: Path, stop_after: int) -> None:
    whole = points(run_to_end(search_in(tmp_path / "whole")))
    kept: dict[int, TrialRecord] = {}
    search = search_in(tmp_path / "cut")
    for _ in range(stop_after):
        one = search.ask()
        assert one is not None
        kept[one.number] = evaluate(one)
        search.tell(kept[one.number])
    unfinished = search.ask()  # asked for, and then the process dies

    resumed = search_in(tmp_path / "cut")
    finished, again = resumed.resume(kept.get)
    rest = run_to_end(resumed)

    assert unfinished is not None
    assert (finished, again) == (stop_after, 1)
    assert rest[0].number == unfinished.number
    assert [point_key(kept[n].point) for n in sorted(kept)] + points(rest) == whole


def test_a_record_that_was_written_but_not_told_is_told_on_resume(tmp_path: Path) -> None:
    search = search_in(tmp_path / "s", budget=4)
    one = search.ask()
    assert one is not None
    record = evaluate(one)  # on disk; the kill came before `tell`

    resumed = search_in(tmp_path / "s", budget=4)
    finished, again = resumed.resume({0: record}.get)

    assert (finished, again) == (1, 0)
    assert resumed.study.trials[0].values == list(values(record) or ())


def test_failed_trials_are_told_as_pruned_with_their_reason(tmp_path: Path) -> None:
    from optuna.trial import TrialState

    search = search_in(tmp_path / "s", budget=small_space().valid)
    run_to_end(search)

    failed = [t for t in search.study.trials if t.state == TrialState.PRUNED]
    assert len(failed) == sum(1 for r in search.records.values() if r.status is Status.FAILED) > 0
    assert all(t.user_attrs["status"] == "failed: exception" and t.user_attrs["message"] == "no kernel" for t in failed)
    assert not [t for t in search.study.trials if t.state == TrialState.RUNNING]


def test_the_study_holds_parameters_values_and_constraints_for_the_dashboard(tmp_path: Path) -> None:
    import optuna

    run_to_end(search_in(tmp_path / "s", budget=12))

    study, _ = open_study(tmp_path / "s", None, DIRECTIONS, ["latency", "accuracy"])  # type: ignore[arg-type] # two literals
    done = [t for t in study.trials if t.state == optuna.trial.TrialState.COMPLETE]
    assert len(study.trials) == 12
    assert all({"mode", "level", "arena"} <= {n.partition("@")[0] for n in t.params} for t in study.trials)
    assert all("accuracy >= 0.972" in t.constraints for t in done)
    assert {t.number for t in study.best_trials} <= {t.number for t in done}


def test_an_infeasible_trial_is_no_best_trial_of_the_study(tmp_path: Path) -> None:
    search = search_in(tmp_path / "s", budget=small_space().valid)
    run_to_end(search)

    best = {t.number for t in search.study.best_trials}
    assert best
    assert all(search.records[n].status is Status.OK for n in best)


def test_a_torn_last_line_of_the_journal_is_dropped_with_a_word(tmp_path: Path) -> None:
    run_to_end(search_in(tmp_path / "s", budget=3))
    journal = tmp_path / "s" / JOURNAL_FILE
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code": 4, "half')

    study, word = open_study(tmp_path / "s", None, DIRECTIONS, ["latency", "accuracy"])  # type: ignore[arg-type] # two literals

    assert "dropped an unfinished last line (20 bytes)" in word
    assert len(study.trials) == 3
    assert journal.read_bytes().startswith(whole)


def test_a_whole_journal_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(b"{}\n")

    assert drop_torn_tail(path) == ""
    assert path.read_bytes() == b"{}\n"


def test_the_journal_leaves_no_lock_behind_that_a_killed_process_would_hold(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "study.lock").write_text("a file that a killed process left")

    study, _ = open_study(tmp_path / "s", None, DIRECTIONS, ["latency", "accuracy"])  # type: ignore[arg-type] # two literals

    assert study.trials == []


def test_a_database_url_that_makes_no_sense_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"storage: the database URL must open"):
        open_study(tmp_path, "nonsense://x", DIRECTIONS, ["a", "b"])  # type: ignore[arg-type] # two literals


def test_a_study_in_sqlite_works_like_the_journal(tmp_path: Path) -> None:
    study, _ = open_study(tmp_path, f"sqlite:///{tmp_path / 's.db'}", DIRECTIONS, ["latency", "accuracy"])  # type: ignore[arg-type] # two literals
    search = Search(small_space(), goals=GOALS, study=study, budget=4, seed=0, sampler="tpe", first=[(DEFAULT, "default")])

    asked = run_to_end(search)

    assert points(asked) == points(run_to_end(search_in(tmp_path / "j", budget=4, first=[(DEFAULT, "default")])))


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler learns from few trials already: it costs seconds to reach the number that it really is."""
    monkeypatch.setattr(search_module, "LEARNED", 16)
    monkeypatch.setattr(search_module, "LEARNED_OLDER", 4)


@pytest.mark.usefixtures("forgetful")
def test_the_sampler_learns_from_the_newest_trials_and_the_best_of_the_older_ones(tmp_path: Path) -> None:
    search = search_in(tmp_path / "s", budget=30, sampler="random")
    run_to_end(search)

    shown = [r.number for r in search._learned()]

    newest = shown[4:]
    assert newest == list(range(30 - len(newest), 30))
    assert 8 < len(newest) <= 12
    older = [search.records[n] for n in range(newest[0])]
    best = [older[n] for n in shown[:4]]
    worse = [r for r in older if r not in best and r.status is Status.OK]
    assert all(r.status is Status.OK for r in best)
    assert not [(w, b) for w in worse for b in best if dominates(losses(w), losses(b))]


def losses(record: TrialRecord) -> list[float]:
    return [record.metrics["latency"].value, -record.metrics["accuracy"].value]


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("stop_after", [17, 21, 27])
def test_a_long_search_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path, stop_after: int) -> None:
    whole = points(run_to_end(search_in(tmp_path / "whole", budget=30)))
    search, kept = search_in(tmp_path / "cut", budget=30), dict[int, TrialRecord]()
    for _ in range(stop_after):
        one = search.ask()
        assert one is not None
        kept[one.number] = evaluate(one)
        search.tell(kept[one.number])

    resumed = search_in(tmp_path / "cut", budget=30)
    resumed.resume(kept.get)

    assert [point_key(kept[n].point) for n in sorted(kept)] + points(run_to_end(resumed)) == whole


def test_seeds_differ_by_trial_and_purpose_and_are_the_same_everywhere() -> None:
    seeds: Mapping[Any, int] = {(s, n, p): seed_for(s, n, p) for s in (0, 1) for n in (0, 1) for p in ("tpe", "draw")}

    assert len(set(seeds.values())) == 8
    assert seed_for(0, 0, "tpe") == 2341197930
