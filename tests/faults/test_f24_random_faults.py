"""F24: random chains of passes that may do anything, random faults, random moments to go on: every promise holds.

The promises: no trial ends the sweep (R1); a finished one is never lost or run again (R2); a killed sweep comes to the end of one that
nobody disturbed (R3); what the store gives is what was built (R4); no failed trial is on the front or a number for the sampler (R5); no
file is half there (R6); one writer (R7); each failure has its cause, stage and words (R8); nothing is written elsewhere (R9).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from autotune.store import Store
from autotune.sweep.interrupts import refuse_if_held
from autotune.sweep.search import JOURNAL_FILE
from tests.faults import test_f10_torn_record as f10
from tests.faults.agreement import disagreements
from tests.faults.deterministic import MEASURER
from tests.faults.harm import write_case
from tests.faults.test_f06_kill import differences, outcome

PASS = '''
"""A pass that does what it is told to, good or bad."""

import os
import signal
import time

import numpy as np
from onnx import numpy_helper

from autotune.passes.base import ONNX, Pass, PassConfigParam, PassContract
from autotune.passes.registry import register


@register
class Whim(Pass):
    """Weights changed by `mark`, or some harm."""

    contract = PassContract(accepts=ONNX, returns=ONNX)

    @classmethod
    def _default_config(cls, accelerator_spec):
        return {"how": PassConfigParam(type_=str, default_value="fine"), "mark": PassConfigParam(type_=int, default_value=1)}

    def _run_for_config(self, model, config, output_model_path):
        how = config["how"]
        if how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "exit":
            os._exit(3)
        if how == "raise":
            raise ValueError("no kernel for this")
        if how == "garbage":
            return {"not": "a model"}
        if how == "nothing":
            return model
        if how == "pause":
            time.sleep(0.2)
        proto = model.load()
        weights = numpy_helper.to_array(proto.graph.initializer[0]).copy()
        weights[:, config["mark"] % 4] *= 1 - 0.3 * config["mark"] if how != "nan" else np.nan
        proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(weights, proto.graph.initializer[0].name))
        proto.doc_string += "x" * config["mark"]
        return model.written(output_model_path, proto=proto)
'''
HOWS = ("fine", "crash", "exit", "raise", "garbage", "nothing", "pause", "nan")
DAMAGES = ("none", "journal torn", "bit of the journal", "file of the store gone", "bit of the store", "record torn")
KILLED = Path(__file__).with_name("killed.py")
LIMIT_S = 120.0


@dataclass(frozen=True)
class Fault:
    """SIGKILL after a share of the steps that the whole run takes, and then damage at a place of its own, a share as well."""

    when: float
    damage: str
    where: float


def slots(name: str) -> st.SearchStrategy[dict[str, Any]]:
    few = {"how": st.lists(st.sampled_from(HOWS), min_size=1, max_size=3, unique=True), "mark": st.lists(st.integers(1, 3), max_size=2, unique=True)}
    params = st.fixed_dictionaries(few).map(lambda p: {k: v for k, v in p.items() if v})
    return st.fixed_dictionaries({"slot": st.just(name), "pass": st.just("Whim"), "optional": st.booleans(), "params": params})


CHAINS = st.one_of(st.tuples(slots("one")), st.tuples(slots("one"), slots("two")))
SHARES = st.floats(0, 1, exclude_max=True)
FAULTS = st.lists(st.builds(Fault, when=SHARES, damage=st.sampled_from(DAMAGES), where=SHARES), min_size=1, max_size=2)
SWEEPS = st.fixed_dictionaries({
    "chain": CHAINS.map(list), "budget": st.fixed_dictionaries({"trials": st.integers(2, 4)}), "seed": st.integers(0, 3),
    "search": st.fixed_dictionaries({"sampler": st.sampled_from(["tpe", "random"])}),
    "constraints": st.sampled_from([[], ["accuracy >= baseline - 30pt"], ["accuracy >= baseline - 5pt", "size <= 1.0x"]]),
})  # fmt: skip


class Place:
    """A folder with a case, a sweep of it and room for its runs; whatever else appears in it breaks a promise."""

    def __init__(self, folder: Path, sweep: dict[str, Any]) -> None:
        self.folder, self.temporary = folder, folder / "tmp"
        write_case(folder)
        (folder / "whim.py").write_text(PASS)
        (folder / "measure.py").write_text(MEASURER)
        content = {
            "model": {"path": str(folder / "model.onnx")}, "data": {"eval": str(folder / "eval.npz")}, "metric": "accuracy", "target": {"threads": 1},
            "script": str(folder / "whim.py"), "measure": {"measurer": f"{folder / 'measure.py'}:latency"}, **sweep,
        }  # fmt: skip
        (folder / "sweep.json").write_text(json.dumps(content))
        self.temporary.mkdir()
        self.given = self.files()

    def files(self) -> dict[str, bytes]:
        """Files beside the runs and the temporary folder."""
        found = [p for p in self.folder.rglob("*") if p.is_file() and p.relative_to(self.folder).parts[0] not in ("tmp", "control", "out")]
        return {p.name: p.read_bytes() for p in found}

    def run(self, out: str, *, step: int = 0) -> tuple[int, str]:
        """Run the command until its end, or until it kills itself before a step; returns its exit status and what it printed on stderr."""
        mark = f"AUTOTUNE_TEST_MARK={self.temporary}"
        env = {**os.environ, "TMPDIR": str(self.temporary), "AUTOTUNE_TEST_MARK": str(self.temporary), "PYTHONDONTWRITEBYTECODE": "1"}
        arguments = ["run", str(self.folder / "sweep.json"), "--out", str(self.folder / out), "--quiet"]
        done = subprocess.run(
            [sys.executable, str(KILLED), str(step), str(self.temporary / "steps"), *arguments], capture_output=True, text=True, check=False,
            timeout=LIMIT_S, env=env, cwd=self.temporary,
        )  # fmt: skip
        deadline = time.monotonic() + 10.0
        while left := members(mark):
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.01)
        assert {p.name for p in self.temporary.iterdir() if not p.name.startswith("autotune-lane-")} <= {"steps"}
        assert self.files() == self.given
        return done.returncode, done.stderr

    def steps(self) -> int:
        """Steps of the run that came to its end."""
        return int((self.temporary / "steps").read_text())


def members(mark: str) -> list[int]:
    """Processes with a mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def at(share: float, things: list[Any]) -> Any:
    return things[int(share * len(things))]


def flip(path: Path, where: float) -> None:
    raw = bytearray(path.read_bytes())
    if raw:
        place = int(where * len(raw) * 8)
        raw[place // 8] ^= 1 << place % 8
        path.write_bytes(raw)


def do_damage(out: Path, fault: Fault) -> set[Path]:
    """Damage a run folder; returns the records of trials that are gone by it."""
    journal = out / JOURNAL_FILE
    stored = sorted(p for p in out.glob("store/entries/**/*") if p.is_file())
    records = sorted(out.glob("trials/*/trial.json"))
    if fault.damage == "journal torn" and journal.exists() and (content := journal.read_bytes()):
        start = content.rstrip(b"\n").rfind(b"\n") + 1
        os.truncate(journal, start + int(fault.where * (len(content) - start)))
    elif fault.damage == "bit of the journal" and journal.exists():
        flip(journal, fault.where)
    elif fault.damage == "file of the store gone" and stored:
        at(fault.where, stored).unlink()
    elif fault.damage == "bit of the store" and stored:
        flip(at(fault.where, stored), fault.where)
    elif fault.damage == "record torn" and records:
        lost: Path = at(fault.where, records)
        os.truncate(lost, lost.stat().st_size // 2)
        return {lost}
    return set()


def finished(out: Path) -> dict[Path, tuple[bytes, int]]:
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in out.glob("trials/*/trial.json")}


def assert_nothing_is_half_there(out: Path, torn: Mapping[Path, bytes] = MappingProxyType({})) -> None:
    """R6: whatever is read back is whole. What a stage hands to the sweep is in its own folder and read by nobody else.

    `torn`: what was torn here on purpose lies there until a sweep lives long enough to read it.
    """
    trials = ("trials/*/trial.json", "trials/*/final/trial.json", "measured/*.json")
    for pattern in ("*.json", "baseline/*.json", *trials, "store/entries/*/*/entry.json"):
        for path in out.glob(pattern):
            if not path.name.startswith(".") and path.read_bytes() != torn.get(path):
                json.loads(path.read_text())


def assert_all_is_told(out: Path) -> None:
    """R1, R2, R5, R8: each trial has its record and the study says the same; what failed has its reason and no number anywhere."""
    assert disagreements(out, ["latency", "accuracy"], ["minimize", "maximize"]) == []
    summary = json.loads((out / "result.json").read_text())
    for path in finished(out):
        record = json.loads(path.read_text())
        if record["status"] in ("failed", "invalid"):
            assert record["cause"]
            assert record["stage"]
            assert record["message"]
            assert not record["metrics"]
        if record["status"] != "ok":
            assert record["id"] not in summary["front"]
            assert record["id"] != (summary["best"] or {}).get("id")


def assert_the_store_gives_what_was_built(out: Path, control: Path) -> None:
    """R4: an entry is what an undisturbed run built under its key, or it is refused."""
    store, other = Store(out / "store"), Store(control / "store")
    for key in other.all_keys():
        found, built = store.find(key), other.find(key)
        assert built is not None
        assert found is None or found.digest == built.digest


def promises_hold(sweep: dict[str, Any], faults: list[Fault], injected: Callable[[str], None]) -> None:
    with tempfile.TemporaryDirectory(prefix="f24-") as name:
        place = Place(Path(name).resolve(), sweep)
        control, out = place.folder / "control", place.folder / "out"
        status, words = place.run("control")
        assert status == 0, words
        assert_all_is_told(control)
        steps = place.steps()
        kept: dict[Path, tuple[bytes, int]] = {}
        torn: dict[Path, bytes] = {}
        for fault in faults:
            injected("F24")
            status, words = place.run("out", step=1 + int(fault.when * steps))
            assert status in (-signal.SIGKILL, 0), words
            if not out.exists():
                continue
            assert finished(out).items() >= kept.items()
            assert_nothing_is_half_there(out, torn)
            refuse_if_held(out)  # R7: a dead owner's lock is free at once
            torn |= {p: p.read_bytes() for p in do_damage(out, fault)}
            kept = {p: v for p, v in finished(out).items() if v[0] != torn.get(p)}

        status, words = place.run("out")

        assert status == 0, words
        assert "Traceback" not in words
        assert finished(out).items() >= kept.items()
        assert_nothing_is_half_there(out)
        assert_all_is_told(out)
        assert_the_store_gives_what_was_built(out, control)
        assert differences(outcome(control), outcome(out)) == []


# An example takes seconds, so a failing one is shown as it is and not made smaller.
usual = settings(max_examples=5, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck), deadline=None)


@pytest.mark.long
@pytest.mark.timeout(600)
@given(sweep=SWEEPS, faults=FAULTS)
@usual
def test_promises_hold_under_random_faults(injected: Callable[[str], None], sweep: dict[str, Any], faults: list[Fault]) -> None:
    promises_hold(sweep, faults, injected)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@given(sweep=SWEEPS, faults=FAULTS)
@settings(usual, max_examples=40)
def test_promises_hold_under_many_random_faults(injected: Callable[[str], None], sweep: dict[str, Any], faults: list[Fault]) -> None:
    promises_hold(sweep, faults, injected)


def test_a_bit_flipped_anywhere_in_the_study_costs_no_trial_and_changes_none(tmp_path: Path, injected: Callable[[str], None]) -> None:
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "out"
    for folder in (undisturbed, out):
        folder.mkdir()
    f10.go_on(f10.resumed(undisturbed)[0], undisturbed)
    search, _ = f10.resumed(out)
    f10.go_on(search, out, until=4)
    search.ask()  # is cut off
    journal = (out / JOURNAL_FILE).read_bytes()
    kept = finished(out)
    for bit in range(0, 8 * len(journal), 127):  # each byte has one or none, and all places in a byte have their turn
        raw = bytearray(journal)
        raw[bit // 8] ^= 1 << bit % 8
        (out / JOURNAL_FILE).write_bytes(raw)
        injected("F24")

        search, _ = f10.resumed(out)

        assert disagreements_of_the_finished(out) == [], bit
        f10.go_on(search, out)
        assert {p.parent.name: v[0] for p, v in finished(out).items()} == {p.parent.name: v[0] for p, v in finished(undisturbed).items()}, bit
        assert disagreements(out, f10.NAMES, f10.DIRECTIONS) == [], bit
        assert finished(out).items() >= kept.items()
        for path in finished(out).keys() - kept.keys():
            path.unlink()
            path.parent.rmdir()


def disagreements_of_the_finished(out: Path) -> list[str]:
    """What `disagreements` finds, but that a trial is asked for and has no record yet."""
    return [d for d in disagreements(out, f10.NAMES, f10.DIRECTIONS) if not d.startswith("the study has")]
