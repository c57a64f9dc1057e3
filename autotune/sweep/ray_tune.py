"""Ray Tune runs the trials: one Tuner, a thin Searcher around ours, workers reused. The one module that runs Ray.

Ray's side is a process of its own. A Ray whose control store is gone ends the process that uses it, from native code, a minute later;
one whose node manager is gone waits for ever. So the sweep keeps its own process clear of it: it answers the questions of Ray's side
(which point next? this trial has ended) over a socket, watches the processes that Ray can't live without, and starts another Ray from
where things stand when one of them dies. No state of ours lives in Ray: the study and the records on disk are the sweep.

`main` is Ray's side; `run_trials` is what a sweep uses.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from autotune.digest import dump_json, write_durably
from autotune.disk import DiskFault, fault_in, fault_of
from autotune.errors import AutotuneError, EnvironmentFault
from autotune.pipeline import Pipeline
from autotune.records import Cause, Status, TrialRecord
from autotune.sweep.search import Asked, Search
from autotune.sweep.warden import Warden
from autotune.target import effective_cpus
from autotune.trial import TRIAL_FILE, TrialPlan, TrialRunner, stage_now, tell_stage

if TYPE_CHECKING:
    from ray.tune.search import Searcher

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
RAY_FAILURES = 2  # times in a row, without a trial that ended between, that Ray is started again
START_S = 180.0  # for Ray to start, and for a worker to take up a trial
TICK_S = 1.0
RAYS_SIDE = "from autotune.sweep.ray_tune import main; main()"  # no `-m`: workers have to find `run_point` in this module by its name

OnTrial = Callable[[TrialRecord], None]
ReadRecord = Callable[[int], TrialRecord | None]


class RayDied(Exception):
    """Ray's side, or a process that it can't live without, is gone or no longer moves."""


# ---------------------------------------------------------------------------------------------------------------- the sweep's side


def run_trials(
    run: Path, search: Search, *, on_start: Callable[[Asked], None], on_trial: OnTrial, may_start: Callable[[], bool], read_record: ReadRecord,
    tick: Callable[[], None], held: Callable[[], AbstractContextManager[None]], front_before: Callable[[int], dict[str, Any]],
) -> None:  # fmt: skip
    """Run trials until the search ends or `may_start` says no. `tick` is called every second; `held` keeps interrupts off a step.

    `front_before(number)` is what a trial is told of those before it; it travels with the trial.

    Raises what our own code raised inside, `DiskFault`, and `EnvironmentFault` when Ray can't start or keeps dying.
    """
    running: dict[str, Asked] = {}
    failures = 0
    while True:
        finished = len(search.records)
        try:
            with contextlib.ExitStack() as stack:
                with held():
                    side = stack.enter_context(_RaySide(run))
                _serve(
                    side, run, search, running, on_start=on_start, on_trial=on_trial, may_start=may_start, read_record=read_record,
                    tick=tick, held=held, front_before=front_before,
                )  # fmt: skip
            return
        except RayDied as death:
            if (fault := fault_in("Ray died", run)) is not None:
                raise fault from death
            failures = 1 if any(r.stage != "worker" for n, r in search.records.items() if n >= finished) else failures + 1
            if failures > RAY_FAILURES:
                raise EnvironmentFault(
                    "ray", "Ray must start and keep running", f"{death}, {failures} times in a row",
                    "Finished trials are saved; the same command goes on.",
                ) from death  # fmt: skip
            with held():
                for asked in running.values():
                    _ended(run, search, asked, read_record, on_trial)
                running.clear()
        finally:
            shutil.rmtree(run / "ray", ignore_errors=True)  # Ray's own notes; nothing is resumed from them


def _serve(
    side: _RaySide, run: Path, search: Search, running: dict[str, Asked], *, on_start: Callable[[Asked], None], on_trial: OnTrial,
    may_start: Callable[[], bool], read_record: ReadRecord, tick: Callable[[], None], held: Callable[[], AbstractContextManager[None]],
    front_before: Callable[[int], dict[str, Any]],
) -> None:  # fmt: skip
    """Answer Ray's side until it says that it is done."""
    taken_up = True  # whether the running trial was seen in a worker
    asked_at = 0.0
    while True:
        message = side.next_message(TICK_S)
        with held():
            if message is None:
                tick()
                if running and not taken_up and side.own:
                    taken_up = (stage_now(run) or {}).get("since", 0.0) >= asked_at
                    if not taken_up and time.monotonic() - asked_at > START_S:
                        raise RayDied(f"no worker took up a trial in {START_S:g} s")
            elif "ask" in message:
                asked = search.ask() if may_start() else None
                if asked is None:
                    side.answer({"point": None})
                    continue
                running[message["ask"]] = asked
                taken_up, asked_at = False, time.monotonic()
                on_start(asked)
                point = dump_json(asked.point, indent=None)
                side.answer({"point": {
                    "run": str(run), "number": asked.number, "point": point, "origin": asked.origin, "attempt": asked.attempt,
                    "repeats": asked.repeats, "front": dump_json(front_before(asked.number), indent=None),
                }})  # fmt: skip
            elif "ended" in message:
                asked = running.pop(message["ended"], None)
                if message.get("fault"):
                    raise DiskFault(*json.loads(message["fault"]))
                if asked is not None:
                    _ended(run, search, asked, read_record, on_trial)
                side.answer({})
            elif "failed" in message:
                if (fault := fault_in(message["failed"], run)) is not None:
                    raise fault
                raise RayDied(message["failed"])
            elif "done" in message:
                return


def _ended(run: Path, search: Search, asked: Asked, read_record: ReadRecord, on_trial: OnTrial) -> None:
    """Tell a trial by its record on disk. One without a record lost its worker: it runs once more, and then is told as failed."""
    record = read_record(asked.number)
    if record is None and (fault := fault_in("a worker of Ray died", run)) is not None:
        raise fault
    if record is None and asked.attempt <= WORKER_FAILURES:
        search.again(asked)
        return
    if record is None:
        message = "the worker process died before the trial could write its record, twice"
        record = _infra(asked.number, asked.point, asked.origin, asked.attempt, message)
        _write(run, record)
    search.tell(record)
    on_trial(record)


def _infra(number: int, point: dict[str, Any], origin: str, attempt: int, message: str) -> TrialRecord:
    return TrialRecord(
        number=number, point=point, status=Status.FAILED, origin=origin, cause=Cause.INFRA, stage="worker", message=message, attempts=attempt
    )


def _write(run: Path, record: TrialRecord) -> None:
    folder = run / "trials" / record.id
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / TRIAL_FILE, dump_json(record.to_json()))


class _RaySide:
    """The process that runs Ray, with all that Ray starts. Leaving the block ends the whole session at once, whatever state it is in."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._stack = contextlib.ExitStack()
        self._buffer = b""
        self._watched: dict[int, str] = {}  # pidfd -> what died when it becomes readable
        self._errors: IO[bytes]
        self._started = time.monotonic()
        self._ready = False
        self.own = True  # a session of ours, and not a Ray that was there before

    def __enter__(self) -> _RaySide:
        try:
            warden = self._stack.enter_context(Warden())
            self._errors = self._stack.enter_context(tempfile.TemporaryFile())
            self._socket, theirs = socket.socketpair()
            self._stack.callback(self._socket.close)
            address = _address_in_use()
            self.own = not address
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", RAYS_SIDE, str(theirs.fileno()), str(self.run), str(warden.folder), address],
                    pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._errors,
                    env={**warden.environment, **QUIET}, start_new_session=True,  # a Ctrl-C in the terminal is the sweep's to handle
                )  # fmt: skip
            self._stack.callback(self._reap)  # runs before the warden's end, which would find a zombie only
            self._watch(self._process.pid, "the process that runs Ray")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._watched:
            os.close(fd)
        self._watched = {}
        self._stack.close()

    def _reap(self) -> None:
        self._process.kill()
        self._process.wait()

    def _watch(self, pid: int, name: str) -> None:
        try:
            self._watched[os.pidfd_open(pid)] = name
        except ProcessLookupError:
            raise RayDied(f"{name} (pid {pid}) is gone") from None

    def next_message(self, timeout_s: float) -> dict[str, Any] | None:
        """The next word of Ray's side, None when there was none in time. Raises `RayDied`."""
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._socket.fileno(), *self._watched], [], [], timeout_s)
            if not ready:
                if not self._ready and time.monotonic() - self._started > START_S:
                    raise RayDied(f"Ray did not start in {START_S:g} s")
                return None
            part = b""
            if self._socket.fileno() in ready:
                with contextlib.suppress(ConnectionError):
                    part = self._socket.recv(65536)
            if part:
                self._buffer += part
                continue
            died = next((name for fd, name in self._watched.items() if fd in ready), "the process that runs Ray")
            raise RayDied(f"{died} died{self._last_words()}")
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        if "ready" in message:
            self._ready = True
            for name, pid in message["ready"].items():
                self._watch(pid, f"Ray's {name}")
            return self.next_message(timeout_s)
        return message

    def answer(self, content: dict[str, Any]) -> None:
        """Answer the question that was asked last."""
        try:
            self._socket.sendall(dump_json(content, indent=None).encode() + b"\n")
        except ConnectionError:
            raise RayDied("the process that runs Ray died") from None

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read()[-4000:].decode(errors="replace").splitlines() if line.strip()]
        return f" ({lines[-1][:300]})" if lines else ""


def _address_in_use() -> str:
    """Where the Ray stands that this process is connected to, or that RAY_ADDRESS names; empty when there is none. It is used as it is."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    return os.environ.get("RAY_ADDRESS", "")


def record_reader(run: Path) -> ReadRecord:
    """Return a function that reads a trial's record from the run folder, None where there is none or half of one."""

    def read(number: int) -> TrialRecord | None:
        path = run / "trials" / f"t-{number:04d}" / TRIAL_FILE
        try:
            record = TrialRecord.from_json(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return record if record.number == number else None

    return read


# ---------------------------------------------------------------------------------------------------------------- Ray's side


class _Sweep:
    """The other end of the socket: asks, and waits for the answer."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lines = channel.makefile("rb")

    def say(self, content: dict[str, Any]) -> None:
        """Tell the sweep something that needs no answer."""
        self._channel.sendall(dump_json(content, indent=None).encode() + b"\n")

    def ask(self, content: dict[str, Any]) -> dict[str, Any]:
        """Tell the sweep something and return its answer. Ends this process when the sweep is gone."""
        self.say(content)
        line = self._lines.readline()
        if not line:
            os._exit(1)
        answer: dict[str, Any] = json.loads(line)
        return answer


def point_searcher(sweep: _Sweep) -> Searcher:
    """Return a Ray searcher that hands the sweep's points to Ray and tells it of the ends of trials."""
    from ray.tune.search import Searcher

    class PointSearcher(Searcher):
        def __init__(self) -> None:
            super().__init__(metric="number", mode="max")

        def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override] # FINISHED is a string, as Ray documents
            point: dict[str, Any] | None = sweep.ask({"ask": trial_id})["point"]
            return str(Searcher.FINISHED) if point is None else point

        def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
            sweep.ask({"ended": trial_id, "fault": (result or {}).get("fault")})

        def save(self, checkpoint_path: str) -> None:
            Path(checkpoint_path).write_text("{}")  # nothing of ours is kept in Ray

        def restore(self, checkpoint_path: str) -> None: ...

        def __reduce__(self) -> tuple[Any, ...]:
            return _nothing, ()  # Ray writes its searcher down; this one holds a socket

    return PointSearcher()


def _nothing() -> None:
    """What Ray would read back for the searcher; nobody does."""


def run_point(config: dict[str, Any]) -> None:
    """Run one trial in this Ray worker (in children of it) and report that its record is on disk."""
    from ray import tune

    point, run = json.loads(config["point"]), Path(config["run"])
    tell_stage(run, run / "trials" / f"t-{config['number']:04d}" / "start")
    try:
        plan, pipeline, runner = _worker(run)
        runner.run(
            plan, pipeline, config["number"], point, config["origin"], attempt=config["attempt"], repeats=config["repeats"],
            front=json.loads(config["front"]),
        )  # fmt: skip
    except Exception as error:  # not the trial's doing: a full disk, a plug-in that does not load here, a mistake of ours
        fault = fault_of(error, run)
        if fault is not None:  # no record: the trial runs again when there is room
            tune.report({"number": config["number"], "fault": json.dumps(fault.args)})
            return
        if config["attempt"] > WORKER_FAILURES:  # the first time there is no record, and it runs again
            _write(run, _infra(config["number"], point, config["origin"], config["attempt"], f"{type(error).__name__}: {error}"))
    tune.report({"number": config["number"]})


_kept: dict[Path, tuple[TrialPlan, Pipeline, TrialRunner]] = {}


def _worker(run: Path) -> tuple[TrialPlan, Pipeline, TrialRunner]:
    """Plan, pipeline and child servers of a run, made once per worker process."""
    if run not in _kept:
        plan = TrialPlan.load(run)
        _kept[run] = (plan, Pipeline(plan.sweep, plan.facts), TrialRunner(run, plan.sweep))
    return _kept[run]


@contextlib.contextmanager
def local_ray(scratch: Path | None = None) -> Iterator[None]:
    """Start Ray on this machine, quiet, without dashboard, on loopback, its files in `scratch`; stop it at the end.

    Raises `EnvironmentFault` when Ray can't start.
    """
    before = {k: os.environ.get(k) for k in QUIET}
    os.environ.update(QUIET)
    import ray

    for name in ("ray", "ray.tune", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    own = tempfile.mkdtemp(prefix="autotune-") if scratch is None else None  # short: Ray's sockets stand below it
    try:
        try:
            ray.init(
                num_cpus=effective_cpus(), include_dashboard=False, log_to_driver=False, logging_level=logging.CRITICAL,
                configure_logging=True, _node_ip_address="127.0.0.1", object_store_memory=100 * 2**20, _temp_dir=own or str(scratch),
            )  # fmt: skip
        except Exception as error:  # Ray raises many kinds here
            raise EnvironmentFault("ray", "Ray must start on this machine", str(error).splitlines()[0] if str(error) else repr(error)) from error
        yield
    finally:
        ray.shutdown()
        if own:
            shutil.rmtree(own, ignore_errors=True)
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


@contextlib.contextmanager
def _ray_at(address: str) -> Iterator[None]:
    """Use the Ray that runs at an address."""
    import ray

    ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    try:
        yield
    finally:
        ray.shutdown()


def _vital() -> dict[str, int]:
    """Processes of this session that Ray can't live without, by what they are."""
    from ray._private import worker

    node = worker._global_node  # noqa: SLF001 -- Ray has no public way to ask for them
    found: dict[str, list[Any]] = node.all_processes if node is not None else {}
    names = {"gcs_server": "control store", "raylet": "node manager"}
    return {names[kind]: infos[0].process.pid for kind, infos in found.items() if kind in names and infos}


def _tune(run: Path, sweep: _Sweep) -> None:
    """Run the Tuner to its end."""
    from ray import tune
    from ray.tune import FailureConfig, RunConfig, TuneConfig

    tuner = tune.Tuner(
        tune.with_resources(run_point, {"cpu": effective_cpus()}),
        tune_config=TuneConfig(
            search_alg=point_searcher(sweep), num_samples=-1, max_concurrent_trials=1, reuse_actors=True,
            trial_name_creator=_trial_name, trial_dirname_creator=_trial_name,
        ),
        run_config=RunConfig(name="tune", storage_path=str(run / "ray"), verbose=0, failure_config=FailureConfig(max_failures=0)),
    )  # fmt: skip
    tuner.fit()


def _trial_name(trial: Any) -> str:
    """A short folder name: Ray's own holds all parameters, and grows beyond what file systems take."""
    return str(trial.trial_id)


def main() -> None:
    """Ray's side of a sweep, from its start to the end of the search."""
    fd, run, scratch, address = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    with socket.socket(fileno=fd) as channel:
        sweep = _Sweep(channel)
        try:
            with _ray_at(address) if address else local_ray(scratch):
                sweep.say({"ready": {} if address else _vital()})
                try:
                    _tune(run, sweep)
                    sweep.say({"done": True})
                except Exception as error:  # of Ray, which raises many kinds
                    sweep.say({"failed": f"{type(error).__name__}: {str(error).strip()[:1000]}"})
                if not address:
                    os._exit(0)  # the warden ends a session of our own, faster than Ray does
        except AutotuneError as error:
            sweep.say({"failed": error.got or str(error)})
