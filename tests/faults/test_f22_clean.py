"""F22: `clean` beside a bundle, a running sweep and a store. What is referred to or in use stays; the bytes are those announced."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.bundle import verify_bundle
from autotune.errors import EnvironmentFault
from autotune.store import FILES, Store, folder_bytes
from autotune.sweep.clean import clean
from autotune.sweep.result import SweepResult, read_result
from autotune.sweep.run import run

Write = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def original(deterministic: Write, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], SweepResult]:
    folder = tmp_path_factory.mktemp("clean")
    sweep = deterministic(folder, budget={"trials": 4})
    return sweep, run(sweep, folder / "out")


def litter(out: Path) -> None:
    """What kills leave, and an artifact of a trial that never came to its record."""
    shutil.copytree(next((out / "store" / "entries").glob("??/*")), out / "store" / "entries" / "ff" / ("f" * 64))
    for place in ("building/1-1-dead/files", "quarantine/x-1"):
        (out / "store" / place).mkdir(parents=True)
        (out / "store" / place / "half").write_bytes(b"x" * 5000)
    (out / "trials" / "t-0004" / "check").mkdir(parents=True)
    (out / "trials" / "t-0004" / "check" / "log.txt").write_text("cut off")
    (out / ".plan.json.1.tmp").write_text("{")


@pytest.mark.parametrize("everything", [False, True])
def test_a_cleaned_run_has_its_bundle_its_result_and_its_best_model(
    original: tuple[dict[str, Any], SweepResult], tmp_path: Path, injected: Callable[[str], None], everything: bool
) -> None:
    _, before = original
    out = tmp_path / "out"
    shutil.copytree(before.run, out)
    litter(out)
    size = folder_bytes(out)
    injected("F22")

    announced = clean(out, dry_run=True, everything=everything)
    done = clean(out, everything=everything)

    assert announced.freed_bytes == done.freed_bytes > 15_000
    assert abs(size - folder_bytes(out) - done.freed_bytes) < 200  # the lock file's own text
    assert [c for c in verify_bundle(out / "best.bundle") if c.state == "failed"] == []
    assert read_result(out).records == before.records
    best = json.loads((out / "best_so_far.json").read_text())
    assert (out / best["model"] / "model.onnx").is_file()
    store = Store(out / "store")
    assert all(store.find(key) is not None for key in store.all_keys())
    used = {s.key for r in before.records if not everything or r.id in {best["best"], *best["front"]} for s in r.stages if s.key}
    assert set(store.all_keys()) == used


def test_a_run_goes_on_after_all_artifacts_but_the_best_are_gone(
    original: tuple[dict[str, Any], SweepResult], tmp_path: Path, injected: Callable[[str], None]
) -> None:
    sweep, before = original
    out = tmp_path / "out"
    shutil.copytree(before.run, out)
    litter(out)
    shutil.rmtree(out / "best.bundle")
    injected("F22")
    clean(out, everything=True)

    after = run(sweep, out)

    assert (after.status, after.summary["front"]) == ("delivered", before.summary["front"])
    assert after.best == before.best or (after.best and before.best and after.best.model_digest == before.best.model_digest)


@pytest.mark.long
def test_nothing_is_removed_beside_a_running_sweep(
    original: tuple[dict[str, Any], SweepResult], tmp_path: Path, deterministic: Write, injected: Callable[[str], None]
) -> None:
    out = tmp_path / "out"
    (tmp_path / "sweep.json").write_text(json.dumps(deterministic(tmp_path, budget={"trials": 3})))
    sweep = subprocess.Popen(
        [sys.executable, "-m", "autotune", "run", str(tmp_path / "sweep.json"), "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 120
        while not (out / "plan.json").exists():
            assert sweep.poll() is None, sweep.stderr.read() if sweep.stderr else ""
            assert time.monotonic() < deadline
            time.sleep(0.05)
        refused = 0
        for dry_run in (True, False):
            injected("F22")
            with pytest.raises(EnvironmentFault, match=f"held by pid {sweep.pid}"):
                clean(out, dry_run=dry_run, everything=True)
            refused += 1
        assert refused == 2
    finally:
        sweep.communicate(timeout=120)
    assert sweep.returncode == 0
    assert len(read_result(out).records) == 3


def test_what_a_live_builder_builds_and_a_trial_uses_is_never_touched(
    original: tuple[dict[str, Any], SweepResult], tmp_path: Path, injected: Callable[[str], None]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(original[1].run, out)
    store = Store(out / "store")
    place = store.place()
    (place / FILES / "half").write_bytes(b"x")
    injected("F22")

    with store.in_use(), pytest.raises(EnvironmentFault, match="a trial that still runs"):
        clean(out)
    clean(out)

    assert (place / FILES / "half").exists()
    assert os.getpid() == int(place.name.partition("-")[0])
