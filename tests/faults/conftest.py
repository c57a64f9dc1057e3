"""The table of faults that a test run prints: how often each was injected, and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.deterministic import deterministic_sweep

FAULTS = {
    "F1": "a stage dies: SIGSEGV, SIGABRT, exit", "F2": "a stage eats the memory", "F3": "a stage hangs in native code, or is stopped",
    "F4": "the lane is busy for long", "F5": "Ctrl-C once and twice, SIGTERM, terminal closed", "F6": "kill -9 of the sweep",
    "F7": "kill -9 of Ray's processes", "F8": "two sweeps on one folder", "F9": "disk full, no handles, read-only folder",
    "F10": "the record torn at every byte", "F11": "the store damaged", "F12": "two builders of one key", "F13": "versions and data change",
    "F14": "metrics that are no numbers", "F15": "fast but wrong outputs", "F16": "the wall clock jumps", "F17": "noise while timing",
    "F18": "execution provider or option not there", "F19": "user code misbehaves", "F20": "the study's database is dead or slow",
    "F21": "no terminal, pipe closed, odd locale", "F22": "clean beside bundles and running sweeps", "F23": "a hundred restarts of a long record",
    "F24": "random passes, faults and resume points",
}  # fmt: skip

_injected: Counter[str] = Counter()
_outcomes: dict[str, Counter[str]] = {}


@pytest.fixture
def injected(request: pytest.FixtureRequest) -> Iterator[Callable[[str], None]]:
    """Call it with the fault's number once for each injection that the test makes."""
    seen: Counter[str] = Counter()

    def note(fault: str) -> None:
        assert fault in FAULTS, f"no fault {fault}"
        seen[fault] += 1

    yield note
    assert seen, "a test of a fault must inject one"
    _injected.update(seen)
    request.node.stash[_FAULTS_OF] = tuple(seen)


@pytest.fixture(scope="session")
def deterministic(digits: Path, sweep_of: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """A function that writes a sweep whose every number follows from bytes into a folder: the same trials and front in every run."""

    def write(folder: Path, **more: Any) -> dict[str, Any]:
        return deterministic_sweep(sweep_of, digits, folder, **more)

    return write


_FAULTS_OF = pytest.StashKey[tuple[str, ...]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if call.when == "teardown":
        for fault in item.stash.get(_FAULTS_OF, ()):
            _outcomes.setdefault(fault, Counter())["failed" if item.stash.get(_BROKEN, False) else "passed"] += 1
    elif report.failed:
        item.stash[_BROKEN] = True
    return report


_BROKEN = pytest.StashKey[bool]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line for each fault: injections, tests passed and failed."""
    if not _outcomes:
        return
    terminalreporter.section("faults")
    terminalreporter.write_line(f"{'fault':5} {'injections':>10} {'passed':>6} {'failed':>6}")
    for fault, what in FAULTS.items():
        outcome = _outcomes.get(fault, Counter())
        ran = f"{_injected[fault]:>10} {outcome['passed']:>6} {outcome['failed']:>6}" if outcome else f"{'not run here':>24}"
        terminalreporter.write_line(f"{fault:5} {ran}  {what}")
