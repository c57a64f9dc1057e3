"""The store: nothing half-written, nothing damaged, nothing linked, nothing of a dead builder."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.errors import ConfigError
from autotune.model import ONNXModelHandler, ingest_onnx
from autotune.store import ENTRY_FILE, FILES, Store, folder_bytes


def built(store: Store, digits: Path, *, a: int = 1, seconds: float = 1.0) -> tuple[str, ONNXModelHandler]:
    key = store.key({"pass": "P", "config": {"a": a}})
    place = store.place()
    handler = ingest_onnx(digits / "model.onnx", place / FILES)
    store.publish(key, place, handler, facts={}, seconds=seconds)
    return key, handler


def entry_of(store: Store, key: str) -> Path:
    return store.folder / "entries" / key[:2] / key


def test_what_was_published_is_found_with_its_handler_and_digest(tmp_path: Path, digits: Path) -> None:
    store = Store(tmp_path)
    key, handler = built(store, digits)

    found = Store(tmp_path).find(key)

    assert found is not None
    assert found.cached
    assert found.digest == found.handler.digest
    assert found.handler.io == handler.io
    assert (found.handler.folder / "model.onnx").read_bytes() == (digits / "model.onnx").read_bytes()


def test_publishing_gives_the_artifact_as_finding_it_does(tmp_path: Path, digits: Path) -> None:
    store = Store(tmp_path)
    key = store.key({"pass": "P"})
    place = store.place()

    published = store.publish(key, place, ingest_onnx(digits / "model.onnx", place / FILES), facts={})

    found = store.find(key)
    assert found is not None
    assert (published.key, published.digest, published.handler) == (found.key, found.digest, found.handler)
    assert (published.cached, found.cached) == (False, True)


def test_nothing_stays_in_the_building_place_after_publishing(tmp_path: Path, digits: Path) -> None:
    store = Store(tmp_path)
    built(store, digits)

    assert list((tmp_path / "building").iterdir()) == []


def test_what_does_not_open_again_is_not_published(tmp_path: Path, digits: Path) -> None:
    store = Store(tmp_path)
    key = store.key({"pass": "P"})
    place = store.place()
    handler = ingest_onnx(digits / "model.onnx", place / FILES)
    (place / FILES / "model.onnx").write_bytes(b"")

    with pytest.raises(ConfigError, match="an ONNX model must hold a graph"):
        store.publish(key, place, handler, facts={})

    assert store.all_keys() == []
    assert not place.exists()


def test_keys_differ_by_every_fact_and_by_type(tmp_path: Path) -> None:
    store = Store(tmp_path)

    keys = {store.key({"config": value}) for value in (1, 1.5, True, "1", None, [1], {"a": 1}, {"a": 2})}

    assert len(keys) == 8


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


def test_a_builder_whose_key_is_taken_by_a_damaged_entry_puts_its_own_there(tmp_path: Path, digits: Path) -> None:
    store = Store(tmp_path)
    key, _ = built(store, digits)
    (entry_of(store, key) / FILES / "model.onnx").write_bytes(b"half")

    built(store, digits)

    found = store.find(key)
    assert found is not None
    assert (found.handler.folder / "model.onnx").read_bytes() == (digits / "model.onnx").read_bytes()
    assert len(store.quarantined()) == 1


def test_entries_hold_copies_with_one_link_each(tmp_path: Path, digits: Path) -> None:
    store = Store(tmp_path)
    key, _ = built(store, digits)

    files = [p for p in entry_of(store, key).rglob("*") if p.is_file()]

    assert files
    assert all(os.stat(p).st_nlink == 1 and not p.is_symlink() for p in files)


def test_a_quarantined_entry_says_why(tmp_path: Path, digits: Path) -> None:
    store = Store(tmp_path)
    key, _ = built(store, digits)
    (entry_of(store, key) / FILES / "model.onnx").write_bytes(b"")

    store.find(key)

    (aside,) = store.quarantined()
    assert (aside / "why.txt").read_text() == "model.onnx has changed\n"


def test_a_place_where_the_disk_fails_is_a_miss_and_not_the_end(tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    key, _ = built(store, digits)

    def bad_sector(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr("autotune.store.digest_file", bad_sector)

    assert store.find(key) is None
    assert "can't be read: Input/output error" in (store.quarantined()[0] / "why.txt").read_text()


BUILDER = """
import sys
from pathlib import Path
from autotune.store import Store
place = Store(Path(sys.argv[1])).place()
(place / "files" / "half").write_bytes(b"x" * 1000)
print(place, flush=True)
sys.stdin.readline()
"""


def test_what_a_dead_builder_left_goes_and_what_a_live_one_builds_stays(tmp_path: Path) -> None:
    builders = [
        subprocess.Popen([sys.executable, "-c", BUILDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        places = [Path(b.stdout.readline().strip()) for b in builders if b.stdout]
        builders[0].kill()
        builders[0].wait()

        Store(tmp_path)

        assert [p.exists() for p in places] == [False, True]
    finally:
        for builder in builders:
            builder.kill()
            builder.communicate()


def test_a_place_under_a_number_that_another_process_has_now_is_abandoned(tmp_path: Path) -> None:
    store = Store(tmp_path)
    mine = store.place()
    other = mine.with_name(f"{os.getpid()}-1-abc")
    other.mkdir()

    assert store.abandoned() == [other]


def test_what_is_cheap_per_byte_goes_first_and_what_is_kept_never_does(tmp_path: Path, digits: Path) -> None:
    store = Store(tmp_path)
    dear, _ = built(store, digits, a=1, seconds=100.0)
    cheap, _ = built(store, digits, a=2, seconds=1.0)
    kept, _ = built(store, digits, a=3, seconds=0.0)
    each = folder_bytes(entry_of(store, dear))

    done = store.evict(int(2.5 * each), keep={kept})

    assert done.keys == (cheap,)
    assert store.all_keys() == sorted([dear, kept])
    assert done.left_bytes == sum(folder_bytes(entry_of(store, k)) for k in (dear, kept))
    assert store.evict(1, keep={dear, kept}).keys == ()


def test_of_equals_the_one_that_was_longest_of_no_use_goes(tmp_path: Path, digits: Path) -> None:
    store = Store(tmp_path)
    keys = [built(store, digits, a=a, seconds=10.0)[0] for a in range(3)]
    for minutes, key in zip((30, 50, 40), keys, strict=True):
        now = entry_of(store, key).stat().st_mtime
        os.utime(entry_of(store, key), (now, now - 60 * minutes))
    store.find(keys[1])  # of use again

    done = store.evict(folder_bytes(entry_of(store, keys[0])), keep=())

    assert done.keys == (keys[2], keys[0])


def test_nothing_is_evicted_while_the_store_is_in_use(tmp_path: Path, digits: Path) -> None:
    store = Store(tmp_path)
    key, _ = built(store, digits)

    with Store(tmp_path).in_use():
        done = store.evict(1, keep=())

    assert done.keys == ()
    assert store.all_keys() == [key]
    assert store.evict(1, keep=()).keys == (key,)


def test_evicted_bytes_are_those_that_were_there(tmp_path: Path, digits: Path) -> None:
    store = Store(tmp_path)
    for a in range(3):
        built(store, digits, a=a)
    before = folder_bytes(tmp_path)

    done = store.evict(1, keep=())

    assert done.freed_bytes == before - folder_bytes(tmp_path)
    assert json.dumps(done.left_bytes) == "0"
    assert ENTRY_FILE not in [p.name for p in tmp_path.rglob("*")]
