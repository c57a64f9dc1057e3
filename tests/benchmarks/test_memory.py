from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autotune.benchmarks import memory
from autotune.benchmarks.memory import peak_memory

MIB = 2**20


def touch(mebibytes: int) -> float:
    block = np.ones(mebibytes * MIB // 8)  # written to, so that it is resident
    return float(block[-1])


def test_the_peak_counts_memory_that_was_given_back_before_the_end() -> None:
    result, found = peak_memory(lambda: touch(192))

    assert result == 1.0
    assert found.exact
    assert 180 * MIB < found.growth_bytes < 260 * MIB


def test_a_small_work_after_a_large_one_has_its_own_small_peak() -> None:
    touch(256)

    _, found = peak_memory(lambda: touch(64))

    assert 55 * MIB < found.growth_bytes < 120 * MIB


def test_where_the_mark_cannot_be_reset_a_peak_below_the_old_one_is_not_claimed_exact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    peak_memory(lambda: touch(128))
    monkeypatch.setattr(memory, "CLEAR_REFS", tmp_path / "no" / "such" / "file")

    _, small = peak_memory(lambda: touch(16))
    _, large = peak_memory(lambda: touch(256))

    assert (small.exact, small.growth_bytes) == (False, 0)
    assert large.exact
    assert large.growth_bytes > 200 * MIB
