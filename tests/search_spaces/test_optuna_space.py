"""The Optuna form: define-by-run suggestions, names that never change their choices, values that Optuna can tell apart."""

from typing import Any

import optuna
import pytest

from autotune.errors import SpaceError
from autotune.search_spaces import INACTIVE, INVALID, Alternative, Boolean, Categorical, Conditional, Slot, compile_space, enumerate_points, point_key
from autotune.search_spaces.optuna_space import encoded, parameter_name, point_to_params, suggest_point

optuna.logging.set_verbosity(optuna.logging.ERROR)


CHAIN = [
    Slot(
        "quantize",
        (
            Alternative("Static", {"bits": Categorical([8, 16]), "op_types": Categorical([["Conv"], ["Conv", "MatMul"], None])}),
            Alternative("Weights", {"bits": Categorical([4, 8]), "odd": Categorical([True, 1, 1.0])}),
        ),
        optional=True,
    ),
    Slot("session", (Alternative("Session", {"spin": Boolean(), "threads": Categorical([1])}),)),
]


def test_brute_force_of_optuna_reaches_each_point_once() -> None:
    space = compile_space(CHAIN)
    study = optuna.create_study(sampler=optuna.samplers.BruteForceSampler(seed=0))
    points = []

    def objective(trial: optuna.Trial) -> float:
        points.append(suggest_point(trial, space))
        return 0.0

    study.optimize(objective, n_trials=100)

    assert sorted(map(point_key, points)) == sorted(map(point_key, enumerate_points(space)))


def test_a_name_is_plain_where_the_choices_are_the_same_and_marked_where_they_differ() -> None:
    space = compile_space(CHAIN)

    plain = parameter_name(space, "session.spin", (True, False))
    marked = {parameter_name(space, "quantize.bits", choices) for choices in space.offers("quantize.bits")}

    assert plain == "session.spin"
    assert len(marked) == 2
    assert all(name.startswith("quantize.bits@") and len(name) == len("quantize.bits@") + 8 for name in marked)


def test_choices_left_by_conditions_get_their_own_names_so_that_a_study_never_sees_them_change() -> None:
    table = {"a": Categorical([1, 2]), "b": Categorical([1, 2, 3]), "c": Conditional(("a", "b"), {(1, 3): INVALID}, default=Categorical([1, 2]))}
    space = compile_space(table)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, multivariate=True, group=True))

    for _ in range(30):
        trial = study.ask()
        suggest_point(trial, space)
        study.tell(trial, trial.params["a"])

    assert {len(name.split("@")) for t in study.trials for name in t.params if name.startswith("b")} == {2}
    assert {name for t in study.trials for name in t.params if not name.startswith("b")} == {"a", "c"}


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ((None, True, 2, 1.5, "x"), (None, True, 2, 1.5, "x")),
        ((True, 1), ("true", "1")),
        ((1, 1.0), ("1", "1.0")),
        ((["Conv"], None), ('["Conv"]', "null")),
        ((float("inf"), 1.0), ('{"float": "inf"}', "1.0")),
        (([len], [len, max]), ('[{"object": "builtins:len"}]', '[{"object": "builtins:len"}, {"object": "builtins:max"}]')),
        ((object(), object()), None),
    ],
)
def test_choices_are_written_so_that_optuna_can_hold_and_tell_them_apart(choices: tuple[Any, ...], expected: tuple[Any, ...] | None) -> None:
    coded = encoded(choices)

    if expected is not None:
        assert coded == expected
        assert [type(c) for c in coded] == [type(c) for c in expected]
    assert len(set(coded)) == len(choices)
    optuna.distributions.check_distribution_compatibility(
        optuna.distributions.CategoricalDistribution(coded), optuna.distributions.CategoricalDistribution(coded)
    )


def test_a_known_point_can_be_told_or_queued() -> None:
    space = compile_space(CHAIN)
    points = list(enumerate_points(space))
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))

    for point in points:
        params, distributions = point_to_params(space, point)
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=1.0))
        study.enqueue_trial(params)
        assert suggest_point(study.ask(), space) == point
        assert suggest_point(optuna.trial.FixedTrial(params), space) == point


def test_a_point_outside_the_space_is_refused() -> None:
    space = compile_space({"a": Categorical([1, 2]), "b": Conditional("a", {1: Boolean()}, default=INACTIVE)})

    with pytest.raises(SpaceError, match="only a point of the space can be told to Optuna"):
        point_to_params(space, {"a": 2, "b": True})


def test_a_point_comes_back_from_a_journal_file_as_it_was(tmp_path: Any) -> None:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    space = compile_space(CHAIN)
    study = optuna.create_study(storage=JournalStorage(JournalFileBackend(str(tmp_path / "journal.log"))), study_name="s")
    trial = study.ask()
    point = suggest_point(trial, space)
    study.tell(trial, 1.0)

    stored = optuna.load_study(storage=JournalStorage(JournalFileBackend(str(tmp_path / "journal.log"))), study_name="s").trials[0]

    assert suggest_point(optuna.trial.FixedTrial(stored.params), space) == point
    assert point_to_params(space, point) == (stored.params, stored.distributions)
