"""What the machine does while rounds are timed, and which rounds it spoilt.

A round is judged by what was seen of the machine alone, never by how long its runs took: leaving out slow rounds would make every
model look faster than it is, and the noisier the more.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# A round may lie a quarter above the quieter rounds and this share of its time; the kernel's ticks of 10 ms are allowed for on top.
CLEARLY_MORE = 1.25
FOREIGN_ALLOWANCE = 0.04
STOLEN_ALLOWANCE = 0.02
WAITING_ALLOWANCE = 0.02
THROTTLED_ALLOWANCE = 0.01
OFF_CPU_S = 0.05
ASLEEP_S = 0.001
QUIET = 0.25  # quantile of the rounds so far that stands for a quiet one
CGROUP_STATS = (Path("/sys/fs/cgroup/cpu.stat"), Path("/sys/fs/cgroup/cpu/cpu.stat"))
CPUS = Path("/sys/devices/system/cpu")
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Reading:
    """Running totals of this machine and this process at one instant, in seconds; NaN where the system doesn't tell.

    `wall_s` stands still while the machine sleeps, `boot_s` does not. `waiting_s`: threads of this process were ready to run and had no
    CPU. `busy_s` and `stolen_s` are those of the CPUs that this process may use, all processes together; time that the hypervisor took
    counts as busy. `throttled_s`: the control group's quota was used up. `hot`: how often the CPUs slowed down for heat.
    """

    wall_s: float
    boot_s: float
    own_s: float
    waiting_s: float
    busy_s: float
    stolen_s: float
    throttled_s: float
    hot: float
    mhz: float
    cpus: int

    @classmethod
    def now(cls) -> Reading:
        """Read clocks and the kernel's files; under a millisecond on a small machine."""
        cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
        busy, stolen = _cpu_times(cpus)
        boot = time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else np.nan
        wall = time.clock_gettime(time.CLOCK_MONOTONIC) if hasattr(time, "CLOCK_MONOTONIC") else time.monotonic()
        return cls(
            wall_s=wall, boot_s=boot, own_s=time.process_time(), waiting_s=_waiting_s(), busy_s=busy, stolen_s=stolen,
            throttled_s=_throttled_s(), hot=_hot(cpus), mhz=_mhz(cpus), cpus=len(cpus),
        )  # fmt: skip


def _cpu_times(cpus: set[int]) -> tuple[float, float]:
    busy = stolen = 0
    try:
        for line in Path("/proc/stat").read_text().splitlines():
            match = re.match(r"cpu(\d+) (.*)", line)
            if match and int(match[1]) in cpus:
                user, nice, system, _idle, _io, irq, softirq, steal = (int(n) for n in match[2].split()[:8])
                busy += user + nice + system + irq + softirq + steal
                stolen += steal
    except (OSError, ValueError):
        return np.nan, np.nan
    return busy / CLOCK_TICKS, stolen / CLOCK_TICKS


def _waiting_s() -> float:
    total, known = 0, False
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError, ValueError, IndexError):  # a thread may end meanwhile
                total += int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[1])
                known = True
    return total / 1e9 if known else np.nan


def _throttled_s() -> float:
    for path in CGROUP_STATS:
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "throttled_usec":
                    return int(value) / 1e6
                if name == "throttled_time":
                    return int(value) / 1e9
    return np.nan


def _hot(cpus: set[int]) -> float:
    counts = []
    for cpu in cpus:
        with contextlib.suppress(OSError, ValueError):
            counts.append(int((CPUS / f"cpu{cpu}/thermal_throttle/core_throttle_count").read_text()))
    return float(sum(counts)) if counts else np.nan


def _mhz(cpus: set[int]) -> float:
    """Mean frequency of the CPUs. From /proc/cpuinfo, which costs no interrupt of another CPU."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        number = -1
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("processor"):
                number = int(line.rpartition(":")[2])
            elif line.startswith("cpu MHz") and number in cpus:
                found.append(float(line.rpartition(":")[2]))
    return float(np.mean(found)) if found else np.nan


class Seen(NamedTuple):
    """What was seen of the machine in one round; the fields are those of `Load`."""

    wall_s: float
    foreign_s: float
    stolen_s: float
    waiting_s: float
    off_cpu_s: float
    asleep_s: float
    throttled_s: float
    hot: float
    mhz: float
    cpus: float


def between(before: Reading, after: Reading, *, pause_s: float = 0.0) -> Seen:
    """What happened between two readings, `pause_s` of which this process paused on purpose."""
    wall, own, waiting = after.wall_s - before.wall_s, after.own_s - before.own_s, after.waiting_s - before.waiting_s
    return Seen(
        wall_s=wall, foreign_s=after.busy_s - before.busy_s - own, stolen_s=after.stolen_s - before.stolen_s, waiting_s=waiting,
        off_cpu_s=max(wall - own - (0.0 if math.isnan(waiting) else waiting) - pause_s, 0.0), asleep_s=after.boot_s - before.boot_s - wall,
        throttled_s=after.throttled_s - before.throttled_s, hot=after.hot - before.hot, mhz=after.mhz,
        cpus=float(before.cpus) if before.cpus == after.cpus else min(before.cpus, after.cpus) - 0.5,
    )  # fmt: skip


@dataclass(frozen=True)
class Load:
    """What was seen of the machine in each round: arrays of shape (rounds,), NaN where the system doesn't tell.

    `foreign_s`: CPU time that others had of `cpus` CPUs, stolen time included. `waiting_s`: this process's threads waited for a CPU. `off_cpu_s`:
    it neither ran nor waited (stopped, or waiting for a device), pauses between paced runs left out. `asleep_s`: the machine slept.
    `cpus` is no whole number where it changed within the round.
    """

    wall_s: NDArray[np.float64]
    foreign_s: NDArray[np.float64]
    stolen_s: NDArray[np.float64]
    waiting_s: NDArray[np.float64]
    off_cpu_s: NDArray[np.float64]
    asleep_s: NDArray[np.float64]
    throttled_s: NDArray[np.float64]
    hot: NDArray[np.float64]
    mhz: NDArray[np.float64]
    cpus: NDArray[np.float64]

    @classmethod
    def of(cls, rounds: Sequence[Seen]) -> Load:
        return cls(*np.array(rounds, np.float64).T)

    def foreign_share(self) -> float | None:
        """Share of the CPUs' time, over all rounds, that went to others, 0 to 1."""
        available = float((self.wall_s * self.cpus).sum())
        share = float(self.foreign_s.sum()) / available if available > 0 else 0.0
        return None if np.isnan(share) else min(max(share, 0.0), 1.0)

    def disturbed(self) -> NDArray[np.bool_]:
        """Say which rounds were disturbed: by clearly more than the quieter of these rounds, or by something that is never usual.

        A load that is always there disturbs none, since there is nothing quieter to repeat a round in; it shows in `foreign_share`.
        """
        available = np.maximum(self.wall_s * self.cpus, 1e-9)
        ticks = 1 / CLOCK_TICKS / available
        wall = np.maximum(self.wall_s, 1e-9)
        found: NDArray[np.bool_] = (
            _unusual(self.foreign_s / available, FOREIGN_ALLOWANCE + 2 * ticks * np.ceil(self.cpus))
            | _unusual(self.stolen_s / available, STOLEN_ALLOWANCE + ticks)
            | _unusual(self.waiting_s / np.maximum(wall - self.off_cpu_s, 1e-9), WAITING_ALLOWANCE)
            | _unusual(self.off_cpu_s, OFF_CPU_S)
            | _unusual(self.throttled_s / wall, THROTTLED_ALLOWANCE)
            | _unusual(self.hot, 0.5)
            | (np.nan_to_num(self.asleep_s) > ASLEEP_S)
            | (self.cpus != self.cpus[0])
        )
        return found

    def summary(self) -> dict[str, Any]:
        """For a record: totals in seconds, shares, lowest, middle and highest frequency; None where the system doesn't tell."""

        def total(values: NDArray[np.float64]) -> float | None:
            return None if np.isnan(values).all() else float(np.nansum(values))

        mhz = self.mhz[~np.isnan(self.mhz)]
        return {
            "foreign_share": self.foreign_share(), "stolen_s": total(self.stolen_s), "waiting_s": total(self.waiting_s),
            "off_cpu_s": total(self.off_cpu_s), "asleep_s": total(self.asleep_s), "throttled_s": total(self.throttled_s), "hot": total(self.hot),
            "mhz": [float(mhz.min()), float(np.median(mhz)), float(mhz.max())] if len(mhz) else None, "cpus": int(self.cpus.min()),
        }  # fmt: skip


def _unusual(values: NDArray[np.float64], allowance: NDArray[np.float64] | float) -> NDArray[np.bool_]:
    if np.isnan(values).all():
        return np.zeros(len(values), np.bool_)
    return np.nan_to_num(values, nan=-np.inf) > CLEARLY_MORE * np.nanquantile(values, QUIET, method="lower") + allowance
