"""The sweep from start to end: check, baseline, trials, choice, last measurements, bundle."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from autotune.benchmarks.stages import OUTPUTS_FILE
from autotune.bundle import BUNDLE_FILE, write_bundle
from autotune.config import LoadedSweep, load_sweep, parse_sweep, seconds, write_sweep
from autotune.constraints import Verdict, judge_all
from autotune.digest import digest_of, digest_tree, dump_json, write_durably
from autotune.errors import ConfigError, EnvironmentFault, VerificationError
from autotune.model import PYTORCH, ModelHandler, ONNXModelHandler, PyTorchModelHandler, ingest_onnx
from autotune.passes.registry import get_pass
from autotune.pipeline import Pipeline, Step
from autotune.records import MetricValue, StageRecord, Status, TrialRecord
from autotune.search_spaces.space import point_key
from autotune.selection import Selection, select, verdict_sentence
from autotune.sweep.prepare import Prepared, check_against_baseline, prepare, probe_provider, space_counts
from autotune.sweep.search import Goals, Search, open_study
from autotune.target import surroundings
from autotune.trial import PLAN_FILE, StageFailed, TrialPlan, TrialRunner, size_metrics

if TYPE_CHECKING:
    import pandas as pd

RESULT_FILE = "result.json"
SWEEP_FILE = "sweep.yaml"
RUN_FILE = "run.json"
BEST_SO_FAR_FILE = "best_so_far.json"
BUNDLE_FOLDER = "best.bundle"
EPS_LATENCY = 0.03  # of the choice, as in `select`
FINALISTS = 4  # candidates that may be measured afresh before the untouched model is taken
DELIVERED, NONE_FEASIBLE, INTERRUPTED = "delivered", "none-feasible", "interrupted"
EXIT = {DELIVERED: 0, NONE_FEASIBLE: 4, INTERRUPTED: 130}

Say = Callable[[str], None]


class Interrupted(BaseException):
    """Ctrl-C, SIGTERM or a closed terminal, at a moment where all that is finished is on disk.

    No `Exception`: libraries that catch those in their loops would swallow it.
    """


@dataclass(frozen=True)
class SweepResult:
    """What a sweep left behind. `status` is delivered, none-feasible or interrupted; `summary` is what `--json` prints."""

    run: Path
    status: str
    summary: Mapping[str, Any]
    records: tuple[TrialRecord, ...]

    @property
    def exit_status(self) -> int:
        """0 delivered, 4 none feasible, 130 interrupted."""
        return EXIT[self.status]

    @property
    def best(self) -> TrialRecord | None:
        """The record of the delivered model."""
        chosen = self.summary.get("best")
        return next((r for r in self.records if chosen and r.id == chosen["id"]), None)

    @property
    def trials(self) -> pd.DataFrame:
        """All trials, failed ones too, one row each: `param.*`, `metric.*`, status and reason."""
        import pandas as pd

        return pd.DataFrame([flat(r) for r in self.records])

    @property
    def front(self) -> pd.DataFrame:
        """The rows of `trials` that are on the Pareto front."""
        table = self.trials
        return table[table["id"].isin(self.summary["front"])] if len(table) else table

    def report(self) -> str:
        """The report as text."""
        from autotune.report import render_report

        return render_report(dict(self.summary), self.records)

    def bundle(self) -> Path | None:
        """The bundle's folder, None when nothing was delivered."""
        return Path(self.summary["bundle"]) if self.summary.get("bundle") else None


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


@contextlib.contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Hold the run folder by a kernel lock. Raises `EnvironmentFault` naming the owner when another process has it."""
    path = folder / ".lock"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "an unknown process"
            raise EnvironmentFault(
                "run", f"one sweep at a time may write into {folder.name}", f"held by {owner}", "Wait for it, or choose another --out."
            ) from None
        file.seek(0)
        file.truncate()
        file.write(f"pid {os.getpid()} since {datetime.now(UTC).isoformat(timespec='seconds')}\n")
        file.flush()
        yield


class Interrupts:
    """The signals that end a sweep early. The first one is raised as `Interrupted`; a second one ends the process at once (130).

    While `held`, a signal is only kept: native code that it would be raised through turns it into another error. Whoever holds it
    calls `check` where it may be raised.
    """

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._held = False

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Take a signal in."""
        self.seen.append(number)
        if len(self.seen) > 1:
            os._exit(130)
        if not self._held:
            self.check()

    def check(self) -> None:
        """Raise `Interrupted` if a signal came."""
        if self.seen:
            raise Interrupted(signal.Signals(self.seen[0]).name)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep signals until the block ends, then raise."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self.check()


@contextlib.contextmanager
def interruptible() -> Iterator[Interrupts]:
    """Handle SIGINT, SIGTERM and SIGHUP as interrupts of the sweep, as far as this is the main thread."""
    import threading

    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = {s: signal.signal(s, interrupts.handle) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
                baseline = self._baseline(runner)
                if isinstance(baseline, TrialRecord):
                    return self._finish(
                        NONE_FEASIBLE,
                        [baseline],
                        None,
                        f"The untouched model itself can't be measured: {baseline.reason} in stage {baseline.stage}: {baseline.message}",
                    )
                self.plan = baseline
                check_against_baseline(self.prepared.constraints, baseline.baseline_metrics)
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

    # ------------------------------------------------------------------ the baseline

    def _baseline(self, runner: TrialRunner) -> TrialPlan | TrialRecord:
        """Ingest the model and measure it as it is; a model that can't be measured comes back as the record of its failure."""
        if (self.folder / PLAN_FILE).exists():
            return TrialPlan.load(self.folder)
        self.say("baseline: measuring the model as it is")
        folder = self.folder / "baseline"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        started = time.monotonic()
        stages: list[StageRecord] = []
        try:
            source, model = self._ingest(runner, folder, stages)
            metrics = self._measure_baseline(runner, model, folder, stages)
        except StageFailed as end:
            record = TrialRecord(
                number=0, point={}, status=end.status, origin="untouched", cause=end.cause, stage=end.stage, message=end.message,
                stages=tuple(stages), seconds=time.monotonic() - started,
            )  # fmt: skip
            trial = self.folder / "trials" / record.id
            trial.mkdir(parents=True, exist_ok=True)
            write_durably(trial / "trial.json", dump_json(record.to_json()))
            return record
        metric = self.prepared.metric
        plan = TrialPlan(
            run=self.folder, sweep=self.sweep, facts=self.prepared.facts, input_model=source, baseline=model, baseline_metrics=metrics,
            metric_name=metric.name, metric_unit=metric.unit, higher_is_better=metric.higher_is_better, rows=self.prepared.rows,
        )  # fmt: skip
        write_durably(self.folder / PLAN_FILE, dump_json(plan.to_json()))
        return TrialPlan.load(self.folder)

    def _ingest(self, runner: TrialRunner, folder: Path, stages: list[StageRecord]) -> tuple[ModelHandler, ONNXModelHandler]:
        """Bring the input model into the run folder; a torch module is converted as the chain's untouched point says."""
        begun = time.monotonic()
        target = folder / "model"
        target.mkdir()
        section = self.sweep.config.model
        if section.path is not None:
            model = ingest_onnx(self.sweep.path(section.path), target).with_session(self.prepared.settings)
            stages.append(StageRecord("ingest", time.monotonic() - begun, digest=model.digest))
            return model, model
        assert section.script is not None
        place = self.folder / "input"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        if section.weights is not None:
            shutil.copyfile(self.sweep.path(section.weights), place / "weights.pt")
        source = PyTorchModelHandler(
            place, self.prepared.io, self.prepared.settings, {}, script=self.sweep.path(section.script), loader=section.loader
        )
        artifact, stage = runner.build(self._conversion(), source, source.digest, folder / "convert")
        stages.append(stage)
        for path in artifact.handler.folder.iterdir():
            shutil.copyfile(path, target / path.name)
        return source, ONNXModelHandler.from_folder(target, session=self.prepared.settings)

    def _conversion(self) -> Step:
        """How the untouched torch module becomes ONNX: as the chain's own conversion does by default."""
        pipeline = self.prepared.pipeline
        point = pipeline.untouched_point() or pipeline.default_point()
        for step in pipeline.steps(point):
            contract = pipeline.classes[step.pass_name].contract
            if contract.accepts == PYTORCH and contract.returns != PYTORCH:
                return step
        accelerator = self.sweep.target.accelerator
        return Step("convert", "OnnxConversion", get_pass("OnnxConversion").resolve(accelerator, {}))

    def _measure_baseline(self, runner: TrialRunner, model: ONNXModelHandler, folder: Path, stages: list[StageRecord]) -> dict[str, MetricValue]:
        data, rows = self.sweep.path(self.sweep.config.data.eval), self.prepared.rows
        begun = time.monotonic()
        checked = runner.check(model, None, rows.search, data, folder / "check")
        stages.append(StageRecord("check", time.monotonic() - begun, notes=checked))
        begun = time.monotonic()
        scores = {name: runner.accuracy(model, self.sweep.config.metric, data, rows.of(name), folder / name, baseline_outputs=None)
                  for name in ("search", "holdout", "all") if rows.of(name)}  # fmt: skip
        write_durably(folder / "scores.json", dump_json({k: v.to_json() for k, v in scores.items()}))
        stages.append(StageRecord("accuracy", time.monotonic() - begun))
        begun = time.monotonic()
        times, facts = runner.latency(model, None, data, rows.search, folder / "latency", seed=self.sweep.config.seed)
        stages.append(StageRecord("latency", time.monotonic() - begun, notes={k: v for k, v in facts.items() if k != "metrics"}))
        metrics = {**times, self.prepared.metric.name: scores["search"], **size_metrics(model, checked, {})}
        record = TrialRecord(
            number=0, point={}, status=Status.OK, origin="untouched", stages=tuple(stages), metrics=metrics, model_digest=model.digest
        )
        document = {**record.to_json(), "id": "baseline"}
        write_durably(folder / "baseline.json", dump_json(document))
        return metrics

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
        records = self._settle(plan, [search.records[n] for n in sorted(search.records)], runner)
        finals: dict[str, tuple[TrialRecord, MetricValue | None]] = {}
        while True:
            selection = self._select(plan, records)
            if selection.best is None:
                verdict = verdict_sentence(selection, records, baseline=plan.baseline_metrics, score=plan.metric_name)
                return self._finish(NONE_FEASIBLE, records, selection, verdict)
            if selection.best in finals:
                return self._deliver(plan, records, selection, *finals[selection.best], runner)
            if len(finals) == FINALISTS:
                # The choice goes on among those whose figures are fresh; the untouched model is always one of them.
                self.notes.append(f"{FINALISTS} finalists were measured afresh; the choice is among them and the untouched model")
                records = [
                    r if r.id in finals or r.unchanged else replace(r, status=_passed_over(r), message=r.message or NO_FINALIST) for r in records
                ]
                finals |= {r.id: (r, self._final(plan, r, runner)[1]) for r in records if r.unchanged}
                continue
            chosen = next(r for r in records if r.id == selection.best)
            final, holdout, why = self._final(plan, chosen, runner)
            finals[final.id] = (final, holdout)
            records = [final if r.id == final.id else r for r in records]
            if why:
                self.notes.append(f"{final.id} was first choice, but {why}")
                self.say(f"{final.id} does not hold: {why}")

    def _settle(self, plan: TrialPlan, records: list[TrialRecord], runner: TrialRunner) -> list[TrialRecord]:
        """Score undecided candidates that would win over all rows before they are given up, the nearest misses first.

        A few search rows can leave a verdict open that the held-out rows settle; a note says that they were used so.
        """
        limits = [c.text for c in self.prepared.constraints if c.metric == plan.metric_name]
        for _ in range(FINALISTS if plan.rows.holdout and limits else 0):
            selection = self._select(plan, records)
            best = next((r for r in records if r.id == selection.best), None)
            rivals = [r for r in records if self._open_to(r, plan, limits) and (best is None or _faster(r, best))]
            if not rivals:
                break
            rival = min(rivals, key=lambda r: (sum(max(0.0, float(c["violation"])) for c in r.constraints), r.metrics["latency"].value))
            self.say(f"{rival.id}: undecided on the search rows, so it is scored on all rows")
            folder = self.folder / "trials" / rival.id / "final" / "all"
            kept = plan.baseline_folder / "all" / OUTPUTS_FILE
            try:
                model = self._model_of(plan, rival, runner)
                score = runner.accuracy(model, self.sweep.config.metric, plan.eval_path, plan.rows.everything, folder, baseline_outputs=kept)
            except StageFailed as end:
                settled = replace(rival, status=end.status, cause=end.cause, stage=f"final {end.stage}", message=end.message)
            else:
                settled = runner.judged(plan, replace(rival, metrics={**rival.metrics, plan.metric_name: score}))
                self.notes.append(
                    f"{rival.id} was undecided on {len(plan.rows.search)} rows and is {settled.status} on all {len(plan.rows.everything)}"
                )
            write_durably(folder.parent / "trial.json", dump_json(settled.to_json()))
            records = [settled if r.id == rival.id else r for r in records]
        return records

    def _open_to(self, record: TrialRecord, plan: TrialPlan, limits: list[str]) -> bool:
        """An undecided record whose only open verdicts are on the score, over the search rows."""
        missed = [c for c in record.constraints if c["verdict"] not in (Verdict.CERTAIN, Verdict.MET)]
        on_search_rows = record.measured and record.metrics[plan.metric_name].samples == len(plan.rows.search)
        return record.status is Status.UNDECIDED and on_search_rows and all(c["expr"] in limits for c in missed)

    def _final(self, plan: TrialPlan, record: TrialRecord, runner: TrialRunner) -> tuple[TrialRecord, MetricValue | None, str]:
        """Measure a finalist in fresh sessions and on the held-out rows. Returns its new record, the hold-out score, and why it falls."""
        if record.unchanged:
            kept = json.loads((plan.baseline_folder / "scores.json").read_text())
            score = MetricValue.from_json(kept["holdout"]) if "holdout" in kept else None
            return record, score, ""
        self.say(f"{record.id}: measuring the finalist afresh")
        model = self._model_of(plan, record, runner)
        folder = self.folder / "trials" / record.id / "final"
        metric, metrics, holdout = self.sweep.config.metric, dict(record.metrics), None
        try:
            if plan.rows.holdout:
                scores = {
                    name: runner.accuracy(
                        model, metric, plan.eval_path, plan.rows.of(name), folder / name, baseline_outputs=plan.baseline_folder / name / OUTPUTS_FILE
                    )
                    for name in ("holdout", "all")
                }
                holdout = scores["holdout"]
                metrics[plan.metric_name] = scores["all"]
            times, _ = runner.latency(
                model, plan.baseline, plan.eval_path, plan.rows.search, folder / "latency", seed=1_000_000 + record.number, final=True
            )
        except StageFailed as end:
            fallen = replace(record, status=end.status, cause=end.cause, stage=f"final {end.stage}", message=end.message)
            return fallen, holdout, f"its last measurement ended as {end.cause}: {end.message}"
        metrics |= times
        final = runner.judged(plan, replace(record, metrics=metrics))
        why = self._why_it_falls(plan, final, holdout)
        if why and final.status is Status.OK:
            final = replace(final, status=Status.INFEASIBLE, message=why)
        write_durably(folder / "trial.json", dump_json({**final.to_json(), "holdout": holdout.to_json() if holdout else None}))
        return final, holdout, why

    def _why_it_falls(self, plan: TrialPlan, final: TrialRecord, holdout: MetricValue | None) -> str:
        if final.status is not Status.OK:
            missed = [str(c["expr"]) for c in final.constraints if c["verdict"] not in (Verdict.CERTAIN, Verdict.MET)]
            return f"over all rows and fresh runs it does not meet `{'`, `'.join(missed)}`" if missed else f"it ended as {final.reason}"
        if holdout is not None:
            limits = [c for c in self.prepared.constraints if c.metric == plan.metric_name]
            kept = json.loads((plan.baseline_folder / "scores.json").read_text())
            base = {plan.metric_name: MetricValue.from_json(kept["holdout"])}
            for judgement in judge_all(limits, {plan.metric_name: holdout}, base):
                if judgement.verdict is Verdict.VIOLATED:
                    return f"on the held-out rows it violates `{judgement.constraint.text}`"
        return ""

    def _model_of(self, plan: TrialPlan, record: TrialRecord, runner: TrialRunner) -> ONNXModelHandler:
        """The artifact of a trial, from the store (built again if it was damaged)."""
        model: ModelHandler = plan.input_model
        digest = model.digest
        pipeline = Pipeline(self.sweep, plan.facts)
        for step in pipeline.steps(record.point):
            artifact, _ = runner.build(step, model, digest, self.folder / "trials" / record.id / "final" / step.slot)
            model, digest = artifact.handler, artifact.digest
        if digest != record.model_digest or not isinstance(model, ONNXModelHandler):
            raise VerificationError(
                "bundle", f"the model of {record.id} must be the one that was measured", f"digest {digest[:12]}, measured {record.model_digest[:12]}"
            )
        return model

    # ------------------------------------------------------------------ the end

    def _deliver(
        self, plan: TrialPlan, records: list[TrialRecord], selection: Selection, final: TrialRecord, holdout: MetricValue | None, runner: TrialRunner
    ) -> SweepResult:
        model = plan.baseline if final.unchanged else self._model_of(plan, final, runner)
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
        return self._finish(DELIVERED, records, selection, verdict, best=final, holdout=holdout, bundle=folder)

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
        self, status: str, records: list[TrialRecord], selection: Selection | None, verdict: str, *, best: TrialRecord | None = None,
        holdout: MetricValue | None = None, bundle: Path | None = None,
    ) -> SweepResult:  # fmt: skip
        plan, space = self.plan, self.prepared.pipeline.space
        summary: dict[str, Any] = {
            "status": status, "verdict": verdict, "run": str(self.folder), "bundle": str(bundle) if bundle else None,
            "metric": self.prepared.metric.name,
            "baseline": {"metrics": {k: v.to_json() for k, v in plan.baseline_metrics.items()} if plan else {}},
            "best": _best(best, holdout, self.prepared.pipeline) if best else None,
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


def _faster(a: TrialRecord, b: TrialRecord) -> bool:
    """Whether a's latency is below b's by more than the tolerance of the choice."""
    return a.metrics["latency"].value < (1 - EPS_LATENCY) * b.metrics["latency"].value


NO_FINALIST = "better finalists used up the measurements at the end"


def _passed_over(record: TrialRecord) -> Status:
    """A model that would be feasible, but was not measured afresh, can't be chosen; its record keeps what is known."""
    return Status.UNDECIDED if record.status is Status.OK else record.status


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


def line_of(record: TrialRecord, metric: str) -> str:
    """One line on a finished trial, for people who watch."""
    if not record.measured:
        return f"{record.reason} in {record.stage}: {record.message[:160]}" if record.stage else record.reason
    parts = [str(record.status)]
    latency = record.metrics.get("latency")
    if latency is not None and latency.ratio is not None:
        parts.append(f"{latency.ratio.value:.3f}x latency")
    score = record.metrics.get(metric)
    if score is not None:
        change = f" ({score.delta.value * 100:+.2f}pt)" if score.delta is not None and score.unit == "share" else ""
        parts.append(f"{metric} {score.value:.4g}{change}")
    if record.unchanged:
        parts.append("unchanged")
    elif record.shares_with is not None:
        parts.append(f"same bytes as t-{record.shares_with:04d}")
    return "  ".join(parts) + f"  {record.seconds:.1f} s"


def flat(record: TrialRecord) -> dict[str, Any]:
    """One row for tables: `param.*`, `metric.*`, status, reason."""
    row: dict[str, Any] = {
        "id": record.id, "status": str(record.status), "cause": str(record.cause) if record.cause else "", "stage": record.stage,
        "message": record.message, "origin": record.origin, "unchanged": record.unchanged, "shares_with": record.shares_with,
        "seconds": record.seconds,
    }  # fmt: skip
    for name, value in record.point.items():
        row[f"param.{name}"] = value if isinstance(value, str | int | float | bool) or value is None else json.dumps(value)
    for name, metric in record.metrics.items():
        row |= {f"metric.{name}": metric.value, f"metric.{name}.low": metric.low, f"metric.{name}.high": metric.high}
        for kind in ("ratio", "delta"):
            interval = getattr(metric, kind)
            if interval is not None:
                row |= {
                    f"metric.{name}.{kind}": interval.value,
                    f"metric.{name}.{kind}.low": interval.low,
                    f"metric.{name}.{kind}.high": interval.high,
                }
    return row


def write_exports(result: SweepResult) -> None:
    """Write `trials.json`, `trials.csv` and `trials.parquet`, failed trials included."""
    write_durably(result.run / "trials.json", dump_json([flat(r) for r in result.records]))
    table = result.trials
    if not len(table):
        return
    for column in table.columns:  # a parameter may be text in one trial and a number in another
        if column.startswith("param."):
            table[column] = table[column].map(lambda v: None if v is None or v != v else str(v))
    table.to_csv(result.run / "trials.csv", index=False)
    table.to_parquet(result.run / "trials.parquet", index=False)


def read_result(folder: Path) -> SweepResult:
    """Read a run folder back: its summary and every trial's record. Raises `ConfigError` when there is none."""
    path = folder / RESULT_FILE
    if not path.is_file():
        raise ConfigError("report", f"the run folder must hold a {RESULT_FILE}", str(folder), "Give the --out folder of a run.")
    summary = json.loads(path.read_text())
    records = []
    for trial in sorted((folder / "trials").glob("t-*")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            last = trial / "final" / "trial.json"
            data = json.loads((last if last.exists() else trial / "trial.json").read_text())
            data.pop("holdout", None)
            records.append(TrialRecord.from_json(data))
    return SweepResult(folder, summary["status"], summary, tuple(records))


__all__ = ["SweepResult", "read_result", "run"]
