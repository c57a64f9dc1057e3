"""The lane: one measurement at a time on a device, and nobody of ours builds meanwhile. A kernel lock, so a dead owner frees it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def lane_file(execution_provider: str) -> Path:
    """The lock file of a device; one per user and execution provider, for the whole host."""
    return Path(tempfile.gettempdir()) / f"autotune-lane-{os.getuid()}-{execution_provider}.lock"


@contextlib.contextmanager
def lane(execution_provider: str, *, exclusive: bool) -> Iterator[None]:
    """Hold the device's lane: exclusive to time, shared to build. Waits as long as it takes; waiting is nobody's time limit."""
    with lane_file(execution_provider).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield  # closing the file lets go
