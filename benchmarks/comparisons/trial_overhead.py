"""What the engine adds to a trial's own work, process isolation included, beside a bare Ray Tune trial with worker reuse.

    python benchmarks/comparisons/trial_overhead.py [--trials N ...] [--full] [--sampler random] [--json FILE]

Both sides run on this machine, one after the other, with one trial at a time. The engine's side is a whole sweep over a small
network: a pass that only stamps the model (so each trial builds, checks, scores and measures a model of its own), and a measurer
that times nothing. A trial's cost is the time from one trial's end to the next one's; its own work, what the functions of its stages
took inside their child processes, is taken off. What is left is split into the sampler's share, which is the time to choose the
trial's point, and the engine's. Ray's side is a function that reports one number. Prints a table of medians with 95 % limits (sign
test), for sweeps of 10 and 100 trials and, with --full, 1,000, and how much the engine's own part grows: from the shortest sweep to
the longest, and from the first hundred trials of the longest to its last hundred, which the machine's mood spoils less.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autotune.benchmarks.statistics import median_interval
from autotune.digest import dump_json
from autotune.target import effective_cpus, surroundings

STAMP = '''
from autotune.passes.base import ONNX, Pass, PassConfigParam, PassContract
from autotune.passes.registry import register
from autotune.search_spaces.parameters import Categorical


@register
class Stamp(Pass):
    """Write two numbers into the model's metadata; the graph stays as it is."""

    contract = PassContract(accepts=ONNX, returns=ONNX)

    @classmethod
    def _default_config(cls, accelerator_spec):
        numbers = Categorical(range(40))
        return {n: PassConfigParam(type_=int, default_value=0, search_defaults=numbers) for n in ("tens", "ones")}

    def _run_for_config(self, model, config, output_model_path):
        proto = model.load()
        entry = proto.metadata_props.add()
        entry.key, entry.value = "stamp", f"{config['tens']} {config['ones']}"
        return model.written(output_model_path, proto=proto)


def latency(*, model, baseline, session, baseline_session, inputs, rounds, seed):
    return {"candidate": [1000 + seed % 7] * rounds, "baseline": [1000] * rounds}
'''


def small_model(folder: Path) -> None:
    """A linear classifier of 16 numbers, and data that it scores."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    weights = rng.normal(size=(16, 4)).astype(np.float32)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", size]) for n, size in (("x", 16), ("logits", 4)))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["logits"])], "linear", [x], [y], [numpy_helper.from_array(weights, "w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(folder / "model.onnx"))
    rows = rng.normal(size=(100, 16)).astype(np.float32)
    np.savez(folder / "eval.npz", x=rows, labels=(rows @ weights).argmax(1))
    (folder / "stamp.py").write_text(STAMP)


def engine(folder: Path, trials: int, sampler: str) -> dict[str, Any]:
    """Run a sweep; returns seconds of each trial after the first, of the stages' own work in it, and of choosing its point."""
    from autotune.sweep.run import run

    sweep = {
        "model": {"path": str(folder / "model.onnx")}, "data": {"eval": str(folder / "eval.npz")}, "metric": "accuracy",
        "target": {"threads": 1}, "chain": [{"slot": "stamp", "pass": "Stamp"}], "script": str(folder / "stamp.py"),
        "budget": {"trials": trials}, "search": {"sampler": sampler}, "measure": {"measurer": str(folder / "stamp.py") + ":latency"},
    }  # fmt: skip
    ends: list[float] = []
    choosing: dict[int, float] = {}

    def watch(event: Mapping[str, Any]) -> None:
        if event["event"] == "trial-started":
            choosing[event["number"]] = event["choosing_seconds"]
        elif event["event"] == "trial-finished":
            ends.append(time.perf_counter())

    result = run(sweep, folder / f"out-{trials}", on_event=watch)
    records = {r.number: r for r in result.records}
    assert len(ends) == len(records) >= trials
    assert all(r.measured and r.shares_with is None for r in result.records), "every trial must be measured"
    # The untouched model is measured once, as the baseline, and costs less; the first trial waits for the servers to start.
    full = [n for n in range(1, len(ends)) if not records[n].unchanged]
    return {
        "seconds": [ends[n] - ends[n - 1] for n in full], "work": [records[n].work_s for n in full], "choosing": [choosing[n] for n in full],
    }  # fmt: skip


def bare_ray(trials: int) -> list[float]:
    """Seconds from one end of a trial to the next, in Ray Tune with a function that does nothing and workers that are reused."""
    from ray import tune
    from ray.tune import RunConfig, TuneConfig

    from autotune.sweep.ray_tune import local_ray

    ends: list[float] = []

    class Clock(tune.Callback):
        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            ends.append(time.perf_counter())

    def nothing(config: dict[str, Any]) -> None:
        tune.report({"score": config["x"]})

    with tempfile.TemporaryDirectory() as folder, local_ray():
        tuner = tune.Tuner(
            tune.with_resources(nothing, {"cpu": effective_cpus()}),
            param_space={"x": tune.uniform(0, 1)},
            tune_config=TuneConfig(num_samples=trials, max_concurrent_trials=1, reuse_actors=True),
            run_config=RunConfig(name="bare", storage_path=folder, verbose=0, callbacks=[Clock()]),
        )
        tuner.fit()
    assert len(ends) == trials
    return list(np.diff(ends))


def row(name: str, trials: int, seconds: Sequence[float]) -> dict[str, Any]:
    found = median_interval(seconds)
    return {"side": name, "trials": trials, "median_ms": found.value * 1e3, "low_ms": found.low * 1e3, "high_ms": found.high * 1e3}


def growth(after: Sequence[float], before: Sequence[float]) -> dict[str, float]:
    """Ratio of two medians; its limits are those of one held against the opposite ones of the other, so they are wide."""
    late, early = median_interval(after), median_interval(before)
    return {"value": late.value / early.value, "low": late.low / early.high, "high": late.high / early.low}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, nargs="+", default=[10, 100], help="lengths of the sweeps")
    parser.add_argument("--full", action="store_true", help="a sweep of 1,000 trials as well")
    parser.add_argument("--sampler", default="tpe", choices=("tpe", "random"))
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[dict[str, Any]] = []
    own: dict[int, list[float]] = {}
    print(f"{'':32} {'trials':>6} {'median':>9} {'95 % limits':>20}")

    def tell(name: str, trials: int, seconds: Sequence[float]) -> None:
        rows.append(row(name, trials, seconds))
        r = rows[-1]
        print(f"{r['side']:32} {r['trials']:>6} {r['median_ms']:>6.1f} ms {r['low_ms']:>8.1f} to {r['high_ms']:.1f} ms", flush=True)

    for trials in sorted({*options.trials, *([1000] if options.full else [])}):
        with tempfile.TemporaryDirectory(prefix="overhead-") as name:
            folder = Path(name)
            small_model(folder)
            found = engine(folder, trials, options.sampler)
        beyond = np.subtract(found["seconds"], found["work"])
        own[trials] = list(beyond - found["choosing"])
        tell("whole trial", trials, found["seconds"])
        tell("  its stages' own work", trials, found["work"])
        tell("  beyond it", trials, beyond)
        tell("    the sampler's share", trials, found["choosing"])
        tell("    the engine's", trials, own[trials])
        tell("bare Ray Tune trial", trials, bare_ray(trials))
    shortest, longest = min(own), max(own)
    grown = {}
    if longest > shortest:
        grown[f"a sweep of {longest} trials, to one of {shortest}"] = growth(own[longest], own[shortest])
    if longest >= 200:
        grown[f"the last hundred trials of {longest}, to the first"] = growth(own[longest][-100:], own[longest][:100])
    for what, ratio in grown.items():
        print(f"growth of the engine's part, {what}: {ratio['value']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})")
    if options.json:
        content = {"rows": rows, "growth": grown, "sampler": options.sampler, "surroundings": surroundings().to_json()}
        options.json.write_text(dump_json(content))


if __name__ == "__main__":
    main()
