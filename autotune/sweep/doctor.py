"""Is this machine fit to tune on? Sessions are started to find out; what is listed is no proof."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from autotune.runtime_options import WHEELS, options_of
from autotune.stages import StageLimits, StageRunner
from autotune.target import surroundings

LOW_DISK_BYTES = 2 * 10**9


def examine() -> dict[str, Any]:
    """Look at versions, CPUs, execution providers, disk and clock. `usable` says whether a sweep can run on the CPU."""
    here = surroundings()
    problems: list[str] = []
    warnings: list[str] = []
    wheels = [w for w in WHEELS if _installed(w)]
    if len(wheels) > 1:
        warnings.append(f"several onnxruntime wheels share one folder and hide each other: {', '.join(wheels)}")
    if options_of().note:
        warnings.append(options_of().note)
    providers = []
    with tempfile.TemporaryDirectory() as place, StageRunner(("numpy", "onnx", "onnxruntime")) as runner:
        begun = time.perf_counter()
        first = _start(runner, "CPUExecutionProvider", Path(place))
        for name in ["CPUExecutionProvider", *(p for p in first.get("listed", []) if p not in ("CPUExecutionProvider", "AzureExecutionProvider"))]:
            found = first if name == "CPUExecutionProvider" else _start(runner, name, Path(place))
            providers.append({"name": name, "started": found["started"], "why": found["why"]})
        child_seconds = time.perf_counter() - begun
    if not providers[0]["started"]:
        problems.append(f"no session starts on the CPU: {providers[0]['why']}")
    free = shutil.disk_usage(Path.cwd()).free
    if free < LOW_DISK_BYTES:
        problems.append(f"only {free / 1e9:.1f} GB free in this folder; a sweep needs room for its models")
    if here.governor not in ("performance", "not readable"):
        warnings.append(f"CPU governor is {here.governor}: timings will drift; performance is steadier")
    if here.cpu_flags and not {"avx512_vnni", "avx_vnni", "amx_int8", "i8mm", "asimddp"} & set(here.cpu_flags):
        warnings.append("this CPU has no int8 dot product: 8-bit models may be no faster, and 8-bit weights can overflow (reduce_range)")
    return {
        "usable": not problems, "problems": problems, "warnings": warnings, "surroundings": here.to_json(), "wheels": wheels,
        "providers": providers, "disk_free_bytes": free, "child_start_seconds": round(child_seconds / max(1, len(providers)), 3),
        "clock_resolution_ns": int(time.get_clock_info("perf_counter").resolution * 1e9),
    }  # fmt: skip


def _start(runner: StageRunner, provider: str, folder: Path) -> dict[str, Any]:
    outcome = runner.run("autotune.sweep.prepare:start_session", {"ep": provider}, folder=folder, limits=StageLimits(60.0))
    return outcome.value or {"started": False, "why": f"{outcome.cause}: {outcome.message}", "listed": []}


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def render(findings: Mapping[str, Any]) -> str:
    """The findings as text, fit to be pasted into a report."""
    here = findings["surroundings"]
    versions = " · ".join(f"{k} {v}" for k, v in here["versions"].items())
    flags = ", ".join(here["cpu_flags"]) or "no known flags"
    lines = [
        f"python {here['python']} · {versions}",
        f"cpu    {here['cpu_model']} · {here['effective_cpus']} effective CPUs · {flags} · governor {here['governor']}",
    ]
    for provider in findings["providers"]:
        lines.append(f"ep     {provider['name']}  " + ("session ok" if provider["started"] else f"session FAILED: {provider['why']}"))
    variables = ", ".join(f"{k}={v}" for k, v in here["ort_variables"].items()) or "none"
    lines.append(
        f"disk   {findings['disk_free_bytes'] / 1e9:.0f} GB free · timer {findings['clock_resolution_ns']} ns · ORT_* variables: {variables}"
    )
    lines += [f"warning: {w}" for w in findings["warnings"]] + [f"problem: {p}" for p in findings["problems"]]
    lines.append("verdict: usable" if findings["usable"] else "verdict: NOT usable")
    return "\n".join(lines)
