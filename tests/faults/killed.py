"""`autotune run` in one process, as `one_process` has it, that ends by SIGKILL before a step of its own on the run folder.

`python tests/faults/killed.py STEP COUNT_FILE ARGUMENTS...`. A step is whatever changes the folder: a file opened for writing, a rename, a
removal, a new folder. With step 0 the run comes to its end, and the number of its steps is written to COUNT_FILE.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from one_process import main

import autotune.trial

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")


class Steps:
    """Counts the steps below a folder, as an audit hook of the interpreter: it sees them before they are taken."""

    def __init__(self, below: str, last: int) -> None:
        self.below, self.last, self.count = below, last, 0

    def __call__(self, event: str, args: tuple[object, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            writes = isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            step = writes or (isinstance(mode, str) and bool(set(mode) & set("wax+")))
        else:
            path, step = args[0] if args else None, event in CHANGES
        if step and isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.below):
            self.count += 1
            if self.count == self.last:
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    # The passes of these sweeps need onnx only, and a server without torch starts in a second.
    autotune.trial.PASS_PRELOAD = autotune.trial.MEASURE_PRELOAD
    arguments = sys.argv[3:]
    steps = Steps(arguments[arguments.index("--out") + 1] + "/", int(sys.argv[1]))
    sys.addaudithook(steps)
    try:
        main(arguments)
    finally:
        if not steps.last:
            Path(sys.argv[2]).write_text(str(steps.count))
