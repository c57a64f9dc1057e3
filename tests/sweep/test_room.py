"""The store under its limit between trials: what goes, what stays, what is said."""

from __future__ import annotations

from pathlib import Path

from autotune.config import size_bytes
from autotune.model import ingest_onnx
from autotune.records import StageRecord, Status, TrialRecord
from autotune.store import FILES, Store, folder_bytes
from autotune.sweep.room import StoreLimit


def record_with_artifact(store: Store, digits: Path, number: int) -> TrialRecord:
    key, place = store.key({"number": number}), store.place()
    store.publish(key, place, ingest_onnx(digits / "model.onnx", place / FILES), facts={}, seconds=1.0)
    return TrialRecord(number, {"a": number}, Status.OK, stages=(StageRecord("quantize", 1.0, key=key), StageRecord("session", 0.1)))


def test_artifacts_off_the_front_go_until_the_store_fits_and_the_notes_say_so(tmp_path: Path, digits: Path) -> None:
    store = Store(tmp_path)
    records = [record_with_artifact(store, digits, n) for n in range(4)]
    limit = StoreLimit(store, "300kB")  # two artifacts of 129 kB

    limit.keep([records[3]])

    assert len(store.all_keys()) == 2
    assert records[3].stages[0].key in store.all_keys()
    assert folder_bytes(tmp_path / "entries") <= size_bytes("300kB")
    (note,) = limit.notes()
    assert note.startswith("the store was kept under 300kB: 2 artifacts (")
    assert note.endswith("were dropped, to be built again if needed")


def test_what_the_front_needs_stays_beyond_the_limit_and_the_notes_say_by_how_much(tmp_path: Path, digits: Path) -> None:
    store = Store(tmp_path)
    records = [record_with_artifact(store, digits, n) for n in range(2)]
    limit = StoreLimit(store, "1kB")

    limit.keep(records)

    assert len(store.all_keys()) == 2
    over = f"{(folder_bytes(tmp_path / 'entries') - 1000) / 1000:.3g} kB"
    assert limit.notes() == [f"the store is {over} over its limit of 1kB: the best model and the front need what is left"]


def test_without_a_limit_nothing_is_looked_at(tmp_path: Path, digits: Path) -> None:
    store = Store(tmp_path)
    record_with_artifact(store, digits, 0)
    limit = StoreLimit(store, None)

    limit.keep([])

    assert len(store.all_keys()) == 1
    assert limit.notes() == []
