"""ONNX Runtime session settings: declared, applied, read back.

ONNX Runtime takes misspelt keys and nonsense values in silence, and answers a request for a missing execution provider with
a CPU session (seen with 1.32). So only keys are taken that a table says to do something (`runtime_options`), and a session is believed only
after it was asked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import ConfigError, EnvironmentFault, nearest
from autotune.runtime_options import CPU, ENTRY, RUN_ENTRY, UNPROVEN, options_of

if TYPE_CHECKING:
    import onnxruntime as ort

GRAPH_LEVELS = ("disable", "basic", "extended", "layout", "all")
EXECUTION_MODES = ("sequential", "parallel")
EXECUTION_ORDERS = ("default", "priority_based")
SHRINK_ARENA = "memory.enable_memory_arena_shrinkage"
NO_CPU_FALLBACK = "session.disable_cpu_ep_fallback"
_ORT_LEVEL = {
    "disable": "ORT_DISABLE_ALL", "basic": "ORT_ENABLE_BASIC", "extended": "ORT_ENABLE_EXTENDED",
    "layout": "ORT_ENABLE_LAYOUT", "all": "ORT_ENABLE_ALL",
}  # fmt: skip


@dataclass(frozen=True)
class SessionSettings:
    """Everything that makes an `InferenceSession` and its runs what they are, apart from the model. Zero threads: ONNX Runtime's own choice.

    `config_entries` are the session's, by key; `run_config_entries` those of every run.
    """

    intra_op_num_threads: int = 0
    inter_op_num_threads: int = 0
    execution_mode: str = "sequential"
    graph_optimization_level: str = "all"
    enable_cpu_mem_arena: bool = True
    enable_mem_pattern: bool = True
    enable_mem_reuse: bool = True
    execution_order: str = "default"
    enable_profiling: bool = False
    config_entries: Mapping[str, str] = field(default_factory=dict)
    run_config_entries: Mapping[str, str] = field(default_factory=dict)
    execution_provider: str = CPU
    provider_options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _one_of("graph_optimization_level", self.graph_optimization_level, GRAPH_LEVELS)
        _one_of("execution_mode", self.execution_mode, EXECUTION_MODES)
        _one_of("execution_order", self.execution_order, EXECUTION_ORDERS)
        for name in ("intra_op_num_threads", "inter_op_num_threads"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError("session", f"{name} must be a whole number from 0", repr(value), "0 leaves the choice to ONNX Runtime.")
        for kind, entries in ((ENTRY, self.config_entries), (RUN_ENTRY, self.run_config_entries)):
            for key, text in entries.items():
                options_of().check(kind, key, text, provider=self.execution_provider)
        shrunk = self.run_config_entries.get(SHRINK_ARENA, "")
        if "cpu:" in shrunk and not self.enable_cpu_mem_arena:
            raise ConfigError(
                "session", f"{SHRINK_ARENA} needs the CPU's arena", "enable_cpu_mem_arena off", "Leave it out: without an arena memory is given back."
            )
        if "gpu:" in shrunk and self.execution_provider == CPU:
            raise ConfigError("session", f"{SHRINK_ARENA} must name arenas that there are", f"{shrunk!r} on {CPU}", "Write 'cpu:0'.")
        if self.provider_options and self.execution_provider == CPU:
            raise ConfigError(
                "session", f"{CPU} takes no provider options", ", ".join(self.provider_options), "ONNX Runtime takes them in silence; leave them out."
            )

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self), "config_entries": dict(sorted(self.config_entries.items())),
            "run_config_entries": dict(sorted(self.run_config_entries.items())), "provider_options": dict(self.provider_options),
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SessionSettings:
        """Rebuild settings; an unknown field is a `ConfigError`."""
        names = {f.name for f in fields(cls)}
        for key in data:
            if key not in names:
                raise ConfigError("session", "settings must be known fields", repr(key), nearest(key, names))
        return cls(**data)

    def unproven(self) -> list[str]:
        """Say, in words, which entries are taken though nothing shows that they do something here."""
        rows = [options_of().get(kind, key) for kind, keys in ((ENTRY, self.config_entries), (RUN_ENTRY, self.run_config_entries)) for key in keys]
        return [f"{row.name} is not shown to do anything: {row.reason}" for row in rows if row is not None and row.status == UNPROVEN]

    def with_entries(self, **entries: str) -> SessionSettings:
        """Return settings with more config entries; dots in keys are written as `__` in the argument names."""
        more = {k.replace("__", "."): v for k, v in entries.items()}
        return replace(self, config_entries={**self.config_entries, **more})


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError("session", f"{name} must be one of {', '.join(known)}", repr(value), nearest(str(value), known))


def session_options(settings: SessionSettings) -> ort.SessionOptions:
    """Build ONNX Runtime's own options object from settings."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = settings.intra_op_num_threads
    options.inter_op_num_threads = settings.inter_op_num_threads
    options.execution_mode = getattr(ort.ExecutionMode, f"ORT_{settings.execution_mode.upper()}")
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, _ORT_LEVEL[settings.graph_optimization_level])
    options.enable_cpu_mem_arena = settings.enable_cpu_mem_arena
    options.enable_mem_pattern = settings.enable_mem_pattern
    options.enable_mem_reuse = settings.enable_mem_reuse
    options.execution_order = getattr(ort.ExecutionOrder, settings.execution_order.upper())
    options.enable_profiling = settings.enable_profiling
    options.log_severity_level = 3
    for key, value in settings.config_entries.items():
        options.add_session_config_entry(key, value)
    return options


def run_options(settings: SessionSettings) -> ort.RunOptions | None:
    """Build ONNX Runtime's own options of a run from settings; None where there is nothing to say."""
    import onnxruntime as ort

    if not settings.run_config_entries:
        return None
    options = ort.RunOptions()
    for key, value in settings.run_config_entries.items():
        options.add_run_config_entry(key, value)
    return options


@cache
def _session_class() -> type[ort.InferenceSession]:
    """A session that runs by the run options it was made with, so that they hold wherever it runs."""
    import onnxruntime as ort

    class SessionWithRunOptions(ort.InferenceSession):  # type: ignore[misc] # onnxruntime has no types
        standing_run_options: ort.RunOptions | None = None

        def run(self, output_names: Any, input_feed: Any, run_options: Any = None) -> Any:
            return super().run(output_names, input_feed, self.standing_run_options if run_options is None else run_options)

    return SessionWithRunOptions


def create_session(model_path: Path, settings: SessionSettings, *, profile_to: Path | None = None) -> ort.InferenceSession:
    """Open a model as deployed, and make sure that the execution provider asked for is the one that came.

    Its `run` uses the settings' run options; its other ways to run don't.

    `profile_to` is how the file of a session that is profiled begins; without it, it lies in the working folder.

    Raises `EnvironmentFault` for an execution provider that this ONNX Runtime build can't start.
    """
    import warnings

    import onnxruntime as ort

    # Not listed is proof enough, and ONNX Runtime would print about it; listed is none, so the session is asked as well.
    if settings.execution_provider not in ort.get_available_providers():
        raise _provider_missing(settings, ort.get_available_providers())
    providers: list[Any] = [(settings.execution_provider, dict(settings.provider_options))]
    if falls_back_to_cpu(settings):
        providers.append(CPU)
    standing = run_options(settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the fall-back is checked below, and said better
        options = session_options(settings)
        if profile_to is not None:
            options.profile_file_prefix = str(profile_to)
        session = (ort.InferenceSession if standing is None else _session_class())(str(model_path), options, providers=providers)
    if standing is not None:
        session.standing_run_options = standing
    if settings.execution_provider not in session.get_providers():
        raise _provider_missing(settings, session.get_providers())
    return session


def falls_back_to_cpu(settings: SessionSettings) -> bool:
    """Say whether the CPU is named beside another execution provider. ONNX Runtime refuses that beside its own key against falling back."""
    return settings.execution_provider != CPU and settings.config_entries.get(NO_CPU_FALLBACK) != "1"


def _provider_missing(settings: SessionSettings, present: list[str]) -> EnvironmentFault:
    return EnvironmentFault(
        "target", f"a session must start on {settings.execution_provider}", f"one on {', '.join(present)}",
        "Install the onnxruntime package that carries this execution provider, or choose another `--ep`; `autotune doctor` lists what starts here.",
    )  # fmt: skip


def read_back(session: ort.InferenceSession, settings: SessionSettings) -> dict[str, Any]:
    """Ask a live session for its settings: same keys as `SessionSettings.to_json`, plus `providers`."""
    options = session.get_session_options()
    level = {v: k for k, v in _ORT_LEVEL.items()}[options.graph_optimization_level.name]
    return {
        "intra_op_num_threads": options.intra_op_num_threads,
        "inter_op_num_threads": options.inter_op_num_threads,
        "execution_mode": options.execution_mode.name.removeprefix("ORT_").lower(),
        "graph_optimization_level": level,
        "enable_cpu_mem_arena": options.enable_cpu_mem_arena,
        "enable_mem_pattern": options.enable_mem_pattern,
        "enable_mem_reuse": options.enable_mem_reuse,
        "execution_order": options.execution_order.name.lower(),
        "enable_profiling": options.enable_profiling,
        "config_entries": {k: options.get_session_config_entry(k) for k in sorted(settings.config_entries)},
        "run_config_entries": {k: _run_entry(session, k) for k in sorted(settings.run_config_entries)},
        "execution_provider": session.get_providers()[0],
        "providers": list(session.get_providers()),
    }


def _run_entry(session: ort.InferenceSession, key: str) -> str | None:
    """The value with which the session's runs are made, or None."""
    options = getattr(session, "standing_run_options", None)
    try:
        return None if options is None else str(options.get_run_config_entry(key))
    except RuntimeError:  # what ONNX Runtime raises for a key that is not there
        return None


def not_applied(asked: SessionSettings, got: Mapping[str, Any]) -> list[str]:
    """List the settings that the live session does not have as asked, in words; empty when all took effect."""
    wanted = asked.to_json()
    return [
        f"{name}: asked {wanted[name]!r}, session has {got[name]!r}"
        for name in wanted
        if name in got and name != "provider_options" and wanted[name] != got[name]
    ]


def thread_count() -> int:
    """Number of threads of this process now (Linux), or 0 where it can't be read."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0
