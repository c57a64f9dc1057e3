"""Writing to people who may have stopped reading: a sweep is worth more than its lines. Imports nothing slow."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


def write_line(line: str, stream: TextIO) -> None:
    """Write a line and flush. When nobody reads any more, what comes later goes nowhere."""
    try:
        stream.write(line.rstrip("\n") + "\n")
        stream.flush()
    except (OSError, ValueError):
        silence(stream)


def silence(stream: TextIO) -> None:
    """Point a stream that nobody reads at nothing, so that Python can flush it at its end without a word."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def take_any_text() -> None:
    """Let stdout and stderr take every character, as a question mark where their encoding has none (LANG=C)."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None and "utf" not in (stream.encoding or "").lower():
            reconfigure(errors="replace")
