"""The sweep from start to end: check, baseline, trials, choice, last measurements, bundle."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autotune.bundle import BUNDLE_FILE, write_bundle
from autotune.config import LoadedSweep, load_sweep, parse_sweep, seconds, write_sweep
from autotune.digest import digest_of, digest_tree, dump_json, write_durably
from autotune.errors import ConfigError
from autotune.model import ONNXModelHandler
from autotune.passes.registry import get_pass
from autotune.pipeline import Pipeline
from autotune.records import MetricValue, TrialRecord
from autotune.search_spaces.space import point_key
from autotune.selection import Selection, select, verdict_sentence
from autotune.sweep.baseline import Baseline
from autotune.sweep.finalists import FINALISTS, Finalists, passed_over
from autotune.sweep.interrupts import Interrupted, Interrupts, interruptible, one_writer
from autotune.sweep.prepare import Prepared, check_against_baseline, prepare, probe_provider, space_counts
from autotune.sweep.result import DELIVERED, INTERRUPTED, NONE_FEASIBLE, RESULT_FILE, SweepResult, line_of, read_result, write_exports
from autotune.sweep.search import Goals, Search, open_study
from autotune.target import surroundings
from autotune.trial import TrialPlan, TrialRunner

SWEEP_FILE = "sweep.yaml"
RUN_FILE = "run.json"
BEST_SO_FAR_FILE = "best_so_far.json"
BUNDLE_FOLDER = "best.bundle"

Say = Callable[[str], None]


def run(sweep: LoadedSweep | Mapping[str, Any] | str | Path, out: str | Path, *, fresh: bool = False, say: Say | None = None) -> SweepResult:
    """Run a sweep into the folder `out` and return its result; the same call on the same folder resumes.

    `sweep` is a file, its content as plain data (paths relative to the working folder), or a loaded one. `fresh` throws away what
    stands in `out`. `say` gets one line of progress at a time. Raises `ConfigError` for the user's mistakes and `EnvironmentFault`
    for what the machine lacks, before any trial.
    """
    loaded = _loaded(sweep)
    folder = Path(out).resolve()
    say = say or (lambda _line: None)
    prepared = prepare(loaded)
    if fresh and folder.exists():
        _refuse_foreign(folder)
        with one_writer(folder):
            for entry in folder.iterdir():
                if entry.name != ".lock":
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_foreign(folder)
    with one_writer(folder), interruptible() as interrupts:
        return _Sweep(prepared, folder, say, interrupts).run()


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
    ours = {".lock", RUN_FILE}
    names = {p.name for p in folder.iterdir()}
    if names and not names & ours:
        raise ConfigError(
            "out", "the run folder must be new, empty, or of an earlier run", f"{folder} with other files in it", "Choose another --out."
        )


class _Sweep:
    """One call of `run`: the steps in order, each resumable."""

    def __init__(self, prepared: Prepared, folder: Path, say: Say, interrupts: Interrupts) -> None:
        self.prepared, self.folder, self.say, self.interrupts = prepared, folder, say, interrupts
        self.sweep = prepared.sweep
        self.started = time.monotonic()
        self.notes = list(prepared.notes)
        self.plan: TrialPlan | None = None

    def run(self) -> SweepResult:
        self._open_folder()
        search: Search | None = None
        with TrialRunner(self.folder, self.sweep) as runner:
            try:
                baseline = Baseline(self.folder, self.sweep, self.prepared, runner, self.say).plan()
                if isinstance(baseline, TrialRecord):
                    return self._finish(
                        NONE_FEASIBLE,
                        [baseline],
                        None,
                        f"The untouched model itself can't be measured: {baseline.reason} in stage {baseline.stage}: {baseline.message}",
                    )
                self.plan = baseline
                check_against_baseline(self.prepared.constraints, self.prepared.objectives, baseline.baseline_metrics)
                search = self._search(baseline)
                if len(search.records) >= search.total and (before := self._finished_before()) is not None:
                    return before
                self._trials(search, runner)
                return self._choose(baseline, search, runner)
            except Interrupted as stop:
                records = [search.records[n] for n in sorted(search.records)] if search else []
                so_far = self._select(self.plan, records) if self.plan and records else None
                return self._finish(INTERRUPTED, records, so_far, f"Interrupted by {stop}: {len(records)} trials are saved.")

    # ------------------------------------------------------------------ the run folder

    def _finished_before(self) -> SweepResult | None:
        """The result of a run that came to its end, when all that it names is still there."""
        if not (self.folder / RESULT_FILE).exists():
            return None
        before = read_result(self.folder)
        if before.status == INTERRUPTED or (before.status == DELIVERED and not (self.folder / BUNDLE_FOLDER / BUNDLE_FILE).exists()):
            return None
        self.say("this sweep is finished: nothing is run again")
        return before

    def _open_folder(self) -> None:
        """Write the sweep as it will run, or make sure that the folder holds this very sweep."""
        config = self.sweep.absolute()
        here = surroundings()
        identity = {"sweep": config.to_json(), "data": self._data_digests()}
        path = self.folder / RUN_FILE
        if path.exists():
            before = json.loads(path.read_text())
            _refuse_changes(before["identity"], identity)
            if before["surroundings"] != here.to_json():
                changed = [k for k, v in here.to_json().items() if before["surroundings"].get(k) != v]
                raise ConfigError(
                    "resume", "a run goes on in the surroundings that it was begun in", f"other {', '.join(changed)}",
                    "Results from different machines or versions don't share a front: start again with --fresh, or into another --out.",
                )  # fmt: skip
        else:
            probe_provider(self.sweep.target.accelerator, self.folder / "probe")
            shutil.rmtree(self.folder / "probe", ignore_errors=True)
            (self.folder / SWEEP_FILE).write_text(write_sweep(config), encoding="utf-8")
            began = datetime.now(UTC).isoformat(timespec="seconds")
            write_durably(path, dump_json({"identity": identity, "surroundings": here.to_json(), "began": began}))
        self.sweep = LoadedSweep(config, self.folder, self.sweep.source)

    def _data_digests(self) -> dict[str, str]:
        section, data = self.sweep.config.model, self.sweep.config.data
        names = {
            "model": section.path,
            "script": section.script,
            "weights": section.weights,
            "eval": data.eval,
            "calibration": data.calibration,
            "train": data.train,
        }
        return {k: digest_tree(self.sweep.path(v)) for k, v in names.items() if v is not None}

    # ------------------------------------------------------------------ trials

    def _search(self, plan: TrialPlan) -> Search:
        config, pipeline = self.sweep.config, self.prepared.pipeline
        untouched = pipeline.untouched_point()
        default = pipeline.default_point()
        first = [(untouched if untouched is not None else {}, "untouched")]
        if untouched is None or point_key(default) != point_key(untouched):
            first.insert(0, (default, "default"))
        first += [(p, "start") for p in pipeline.start_points()]
        goals = self._goals(plan)
        study, word = open_study(self.folder, config.storage, goals.directions, [o.name for o in self.prepared.objectives])
        if word:
            self.notes.append(word)
        from autotune.sweep.ray_tune import record_reader

        search = Search(
            pipeline.space, goals=goals, study=study, budget=config.budget.trials, seed=config.seed, sampler=config.search.sampler, first=first
        )
        finished, unfinished = search.resume(record_reader(self.folder))
        if finished or unfinished:
            self.say(f"resume: {finished} trials are on disk" + (f", {unfinished} to run again" if unfinished else ""))
        return search

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
        self.say(f"search: {search.total} trials of {search.space.valid} points, " + ("all of them" if search.enumerates else f"by {search.sampler}"))
        runner.close()  # the worker has servers of its own
        limit = self.sweep.config.budget.time
        deadline = self.started + seconds(limit) if limit else None

        def may_start() -> bool:
            if deadline is None or time.monotonic() < deadline:
                return True
            self.notes.append(f"the time budget of {limit} ended the search after {len(search.records)} trials")
            return False

        def on_trial(record: TrialRecord) -> None:
            self._write_best_so_far(search, runner)
            self.say(f"{record.id} [{len(search.records)}/{search.total}] {line_of(record, self.prepared.metric.name)}")

        with self.interrupts.held():
            run_trials(
                self.folder, search, on_trial=on_trial, may_start=may_start, read_record=record_reader(self.folder), check=self.interrupts.check
            )

    def _write_best_so_far(self, search: Search, runner: TrialRunner) -> None:
        """Keep the best model of the finished trials findable, whatever happens next: which it is, where its files stand."""
        plan = self.plan
        assert plan is not None
        records = [search.records[n] for n in sorted(search.records)]
        selection = self._select(plan, records)
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

    # ------------------------------------------------------------------ the choice

    def _select(self, plan: TrialPlan, records: list[TrialRecord]) -> Selection:
        config = self.sweep.config
        return select(
            records, self.prepared.objectives, self.prepared.constraints, baseline=plan.baseline_metrics, score=plan.metric_name,
            pick=config.pick, strict=config.strict,
        )  # fmt: skip

    def _choose(self, plan: TrialPlan, search: Search, runner: TrialRunner) -> SweepResult:
        """Measure the chosen one afresh and on rows that it was not chosen by; go on to the next while one does not hold."""
        last = Finalists(plan, self.prepared.constraints, lambda rs: self._select(plan, rs), runner, self.say, self.notes)
        records = last.settle([search.records[n] for n in sorted(search.records)])
        finals: dict[str, tuple[TrialRecord, MetricValue | None]] = {}
        while True:
            selection = self._select(plan, records)
            if selection.best is not None and selection.best not in finals and len(finals) == FINALISTS:
                # The choice goes on among those whose figures are fresh; the untouched model is always one of them.
                self.notes.append(f"{FINALISTS} finalists were measured afresh; the choice is among them and the untouched model")
                finals |= {r.id: (r, last.measure(r)[1]) for r in records if r.unchanged}
                fresh = [r if r.id in finals else passed_over(r) for r in records]
                selection = replace(selection, best=self._select(plan, fresh).best)
            if selection.best is None:
                verdict = verdict_sentence(selection, records, baseline=plan.baseline_metrics, score=plan.metric_name)
                return self._finish(NONE_FEASIBLE, records, selection, verdict)
            if selection.best in finals:
                final, holdout = finals[selection.best]
                model = plan.baseline if final.unchanged else last.model_of(final)
                return self._deliver(plan, records, selection, final, holdout, model, runner, settled=final.id in last.settled)
            chosen = next(r for r in records if r.id == selection.best)
            final, holdout, why = last.measure(chosen)
            finals[final.id] = (final, holdout)
            records = [final if r.id == final.id else r for r in records]
            if why:
                self.notes.append(f"{final.id} was first choice, but {why}")
                self.say(f"{final.id} does not hold: {why}")

    # ------------------------------------------------------------------ the end

    def _deliver(
        self, plan: TrialPlan, records: list[TrialRecord], selection: Selection, final: TrialRecord, holdout: MetricValue | None,
        model: ONNXModelHandler, runner: TrialRunner, *, settled: bool,
    ) -> SweepResult:  # fmt: skip
        """Write the bundle of the chosen model and end the sweep."""
        verdict = verdict_sentence(selection, records, baseline=plan.baseline_metrics, score=plan.metric_name)
        folder = self.folder / BUNDLE_FOLDER
        steps = self.prepared.pipeline.steps(final.point) if final.point else []
        here = surroundings()
        summary = {
            "id": digest_of([final.model_digest, final.session])[:16], "created": datetime.now(UTC).isoformat(timespec="seconds"), "parent": None,
            "tool": here.versions.get("passtune", ""), "status": str(final.status), "verdict": verdict, "trial": final.id,
            "constraints": [dict(c) for c in final.constraints], "metrics": {k: v.to_json() for k, v in final.metrics.items()},
            "holdout": holdout.to_json() if holdout else None, "baseline": {k: v.to_json() for k, v in plan.baseline_metrics.items()},
            "measured_on": f"{here.cpu_model}, {self.sweep.target.run_threads} threads, onnxruntime {here.versions['onnxruntime']}",
        }  # fmt: skip
        recipe = {
            "schema": "recipe/1", "target": self.sweep.config.to_json()["target"], "point": dict(final.point),
            "passes": [
                {"slot": s.slot, "pass": s.pass_name, "version": get_pass(s.pass_name).contract.version, "config": portable(s.config)} for s in steps
            ],
            "data": json.loads((self.folder / RUN_FILE).read_text())["identity"]["data"],
        }  # fmt: skip
        write_bundle(
            folder, model=model, model_digest=final.model_digest, data=plan.eval_path, rows=plan.rows.everything, recipe=recipe,
            summary=json.loads(dump_json(summary)), evidence=self._evidence(final), batch_size=self.sweep.target.batch_size,
            runner=runner._onnx, limits=runner.limits,  # noqa: SLF001 -- the runner's own children, the same lane
        )  # fmt: skip
        best = _best(final, holdout, self.prepared.pipeline) | {"settled_on_all_rows": settled, "baseline_all_rows": self._baseline_all_rows()}
        return self._finish(DELIVERED, records, selection, verdict, best=best, bundle=folder)

    def _baseline_all_rows(self) -> dict[str, Any] | None:
        """The baseline's score over all rows, where some are held out."""
        kept: dict[str, Any] = json.loads((self.folder / "baseline" / "scores.json").read_text())
        return kept.get("all") if self.prepared.rows.holdout else None

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
        plan, space = self.plan, self.prepared.pipeline.space
        summary: dict[str, Any] = {
            "status": status, "verdict": verdict, "run": str(self.folder), "bundle": str(bundle) if bundle else None,
            "metric": self.prepared.metric.name,
            "baseline": {"metrics": {k: v.to_json() for k, v in plan.baseline_metrics.items()} if plan else {}},
            "best": best,
            "front": list(selection.front) if selection else [], "picks": dict(selection.picks) if selection else {},
            "groups": {k: list(v) for k, v in selection.groups.items()} if selection else {},
            "trials": dict(Counter(str(r.status) for r in records)),
            "space": space_counts(space),
            "near_misses": [m.to_json() for m in selection.near_misses] if selection else [],
            "hypervolume": selection.hypervolume if selection else None,
            "surroundings": surroundings().to_json(), "target": self.sweep.config.to_json()["target"],
            "seconds": time.monotonic() - self.started, "notes": [*self.notes, *(selection.notes if selection else ())],
        }  # fmt: skip
        summary = json.loads(dump_json(summary))
        write_durably(self.folder / RESULT_FILE, dump_json(summary))
        result = SweepResult(self.folder, status, summary, tuple(records))
        write_exports(result)
        return result


def _best(record: TrialRecord, holdout: MetricValue | None, pipeline: Pipeline) -> dict[str, Any]:
    return {
        "id": record.id, "point": dict(record.point), "changed": pipeline.changed_from_default(record.point), "unchanged": record.unchanged,
        "metrics": {k: v.to_json() for k, v in record.metrics.items()}, "holdout": holdout.to_json() if holdout else None,
        "constraints": [dict(c) for c in record.constraints],
    }  # fmt: skip


def _refuse_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """The same command resumes; another sweep in the same folder is a mistake that would mix results."""
    if digest_of(before) == digest_of(now):
        return
    changes = list(_differences(before, now, ""))
    raise ConfigError(
        "resume", "a run folder belongs to one sweep", "; ".join(changes[:5]) + (f" and {len(changes) - 5} more" if len(changes) > 5 else ""),
        "Give the same sweep to go on, --fresh to start again, or another --out.",
    )  # fmt: skip


def _differences(before: Any, now: Any, path: str) -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted({*before, *now}):
            yield from _differences(before.get(key), now.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (a, b) in enumerate(zip(before, now, strict=True)):
            yield from _differences(a, b, f"{path}.{index}")
    elif before != now:
        yield f"{path}: content changed" if path.startswith("data.") else f"{path}: {before!r} before, {now!r} now"


def portable(config: Mapping[str, Any]) -> dict[str, Any]:
    """A pass's config without paths of this machine: files go by their names."""
    return {k: Path(v).name if isinstance(v, str) and Path(v).is_absolute() else v for k, v in config.items()}
