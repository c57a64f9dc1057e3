"""Which point to try next: ask and tell over a study, without Ray.

The shell around the sampler sees to what samplers leave undone: the default point and the untouched model come first, no point is
asked for twice, failures are told as pruned (told as failed, TPE asks for them again and again), small spaces are enumerated. All
randomness is drawn from (seed, trial number, purpose), so a resumed search goes on as an uninterrupted one would have.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import hashlib
import json
import math
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from autotune.config import TpeOptions
from autotune.digest import dump_json, sync_folder, write_durably
from autotune.errors import ConfigError, EnvironmentFault
from autotune.pareto import pareto_front
from autotune.records import TrialRecord
from autotune.search_spaces.optuna_space import point_to_params, suggest_point
from autotune.search_spaces.space import Point, Space, draw_points, enumerate_points, neighbours, point_key

if TYPE_CHECKING:
    import optuna
    from numpy.typing import NDArray

STUDY_NAME = "autotune"
CONTENT = "content"  # attribute of the study: digest of what it depends on
JOURNAL_FILE = "study.journal"
ORIGINS = ("default", "untouched", "start", "enumeration", "sampler", "random")  # of points
BESIDE = 2  # of the best trials, beside a proposal that was tried already, whose neighbours may be tried instead
NEIGHBOURS = 10  # of each at most
BEFORE_ALL = 1 << 40  # less than any number in a study of its own
LEARNED = 150  # finished trials that TPE learns from at most, since its time grows with them: the newest, and of the older ones
LEARNED_OLDER = 50  # the best so many, chosen anew once in so many trials


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
    repeats: int = 0  # points that the sampler proposed before this one and that were tried already: one at most
    choosing_s: float = field(default=0.0, compare=False)  # what choosing the point took


@dataclass(frozen=True)
class Goals:
    """What the sampler is told of a finished trial: one value per objective with its direction, and the constraints."""

    directions: tuple[Literal["minimize", "maximize"], ...]
    values: Callable[[TrialRecord], tuple[float, ...] | None]  # None: not measured
    constraints: Callable[[TrialRecord], tuple[float, ...]]  # <= 0: met


Renew = Callable[[Callable[["optuna.Study"], None]], "optuna.Study"]  # a new study in place of the old one, filled by the function given


class Search:
    """Asks for points, keeps the study. `first` are points to try before any sampler has a say, with their origin.

    `options` are those of the `tpe` sampler, by the names of `TpeOptions`; None: its defaults. `outside` are numbers of finished trials
    that are no points of this space (any more): they keep their numbers, and the sampler is told nothing of them.
    """

    def __init__(
        self, space: Space, *, goals: Goals, study: optuna.Study, budget: int, seed: int, sampler: str, first: Sequence[tuple[Point, str]],
        options: Mapping[str, Any] | None = None, outside: Collection[int] = (),
    ) -> None:  # fmt: skip
        self.space, self.goals, self.study, self.seed, self.sampler = space, goals, study, seed, sampler
        self.first = list(first)
        self.options = dict(options or TpeOptions().model_dump())
        self.enumerates = space.valid <= budget
        self.outside = frozenset(outside)
        extra = sum(1 for point, _ in self.first if not point)  # the untouched model where the space has no such point
        self.total = min(budget, space.valid + len(self.outside)) + extra
        self.records: dict[int, TrialRecord] = {}
        self.seen: dict[str, int] = {}
        self.repairs: list[str] = []
        self._pending: list[Asked] = []
        self._made: dict[int, tuple[TrialRecord, optuna.trial.FrozenTrial]] = {}
        self._scored: dict[int, tuple[TrialRecord, tuple[float, ...] | None, float]] = {}
        self._codes: dict[int, list[int]] = {}
        self._repeats = 0
        self._next = 0
        self._order: Iterator[Point] | None = None
        self._older: tuple[list[TrialRecord], list[TrialRecord]] = ([], [])  # trials that are no longer new, and the best of them

    # ------------------------------------------------------------------ resume

    def resume(
        self, read_record: Callable[[int], TrialRecord | None], *, on_disk: int = 0, renew: Renew | None = None, content: str = ""
    ) -> tuple[int, int]:
        """Take up a study that was interrupted: finished trials count, unfinished ones run again under their number.

        The records are the truth. A trial that left its record but wasn't told any more is told now; trials beyond what the study
        holds (numbers below `on_disk`) are added to it; a study that tells otherwise than the records is written anew by `renew`, and so
        is one of another `content` (a digest of what it depends on: the sweep was extended). What was mended stands in `repairs`.
        Returns (finished, to run again). Raises `EnvironmentFault` when the storage does not answer.
        """
        with storage_named():
            return self._resume(read_record, on_disk, renew, content)

    def _resume(self, read_record: Callable[[int], TrialRecord | None], on_disk: int, renew: Renew | None, content: str) -> tuple[int, int]:
        told = {t.number: t for t in self.study.get_trials(deepcopy=False)}
        asked = {n: a for n, t in told.items() if (a := self._asked_in(t)) is not None}
        other = bool(content) and self.study.user_attrs.get(CONTENT, content if told else "") != content
        stale = other and bool(told)
        known = len(told)
        for number in range(max(known, on_disk)):
            record = read_record(number)
            if record is not None:
                self.records[number] = record
                asked[number] = Asked(number, dict(record.point), record.origin, record.attempts)
            if number in asked:
                self._remember(number, asked[number].point)
        wrong = [n for n, trial in told.items() if not self._tells(trial, asked.get(n), self.records.get(n))]
        turned = [d.name.lower() for d in self.study.directions] != list(self.goals.directions)
        if (stale or wrong or turned) and renew is not None:
            if not stale:
                what = _ids(wrong) if wrong else "its objectives"
                self.repairs.append(f"the study was written anew from the records of the trials: it told otherwise of {what}")
            whole = next((n for n in range(known) if n not in asked), known)
            on_disk, known = max(on_disk, max(asked, default=-1) + 1), whole
            self.study = renew(lambda study: self._write_all(study, [asked[n] for n in range(whole)]))
        else:
            for number in sorted(told.keys() & self.records.keys()):
                if not told[number].state.is_finished():
                    self._tell_study(self.records[number])
        added = range(known, max(known, on_disk))
        for number in added:
            if number not in asked:  # neither the study nor a record knows its point any more
                fresh = self._choose(number)
                if fresh is None:
                    break
                asked[number] = Asked(number, *fresh)
                self._remember(number, fresh[0])
            self._start_in_study(number, asked[number].point, asked[number].origin)
            if number in self.records:
                self._tell_study(self.records[number])
        if other:
            self.study.set_user_attr(CONTENT, content)
        if added and not stale:
            self.repairs.append(f"the study had lost {_ids(added)}: added again from the records of the trials")
        self._pending += [asked[n] for n in sorted(asked.keys() - self.records.keys())]
        return len(self.records), len(self._pending)

    def _asked_in(self, trial: optuna.trial.FrozenTrial) -> Asked | None:
        """What was asked for, as the study has it; None where that is no point of the space, whatever became of it."""
        try:
            point, origin = json.loads(trial.user_attrs["point"]), trial.user_attrs["origin"]
        except (KeyError, TypeError, ValueError):
            return None
        fits = isinstance(point, dict) and (not point or self.space.contains(point)) and origin in ORIGINS
        return Asked(trial.number, point, origin) if fits else None

    def _tells(self, trial: optuna.trial.FrozenTrial, asked: Asked | None, record: TrialRecord | None) -> bool:
        """Whether a trial of the study says what was asked for and, once it is finished, what the record says."""
        if asked is None or trial.user_attrs.get("point") != dump_json(asked.point, indent=None) or trial.user_attrs.get("origin") != asked.origin:
            return False
        if not trial.state.is_finished():  # the study alone knows of it, so it has to say the same twice
            return record is not None or trial.params == (point_to_params(self.space, asked.point)[0] if asked.point else {})
        if record is None:
            return False
        values = self._values(record)
        if values is None:
            return trial.state.name == "PRUNED"
        if trial.state.name != "COMPLETE" or trial.values is None or len(values) != len(trial.values):
            return False
        return all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(values, trial.values, strict=True))

    def _values(self, record: TrialRecord) -> tuple[float, ...] | None:
        """What the sampler and the study may be told of a record; nothing of one outside the space."""
        return None if record.number in self.outside else self.goals.values(record)

    def _write_all(self, study: optuna.Study, asked: Sequence[Asked]) -> None:
        """Write trials and what is known of them into an empty study."""
        self.study = study
        for each in asked:
            self._start_in_study(each.number, each.point, each.origin)
            if each.number in self.records:
                self._tell_study(self.records[each.number])

    # ------------------------------------------------------------------ ask and tell

    def ask(self) -> Asked | None:
        """The next trial to run, or None when the budget or the space is used up. Raises `EnvironmentFault` as `resume` does."""
        if self._pending:
            return self._pending.pop(0)
        number = self._next
        if number >= self.total:
            return None
        begun = time.perf_counter()
        chosen = self._choose(number)
        if chosen is None:
            return None
        choosing_s = time.perf_counter() - begun
        point, origin = chosen
        with storage_named():
            self._start_in_study(number, point, origin)
        self._remember(number, point)
        return Asked(number, point, origin, repeats=self._repeats, choosing_s=choosing_s)

    def again(self, asked: Asked) -> None:
        """Put a trial back that died of infrastructure: it is asked for once more under its number."""
        self._pending.append(Asked(asked.number, asked.point, asked.origin, asked.attempt + 1))

    def tell(self, record: TrialRecord) -> None:
        """Take in a finished trial and write it into the study."""
        self.records[record.number] = record
        with storage_named():
            self._tell_study(record)

    def _remember(self, number: int, point: Mapping[str, Any]) -> None:
        if number not in self.outside:
            self.seen[point_key(point)] = number
        self._next = max(self._next, number + 1)

    def _choose(self, number: int) -> tuple[Point, str] | None:
        self._repeats = 0
        return self._first_unseen() or (self._enumerated() if self.enumerates else self._sampled(number))

    def _first_unseen(self) -> tuple[Point, str] | None:
        for point, origin in self.first:
            if point_key(point) not in self.seen:
                return point, origin
        return None

    def _enumerated(self) -> tuple[Point, str] | None:
        if self._order is None:
            self._order = enumerate_points(self.space)
        for point in self._order:  # those before it were seen, and stay so
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
        """Ask TPE once over the finished trials; where it proposes what was tried already, take the best untried point close by.

        To tell it of the repeat and to ask again is what was done before: it costs the time of one more fit, and a model that has been told
        of its best points time and again proposes little else, so that most points of a long search were uniform draws in the end.
        """
        import optuna

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # `group` is still marked experimental
            seed = seed_for(self.seed, number, "tpe")
            # A liar makes up values for trials that run elsewhere; no other one is in this study, and to look for them takes time.
            sampler = optuna.samplers.TPESampler(**self.options, seed=seed, constant_liar=False)
        history = self._learned()
        shown = _shown_first()([self._frozen(record) for record in history])
        study = optuna.create_study(directions=list(self.goals.directions), sampler=sampler, storage=shown)
        point = suggest_point(study.ask(), self.space)
        if point_key(point) not in self.seen:
            return point
        self._repeats = 1
        return self._beside(point, history, number) if len(history) >= self.options["n_startup_trials"] else None

    def _beside(self, proposed: Point, history: Sequence[TrialRecord], number: int) -> Point | None:
        """An untried point that one decision parts from the proposed one or from one of the best trials, None where all were tried.

        Of some, the one that TPE's own measure holds for the best: the ratio of the density of the best tenth of the trials to that of
        the others. Rounded, since what is equal but for rounding is common here and must not depend on how sums are ordered.
        """
        generator = random.Random(seed_for(self.seed, number, "beside"))
        best = self._best(history, math.ceil(len(history) / 10))
        starts = [record.point for record in best if record.number != self.seen[point_key(proposed)]]
        generator.shuffle(starts)
        candidates = list(self._untried([proposed, *starts], generator).values())
        if not candidates:
            return None
        chosen = {record.number for record in best}
        others = [record for record in history if record.number not in chosen]
        sizes = np.array([len(self.space.choices(name)) + 1 for name in self.space.variables])  # inactive is a choice of its own
        codes = np.array([self._code(point) for point in candidates])
        good, bad = (log_density(codes, self._code_table(records), sizes) for records in (best, others))
        return candidates[int(np.argmax(np.round(good - bad, 9)))]

    def _untried(self, starts: Sequence[Mapping[str, Any]], generator: random.Random) -> dict[str, Point]:
        """Some untried neighbours by key: of the first few starts, and of more of them only while there is none."""
        found: dict[str, Point] = {}
        for place, start in enumerate(starts):
            if found and place > BESIDE:
                break
            near = neighbours(self.space, start, complete=lambda _name, choices, _so_far: generator.choice(choices))
            generator.shuffle(near)
            taken = 0
            for point in near:
                key = point_key(point)
                if key not in self.seen and key not in found:
                    found[key] = point
                    taken += 1
                    if taken == NEIGHBOURS:
                        break
        return found

    def _code(self, point: Mapping[str, Any]) -> list[int]:
        """A point as places of its values among their choices, -1 where a variable is inactive."""
        return [self.space.choice_index(name, point[name]) if name in point else -1 for name in self.space.variables]

    def _code_table(self, records: Sequence[TrialRecord]) -> NDArray[np.int64]:
        for record in records:
            if record.number not in self._codes:  # the point of a number stays
                self._codes[record.number] = self._code(record.point)
        return np.array([self._codes[record.number] for record in records], np.int64).reshape(len(records), len(self.space.variables))

    def _learned(self) -> list[TrialRecord]:
        """The finished trials that TPE is shown, by number: all, or the newest and the best of the older ones.

        A function of the records alone, so that a resumed search shows the same. TPE weighs older trials less in any case.
        """
        finished = [self.records[n] for n in sorted(self.records.keys() - self.outside)]
        history = [record for record in finished if record.point]
        most = max(LEARNED, self.options["n_startup_trials"])
        if len(history) <= most:
            return history
        cut = (len(history) - most + 2 * LEARNED_OLDER - 1) // LEARNED_OLDER * LEARNED_OLDER
        older = history[:cut]
        if len(self._older[0]) != cut or any(a is not b for a, b in zip(self._older[0], older, strict=True)):
            self._older = (older, self._best(older, LEARNED_OLDER))
        return [*self._older[1], *history[cut:]]

    def _best(self, records: Sequence[TrialRecord], most: int) -> list[TrialRecord]:
        """The best `most` of them, by number: layer after layer of the front, of one that is too large the newest, then those that miss least."""
        measured = [(r, v, missed) for r, v, missed in map(self._score, records) if v is not None]
        left = [(r, v) for r, v, missed in measured if not missed > 0]
        best: list[TrialRecord] = []
        signs = [1.0 if d == "minimize" else -1.0 for d in self.goals.directions]
        while left and len(best) < most:
            front = pareto_front(np.array([v for _, v in left]) * signs)
            layer = [r for (r, _), on_front in zip(left, front, strict=True) if on_front]
            if not layer:  # not a number
                break
            best += layer[-(most - len(best)) :]
            left = [each for each, on_front in zip(left, front, strict=True) if not on_front]
        missing = sorted((m for m in measured if m[2] > 0), key=lambda m: (m[2], -m[0].number))
        best += [r for r, _, _ in missing[: most - len(best)]]
        return sorted(best, key=lambda r: r.number)

    def _score(self, record: TrialRecord) -> tuple[TrialRecord, tuple[float, ...] | None, float]:
        """A record with what the sampler is told of it, and by how much it misses its constraints."""
        known = self._scored.get(record.number)
        if known is None or known[0] is not record:
            known = (record, self._values(record), sum(max(c, 0.0) for c in self.goals.constraints(record)))
            self._scored[record.number] = known
        return known

    # ------------------------------------------------------------------ the study

    def _frozen(self, record: TrialRecord) -> optuna.trial.FrozenTrial:
        import optuna

        made = self._made.get(record.number)
        if made is not None and made[0] is record:
            return made[1]
        params, distributions = point_to_params(self.space, record.point)
        values = self._values(record)
        if values is None:
            frozen = optuna.trial.create_trial(state=optuna.trial.TrialState.PRUNED, params=params, distributions=distributions)
        else:
            violations = zip(self._constraint_names(record), self.goals.constraints(record), strict=True)
            constraints = {name: violation for name, violation in violations if violation > 0}  # all that TPE looks at, at each point anew
            frozen = optuna.trial.create_trial(values=list(values), params=params, distributions=distributions, constraints=constraints)
        frozen.number = record.number - BEFORE_ALL
        self._made[record.number] = (record, frozen)  # nothing changes it, so one serves all asks
        return frozen

    @staticmethod
    def _constraint_names(record: TrialRecord) -> list[str]:
        return [str(c["expr"]) for c in record.constraints]

    def _start_in_study(self, number: int, point: Point, origin: str) -> None:
        """Write a running trial with its whole point in one record, so that no kill leaves half of it."""
        import optuna

        params, distributions = point_to_params(self.space, point) if point and number not in self.outside else ({}, {})
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

        values = self._values(record)
        frozen = self.study.get_trials(deepcopy=False)[record.number]
        trial = optuna.trial.Trial(self.study, frozen._trial_id)  # noqa: SLF001 -- the only way to a running trial of a loaded study
        trial.set_user_attr("status", record.reason if record.number not in self.outside else f"{record.reason}, outside the space")
        if record.message:
            trial.set_user_attr("message", record.message[:500])
        if values is None:
            self.study.tell(record.number, state=optuna.trial.TrialState.PRUNED)
            return
        for name, violation in zip(self._constraint_names(record), self.goals.constraints(record), strict=True):
            if name not in trial.constraints:  # set before the kill that cut this off
                trial.set_constraint(name, violation)
        self.study.tell(record.number, list(values))


def log_density(codes: NDArray[np.int64], data: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Log density of points, shape (points, variables), under what was observed, shape (observations, variables).

    A mixture, all of one weight, of a flat distribution and a kernel for each observation: a product over the variables, of which each
    gives its own value the weight 1 + 1/n and each of the other `sizes` - 1 values 1/n, n being the number of components. These are
    Optuna's kernels of its multivariate TPE for categories.
    """
    components = len(data) + 1
    whole = 1 + sizes / components
    hit, miss = np.log((1 + 1 / components) / whole), np.log(1 / components / whole)
    logs = np.full((len(codes), components), miss.sum())
    logs[:, -1] = -np.log(sizes).sum()
    for variable, gain in enumerate(hit - miss):
        logs[:, :-1] += gain * (codes[:, variable, None] == data[None, :, variable])
    top = logs.max(axis=1)
    density: NDArray[np.float64] = top + np.log(np.exp(logs - top[:, None]).mean(axis=1))
    return density


@cache
def _shown_first() -> Callable[[Sequence[optuna.trial.FrozenTrial]], optuna.storages.BaseStorage]:
    """A storage in memory that shows finished trials before its own, as they are: adding them to a study copies each, at every point."""
    from optuna.storages import InMemoryStorage
    from optuna.trial import FrozenTrial, TrialState

    class ShownFirst(InMemoryStorage):
        def __init__(self, shown: Sequence[FrozenTrial]) -> None:
            super().__init__()
            self._shown = list(shown)

        def get_all_trials(self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None) -> list[FrozenTrial]:
            own = super().get_all_trials(study_id, deepcopy=deepcopy, states=states)
            shown = [t for t in self._shown if states is None or t.state in states]
            return [*(copy.deepcopy(shown) if deepcopy else shown), *own]

    return ShownFirst


# ---------------------------------------------------------------------------------------------------------------- storage


@contextlib.contextmanager
def storage_named() -> Iterator[None]:
    """Turn an error of the study's storage into an `EnvironmentFault` in words. A disk's own errors (`OSError`) pass."""
    import optuna

    try:
        yield
    except Exception as error:
        if not (isinstance(error, optuna.exceptions.OptunaError) or type(error).__module__.startswith("sqlalchemy")):
            raise
        raise EnvironmentFault(
            "study", "the study's storage must answer", _first_line(error),
            "Finished trials are in the run folder; see to the database, and the same command goes on.",
        ) from error  # fmt: skip


def _first_line(error: BaseException) -> str:
    """What a storage says, and what was behind it."""
    words = [str(e).strip().splitlines()[0] for e in (error, error.__cause__) if e is not None and str(e).strip()]
    return "; ".join(dict.fromkeys(w[:300] for w in words)) or type(error).__name__


def open_study(
    run: Path, url: str | None, directions: Sequence[Literal["minimize", "maximize"]], metric_names: Sequence[str], *, anew: bool = False
) -> tuple[optuna.Study, str]:
    """Open or make the sweep's study: a journal file in the run folder, or a database by URL. Returns it and a word on repairs.

    `anew`: an earlier study of this folder is thrown away. Raises `EnvironmentFault` when the database does not answer, `ConfigError`
    when its URL makes no sense.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    word = ""
    storage: Any = url
    name = STUDY_NAME
    if url is None:
        journal = run / JOURNAL_FILE
        word = drop_torn_tail(journal)
    else:
        name = f"{STUDY_NAME}-{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:12]}"
    try:
        if url is None:
            storage, unread = _journal_storage(journal)
            word = unread or word
        study = _loaded_or_made(name, storage, directions)
        if anew and study.get_trials(deepcopy=False):  # of an earlier run in this folder, which was thrown away
            optuna.delete_study(study_name=name, storage=storage)
            return open_study(run, url, directions, metric_names)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # names for the dashboard only
            # With another number of objectives it is written anew. Each call adds to the journal, so only where there is something new.
            if len(study.directions) == len(metric_names) and study.metric_names != list(metric_names):
                study.set_metric_names(list(metric_names))
    except (OSError, ImportError, ValueError, optuna.exceptions.OptunaError) as error:
        raise EnvironmentFault("study", "the study's storage must open", _first_line(error)) from error
    except Exception as error:  # SQLAlchemy has errors of its own, and is only there with a database
        if type(error).__name__ in ("OperationalError", "DatabaseError", "InterfaceError"):
            raise EnvironmentFault("study", "the study's storage must open", _first_line(error), "Is the database there?") from error
        if type(error).__module__.startswith("sqlalchemy"):
            text = str(error).splitlines()[0]
            raise ConfigError(
                "storage", "the database URL must open", text, "Give a URL such as postgresql://host/name, or leave storage out."
            ) from None
        raise
    return study, word


def _journal_storage(journal: Path) -> tuple[optuna.storages.BaseStorage, str]:
    """Open the journal. One whose lines make no sense together is set aside and begun anew; returns a word about that."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    def opened() -> optuna.storages.BaseStorage:
        lock = KernelLock(journal.with_suffix(".lock"))
        return JournalStorage(JournalFileBackend(str(journal), lock_obj=lock))  # type: ignore[arg-type] # acquire and release are all it asks for

    try:
        return opened(), ""
    except OSError:
        raise
    except Exception as error:  # of many kinds: an operation, a state, a distribution that Optuna does not know
        aside = journal.with_name(f"{journal.name}.damaged")
        journal.replace(aside)
        return opened(), f"{journal.name} could not be read ({type(error).__name__}: {_first_line(error)}) and was begun anew; {aside.name} keeps it"


def _loaded_or_made(name: str, storage: Any, directions: Sequence[Literal["minimize", "maximize"]]) -> optuna.Study:
    """The study of that name. It is not created over itself, as `load_if_exists` does: the journal would grow with each restart."""
    import optuna

    sampler = optuna.samplers.RandomSampler(seed=0)
    try:
        return optuna.load_study(study_name=name, storage=storage, sampler=sampler)
    except KeyError:
        return optuna.create_study(study_name=name, storage=storage, directions=list(directions), sampler=sampler)


def rewrite_study(
    run: Path,
    url: str | None,
    directions: Sequence[Literal["minimize", "maximize"]],
    metric_names: Sequence[str],
    fill: Callable[[optuna.Study], None],
) -> optuna.Study:
    """Put a new study, filled by `fill`, in place of the sweep's; the journal file at once, in a database step by step."""
    import optuna

    if url is not None:
        old, _ = open_study(run, url, directions, metric_names)
        optuna.delete_study(study_name=old.study_name, storage=url)
        study, _ = open_study(run, url, directions, metric_names)
        fill(study)
        return study
    place = run / f".{JOURNAL_FILE}.new"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    study, _ = open_study(place, None, directions, metric_names)
    fill(study)
    (place / JOURNAL_FILE).replace(run / JOURNAL_FILE)
    sync_folder(run)
    shutil.rmtree(place, ignore_errors=True)
    return open_study(run, None, directions, metric_names)[0]


def drop_torn_tail(journal: Path) -> str:
    """Cut an append-only file of JSON lines before its first line that is none; returns a word about it, empty when all was whole.

    A killed writer leaves half of its last line, a machine that lost power zeros. When more than that is cut, a copy of the whole
    file stays beside it; what it told of is in the records of the trials.
    """
    if not journal.exists():
        return ""
    data = journal.read_bytes()
    keep = 0
    for line in data.splitlines(keepends=True):
        if not _is_entry(line):
            break
        keep += len(line)
    if keep == len(data):
        return ""
    lost = data[keep:]
    more = len(lost.rstrip(b"\n").split(b"\n")) > 1
    if more:
        write_durably(journal.with_name(f"{journal.name}.damaged"), data)
    with journal.open("r+b") as file:
        file.truncate(keep)
        os.fsync(file.fileno())
    what = "everything after its first damaged line" if more else "an unfinished last line"
    return f"dropped {what} ({len(lost)} bytes) from {journal.name}" + (f"; {journal.name}.damaged keeps it as it was" if more else "")


def _is_entry(line: bytes) -> bool:
    """Whether a line of the journal is whole: a JSON object, its line end included."""
    try:
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _ids(numbers: Sequence[int]) -> str:
    """Trials by their names, the first few of many."""
    shown = ", ".join(f"t-{n:04d}" for n in numbers[:5])
    return shown + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")


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
