"""F6: SIGKILL for the sweep at any instant. The same command goes on to the very trials, front and choice of a run that nobody disturbed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from autotune.bundle import verify_bundle
from autotune.digest import digest_tree
from autotune.sweep.result import read_result
from autotune.trial import stage_now
from tests.faults.agreement import disagreements
from tests.faults.sweeps import PATIENCE_S, SweepProcess, sweeping

Sweep = Callable[..., dict[str, Any]]
Injected = Callable[[str], None]
GONE_S = 5.0  # for all that a killed sweep had started to be gone
COMPARED = (
    "id", "number", "point", "origin", "status", "cause", "stage", "message", "metrics", "constraints", "model_digest", "session", "unchanged",
    "shares_with", "attempts",
)  # fmt: skip


@dataclass(frozen=True)
class Moment:
    """When to kill: once the sweep has come to a part of its life, after so many changes of the run folder or so many seconds.

    Parts: -1 until the baseline is measured, n while trial n runs, `trials` at the last measurements, and then the bundle.
    """

    part: int
    changes: int
    seconds: float


def moments(count: int, trials: int, seed: int) -> list[Moment]:
    """Moments spread over the whole life of a sweep of so many trials; every third one by the clock, the others by changes."""
    rng = random.Random(seed)
    found = []
    for i in range(count):
        part = -1 + (trials + 3) * i // count
        most = 8 if part < 0 else 14 if part < trials else 5 if part == trials else 2
        by_clock = i % 3 == 2
        found.append(Moment(part, 0 if by_clock else rng.randint(1, most), rng.uniform(0, 0.5 if part < trials else 0.1) if by_clock else 0.0))
    return found


def what_stands(out: Path) -> tuple[Any, ...]:
    """What can be seen of a run folder from outside; it changes with nearly every write and rename of the sweep and its workers."""

    def stamp(name: str) -> tuple[int, ...]:
        try:
            found = os.stat(out / name)
        except OSError:
            return ()
        return found.st_ino, found.st_mtime_ns, found.st_size

    def names(name: str) -> tuple[str, ...]:
        try:
            return tuple(sorted(os.listdir(out / name)))
        except OSError:
            return ()

    last = next(iter(names("trials")[-1:]), "")
    files = ("study.journal", "now.json", "best_so_far.json", f"trials/{last}/trial.json", f"trials/{last}/final/trial.json", "result.json")
    return *map(stamp, files), *map(names, ("", "trials", "store/entries", "store/building", "measured", "baseline", ".best.bundle"))


def arrived(out: Path, part: int, trials: int) -> bool:
    """Whether a sweep has come to that part of its life."""
    if part < trials:
        return len(list(out.glob("trials/*/trial.json"))) >= part
    if part == trials:
        return "final" in str((stage_now(out) or {}).get("stage"))
    return any(p.name.startswith(".best.bundle") or p.name == "best.bundle" for p in out.iterdir())


def killed_at(sweep: SweepProcess, moment: Moment, trials: int) -> bool:
    """Kill a sweep at a moment; False when it came to its end before."""
    deadline = time.monotonic() + PATIENCE_S
    changes, reached_at = 0, 0.0
    before = what_stands(sweep.out)
    while sweep.process.poll() is None:
        assert time.monotonic() < deadline, f"never came to {moment}: {sweep.output[-2000:]}"
        now = what_stands(sweep.out)
        if reached_at or arrived(sweep.out, moment.part, trials):
            reached_at = reached_at or time.monotonic()
            changes += now != before
            if changes >= moment.changes and time.monotonic() - reached_at >= moment.seconds:
                os.kill(sweep.process.pid, signal.SIGKILL)
                return sweep.ended() == -signal.SIGKILL
        before = now
        time.sleep(0.002)
    return False


@dataclass
class History:
    """What was seen of a sweep over its restarts."""

    out: Path
    kept: dict[Path, tuple[bytes, int]] = field(default_factory=dict)  # finished trials: the record's bytes and time
    started: set[str] = field(default_factory=set)
    resumed_s: list[float] = field(default_factory=list)
    kills: int = 0
    gone_s: float = 0.0

    def look(self, output: str) -> None:
        """Check one run of the sweep against those before it."""
        events = [json.loads(line) for line in output.splitlines(keepends=True) if line.startswith("{") and line.endswith("\n")]
        started = {e["trial"] for e in events if e["event"] == "trial-started"}
        finished = {p.parent.name for p in self.kept}
        assert not started & finished, "a finished trial was run again"
        assert len(started & self.started) <= 1, "more than one trial was started again"
        for path, (content, written_ns) in self.kept.items():
            assert (path.read_bytes(), path.stat().st_mtime_ns) == (content, written_ns), f"{path.parent.name} was written again"
        records = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in self.out.glob("trials/*/trial.json")}
        assert len(list(self.out.glob("trials/t-*"))) - len(records) <= 1
        self.started |= started
        self.resumed_s += [e["seconds"] for e in events if e["event"] == "search-started" and finished]
        self.kept = records


def outcome(run: Path) -> dict[str, Any]:
    """All that a run came to, without times; peak memory is the one thing that is really measured here, and is left out."""

    def still(content: Any) -> Any:
        if isinstance(content, dict):
            return {k: still(v) for k, v in content.items() if k not in ("peak_memory", "seconds")}
        if isinstance(content, list):
            return [still(v) for v in content]
        return content.replace(str(run), "RUN") if isinstance(content, str) else content

    def record(path: Path) -> dict[str, Any]:
        content = json.loads(path.read_text())
        return {k: still(content[k]) for k in COMPARED}

    summary = read_result(run).summary
    return {
        "records": {p.parent.name: record(p) for p in sorted(run.glob("trials/*/trial.json"))},
        "finalists": {p.parent.parent.name: record(p) for p in sorted(run.glob("trials/*/final/trial.json"))},
        **{k: still(summary[k]) for k in ("status", "verdict", "best", "front", "picks", "groups", "trials", "near_misses", "hypervolume")},
        "delivered": digest_tree(run / "best.bundle" / "model"),
    }


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Where two outcomes differ, in words."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [d for k in sorted(a.keys() | b.keys()) for d in differences(a.get(k), b.get(k), f"{where}/{k}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for n, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{where}/{n}")]
    return [] if a == b else [f"{where}: {a!r} and {b!r}"]


def killed_and_resumed(content: dict[str, Any], folder: Path, plan: list[Moment], injected: Injected) -> History:
    """Run a sweep, kill it at one moment after the other, resume it each time by the same command, and let it come to its end."""
    trials = content["budget"]["trials"]
    history = History(folder / "out")
    for moment in plan:
        with sweeping(content, folder, "--json-lines") as sweep:
            killed = killed_at(sweep, moment, trials)
            if killed:
                injected("F6")
                begun = time.monotonic()
                assert sweep.nothing_left(within_s=GONE_S), (moment, sweep.members(), sweep.folders(), sweep.output[-500:])
                history.kills += 1
                history.gone_s = max(history.gone_s, time.monotonic() - begun)
            else:
                assert sweep.ended() == 0, sweep.output
            history.look(sweep.output)
        if not killed:  # it was quicker: take the end away, so that there is one again to be killed in
            (history.out / "result.json").unlink()
            shutil.rmtree(history.out / "best.bundle")
    with sweeping(content, folder, "--json-lines") as sweep:
        assert sweep.ended() == 0, sweep.output
        history.look(sweep.output)
    return history


@pytest.fixture
def control(deterministic: Sweep, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    """A sweep of so many trials, and what it comes to when nobody disturbs it."""
    content = deterministic(tmp_path / "control", budget={"trials": request.param})
    with sweeping(content, tmp_path / "control") as sweep:
        assert sweep.ended() == 0, sweep.output
    return content, outcome(tmp_path / "control" / "out")


def assert_as_if_undisturbed(control: dict[str, Any], history: History) -> None:
    assert differences(control, outcome(history.out)) == []
    assert disagreements(history.out, ["latency", "accuracy"], ["minimize", "maximize"]) == []
    assert [c for c in verify_bundle(history.out / "best.bundle") if c.state == "failed"] == []


def report(history: History) -> None:
    resumed = f"resumed in {statistics.median(history.resumed_s):.2f} s (median)" if history.resumed_s else "never resumed"
    print(f"\nF6: {history.kills} kills, {len(history.kept)} trials, none lost; {resumed}, all gone in {history.gone_s:.2f} s at most")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("control", [6], indirect=True)
def test_killed_at_five_moments_a_sweep_comes_to_the_same_end(
    control: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path, injected: Injected
) -> None:
    content, undisturbed = control
    plan = [Moment(-1, 5, 0.0), Moment(1, 4, 0.0), Moment(3, 0, 0.2), Moment(5, 8, 0.0), Moment(6, 3, 0.0)]

    history = killed_and_resumed(content, tmp_path, plan, injected)

    report(history)
    assert history.kills == len(plan)
    assert_as_if_undisturbed(undisturbed, history)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("control", [20], indirect=True)
def test_killed_at_fifty_moments_a_sweep_of_twenty_trials_comes_to_the_same_end(
    control: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path, injected: Injected
) -> None:
    content, undisturbed = control

    history = killed_and_resumed(content, tmp_path, moments(56, 20, seed=6), injected)

    report(history)
    assert history.kills >= 50  # of the last ones some may come too late
    assert_as_if_undisturbed(undisturbed, history)
