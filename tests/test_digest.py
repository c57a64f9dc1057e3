"""Digests: equal values and files, equal digests, in every process; durable writing."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.digest import canonical, digest_file, digest_of, digest_tree, dump_json, files_under, plain, write_durably

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_canonical_json_reads_back_as_the_value(value: Any) -> None:
    assert json.loads(canonical(value)) == value


@given(st.dictionaries(st.text(), st.integers(), max_size=6))
def test_the_order_of_keys_changes_nothing(value: dict[str, int]) -> None:
    assert digest_of(dict(reversed(value.items()))) == digest_of(value)


def test_values_of_different_types_have_different_digests() -> None:
    assert len({digest_of(v) for v in (True, 1, 1.0, "1", None, [1])}) == 6


def test_tuples_paths_and_numpy_values_are_what_they_hold() -> None:
    assert plain({"a": (1, Path("x/y")), "b": np.float32(0.5), "c": np.arange(3), "d": np.bool_(True)}) == {
        "a": [1, "x/y"], "b": 0.5, "c": [0, 1, 2], "d": True,
    }  # fmt: skip


def test_an_object_with_a_json_form_gives_it_and_another_is_refused() -> None:
    class Known:
        def to_json(self) -> dict[str, Any]:
            return {"x": (1,)}

    assert plain([Known()]) == [{"x": [1]}]
    with pytest.raises(TypeError, match="object has no JSON form"):
        plain(object())


def test_a_set_has_the_same_digest_in_every_process() -> None:
    code = "from autotune.digest import digest_of; print(digest_of({'Conv', 'Gemm', 'MatMul', 'Relu', 'Add'}))"

    digests = {
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout
        for seed in ("1", "2", "3")
    }

    assert len(digests) == 1


def test_numbers_that_json_lacks_are_refused_in_digests_and_null_in_files() -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical(math.nan)
    assert json.loads(dump_json({"a": [math.nan, math.inf, 1.0]})) == {"a": [None, None, 1.0]}
    assert dump_json({"a": 1}, indent=None) == '{"a": 1}'


def test_the_digest_of_a_file_is_the_sha_256_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")

    assert digest_file(tmp_path / "f") == digest_tree(tmp_path / "f") == hashlib.sha256(b"abc").hexdigest()


def test_the_digest_of_a_folder_changes_with_every_byte_and_name_and_not_with_its_place(tmp_path: Path) -> None:
    def folder(name: str, files: dict[str, bytes]) -> str:
        for file, data in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return digest_tree(tmp_path / name)

    one = folder("a", {"x": b"1", "sub/y": b"2"})

    assert folder("b", {"sub/y": b"2", "x": b"1"}) == one
    assert folder("c", {"x": b"1", "sub/y": b"3"}) != one
    assert folder("d", {"x": b"1", "sub/z": b"2"}) != one
    assert folder("e", {"x": b"1", "sub/y": b"2", "more": b""}) != one


def test_a_missing_folder_has_no_digest(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        digest_tree(tmp_path / "missing")


def test_links_are_not_listed_and_names_that_are_no_text_are(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "loop").symlink_to(tmp_path)
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")).write_bytes(b"")

    assert files_under(tmp_path) == ["real", "\udcff"]
    assert len(digest_tree(tmp_path)) == 64


def test_writing_durably_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "result.json"

    write_durably(path, "first")
    write_durably(path, b"second")

    assert path.read_bytes() == b"second"
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]
