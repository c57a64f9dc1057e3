"""Are the numbers true? Four trials of the measuring itself, on models made here, in one run: tables, and everything as JSON.

    python benchmarks/comparisons/measurement.py [--quick] [--parts a,b,c,d] [--seed 0] [--json runs/measurement.json]

a. A model beside a byte-identical copy under another name: how often is one called faster or slower, by the rule of the choice and by an
   interval that leaves out 1? At most 5 % is the aim.
b. Short measurements beside a long reference: how many of their 95 % intervals hold it? At three run times, measuring on one core with the
   other core quiet, and with a busy loop on it. The reference is the median of long measurements spread evenly among the short ones, each
   in a process of its own, so that a slow drift of the machine meets both.
c. Width of the interval by seconds spent, beside plain loops of 20 and 200 runs and ONNX Runtime's own test program. A plain loop
   states no interval, so it gets the one that its reader would compute: Student's t over its runs, as if they were independent.
d. A made-up table of models whose truth is known: who is on the front falsely, who is missed, how optimistic is the score that
   is reported, and how many runs and rows that took, beside a front of one plain loop each. A clock that only counts stands in for the
   machine; measuring, comparing and choosing are the product's own code.

Shares are printed with Wilson's 95 % limits: a hundred trials can't tell 5 % from 10 %. Let nothing else run meanwhile: each table says how
much of the machine others took. About 20 minutes on 2 cores; --quick takes about one and shows the form, not the figures.
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
from autotune.benchmarks.latency import LatencyProtocol, RunOnce, measure_paired, summarize, summarize_baseline
from autotune.benchmarks.metrics import Features, get_metric
from autotune.benchmarks.statistics import mean_interval, median_interval, student_t_quantile, wilson_interval
from autotune.constraints import Constraint, Verdict, judge_all, parse_constraint
from autotune.digest import dump_json
from autotune.model import ONNXModelHandler, ingest_onnx
from autotune.pareto import pareto_front
from autotune.records import Interval, MetricValue, Status, TrialRecord
from autotune.selection import UNTOUCHED, Objective, select
from autotune.session import SessionSettings
from autotune.stages import StageLimits, StageRunner
from autotune.target import surroundings

Json = dict[str, Any]
PARTS = "abcd"
EP = "CPUExecutionProvider"
ONE_THREAD = SessionSettings(intra_op_num_threads=1)
OBJECTIVES = (Objective("latency"), Objective("accuracy", minimize=False))
EPS_LATENCY, EPS_SCORE = 0.03, 0.003  # the tolerances of the choice
PLAIN_RUNS = (20, 200)


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
    alike_s: float = 1.2
    short: int = 100  # b: for each kind and neighbour
    short_s: float = 1.0
    long: int = 10
    long_s: float = 2.0
    repeats: int = 6  # c: of each method
    spent_s: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    tables: int = 40  # d
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


class Bench:
    """Runs the engine's own latency stage, each time in a fresh child process and alone on the lane, and keeps what it said."""

    def __init__(self, folder: Path, runner: StageRunner) -> None:
        self.folder, self.runner = folder, runner
        self.foreign: list[float] = []  # share of the machine that others took, one a measurement

    def ratio(self, models: Models, candidate: ONNXModelHandler, seed: int, *, seconds: float, to_the_end: bool = False) -> Json:
        """Time a candidate beside the baseline. `to_the_end` uses up the seconds, whatever the width of the interval."""
        protocol: Json = {"max_time_ns": int(seconds * 1e9)}
        if to_the_end:
            protocol |= {"ratio_width": 0.0, "max_rounds": 1_000_000}
        where = self.folder / "measurement"
        kind = models.kind
        args = {
            "model": candidate.to_json(), "baseline": models.baseline.to_json(), "data": str(models.data), "rows": list(range(2 * kind.batch)),
            "batch_size": kind.batch, "protocol": protocol, "seed": seed, "out": str(where),
        }  # fmt: skip
        with lane(EP, exclusive=True):
            outcome = self.runner.run("autotune.benchmarks.stages:latency", args, folder=where, limits=StageLimits(60 + 10 * seconds))
        shutil.rmtree(where, ignore_errors=True)
        if outcome.value is None or outcome.value["verdict"] != "ok":
            said = outcome.value["message"] if outcome.value else outcome.message
            raise SystemExit(f"measurement: the latency stage must end well; it ended with: {said}")
        if outcome.value.get("foreign_load") is not None:
            self.foreign.append(outcome.value["foreign_load"])
        latency = MetricValue.from_json(outcome.value["metrics"]["latency"])
        return {"latency": latency, "baseline": MetricValue.from_json(outcome.value["baseline_metrics"]["latency"]), "facts": outcome.value}

    def taken_by_others(self) -> Json | None:
        """Median share of the machine that went to others since the last question, with the smallest and the largest."""
        seen, self.foreign = self.foreign, []
        return Interval(float(np.median(seen)), min(seen), max(seen)).to_json() if seen else None


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
        others = bench.taken_by_others()
    rows = []
    for name, ones in [*found.items(), ("all", [one for kept in found.values() for one in kept])]:
        row: Json = {"kind": name, "comparisons": len(ones), "seconds": float(np.median([one["seconds"] for one in ones])) if ones else math.nan}
        for rule in ("by_selection", "by_interval"):
            says = [one[rule] for one in ones]
            row[rule] = {"faster": says.count("faster"), "slower": says.count("slower"), "false": share(len(says) - says.count("tie"), len(says))}
        rows.append(row)
    return {"rows": rows, "measurements": found, "taken_by_others": others}


def table_a(part: Json) -> list[str]:
    lines = [
        "a. A model beside its own copy: false verdicts (aim: at most 5 %)",
        f"{'':10} {'':>10} {'seconds':>8}  {'by the choice':30} by the interval",
    ]
    for row in part["rows"]:
        said = [f"{row[rule]['faster']} + {row[rule]['slower']}: {percent(row[rule]['false'])}" for rule in ("by_selection", "by_interval")]
        lines.append(f"{row['kind']:10} {row['comparisons']:>4} pairs {row['seconds']:>8.2f}  {said[0]:30} {said[1]}")
    return [*lines, "   (called faster + called slower: share of both, 95 % limits)", others_line(part["taken_by_others"])]


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
                others = bench.taken_by_others()
                rows.append({**coverage(short, long), "kind": pair.kind.name, "neighbour": name, "taken_by_others": others})
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
    """Shares of short intervals that hold the reference, for the ratio and for the median latency."""
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
            "half_width": float(np.median([(i.high - i.low) / 2 / i.value for i in intervals])),
        }
    return row


def plain(ones: Sequence[Json]) -> list[Json]:
    """What is kept of each measurement."""
    return [
        {
            "ratio": one["latency"].ratio.to_json(), "ms": one["latency"].interval.to_json(), "seconds": one["facts"]["elapsed_s"],
            "session_pairs": one["facts"]["session_pairs"], "stopped_by": one["facts"]["stopped_by"],
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
        f"{'':8} {'core':6} {'p50':>9} {'seconds':>8}  {'of the ratio':25} {'± short':>8} {'± long':>7}   {'of the p50':25} {'others took':>11}",
    ]
    for row in part["rows"]:
        ratio, p50 = row["ratio"], row["p50"]
        own = (ratio["reference"]["high"] - ratio["reference"]["low"]) / 2 / ratio["reference"]["value"]
        others = f"{row['taken_by_others']['value']:.0%}" if row["taken_by_others"] else "?"
        lines.append(
            f"{row['kind']:8} {row['neighbour']:6} {row['ms']:>6.3f} ms {row['seconds']:>8.2f}  {percent(ratio['hold']):25} "
            f"{ratio['half_width']:>8.2%} {own:>7.2%}   {percent(p50['hold']):25} {others:>11}"
        )
    met = ", ".join(f"{r['kind']} {r['neighbour']} {r['ratio']['meet']['value']:.0%}" for r in part["rows"])
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
            raise SystemExit(f"measurement: onnxruntime_test must print its average; it printed: {done.stdout[-300:]}")
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
        others = bench.taken_by_others()
    return {"rows": rows, "measurements": raw, "notes": notes, "taken_by_others": others}


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
    return [*lines, *(f"   {note}" for note in part["notes"]), others_line(part["taken_by_others"])]


# d: a table whose truth is known --------------------------------------------------------------------------------------------

ROWS, HOLDOUT, FEW_ROWS = 4000, 1000, 300  # evaluation rows, those of them held out, and what the cheap plain front looks at
POPULATION = 40_000  # the truth of a score is its mean over these; the evaluation rows are drawn from them
SESSION_SPREAD, RUN_SPREAD, DRIFT = 0.01, 0.03, 0.03  # of one session to the next; of one run; of the machine over seconds
DISTURBED, DISTURBANCE = 0.02, 1.5  # this share of runs takes up to so much longer
OPENING_NS = 20_000_000
NOISE_RUNS = 1 << 16
BASELINE_NS = 1_000_000
MOST_FINALISTS = 4


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
    """The product's measuring, comparing and choosing on a made-up table; counts what it used."""

    truth: Truth
    machine: Machine
    max_time_s: float
    runs: int = 0
    rows: int = 0

    def latency(self, model: int, seconds: float, seed: int) -> tuple[MetricValue, MetricValue]:
        """Latency of a model beside the baseline, and the baseline's in the same rounds."""
        machine, ratio = self.machine, float(self.truth.ratio[model])
        samples = measure_paired(
            lambda: machine.open(BASELINE_NS * ratio), lambda: machine.open(BASELINE_NS), LatencyProtocol(max_time_ns=int(seconds * 1e9)),
            seed=seed, clock_ns=machine.clock_ns,
        )  # fmt: skip
        self.runs += samples.candidate_ns.size + samples.baseline_ns.size
        return summarize(samples, itself=model == 0)["latency"], summarize_baseline(samples)

    def score(self, model: int, rows: NDArray[np.int64]) -> MetricValue:
        own, base = (Features((self.truth.right[m][rows].astype(np.float32),)) for m in (model, 0))
        self.rows += len(rows)
        return compare_features(get_metric("accuracy"), own, None if model == 0 else base, seed=0)

    def record(self, model: int, seed: int) -> TrialRecord:
        """A finished trial: everything at search time, on the rows that are not held out."""
        metrics = {"latency": self.latency(model, self.max_time_s, seed)[0], "accuracy": self.score(model, self.truth.rows[HOLDOUT:])}
        return TrialRecord(model, {"pass": None if model == 0 else f"P{model}"}, Status.OK, "sampler" if model else UNTOUCHED, metrics=metrics)


def chosen_by_autotune(replay: Replay, seed: int) -> Json:
    """The front over all models, and the fastest within the limit as it is delivered: measured afresh, scored on rows held out."""
    models, true_change = len(replay.truth.ratio), replay.truth.change()
    records = [replay.record(m, seed + m) for m in range(models)]
    baseline = dict(records[0].metrics)
    front = select(records, OBJECTIVES, (), baseline=baseline, score="accuracy")
    reported = {r.number: r.metrics["accuracy"].delta.value for r in records if r.metrics["accuracy"].delta}
    delivered, held_out = last_word(replay, records, baseline, seed)
    number = {r.id: r.number for r in records}
    members = [number[i] for i in front.front]
    return {
        "front": members, "with_ties": sorted(number[i] for group in front.groups.values() for i in group), "runs": replay.runs / models,
        "rows": replay.rows / models, "optimism": [reported[m] - float(true_change[m]) for m in members],
        "delivered": delivered, "reported": held_out,
    }  # fmt: skip


def last_word(replay: Replay, records: list[TrialRecord], baseline: Mapping[str, MetricValue], seed: int) -> tuple[int, float]:
    """Go on choosing until the choice has fresh figures; returns the model and the change of its score on the rows held out."""
    truth, limit = replay.truth, replay.truth.limit
    fresh: dict[str, float] = {records[0].id: 0.0}
    records = list(records)
    while True:
        best = select(records, OBJECTIVES, (limit,), baseline=baseline, score="accuracy").best
        assert best is not None  # the untouched model meets its own limit
        if best not in fresh and len(fresh) > MOST_FINALISTS:
            records = [r if r.id in fresh else replace(r, status=Status.UNDECIDED) for r in records]
            continue
        model = next(r.number for r in records if r.id == best)
        if best in fresh:
            return model, fresh[best]
        held_out = replay.score(model, truth.rows[:HOLDOUT])
        everything = replay.score(model, truth.rows)
        replay.rows -= len(truth.rows)  # all of these answers are known by now
        metrics = {"latency": replay.latency(model, 3 * replay.max_time_s, seed + 10_000 + model)[0], "accuracy": everything}
        assert held_out.delta is not None
        fresh[best] = held_out.delta.value
        beyond_doubt = judge_all((limit,), {"accuracy": held_out}, baseline)[0].verdict is Verdict.VIOLATED
        status = Status.INFEASIBLE if beyond_doubt else Status.OK
        records = [replace(r, metrics=metrics, status=status) if r.id == best else r for r in records]


def chosen_by_plain_loops(truth: Truth, machine: Machine, rows: NDArray[np.int64], runs: int) -> Json:
    """One loop and one score for each model, the front of these numbers as they stand, and the fastest within the limit."""
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
    members = np.flatnonzero(pareto_front(np.stack([latencies, -change], axis=1))).tolist()
    within = np.flatnonzero(change >= truth.limit.limit - 1e-12)
    delivered = int(within[np.argmin(np.asarray(latencies)[within])])
    return {
        "front": members, "with_ties": members, "runs": float(runs), "rows": float(len(rows)),
        "optimism": [float(change[m] - true_change[m]) for m in members], "delivered": delivered, "reported": float(change[delivered]),
    }  # fmt: skip


def held_against(losses: NDArray[np.float64], shown: Sequence[int], named: Sequence[int]) -> Json:
    """Count what is false on a front, by true losses in units of the tolerances: 1 is what the choice calls a difference.

    False: another model is truly no worse in both and better by more than the tolerance in one. Missed: on the true front, and nobody
    reported is as good but for the tolerance. Both are counted for what is shown first, and with the ties that are named beside it.
    """
    true_front = np.flatnonzero(pareto_front(losses)).tolist()
    wrong = {m for m in named if np.any(np.all(losses <= losses[m], axis=1) & np.any(losses < losses[m] - 1, axis=1))}

    def missed_by(members: Sequence[int]) -> int:
        return sum(not np.any(np.all(losses[members] <= losses[m] + 1, axis=1)) for m in true_front)

    return {
        "members": len(shown), "wrong": len(wrong & set(shown)), "named": len(named), "wrong_named": len(wrong), "true_members": len(true_front),
        "missed": missed_by(shown), "missed_named": missed_by(named),
    }  # fmt: skip


def judged(truth: Truth, found: Json) -> Json:
    """Hold a front and a choice against the truth: scores over the population, and over all evaluation rows."""
    feasible = np.flatnonzero(truth.change() >= truth.limit.limit)
    true_change = float(truth.change()[found["delivered"]])
    return {
        **{by: held_against(truth.losses(rows), found["front"], found["with_ties"]) for by, rows in (("population", None), ("rows", truth.rows))},
        "optimism": float(np.mean(found["optimism"])), "optimism_delivered": found["reported"] - true_change, "true_change": true_change,
        "breaks_limit": true_change < truth.limit.limit, "time_over_best": float(truth.ratio[found["delivered"]] / truth.ratio[feasible].min()),
        "timed_runs": found["runs"], "scored_rows": found["rows"],
    }  # fmt: skip


def part_d(sizes: Sizes, seed: int) -> Json:
    plain_ways = ((FEW_ROWS, PLAIN_RUNS[0]), (ROWS, PLAIN_RUNS[0]), (ROWS, PLAIN_RUNS[1]))
    kept: dict[str, list[Json]] = {name: [] for name in (*(f"{runs} runs, {rows:,} rows" for rows, runs in plain_ways), "autotune")}
    for table in range(sizes.tables):
        tell(f"d: table {table + 1} of {sizes.tables}")
        rng = np.random.default_rng([seed, table])
        truth, machine = make_truth(sizes.models, rng), Machine(rng)
        for rows, runs in plain_ways:
            found = chosen_by_plain_loops(truth, machine, truth.rows[:rows], runs)
            kept[f"{runs} runs, {rows:,} rows"].append(judged(truth, found))
        kept["autotune"].append(judged(truth, chosen_by_autotune(Replay(truth, machine, sizes.replay_s), 1_000_000 * table)))
    return {"rows": [summed(name, ones) for name, ones in kept.items()], "replays": kept}


def summed(name: str, ones: Sequence[Json]) -> Json:
    """One way's figures over all tables: shares of all members together, means over tables with Student's t limits."""
    row: Json = {"way": name, "tables": len(ones), "breaks_limit": share(sum(one["breaks_limit"] for one in ones), len(ones))}
    for by in ("population", "rows"):
        total = {key: sum(one[by][key] for one in ones) for key in ones[0][by]}
        row[by] = {
            "false": share(total["wrong"], total["members"]), "false_named": share(total["wrong_named"], total["named"]),
            "missed": share(total["missed"], total["true_members"]), "missed_named": share(total["missed_named"], total["true_members"]),
        }  # fmt: skip
    for key in ("optimism", "optimism_delivered", "true_change", "time_over_best", "timed_runs", "scored_rows"):
        values = [one[key] for one in ones]
        row[key] = (mean_interval(values) if len(values) > 1 else Interval.exactly(values[0])).to_json()
    return row


def table_d(part: Json) -> list[str]:
    rows = part["rows"]

    def points(interval: Json) -> str:
        return f"{100 * interval['value']:+.2f} ({100 * interval['low']:+.2f} to {100 * interval['high']:+.2f})"

    lines: list[tuple[str, list[str]]] = []
    for by, words in (("population", "the true scores"), ("rows", "scores over all evaluation rows")):
        lines.append((f"the front, judged by {words}", []))
        keys = {"false": "false members", "false_named": "  ties included", "missed": "true members missed", "missed_named": "  by the ties as well"}
        lines += [(f"  {name}", [percent(r[by][key]) for r in rows]) for key, name in keys.items()]
    lines += [
        ("score reported of the front, pt too high", [points(r["optimism"]) for r in rows]),
        ("the delivered model", []),
        ("  score reported, pt too high", [points(r["optimism_delivered"]) for r in rows]),
        ("  true change of its score, pt", [points(r["true_change"]) for r in rows]),
        ("  truly breaks its limit of 1 pt", [percent(r["breaks_limit"]) for r in rows]),
        ("  its time over the best possible", [f"{r['time_over_best']['value']:.3f}" for r in rows]),
        ("timed runs a model, the baseline's included", [f"{r['timed_runs']['value']:,.0f}" for r in rows]),
        ("evaluation rows a model", [f"{r['scored_rows']['value']:,.0f}" for r in rows]),
    ]
    return [
        f"d. {rows[0]['tables']} made-up tables of known truth; members of all tables are counted together",
        f"{'':45}" + "".join(f"  {r['way']:>24}" for r in rows),
        *((f"{name:45}" + "".join(f"  {cell:>24}" for cell in cells)).rstrip() for name, cells in lines),
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


def others_line(found: Json | None) -> str:
    if found is None:
        return "   what others took of the machine can't be read here"
    return f"   others took {found['value']:.0%} of the machine (median; {found['low']:.0%} to {found['high']:.0%})"


def tell(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{line:60}", end="", file=sys.stderr, flush=True)


def run_parts(parts: str, sizes: Sizes, out: Path, *, seed: int = 0) -> Json:
    """Run the parts in order; print each one's table and write all that is known so far as JSON after each."""
    content: Json = {"surroundings": surroundings().to_json(), "seed": seed, "sizes": asdict(sizes), "parts": {}}
    measured = {"a": (part_a, table_a), "b": (part_b, table_b), "c": (part_c, table_c)}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="measurement-") as name:
        folder = Path(name)
        models = [make_models(kind, folder / str(i)) for i, kind in enumerate(sizes.kinds)] if set(parts) & set(measured) else []
        for part in parts:
            began = time.monotonic()
            if part in measured:
                found, table = measured[part][0](sizes, models, folder, seed), measured[part][1]
            else:
                found, table = part_d(sizes, seed), table_d
            found["seconds"] = time.monotonic() - began
            content["parts"][part] = found
            tell("")
            print("\n".join([*table(found), f"   ({found['seconds']:.0f} s)", ""]), flush=True)
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
    run_parts(options.parts, QUICK if options.quick else Sizes(), options.json, seed=options.seed)


if __name__ == "__main__":
    main()
