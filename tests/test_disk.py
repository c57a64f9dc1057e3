"""What counts as a fault of the disk, and in which words it is told."""

from __future__ import annotations

import errno
import os
import pickle
import resource
from pathlib import Path

import pytest

from autotune.digest import write_durably
from autotune.disk import HANDLES_NEEDED, DiskFault, enough_handles, fault_in, fault_of, faults_named, free_bytes, in_words


def error_of(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EIO", "EMFILE", "ENFILE", "EACCES"])
def test_errors_of_disk_and_handles_name_path_and_remedy(tmp_path: Path, name: str) -> None:
    number = getattr(errno, name)

    fault = fault_of(error_of(number, tmp_path / "x"), tmp_path)

    assert fault is not None
    assert fault.exit_status == 3
    assert str(tmp_path / "x") in str(fault)
    assert os.strerror(number) in str(fault)
    assert "the same command" in str(fault) or "ulimit -f" in str(fault)


def test_a_fault_is_found_behind_the_errors_that_wrapped_it(tmp_path: Path) -> None:
    wrapped = RuntimeError("the study can't be written")
    wrapped.__cause__ = error_of(errno.ENOSPC, tmp_path)

    with pytest.raises(DiskFault, match="No space left on device"), faults_named(tmp_path):
        raise wrapped


def test_other_errors_pass_as_they_are(tmp_path: Path) -> None:
    assert fault_of(FileNotFoundError(errno.ENOENT, "no such file"), tmp_path) is None
    assert fault_of(error_of(errno.EACCES, Path("/elsewhere/calib.npz")), tmp_path) is None
    with pytest.raises(KeyError), faults_named(tmp_path):
        raise KeyError("x")


def test_a_copy_that_does_not_fit_names_where_it_goes(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "/models/source.onnx", None, str(tmp_path / "model.onnx"))

    assert f"disk: {tmp_path / 'model.onnx'} must take" in str(fault_of(error, tmp_path))


@pytest.mark.parametrize(
    "words",
    [
        "OSError: [Errno 28] No space left on device: '/run/x'",
        "std::ios_base::failure: basic_ios::clear: no space left on device",
        "x\nDisk quota exceeded",
    ],
)
def test_the_last_words_of_a_child_tell_of_a_full_disk(tmp_path: Path, words: str) -> None:
    fault = fault_in(words, tmp_path, needed=3_000_000)

    assert fault is not None
    assert "at least 3 MB needed" in str(fault)
    assert "free there" in str(fault)


@pytest.mark.parametrize("words", ["ValueError: no kernel for this", "ended by SIGSEGV", "", "OSError: [Errno 24] Too many open files"])
def test_a_child_that_dies_of_itself_is_no_fault_of_the_disk(tmp_path: Path, words: str) -> None:
    assert fault_in(words, tmp_path) is None


def test_any_death_on_a_disk_with_nothing_free_is_the_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.disk.free_bytes", lambda _folder: 4096)

    fault = fault_in("RuntimeError: unexpected pos 64 vs 0", tmp_path)

    assert "unexpected pos 64 vs 0' (4.1 kB free there)" in str(fault)


def test_a_fault_comes_back_whole_from_another_process(tmp_path: Path) -> None:
    fault = fault_of(error_of(errno.ENOSPC, tmp_path), tmp_path)

    assert str(pickle.loads(pickle.dumps(fault))) == str(fault)
    assert fault is not None
    assert str(DiskFault(*fault.args)) == str(fault)


def test_free_bytes_are_told_for_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert abs(free_bytes(tmp_path / "a" / "b") - free_bytes(tmp_path)) < 1 << 30


@pytest.mark.parametrize(("count", "words"), [(0, "0 bytes"), (999, "999 bytes"), (4096, "4.1 kB"), (2_600_000, "2.6 MB"), (10**10, "10 GB")])
def test_bytes_have_a_unit_that_fits(count: int, words: str) -> None:
    assert in_words(count) == words


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_durably(tmp_path / "a.json", "old")

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFault, match=r"a\.json must take what the sweep writes.*3 bytes were to be written"), faults_named(tmp_path):
        write_durably(tmp_path / "a.json", "new")

    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.json", "old")]


def test_the_limit_on_open_files_is_lifted_for_the_sweep_and_put_back() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with enough_handles():
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == HANDLES_NEEDED
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
