"""Ray Tune runs the trials: one Tuner, a thin Searcher around ours, workers reused. The one module that runs Ray.

No state of ours lives in Ray: the study and the trials' records on disk are the sweep, and a new Tuner takes up where they stand.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune import FailureConfig, RunConfig, TuneConfig
from ray.tune.search import Searcher

from autotune.digest import dump_json, write_durably
from autotune.errors import EnvironmentFault
from autotune.pipeline import Pipeline
from autotune.records import Cause, Status, TrialRecord
from autotune.sweep.search import Asked, Search
from autotune.target import effective_cpus
from autotune.trial import TRIAL_FILE, TrialPlan, TrialRunner

QUIET = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # a cluster of our own on loopback; no token file in the user's home
    "RAY_worker_niceness": "0",  # workers run at nice 15 otherwise, and timings starve on a busy machine
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # the sweep handles interrupts itself
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",
    "TUNE_MAX_PENDING_TRIALS_PG": "1",
}
WORKER_FAILURES = 1  # a trial whose worker died is run once more

OnTrial = Callable[[TrialRecord], None]


class EachStep(tune.Callback):
    """Lets an interrupt be raised between two steps of Tune's loop, in Python and not inside Ray's native code."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Called ten times a second."""
        self._check()


class PointSearcher(Searcher):
    """Hands our points to Ray and takes the ends of trials back. Never raises while Ray asks: that would end the sweep."""

    def __init__(
        self, run: Path, search: Search, read_record: Callable[[int], TrialRecord | None], on_trial: OnTrial, may_start: Callable[[], bool]
    ) -> None:
        super().__init__(metric="number", mode="max")
        self._run = run
        self._search, self._read, self._on_trial, self._may_start = search, read_record, on_trial, may_start
        self._running: dict[str, Asked] = {}
        self.error: Exception | None = None

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override] # FINISHED is a string, as Ray documents
        """The next point as a Ray config, or FINISHED."""
        asked = None
        try:
            if self.error is None and self._may_start():
                asked = self._search.ask()
        except Exception as error:  # kept, and raised once Ray has ended
            self.error = error
        if asked is None:
            return str(Searcher.FINISHED)
        self._running[trial_id] = asked
        return {
            "run": str(self._run),
            "number": asked.number,
            "point": dump_json(asked.point, indent=None),
            "origin": asked.origin,
            "attempt": asked.attempt,
        }

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Read the trial's record from disk and tell it; a trial without one lost its worker."""
        asked = self._running.pop(trial_id, None)
        if asked is None or self.error is not None:
            return
        try:
            record = self._read(asked.number)
            if record is None and asked.attempt <= WORKER_FAILURES:
                self._search.again(asked)
                return
            if record is None:
                record = TrialRecord(
                    number=asked.number, point=asked.point, status=Status.FAILED, origin=asked.origin, cause=Cause.INFRA, stage="worker",
                    message="the worker process died before the trial could write its record, twice", attempts=asked.attempt,
                )  # fmt: skip
            self._search.tell(record)
            self._on_trial(record)
        except Exception as failure:
            self.error = failure

    def save(self, checkpoint_path: str) -> None:
        """Nothing of ours is kept in Ray."""
        Path(checkpoint_path).write_text("{}")

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore: a sweep is resumed from its run folder."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


def run_point(config: dict[str, Any]) -> None:
    """Run one trial in this Ray worker (in children of it) and report that its record is on disk."""
    point = json.loads(config["point"])
    try:
        plan, pipeline, runner = _worker(Path(config["run"]))
        runner.run(plan, pipeline, config["number"], point, config["origin"], attempt=config["attempt"])
    except Exception as error:  # not the trial's doing: a full disk, a plug-in that does not load here, a mistake of ours
        record = TrialRecord(
            number=config["number"], point=point, status=Status.FAILED, origin=config["origin"], cause=Cause.INFRA, stage="worker",
            message=f"{type(error).__name__}: {error}", attempts=config["attempt"],
        )  # fmt: skip
        folder = Path(config["run"]) / "trials" / record.id
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / TRIAL_FILE, dump_json(record.to_json()))
    tune.report({"number": config["number"]})


_kept: dict[Path, tuple[TrialPlan, Pipeline, TrialRunner]] = {}


def _worker(run: Path) -> tuple[TrialPlan, Pipeline, TrialRunner]:
    """Plan, pipeline and child servers of a run, made once per worker process."""
    if run not in _kept:
        plan = TrialPlan.load(run)
        _kept[run] = (plan, Pipeline(plan.sweep, plan.facts), TrialRunner(run, plan.sweep))
    return _kept[run]


@contextlib.contextmanager
def local_ray() -> Iterator[None]:
    """Start Ray on this machine, quiet, without dashboard, on loopback; stop it at the end. A Ray that runs already is used as it is.

    Raises `EnvironmentFault` when Ray can't start.
    """
    before = {k: os.environ.get(k) for k in QUIET}
    os.environ.update(QUIET)
    ours = not ray.is_initialized()
    for name in ("ray", "ray.tune", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        if ours:
            scratch = tempfile.mkdtemp(prefix="autotune-")  # short: Ray's sockets stand below it
            handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
            try:
                ray.init(
                    num_cpus=effective_cpus(), include_dashboard=False, log_to_driver=False, logging_level=logging.CRITICAL,
                    configure_logging=True, _node_ip_address="127.0.0.1", object_store_memory=100 * 2**20, _temp_dir=scratch,
                )  # fmt: skip
            except Exception as error:  # Ray raises many kinds here
                raise EnvironmentFault("ray", "Ray must start on this machine", str(error).splitlines()[0] if str(error) else repr(error)) from error
            if threading.current_thread() is threading.main_thread():
                for number, handler in handlers.items():  # Ray puts handlers of its own in their place
                    signal.signal(number, handler)
        yield
    finally:
        if ours:
            ray.shutdown()
            shutil.rmtree(scratch, ignore_errors=True)
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def run_trials(
    run: Path, search: Search, *, on_trial: OnTrial, may_start: Callable[[], bool], read_record: Callable[[int], TrialRecord | None],
    check: Callable[[], None],
) -> None:  # fmt: skip
    """Run trials until the search ends, `may_start` says no, or `check` (called often) raises. Raises what our own code raised inside."""
    searcher = PointSearcher(run, search, read_record, on_trial, may_start)
    run_config = RunConfig(
        name="tune", storage_path=str(run / "ray"), verbose=0, failure_config=FailureConfig(max_failures=0), callbacks=[EachStep(check)]
    )
    tuner = tune.Tuner(
        tune.with_resources(run_point, {"cpu": effective_cpus()}),
        tune_config=TuneConfig(
            search_alg=searcher, num_samples=-1, max_concurrent_trials=1, reuse_actors=True,
            trial_name_creator=_trial_name, trial_dirname_creator=_trial_name,
        ),
        run_config=run_config,
    )  # fmt: skip
    try:
        with local_ray():
            check()
            tuner.fit()
    finally:
        shutil.rmtree(run / "ray", ignore_errors=True)  # Ray's own notes; nothing is resumed from them
    if searcher.error is not None:
        raise searcher.error


def _trial_name(trial: Any) -> str:
    """A short folder name: Ray's own holds all parameters, and grows beyond what file systems take."""
    return str(trial.trial_id)


def record_reader(run: Path) -> Callable[[int], TrialRecord | None]:
    """Return a function that reads a trial's record from the run folder, None where there is none or half of one."""

    def read(number: int) -> TrialRecord | None:
        path = run / "trials" / f"t-{number:04d}" / TRIAL_FILE
        try:
            return TrialRecord.from_json(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    return read
