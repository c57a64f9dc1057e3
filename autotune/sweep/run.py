"""The sweep from start to end: check, baseline, trials, choice, last measurements, bundle."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autotune.bundle import BUNDLE_FILE, Proof, damage, write_bundle
from autotune.config import LoadedSweep, SweepConfig, load_sweep, parse_sweep, percent, points, script_of, seconds, write_sweep
from autotune.data import RANDOM
from autotune.digest import digest_of, digest_tree, dump_json, write_durably
from autotune.disk import enough_handles, faults_named
from autotune.errors import AutotuneError, ConfigError, EnvironmentFault
from autotune.model import ONNXModelHandler
from autotune.passes.registry import get_pass
from autotune.pipeline import Pipeline
from autotune.records import MetricValue, Status, TrialRecord
from autotune.selection import Selection, Selector, verdict_sentence
from autotune.store import Store
from autotune.sweep.baseline import Baseline
from autotune.sweep.extend import STUDIED, Change, changes_between, outside_of, refuse, study_content
from autotune.sweep.finalists import FINALISTS, LOOKS, Finalists, choose_afresh
from autotune.sweep.interrupts import LOCK_FILE, Interrupted, Interrupts, interruptible, one_writer, refuse_if_held
from autotune.sweep.ladder import FrontBoxes, ledger
from autotune.sweep.prepare import Prepared, check_against_baseline, prepare, probe_provider, space_counts
from autotune.sweep.progress import Event, Listener, PlainLines, Progress
from autotune.sweep.result import (
    DELIVERED,
    INTERRUPTED,
    NONE_FEASIBLE,
    NOT_REPRODUCED,
    RESULT_FILE,
    SweepResult,
    read_result,
    write_exports,
)
from autotune.sweep.room import StoreLimit, check_room
from autotune.sweep.search import Asked, Goals, Search, open_study, rewrite_study
from autotune.target import surroundings
from autotune.torch_files import source_digest
from autotune.trial import PLAN_FILE, STORE_FOLDER, TRIAL_FILE, TrialPlan, TrialRunner

SWEEP_FILE = "sweep.yaml"
RUN_FILE = "run.json"
BEST_SO_FAR_FILE = "best_so_far.json"
BUNDLE_FOLDER = "best.bundle"

Say = Callable[[str], None]


def run(
    sweep: LoadedSweep | Mapping[str, Any] | str | Path, out: str | Path, *, fresh: bool = False, extend: bool = False, say: Say | None = None,
    on_event: Listener | None = None,
) -> SweepResult:  # fmt: skip
    """Run a sweep into the folder `out` and return its result; the same call on the same folder resumes.

    `sweep` is a file, its content as plain data (paths relative to the working folder), or a loaded one. `fresh` throws away what
    stands in `out`; `extend` goes on with a changed sweep and keeps the finished trials (docs/decisions/0006). `say` gets one line of
    progress at a time, `on_event` all that `autotune.sweep.progress` lists. Raises `ConfigError` for the user's mistakes and
    `EnvironmentFault` for what the machine lacks, before any trial; a disk that is full later ends the sweep as `DiskFault`, a Ray or a
    database that is gone as `EnvironmentFault`, and the same call goes on. An interrupt before there is anything to save is a
    `KeyboardInterrupt`; later ones end in a result of status interrupted.
    """
    if fresh and extend:
        raise ConfigError("run", "--fresh throws finished trials away and --extend keeps them", "both", "Give one of them.")
    loaded = _loaded(sweep)
    folder = Path(out).resolve()
    with faults_named(folder), enough_handles(), interruptible() as interrupts:
        refuse_if_held(folder)  # at once, before anything is looked at
        prepared = prepare(loaded)
        _refuse_foreign(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with one_writer(folder):
            if fresh:
                for entry in folder.iterdir():
                    if entry.name != LOCK_FILE:
                        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            return _Sweep(prepared, folder, _listener(say, on_event), interrupts, extend=extend).run()


def _listener(say: Say | None, on_event: Listener | None) -> Listener:
    lines = PlainLines(say) if say is not None else None

    def listen(event: Event) -> None:
        if lines is not None:
            lines(event)
        if on_event is not None:
            on_event(event)

    return listen


def _loaded(sweep: LoadedSweep | Mapping[str, Any] | str | Path) -> LoadedSweep:
    if isinstance(sweep, LoadedSweep):
        return sweep
    if isinstance(sweep, Mapping):
        return LoadedSweep(parse_sweep(sweep), Path.cwd())
    return load_sweep(Path(sweep))


def _refuse_foreign(folder: Path) -> None:
    """A run writes into an empty folder or into its own."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError("out", "the run folder must be a folder", str(folder))
    ours = {LOCK_FILE, RUN_FILE}
    names = {p.name for p in folder.iterdir()}
    if names and not names & ours:
        raise ConfigError(
            "out", "the run folder must be new, empty, or of an earlier run", f"{folder} with other files in it", "Choose another --out."
        )


class _Sweep:
    """One call of `run`: the steps in order, each resumable."""

    def __init__(self, prepared: Prepared, folder: Path, listener: Listener, interrupts: Interrupts, *, extend: bool) -> None:
        self.prepared, self.folder, self.interrupts, self.extend = prepared, folder, interrupts, extend
        self.sweep = prepared.sweep
        self.progress = Progress(listener, folder, prepared.metric.name)
        self.say = self.progress.say
        self.started = time.monotonic()
        self.notes = list(prepared.notes)
        self.plan: TrialPlan | None = None
        self.selector: Selector | None = None
        self.search: Search | None = None
        self.earlier: list[dict[str, Any]] = []  # what the sweep was before it was extended
        self.resolution: dict[str, Any] | None = None  # what was timed again to settle the front
        self.new = True  # nothing of an earlier run is there
        self.outside: frozenset[int] = frozenset()

    def run(self) -> SweepResult:
        self.progress.tell(
            "sweep-started", run=str(self.folder), metric=self.prepared.metric.name, objectives=[str(o) for o in self.prepared.objectives],
            constraints=[c.text for c in self.prepared.constraints],
        )  # fmt: skip
        self._open_folder()
        self.store = Store(self.folder / STORE_FOLDER)
        self.store_limit = StoreLimit(self.store, self.sweep.config.budget.store)
        with TrialRunner(self.folder, self.sweep) as runner:
            runner.watched_by(self.progress.tick)
            try:
                return self._run(runner)
            except Interrupted as stop:
                return self._saved(f"Interrupted by {stop}")
            except EnvironmentFault as stop:
                stop.resumable = True
                with contextlib.suppress(OSError, AutotuneError):  # of a disk that is full, say: the records are what counts
                    self._saved(f"Stopped. {stop}")
                raise

    def _run(self, runner: TrialRunner) -> SweepResult:
        baseline = Baseline(self.folder, self.sweep, self.prepared, runner, self.say).plan()
        if isinstance(baseline, TrialRecord):
            verdict = f"The untouched model itself can't be measured: {baseline.reason} in stage {baseline.stage}: {baseline.message}"
            return self._finish(NONE_FEASIBLE, [baseline], None, verdict)
        self.plan = baseline
        self.progress.tell("baseline", metrics={k: v.to_json() for k, v in baseline.baseline_metrics.items()})
        check_against_baseline(self.prepared.constraints, self.prepared.objectives, baseline.baseline_metrics)
        search = self.search = self._search(baseline, runner)
        if len(search.records) >= search.total and (before := self._finished_before()) is not None:
            self.progress.tell("finished", summary=dict(before.summary))
            return before
        self._trials(search, runner)
        return self._choose(baseline, search, runner)

    def _saved(self, why: str) -> SweepResult:
        """End early, with all that is finished on record."""
        self.interrupts.ending = True
        records = [self.search.records[n] for n in sorted(self.search.records)] if self.search else []
        so_far = self._select(self.plan, records) if self.plan and records else None
        return self._finish(INTERRUPTED, records, so_far, f"{why}{'' if why.endswith('.') else ':'} {len(records)} trials are saved.")

    # ------------------------------------------------------------------ the run folder

    def _finished_before(self) -> SweepResult | None:
        """The result of a run that came to its end, when all that it names is still there."""
        if not (self.folder / RESULT_FILE).exists():
            return None
        before = read_result(self.folder)
        bundle = self.folder / BUNDLE_FOLDER
        if before.status in (INTERRUPTED, NOT_REPRODUCED) or (before.status == DELIVERED and not (bundle / BUNDLE_FILE).exists()):
            return None
        if before.status == DELIVERED and (wrong := damage(bundle)):
            self.notes.append(f"the bundle was no longer as it was written, and was made again: {'; '.join(wrong[:3])}")
            self.say(self.notes[-1])
            return None
        self.say("this sweep is finished: nothing is run again")
        return before

    def _open_folder(self) -> None:
        """Write the sweep as it will run, or make sure that the folder holds this very sweep."""
        config = self.sweep.absolute()
        here = surroundings()
        identity = {"sweep": config.to_json(), "data": self._data_digests()}
        path = self.folder / RUN_FILE
        self.new = not path.exists()
        if not self.new:
            before = json.loads(path.read_text())
            changes = changes_between(before["identity"], identity)
            if changes:
                refuse(changes, extend=self.extend, finished=len(self._records_on_disk()[0]))
            if before["surroundings"] != here.to_json():
                changed = [k for k, v in here.to_json().items() if before["surroundings"].get(k) != v]
                raise ConfigError(
                    "resume", "a run goes on in the surroundings that it was begun in", f"other {', '.join(changed)}",
                    "Results from different machines or versions don't share a front: start again with --fresh, or into another --out.",
                )  # fmt: skip
            self.earlier = list(before.get("earlier", ()))
            if changes:
                self._extend(before, identity, changes)
        else:
            check_room(self.prepared, self.folder)
            probe_provider(self.sweep.target.accelerator, self.folder / "probe")
            shutil.rmtree(self.folder / "probe", ignore_errors=True)
            began = datetime.now(UTC).isoformat(timespec="seconds")
            write_durably(path, dump_json({"identity": identity, "surroundings": here.to_json(), "began": began}))
        self._write_sweep(config)
        self.sweep = LoadedSweep(config, self.folder, self.sweep.source)

    def _extend(self, before: Mapping[str, Any], identity: Mapping[str, Any], changes: Sequence[Change]) -> None:
        """Make the run folder that of the changed sweep, in one step: writing run.json. All else follows from it and the records."""
        plan_file = self.folder / PLAN_FILE
        if plan_file.exists():  # first everything that could be refused
            check_against_baseline(self.prepared.constraints, self.prepared.objectives, TrialPlan.load(self.folder).baseline_metrics)
        records, _ = self._records_on_disk()
        self.earlier.append({
            "sweep": before["identity"]["sweep"], "trials": max(records, default=-1) + 1,
            "until": datetime.now(UTC).isoformat(timespec="seconds"),
        })  # fmt: skip
        outside_of(self.prepared.pipeline, self.prepared.facts, self.earlier, records)
        for change in changes:
            self.say(f"extend: {change}")
        if any(change.path.split(".")[1] in STUDIED for change in changes):  # by which some trials were stopped before all rows
            for number in (n for n, r in records.items() if r.partial):
                (self.folder / "trials" / f"t-{number:04d}" / TRIAL_FILE).unlink()  # it runs again
        (self.folder / RESULT_FILE).unlink(missing_ok=True)  # what was chosen and measured last is of the sweep as it was
        for final in self.folder.glob("trials/t-*/final"):
            shutil.rmtree(final)
        write_durably(self.folder / RUN_FILE, dump_json({**before, "identity": identity, "earlier": self.earlier}))

    def _write_sweep(self, config: SweepConfig) -> None:
        """Write the sweep where people and workers read it, unless it stands there."""
        text = write_sweep(config)
        path = self.folder / SWEEP_FILE
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_durably(path, text)
        plan = self.folder / PLAN_FILE
        if plan.exists():
            data = json.loads(plan.read_text())
            if digest_of(data["sweep"]) != digest_of(config.to_json()):
                write_durably(plan, dump_json({**data, "sweep": config.to_json()}))

    def _data_digests(self) -> dict[str, str]:
        section, data = self.sweep.config.model, self.sweep.config.data
        names = {
            "model": section.path,
            "script": section.script,
            "weights": section.weights,
            "eval": data.eval,
            "calibration": data.calibration if data.calibration != RANDOM else None,
            "train": data.train,
            "metric": script_of(self.sweep.config.metric) or None,
            "measurer": script_of(self.sweep.config.measure.measurer or "") or None,
            "user_script": self.sweep.config.script,
        }
        return {k: (source_digest if k == "model" else digest_tree)(self.sweep.path(v)) for k, v in names.items() if v is not None}

    # ------------------------------------------------------------------ trials

    def _search(self, plan: TrialPlan, runner: TrialRunner) -> Search:
        config, pipeline = self.sweep.config, self.prepared.pipeline
        goals = self._goals(plan)
        names = [o.name for o in self.prepared.objectives]
        study, word = open_study(self.folder, config.storage, goals.directions, names, anew=self.new)
        if word:
            self.notes.append(word)
        records, torn = self._records_on_disk()
        records = {n: self._judged(plan, runner, r) for n, r in records.items()}
        self.outside = outside_of(pipeline, self.prepared.facts, self.earlier, records)
        search = Search(
            pipeline.space, goals=goals, study=study, budget=config.budget.trials, seed=config.seed, sampler=config.search.sampler,
            first=pipeline.first_points(), options=config.search.options.model_dump() if config.search.options else None, outside=self.outside,
        )  # fmt: skip
        finished, unfinished = search.resume(
            records.get, on_disk=max(records, default=-1) + 1,
            renew=lambda fill: rewrite_study(self.folder, config.storage, goals.directions, names, fill), content=study_content(config.to_json()),
        )  # fmt: skip
        if torn:
            self.notes.append(f"the records of {', '.join(torn)} were damaged: run again")
        self.notes += search.repairs
        if self.outside:
            names_of = ", ".join(f"t-{n:04d}" for n in sorted(self.outside))
            self.notes.append(f"no points of the space as it is now, so on record but not chosen: {names_of}")
        if finished or unfinished:
            self.say(f"resume: {finished} trials are on disk" + (f", {unfinished} to run again" if unfinished else ""))
        if finished:
            self._write_best_so_far(search, runner)
        return search

    def _judged(self, plan: TrialPlan, runner: TrialRunner, record: TrialRecord) -> TrialRecord:
        """A record under the constraints as they are now, on disk too: they may have changed since it was written."""
        if not record.measured:
            return record
        judged = runner.judged(plan, record)
        if judged != record and dump_json(judged.to_json()) != dump_json(record.to_json()):  # equal without a doubt, or equal on disk
            write_durably(self.folder / "trials" / record.id / TRIAL_FILE, dump_json(judged.to_json()))
        return judged

    def _records_on_disk(self) -> tuple[dict[int, TrialRecord], list[str]]:
        """The records that earlier runs left, by number, and the names of trials whose record can't be read."""
        from autotune.sweep.ray_tune import record_reader

        read = record_reader(self.folder)
        found = {int(p.name[2:]): read(int(p.name[2:])) for p in sorted(self.folder.glob("trials/t-*")) if p.name[2:].isdigit()}
        # A record of no point and no numbers is that of a model which could not be measured, before it could.
        whole = {n: r for n, r in found.items() if r is not None and (r.point or r.metrics)}
        torn = [f"t-{n:04d}" for n, r in found.items() if r is None and (self.folder / "trials" / f"t-{n:04d}" / TRIAL_FILE).exists()]
        return whole, torn

    def _goals(self, plan: TrialPlan) -> Goals:
        objectives = self.prepared.objectives

        def values(record: TrialRecord) -> tuple[float, ...] | None:
            if not record.measured:
                return None
            found = []
            for objective in objectives:
                value = record.metrics.get(objective.name)
                if value is None:
                    return None
                found.append(value.ratio.value if value.ratio is not None and objective.name != plan.metric_name else value.value)
            return tuple(found)

        def constraints(record: TrialRecord) -> tuple[float, ...]:
            return tuple(float(c["violation"]) for c in record.constraints)

        return Goals(tuple("minimize" if o.minimize else "maximize" for o in objectives), values, constraints)

    def _trials(self, search: Search, runner: TrialRunner) -> None:
        """Run what is left of the search on Ray Tune; nothing is started when all is done already."""
        from autotune.sweep.ray_tune import record_reader, run_trials

        if len(search.records) >= search.total:
            return
        self.progress.search_started(
            trials=search.total, finished=len(search.records), failed=_failed(search), points=search.space.valid,
            how="enumeration" if search.enumerates else search.sampler,
        )  # fmt: skip
        runner.close()  # the worker has servers of its own
        boxes = self._front_boxes(search)
        limit = self.sweep.config.budget.time
        deadline = self.started + seconds(limit) if limit else None

        def may_start() -> bool:
            if deadline is None or time.monotonic() < deadline:
                return True
            self.notes.append(f"the time budget of {limit} ended the search after {len(search.records)} trials")
            return False

        def on_start(asked: Asked) -> None:
            self.progress.tell("trial-started", trial=f"t-{asked.number:04d}", number=asked.number, origin=asked.origin, attempt=asked.attempt,
                               point=dict(asked.point), choosing_seconds=round(asked.choosing_s, 4))  # fmt: skip

        def front_before(number: int) -> dict[str, Any]:
            """What a trial is told of those before it. By number, so that a trial that runs again is told the same."""
            return boxes.of(r for n, r in search.records.items() if n < number and n not in self.outside)

        def on_trial(record: TrialRecord) -> None:
            best, front = self._write_best_so_far(search, runner)
            self.store_limit.keep(front)
            self.progress.trial_finished(record, best, finished=len(search.records), failed=_failed(search), trials=search.total)

        run_trials(
            self.folder, search, on_start=on_start, on_trial=on_trial, may_start=may_start, read_record=record_reader(self.folder),
            tick=self.progress.tick, held=self.interrupts.held, front_before=front_before,
        )  # fmt: skip

    def _front_boxes(self, search: Search) -> FrontBoxes:
        plan, eps = self.plan, self.sweep.config.measure.eps
        assert plan is not None
        return FrontBoxes(
            self.prepared.objectives, plan.baseline_metrics, plan.metric_name, higher_is_better=plan.higher_is_better,
            eps_latency=percent(eps.latency), eps_score=points(eps.score), family=(LOOKS + 1) * search.total,
        )  # fmt: skip

    def _write_best_so_far(self, search: Search, runner: TrialRunner) -> tuple[TrialRecord | None, list[TrialRecord]]:
        """Keep the best model of the finished trials findable, whatever happens next: which it is, where its files stand.

        Returns the best one, and it together with the front.
        """
        plan = self.plan
        assert plan is not None
        records = [search.records[n] for n in sorted(search.records)]
        selection = self._select(plan, records, places=False)  # after each trial: how sure the places are can wait
        best = next((r for r in records if r.id == selection.best), None)
        content: dict[str, Any] = {"finished": len(records), "of": search.total, "best": None}
        if best is not None:
            key = next((s.key for s in reversed(best.stages) if s.key), "")
            model = runner.store.files_of(key) if key and not best.unchanged else plan.baseline.folder
            content |= {
                "best": best.id, "verdict": verdict_sentence(selection, records, baseline=plan.baseline_metrics, score=plan.metric_name),
                "model": str(model.relative_to(self.folder)), "session": dict(best.session), "point": dict(best.point),
                "front": list(selection.front),
            }  # fmt: skip
        write_durably(self.folder / BEST_SO_FAR_FILE, dump_json(content))
        return best, [r for r in records if r.id == selection.best or r.id in selection.front]

    # ------------------------------------------------------------------ the choice

    def _select(self, plan: TrialPlan, records: list[TrialRecord], *, looks: int = 1, places: bool = True) -> Selection:
        if self.selector is None:
            config, eps = self.sweep.config, self.sweep.config.measure.eps
            self.selector = Selector(
                self.prepared.objectives, self.prepared.constraints, baseline=plan.baseline_metrics, score=plan.metric_name, pick=config.pick,
                strict=config.strict, eps_latency=percent(eps.latency), eps_score=points(eps.score),
            )  # fmt: skip
        return self.selector.select((r for r in records if r.number not in self.outside), looks=looks, places=places)

    def _choose(self, plan: TrialPlan, search: Search, runner: TrialRunner) -> SweepResult:
        """Measure the chosen one afresh and on rows that it was not chosen by; go on to the next while one does not hold."""

        def choose(records: list[TrialRecord]) -> Selection:
            return self._select(plan, records, looks=LOOKS + 1)

        for stale in self.folder.glob("trials/t-*/final"):  # of a run that did not come to its end, or whose bundle was lost
            shutil.rmtree(stale)
        last = Finalists(plan, self.prepared.constraints, choose, runner, self.say, self.notes)
        records = last.settle([search.records[n] for n in sorted(search.records.keys() - self.outside)])
        records = last.resolve(records)
        self.resolution = last.resolution
        chosen = choose_afresh(records, choose, last.measure, most=FINALISTS, note=self.notes.append, say=self.say)
        final, records, selection = chosen.final, chosen.records, chosen.selection
        if final is None:
            verdict = verdict_sentence(selection, records, baseline=plan.baseline_metrics, score=plan.metric_name)
            return self._finish(NONE_FEASIBLE, records, selection, verdict)
        model = plan.baseline if final.unchanged else last.model_of(final)
        return self._deliver(plan, records, selection, final, chosen.holdout, model, last)

    # ------------------------------------------------------------------ the end

    def _deliver(
        self, plan: TrialPlan, records: list[TrialRecord], selection: Selection, final: TrialRecord, holdout: MetricValue | None,
        model: ONNXModelHandler, last: Finalists,
    ) -> SweepResult:  # fmt: skip
        """Write the bundle of the chosen model, measure it once more as it stands there, and end the sweep."""
        verdict = verdict_sentence(selection, records, baseline=plan.baseline_metrics, score=plan.metric_name, holdout=holdout)
        runner = last.runner
        folder = self.folder / BUNDLE_FOLDER
        steps = self.prepared.pipeline.steps(final.point) if final.point else []
        here = surroundings()
        summary = {
            "id": digest_of([final.model_digest, final.session])[:16], "created": datetime.now(UTC).isoformat(timespec="seconds"), "parent": None,
            "tool": here.versions.get("passtune", ""), "status": str(final.status), "verdict": verdict, "trial": final.id,
            "constraints": [dict(c) for c in final.constraints], "metrics": {k: v.to_json() for k, v in final.metrics.items()},
            "metric": plan.metric_name, "holdout": holdout.to_json() if holdout else None, "baseline_holdout": self._baseline_on("holdout"),
            "baseline": {k: v.to_json() for k, v in plan.baseline_metrics.items()},
            "measured_on": f"{here.cpu_model}, {self.sweep.target.run_threads} threads, onnxruntime {here.versions['onnxruntime']}",
        }  # fmt: skip
        recipe = {
            "schema": "recipe/1", "target": self.sweep.config.to_json()["target"], "point": dict(final.point),
            "passes": [
                {
                    "slot": s.slot, "pass": s.pass_name, "version": get_pass(s.pass_name).contract.version, "config": portable(s.config),
                    **({"inserted": s.inserted} if s.inserted else {}),
                }
                for s in steps
            ],
            "data": json.loads((self.folder / RUN_FILE).read_text())["identity"]["data"],
        }  # fmt: skip
        proofs: list[Proof] = []

        def prove(written: ONNXModelHandler) -> Proof:
            proofs.append(last.prove(final, written))
            return proofs[0]

        write_bundle(
            folder, model=model, model_digest=final.model_digest, data=plan.eval_path, rows=plan.rows.everything, recipe=recipe,
            summary=json.loads(dump_json(summary)), evidence=self._evidence(final), batch_size=self.sweep.target.batch_size,
            runner=runner._onnx, limits=runner.limits, prove=prove,  # noqa: SLF001 -- the runner's own children, the same lane
        )  # fmt: skip
        best = _best(final, holdout, self.prepared.pipeline) | {
            "settled_on_all_rows": final.id in last.settled, "baseline_all_rows": self._baseline_on("all"), "delivery": proofs[0].to_json(),
        }  # fmt: skip
        status = DELIVERED
        if proofs[0].differs:
            status = NOT_REPRODUCED
            verdict = f"Not reproduced, so the bundle is kept but not verified: {'; '.join(proofs[0].differs)}. It had been chosen as {verdict}"
        return self._finish(status, records, selection, verdict, best=best, bundle=folder)

    def _baseline_on(self, rows: str) -> dict[str, Any] | None:
        """The baseline's score over the rows of that name, where some are held out."""
        kept: dict[str, Any] = json.loads((self.folder / "baseline" / "scores.json").read_text())
        return kept.get(rows) if self.prepared.rows.holdout else None

    def _evidence(self, final: TrialRecord) -> dict[str, Path]:
        """Raw samples of the baseline and of the chosen trial, by their names in the bundle."""
        found: dict[str, Path] = {}
        trial = self.folder / "trials" / final.id
        for where, folder in (("baseline", self.folder / "baseline"), ("trial", trial)):
            for pattern in ("*.json", "*/latency.npz", "*/scores.npz", "final/*.json", "final/*/latency.npz", "final/*/scores.npz"):
                for path in sorted(folder.glob(pattern)):
                    if path.name != "result.json":
                        found[f"{where}/{path.relative_to(folder).as_posix()}"] = path
        return found

    def _finish(
        self, status: str, records: list[TrialRecord], selection: Selection | None, verdict: str, *,
        best: Mapping[str, Any] | None = None, bundle: Path | None = None,
    ) -> SweepResult:  # fmt: skip
        self.interrupts.ending = True  # there is nothing left that an interrupt could save
        plan, space = self.plan, self.prepared.pipeline.space
        if self.search is not None:
            there = {r.number for r in records}
            records = sorted([*records, *(self.search.records[n] for n in self.outside - there)], key=lambda r: r.number)
        summary: dict[str, Any] = {
            "status": status, "verdict": verdict, "run": str(self.folder), "bundle": str(bundle) if bundle else None,
            "metric": self.prepared.metric.name,
            "baseline": {"metrics": {k: v.to_json() for k, v in plan.baseline_metrics.items()} if plan else {}},
            "best": best,
            "front": list(selection.front) if selection else [], "picks": dict(selection.picks) if selection else {},
            "groups": {k: list(v) for k, v in selection.groups.items()} if selection else {},
            "membership": {k: m.to_json() for k, m in selection.membership.items()} if selection else {},
            "eps": dict(selection.eps) if selection else {}, "resolution": self.resolution,
            "trials": dict(Counter(str(r.status) for r in records)),
            "space": space_counts(space),
            "near_misses": [m.to_json() for m in selection.near_misses] if selection else [],
            "hypervolume": selection.hypervolume if selection else None,
            "ledger": ledger(records, rows=len(self.prepared.rows.search)),
            "surroundings": surroundings().to_json(), "target": self.sweep.config.to_json()["target"],
            "seconds": time.monotonic() - self.started, "notes": [*self.notes, *self._store_notes(), *(selection.notes if selection else ())],
        }  # fmt: skip
        summary = json.loads(dump_json(summary))
        write_durably(self.folder / RESULT_FILE, dump_json(summary))
        result = SweepResult(self.folder, status, summary, tuple(records))
        write_exports(result)
        self.progress.tell("finished", summary=summary)
        return result

    def _store_notes(self) -> list[str]:
        damaged = len(self.store.quarantined())
        words = [f"{damaged} damaged store {'entries were' if damaged > 1 else 'entry was'} set aside before use and built again"] if damaged else []
        return [*words, *self.store_limit.notes()]


def _best(record: TrialRecord, holdout: MetricValue | None, pipeline: Pipeline) -> dict[str, Any]:
    return {
        "id": record.id, "point": dict(record.point), "changed": pipeline.changed_from_default(record.point), "unchanged": record.unchanged,
        "metrics": {k: v.to_json() for k, v in record.metrics.items()}, "holdout": holdout.to_json() if holdout else None,
        "constraints": [dict(c) for c in record.constraints],
    }  # fmt: skip


def _failed(search: Search) -> int:
    """Trials so far that left no numbers, and were not meant to do without."""
    return sum(not r.measured and r.status is not Status.PRUNED for r in search.records.values())


def portable(config: Mapping[str, Any]) -> dict[str, Any]:
    """A pass's config without paths of this machine: files go by their names."""
    return {k: Path(v).name if isinstance(v, str) and Path(v).is_absolute() else v for k, v in config.items()}
