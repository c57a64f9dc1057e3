"""The store: nothing half-written, nothing damaged, nothing linked."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from autotune.model import ONNXModelHandler, ingest_onnx
from autotune.store import ENTRY_FILE, FILES, Store


def built(store: Store, digits: Path) -> tuple[str, ONNXModelHandler]:
    key = store.key({"pass": "P", "config": {"a": 1}})
    place = store.place()
    handler = ingest_onnx(digits / "model.onnx", place / FILES)
    store.publish(key, place, handler, facts={})
    return key, handler


def test_what_was_published_is_found_with_its_handler_and_digest(tmp_path: Path, digits: Path) -> None:
    store = Store(tmp_path)
    key, handler = built(store, digits)

    found = Store(tmp_path).find(key)

    assert found is not None
    assert found.cached
    assert found.digest == found.handler.digest
    assert found.handler.io == handler.io
    assert (found.handler.folder / "model.onnx").read_bytes() == (digits / "model.onnx").read_bytes()


def test_nothing_stays_in_the_building_place_after_publishing(tmp_path: Path, digits: Path) -> None:
    store = Store(tmp_path)
    built(store, digits)

    assert list((tmp_path / "building").iterdir()) == []


def test_keys_differ_by_every_fact_and_by_type(tmp_path: Path) -> None:
    store = Store(tmp_path)

    keys = {store.key({"config": value}) for value in (1, 1.5, True, "1", None, [1], {"a": 1}, {"a": 2})}

    assert len(keys) == 8


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "add", "entry", "swap"])
def test_a_damaged_entry_is_quarantined_and_missed(tmp_path: Path, digits: Path, damage: str) -> None:
    store = Store(tmp_path)
    key, _ = built(store, digits)
    entry = tmp_path / "entries" / key[:2] / key
    model = entry / FILES / "model.onnx"
    raw = bytearray(model.read_bytes())
    if damage == "flip":
        raw[len(raw) // 2] ^= 1
        model.write_bytes(raw)
    elif damage == "truncate":
        model.write_bytes(raw[:-10])
    elif damage == "delete":
        model.unlink()
    elif damage == "add":
        (entry / FILES / "more.bin").write_bytes(b"x")
    elif damage == "entry":
        (entry / ENTRY_FILE).unlink()
    elif damage == "swap":
        data = json.loads((entry / ENTRY_FILE).read_text())
        (entry / ENTRY_FILE).write_text(json.dumps({**data, "key": "0" * 64}))

    assert store.find(key) is None
    assert len(store.quarantined) == 1
    assert not entry.exists()
    assert len(list((tmp_path / "quarantine").iterdir())) == 1


def test_the_second_builder_of_a_key_gets_the_first_ones_entry(tmp_path: Path, digits: Path) -> None:
    store = Store(tmp_path)
    key = store.key({"pass": "P"})
    places = [store.place(), store.place()]
    handlers = [ingest_onnx(digits / "model.onnx", place / FILES) for place in places]

    first = store.publish(key, places[0], handlers[0], facts={})
    second = store.publish(key, places[1], handlers[1], facts={})

    assert first.digest == second.digest
    assert len(list((tmp_path / "entries").glob("*/*"))) == 1
    assert list((tmp_path / "building").iterdir()) == []


def test_entries_hold_copies_with_one_link_each(tmp_path: Path, digits: Path) -> None:
    store = Store(tmp_path)
    key, _ = built(store, digits)

    files = [p for p in (tmp_path / "entries" / key[:2] / key).rglob("*") if p.is_file()]

    assert files
    assert all(os.stat(p).st_nlink == 1 and not p.is_symlink() for p in files)
