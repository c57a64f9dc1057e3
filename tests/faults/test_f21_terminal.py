"""F21: no terminal, a narrow one, a pipe that closes, an odd locale, Windows line ends: the same results, and no traceback."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.sweep.result import SweepResult

Injected = Callable[[str], None]
ASCII = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}


@pytest.fixture
def again(finished: SweepResult, digits: Path, sweep_of: Callable[..., dict[str, Any]], tmp_path: Path) -> str:
    """The shell command of a sweep that is finished, so that all it does is to tell."""
    (tmp_path / "sweep.json").write_text(json.dumps(sweep_of(digits)))
    shutil.copytree(finished.run, tmp_path / "out")
    return shlex.join([sys.executable, "-m", "autotune", "run", str(tmp_path / "sweep.json"), "--out", str(tmp_path / "out")])


def shell(command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False, env={**os.environ, **env})


@pytest.mark.parametrize("more", ["", "--json", "--json-lines", "--quiet"])
def test_a_reader_that_leaves_changes_no_result(again: str, injected: Injected, more: str) -> None:
    injected("F21")
    done = shell(f"{again} {more} | head -1")

    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_errors_that_nobody_reads_change_no_result(again: str, injected: Injected) -> None:
    injected("F21")
    done = shell(f"{again} 2>&1 >/dev/null | head -0")

    assert done.returncode == 0


def test_an_ascii_locale_gets_the_report_without_a_traceback(again: str, injected: Injected) -> None:
    injected("F21")
    done = shell(again, **ASCII)

    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert done.stdout.splitlines()[-1].endswith("best.bundle")


def test_json_lines_are_json_and_nothing_else_and_end_with_the_result(again: str, finished: SweepResult, injected: Injected) -> None:
    injected("F21")
    done = shell(f"{again} --json-lines")

    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert done.stderr == ""
    assert events[0]["event"] == "sweep-started"
    assert events[-1]["event"] == "finished"
    assert events[-1]["summary"]["verdict"] == finished.summary["verdict"]


def test_windows_line_ends_and_a_byte_order_mark_are_read(again: str, injected: Injected, tmp_path: Path) -> None:
    import yaml

    data = json.loads((tmp_path / "sweep.json").read_text())
    (tmp_path / "sweep.json").write_bytes(yaml.safe_dump(data).replace("\n", "\r\n").encode("utf-8-sig"))
    injected("F21")

    done = shell(f"{again} --json")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "delivered"


def test_without_a_terminal_nothing_is_coloured_or_drawn_over(again: str, injected: Injected) -> None:
    injected("F21")
    done = shell(again)

    assert "\x1b" not in done.stdout + done.stderr
    assert "\r" not in done.stdout + done.stderr
    assert done.stderr.splitlines() == ["resume: 5 trials are on disk", "this sweep is finished: nothing is run again"]


SHOW = """
from autotune.records import MetricValue, Interval
from autotune.sweep.progress import display_for
show = display_for(json_lines=False, quiet=False)
latency = MetricValue(1.0, 0.9, 1.1, "ms", ratio=Interval(0.698, 0.69, 0.705)).to_json()
show({"event": "search-started", "seconds": 1.0, "trials": 28, "finished": 0, "failed": 0, "points": 60, "how": "tpe"})
for n in range(3):
    show({"event": "trial-started", "seconds": 2.0, "trial": f"t-{n:04d}"})
    show({"event": "tick", "what": f"t-{n:04d}", "stage": "quantize", "stage_seconds": 61.0})
    show({"event": "trial-finished", "seconds": 3.0, "trial": f"t-{n:04d}", "finished": n + 1, "trials": 28, "failed": 1, "eta_seconds": 125.0,
          "best": {"trial": "t-0000", "metrics": {"latency": latency}}, "line": "ok  0.698x latency  \\u00d7 " + "x" * 100})
show({"event": "heartbeat", "seconds": 4.0, "what": "t-0003", "stage": "quantize", "stage_seconds": 61.0})
show.close()
"""


def on_terminal(columns: int, **env: str) -> str:
    """What a program that shows progress writes to a terminal of that width."""
    import fcntl
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")}
    with subprocess.Popen([sys.executable, "-c", SHOW], stdout=slave, stderr=slave, env={**environment, "TERM": "xterm", **env}) as process:
        os.close(slave)
        written = b""
        try:
            while part := os.read(master, 65536):
                written += part
        except OSError:
            pass
    os.close(master)
    assert process.returncode == 0, written.decode(errors="replace")
    return written.decode(errors="replace")


@pytest.mark.parametrize("columns", [40, 120])
def test_a_live_line_fits_its_terminal_and_holds_what_it_can(injected: Injected, columns: int) -> None:
    injected("F21")
    text = on_terminal(columns)

    status = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]+", text) if "done" in line]
    assert status
    assert all(len(line) < columns for line in status)
    assert "3/28 done, 1 failed" in status[-1]
    assert "Traceback" not in text
    assert any("t-0002 quantize 1:01" in line and "best t-0000 0.698x (0.690 to 0.705)" in line for line in status) == (columns > 100)


def test_an_ascii_terminal_without_colours_gets_no_colour_and_no_traceback(injected: Injected) -> None:
    injected("F21")
    text = on_terminal(40, NO_COLOR="1", **ASCII)

    assert not re.search(r"\x1b\[[0-9;]*m", text)
    assert "Traceback" not in text
    assert "done" in text


def test_a_dumb_terminal_gets_plain_lines(injected: Injected) -> None:
    injected("F21")
    text = on_terminal(80, TERM="dumb")

    assert "\x1b" not in text
    assert "t-0003: quantize has been running for 61 s" in text
