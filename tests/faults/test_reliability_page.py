"""The page on reliability tells of each fault that is injected, and each has its tests."""

from __future__ import annotations

import re
from pathlib import Path

from tests.faults.conftest import FAULTS

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "reliability.md"


def test_the_page_has_a_row_for_each_fault_in_order() -> None:
    rows = re.findall(r"^\| (F\d+) \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)

    assert rows == list(FAULTS)


def test_each_fault_has_a_file_of_tests_that_injects_it() -> None:
    for fault in FAULTS:
        files = list(HERE.glob(f"test_f{int(fault[1:]):02d}_*.py"))
        assert len(files) == 1, fault
        assert f'"{fault}"' in files[0].read_text(encoding="utf-8"), fault


def test_each_promise_is_said_once() -> None:
    rows = re.findall(r"^\| (R\d) \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)

    assert rows == [f"R{n}" for n in range(1, 10)]
