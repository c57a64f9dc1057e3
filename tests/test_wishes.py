"""What the user wrote is what came to work: every field of the sweep file, seen where it is used and not where it is read.

A wish is a function of one field (or of a few that belong together). It writes other values than the defaults and looks at what the
code behind does with them. A field of the models without a wish fails here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import optuna
import pytest
from onnx import TensorProto, helper, numpy_helper

from autotune.config import LoadedSweep, parse_sweep, sections
from autotune.errors import ConfigError, SpaceError
from autotune.model import ONNXModelHandler
from autotune.passes import registry
from autotune.pipeline import InputFacts, Pipeline
from autotune.records import Interval, MetricValue, Status, TrialRecord
from autotune.search_spaces.space import Point, draw_points
from autotune.selection import Objective, Selection
from autotune.stages import StageOutcome
from autotune.sweep.baseline import Baseline
from autotune.sweep.finalists import LOOKS, Finalists
from autotune.sweep.prepare import Prepared, prepare
from autotune.sweep.result import SweepResult
from autotune.sweep.search import JOURNAL_FILE, Search
from autotune.trial import StageFailed, TrialPlan, TrialRunner

SweepOf = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Given:
    """What a wish works with: a folder of its own, the digits, sweeps over them, and a finished run of one."""

    folder: Path
    digits: Path
    sweep_of: SweepOf
    finished: SweepResult
    patch: pytest.MonkeyPatch

    def sweep(self, **more: Any) -> LoadedSweep:
        return LoadedSweep(parse_sweep(self.sweep_of(self.digits, **more)), self.folder)

    def prepared(self, **more: Any) -> Prepared:
        return prepare(self.sweep(**more))

    def pipeline(self, **more: Any) -> Pipeline:
        return self.prepared(**more).pipeline

    @property
    def plan(self) -> TrialPlan:
        return TrialPlan.load(self.finished.run)

    def begun(self, **more: Any) -> Begun:
        """The sweep run up to the point where Ray would take over. The baseline is that of the finished run."""
        from autotune.sweep import ray_tune
        from autotune.sweep import run as module

        seen: dict[str, Any] = {}
        original = module._Sweep._trials

        def trials(sweep: Any, search: Search, runner: TrialRunner) -> None:
            seen.update(sweep=sweep, search=search)
            original(sweep, search, runner)

        def run_trials(_folder: Path, _search: Search, **hooks: Any) -> None:
            seen.update(hooks)
            raise TakenOver

        loaded = self.sweep(**more)
        with self.patch.context() as patch:
            patch.setattr(module._Sweep, "_trials", trials)
            patch.setattr(ray_tune, "run_trials", run_trials)
            patch.setattr(module, "probe_provider", lambda *_: None)
            patch.setattr(Baseline, "plan", lambda baseline: replace(self.plan, sweep=baseline.sweep))
            with pytest.raises(TakenOver):
                module.run(loaded, self.folder / "run")
        return Begun(seen["sweep"], seen["search"], seen["may_start"])

    def stages_of(self, work: Callable[[TrialRunner, TrialPlan], object], **more: Any) -> list[dict[str, Any]]:
        """The arguments of the stages that this work asks for, in order; none is run."""
        asked: list[dict[str, Any]] = []

        class Recorder(TrialRunner):
            def stage(self, function: str, args: Mapping[str, Any], folder: Path, **_: Any) -> StageOutcome:
                asked.append({"function": function, **args})
                raise TakenOver

        loaded = self.sweep(**more)
        with Recorder(self.folder, loaded) as runner, pytest.raises(TakenOver):
            work(runner, replace(self.plan, sweep=loaded))
        return asked


@dataclass(frozen=True)
class Begun:
    sweep: Any
    search: Search
    may_start: Callable[[], bool]


class TakenOver(Exception):
    """Raised where the observation ends."""


Wish = Callable[[Given], None]
WISHES: dict[str, Wish] = {}


def wish(*fields: str) -> Callable[[Wish], Wish]:
    def keep(function: Wish) -> Wish:
        for field in fields:
            assert field not in WISHES, field
            WISHES[field] = function
        return function

    return keep


def fields_of_the_models() -> Iterator[str]:
    inner = set(sections())
    for path, section in sections().items():
        for name, row in section.model_fields.items():
            here = (*path, row.alias or name)
            if here not in inner or here == ("chain", "any_of"):
                yield ".".join(here)


def test_every_field_of_the_sweep_file_has_a_wish() -> None:
    assert set(WISHES) == set(fields_of_the_models())


WIDE: list[dict[str, Any]] = [
    {"slot": "quantize", "pass": "OnnxQuantization", "optional": True,
     "params": {"quant_mode": ["static", "dynamic"], "op_types_to_quantize": ["all", "matmul", "conv"], "calibrate_method": ["minmax", "entropy"],
                "per_channel": [True, False]}},
    {"slot": "session", "pass": "OrtPerfTuning", "params": {"graph_optimization_level": ["all", "basic", "extended"]}},
]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- model and data


@wish("schema")
def another_version_is_refused(given: Given) -> None:
    with pytest.raises(ConfigError, match="schema must be 1"):
        given.sweep(schema=2)


@wish("model.path")
def the_model_named_is_the_one_looked_at_and_brought_in(given: Given) -> None:
    small_model(given.folder / "other.onnx")
    prepared = given.prepared(model={"path": "other.onnx"})

    with TrialRunner(given.folder, prepared.sweep) as runner:
        (given.folder / "baseline").mkdir()
        _, model = Baseline(given.folder, prepared.sweep, prepared, runner, print)._ingest(given.folder / "baseline", [])

    assert set(prepared.facts.operators) == {"Flatten", "MatMul"}
    assert [n.op_type for n in onnx.load(model.path).graph.node] == ["Flatten", "MatMul"]


def small_model(path: Path) -> None:
    weight = numpy_helper.from_array(np.ones((64, 10), np.float32), "w")
    nodes = [helper.make_node("Flatten", ["x"], ["f"]), helper.make_node("MatMul", ["f", "w"], ["y"])]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1, 8, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 10])
    graph = helper.make_graph(nodes, "small", [x], [y], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))


@wish("model.script", "model.loader", "model.weights", "model.outputs")
def the_module_named_becomes_the_baseline(given: Given) -> None:
    import torch

    (given.folder / "mine.py").write_text(
        "from torch import nn\n\n\ndef make_model():\n    raise AssertionError('another loader was named')\n\n\n"
        "def make_other():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    weights = {"1.weight": torch.full((10, 64), 0.25), "1.bias": torch.full((10,), 0.5)}
    torch.save(weights, given.folder / "mine.pt")
    model = {"script": "mine.py", "loader": "make_other", "weights": "mine.pt", "outputs": ["votes"]}
    chain = [{"slot": "convert", "pass": "OnnxConversion"}]
    prepared = given.prepared(model=model, chain=chain)

    with TrialRunner(given.folder, prepared.sweep) as runner:
        (given.folder / "baseline").mkdir()
        _, made = Baseline(given.folder, prepared.sweep, prepared, runner, print)._ingest(given.folder / "baseline", [])

    graph = onnx.load(made.path).graph
    constants = [numpy_helper.to_array(i) for i in graph.initializer]
    assert [o.name for o in graph.output] == ["votes"]
    assert {(float(c.flat[0]), c.size) for c in constants if c.dtype == np.float32} == {(0.25, 640), (0.5, 10)}


@wish("data.eval")
def the_rows_of_the_file_named_are_scored(given: Given) -> None:
    rows = np.load(given.digits / "eval.npz")
    np.savez(given.folder / "few.npz", x=rows["x"][:40], labels=rows["labels"][:40])
    data = {"eval": str(given.folder / "few.npz")}

    prepared = given.prepared(data=data)
    (stage,) = given.stages_of(lambda runner, plan: runner.check(plan.baseline, None, [0], plan.eval_path, given.folder), data=data)

    assert len(prepared.rows.everything) == 40
    assert stage["data"] == data["eval"]


@wish("data.calibration")
def the_quantizer_gets_the_calibration_data_named(given: Given) -> None:
    np.savez(given.folder / "other_calib.npz", x=np.load(given.digits / "calib.npz")["x"][:20])
    pipeline = given.pipeline(data={"eval": str(given.digits / "eval.npz"), "calibration": "other_calib.npz"})

    (step, *_) = pipeline.steps(pipeline.default_point())

    assert step.config["calibration_data_dir"] == str(given.folder / "other_calib.npz")


@wish("data.train")
def the_pruning_pass_gets_the_training_data_named(given: Given) -> None:
    model = {"script": str(given.digits / "net.py"), "weights": str(given.digits / "weights.pt")}
    data = {"eval": str(given.digits / "eval.npz"), "train": str(given.digits / "train.npz")}
    chain = [{"slot": "prune", "pass": "TorchPruning", "params": {"fine_tune_epochs": 1}}, {"slot": "convert", "pass": "OnnxConversion"}]
    pipeline = given.pipeline(model=model, data=data, chain=chain)

    (step, *_) = pipeline.steps(pipeline.default_point())

    assert data["train"] in step.config.values()


@wish("data.holdout")
def the_share_named_is_held_out(given: Given) -> None:
    data = {"eval": str(given.digits / "eval.npz"), "holdout": 0.1}

    rows = given.prepared(data=data).rows

    assert (len(rows.search), len(rows.holdout)) == (360, 40)


# ---------------------------------------------------------------------------------------------------------------- goals


@wish("metric")
def the_metric_named_scores(given: Given) -> None:
    prepared = given.prepared(metric="top-5", constraints=[])
    (stage,) = given.stages_of(
        lambda runner, plan: runner.accuracy(plan.baseline, plan.sweep.config.metric, plan.eval_path, [0], given.folder, baseline_outputs=None),
        metric="top-5", constraints=[],
    )  # fmt: skip

    assert (prepared.metric.name, stage["metric"]) == ("top5", "top-5")


@wish("objectives")
def the_sampler_is_told_of_the_objectives(given: Given) -> None:
    search = given.begun(chain=WIDE, objectives=["accuracy", "min size", "latency"]).search
    record = measured(1, accuracy=0.9, latency=0.5, size=0.25)

    assert search.goals.directions == ("maximize", "minimize", "minimize")
    assert [d.name for d in search.study.directions] == ["MAXIMIZE", "MINIMIZE", "MINIMIZE"]
    assert search.goals.values(record) == (0.9, 0.25, 0.5)


@wish("constraints")
def a_trial_is_judged_by_the_constraints(given: Given) -> None:
    with TrialRunner(given.folder, given.sweep()) as runner:
        judged = [
            runner.judged(replace(given.plan, sweep=given.sweep(constraints=[text])), measured(1, latency=0.5, accuracy=0.9))
            for text in ("latency <= 0.6x", "latency <= 0.4x")
        ]

    assert [r.status for r in judged] == [Status.OK, Status.INFEASIBLE]
    assert [c["expr"] for r in judged for c in r.constraints] == ["latency <= 0.6x", "latency <= 0.4x"]


def measured(number: int, *, doubt: float = 0.0, **ratios: float) -> TrialRecord:
    """A record with these values; `doubt` widens the difference of the accuracy from the baseline, which is 0.95."""
    metrics = {}
    for name, value in ratios.items():
        delta = Interval(value - 0.95, value - 0.95 - doubt, value - 0.95 + doubt) if name == "accuracy" else None
        ratio = Interval.exactly(value) if name != "accuracy" else None
        metrics[name] = MetricValue(value, value, value, unit="share" if delta else "ms", ratio=ratio, delta=delta, samples=300)
    point: Point = {"quantize": "OnnxQuantization", "number": number}
    return TrialRecord(number, point, Status.OK, "sampler", metrics=metrics)


@wish("strict")
def a_limit_that_is_only_met_is_refused_when_strict(given: Given) -> None:
    record = measured(1, doubt=0.02, accuracy=0.945, latency=0.5)

    with TrialRunner(given.folder, given.sweep()) as runner:
        statuses = [runner.judged(replace(given.plan, sweep=given.sweep(strict=strict)), record).status for strict in (False, True)]
    begun = given.begun(chain=WIDE, strict=True)

    assert statuses == [Status.OK, Status.UNDECIDED]
    assert begun.sweep._select(given.plan, [record]).feasible == ()


@wish("pick")
def the_member_that_the_pick_names_is_chosen(given: Given) -> None:
    records = [measured(1, accuracy=0.94, latency=0.2), measured(2, accuracy=0.99, latency=0.8)]

    chosen = {}
    for pick in ("fastest", "most_accurate"):
        sweep = given.begun(chain=WIDE, constraints=[], pick=pick).sweep
        chosen[pick] = sweep._select(given.plan, records).best
        remove(given.folder / "run")

    assert chosen == {"fastest": "t-0001", "most_accurate": "t-0002"}


# ---------------------------------------------------------------------------------------------------------------- target


@wish("target.ep")
def sessions_start_on_the_provider_named(given: Given) -> None:
    prepared = given.prepared(target={"ep": "openvino"})

    assert prepared.settings.execution_provider == "OpenVINOExecutionProvider"
    assert prepared.pipeline.target.accelerator.execution_provider == "OpenVINOExecutionProvider"


@wish("target.threads")
def sessions_have_the_threads_named_and_tuning_keeps_them(given: Given) -> None:
    chain = [{"slot": "session", "pass": "OrtPerfTuning"}]
    fixed, free = given.prepared(target={"threads": 1}, chain=chain), given.prepared(target={}, chain=chain)

    assert fixed.settings.intra_op_num_threads == 1
    assert {s.config["intra_op_num_threads"] for p in draw_points(fixed.pipeline.space, 2, seed=0) for s in fixed.pipeline.steps(p)} == {1}
    assert len(free.pipeline.space.choices("session.intra_op_num_threads")) >= len(fixed.pipeline.space.choices("session.intra_op_num_threads"))


@wish("target.batch_size")
def runs_have_as_many_examples(given: Given) -> None:
    (stage,) = given.stages_of(
        lambda runner, plan: runner.latency(plan.baseline, None, plan.eval_path, range(8), given.folder, seed=0), target={"batch_size": 4}
    )

    assert stage["batch_size"] == 4


# ---------------------------------------------------------------------------------------------------------------- chain


@wish("chain.slot", "chain.pass", "chain.params", "chain.optional", "chain.any_of", "chain.any_of.pass", "chain.any_of.params")
def the_space_is_that_of_the_chain(given: Given) -> None:
    chain = [
        {"slot": "first", "any_of": [{"pass": "OnnxQuantization", "params": {"quant_mode": "dynamic", "per_channel": [False, True]}},
                                     {"pass": "OnnxFloatToFloat16"}], "optional": True},
        {"slot": "last", "pass": "OrtPerfTuning", "params": {"graph_optimization_level": ["basic", "layout"]}},
    ]  # fmt: skip
    space = given.pipeline(chain=chain).space
    whole = given.pipeline(chain=[{**chain[0], "optional": False}, chain[1]]).space

    assert set(space.choices("first")) == {None, "OnnxQuantization", "OnnxFloatToFloat16"}
    assert set(whole.choices("first")) == {"OnnxQuantization", "OnnxFloatToFloat16"}
    assert set(space.choices("first.per_channel")) == {False, True}
    assert space.choices("first.quant_mode") == ("dynamic",)
    assert space.choices("last") == ("OrtPerfTuning",)
    assert set(space.choices("last.graph_optimization_level")) == {"basic", "layout"}


@wish("script")
def passes_of_the_users_script_can_be_used(given: Given) -> None:
    (given.folder / "own.py").write_text(
        "from autotune.passes.base import Pass, PassConfigParam\nfrom autotune.passes.registry import register\n\n\n"
        "@register\nclass OwnPassOfAScript(Pass):\n    '''Does nothing.'''\n\n    @classmethod\n    def _default_config(cls, accelerator_spec):\n"
        "        return {'strength': PassConfigParam(type_=int, default_value=1)}\n\n"
        "    def _run_for_config(self, model, config, output_model_path):\n        return model.written(output_model_path)\n"
    )
    given.patch.setattr(registry, "_of_scripts", dict(registry._of_scripts))
    given.patch.setattr(TrialRunner, "_operator_times", lambda *_: {})  # that is a stage of its own, before the pass
    chain = [{"slot": "own", "pass": "OwnPassOfAScript", "params": {"strength": [1, 2, 3]}}]
    sweep = {"script": "own.py", "chain": chain}
    pipeline = given.pipeline(**sweep)
    step = pipeline.steps(pipeline.default_point())[0]

    (stage,) = given.stages_of(lambda runner, plan: runner.build(step, plan.baseline, "digest", given.folder), **sweep)

    assert pipeline.space.choices("own.strength") == (1, 2, 3)
    assert (stage["pass"], stage["script"]) == ("OwnPassOfAScript", str(given.folder / "own.py"))


@wish("validation.waive")
def a_rule_that_is_waived_removes_nothing(given: Given) -> None:
    params = {"quant_mode": "static", "quant_format": "QOperator", "op_types_to_quantize": "all", "calibrate_method": "minmax"}
    sweep = {"target": {"ep": "qnn"}, "chain": [{"slot": "quantize", "pass": "OnnxQuantization", "params": params}]}

    with pytest.raises(SpaceError, match="qnn-limits"):
        Pipeline(given.sweep(**sweep), InputFacts(opset=17, operators={"Conv": 1}))
    waived = Pipeline(given.sweep(**sweep, validation={"waive": ["qnn-limits", "ep-limits"]}), InputFacts(opset=17, operators={"Conv": 1}))

    assert waived.space.valid >= 1


@wish("validation.upgrade_opset")
def a_model_below_the_opset_that_a_pass_needs_is_converted_first(given: Given) -> None:
    params = {"quant_mode": "static", "op_types_to_quantize": "all", "calibrate_method": "minmax", "per_channel": True}
    sweep = {"chain": [{"slot": "quantize", "pass": "OnnxQuantization", "params": params}]}
    old = InputFacts(opset=11, operators={"Conv": 1})

    with pytest.raises(SpaceError, match="opset-floor"):
        Pipeline(given.sweep(**sweep), old)
    allowed = Pipeline(given.sweep(**sweep, validation={"upgrade_opset": True}), old)

    assert [s.pass_name for s in allowed.steps(allowed.default_point())] == ["OnnxOpsetUpgrade", "OnnxQuantization"]


# ---------------------------------------------------------------------------------------------------------------- search and budget


@wish("search.enabled")
def with_search_off_parameters_keep_their_defaults(given: Given) -> None:
    chain = [{"slot": "session", "pass": "OrtPerfTuning"}, {"slot": "quantize", "pass": "OnnxQuantization", "params": {"quant_mode": "static"}}]

    assert given.pipeline(chain=chain, target={}).space.valid > 1
    assert given.pipeline(chain=chain, target={}, search={"enabled": False}).space.valid == 1


@wish("search.start")
def start_points_are_asked_for_first(given: Given) -> None:
    start = [{"quantize": "OnnxQuantization", "quantize.quant_mode": "dynamic", "session.graph_optimization_level": "basic"}]
    search = given.begun(chain=WIDE, search={"start": start}).search

    asked = [search.ask() for _ in range(3)]

    assert [a.origin for a in asked if a] == ["default", "untouched", "start"]
    assert asked[2] is not None
    assert start[0].items() <= asked[2].point.items()


@wish("search.sampler")
def the_sampler_named_proposes(given: Given) -> None:
    origins = {}
    for sampler in ("tpe", "random"):
        search = given.begun(chain=WIDE, search={"sampler": sampler}).search
        assert not search.enumerates
        chosen = search._sampled(9)
        assert chosen is not None
        origins[sampler] = chosen[1]
        remove(given.folder / "run")

    assert origins == {"tpe": "sampler", "random": "random"}


@wish("search.options.n_startup_trials", "search.options.n_ei_candidates", "search.options.multivariate", "search.options.group")
def the_sampler_is_made_with_the_options(given: Given) -> None:
    options = {"n_startup_trials": 3, "n_ei_candidates": 7, "multivariate": False, "group": False}
    made: list[dict[str, Any]] = []

    class Recorder(optuna.samplers.TPESampler):
        def __init__(self, **options: Any) -> None:
            made.append(options)
            super().__init__(**options)

    for search in ({"options": options}, {}):
        found = given.begun(chain=WIDE, search=search).search
        with given.patch.context() as patch:
            patch.setattr(optuna.samplers, "TPESampler", Recorder)
            found._from_tpe(5)
        remove(given.folder / "run")

    assert [{k: m[k] for k in options} for m in made] == [
        options,
        {"n_startup_trials": 10, "n_ei_candidates": 24, "multivariate": True, "group": True},
    ]


@wish("budget.trials")
def as_many_trials_are_asked_for(given: Given) -> None:
    search = given.begun(chain=WIDE, budget={"trials": 11}).search

    asked = []
    while (one := search.ask()) is not None:
        asked.append(one)

    assert len(asked) == search.total == 11


@wish("budget.time")
def no_trial_starts_after_the_time_named(given: Given) -> None:
    patient = given.begun(chain=WIDE).may_start()
    remove(given.folder / "run")
    hasty = given.begun(chain=WIDE, budget={"time": "0.001s"})

    assert patient
    assert not hasty.may_start()
    assert any("the time budget of 0.001s ended the search" in note for note in hasty.sweep.notes)


@wish("budget.stage_timeout", "budget.memory")
def stages_have_the_limits_named(given: Given) -> None:
    with TrialRunner(given.folder, given.sweep(budget={"stage_timeout": "90s", "memory": "3GB"})) as runner:
        assert (runner.limits.timeout_s, runner.limits.memory_bytes) == (90.0, 3 * 10**9)


@wish("budget.store")
def the_store_is_kept_under_the_size_named(given: Given) -> None:
    sweep = given.begun(chain=WIDE, budget={"store": "1B"}).sweep
    place = sweep.store.place()
    handler = ONNXModelHandler.from_folder(given.plan.baseline.folder).written(place / "files", proto=onnx.load(given.digits / "model.onnx"))
    sweep.store.publish("a" * 64, place, handler, facts={}, seconds=0.0)

    sweep.store_limit.keep([])

    assert sweep.store.find("a" * 64) is None
    assert any("the store was kept under 1B" in note for note in sweep.store_limit.notes())


@wish("seed")
def everything_random_follows_the_seed(given: Given) -> None:
    prepared = [given.prepared(seed=seed) for seed in (0, 5)]
    drawn = []
    for seed in (0, 5):
        search = given.begun(chain=WIDE, seed=seed, search={"sampler": "random"}).search
        chosen = search._sampled(9)
        assert chosen is not None
        drawn.append(chosen[0])
        remove(given.folder / "run")
    (accuracy,) = given.stages_of(
        lambda runner, plan: runner.accuracy(plan.baseline, "accuracy", plan.eval_path, [0], given.folder, baseline_outputs=None), seed=5
    )

    assert prepared[0].rows != prepared[1].rows
    assert drawn[0] != drawn[1]
    assert accuracy["seed"] == 5


@wish("storage")
def the_study_lies_in_the_database_named(given: Given) -> None:
    url = f"sqlite:///{given.folder / 'study.db'}"

    search = given.begun(chain=WIDE, storage=url).search
    search.ask()

    names = optuna.get_all_study_names(url)
    assert len(names) == 1
    assert len(optuna.load_study(study_name=names[0], storage=url).trials) == 1
    assert not (given.folder / "run" / JOURNAL_FILE).exists()


# ---------------------------------------------------------------------------------------------------------------- measuring


@wish("measure.max_time", "measure.final_time", "measure.ratio_width", "measure.measurer")
def latency_is_measured_as_told(given: Given) -> None:
    measure = {"max_time": "2s", "final_time": "7s", "ratio_width": 0.125, "measurer": "timer.py:time_it"}
    (given.folder / "timer.py").write_text("def time_it(**_): ...\n")

    def stage(final: bool) -> dict[str, Any]:
        (found,) = given.stages_of(
            lambda runner, plan: runner.latency(plan.baseline, None, plan.eval_path, [0], given.folder, seed=0, final=final), measure=measure
        )
        return found

    search, final = stage(False), stage(True)

    assert (search["protocol"]["max_time_ns"], final["protocol"]["max_time_ns"]) == (2 * 10**9, 7 * 10**9)
    assert search["protocol"]["ratio_width"] == 0.125
    assert (search["measurer"], search["root"]) == ("timer.py:time_it", str(given.folder))


@wish("measure.pattern", "measure.interval", "measure.concurrency", "measure.clock")
def runs_follow_each_other_and_are_timed_as_told(given: Given) -> None:
    def protocol(**measure: Any) -> dict[str, Any]:
        (found,) = given.stages_of(
            lambda runner, plan: runner.latency(plan.baseline, None, plan.eval_path, [0], given.folder, seed=0), measure=measure
        )
        handed: dict[str, Any] = found["protocol"]
        return handed

    paced, crowd = protocol(pattern="paced", interval="10ms", clock="cpu"), protocol(concurrency=2)

    assert (paced["pattern"], paced["interval_ns"], paced["clock"]) == ("paced", 10_000_000, "cpu")
    assert (crowd["pattern"], crowd["concurrency"], crowd["clock"]) == ("steady", 2, "wall")


@wish("target.require_ep")
def the_check_asks_for_the_placement_named(given: Given) -> None:
    (found,) = given.stages_of(
        lambda runner, plan: runner.check(plan.baseline, None, [0], plan.eval_path, given.folder), target={"threads": 1, "require_ep": "all"}
    )

    assert found["require_ep"] == "all"


@wish("measure.looks")
def looks_are_taken_when_asked_for(given: Given) -> None:
    def race(looks: bool | None) -> Any:
        def score(runner: TrialRunner, plan: TrialPlan) -> object:
            return runner._scored(
                plan.baseline, "accuracy", plan.eval_path, [0], given.folder, baseline_outputs=None, race=runner._race(plan, {}, {})
            )  # fmt: skip

        (found,) = given.stages_of(score, measure={"looks": looks})
        return found["race"]

    assert race(False) is None
    assert race(True)["rules"]["constraints"][0]["text"] == "accuracy >= baseline - 2.0pt"


@wish("measure.eps.latency", "measure.eps.score")
def differences_below_the_tolerances_count_for_nothing(given: Given) -> None:
    def tolerances(**more: Any) -> Mapping[str, float]:
        begun = given.begun(**more)
        return begun.sweep._select(given.plan, list(given.finished.records)).eps

    assert tolerances(measure={"eps": {"latency": "10%", "score": "2pt"}}) == {"latency": 0.1, "score": 0.02}


@wish("measure.final_budget")
def an_open_front_is_timed_again_within_the_final_budget(given: Given) -> None:
    records = list(given.finished.records)
    timed = [r.id for r in records if not r.unchanged][:2]
    choice = Selection((Objective("latency"),), to_measure=tuple(timed))

    def taken(budget: str) -> list[tuple[str, float]]:
        found = []

        def latency(_runner: TrialRunner, *args: Any, **more: Any) -> Any:
            found.append((args[4].parent.parent.name, more["time_s"]))
            raise StageFailed("latency", Status.FAILED, None, "enough is known")

        given.patch.setattr(TrialRunner, "latency", latency)
        plan = replace(given.plan, run=given.folder, sweep=given.sweep(measure={"final_budget": budget, "final_time": "8s"}))
        with TrialRunner(given.folder, plan.sweep) as runner:
            last = Finalists(plan, (), lambda _: choice, runner, lambda _: None)
            given.patch.setattr(last, "model_of", lambda _: plan.baseline)
            last.resolve(records)
        return found

    short, long = taken("0.25s"), taken("1h")

    assert {name for name, _ in short} == {timed[0]}  # one share of final_time is longer than all the budget: the widest alone
    assert all(time_s <= 0.25 for _, time_s in short)
    assert {name for name, _ in long} == set(timed)
    assert all(time_s == 8 / LOOKS for _, time_s in long)


# ---------------------------------------------------------------------------------------------------------------- the tests


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", list({function.__name__: None for function in WISHES.values()}))
def test_what_the_user_wrote_is_what_came_to_work(
    name: str, digits: Path, sweep_of: SweepOf, finished: SweepResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = next(f for f in WISHES.values() if f.__name__ == name)

    function(Given(tmp_path, digits, sweep_of, finished, monkeypatch))
