"""F11: the store is damaged. It is found before use, set aside, built again, counted; a damaged model is never measured."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from autotune.digest import dump_json
from autotune.model import ONNXModelHandler
from autotune.store import ENTRY_FILE, FILES, Store
from autotune.sweep.run import run

DATA_FILE = "model.onnx.data"


def published(store: Store, name: str) -> str:
    """A model with its weights in a file beside it, under a key of its own."""
    weights = np.random.default_rng(len(name)).normal(size=(64, 64)).astype(np.float32)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 64]) for n in "xy")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], name, [x], [y], [numpy_helper.from_array(weights, "w")])
    place, key = store.place(), store.key({"name": name})
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(place / FILES / "model.onnx"), save_as_external_data=True, location=DATA_FILE, size_threshold=0)
    store.publish(key, place, ONNXModelHandler.from_folder(place / FILES), facts={})
    return key


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def changed_entry(entry: Path, **more: Any) -> None:
    """Rewrite an entry file without its digest of itself following."""
    path = entry / ENTRY_FILE
    path.write_text(dump_json({**json.loads(path.read_text()), **more}))


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "a bit of the weights": lambda entry, other: flip(entry / FILES / DATA_FILE),
    "a bit of the graph": lambda entry, other: flip(entry / FILES / "model.onnx"),
    "half of the weights": lambda entry, other: os.truncate(entry / FILES / DATA_FILE, 100),
    "weights of no byte": lambda entry, other: os.truncate(entry / FILES / DATA_FILE, 0),
    "a graph of no byte": lambda entry, other: os.truncate(entry / FILES / "model.onnx", 0),
    "no weights": lambda entry, other: (entry / FILES / DATA_FILE).unlink(),
    "no files": lambda entry, other: shutil.rmtree(entry / FILES),
    "one file more": lambda entry, other: (entry / FILES / "more").write_bytes(b"x"),
    "no commit marker": lambda entry, other: (entry / ENTRY_FILE).unlink(),
    "a marker of no byte": lambda entry, other: os.truncate(entry / ENTRY_FILE, 0),
    "half a marker": lambda entry, other: os.truncate(entry / ENTRY_FILE, 200),
    "a marker that is a list": lambda entry, other: (entry / ENTRY_FILE).write_text("[]"),
    "a marker with nothing in it": lambda entry, other: (entry / ENTRY_FILE).write_text("{}"),
    "another session in the marker": lambda entry, other: changed_entry(entry, handler={}),
    "another format in the marker": lambda entry, other: changed_entry(entry, format=1),
    "entries swapped": swap,
    "files swapped": lambda entry, other: swap(entry / FILES, other / FILES),
    "weights as a link": lambda entry, other: (
        (entry / FILES / DATA_FILE).unlink(),
        (entry / FILES / DATA_FILE).symlink_to(other / FILES / DATA_FILE),
    ),
    "files as a link": lambda entry, other: (shutil.rmtree(entry / FILES), (entry / FILES).symlink_to(other / FILES)),
    "weights with a second name": lambda entry, other: os.link(entry / FILES / DATA_FILE, entry.parent.parent / "second"),
    "a file in place of the entry": lambda entry, other: (shutil.rmtree(entry), entry.write_bytes(b"x")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_a_miss_and_goes_to_quarantine(tmp_path: Path, injected: Callable[[str], None], damage: str) -> None:
    store = Store(tmp_path)
    key, other = published(store, "one"), published(store, "second")
    entry = tmp_path / "entries" / key[:2] / key
    DAMAGES[damage](entry, tmp_path / "entries" / other[:2] / other)
    injected("F11")

    assert store.find(key) is None
    assert not os.path.lexists(entry)
    assert len(store.quarantined()) == 1
    assert published(store, "one") == key
    found = store.find(key)
    assert found is not None
    assert found.digest == found.handler.digest


def test_a_bit_flipped_anywhere_in_an_entry_is_found(tmp_path: Path, injected: Callable[[str], None]) -> None:
    store = Store(tmp_path)
    key = published(store, "one")
    files = [p for p in (tmp_path / "entries" / key[:2] / key).rglob("*") if p.is_file()]
    kept = {p: p.read_bytes() for p in files}
    rng = np.random.default_rng(0)
    for path, raw in kept.items():
        for position in rng.integers(0, len(raw), 20):
            changed = bytearray(raw)
            changed[position] ^= 1 << int(rng.integers(0, 8))
            path.write_bytes(changed)
            injected("F11")

            assert store.find(key) is None, f"byte {position} of {path.name}"

            shutil.rmtree(tmp_path / "quarantine")
            (tmp_path / "quarantine").mkdir()
            for file, data in kept.items():
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
    assert store.find(key) is not None


def test_a_sweep_that_goes_on_over_a_damaged_store_builds_again_and_counts_it(
    deterministic: Callable[..., dict[str, Any]], tmp_path: Path, injected: Callable[[str], None]
) -> None:
    sweep, out = deterministic(tmp_path, budget={"trials": 4}), tmp_path / "out"
    first = run(sweep, out)
    before = first.best
    assert before is not None
    used = {s.key for s in before.stages if s.key}
    shutil.rmtree(out / "best.bundle")  # so that there is something to do
    for entry in (out / "store" / "entries").glob("??/*"):
        flip(entry / FILES / "model.onnx")
        injected("F11")

    result = run(sweep, out)

    best = result.best
    assert best is not None
    assert (result.status, best.id, best.model_digest) == ("delivered", before.id, before.model_digest)
    assert len(used) == 1
    assert "1 damaged store entry was set aside before use and built again" in result.summary["notes"]
    assert [p.name[:64] for p in (out / "store" / "quarantine").iterdir()] == list(used)
