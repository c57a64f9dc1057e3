"""Which point to try next: ask and tell over a study, without Ray.

The shell around the sampler sees to what samplers leave undone: the default point and the untouched model come first, no point is
asked for twice, failures are told as pruned (told as failed, TPE asks for them again and again), small spaces are enumerated. All
randomness is drawn from (seed, trial number, purpose), so a resumed search goes on as an uninterrupted one would have.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autotune.digest import dump_json
from autotune.errors import ConfigError, EnvironmentFault
from autotune.records import Status, TrialRecord
from autotune.search_spaces.optuna_space import point_to_params, suggest_point
from autotune.search_spaces.space import Point, Space, draw_points, enumerate_points, point_key

if TYPE_CHECKING:
    import optuna

STUDY_NAME = "autotune"
JOURNAL_FILE = "study.journal"
ASKS = 20  # of the sampler for one new point, before a uniform draw steps in


def seed_for(seed: int, number: int, purpose: str) -> int:
    """A 32-bit seed drawn from the sweep's seed, a trial's number and what it is for."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}/{purpose}".encode()).digest()[:4], "big")


@dataclass(frozen=True)
class Asked:
    """A trial to run."""

    number: int
    point: Point
    origin: str
    attempt: int = 1


@dataclass(frozen=True)
class Goals:
    """What the sampler is told of a finished trial: one value per objective with its direction, and the constraints."""

    directions: tuple[Literal["minimize", "maximize"], ...]
    values: Callable[[TrialRecord], tuple[float, ...] | None]  # None: not measured
    constraints: Callable[[TrialRecord], tuple[float, ...]]  # <= 0: met


class Search:
    """Asks for points, keeps the study. `first` are points to try before any sampler has a say, with their origin."""

    def __init__(
        self, space: Space, *, goals: Goals, study: optuna.Study, budget: int, seed: int, sampler: str, first: Sequence[tuple[Point, str]]
    ) -> None:
        self.space, self.goals, self.study, self.seed, self.sampler = space, goals, study, seed, sampler
        self.first = list(first)
        self.enumerates = space.valid <= budget
        outside = sum(1 for point, _ in self.first if not point)  # the untouched model where the space has no such point
        self.total = min(budget, space.valid) + outside
        self.records: dict[int, TrialRecord] = {}
        self.seen: dict[str, int] = {}
        self._pending: list[Asked] = []
        self._next = 0
        self._order: list[Point] | None = None

    # ------------------------------------------------------------------ resume

    def resume(self, read_record: Callable[[int], TrialRecord | None]) -> tuple[int, int]:
        """Take up a study that was interrupted: finished trials count, unfinished ones run again under their number.

        A trial that left its record but wasn't told any more is told now. Returns (finished, to run again).
        """
        from optuna.trial import TrialState

        for trial in self.study.get_trials(deepcopy=False):
            number = trial.number
            point = json.loads(trial.user_attrs["point"])
            self._remember(number, point)
            record = read_record(number)
            if record is None or point_key(record.point) != point_key(point):
                self._pending.append(Asked(number, point, trial.user_attrs["origin"], int(trial.user_attrs.get("attempt", 1))))
            else:
                self.records[number] = record
                if trial.state in (TrialState.RUNNING, TrialState.WAITING):
                    self._tell_study(record)
        return len(self.records), len(self._pending)

    # ------------------------------------------------------------------ ask and tell

    def ask(self) -> Asked | None:
        """The next trial to run, or None when the budget or the space is used up."""
        if self._pending:
            return self._pending.pop(0)
        number = self._next
        if number >= self.total:
            return None
        chosen = self._first_unseen() or (self._enumerated() if self.enumerates else self._sampled(number))
        if chosen is None:
            return None
        point, origin = chosen
        self._remember(number, point)
        self._start_in_study(number, point, origin)
        return Asked(number, point, origin)

    def again(self, asked: Asked) -> None:
        """Put a trial back that died of infrastructure: it is asked for once more under its number."""
        self._pending.append(Asked(asked.number, asked.point, asked.origin, asked.attempt + 1))

    def tell(self, record: TrialRecord) -> None:
        """Take in a finished trial and write it into the study."""
        self.records[record.number] = record
        self._tell_study(record)

    def _remember(self, number: int, point: Mapping[str, Any]) -> None:
        self.seen[point_key(point)] = number
        self._next = max(self._next, number + 1)

    def _first_unseen(self) -> tuple[Point, str] | None:
        for point, origin in self.first:
            if point_key(point) not in self.seen:
                return point, origin
        return None

    def _enumerated(self) -> tuple[Point, str] | None:
        if self._order is None:
            self._order = list(enumerate_points(self.space))
        for point in self._order:
            if point_key(point) not in self.seen:
                return point, "enumeration"
        return None

    def _sampled(self, number: int) -> tuple[Point, str] | None:
        if self.sampler == "tpe":
            point = self._from_tpe(number)
            if point is not None:
                return point, "sampler"
        drawn = draw_points(self.space, 1, seed=seed_for(self.seed, number, "draw"), exclude=frozenset(self.seen))
        return next(((p, "random") for p in drawn), None)

    def _from_tpe(self, number: int) -> Point | None:
        """Ask TPE on a copy of the history; a repeat is answered with its known result there, never in the study itself."""
        import optuna

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # `group` is still marked experimental
            sampler = optuna.samplers.TPESampler(multivariate=True, group=True, seed=seed_for(self.seed, number, "tpe"))
        study = optuna.create_study(directions=list(self.goals.directions), sampler=sampler)
        study.add_trials([t for n in sorted(self.records) if self.records[n].point and (t := self._frozen(self.records[n])) is not None])
        for _ in range(ASKS):
            trial = study.ask()
            point = suggest_point(trial, self.space)
            known = self.seen.get(point_key(point))
            if known is None:
                return point
            record = self.records.get(known)
            values = self.goals.values(record) if record is not None else None
            if record is None or values is None:
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            else:
                for name, violation in zip(self._constraint_names(record), self.goals.constraints(record), strict=True):
                    trial.set_constraint(name, violation)
                study.tell(trial, list(values))
        return None

    # ------------------------------------------------------------------ the study

    def _frozen(self, record: TrialRecord) -> optuna.trial.FrozenTrial | None:
        import optuna

        params, distributions = point_to_params(self.space, record.point)
        values = self.goals.values(record)
        if values is None:
            return optuna.trial.create_trial(state=optuna.trial.TrialState.PRUNED, params=params, distributions=distributions)
        constraints = dict(zip(self._constraint_names(record), self.goals.constraints(record), strict=True))
        return optuna.trial.create_trial(values=list(values), params=params, distributions=distributions, constraints=constraints)

    @staticmethod
    def _constraint_names(record: TrialRecord) -> list[str]:
        return [str(c["expr"]) for c in record.constraints]

    def _start_in_study(self, number: int, point: Point, origin: str) -> None:
        """Write a running trial with its whole point in one record, so that no kill leaves half of it."""
        import optuna

        params, distributions = point_to_params(self.space, point) if point else ({}, {})
        attributes = {"point": dump_json(point, indent=None), "origin": origin}
        state = optuna.trial.TrialState.RUNNING
        self.study.add_trial(optuna.trial.create_trial(state=state, params=params, distributions=distributions, user_attrs=attributes))
        written = len(self.study.get_trials(deepcopy=False)) - 1
        if written != number:
            raise EnvironmentFault(
                "study", f"trial {number} must come next", f"trial {written} in the study", "Does another sweep write into the same storage?"
            )

    def _tell_study(self, record: TrialRecord) -> None:
        import optuna

        values = self.goals.values(record)
        frozen = self.study.get_trials(deepcopy=False)[record.number]
        trial = optuna.trial.Trial(self.study, frozen._trial_id)  # noqa: SLF001 -- the only way to a running trial of a loaded study
        trial.set_user_attr("status", record.reason)
        if record.message:
            trial.set_user_attr("message", record.message[:500])
        if values is None:
            self.study.tell(record.number, state=optuna.trial.TrialState.PRUNED)
            return
        for name, violation in zip(self._constraint_names(record), self.goals.constraints(record), strict=True):
            trial.set_constraint(name, violation)
        self.study.tell(record.number, list(values))


def is_measured(record: TrialRecord) -> bool:
    """A record whose numbers the sampler may see."""
    return record.measured and record.status in (Status.OK, Status.INFEASIBLE, Status.UNDECIDED)


# ---------------------------------------------------------------------------------------------------------------- storage


def open_study(
    run: Path, url: str | None, directions: Sequence[Literal["minimize", "maximize"]], metric_names: Sequence[str]
) -> tuple[optuna.Study, str]:
    """Open or make the sweep's study: a journal file in the run folder, or a database by URL. Returns it and a word on repairs.

    Raises `EnvironmentFault` when the database can't be opened.
    """
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    word = ""
    storage: Any = url
    name = STUDY_NAME
    if url is None:
        journal = run / JOURNAL_FILE
        word = drop_torn_tail(journal)
        storage = JournalStorage(JournalFileBackend(str(journal), lock_obj=KernelLock(journal.with_suffix(".lock"))))  # type: ignore[arg-type] # acquire and release are all it asks for
    else:
        name = f"{STUDY_NAME}-{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:12]}"
    try:
        study = optuna.create_study(
            study_name=name, storage=storage, directions=list(directions), sampler=optuna.samplers.RandomSampler(seed=0), load_if_exists=True
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # names for the dashboard only
            study.set_metric_names(list(metric_names))
    except (OSError, ImportError, ValueError, optuna.exceptions.OptunaError) as error:
        raise EnvironmentFault("study", "the study's storage must open", str(error).splitlines()[0]) from error
    except Exception as error:  # SQLAlchemy has errors of its own, and is only there with a database
        if type(error).__module__.startswith("sqlalchemy"):
            text = str(error).splitlines()[0]
            raise ConfigError(
                "storage", "the database URL must open", text, "Give a URL such as postgresql://host/name, or leave storage out."
            ) from None
        raise
    return study, word


def drop_torn_tail(journal: Path) -> str:
    """Cut an unfinished last line off an append-only file; returns a word about it, empty when all was whole."""
    if not journal.exists():
        return ""
    data = journal.read_bytes()
    if not data or data.endswith(b"\n"):
        return ""
    keep = data.rfind(b"\n") + 1
    with journal.open("r+b") as file:
        file.truncate(keep)
        os.fsync(file.fileno())
    return f"dropped an unfinished last line of {len(data) - keep} bytes from {journal.name}"


class KernelLock:
    """The journal's lock as a kernel lock: the one that Optuna brings is a file that a killed process leaves behind."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def acquire(self) -> bool:
        """Take the lock, waiting as long as it takes."""
        self._fd = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o644)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        """Let go."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "_fd": None}
