"""Checks that every pass must stand, built in or brought by others; plain functions, no test framework needed.

    from autotune.passes import conformance
    sample = conformance.Sample(model, arrays, data={"calibration": path})
    conformance.check_everything(MyPass, AcceleratorSpec(), sample, tmp_path)

Each function returns nothing when all is well and raises `ConformanceFault`, which says what was broken. Models are run in this
process: a pass whose results may crash should be checked in a child process.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from autotune.data import Arrays, feeds, plan_feeding
from autotune.digest import digest_of, files_under
from autotune.errors import PassConfigError
from autotune.model import ModelHandler, ONNXModelHandler, PyTorchModelHandler, handler_from_json
from autotune.passes.base import ONNX, AcceleratorSpec, Pass, PassConfigParam
from autotune.passes.registry import pass_names
from autotune.search_spaces.parameters import Conditional, ConditionalDefault, same
from autotune.session import create_session


class ConformanceFault(AssertionError):
    """A pass breaks the contract."""


@dataclass(frozen=True)
class Sample:
    """A small model of the format that the pass accepts, rows that it can run on, and the data that passes may ask for by role.

    `values` are fixed values for parameters that have no default. `arrays` holds one array per model input.
    """

    model: ModelHandler
    arrays: Arrays
    data: Mapping[str, Path] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    user_script: Path | None = None

    def fixed(self, pass_class: type[Pass]) -> dict[str, Any]:
        """Values that every run of the pass gets: those given, and data for its DATA parameters."""
        filled = {name: str(self.data[role]) for name, role in pass_class.contract.data.items() if role in self.data}
        return {**filled, **self.values}


def check_everything(pass_class: type[Pass], spec: AcceleratorSpec, sample: Sample, folder: Path, *, points: int = 8, seed: int = 0) -> None:
    """Run all checks, the costly ones on the default config and on `points` points of the search space. `folder` must be empty."""
    check_registered(pass_class)
    check_table(pass_class, spec)
    check_unknown_parameter_is_refused(pass_class, spec, sample)
    check_wrong_types_are_refused(pass_class, spec, sample)
    configs = configs_to_try(pass_class, spec, sample, points=points, seed=seed)
    for config in configs:
        check_pickling(pass_class, spec, config, sample)
    results = [check_run(pass_class, spec, config, sample, folder / f"run-{i}") for i, config in enumerate(configs)]
    check_same_bytes_elsewhere(pass_class, spec, configs, sample, [r.digest for r in results])


def check_registered(pass_class: type[Pass]) -> None:
    """The pass can be found by its class name."""
    _hold(pass_class.__name__ in pass_names(), f"{pass_class.__name__} must be registered under its class name")


def check_table(pass_class: type[Pass], spec: AcceleratorSpec) -> None:
    """Every row is described, defaults and choices fit their types, searchable names are options, the contract's names are rows."""
    table = pass_class.default_config(spec)  # raises for defaults and choices that don't fit
    for name, row in table.items():
        _hold(isinstance(row, PassConfigParam), f"{name}: rows must be PassConfigParam")
        _hold(name.isidentifier(), f"{name}: names must be identifiers")
        _hold(bool(row.description), f"{name}: rows must be described")
        _hold(not (row.required and row.default_value is not None), f"{name}: what is required has no default")
        for parameter in (row.default_value, row.search_defaults):
            if isinstance(parameter, Conditional | ConditionalDefault):
                unknown = [p for p in parameter.parents if p not in table and "." not in p]
                _hold(not unknown, f"{name}: parents must be rows of the table, not {unknown}")
    contract = pass_class.contract
    for name in (*contract.needs_calibration_when, *contract.data):
        _hold(name in table, f"the contract names {name!r}, which the table lacks")
    space = pass_class.search_space(spec, {n: r.default_value for n, r in table.items() if r.required})
    _hold(set(space) <= set(table), f"searchable names must be options: {sorted(set(space) - set(table))}")
    schema = pass_class.json_schema(spec)
    json.dumps(schema)
    _hold(set(schema["properties"]) == set(table), "the JSON Schema must list the rows of the table")


def configs_to_try(pass_class: type[Pass], spec: AcceleratorSpec, sample: Sample, *, points: int, seed: int) -> list[dict[str, Any]]:
    """The default config, then up to `points` distinct points of the search space, drawn with the seed."""
    from autotune.search_spaces.space import compile_space, draw_points

    fixed = sample.fixed(pass_class)
    space = compile_space(pass_class.search_space(spec, fixed))
    drawn = draw_points(space, min(points, space.valid), seed=seed)
    configs = [fixed]
    for point in drawn:
        if not any(same(point, other) for other in configs):
            configs.append(dict(point))
    return configs


def check_pickling(pass_class: type[Pass], spec: AcceleratorSpec, config: Mapping[str, Any], sample: Sample) -> None:
    """A config makes a pass, the pass resolves it to the same again, and class and pass survive the way to another process."""
    made = pass_class(spec, config, user_script=sample.user_script)
    again = pass_class(spec, made.config, user_script=sample.user_script)
    _hold(same(made.config, again.config), f"resolving a resolved config must change nothing: {made.config} became {again.config}")
    copied = pickle.loads(pickle.dumps(made))
    _hold(type(copied) is pass_class, "a pass must come back from pickling as its own class")
    _hold(same(copied.config, made.config), "a pass must come back from pickling with its config")
    _hold(pickle.loads(pickle.dumps(pass_class)) is pass_class, "the class must be importable by name")


def check_unknown_parameter_is_refused(pass_class: type[Pass], spec: AcceleratorSpec, sample: Sample) -> None:
    """A name that the table lacks is refused, and the message offers the nearest one."""
    for name in list(pass_class.default_config(spec))[:1]:
        wrong = f"{name}_x"
        with _expecting(PassConfigError, f"{wrong!r} must be refused") as caught:
            pass_class(spec, {**sample.fixed(pass_class), wrong: 1}, user_script=sample.user_script)
        text = str(caught[0])
        _hold(wrong in text, f"the message must name {wrong!r}: {text}")
        _hold(name in text, f"the message must offer {name!r}: {text}")


def check_wrong_types_are_refused(pass_class: type[Pass], spec: AcceleratorSpec, sample: Sample) -> None:
    """Each row refuses a value of a type that is none of its own, by its name."""
    wrong: Any = _NoSuchType()
    for name, row in pass_class.default_config(spec).items():
        if row.type_ in (Any, object):
            continue
        with _expecting(PassConfigError, f"{name} must refuse {wrong!r}") as caught:
            pass_class(spec, {**sample.fixed(pass_class), name: wrong}, user_script=sample.user_script)
        _hold(name in str(caught[0]), f"the message must name {name}: {caught[0]}")


class _NoSuchType:
    """No pass has a parameter of this type."""

    def __repr__(self) -> str:
        return "<a value of a foreign type>"


def check_run(pass_class: type[Pass], spec: AcceleratorSpec, config: Mapping[str, Any], sample: Sample, folder: Path) -> ModelHandler:
    """Run the pass; the input stays, the result lies whole in its folder and runs, nothing is printed. Returns the result."""
    folder.mkdir(parents=True)
    model = fresh(sample.model)
    before = model.digest
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = pass_class(spec, config, user_script=sample.user_script).run(model, folder)
    said = printed.getvalue()
    _hold(fresh(model).digest == before, f"the input must stay as it was ({config})")
    _hold(not said, f"a pass prints nothing; it printed {said[:200]!r} ({config})")
    _hold(result.folder == folder, f"the result must lie in the folder given, not in {result.folder}")
    _hold(result.format == pass_class.contract.returns, f"the result must be {pass_class.contract.returns}, not {result.format}")
    digest_of(result.notes)  # notes must be plain: numbers, words, lists, dicts
    if result.notes.get("changed") is False:
        _hold(bool(result.notes.get("reason")), "a pass that changed nothing must say why in its notes, as `reason`")
        if result.format == sample.model.format:
            _hold(result.digest == before, "a pass that changed nothing must give back the same bytes")
    if pass_class.contract.session_only:
        _hold(result.digest == before, "a pass for session settings must leave the files as they are")
    else:
        check_coverage(result)
    reread = handler_from_json(json.loads(json.dumps(result.to_json())))
    check_result_runs(reread, sample)
    return result


def check_coverage(result: ModelHandler) -> None:
    """The notes say what share of the model was changed, and nothing was where the pass says so.

    `Pass.run` counts operators and bytes of weights of ONNX models; of others a pass tells itself what it can count, as `what` and `of_what`.
    """
    told = result.notes.get("coverage", {})
    counted = [name for name in told if f"of_{name}" in told]
    _hold(bool(counted), "a pass must tell what share of the model it changed, as `coverage` in its notes")
    for name in counted:
        share, whole = told[name], told[f"of_{name}"]
        _hold(0 <= share <= whole, f"the coverage must be a share of what there is; it is {share} of {whole} {name}")
        _hold(not share or result.notes.get("changed") is not False, f"a pass that changed nothing can't have changed {share} {name}")


def check_result_runs(result: ModelHandler, sample: Sample) -> None:
    """The result loads under its own session settings and gives outputs of finite numbers for a row of the sample."""
    if isinstance(result, PyTorchModelHandler):
        import torch

        module = result.load()
        feeding = plan_feeding(sample.arrays, result.io)
        feed, _ = next(feeds(sample.arrays, result.io, feeding))
        with torch.no_grad():
            given = module(*(torch.from_numpy(np.ascontiguousarray(feed[s.name])) for s in result.io.inputs))
        outputs = [t.numpy() for t in (given if isinstance(given, tuple | list) else [given])]
    elif isinstance(result, ONNXModelHandler):
        _hold(result.path.is_file(), f"{result.path.name} must be in the result's folder, which holds {files_under(result.folder)}")
        session = create_session(result.path, result.session)
        feeding = plan_feeding(sample.arrays, result.io)
        feed, _ = next(feeds(sample.arrays, result.io, feeding))
        outputs = session.run(None, feed)
    else:
        return
    _hold(len(outputs) > 0, "the result must have outputs")
    for output in outputs:
        array = np.asarray(output)
        if array.dtype.kind == "f":
            _hold(bool(np.isfinite(array).all()), "outputs must be finite on rows on which those of the input are")


def check_same_bytes_elsewhere(
    pass_class: type[Pass], spec: AcceleratorSpec, configs: list[dict[str, Any]], sample: Sample, digests: list[str]
) -> None:
    """Another process, with another order of hashes, makes the same bytes of the same input, so that a cache can trust them.

    The class must be importable, and config values be plain.
    """
    task = {
        "module": pass_class.__module__, "name": pass_class.__qualname__, "spec": [spec.accelerator_type, spec.execution_provider],
        "configs": configs, "model": sample.model.to_json(), "script": str(sample.user_script) if sample.user_script else None,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, json\nsys.path[:] = json.loads({json.dumps(json.dumps(sys.path))})\n"
         "from autotune.passes.conformance import _digests\n_digests()"],
        input=json.dumps(task), capture_output=True, text=True, check=False, env=_environment(),
    )  # fmt: skip
    _hold(done.returncode == 0, f"the pass must run in a fresh process: {done.stderr[-800:]}")
    elsewhere = json.loads(done.stdout.splitlines()[-1])
    for config, here, there in zip(configs, digests, elsewhere, strict=True):
        _hold(here == there, f"the same input must give the same bytes in every process; it did not with {config}")


def _environment() -> dict[str, str]:
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED", "random") != "1" else "2"
    return {**os.environ, "PYTHONHASHSEED": hash_seed}


def _digests() -> None:
    """The other process: run each config of the task on standard input, print the digests of the results."""
    task = json.load(sys.stdin)
    pass_class: Any = importlib.import_module(task["module"])
    for part in task["name"].split("."):
        pass_class = getattr(pass_class, part)
    if task["model"]["format"] != ONNX:  # the number of threads changes the last digits of sums
        import torch

        torch.set_num_threads(1)
    spec = AcceleratorSpec(*task["spec"])
    script = Path(task["script"]) if task["script"] else None
    digests = []
    for config in task["configs"]:
        with tempfile.TemporaryDirectory() as name:
            digests.append(pass_class(spec, config, user_script=script).run(handler_from_json(task["model"]), Path(name)).digest)
    print(json.dumps(digests))  # noqa: T201 -- the answer to the parent process


def fresh(model: ModelHandler) -> ModelHandler:
    """The same handler without remembered digests, so that the files are read again."""
    return handler_from_json(json.loads(json.dumps(model.to_json())))


def _hold(condition: bool, message: str) -> None:
    if not condition:
        raise ConformanceFault(message)


@contextlib.contextmanager
def _expecting(kind: type[Exception], message: str) -> Iterator[list[Exception]]:
    caught: list[Exception] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    if not caught:
        raise ConformanceFault(message)
