"""F20: the study's database is dead, slow, or dies while a sweep runs: what is finished stays, and the same command goes on."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import EnvironmentFault
from autotune.sweep.run import run
from autotune.sweep.search import open_study

Sweep = Callable[..., dict[str, Any]]
Injected = Callable[[str], None]


@pytest.mark.parametrize("dead", ["no such folder", "no database"])
def test_a_database_that_is_dead_at_the_start_is_said_to_be(injected: Injected, tmp_path: Path, dead: str) -> None:
    path = tmp_path / "gone" / "study.db" if dead == "no such folder" else tmp_path / "study.db"
    if dead == "no database":
        path.write_bytes(b"something else entirely" * 1000)
    injected("F20")

    with pytest.raises(EnvironmentFault, match=r"study: the study's storage must open; got .*(unable to open database file|is not a database)"):
        open_study(tmp_path, f"sqlite:///{path}", ["minimize"], ["latency"])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_database_that_dies_while_a_sweep_runs_costs_no_finished_trial(deterministic: Sweep, injected: Injected, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    sweep = deterministic(tmp_path, budget={"trials": 3}, storage=url)
    other = sqlite3.connect(tmp_path / "study.db", isolation_level=None)

    def lock(event: Mapping[str, Any]) -> None:
        if event["event"] == "trial-finished" and event["finished"] == 2:
            injected("F20")
            other.execute("BEGIN EXCLUSIVE")  # nobody else reads or writes until this ends

    with pytest.raises(EnvironmentFault, match=r"study: the study's storage must answer; got .*database is locked") as stop:
        run(sweep, tmp_path / "out", on_event=lock)
    kept = {p: p.read_text() for p in (tmp_path / "out").glob("trials/*/trial.json")}
    other.execute("ROLLBACK")
    other.close()
    result = run(sweep, tmp_path / "out")

    assert stop.value.resumable
    assert stop.value.exit_status == 3
    assert len(kept) >= 2
    assert {p: p.read_text() for p in kept} == kept
    assert result.status == "delivered"
    study, _ = open_study(result.run, url, ["minimize", "maximize"], ["latency", "accuracy"])
    assert [t.number for t in study.trials] == [r.number for r in result.records]
    assert all(t.state.is_finished() for t in study.trials)


def test_a_database_that_is_slow_for_a_while_is_waited_for(injected: Injected, tmp_path: Path) -> None:
    import threading

    path = tmp_path / "study.db"
    study, _ = open_study(tmp_path, f"sqlite:///{path}", ["minimize"], ["latency"])
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")
    injected("F20")
    threading.Timer(1.0, lambda: other.execute("ROLLBACK")).start()

    study.ask()

    assert len(study.trials) == 1
    other.close()
