"""The errors a user can meet; each says who speaks, what must hold, what came, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AutotuneError(Exception):
    """A mistake or an obstacle that the user can mend. `exit_status` is what the command ends with.

    Every constructor argument goes to `super().__init__`, so that the error survives the way back from a worker process.
    """

    exit_status = 2

    def __init__(self, who: str, must: str, got: str = "", do: str = "") -> None:
        super().__init__(who, must, got, do)
        self.who = who
        self.must = must
        self.got = got
        self.do = do

    def __str__(self) -> str:
        text = f"{self.who}: {self.must}"
        if self.got:
            text += f"; got {self.got}"
        text += "" if text.endswith((".", "?")) else "."
        if self.do:
            text += f" {self.do}" if self.do.endswith((".", "?")) else f" {self.do}."
        return text


class ConfigError(AutotuneError):
    """A sweep file, an argument or a value that can't be used (exit status 2)."""


class SpaceError(ConfigError):
    """A search space that can't be compiled: unknown parents, a cycle, an empty choice, no valid point (exit status 2)."""


class PassConfigError(ConfigError):
    """A pass was given a parameter it doesn't have, or a value its table refuses (exit status 2)."""


class EnvironmentFault(AutotuneError):
    """The machine or its installation is in the way: no such EP, a missing package, a locked run folder (exit status 3)."""

    exit_status = 3
    resumable = False  # True on the way out of a sweep that has saved what is finished: the same command goes on


class PassError(AutotuneError):
    """A pass could not do its work on this model; the trial ends as `failed: exception`."""


class NoFeasibleModel(AutotuneError):
    """No candidate meets the constraints (exit status 4)."""

    exit_status = 4


class VerificationError(AutotuneError):
    """A bundle is not what it says it is (exit status 5)."""

    exit_status = 5


def nearest(name: str, known: Iterable[str]) -> str:
    """Say `Did you mean 'x'?` for a misspelt name, or list what there is when nothing is near. Empty for no known names."""
    names = sorted(known)
    if not names:
        return ""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if not close:
        lower = {n.lower(): n for n in names}
        close = [lower[n] for n in difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)]
    if close:
        return f"Did you mean {close[0]!r}?"
    return "Known: " + ", ".join(names) + "."
