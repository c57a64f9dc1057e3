"""Everything that can be known before the first trial costs a second: files, labels, names, limits, the space."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.benchmarks.measurer import get_measurer
from autotune.benchmarks.metrics import Metric, check_labels, get_metric
from autotune.config import LoadedSweep
from autotune.constraints import Constraint, check_baseline, parse_constraint
from autotune.data import LABELS, RANDOM, Arrays, count_rows, load_arrays, plan_feeding
from autotune.errors import ConfigError, EnvironmentFault, nearest
from autotune.model import ONNX, PYTORCH, TORCH_PROGRAM, IoContract, TensorSpec, load_object, read_onnx_head
from autotune.pass_rules import CPU
from autotune.passes.base import AcceleratorSpec
from autotune.passes.torch_sources import error_from
from autotune.pipeline import InputFacts, Pipeline
from autotune.rules import RULES, Finding
from autotune.runtime_options import options_of
from autotune.search_spaces.space import Space
from autotune.selection import Objective, parse_objective
from autotune.session import SessionSettings
from autotune.stages import StageLimits, StageRunner
from autotune.torch_files import HUGGING_FACE, ONNX_FILE, kind_of
from autotune.trial import METRIC_UNITS, Rows, split_rows

FIXING_PASS = "OnnxDynamicToFixedShape"
LOOK_LIMIT_S = 600.0  # for reading a large model's file


@dataclass(frozen=True)
class Prepared:
    """A sweep that passed every check that needs no trial."""

    sweep: LoadedSweep
    facts: InputFacts
    io: IoContract
    metric: Metric
    rows: Rows
    pipeline: Pipeline
    constraints: tuple[Constraint, ...]
    objectives: tuple[Objective, ...]
    notes: tuple[str, ...]

    @property
    def settings(self) -> SessionSettings:
        """The baseline's session: ONNX Runtime's defaults at the target's threads."""
        target = self.sweep.target
        return SessionSettings(intra_op_num_threads=target.run_threads, execution_provider=target.execution_provider)


def prepare(sweep: LoadedSweep) -> Prepared:
    """Check a sweep. Raises `ConfigError` for a user's mistake and `EnvironmentFault` for what this machine lacks."""
    config = sweep.config
    with sweep.at("metric"):
        metric = get_metric(config.metric, root=sweep.root)
    constraints, objectives = _goals(sweep, metric)
    with sweep.at("measure", "measurer"):
        measurer = get_measurer(config.measure.measurer, root=sweep.root) if config.measure.measurer else None
    with sweep.at("data", "eval"):
        arrays = load_arrays(sweep.path(config.data.eval), who="data.eval")
    with sweep.at("model", "script" if config.model.path is None else "path"):
        facts, io = _look_at_model(sweep, arrays)
    contents = _row_digests({n: a for n, a in arrays.items() if n != LABELS}, io)
    notes = _check_data(sweep, metric, io, arrays, set(contents))
    notes += [n for n in (options_of().note,) if n]
    _check_fixed_shapes(sweep, io, arrays)
    pipeline = Pipeline(sweep, facts)
    pipeline.findings += _provider_findings(sweep.target.execution_provider)
    pipeline.start_points()  # names and values are checked now
    rows = split_rows(count_rows(arrays), config.data.holdout, seed=config.seed, contents=contents)
    notes += _twins(contents, rows)
    if measurer is not None:
        notes.append(f"latency is what {measurer.name} returned, for the candidates and for the model as it is; autotune did not time it")
    if not rows.holdout:
        notes.append("no rows are held out: the chosen model's accuracy is the one that it was chosen by")
    return Prepared(sweep, facts, io, metric, rows, pipeline, constraints, objectives, tuple(notes))


def _goals(sweep: LoadedSweep, metric: Metric) -> tuple[tuple[Constraint, ...], tuple[Objective, ...]]:
    """The constraints and objectives in the terms of the metrics that are measured."""
    units = {**METRIC_UNITS, metric.name: metric.unit}
    direction = {metric.name: metric.higher_is_better}
    constraints: list[Constraint] = []
    objectives: list[Objective] = []
    for number, text in enumerate(sweep.config.constraints):
        with sweep.at("constraints", number):
            constraints.append(parse_constraint(text, metrics=units, score=metric.name, higher_is_better=direction))
    for number, text in enumerate(sweep.config.objectives):
        with sweep.at("objectives", number):
            objective = parse_objective(text, metrics=units, score=metric.name, higher_is_better=direction)
            if objective in objectives:
                raise ConfigError("objectives", "each objective must stand once", f"{text!r}, which is {objective} again")
            objectives.append(objective)
    return tuple(constraints), tuple(objectives)


def check_against_baseline(constraints: Sequence[Constraint], objectives: Sequence[Objective], baseline: Mapping[str, Any]) -> None:
    """Refuse limits and objectives that the baseline's own measurement can't carry: a percentile with too few runs, a multiple of zero.

    Raises `ConfigError`; otherwise every trial would end undecided.
    """
    for name in [*(c.metric for c in constraints), *(o.name for o in objectives)]:
        if name not in baseline:
            raise ConfigError(
                "measure", f"{name} must be measurable on the model as it is", "too few runs within the time limit",
                "Raise measure.max_time in the sweep file, or use another percentile.",
            )  # fmt: skip
    for constraint in constraints:
        check_baseline(constraint, baseline[constraint.metric])


def _look_at_model(sweep: LoadedSweep, arrays: Arrays) -> tuple[InputFacts, IoContract]:
    """Format, opset, operators and inputs of the user's model."""
    section = sweep.config.model
    if section.path is not None:
        path = sweep.path(section.path)
        kind = kind_of(path)
        if kind != ONNX_FILE:
            io = _look_at_torch(path, kind, arrays, section.outputs or ())
            return InputFacts(PYTORCH if kind == HUGGING_FACE else TORCH_PROGRAM), io
        if section.outputs:
            raise ConfigError("model", "outputs: names are for models of torch", "an ONNX file, whose outputs have names", "Leave outputs out.")
        io, opset = read_onnx_head(path)
        return InputFacts(ONNX, opset, count_operators(path)), io
    assert section.script is not None
    load_object(sweep.path(section.script), section.loader, who="model")
    if section.weights is not None and not sweep.path(section.weights).is_file():
        raise ConfigError("model.weights", "the weights file must exist", str(sweep.path(section.weights)))
    inputs = tuple(TensorSpec(n, str(a.dtype), ("batch", *a.shape[1:])) for n, a in arrays.items() if n != LABELS)
    outputs = tuple(TensorSpec(n, "float32", None) for n in section.outputs or ())
    return InputFacts(PYTORCH), IoContract(inputs, outputs)


def _look_at_torch(path: Path, kind: str, arrays: Arrays, outputs: Sequence[str]) -> IoContract:
    """Inputs of a model that needs no script; looked at in a child process, which may crash or need much memory. Raises `ConfigError`."""
    args = {
        "path": str(path), "kind": kind, "outputs": list(outputs),
        "arrays": {n: [str(a.dtype), list(a.shape)] for n, a in arrays.items() if n != LABELS},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place, StageRunner(("numpy", "torch")) as runner:
        outcome = runner.run("autotune.passes.torch_sources:describe", args, folder=Path(place), limits=StageLimits(LOOK_LIMIT_S))
    if outcome.value is None:
        raise ConfigError("model", f"the {kind} must load", f"{outcome.cause}: {outcome.message}")
    if "error" in outcome.value:
        raise error_from(outcome.value["error"])
    return IoContract.from_json(outcome.value["io"])


def count_operators(path: Path) -> dict[str, int]:
    """Operators of an ONNX file and of all subgraphs, with their counts."""
    import onnx

    counts: dict[str, int] = {}

    def visit(nodes: Any) -> None:
        for node in nodes:
            counts[node.op_type] = counts.get(node.op_type, 0) + 1
            for attribute in node.attribute:
                for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                    visit(graph.node)

    proto = onnx.load(str(path), load_external_data=False)
    visit(proto.graph.node)
    for function in proto.functions:
        visit(function.node)
    return dict(sorted(counts.items()))


def _check_data(sweep: LoadedSweep, metric: Metric, io: IoContract, arrays: Arrays, contents: set[bytes]) -> list[str]:
    """Refuse data that doesn't fit the model or the metric; return notes on what is odd but usable. `contents`: those of the rows."""
    config, notes = sweep.config, []
    inputs = {n: a for n, a in arrays.items() if n != LABELS}
    with sweep.at("data", "eval"):
        plan_feeding(inputs, io, batch_size=sweep.target.batch_size, who="data.eval")
        check_labels(metric, arrays)
    unused = sorted(set(inputs) - {s.name for s in io.inputs})
    if unused:
        notes.append(f"arrays of the evaluation data that no input takes: {', '.join(unused)}")
    if config.data.calibration == RANDOM:
        notes.append("calibration data is random: activation ranges, and the scores of models calibrated with it, say nothing about real data")
    for role, name in (("calibration", config.data.calibration), ("train", config.data.train)):
        if name is None or (role, name) == ("calibration", RANDOM):
            continue
        with sweep.at("data", role):
            other = {n: a for n, a in load_arrays(sweep.path(name), who=f"data.{role}").items() if n != LABELS}
            if config.model.path is not None or role == "calibration":
                plan_feeding(other, io, batch_size=1, who=f"data.{role}")
            shared = len(contents & set(_row_digests(other, io)))
            if shared == count_rows(other) or shared > max(2, count_rows(inputs) // 20):
                raise ConfigError(
                    f"data.{role}", f"{role} and evaluation data must not share examples",
                    f"{shared} rows of {count_rows(inputs)} are the same in both", "Scores on rows that a pass has seen promise too much.",
                )  # fmt: skip
        if shared:
            notes.append(f"{shared} evaluation rows have the same content as a {role} row")
    return notes


def _check_fixed_shapes(sweep: LoadedSweep, io: IoContract, arrays: Arrays) -> None:
    """Refuse to fix no axis, or one that the model has not: name the axes there are, and what to write for rows like the evaluation's."""
    inputs = [s for s in io.inputs if s.name in arrays and s.shape is not None]
    feeding = plan_feeding(arrays, io, batch_size=sweep.target.batch_size, who="data.eval")
    fed = {s.name: ((feeding.batch_size,) if feeding.batched else ()) + arrays[s.name].shape[1:] for s in inputs}
    sizes: dict[str, set[int]] = {}
    for spec in inputs:
        for axis, size in zip(spec.shape or (), fed[spec.name], strict=True):
            if isinstance(axis, str):
                sizes.setdefault(axis, set()).add(size)
    for position, slot in enumerate(sweep.config.chain):
        for number, choice in enumerate(slot.choices):
            if choice.pass_ != FIXING_PASS:
                continue
            with sweep.at("chain", position, *(("any_of", number) if slot.any_of else ())):
                if not {"dim_param", "input_shapes", "fixed_inputs"} & set(choice.params):
                    raise _nothing_to_fix(inputs, fed, sizes)
                given = choice.params.get("dim_param")
                known = {*sizes, *(axis for s in io.inputs for axis in s.shape or () if isinstance(axis, str))}
                for value in given if isinstance(given, list) else [given]:
                    unknown = [n for n in value if n not in known and n != "type"] if isinstance(value, Mapping) and "type" not in value else []
                    if unknown and _is_onnx(sweep):  # a torch module's axes get their names by the conversion
                        there = nearest(unknown[0], known) if known else "The inputs have no named axes; give input_shapes."
                        raise ConfigError(FIXING_PASS, "dim_param must name axes of the model's inputs", repr(unknown[0]), there)


def _is_onnx(sweep: LoadedSweep) -> bool:
    path = sweep.config.model.path
    return path is not None and kind_of(sweep.path(path)) == ONNX_FILE


def _nothing_to_fix(inputs: Sequence[TensorSpec], fed: Mapping[str, tuple[int, ...]], sizes: Mapping[str, set[int]]) -> ConfigError:
    """What to say of a chain that fixes shapes without naming any."""
    shapes = {s.name: ["?" if d is None else d for d in s.shape or ()] for s in inputs}
    shown = ", ".join(f"{name} [{', '.join(map(str, shape))}]" for name, shape in shapes.items())
    must = "dim_param, input_shapes or fixed_inputs must say what gets which size or value"
    if not any(isinstance(d, str) for shape in shapes.values() for d in shape):
        return ConfigError(FIXING_PASS, must, f"none of them, and no input has a dynamic axis: {shown}", "Leave the pass out.")
    named = {axis: min(found) for axis, found in sizes.items() if len(found) == 1}
    whole = [s.name for s in inputs if any(d is None or (isinstance(d, str) and d not in named) for d in s.shape or ())]
    params = {
        **({"dim_param": "{" + ", ".join(f"{axis}: {size}" for axis, size in named.items()) + "}"} if named else {}),
        **({"input_shapes": "{" + ", ".join(f"{name}: {list(fed[name])}" for name in whole) + "}"} if whole else {}),
    }
    write = ", ".join(f"{key}: {value}" for key, value in params.items())
    return ConfigError(FIXING_PASS, must, f"none of them, with inputs {shown}", f"For rows like those of data.eval write params: {{{write}}}")


def _row_digests(arrays: Mapping[str, NDArray[Any]], io: IoContract) -> list[bytes]:
    """Digest of each row over the model's inputs."""
    columns = [np.ascontiguousarray(arrays[s.name]) for s in io.inputs if s.name in arrays]
    return [hashlib.sha1(b"".join(c[i].tobytes() for c in columns), usedforsecurity=False).digest() for i in range(count_rows(arrays))]


def _twins(contents: Sequence[bytes], rows: Rows) -> list[str]:
    """A note on evaluation rows that are there more than once: none of them is both searched by and held out."""
    repeated = len(contents) - len(set(contents))
    if not repeated:
        return []
    where = f"; rows of the same content are all searched by or all held out ({len(rows.holdout)} are held out)" if rows.holdout else ""
    return [f"{repeated} evaluation rows repeat the content of another{where}"]


def space_counts(space: Space) -> dict[str, Any]:
    """The numbers of a space that plan and run both tell."""
    return {
        "valid": space.valid, "invalid": sum(space.invalid.values()), "invalid_by_rule": dict(space.invalid), "declared": space.declared,
        "distinct": space.distinct, "exact": space.exact,
    }  # fmt: skip


def _provider_findings(provider: str) -> tuple[Finding, ...]:
    """Rule `ep-unavailable` as far as it shows without a session: a provider that this onnxruntime does not even list."""
    if provider == CPU:  # part of every build
        return ()
    from onnxruntime import get_available_providers

    listed = get_available_providers()
    if provider in listed:
        return ()
    rule = RULES["ep-unavailable"]
    return (Finding(rule.id, rule.severity, f"this onnxruntime has {', '.join(listed)}, not {provider}. {rule.mend}"),)


def probe_provider(accelerator: AcceleratorSpec, folder: Path) -> None:
    """Start a session on the execution provider in a child process; a listed provider is no proof. Raises `EnvironmentFault`."""
    with StageRunner(("numpy", "onnx", "onnxruntime")) as runner:
        outcome = runner.run("autotune.sweep.prepare:start_session", {"ep": accelerator.execution_provider}, folder=folder, limits=StageLimits(120.0))
    if outcome.value is None or not outcome.value["started"]:
        why = outcome.value["why"] if outcome.value else f"{outcome.cause}: {outcome.message}"
        raise EnvironmentFault(
            "target", f"a session must start on {accelerator.execution_provider} (rule ep-unavailable)", why,
            "Install the onnxruntime package that carries this execution provider, or choose another one; `autotune doctor` shows what starts here.",
        )  # fmt: skip


def start_session(args: Mapping[str, Any]) -> dict[str, Any]:
    """Stage: run a one-node model on an execution provider. Returns {started, why, providers}."""
    import onnx
    import onnxruntime as ort
    from onnx import TensorProto, helper

    from autotune.session import create_session

    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 4]) for n in "xy")
    proto = helper.make_model(
        helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "probe", [x], [y]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    onnx.save(proto, "probe.onnx")
    listed = list(ort.get_available_providers())
    try:
        session = create_session(Path("probe.onnx"), SessionSettings(execution_provider=args["ep"]))
        session.run(None, {"x": np.ones((1, 4), np.float32)})
    except EnvironmentFault as error:
        return {"started": False, "why": error.got, "listed": listed}
    except Exception as error:  # ONNX Runtime raises errors of its own kinds
        return {"started": False, "why": str(error).splitlines()[0][:300], "listed": listed}
    return {"started": True, "why": "", "listed": listed}
