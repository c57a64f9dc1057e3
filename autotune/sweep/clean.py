"""Free what a run folder no longer needs: leftovers, damaged entries, artifacts that nothing refers to. What is referred to stays."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.bundle import BUNDLE_FILE
from autotune.disk import faults_named, in_words
from autotune.errors import ConfigError, EnvironmentFault
from autotune.stages import SCRATCH_FOLDER
from autotune.store import BUILDING, ENTRIES, QUARANTINE, Store, folder_bytes
from autotune.sweep.interrupts import one_writer
from autotune.sweep.result import RESULT_FILE
from autotune.sweep.run import BEST_SO_FAR_FILE, BUNDLE_FOLDER, RUN_FILE
from autotune.trial import STORE_FOLDER, TRIAL_FILE

_TEMPORARY = re.compile(r"\.[^/]+\.\d+\.tmp")  # of a writer that was killed


@dataclass(frozen=True)
class Leftover:
    """Something that can go: a file or folder below the run folder, why, and its bytes."""

    path: Path
    why: str
    bytes: int


@dataclass(frozen=True)
class Cleaned:
    """What was removed, or would be: leftovers and the bytes of all."""

    run: Path
    dry_run: bool
    leftovers: tuple[Leftover, ...]

    @property
    def freed_bytes(self) -> int:
        return sum(item.bytes for item in self.leftovers)

    def to_json(self) -> dict[str, Any]:
        items = [{"path": i.path.relative_to(self.run).as_posix(), "why": i.why, "bytes": i.bytes} for i in self.leftovers]
        return {"run": str(self.run), "dry_run": self.dry_run, "freed_bytes": self.freed_bytes, "removed": items}


def clean(run: Path, *, dry_run: bool = False, everything: bool = False) -> Cleaned:
    """Remove what nothing in a run folder refers to and return it; with `dry_run`, only say what would go.

    Artifacts stay that a finished trial was made of, or the best model so far; with `everything` only those of the best model and
    of the front stay, and a sweep that goes on builds the others again when it needs them. Records, evidence, exports and the bundle
    always stay. Raises `ConfigError` for a folder that is no run, `EnvironmentFault` naming the owner while a sweep holds it.
    """
    run = run.resolve()
    if not (run / RUN_FILE).is_file():
        raise ConfigError("clean", f"the folder must be that of a run, with a {RUN_FILE}", str(run), "Give the --out folder of a run.")
    with faults_named(run), one_writer(run):
        store = Store(run / STORE_FOLDER, tidy=False)
        with store.alone() as nobody_else:
            if not nobody_else:
                raise EnvironmentFault("clean", f"nobody may use the store of {run.name} meanwhile", "a trial that still runs", "Try again later.")
            found = tuple(Leftover(path, why, folder_bytes(path)) for path, why in _leftovers(run, store, everything=everything))
            if not dry_run:
                for item in found:
                    if item.path.is_dir() and not item.path.is_symlink():
                        shutil.rmtree(item.path)
                    else:
                        item.path.unlink()
    return Cleaned(run, dry_run, found)


def _leftovers(run: Path, store: Store, *, everything: bool) -> Iterator[tuple[Path, str]]:
    """Paths that can go, with the reason; none lies below another."""
    kept = referenced(run, front_only=everything)
    for key in store.all_keys():
        if key not in kept:
            why = "an artifact that neither the best model nor the front is made of" if everything else "an artifact that no trial refers to"
            yield run / STORE_FOLDER / ENTRIES / key[:2] / key, why
    for path in store.abandoned():
        yield path, f"{BUILDING}: its process is gone"
    for path in store.quarantined():
        yield path, f"{QUARANTINE}: a damaged artifact"
    for name in ("ray", "probe", ".samples", ".study.journal.new", f".{BUNDLE_FOLDER}.building"):
        if (run / name).exists():
            yield run / name, "left by a sweep that was killed"
    old = run / f".{BUNDLE_FOLDER}.old"
    if old.exists() and (run / BUNDLE_FOLDER / BUNDLE_FILE).exists():
        yield old, "an earlier bundle, replaced"
    unfinished = [p for p in sorted((run / "trials").glob("t-*")) if not (p / TRIAL_FILE).exists()]
    for path in unfinished:
        yield path, "a trial that was cut off: it runs again from the start"
    inside = (run / "baseline", *sorted((run / "trials").glob("t-*")))
    for folder in inside:
        if folder in unfinished:
            continue
        for path in sorted(folder.rglob(SCRATCH_FOLDER)):
            if path.is_dir() and not path.is_symlink() and path.parent not in (folder, folder / "final"):  # there it is a slot's own name
                yield path, "scratch of a stage that was killed"
    for folder in (run, *(f for f in inside if f not in unfinished), run / "measured"):
        for path in sorted(folder.glob("**/.*.tmp") if folder != run else folder.glob(".*.tmp")):
            if _TEMPORARY.fullmatch(path.name) and SCRATCH_FOLDER not in path.parent.relative_to(run).parts:
                yield path, "a file that was never finished"


def referenced(run: Path, *, front_only: bool = False) -> set[str]:
    """Keys of the artifacts that a run's records, its best model so far and its result refer to, or only its best and its front."""
    best = _read(run / BEST_SO_FAR_FILE)
    result = _read(run / RESULT_FILE)
    wanted = {best.get("best"), *best.get("front", ()), (result.get("best") or {}).get("id"), *result.get("front", ())}
    documents = [_read(run / "baseline" / "baseline.json")]
    for trial in sorted((run / "trials").glob("t-*")):
        if not front_only or trial.name in wanted:
            documents += [_read(trial / TRIAL_FILE), _read(trial / "final" / TRIAL_FILE)]
    keys = {stage["key"] for document in documents for stage in document.get("stages", ()) if stage.get("key")}
    model = Path(best.get("model") or "")
    if ENTRIES in model.parts[:-2]:
        keys.add(model.parts[model.parts.index(ENTRIES) + 2])
    return keys


def _read(path: Path) -> dict[str, Any]:
    """A JSON object of the run; empty when there is none, or half of one."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def render(cleaned: Cleaned) -> str:
    """What was removed as text, one line for each kind, the bytes last."""
    lines = []
    for why in dict.fromkeys(i.why for i in cleaned.leftovers):
        items = [i for i in cleaned.leftovers if i.why == why]
        lines.append(f"{len(items):>5}  {in_words(sum(i.bytes for i in items)):>10}  {why}")
    verb = "would free" if cleaned.dry_run else "freed"
    lines.append(f"{verb} {cleaned.freed_bytes:,} bytes ({in_words(cleaned.freed_bytes)})" if lines else "nothing to remove")
    return "\n".join(lines)
