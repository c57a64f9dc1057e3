"""Where the model shall run: accelerator, execution provider, threads; and the surroundings that a number belongs to."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

SHORT_PROVIDER_NAMES = {
    "cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider",
    "rocm": "ROCMExecutionProvider", "migraphx": "MIGraphXExecutionProvider", "dml": "DmlExecutionProvider",
    "directml": "DmlExecutionProvider", "openvino": "OpenVINOExecutionProvider", "qnn": "QNNExecutionProvider",
    "coreml": "CoreMLExecutionProvider", "xnnpack": "XnnpackExecutionProvider", "vitisai": "VitisAIExecutionProvider",
}  # fmt: skip

ACCELERATOR_OF = {
    "CPUExecutionProvider": "cpu", "XnnpackExecutionProvider": "cpu", "OpenVINOExecutionProvider": "cpu",
    "CUDAExecutionProvider": "gpu", "TensorrtExecutionProvider": "gpu", "ROCMExecutionProvider": "gpu",
    "MIGraphXExecutionProvider": "gpu", "DmlExecutionProvider": "gpu", "QNNExecutionProvider": "npu",
    "CoreMLExecutionProvider": "npu", "VitisAIExecutionProvider": "npu",
}  # fmt: skip


@dataclass(frozen=True)
class AcceleratorSpec:
    """What a pass may ask about the target."""

    accelerator_type: str = "cpu"
    execution_provider: str = "CPUExecutionProvider"


@dataclass(frozen=True)
class Target:
    """The execution provider to measure on, the threads one run may use, and how many examples make one run."""

    execution_provider: str = "CPUExecutionProvider"
    accelerator_type: str = "cpu"
    threads: int = 0  # 0: as many as this process may really use
    batch_size: int = 1
    threads_fixed: bool = False  # the user named a number: session tuning keeps it

    @property
    def accelerator(self) -> AcceleratorSpec:
        return AcceleratorSpec(self.accelerator_type, self.execution_provider)

    @property
    def run_threads(self) -> int:
        return self.threads or effective_cpus()


@cache
def effective_cpus() -> int:
    """Count the CPUs this process may really use: affinity and the cgroup quota, at least 1.

    ONNX Runtime's own default reads the host, not the container (microsoft/onnxruntime#29510).
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_cpus()
    return max(1, min(allowed, quota) if quota else allowed)


def _cgroup_cpus() -> int:
    """CPUs granted by the control group (v2, else v1), rounded up; 0 where there is no limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return 0 if limit == "max" else -(-int(limit) // int(period))
    except (OSError, ValueError):
        pass
    try:
        limit_us = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
        period_us = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text())
        return -(-limit_us // period_us) if limit_us > 0 else 0
    except (OSError, ValueError):
        return 0


@dataclass(frozen=True)
class Surroundings:
    """Machine and software of a measurement. Results from different surroundings never share a front."""

    cpu_model: str
    cpu_flags: tuple[str, ...]
    effective_cpus: int
    governor: str
    platform: str
    python: str
    versions: dict[str, str] = field(default_factory=dict)
    ort_variables: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "cpu_model": self.cpu_model, "cpu_flags": list(self.cpu_flags), "effective_cpus": self.effective_cpus,
            "governor": self.governor, "platform": self.platform, "python": self.python,
            "versions": self.versions, "ort_variables": self.ort_variables,
        }  # fmt: skip


INTERESTING_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "asimddp", "i8mm", "sve")
DISTRIBUTIONS = ("passtune", "onnxruntime", "onnx", "numpy", "torch", "optuna", "ray", "onnxslim", "onnxscript", "torch-pruning")


def surroundings() -> Surroundings:
    """Read the machine and the installed versions; costs a few milliseconds and imports none of the libraries named."""
    model = "unknown"
    flags: tuple[str, ...] = ()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() in ("flags", "Features"):
                present = set(value.split())
                flags = tuple(f for f in INTERESTING_FLAGS if f in present)
                break
    except OSError:
        model = platform.processor() or "unknown"
    try:
        governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text().strip()
    except OSError:
        governor = "not readable"
    return Surroundings(
        cpu_model=model, cpu_flags=flags, effective_cpus=effective_cpus(), governor=governor,
        platform=f"{platform.system()} {platform.machine()}", python=sys.version.split()[0],
        versions=library_versions(), ort_variables={k: v for k, v in sorted(os.environ.items()) if k.startswith("ORT_")},
    )  # fmt: skip


def engine_versions(modules: Iterable[str]) -> dict[str, str]:
    """Versions of the distributions that bring these modules, as far as they go by the modules' names."""
    from importlib import metadata

    found = {}
    for module in modules:
        try:
            found[module] = metadata.version(module)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def library_versions() -> dict[str, str]:
    """Versions of the distributions that can change a result; absent ones are left out."""
    return engine_versions(DISTRIBUTIONS)
