"""`autotune run` with its trials one after another in this process instead of under Ray: the same engine, started in a second.

`python tests/faults/one_process.py [--fail-write N ERRNO] ARGUMENTS...` runs the command with those arguments. With `--fail-write` the
N-th opening of a file for writing by the sweep's own process fails (children are left alone), and so does each one after it, as on a
disk that has become full.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def run_in_turn(run: Path, search: Any, *, on_trial: Callable[[Any], None], read_record: Callable[[int], Any], **_hooks: Any) -> None:
    """What `autotune.sweep.ray_tune.run_trials` does, in this process."""
    from autotune.pipeline import Pipeline
    from autotune.trial import TrialPlan, TrialRunner

    plan = TrialPlan.load(run)
    pipeline = Pipeline(plan.sweep, plan.facts)
    with TrialRunner(run, plan.sweep) as runner:
        while (asked := search.ask()) is not None:
            runner.run(plan, pipeline, asked.number, asked.point, asked.origin, attempt=asked.attempt)
            record = read_record(asked.number)
            search.tell(record)
            on_trial(record)


def fail_writes_from(count: int, number: int, below: str) -> None:
    """Let the `count`-th opening for writing below a folder and all later ones fail with an errno, until the process ends."""
    opened = 0
    real_open, real_os_open = builtins.open, os.open

    def refuse(path: Any) -> None:
        nonlocal opened
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(below):
            opened += 1
            if opened >= count:
                raise OSError(number, os.strerror(number), os.fspath(path))

    def open_(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
        if set(mode) & set("wax+"):
            refuse(file)
        return real_open(file, mode, *args, **more)

    def os_open(path: Any, flags: int, *args: Any, **more: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            refuse(path)
        return real_os_open(path, flags, *args, **more)

    builtins.open = io.open = open_  # type: ignore[assignment] # pathlib looks it up in io
    os.open = os_open  # type: ignore[assignment]


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    from autotune.cli import main as autotune
    from autotune.sweep import ray_tune

    ray_tune.run_trials = run_in_turn  # type: ignore[assignment]
    if arguments[0] == "--fail-write":
        out = arguments[arguments.index("--out") + 1]
        fail_writes_from(int(arguments[1]), getattr(errno, arguments[2]), out)
        arguments = arguments[3:]
    autotune(list(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
