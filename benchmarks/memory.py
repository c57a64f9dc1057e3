"""Peak memory of loading and running a model, as the kernel counts it: what no Python allocator sees."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class PeakMemory:
    """Resident bytes of this process: before the work, and the most while it ran. `exact` is false where only a lower limit is known."""

    before_bytes: int
    peak_bytes: int
    exact: bool

    @property
    def growth_bytes(self) -> int:
        """What the work itself took, at its peak."""
        return max(0, self.peak_bytes - self.before_bytes)


def peak_memory(work: Callable[[], Result]) -> tuple[Result, PeakMemory]:
    """Run `work` and return its result with the peak of this process's resident memory meanwhile.

    The kernel's high-water mark is reset first (`clear_refs`, Linux). Where that is not allowed, the mark of the whole life of the
    process is read: exact only if the work raised it. Memory that was freed before and not given back would hide growth: the C
    library is asked to give it back first. What it holds on to all the same still hides some, so measure early in a fresh process.
    """
    _give_back_freed_memory()
    cleared = _reset_high_water()
    before = _status_bytes("VmRSS") or _life_peak_bytes()
    mark = _status_bytes("VmHWM") or _life_peak_bytes()
    result = work()
    peak = _status_bytes("VmHWM") or _life_peak_bytes()
    return result, PeakMemory(before, max(peak, before) if cleared or peak > mark else before, exact=cleared or peak > mark)


def _give_back_freed_memory() -> None:
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # a C library other than glibc
        return


def _reset_high_water() -> bool:
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(field: str) -> int:
    """A field of /proc/self/status in bytes; 0 where there is none."""
    try:
        for line in STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def _life_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
