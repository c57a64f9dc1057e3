"""OrtPerfTuning: the session settings under which ONNX Runtime runs the model, as searchable parameters.

Source: ONNX Runtime documentation, "Thread management" and "Graph optimizations"; settings as measured with ONNX Runtime 1.32.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from autotune.digest import files_under
from autotune.errors import ConfigError, PassConfigError
from autotune.model import ONNX, ONNXModelHandler
from autotune.passes.base import Pass, PassConfigParam, PassContract
from autotune.passes.onnx_graph import quiet, short_message
from autotune.passes.onnx_outputs import NotComparable, usable_feeds
from autotune.passes.registry import register
from autotune.search_spaces.parameters import INACTIVE, Boolean, Categorical, Conditional, ConditionalDefault
from autotune.session import SessionSettings, create_session
from autotune.target import AcceleratorSpec, effective_cpus

INTRA_SPINNING = "session.intra_op.allow_spinning"
INTER_SPINNING = "session.inter_op.allow_spinning"


@register
class OrtPerfTuning(Pass):
    """Choose threads, execution mode, graph optimization level, memory settings and spinning; the model's files stay as they are.

    The pass measures nothing: the sweep does. `tuning_type` says only which settings are worth the budget when none is named:

    - `latency` (one request at a time): threads, spinning, and graph optimization level (the layout changes of `all` don't pay for
      every network).
    - `throughput` (many requests, other work beside this one): the same, and running independent branches in parallel.
    - `memory`: the two allocator settings, which trade speed for memory that is given back.

    Every other setting keeps its default unless the sweep names it: more choices would be spent on sessions that hardly differ.
    """

    contract = PassContract(accepts=ONNX, returns=ONNX, version=1, session_only=True)

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        cpus = effective_cpus()
        threads = _thread_choices(cpus)
        parallel = {("parallel",): cpus}
        return {
            "tuning_type": PassConfigParam(
                type_=Literal["latency", "throughput", "memory"], default_value="latency",
                description="which settings are searched when none is named; changes nothing by itself",
            ),
            "intra_op_num_threads": PassConfigParam(
                type_=int, default_value=cpus, minimum=1, maximum=cpus,
                search_defaults=_when_tuned_for(("latency", "throughput"), Categorical(threads), Categorical([cpus])),
                description=f"threads that share the work of one operator; this process may use {cpus}",
            ),
            "execution_mode": PassConfigParam(
                type_=Literal["sequential", "parallel"], default_value="sequential",
                search_defaults=_when_tuned_for(("throughput",), Categorical(["sequential", "parallel"]), Categorical(["sequential"])),
                description="parallel runs independent branches of the graph at the same time",
            ),
            "inter_op_num_threads": PassConfigParam(
                type_=int, default_value=ConditionalDefault("execution_mode", parallel, default=INACTIVE), minimum=1, maximum=cpus,
                search_defaults=Conditional("execution_mode", {("parallel",): Categorical([cpus])}, default=INACTIVE),
                description="threads that run branches in parallel mode",
            ),
            "graph_optimization_level": PassConfigParam(
                type_=Literal["disable", "basic", "extended", "layout", "all"], default_value="all",
                search_defaults=_when_tuned_for(("latency", "throughput"), Categorical(["all", "extended"]), Categorical(["all"])),
                description="how far ONNX Runtime rewrites the graph when the session starts",
            ),
            "enable_cpu_mem_arena": PassConfigParam(
                type_=bool, default_value=True, search_defaults=_when_tuned_for(("memory",), Boolean(), Categorical([True])),
                description="keep freed memory for the next run",
            ),
            "enable_mem_pattern": PassConfigParam(
                type_=bool, default_value=ConditionalDefault("execution_mode", {("sequential",): True}, default=INACTIVE),
                search_defaults=Conditional(
                    "execution_mode", {("sequential",): _when_tuned_for(("memory",), Boolean(), Categorical([True]))}, default=INACTIVE
                ),
                description="plan memory ahead for inputs of the same shape; ONNX Runtime has no such plan in parallel mode",
            ),
            "allow_spinning": PassConfigParam(
                type_=bool,
                default_value=ConditionalDefault(
                    ("intra_op_num_threads", "execution_mode"), {(1, "sequential"): INACTIVE}, default=True
                ),
                search_defaults=Conditional(
                    ("intra_op_num_threads", "execution_mode"), {(1, "sequential"): INACTIVE},
                    default=_when_tuned_for(("latency", "throughput"), Boolean(), Categorical([True])),
                ),
                description="idle threads wait busily: faster by microseconds, at the cost of the cores they wait on",
            ),
            "enable_profiling": PassConfigParam(
                type_=bool, default_value=False,
                description="profile a few runs under these settings, on made-up numbers, and put into the notes where each node ran and how long; "
                "the session itself is not profiled",
            ),
            "enable_mem_reuse": PassConfigParam(
                type_=bool, default_value=True, description="let an intermediate value take the place of one that is no longer needed"
            ),
            "execution_order": PassConfigParam(
                type_=Literal["default", "priority_based"], default_value="default", description="the order in which the graph's nodes run"
            ),
            "config_entries": PassConfigParam(
                type_=dict | None, check=partial(_fault_of_entries, "config_entries", accelerator_spec.execution_provider),
                description="further session config entries, by key; only those that this ONNX Runtime honours (docs/session-options.md)",
            ),
            "run_config_entries": PassConfigParam(
                type_=dict | None, check=partial(_fault_of_entries, "run_config_entries", accelerator_spec.execution_provider),
                description="config entries of every run, by key; only those that this ONNX Runtime honours (docs/session-options.md)",
            ),
        }  # fmt: skip

    def _run_for_config(self, model: ONNXModelHandler, config: Mapping[str, Any], output_model_path: Path) -> ONNXModelHandler:
        for name in files_under(model.folder):
            target = output_model_path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(model.folder / name, target)
        settings = _settings(model.session, config)
        before, after = model.session.to_json(), settings.to_json()
        different = {name: [before[name], after[name]] for name in after if after[name] != before[name]}
        notes: dict[str, Any] = {"changed": bool(different), "settings": different}
        if not different:
            notes["reason"] = "these are the settings that the model had already"
        if settings.unproven():
            notes["unproven"] = settings.unproven()
        if config["enable_profiling"]:
            notes["profile"] = _profile(replace(model, folder=output_model_path, session=settings))
        return replace(model, folder=output_model_path, session=settings, notes=notes)


PROFILED_RUNS = 5
LISTED_NODES = 30


def _profile(model: ONNXModelHandler) -> dict[str, Any]:
    """What ONNX Runtime's own profile says of a few runs, after a first one: nodes by provider, microseconds by operator and by node.

    Times are medians over the runs, largest first; they show where time goes, and are no measurement. `fault` says why there is none.
    """
    with tempfile.TemporaryDirectory(prefix="autotune-profile-") as folder:
        try:
            feeds, inputs = usable_feeds(model.load(), model.io, who="OrtPerfTuning")
            with quiet():
                session = create_session(model.path, replace(model.session, enable_profiling=True), profile_to=Path(folder, "profile"))
                for _ in range(PROFILED_RUNS + 1):
                    session.run(None, dict(feeds[0]))
                events = json.loads(Path(session.end_profiling()).read_text())
        except NotComparable as error:
            return {"fault": str(error)}
        except Exception as error:  # what the runtime raises has no common base; a missing profile spoils no candidate
            return {"fault": short_message(error)}
    times: dict[str, list[int]] = {}
    facts: dict[str, dict[str, str]] = {}
    for event in events:
        args = event.get("args", {})
        if event.get("cat") == "Node" and "op_name" in args and event["name"].endswith("_kernel_time"):
            name = event["name"].removesuffix("_kernel_time")
            times.setdefault(name, []).append(int(event["dur"]))
            facts[name] = {"operator": args["op_name"], "provider": args.get("provider", "")}
    typical = {name: sorted(found[1:] or found)[len(found[1:] or found) // 2] for name, found in times.items()}
    by_operator: Counter[str] = Counter()
    for name, duration in typical.items():
        by_operator[facts[name]["operator"]] += duration
    slowest = sorted(typical, key=lambda name: (-typical[name], name))[:LISTED_NODES]
    return {
        "inputs": inputs, "runs": PROFILED_RUNS, "nodes_by_provider": dict(sorted(Counter(f["provider"] for f in facts.values()).items())),
        "microseconds_by_operator": dict(by_operator.most_common()),
        "slowest_nodes": [{"node": name, **facts[name], "microseconds": typical[name]} for name in slowest],
    }  # fmt: skip


def _thread_choices(cpus: int) -> list[int]:
    """1, 2, 4 ... and the number of CPUs itself."""
    return sorted({cpus, *(1 << i for i in range(cpus.bit_length()) if 1 << i <= cpus)})


def _when_tuned_for(types: tuple[str, ...], choices: Categorical, otherwise: Categorical) -> Conditional:
    return Conditional("tuning_type", {(t,): choices for t in types}, default=otherwise)


def _fault_of_entries(name: str, provider: str, entries: Mapping[str, Any]) -> str:
    """Words for what is wrong with config entries of the session or of its runs; empty when ONNX Runtime would honour them all."""
    governed = {INTRA_SPINNING: "allow_spinning", INTER_SPINNING: "allow_spinning"}
    for key in entries:
        if key in governed:
            return f"without {key}, which {governed[key]} sets"
    given: dict[str, Any] = {name: _as_text(entries)}
    try:
        SessionSettings(execution_provider=provider, **given)
    except ConfigError as error:
        return f"a mapping in which {error.must} ({error.got}; {error.do})"
    return ""


def _as_text(entries: Mapping[str, Any]) -> dict[str, str]:
    """ONNX Runtime takes texts; a sweep file may say 1 or true."""
    return {str(k): str(int(v)) if isinstance(v, bool) else str(v) for k, v in entries.items()}


def _settings(before: SessionSettings, config: Mapping[str, Any]) -> SessionSettings:
    entries = {**before.config_entries, **_as_text(config["config_entries"] or {})}
    if "allow_spinning" in config:
        # Spinning is what ONNX Runtime does unless told otherwise: no entry, so that equal sessions have equal settings.
        for key in (INTRA_SPINNING, INTER_SPINNING):
            entries.pop(key, None)
        if not config["allow_spinning"]:
            entries[INTRA_SPINNING] = "0"
            if config["execution_mode"] == "parallel":
                entries[INTER_SPINNING] = "0"
    try:
        return replace(
            before,
            intra_op_num_threads=config["intra_op_num_threads"],
            inter_op_num_threads=config.get("inter_op_num_threads", before.inter_op_num_threads),
            execution_mode=config["execution_mode"],
            graph_optimization_level=config["graph_optimization_level"],
            enable_cpu_mem_arena=config["enable_cpu_mem_arena"],
            enable_mem_pattern=config.get("enable_mem_pattern", False),
            enable_mem_reuse=config["enable_mem_reuse"],
            execution_order=config["execution_order"],
            config_entries=entries,
            run_config_entries={**before.run_config_entries, **_as_text(config["run_config_entries"] or {})},
        )
    except ConfigError as error:
        raise PassConfigError("OrtPerfTuning", error.must, error.got, error.do) from error
