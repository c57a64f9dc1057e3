"""ONNX Runtime session settings: declared, applied, read back.

ONNX Runtime takes misspelt keys and nonsense values in silence, and answers a request for a missing execution provider with
a CPU session (seen with 1.32). So the keys that are known stand here, and a session is believed only after it was asked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import ConfigError, EnvironmentFault, nearest

if TYPE_CHECKING:
    import onnxruntime as ort

# Values: the pattern that a value must match. Source: the session option keys of ONNX Runtime 1.32, and a run of each.
KNOWN_CONFIG_ENTRIES: Mapping[str, str] = {
    "session.intra_op.allow_spinning": "[01]",
    "session.inter_op.allow_spinning": "[01]",
    "session.force_spinning_stop": "[01]",
    "session.set_denormal_as_zero": "[01]",
    "session.disable_prepacking": "[01]",
    "session.dynamic_block_base": r"\d+",
    "session.intra_op_thread_affinities": r"[\d,;\- ]+",
    "session.disable_quant_qdq": "[01]",
    "session.enable_quant_qdq_cleanup": "[01]",
    "session.disable_double_qdq_remover": "[01]",
    "session.qdqisint8allowed": "[01]",
    "session.x64quantprecision": "[01]",
    "session.disable_cpu_ep_fallback": "[01]",
    "session.record_ep_graph_assignment_info": "[01]",
    "session.use_env_allocators": "[01]",
    "session.intra_op.spin_duration_us": r"\d{1,4}",  # beyond 10 ms the runtime itself warns
    "session.inter_op.spin_duration_us": r"\d{1,4}",
    "optimization.enable_cast_chain_elimination": "[01]",
    "optimization.constant_folding_max_output_size_in_bytes": r"\d+",
    "optimization.enable_gelu_approximation": "[01]",
    "optimization.disable_specified_optimizers": ".+",
    "mlas.enable_gemm_fastmath_arm64_bfloat16": "[01]",
}

GRAPH_LEVELS = ("disable", "basic", "extended", "layout", "all")
EXECUTION_MODES = ("sequential", "parallel")
_ORT_LEVEL = {
    "disable": "ORT_DISABLE_ALL", "basic": "ORT_ENABLE_BASIC", "extended": "ORT_ENABLE_EXTENDED",
    "layout": "ORT_ENABLE_LAYOUT", "all": "ORT_ENABLE_ALL",
}  # fmt: skip


@dataclass(frozen=True)
class SessionSettings:
    """Everything that makes an `InferenceSession` what it is, apart from the model. Zero threads: ONNX Runtime's own choice."""

    intra_op_num_threads: int = 0
    inter_op_num_threads: int = 0
    execution_mode: str = "sequential"
    graph_optimization_level: str = "all"
    enable_cpu_mem_arena: bool = True
    enable_mem_pattern: bool = True
    enable_profiling: bool = False
    config_entries: Mapping[str, str] = field(default_factory=dict)
    execution_provider: str = "CPUExecutionProvider"
    provider_options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _one_of("graph_optimization_level", self.graph_optimization_level, GRAPH_LEVELS)
        _one_of("execution_mode", self.execution_mode, EXECUTION_MODES)
        for name in ("intra_op_num_threads", "inter_op_num_threads"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError("session", f"{name} must be a whole number from 0", repr(value), "0 leaves the choice to ONNX Runtime.")
        for key, text in self.config_entries.items():
            pattern = KNOWN_CONFIG_ENTRIES.get(key)
            if pattern is None:
                raise ConfigError(
                    "session", "config_entries must be keys that this ONNX Runtime honours", repr(key), nearest(key, KNOWN_CONFIG_ENTRIES)
                )
            if not isinstance(text, str):
                raise ConfigError("session", f"the value of {key} must be text", repr(text), f"Write '{text}', with quotes.")
            if not re.fullmatch(pattern, text):
                raise ConfigError("session", f"{key} must match {pattern}", repr(text), "ONNX Runtime would take the wrong value in silence.")

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "config_entries": dict(sorted(self.config_entries.items())), "provider_options": dict(self.provider_options)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SessionSettings:
        """Rebuild settings; an unknown field is a `ConfigError`."""
        names = {f.name for f in fields(cls)}
        for key in data:
            if key not in names:
                raise ConfigError("session", "settings must be known fields", repr(key), nearest(key, names))
        return cls(**data)

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
    options.enable_profiling = settings.enable_profiling
    options.log_severity_level = 3
    for key, value in settings.config_entries.items():
        options.add_session_config_entry(key, value)
    return options


def create_session(model_path: Path, settings: SessionSettings, *, profile_to: Path | None = None) -> ort.InferenceSession:
    """Open a model as deployed, and make sure that the execution provider asked for is the one that came.

    `profile_to` is how the file of a session that is profiled begins; without it, it lies in the working folder.

    Raises `EnvironmentFault` for an execution provider that this ONNX Runtime build can't start.
    """
    import warnings

    import onnxruntime as ort

    # Not listed is proof enough, and ONNX Runtime would print about it; listed is none, so the session is asked as well.
    if settings.execution_provider not in ort.get_available_providers():
        raise _provider_missing(settings, ort.get_available_providers())
    providers: list[Any] = [(settings.execution_provider, dict(settings.provider_options))]
    if settings.execution_provider != "CPUExecutionProvider":
        providers.append("CPUExecutionProvider")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the fall-back is checked below, and said better
        options = session_options(settings)
        if profile_to is not None:
            options.profile_file_prefix = str(profile_to)
        session = ort.InferenceSession(str(model_path), options, providers=providers)
    if settings.execution_provider not in session.get_providers():
        raise _provider_missing(settings, session.get_providers())
    return session


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
        "enable_profiling": options.enable_profiling,
        "config_entries": {k: options.get_session_config_entry(k) for k in sorted(settings.config_entries)},
        "execution_provider": session.get_providers()[0],
        "providers": list(session.get_providers()),
    }


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
