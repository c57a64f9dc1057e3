"""The Ray Tune form: plain domains where nothing decides them, deeper levels where something does; Ray's own generators resolve it."""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import ray
from ray import tune
from ray.tune.impl.placeholder import create_resolvers_map, inject_placeholders
from ray.tune.search.basic_variant import BasicVariantGenerator
from ray.tune.search.optuna import OptunaSearch
from ray.tune.search.variant_generator import generate_variants

from autotune.search_spaces import INACTIVE, Alternative, Categorical, Conditional, Rule, Slot, Space, compile_space, enumerate_points, point_key
from autotune.search_spaces.optuna_space import OptunaSpace, suggest_point
from autotune.search_spaces.ray_space import CONDITIONAL, point_from_ray, to_ray_tune


def spinning_needs_threads(values: Any) -> bool:
    return not (values.get("session.spin") and values["session.threads"] == 1)


@pytest.fixture
def space() -> Space:
    quantization = Alternative(
        "Quantization",
        {
            "mode": Categorical(["dynamic", "static"]),
            "method": Conditional("mode", {"static": Categorical(["minmax", "entropy"])}, default=INACTIVE),
            "bins": Conditional("method", {"entropy": Categorical([128, 2048])}, default=INACTIVE),
            "op_types": Categorical([["Conv"], ["Conv", "MatMul"]]),
        },
    )
    session = Alternative("Session", {"threads": Categorical([1, 2]), "spin": Categorical([True, False]), "fixed": Categorical([None])})
    chain = [Slot("quantize", (quantization,), optional=True), Slot("session", (session,))]
    return compile_space(chain, rules=[Rule("spin", ("session.spin", "session.threads"), spinning_needs_threads)])


def keys(points: Any) -> list[str]:
    return sorted(point_key(p) for p in points)


def test_a_flat_space_is_plain_choices_that_any_searcher_of_ray_takes() -> None:
    param_space = to_ray_tune(compile_space({"a": Categorical([1, 2]), "b": Categorical(["x"])}))

    assert param_space["a"].categories == [1, 2]
    assert param_space["b"] == "x"
    assert set(param_space) == {"a", "b"}


def test_only_what_others_decide_stands_on_deeper_levels(space: Space) -> None:
    param_space = to_ray_tune(space)

    assert set(param_space) == {"quantize", "session", "session.threads", "session.fixed", CONDITIONAL}


def test_a_grid_of_ray_has_each_point_once(space: Space) -> None:
    configs = [spec["config"] for _, spec in generate_variants({"config": to_ray_tune(space, grid=True)})]

    assert keys(point_from_ray(c, space) for c in configs) == keys(enumerate_points(space))
    assert keys(point_from_ray(c) for c in configs) == keys(enumerate_points(space))


def test_ray_reaches_every_point_and_no_other_and_honours_its_seed(space: Space) -> None:
    param_space = {"config": to_ray_tune(space)}

    def draws(seed: int) -> list[dict[str, Any]]:
        state = np.random.RandomState(seed)
        return [point_from_ray(spec["config"], space) for _ in range(600) for _, spec in generate_variants(param_space, random_state=state)]

    points = draws(0)

    assert points == draws(0)
    assert points != draws(1)
    assert set(keys(points)) == set(keys(enumerate_points(space)))


def test_the_variant_generator_of_a_tuner_makes_the_same_trials_from_one_seed(space: Space) -> None:
    def trainable(config: dict[str, Any]) -> None: ...

    def configs() -> list[dict[str, Any]]:
        tune.register_trainable("space_trainable", trainable)
        searcher = BasicVariantGenerator(random_state=7)
        searcher.add_configurations({"space": {"run": "space_trainable", "config": to_ray_tune(space), "num_samples": 5}})
        return [point_from_ray(searcher.next_trial().config, space) for _ in range(5)]

    first = configs()

    assert first == configs()
    assert all(space.contains(point) for point in first)


def test_entries_of_the_users_own_are_left_out_of_the_point(space: Space) -> None:
    param_space = {**to_ray_tune(space), "lr": tune.choice([0.1])}

    config = next(generate_variants({"config": param_space}))[1]["config"]

    assert config["lr"] == 0.1
    assert space.contains(point_from_ray(config, space))


def test_a_shared_name_resolved_early_does_not_disturb_steps_before_it() -> None:
    # x of pass B stands late in the order (it waits for second.u) but on an early level; z stands before it, on a deep level
    first = Slot(
        "first",
        (
            Alternative("A", {"x": Categorical([1, 2])}),
            Alternative("B", {"x": Conditional("second.u", {1: Categorical([1, 2]), 2: Categorical([2, 3])}, INACTIVE)}),
        ),
    )
    deep = {
        "p": Conditional("first", {"A": Categorical([1, 2])}, default=Categorical([1, 3])),
        "q": Conditional("p", {1: Categorical([1, 2])}, default=Categorical([4])),
        "z": Conditional(("q", "first"), {(1, "A"): INACTIVE}, default=Categorical([5, 6])),
        "u": Categorical([1, 2]),
    }
    last = {"w": Conditional("first.x", {1: Categorical([7, 8])}, default=INACTIVE)}
    space = compile_space([first, Slot("second", (Alternative("D", deep),)), Slot("third", (Alternative("L", last),))])

    configs = [spec["config"] for _, spec in generate_variants({"config": to_ray_tune(space, grid=True)})]

    assert keys(point_from_ray(c, space) for c in configs) == keys(enumerate_points(space))


def test_the_param_space_can_be_copied_and_pickled_as_ray_does(space: Space) -> None:
    param_space = to_ray_tune(space)

    again = pickle.loads(pickle.dumps(copy.deepcopy(param_space)))

    points = [point_from_ray(spec["config"], space) for _, spec in generate_variants({"config": again}, random_state=np.random.RandomState(0))]
    assert all(space.contains(point) for point in points)
    assert again[CONDITIONAL].level.space.valid == space.valid


def test_objects_are_kept_from_where_a_tuner_would_put_placeholders() -> None:
    space = compile_space({"f": Categorical([len, max]), "g": Conditional("f", {len: Categorical([1, 2])}, INACTIVE), "h": Categorical([1])})

    param_space = inject_placeholders(to_ray_tune(space, grid=True), create_resolvers_map())

    points = [point_from_ray(spec["config"], space) for _, spec in generate_variants({"config": param_space})]
    assert keys(points) == keys(enumerate_points(space))


def test_optuna_search_of_ray_suggests_points_of_the_space(space: Space) -> None:
    search = OptunaSearch(space=pickle.loads(pickle.dumps(OptunaSpace(space))), metric="m", mode="min")

    configs = [search.suggest(str(i)) for i in range(20)]

    for config in configs:
        assert config is not None
        assert space.contains(point_from_ray(config, space))
        assert point_from_ray(config) == point_from_ray(config, space)


@pytest.fixture(scope="module")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Ray on this machine alone; gives back a folder for what Tuners write."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AIR_NEW_OUTPUT", "0")
        patch.setenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
        yield tmp_path_factory.mktemp("tuners")
        ray.shutdown()


def users_trainable() -> Any:
    """The trainable of somebody who knows Ray and nothing of us; made here, since Ray's workers can't import this module."""

    def score(config: dict[str, Any]) -> dict[str, float]:
        return {"loss": float(len(config))}

    return score


def test_a_tuner_of_the_users_own_tries_each_point_of_a_conditional_chain_once(space: Space, local_ray: Path) -> None:
    tuner = tune.Tuner(
        users_trainable(),
        param_space=to_ray_tune(space, grid=True),
        tune_config=tune.TuneConfig(search_alg=BasicVariantGenerator(max_concurrent=2), metric="loss", mode="min", reuse_actors=True),
        run_config=tune.RunConfig(storage_path=str(local_ray), name="grid", verbose=0),
    )

    results = tuner.fit()

    assert results.num_errors == 0
    assert keys(point_from_ray(result.config, space) for result in results) == keys(enumerate_points(space))


def test_optuna_search_of_ray_tries_points_of_the_space_in_a_tuner_of_the_users_own(space: Space, local_ray: Path) -> None:
    seen = []
    for name in ("one", "other"):
        search = OptunaSearch(space=OptunaSpace(space), metric="loss", mode="min", sampler=optuna.samplers.RandomSampler(seed=5))
        tuner = tune.Tuner(
            users_trainable(),
            tune_config=tune.TuneConfig(search_alg=search, num_samples=6, max_concurrent_trials=1, reuse_actors=True),
            run_config=tune.RunConfig(storage_path=str(local_ray), name=name, verbose=0),
        )

        results = tuner.fit()

        assert results.num_errors == 0
        seen.append([point_from_ray(result.config, space) for result in results])
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=5))
    assert keys(seen[0]) == keys(seen[1]) == keys(suggest_point(study.ask(), space) for _ in range(6))
    assert all(space.contains(point) for point in seen[0])
