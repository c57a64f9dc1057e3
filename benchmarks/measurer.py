"""A user's own latency measurer: a function that times two models wherever it likes, such as on a device in the network.

What it returns is checked strictly and then treated like our own samples, each round as a session pair. The metrics' method names the
measurer, so that nobody takes its numbers for our timing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.benchmarks import statistics
from autotune.benchmarks.latency import Nanoseconds, PairedSamples
from autotune.benchmarks.metrics import BadOutput, NotFiniteScore
from autotune.errors import AutotuneError, ConfigError
from autotune.model import load_object

LEAST_ROUNDS = statistics.LEAST_FOR_ORDER_INTERVAL
MOST_RUNS = 10_000_000  # of each model; 80 MB as integers
FORM = "{'candidate': rounds, 'baseline': rounds}, rounds a list of integers or an array [rounds, runs], nanoseconds"


@dataclass(frozen=True)
class Measurer:
    """A function of a user's script, by name."""

    script: Path
    function: str

    @property
    def name(self) -> str:
        """The name that records carry, without folders of this machine."""
        return f"{self.script.name}:{self.function}"

    def load(self) -> Callable[..., object]:
        """Fetch the function. Raises `ConfigError` when it is missing or can't be called."""
        found = load_object(self.script, self.function, who="measure.measurer")
        if not callable(found):
            raise ConfigError("measure.measurer", f"{self.name} must be a function", type(found).__name__)
        return found  # type: ignore[no-any-return]  # what it returns is checked after each call

    def measure(
        self,
        *,
        model: Path,
        baseline: Path,
        session: Mapping[str, Any],
        baseline_session: Mapping[str, Any],
        inputs: Mapping[str, NDArray[Any]],
        rounds: int,
        seed: int,
    ) -> PairedSamples:
        """Let the function time both models, and check what it returns.

        Raises `BadOutput` or `NotFiniteScore` for what can't be used; what the function itself raises goes through.
        """
        function = self.load()
        began = time.perf_counter_ns()
        returned = function(
            model=model, baseline=baseline, session=dict(session), baseline_session=dict(baseline_session), inputs=dict(inputs),
            rounds=rounds, seed=seed,
        )  # fmt: skip
        elapsed_ns = time.perf_counter_ns() - began
        candidate, other = self._pair(returned)
        count = len(candidate)
        return PairedSamples(
            candidate_ns=candidate, baseline_ns=other, session=np.arange(count), candidate_first=np.zeros(count, np.bool_),
            candidate_first_ns=np.empty(0, np.int64), baseline_first_ns=np.empty(0, np.int64), elapsed_ns=elapsed_ns, stopped_by="measurer",
        )  # fmt: skip

    def _pair(self, returned: object) -> tuple[Nanoseconds, Nanoseconds]:
        if isinstance(returned, Mapping):
            if set(returned) != {"candidate", "baseline"}:
                raise self._fault(f"must return {FORM}", f"the keys {', '.join(sorted(map(repr, returned))) or 'none'}")
            sides: Sequence[object] = (returned["candidate"], returned["baseline"])
        elif isinstance(returned, tuple) and len(returned) == 2:
            sides = returned
        else:
            raise self._fault(f"must return {FORM}, or a tuple of the two", _shown(returned))
        candidate, baseline = (self._rounds(side, who) for side, who in zip(sides, ("candidate", "baseline"), strict=True))
        if candidate.shape != baseline.shape:
            raise self._fault(
                "must return equally many rounds and runs of both models, in pairs", f"{list(candidate.shape)} and {list(baseline.shape)}"
            )
        return candidate, baseline

    def _rounds(self, side: object, who: str) -> Nanoseconds:
        must = f"must return whole nanoseconds for the {who}"
        if isinstance(side, str | bytes | Mapping) or not isinstance(side, Sequence | np.ndarray):
            raise self._fault(must, _shown(side))
        try:
            array = np.asarray(side)
        except (ValueError, TypeError, OverflowError):
            raise self._fault(f"{must}, equally many in each round", "rounds of unequal length") from None
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            count = int((~np.isfinite(array)).sum())
            raise NotFiniteScore("measurer", f"{self.name} {must}", f"{count} of {array.size} that are NaN or infinite")
        if array.dtype.kind not in "iu" or (array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max):
            raise self._fault(must, f"values of type {_kinds(side, array)}", "Round them to integers.")
        if array.ndim not in (1, 2) or array.size == 0:
            raise self._fault(f"{must}, a list or an array [rounds, runs]", f"shape {list(array.shape)}")
        if len(array) < LEAST_ROUNDS:
            raise self._fault(f"must return at least {LEAST_ROUNDS} rounds, for an interval", str(len(array)))
        if array.size > MOST_RUNS:
            raise self._fault(f"must return at most {MOST_RUNS} runs of each model", str(array.size))
        if int(array.min()) <= 0:
            raise self._fault(f"{must}, all above 0", str(int(array.min())))
        whole: Nanoseconds = array.astype(np.int64).reshape(len(array), -1)
        return whole

    def _fault(self, must: str, got: str, do: str = "") -> BadOutput:
        return BadOutput("measurer", f"{self.name} {must}", got, do)


def _shown(value: object) -> str:
    """A value for a message, whatever its own `repr` does."""
    try:
        return f"{type(value).__name__} {value!r:.60}"
    except Exception:
        return type(value).__name__


def _kinds(side: object, array: NDArray[Any]) -> str:
    if array.dtype.kind == "O" and isinstance(side, Sequence):
        inner = [v for part in side for v in (part if isinstance(part, list | tuple) else [part])]
        return ", ".join(sorted({type(v).__name__ for v in inner}))
    return str(array.dtype)


def get_measurer(name: str, *, root: Path | None = None) -> Measurer:
    """Return the measurer `script.py:function`; a relative script stands under `root`. Raises `ConfigError` for anything else."""
    script, colon, function = name.rpartition(":")
    if not colon or not script.endswith(".py") or not function:
        raise ConfigError("measure.measurer", "the measurer must be script.py:function", repr(name))
    measurer = Measurer((root or Path()) / script, function)
    try:
        measurer.load()
    except AutotuneError:
        raise
    except Exception as error:
        raise ConfigError("measure.measurer", f"{script} must load", f"{type(error).__name__}: {error}") from error
    return measurer
