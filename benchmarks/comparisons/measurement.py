"""Are the numbers true? Four trials of the measuring itself, on models made here, in one run: tables, and everything as JSON.

    python benchmarks/comparisons/measurement.py [--quick] [--parts a,b,c,d] [--seed 0] [--json runs/measurement.json]

a. A model beside a byte-identical copy under another name: how often is one called faster or slower, by the rule of the choice and by an
   interval that leaves out 1? At most 5 % is the aim.
b. Short measurements beside a long reference: how many of their 95 % intervals hold it? At three run times, measuring on one core with the
   other core quiet, and with a busy loop on it. The reference is the median of long measurements spread evenly among the short ones, each
   in a process of its own, so that a slow drift of the machine meets both.
c. Width of the interval by seconds spent, beside plain loops of 20 and 200 runs and ONNX Runtime's own test program. A plain loop
   states no interval, so it gets the one that its reader would compute: Student's t over its runs, as if they were independent.
d. A made-up table of models whose truth is known, and a limit of one point on their score: who is on the front falsely, who is missed, how
   optimistic is the score that is reported, and how many runs, rounds and rows that took, beside a front of one plain loop each. A clock that
   only counts and a table of answers stand in for machine and data; the rest is the product's own: measuring in pairs, accuracy by looks,
   turns for those whose place is not settled, finalists measured afresh.

Shares are printed with Wilson's 95 % limits: a hundred trials can't tell 5 % from 10 %. Let nothing else run meanwhile: each table says how
much of the machine others took, and how many rounds they disturbed. About 20 minutes on 2 cores; --quick takes about two and shows the
form, not the figures. A part that fails says so, the others are run, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.benchmarks.accuracy import compare_features
from autotune.benchmarks.lane import lane
from autotune.benchmarks.latency import LatencyProtocol, PairedSamples, RunOnce, StopAbove, measure_paired, summarize
from autotune.benchmarks.metrics import Features, get_metric
from autotune.benchmarks.racing import BoundedRace, ProportionRace, Rules, Stop, look, look_sizes, race_for
from autotune.benchmarks.statistics import median_interval, student_t_quantile, wilson_interval
from autotune.config import MeasureSection, seconds
from autotune.constraints import Constraint, parse_constraint
from autotune.digest import dump_json
from autotune.model import ONNXModelHandler, ingest_onnx
from autotune.pareto import pareto_front
from autotune.records import Interval, MetricValue, Status, TrialRecord
from autotune.selection import UNTOUCHED, Objective, Selection, State, select
from autotune.session import SessionSettings
from autotune.stages import StageLimits, StageRunner
from autotune.sweep.finalists import (
    LOOKS,
    LastChoice,
    choose_afresh,
    pooled_turns,
    resolve_front,
    settle_undecided,
    why_it_falls,
)
from autotune.sweep.ladder import FrontBoxes
from autotune.target import surroundings
from autotune.trial import FRONT_RULES, best_score, ended_early, front_limits, judge_record, race_rules

Json = dict[str, Any]
PARTS = "abcd"
EP = "CPUExecutionProvider"
ONE_THREAD = SessionSettings(intra_op_num_threads=1)
OBJECTIVES = (Objective("latency"), Objective("accuracy", minimize=False))
EPS_LATENCY, EPS_SCORE = 0.03, 0.003  # the tolerances of the choice
PLAIN_RUNS = (20, 200)
ATTEMPTS = 2  # at a measurement, before its part is given up
TOLD_EVERY_S = 30  # where nobody looks at a terminal


@dataclass(frozen=True)
class Kind:
    """A made-up network by its run time on one thread; the candidate is the same with fewer layers."""

    name: str
    width: int
    layers: int
    fewer: int
    batch: int


KINDS = (Kind("0.02 ms", 128, 12, 10, 1), Kind("1 ms", 256, 28, 23, 32), Kind("10 ms", 512, 20, 17, 64))


@dataclass(frozen=True)
class Sizes:
    """How much of everything; seconds are the time limits of one measurement."""

    kinds: tuple[Kind, ...] = KINDS
    alike: int = 200  # a: comparisons, shared among the kinds
    alike_s: float = 1.0
    short: int = 100  # b: for each kind and neighbour
    short_s: float = 0.8
    long: int = 10
    long_s: float = 1.6
    repeats: int = 5  # c: of each method
    spent_s: tuple[float, ...] = (0.5, 1.0, 2.0)
    tables: int = 30  # d
    models: int = 60
    replay_s: float = 3.0


QUICK = Sizes(alike=12, alike_s=0.6, short=3, short_s=0.6, long=2, long_s=0.8, repeats=1, spent_s=(0.5, 1.0), tables=3, models=30)


# What is measured -----------------------------------------------------------------------------------------------------------


def network(path: Path, width: int, layers: int, batch: int) -> None:
    """Write a chain of matrix products and ReLUs, random but the same each time."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    nodes, weights, last = [], [], "x"
    for i in range(layers):
        weights.append(numpy_helper.from_array((rng.normal(size=(width, width)) * math.sqrt(2 / width)).astype(np.float32), f"w{i}"))
        nodes += [helper.make_node("MatMul", [last, f"w{i}"], [f"m{i}"]), helper.make_node("Relu", [f"m{i}"], [f"h{i}"])]
        last = f"h{i}"
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, width]) for name in ("x", last))
    graph = helper.make_graph(nodes, "chain", [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))


@dataclass(frozen=True)
class Models:
    """The three files of a kind, as the engine has them, and the data that they are fed."""

    kind: Kind
    baseline: ONNXModelHandler
    candidate: ONNXModelHandler
    copy: ONNXModelHandler  # the baseline's bytes under another name
    data: Path


def make_models(kind: Kind, folder: Path) -> Models:
    folder.mkdir(parents=True)
    network(folder / "baseline.onnx", kind.width, kind.layers, kind.batch)
    network(folder / "candidate.onnx", kind.width, kind.fewer, kind.batch)
    shutil.copyfile(folder / "baseline.onnx", folder / "copy.onnx")
    rows = np.random.default_rng(1).normal(size=(2 * kind.batch, kind.width)).astype(np.float32)
    np.savez(folder / "data.npz", x=rows)
    handlers = {}
    for name in ("baseline", "candidate", "copy"):
        (folder / name).mkdir()
        handlers[name] = ingest_onnx(folder / f"{name}.onnx", folder / name).with_session(ONE_THREAD)
    assert handlers["copy"].path.read_bytes() == handlers["baseline"].path.read_bytes()
    return Models(kind, handlers["baseline"], handlers["candidate"], handlers["copy"], folder / "data.npz")


class PartFailed(Exception):
    """A part that can't be finished, in words; the parts after it are run all the same."""


class Bench:
    """Runs the engine's own latency stage, each time in a fresh child process and alone on the lane, and keeps what it said."""

    def __init__(self, folder: Path, runner: StageRunner) -> None:
        self.folder, self.runner = folder, runner
        self.foreign: list[float] = []  # share of the machine that others took, one a measurement
        self.rounds: list[tuple[int, int]] = []  # of each measurement: all, and those of them that were disturbed
        self.failures: list[str] = []
        self.before: dict[str, list[float]] = {}  # the baseline's latencies so far, ms, by kind: what a sweep tells its next measurement

    def ratio(self, models: Models, candidate: ONNXModelHandler, seed: int, *, seconds: float, to_the_end: bool = False) -> Json:
        """Time a candidate beside the baseline. `to_the_end` uses up the seconds, whatever the width of the interval."""
        protocol: Json = {"max_time_ns": int(seconds * 1e9)}
        if to_the_end:
            protocol |= {"ratio_width": 0.0, "max_rounds": 1_000_000}
        where = self.folder / "measurement"
        kind = models.kind
        args = {
            "model": candidate.to_json(), "baseline": models.baseline.to_json(), "data": str(models.data), "rows": list(range(2 * kind.batch)),
            "batch_size": kind.batch, "protocol": protocol, "seed": seed, "out": str(where), "before": self.before.get(kind.name, []),
        }  # fmt: skip
        for _ in range(ATTEMPTS):
            with lane(EP, exclusive=True):
                outcome = self.runner.run("autotune.benchmarks.stages:latency", args, folder=where, limits=StageLimits(60 + 10 * seconds))
            shutil.rmtree(where, ignore_errors=True)
            facts = outcome.value
            if facts is not None and facts["verdict"] == "ok":
                break
            self.failures.append(facts["message"] if facts else outcome.message)
        else:
            raise PartFailed(f"the latency stage must end well; it ended {ATTEMPTS} times with: {self.failures[-1]}")
        if facts.get("foreign_load") is not None:
            self.foreign.append(facts["foreign_load"])
        if facts.get("rounds_disturbed") is not None:
            self.rounds.append((facts["rounds"], facts["rounds_disturbed"]))
        latency, baseline = (MetricValue.from_json(facts[of]["latency"]) for of in ("metrics", "baseline_metrics"))
        self.before.setdefault(kind.name, []).append(baseline.value)
        return {"latency": latency, "baseline": baseline, "facts": facts}

    def quiet(self) -> Json:
        """How quiet the machine was since the last question.

        `others`: median share of it that went to others, with the smallest and the largest; None where that can't be read. `rounds`,
        and how many of them were `disturbed`, in how many `measurements`; `failed`: measurements that had to be made again.
        """
        seen, rounds, failures = self.foreign, self.rounds, self.failures
        self.foreign, self.rounds, self.failures = [], [], []
        return {
            "others": Interval(float(np.median(seen)), min(seen), max(seen)).to_json() if seen else None,
            "rounds": sum(n for n, _ in rounds), "disturbed": sum(d for _, d in rounds), "measurements": len(rounds),
            "measurements_disturbed": sum(d > 0 for _, d in rounds), "failed": failures,
        }  # fmt: skip


@contextlib.contextmanager
def measuring_bench(folder: Path, *, cpu: int | None = None) -> Iterator[Bench]:
    """A bench whose processes, and ours, stay on one CPU, or anywhere."""
    before = os.sched_getaffinity(0)
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    try:
        with StageRunner(("numpy", "onnxruntime")) as runner:
            runner.start()
            yield Bench(folder, runner)
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def busy_loop(cpu: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that computes all the time on one CPU; it ends with us, however we end."""
    code = "import os, sys\nparent = os.getppid()\nprint(flush=True)\nwhile os.getppid() == parent:\n    sum(range(100_000))"
    loop = subprocess.Popen(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{cpu}}})\n{code}"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    try:
        assert loop.stdout is not None
        loop.stdout.readline()  # it runs
        yield loop
    finally:
        loop.kill()
        loop.communicate()


# a: a model and its copy ----------------------------------------------------------------------------------------------------


def same_score(examples: int = 1000) -> MetricValue:
    """What a candidate gets that answers just as the baseline does."""
    right = Features((np.ones(examples, np.float32),))
    return compare_features(get_metric("accuracy"), right, right, seed=0)


def verdict(latency: MetricValue, baseline: MetricValue) -> str:
    """What the choice says of a candidate that differs in latency alone: `faster`, `slower` or `tie`."""
    score = same_score()
    base = {"latency": baseline, "accuracy": replace(score, delta=Interval.exactly(0.0), ratio=Interval.exactly(1.0))}
    records = [
        TrialRecord(0, {"pass": None}, Status.OK, UNTOUCHED, metrics=base),
        TrialRecord(1, {"pass": "Copy"}, Status.OK, metrics={"latency": latency, "accuracy": score}),
    ]
    found = select(records, OBJECTIVES, (), baseline=base, score="accuracy")
    if found.best == records[1].id or records[0].id in found.off_front:
        return "faster"
    return "slower" if records[1].id in found.off_front else "tie"


def part_a(sizes: Sizes, models: Sequence[Models], folder: Path, seed: int) -> Json:
    found: dict[str, list[Json]] = {m.kind.name: [] for m in models}
    with measuring_bench(folder) as bench:
        for n in range(sizes.alike):
            pair = models[n % len(models)]
            tell(f"a: comparison {n + 1} of {sizes.alike}")
            one = bench.ratio(pair, pair.copy, seed + n, seconds=sizes.alike_s)
            ratio = one["latency"].ratio
            by_interval = "faster" if ratio.high < 1 else "slower" if ratio.low > 1 else "tie"
            kept = {"ratio": ratio.to_json(), "by_selection": verdict(one["latency"], one["baseline"]), "by_interval": by_interval}
            found[pair.kind.name].append({**kept, "seconds": one["facts"]["elapsed_s"], "stopped_by": one["facts"]["stopped_by"]})
        quiet = bench.quiet()
    rows = []
    for name, ones in [*found.items(), ("all", [one for kept in found.values() for one in kept])]:
        row: Json = {"kind": name, "comparisons": len(ones), "seconds": float(np.median([one["seconds"] for one in ones])) if ones else math.nan}
        for rule in ("by_selection", "by_interval"):
            says = [one[rule] for one in ones]
            row[rule] = {"faster": says.count("faster"), "slower": says.count("slower"), "false": share(len(says) - says.count("tie"), len(says))}
        rows.append(row)
    return {"rows": rows, "measurements": found, "quiet": quiet}


def table_a(part: Json) -> list[str]:
    lines = [
        "a. A model beside its own copy: false verdicts (aim: at most 5 %)",
        f"{'':10} {'':>10} {'seconds':>8}  {'by the choice':30} by the interval",
    ]
    for row in part["rows"]:
        said = [f"{row[rule]['faster']} + {row[rule]['slower']}: {percent(row[rule]['false'])}" for rule in ("by_selection", "by_interval")]
        lines.append(f"{row['kind']:10} {row['comparisons']:>4} pairs {row['seconds']:>8.2f}  {said[0]:30} {said[1]}")
    return [*lines, "   (called faster + called slower: share of both, 95 % limits)", quiet_line(part["quiet"])]


# b: short and long ----------------------------------------------------------------------------------------------------------


def part_b(sizes: Sizes, models: Sequence[Models], folder: Path, seed: int) -> Json:
    cpus = sorted(os.sched_getaffinity(0))
    conditions: list[tuple[str, int | None]] = [("quiet", None)]
    notes = []
    if len(cpus) > 1:
        conditions.append(("busy", cpus[0]))
        notes.append(f"measuring on CPU {cpus[-1]}, the busy loop (one of the others) on CPU {cpus[0]}; {siblings(cpus[-1], cpus[0])}")
    else:
        notes.append("with a busy neighbour: not measured, since there is one CPU only")
    rows, raw = [], []
    for name, neighbour in conditions:
        with contextlib.ExitStack() as stack:
            bench = stack.enter_context(measuring_bench(folder, cpu=cpus[-1]))
            if neighbour is not None:
                stack.enter_context(busy_loop(neighbour))
            for pair in models:
                short, long = short_and_long(sizes, bench, pair, f"b: {pair.kind.name}, {name}", seed)
                rows.append({**coverage(short, long), "kind": pair.kind.name, "neighbour": name, "quiet": bench.quiet()})
                raw.append({"kind": pair.kind.name, "neighbour": name, "short": plain(short), "long": plain(long)})
    return {"rows": rows, "measurements": raw, "notes": notes}


def short_and_long(sizes: Sizes, bench: Bench, pair: Models, what: str, seed: int) -> tuple[list[Json], list[Json]]:
    """Short measurements, and long ones spread evenly among them."""
    short: list[Json] = []
    long: list[Json] = []
    for n in range(sizes.short):
        while len(long) < sizes.long and len(long) * sizes.short <= n * sizes.long:
            tell(f"{what}: long {len(long) + 1} of {sizes.long}")
            long.append(bench.ratio(pair, pair.candidate, seed + 1000 + len(long), seconds=sizes.long_s, to_the_end=True))
        tell(f"{what}: short {n + 1} of {sizes.short}")
        short.append(bench.ratio(pair, pair.candidate, seed + n, seconds=sizes.short_s))
    return short, long


def reference(values: Sequence[float]) -> Interval:
    """Median over long measurements, with its own limits (sign test on one value a process)."""
    return median_interval(values) if len(values) > 1 else Interval.exactly(values[0])


def coverage(short: Sequence[Json], long: Sequence[Json]) -> Json:
    """Shares of short intervals that hold the reference, for the ratio and for the median latency.

    `alone`: the same for the ratio's intervals without what is added for the time between measurements; `moved`: how far the baseline did.
    """
    row: Json = {
        "seconds": float(np.median([one["facts"]["elapsed_s"] for one in short])),
        "ms": float(np.median([one["latency"].value for one in long])),
    }
    for name, attribute in (("ratio", "ratio"), ("p50", "interval")):
        truth = reference([getattr(one["latency"], attribute).value for one in long])
        intervals = [getattr(one["latency"], attribute) for one in short]
        row[name] = {
            "reference": truth.to_json(),
            "hold": share(sum(i.low <= truth.value <= i.high for i in intervals), len(intervals)),
            "meet": share(sum(i.low <= truth.high and i.high >= truth.low for i in intervals), len(intervals)),
            "half_width": half_width(intervals),
        }
    alone = [Interval.from_json(one["facts"]["measured_ratio"]) for one in short]
    truth = Interval.from_json(row["ratio"]["reference"])
    row["alone"] = {"hold": share(sum(i.low <= truth.value <= i.high for i in alone), len(alone)), "half_width": half_width(alone)}
    row["moved"] = short[-1]["facts"]["occasions"]["sd"]
    return row


def half_width(intervals: Sequence[Interval]) -> float:
    """Median of the half-widths, as shares of their values."""
    return float(np.median([(i.high - i.low) / 2 / i.value for i in intervals]))


def plain(ones: Sequence[Json]) -> list[Json]:
    """What is kept of each measurement."""
    return [
        {
            "ratio": one["latency"].ratio.to_json(), "ms": one["latency"].interval.to_json(), "seconds": one["facts"]["elapsed_s"],
            "session_pairs": one["facts"]["session_pairs"], "stopped_by": one["facts"]["stopped_by"],
            "alone": one["facts"]["measured_ratio"], "occasions": one["facts"]["occasions"],
        }
        for one in ones
    ]  # fmt: skip


def siblings(one: int, other: int) -> str:
    """Say whether two CPUs are threads of one core, which slows both, or can't be told."""
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{one}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return "whether they share a core can't be read"
    together: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        together |= set(range(int(first), int(last or first) + 1))
    return "they are threads of one core" if other in together else "they are cores of their own"


def table_b(part: Json) -> list[str]:
    lines = [
        "b. Short measurements: 95 % intervals that hold the long reference (aim: at least 95 %)",
        f"{'':8} {'core':6} {'p50':>9} {'seconds':>8}  {'of the ratio':25} {'± short':>8} {'± long':>7}   {'of the p50':25} {'others took':>11} "
        f"{'disturbed rounds':>18}",
    ]
    for row in part["rows"]:
        ratio, p50 = row["ratio"], row["p50"]
        own = (ratio["reference"]["high"] - ratio["reference"]["low"]) / 2 / ratio["reference"]["value"]
        quiet = row["quiet"]
        others = f"{quiet['others']['value']:.0%}" if quiet["others"] else "?"
        disturbed = f"{quiet['disturbed']:,} of {quiet['rounds']:,}" if quiet["rounds"] else "?"
        lines.append(
            f"{row['kind']:8} {row['neighbour']:6} {row['ms']:>6.3f} ms {row['seconds']:>8.2f}  {percent(ratio['hold']):25} "
            f"{ratio['half_width']:>8.2%} {own:>7.2%}   {percent(p50['hold']):25} {others:>11} {disturbed:>18}"
        )
    met = ", ".join(f"{r['kind']} {r['neighbour']} {r['ratio']['meet']['value']:.0%}" for r in part["rows"])
    alone = ", ".join(
        f"{r['kind']} {r['neighbour']} {r['alone']['hold']['value']:.0%} (± {r['alone']['half_width']:.1%}; the baseline moved by {r['moved']:.1%})"
        for r in part["rows"]
    )
    lines.append(f"   without what is added for the time between measurements, the ratio's intervals would hold it in: {alone}")
    return [*lines, f"   the ratio's interval meets the reference's own interval: {met}", *(f"   {note}" for note in part["notes"])]


# c: what a second buys ------------------------------------------------------------------------------------------------------


def plain_loop(model: Path, baseline: Path, data: Path, runs: int, batch: int) -> Json:
    """What a script does that times two models one after the other: a warm-up run, a loop, the mean."""
    import onnxruntime as ort

    rows = np.load(data)["x"][:batch]
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    began = time.perf_counter()
    taken = []
    for path in (baseline, model):
        run = ort.InferenceSession(str(path), options).run
        run(None, {"x": rows})
        times = np.empty(runs)
        for i in range(runs):
            at = time.perf_counter_ns()
            run(None, {"x": rows})
            times[i] = time.perf_counter_ns() - at
        taken.append(times)
    ratio = taken[1].mean() / taken[0].mean()
    # As if the runs were independent: the delta method on the logarithm.
    error = math.sqrt(sum(float(t.var(ddof=1)) / runs / float(t.mean()) ** 2 for t in taken))
    half = student_t_quantile(0.975, runs - 1) * error
    limits = Interval(float(ratio), float(ratio) * math.exp(-half), float(ratio) * math.exp(half))
    return {"ratio": limits.to_json(), "seconds": time.perf_counter() - began}


def in_a_script(runs: int, models: Models, number: int) -> Json:
    """A plain loop in a process of its own."""
    arguments = (models.candidate.path, models.baseline.path, models.data, runs, models.kind.batch)
    with lane(EP, exclusive=True):
        done = subprocess.run([sys.executable, __file__, "--plain-loop", *map(str, arguments)], capture_output=True, text=True, check=True)
    found: Json = json.loads(done.stdout)
    return {"ratio": Interval.from_json(found["ratio"]), "seconds": found["seconds"]}


def by_onnxruntime_test(runs: int, models: Models, number: int) -> Json:
    """The loop that ONNX Runtime's wheel brings: one average, its first run included; it states no interval."""
    averages = []
    for path in (models.baseline.path, models.candidate.path):
        command = [sys.executable, "-m", "onnxruntime.tools.onnxruntime_test", str(path), str(runs)]
        with lane(EP, exclusive=True):
            done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "ORT_INTRA_OP_NUM_THREADS": "1"})
        said = re.search(r"avg latency: ([\d.e+-]+) ms", done.stdout)
        if said is None:
            raise PartFailed(f"onnxruntime_test must print its average; it printed: {done.stdout[-300:]}")
        averages.append(float(said[1]))
    return {"ratio": Interval(averages[1] / averages[0], math.nan, math.nan), "seconds": sum(averages) * runs / 1e3}


def timing_programs() -> tuple[bool, list[str]]:
    """Say which of ONNX Runtime's own timing programs are here: whether `onnxruntime_test` is, and words about the rest."""
    names = metadata.packages_distributions().get("onnxruntime", [])
    wheels = ", ".join(f"{name} {metadata.version(name)}" for name in sorted(set(names)))
    held = [f for name in set(names) for f in metadata.files(name) or () if f.name.startswith("onnxruntime_perf_test")]
    found = next((str(f.locate()) for f in held), None) or shutil.which("onnxruntime_perf_test")
    notes = [
        f"onnxruntime_perf_test stands at {found}; it was not run"
        if found
        else f"onnxruntime_perf_test (C++): not in the wheel of {wheels}, nor on the PATH"
    ]
    here = importlib.util.find_spec("onnxruntime.tools.onnxruntime_test") is not None
    if not here:
        notes.append(f"onnxruntime_test: not in the wheel of {wheels} either")
    return here, notes


def part_c(sizes: Sizes, models: Sequence[Models], folder: Path, seed: int) -> Json:
    has_test, notes = timing_programs()
    rows, raw = [], []
    with measuring_bench(folder) as bench:

        def ours(limit: float, to_the_end: bool, pair: Models, number: int) -> Json:
            one = bench.ratio(pair, pair.candidate, seed + number, seconds=limit, to_the_end=to_the_end)
            return {"ratio": one["latency"].ratio, "seconds": one["facts"]["elapsed_s"]}

        methods: dict[str, Callable[[Models, int], Json]] = {f"plain loop, {runs} runs": partial(in_a_script, runs) for runs in PLAIN_RUNS}
        if has_test:
            methods[f"onnxruntime_test, {PLAIN_RUNS[-1]} runs"] = partial(by_onnxruntime_test, PLAIN_RUNS[-1])
        methods |= {f"autotune, {limit:g} s": partial(ours, limit, True) for limit in sizes.spent_s}
        methods[f"autotune, ± 0.5 % or {sizes.spent_s[-1]:g} s"] = partial(ours, sizes.spent_s[-1], False)
        for pair in models:
            kept: dict[str, list[Json]] = {name: [] for name in methods}
            long: list[float] = []
            for n in range(sizes.repeats):  # methods in turns, so that drift meets all of them
                tell(f"c: {pair.kind.name}, repeat {n + 1} of {sizes.repeats}")
                long.append(bench.ratio(pair, pair.candidate, seed + 2000 + n, seconds=sizes.long_s, to_the_end=True)["latency"].ratio.value)
                for name, method in methods.items():
                    kept[name].append(method(pair, n))
            truth = reference(long)
            rows += [{"kind": pair.kind.name, "method": name, **against(ones, truth)} for name, ones in kept.items()]
            raw.append({"kind": pair.kind.name, "reference": truth.to_json(), "measurements": {n: jsonable(ones) for n, ones in kept.items()}})
        quiet = bench.quiet()
    return {"rows": rows, "measurements": raw, "notes": notes, "quiet": quiet}


def against(ones: Sequence[Json], truth: Interval) -> Json:
    """Seconds, stated half-width, how many intervals hold the reference, and the true error: its median and its largest."""
    stated = [one["ratio"] for one in ones if math.isfinite(one["ratio"].low)]
    errors = [abs(one["ratio"].value / truth.value - 1) for one in ones]
    return {
        "seconds": float(np.median([one["seconds"] for one in ones])),
        "half_width": float(np.median([(i.high - i.low) / 2 / i.value for i in stated])) if stated else None,
        "hold": share(sum(i.low <= truth.value <= i.high for i in stated), len(stated)) if stated else None,
        "error": float(np.median(errors)), "largest_error": max(errors),
    }  # fmt: skip


def jsonable(ones: Sequence[Json]) -> list[Json]:
    return [{**one, "ratio": one["ratio"].to_json()} for one in ones]


def table_c(part: Json) -> list[str]:
    lines = [
        "c. What a second buys: the ratio of two models, and its error against the long reference",
        f"{'':8} {'':28} {'seconds':>8} {'stated ±':>9}  {'holds the reference':25} {'error':>7} {'largest':>8}",
    ]
    for row in part["rows"]:
        stated = "none" if row["half_width"] is None else f"{row['half_width']:.2%}"
        held = "-" if row["hold"] is None else percent(row["hold"])
        lines.append(
            f"{row['kind']:8} {row['method']:28} {row['seconds']:>8.2f} {stated:>9}  {held:25} {row['error']:>7.2%} {row['largest_error']:>8.2%}"
        )
    return [*lines, *(f"   {note}" for note in part["notes"]), quiet_line(part["quiet"])]


# d: a table whose truth is known --------------------------------------------------------------------------------------------

ROWS, HOLDOUT, FEW_ROWS = 4000, 1000, 300  # evaluation rows, those of them held out, and what the cheap plain front looks at
POPULATION = 40_000  # the truth of a score is its mean over these; the evaluation rows are drawn from them
SESSION_SPREAD, RUN_SPREAD, DRIFT = 0.01, 0.03, 0.03  # of one session to the next; of one run; of the machine over seconds
DISTURBED, DISTURBANCE = 0.02, 1.5  # this share of runs takes up to so much longer
OPENING_NS = 20_000_000
NOISE_RUNS = 1 << 16
BASELINE_NS = 1_000_000
SEARCH_ALONE = "autotune, search alone"


@dataclass(frozen=True)
class Truth:
    """A made-up table: models in rows, the baseline first. `right` holds population answers, shape (models, POPULATION)."""

    ratio: NDArray[np.float64]
    right: NDArray[np.bool_]
    rows: NDArray[np.int64]  # the evaluation rows
    limit: Constraint

    def change(self, rows: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """Differences from the baseline's accuracy, over some rows or over the population."""
        accuracy = (self.right if rows is None else self.right[:, rows]).mean(axis=1)
        change: NDArray[np.float64] = accuracy - accuracy[0]
        return change

    def losses(self, rows: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """In units of the tolerances, shape (models, 2): log latency ratio, and loss of score."""
        return np.stack([np.log(self.ratio) / math.log1p(EPS_LATENCY), -self.change(rows) / EPS_SCORE], axis=1)


def make_truth(models: int, rng: np.random.Generator) -> Truth:
    """Families of models that differ much, and variants within each that differ little, as quantization settings do.

    A row has a margin; a model is right where margin, minus its own shift, plus its own noise, is above 0. So bolder models
    lose answers and gain a few, mostly on the same hard rows: on most models some 1 % of the answers differ from the baseline's.
    """
    families = max(models // 6, 2)
    bold = rng.uniform(0, 1, families)[rng.integers(0, families, models)]
    ratio = np.exp(-1.1 * bold + 0.12 * rng.normal(size=families)[rng.integers(0, families, models)] + 0.01 * rng.normal(size=models))
    shift = 0.12 * bold**2 * np.exp(0.5 * rng.normal(size=models))
    spread = 0.05 * np.exp(1.3 * bold + 0.4 * rng.normal(size=models))
    margin = rng.normal(1.3, 1, POPULATION)
    right = margin - shift[:, None] + spread[:, None] * rng.normal(size=(models, POPULATION)) > 0
    ratio = np.concatenate([[1.0], ratio])
    limit = parse_constraint("accuracy >= baseline - 1.0pt", metrics={"accuracy": "share"})
    return Truth(ratio, np.concatenate([(margin > 0)[None], right]), rng.permutation(POPULATION)[:ROWS], limit)


@dataclass
class Machine:
    """Time that only counts: runs take what the table says, times a session's factor, the machine's drift and noise of each run."""

    rng: np.random.Generator
    now_ns: int = 0
    noise: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        disturbed = self.rng.random(NOISE_RUNS) < DISTURBED
        noise = np.exp(RUN_SPREAD * self.rng.normal(size=NOISE_RUNS)) * (1 + disturbed * self.rng.uniform(0, DISTURBANCE, NOISE_RUNS))
        self.noise = noise.tolist()

    def clock_ns(self) -> int:
        return self.now_ns

    def open(self, latency_ns: float) -> RunOnce:
        self.now_ns += OPENING_NS
        takes = latency_ns * math.exp(SESSION_SPREAD * self.rng.normal())
        at = int(self.rng.integers(NOISE_RUNS))
        noise = self.noise

        def run_once() -> None:
            nonlocal at
            at = (at + 1) % NOISE_RUNS
            self.now_ns += int(takes * noise[at] * (1 + DRIFT * math.sin(self.now_ns / 7e8)))

        return run_once


@dataclass
class Replay:
    """The product's procedure on a made-up table: what it would ask a machine and a data set is asked here, and counted.

    The rows held out come first in `truth.rows`. `max_time_s` is the time limit of a trial; those at the end are longer as they are by default.
    """

    truth: Truth
    machine: Machine
    max_time_s: float
    runs: int = 0
    rounds: int = 0
    rows: int = 0
    again: int = 0  # turns at the end
    early: dict[str, int] = field(default_factory=dict)  # trials that ended early, by rule
    baseline: dict[str, MetricValue] = field(default_factory=dict)
    race: ProportionRace | BoundedRace | None = None
    boxes: FrontBoxes | None = None

    def samples(self, model: int, seconds: float, seed: int, limits: Sequence[StopAbove] = ()) -> PairedSamples:
        """Time a model beside the baseline."""
        machine, ratio = self.machine, float(self.truth.ratio[model])
        found = measure_paired(
            lambda: machine.open(BASELINE_NS * ratio), lambda: machine.open(BASELINE_NS), LatencyProtocol(max_time_ns=int(seconds * 1e9)),
            seed=seed, limits=limits, clock_ns=machine.clock_ns,
        )  # fmt: skip
        self.runs += found.candidate_ns.size + found.baseline_ns.size
        self.rounds += found.rounds
        return found

    def score(self, model: int, rows: NDArray[np.int64]) -> MetricValue:
        own, base = (Features((self.truth.right[m][rows].astype(np.float32),)) for m in (model, 0))
        return compare_features(get_metric("accuracy"), own, None if model == 0 else base, seed=0)

    # ---- the search

    def searched(self, seed: int) -> list[TrialRecord]:
        """The untouched model and a trial of each of the others, in their order."""
        rows, truth = self.truth.rows[HOLDOUT:], self.truth
        samples = self.samples(0, self.max_time_s, seed)
        self.baseline = {"latency": summarize(samples, itself=True)["latency"], "accuracy": self.score(0, rows)}
        self.race = race_for(get_metric("accuracy"), truth.right[0][rows].astype(np.float64))
        self.boxes = FrontBoxes(
            OBJECTIVES, self.baseline, "accuracy", higher_is_better=True, eps_latency=EPS_LATENCY, eps_score=EPS_SCORE,
            family=(LOOKS + 1) * len(truth.ratio),
        )  # fmt: skip
        untouched = TrialRecord(0, {"pass": None}, Status.OK, UNTOUCHED, metrics=self.baseline, unchanged="nothing was done to the model")
        records = [judge_record(untouched, (truth.limit,), self.baseline)]
        for model in range(1, len(truth.ratio)):
            records.append(self._trial(model, records, seed))
        return records

    def _trial(self, model: int, before: Sequence[TrialRecord], seed: int) -> TrialRecord:
        truth, baseline = self.truth, self.baseline
        assert self.boxes is not None
        front = self.boxes.of(before)
        best = best_score(get_metric("accuracy").bounds, baseline["accuracy"], higher_is_better=True)
        limits = [StopAbove(**limit) for limit in front_limits(front, {}, baseline, "accuracy", best)]
        samples = self.samples(model, self.max_time_s, seed + model, limits)
        latency = {"latency": summarize(samples)["latency"]}
        rules = race_rules(latency, front, (truth.limit,), baseline, "accuracy", higher_is_better=True)
        rows = truth.rows[HOLDOUT:]
        record = TrialRecord(model, {"pass": f"P{model}"}, Status.OK)
        stop, seen = self._raced(truth.right[model][rows].astype(np.float64), rules)
        self.rows += seen
        if stop is not None:
            record = ended_early(record, {"rule": stop.rule, "words": stop.words, "rows": seen, "of": len(rows)})
        elif samples.stopped_by in FRONT_RULES:
            record = ended_early(record, {"rule": samples.stopped_by, "words": samples.why, "seconds": samples.elapsed_ns / 1e9})
        for rung in record.rungs:
            self.early[str(rung["rule"])] = self.early.get(str(rung["rule"]), 0) + 1
        score = stop.metric if stop is not None else self.score(model, rows)
        return judge_record(replace(record, metrics={**latency, "accuracy": score}), (truth.limit,), baseline)

    def _raced(self, scores: NDArray[np.float64], rules: Rules) -> tuple[Stop | None, int]:
        """Look at the scores as the rows come in: why the rest was not needed, and how many were seen."""
        assert self.race is not None
        for size in look_sizes(len(scores)):
            stop = look(self.race, scores[:size], rules, self.baseline["accuracy"])
            if stop is not None:
                return stop, size
        return None, len(scores)

    # ---- the end

    def last_word(self, records: list[TrialRecord], seed: int) -> LastChoice:
        """Settle the undecided, time again whoever's place is open, and choose until the first choice has fresh figures and holds."""
        measure = MeasureSection()
        longer, budget = (seconds(t) / seconds(measure.max_time) * self.max_time_s for t in (measure.final_time, measure.final_budget))
        rows = self.truth.rows
        records = settle_undecided(
            records, self.select, self._on_all_rows, metric="accuracy", limits=[self.truth.limit.text], rows=len(rows) - HOLDOUT,
            eps_latency=EPS_LATENCY,
        )  # fmt: skip
        taken: dict[str, list[Mapping[str, NDArray[Any]]]] = {}

        def take_turn(records: list[TrialRecord], record: TrialRecord, look: int, time_s: float) -> tuple[list[TrialRecord], float]:
            samples = self.samples(record.number, time_s, seed + 100_000 * look + record.number)
            self.again += 1
            turn = {"candidate_ns": samples.candidate_ns, "baseline_ns": samples.baseline_ns, "session": samples.session, "used": samples.used}
            taken.setdefault(record.id, []).append(turn)
            fresh = self._judged(record, latency=pooled_turns(taken[record.id]))
            return [fresh if r.id == record.id else r for r in records], samples.elapsed_ns / 1e9

        records, _ = resolve_front(
            records, self.select, take_turn, each_s=longer, budget_s=budget, seed=seed, clock=lambda: self.machine.now_ns / 1e9
        )

        def afresh(record: TrialRecord) -> tuple[TrialRecord, MetricValue | None, str]:
            base = self.score(0, rows[:HOLDOUT])
            if record.unchanged:
                return record, base, ""
            self.rows += HOLDOUT
            held_out = self.score(record.number, rows[:HOLDOUT])
            times = summarize(self.samples(record.number, longer, seed + 1_000_000 + record.number))["latency"]
            final = self._judged(record, latency=times, accuracy=self.score(record.number, rows))
            why = why_it_falls(final, held_out, base, (self.truth.limit,))
            return replace(final, status=Status.INFEASIBLE) if why and final.status is Status.OK else final, held_out, why

        return choose_afresh(records, self.select, afresh)

    def select(self, records: list[TrialRecord]) -> Selection:
        return select(records, OBJECTIVES, (self.truth.limit,), baseline=self.baseline, score="accuracy", looks=LOOKS + 1)

    def _judged(self, record: TrialRecord, **metrics: MetricValue) -> TrialRecord:
        return judge_record(replace(record, metrics={**record.metrics, **metrics}), (self.truth.limit,), self.baseline)

    def _on_all_rows(self, record: TrialRecord) -> TrialRecord:
        self.rows += HOLDOUT
        return self._judged(record, accuracy=self.score(record.number, self.truth.rows))


def chosen_by_autotune(truth: Truth, machine: Machine, max_time_s: float, seed: int) -> tuple[Json, Json]:
    """What stands after the search alone, with the winner as it stands there; and what the product ends with."""
    replay = Replay(truth, machine, max_time_s)
    records = replay.searched(seed)
    front = replay.select(records)
    assert front.best is not None  # the untouched model meets its own limit
    best = next(r for r in records if r.id == front.best)
    searched = _as_found(truth, replay, records, front, best, best.metrics["accuracy"])
    last = replay.last_word(records, seed)
    assert last.final is not None
    return searched, _as_found(truth, replay, last.records, last.selection, last.final, last.holdout)


def _as_found(
    truth: Truth, replay: Replay, records: Sequence[TrialRecord], front: Selection, best: TrialRecord, reported: MetricValue | None
) -> Json:
    number, models = {r.id: r.number for r in records}, len(truth.ratio) - 1
    change = {r.number: r.metrics["accuracy"].delta for r in records if r.metrics.get("accuracy")}
    members, true_change = [number[i] for i in front.front], truth.change()
    assert reported is not None
    return {
        "front": members, "with_ties": sorted(number[i] for group in front.groups.values() for i in group),
        "certain": [number[i] for i in front.front if front.membership[i].state is State.CERTAIN],
        "not_resolved": [number[i] for i in front.not_resolved],
        "runs": replay.runs / models, "rounds": replay.rounds / models, "rows": replay.rows / models, "turns": replay.again,
        "early": dict(replay.early),
        "optimism": [found.value - float(true_change[m]) for m in members if (found := change[m]) is not None],
        "delivered": best.number, "reported": reported.delta.value if reported.delta else 0.0,
    }  # fmt: skip


def chosen_by_plain_loops(truth: Truth, machine: Machine, rows: NDArray[np.int64], runs: int) -> Json:
    """One loop and one score for each model, the front of those within the limit by these numbers as they stand, and the fastest of them."""
    latencies = []
    for ratio in truth.ratio:
        run_once = machine.open(BASELINE_NS * float(ratio))
        took = []
        for _ in range(runs):
            at = machine.now_ns
            run_once()
            took.append(machine.now_ns - at)
        latencies.append(float(np.median(took)))  # kinder to the loop than the mean, which is common
    change, true_change = truth.change(rows), truth.change()
    within = np.flatnonzero(change >= truth.limit.limit - 1e-12)
    members = within[pareto_front(np.stack([latencies, -change], axis=1)[within])].tolist()
    delivered = int(within[np.argmin(np.asarray(latencies)[within])])
    return {
        "front": members, "with_ties": members, "certain": [], "not_resolved": [], "runs": float(runs), "rounds": 1.0, "rows": float(len(rows)),
        "turns": 0, "early": {},
        "optimism": [float(change[m] - true_change[m]) for m in members], "delivered": delivered, "reported": float(change[delivered]),
    }  # fmt: skip


def held_against(
    losses: NDArray[np.float64], shown: Sequence[int], named: Sequence[int], *, room: NDArray[np.float64] | None = None, certain: Sequence[int] = ()
) -> Json:
    """Count what is false on a front, by true losses and by the true room under the limit, in units of the tolerances: 1 is called a difference.

    False: another model that truly meets the limit is no worse in both and better by more than the tolerance in one; or it breaks the limit by more
    than the tolerance. Missed: on the true front, and nobody reported is as good but for the tolerance. Both are counted for what is shown
    first, and with the ties that are named beside it; false ones for what is called certain too.
    """
    room = np.zeros(len(losses)) if room is None else room
    meets = room >= 0
    true_front = np.flatnonzero(meets)[pareto_front(losses[meets])].tolist()
    broken = {m for m in (*shown, *named) if room[m] < -1}
    beaten = {m for m in (*shown, *named) if np.any(meets & np.all(losses <= losses[m], axis=1) & np.any(losses < losses[m] - 1, axis=1))}
    wrong = broken | beaten

    def missed_by(members: Sequence[int]) -> int:
        return sum(not np.any(np.all(losses[members] <= losses[m] + 1, axis=1)) for m in true_front)

    return {
        "members": len(shown), "wrong": len(wrong & set(shown)), "broken": len(broken & set(shown)), "named": len(named),
        "wrong_named": len(wrong & set(named)), "certain": len(certain), "wrong_certain": len(wrong & set(certain)),
        "true_members": len(true_front), "missed": missed_by(shown), "missed_named": missed_by(named),
    }  # fmt: skip


def judged(truth: Truth, found: Json) -> Json:
    """Hold a front and a choice against the truth: scores over the population, and over all evaluation rows."""
    feasible = np.flatnonzero(truth.change() >= truth.limit.limit)
    true_change = float(truth.change()[found["delivered"]])
    against_truth = {
        by: held_against(
            truth.losses(rows), found["front"], found["with_ties"], certain=found["certain"],
            room=(truth.change(rows) - truth.limit.limit) / EPS_SCORE,
        )
        for by, rows in (("population", None), ("rows", truth.rows))
    }  # fmt: skip
    return {
        **against_truth, "optimism": float(np.mean(found["optimism"])), "optimism_delivered": found["reported"] - true_change,
        "true_change": true_change, "breaks_limit": true_change < truth.limit.limit,
        "time_over_best": float(truth.ratio[found["delivered"]] / truth.ratio[feasible].min()),
        "timed_runs": found["runs"], "rounds": found["rounds"], "scored_rows": found["rows"], "turns": float(found["turns"]),
        "members": float(len(found["front"])), "not_resolved": float(len(found["not_resolved"])), "early": found["early"],
    }  # fmt: skip


def part_d(sizes: Sizes, seed: int) -> Json:
    plain_ways = ((FEW_ROWS, PLAIN_RUNS[0]), (ROWS, PLAIN_RUNS[0]), (ROWS, PLAIN_RUNS[1]))
    kept: dict[str, list[Json]] = {name: [] for name in (*(f"{runs} runs, {rows:,} rows" for rows, runs in plain_ways), SEARCH_ALONE, "autotune")}
    for table in range(sizes.tables):
        tell(f"d: table {table + 1} of {sizes.tables}")
        rng = np.random.default_rng([seed, table])
        truth, machine = make_truth(sizes.models, rng), Machine(rng)
        for rows, runs in plain_ways:
            found = chosen_by_plain_loops(truth, machine, truth.rows[:rows], runs)
            kept[f"{runs} runs, {rows:,} rows"].append(judged(truth, found))
        searched, ended = chosen_by_autotune(truth, machine, sizes.replay_s, 1_000_000 * table)
        kept[SEARCH_ALONE].append(judged(truth, searched))
        kept["autotune"].append(judged(truth, ended))
    return {"rows": [summed(name, ones) for name, ones in kept.items()], "replays": kept}


FALSE_AND_MISSED = {  # what, of what
    "false": ("wrong", "members"), "broken": ("broken", "members"), "false_named": ("wrong_named", "named"),
    "false_certain": ("wrong_certain", "certain"), "missed": ("missed", "true_members"), "missed_named": ("missed_named", "true_members"),
}  # fmt: skip


def summed(name: str, ones: Sequence[Json]) -> Json:
    """One way's figures: shares of all members together and their median over the tables; of the rest the median over tables, with its limits."""
    row: Json = {"way": name, "tables": len(ones), "breaks_limit": share(sum(one["breaks_limit"] for one in ones), len(ones)), "early": {}}
    for by in ("population", "rows"):
        row[by] = {}
        for key, (count, of) in FALSE_AND_MISSED.items():
            by_table = [one[by][count] / one[by][of] for one in ones if one[by][of]]
            row[by][key] = {
                **share(sum(one[by][count] for one in ones), sum(one[by][of] for one in ones)),
                "median_table": float(np.median(by_table)) if by_table else None,
            }
    for key in (
        "optimism", "optimism_delivered", "true_change", "time_over_best", "timed_runs", "rounds", "scored_rows", "turns", "members", "not_resolved",
    ):  # fmt: skip
        row[key] = reference([one[key] for one in ones]).to_json()
    for one in ones:
        for rule, count in one["early"].items():
            row["early"][rule] = row["early"].get(rule, 0) + count
    return row


def table_d(part: Json) -> list[str]:
    rows = part["rows"]

    def points(interval: Json) -> str:
        return f"{100 * interval['value']:+.2f} ({100 * interval['low']:+.2f} to {100 * interval['high']:+.2f})"

    def in_median_table(found: Json) -> str:
        return "none" if found["median_table"] is None else f"{found['median_table']:.0%}"

    lines: list[tuple[str, list[str]]] = []
    for by, words in (
        ("population", "the true scores"),
        ("rows", f"scores over all {ROWS:,} evaluation rows, of which the product searches by {ROWS - HOLDOUT:,}"),
    ):
        lines.append((f"the front, judged by {words}", []))
        lines.append(("  false members", [percent(r[by]["false"]) for r in rows]))
        lines.append(("    in the median table", [in_median_table(r[by]["false"]) for r in rows]))
        lines.append(("    of them for breaking the limit", [f"{r[by]['broken']['count']} of {r[by]['false']['count']}" for r in rows]))
        lines.append(("    among those called certain", [percent(r[by]["false_certain"]) for r in rows]))
        lines.append(("    ties included", [percent(r[by]["false_named"]) for r in rows]))
        lines.append(("  true members missed", [percent(r[by]["missed"]) for r in rows]))
        lines.append(("    in the median table", [in_median_table(r[by]["missed"]) for r in rows]))
        lines.append(("    by the ties as well", [percent(r[by]["missed_named"]) for r in rows]))
    lines += [
        ("medians over tables", []),
        ("  members of the front", [f"{r['members']['value']:.3g}" for r in rows]),
        ("  not resolved", [f"{r['not_resolved']['value']:.3g}" for r in rows]),
        ("  score reported of the front, pt too high", [points(r["optimism"]) for r in rows]),
        ("  the delivered: score reported, pt too high", [points(r["optimism_delivered"]) for r in rows]),
        ("    true change of its score, pt", [points(r["true_change"]) for r in rows]),
        ("    its time over the best possible", [f"{r['time_over_best']['value']:.3f}" for r in rows]),
        ("    truly breaks its limit of 1 pt", [percent(r["breaks_limit"]) for r in rows]),
        ("  timed runs a model, the baseline's included", [f"{r['timed_runs']['value']:,.0f}" for r in rows]),
        ("  rounds a model", [f"{r['rounds']['value']:,.1f}" for r in rows]),
        ("  turns at the end", [f"{r['turns']['value']:,.0f}" for r in rows]),
        ("  evaluation rows a model", [f"{r['scored_rows']['value']:,.0f}" for r in rows]),
    ]
    rules = ", ".join(f"{rule}: {count:,}" for rule, count in rows[-1]["early"].items()) or "none"
    return [
        f"d. {rows[0]['tables']} made-up tables of known truth; shares are of the members of all tables together",
        f"{'':45}" + "".join(f"  {r['way']:>24}" for r in rows),
        *((f"{name:45}" + "".join(f"  {cell:>24}" for cell in cells)).rstrip() for name, cells in lines),
        f"   trials that ended early, by rule: {rules}",
    ]


# The run --------------------------------------------------------------------------------------------------------------------


def share(count: int, of: int) -> Json:
    """A share with Wilson's limits; nothing known of none."""
    found = wilson_interval(count, of) if of else Interval(math.nan, 0.0, 1.0)
    return {"count": count, "of": of, **found.to_json()}


def percent(found: Json) -> str:
    if not found["of"]:
        return "none"
    return f"{found['value']:.1%} ({found['low']:.1%} to {found['high']:.1%})"


def quiet_line(quiet: Json) -> str:
    found = quiet["others"]
    words = ["what others took of the machine can't be read here"]
    if found is not None:
        words = [f"others took {found['value']:.0%} of the machine (median; {found['low']:.0%} to {found['high']:.0%})"]
    if quiet["rounds"]:
        words.append(
            f"{quiet['disturbed']:,} of {quiet['rounds']:,} rounds were disturbed and repeated, "
            f"in {quiet['measurements_disturbed']} of {quiet['measurements']} measurements"
        )
    if quiet["failed"]:
        words.append(f"{len(quiet['failed'])} measurements failed and were made again: {quiet['failed'][0]}")
    return f"   {'; '.join(words)}"


@dataclass
class Teller:
    """Says on standard error how far the run is: in place on a terminal, elsewhere a line now and then."""

    began: float = field(default_factory=time.monotonic)
    last: float = -math.inf

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if sys.stderr.isatty():
            print(f"\r{now - self.began:5.0f} s  {line:60}" if line else f"\r{'':70}\r", end="", file=sys.stderr, flush=True)
        elif line and now - self.last >= TOLD_EVERY_S:
            self.last = now
            print(f"{now - self.began:5.0f} s  {line}", file=sys.stderr, flush=True)


tell = Teller()


def run_parts(parts: str, sizes: Sizes, out: Path, *, seed: int = 0) -> Json:
    """Run the parts in order; print each one's table and write all that is known so far as JSON after each.

    A part that fails is on record with what it said, and the next one begins.
    """
    content: Json = {"surroundings": surroundings().to_json(), "seed": seed, "sizes": asdict(sizes), "parts": {}}
    measured = {"a": (part_a, table_a), "b": (part_b, table_b), "c": (part_c, table_c)}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="measurement-") as name:
        folder = Path(name)
        models = [make_models(kind, folder / str(i)) for i, kind in enumerate(sizes.kinds)] if set(parts) & set(measured) else []
        for part in parts:
            began = time.monotonic()
            try:
                if part in measured:
                    found, table = measured[part][0](sizes, models, folder, seed), measured[part][1]
                else:
                    found, table = part_d(sizes, seed), table_d
                lines = table(found)
            except Exception as error:
                traceback.print_exc()
                found = {"failed": f"{type(error).__name__}: {error}"}
                lines = [f"{part}. failed: {found['failed']}"]
            found["seconds"] = time.monotonic() - began
            content["parts"][part] = found
            tell("")
            print("\n".join([*lines, f"   ({found['seconds']:.0f} s)", ""]), flush=True)
            out.write_text(dump_json(content))
    return content


def parts_named(text: str) -> str:
    parts = "".join(text.replace(",", " ").split())
    if not parts or set(parts) - set(PARTS) or len(set(parts)) < len(parts):
        raise argparse.ArgumentTypeError(f"parts must be some of {', '.join(PARTS)}; got {text!r}")
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=parts_named, default=PARTS, help="which of a, b, c and d to run, such as a,c")
    parser.add_argument("--quick", action="store_true", help="a minute's run, to see the form")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("runs/measurement.json"), help="where the figures are written")
    parser.add_argument("--plain-loop", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain_loop:
        model, baseline, data, runs, batch = options.plain_loop
        print(json.dumps(plain_loop(Path(model), Path(baseline), Path(data), int(runs), int(batch))))
        return
    content = run_parts(options.parts, QUICK if options.quick else Sizes(), options.json, seed=options.seed)
    if any("failed" in part for part in content["parts"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
