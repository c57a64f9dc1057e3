"""Stages in child processes: a stage may crash, hang, exit or eat the memory, and only that stage ends.

A server process of ours, started fresh with the slow libraries already imported and no thread but its own, forks one child a
stage. Python's own `multiprocessing` fork server isn't used: it imports the caller's main module into each child (in a Ray worker
that is Ray's), gives no process group to kill and says nothing of signals. Requests and results are JSON; results come back in
a file, so another interpreter could serve as well.

`python -P -m autotune.stages FD MODULE...` is the server; `StageRunner` is what the rest of the project uses.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from autotune.digest import dump_json
from autotune.errors import AutotuneError, EnvironmentFault
from autotune.records import Cause

RESULT_FILE = "result.json"
LOG_FILE = "log.txt"
SCRATCH_FOLDER = "tmp"
KEPT_OUTPUT_BYTES = 64 * 1024  # of what a stage prints: the last part
GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1
_OUT_OF_MEMORY_WORDS = (
    "bad_alloc",
    "failed to allocate",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "unable to allocate",
)


@dataclass(frozen=True)
class StageLimits:
    """Wall-clock seconds and bytes of data memory (RLIMIT_DATA: heap and private mappings) that one stage may use."""

    timeout_s: float = 600.0
    memory_bytes: int = 0  # 0: no limit


@dataclass(frozen=True)
class StageOutcome:
    """How a stage ended. `value` is what its function returned, or None with a cause and a message in words."""

    value: dict[str, Any] | None
    cause: Cause | None = None
    message: str = ""
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    output_tail: str = ""

    @property
    def ok(self) -> bool:
        return self.cause is None


class StageRunner:
    """Runs stages one at a time in forked children of a server that it starts on first use. Use as a context manager.

    A stage is a `module:function` that takes one JSON object and returns one.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self.preload = tuple(preload)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._buffer = b""
        self.server_threads = 0  # of the server once it is ready; more than 1 would make its forks unsafe

    def __enter__(self) -> StageRunner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Start the server and wait until its libraries are loaded, so that no import falls into a timing."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        ours, theirs = socket.socketpair()
        # One BLAS thread in the server: a process that holds threads must not be forked.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "autotune.stages", str(theirs.fileno()), *self.preload],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env=environment, start_new_session=True,  # a Ctrl-C in the terminal is the sweep's to handle
        )  # fmt: skip
        theirs.close()
        self._socket, self._buffer = ours, b""
        ready = self._read_message(120.0)
        self.server_threads = ready["threads"] if ready else 0
        if ready is None:
            error = b""
            if self._process.poll() is not None and self._process.stderr is not None:
                error = self._process.stderr.read()[-2000:]
            self.close()
            raise EnvironmentFault(
                "stages", "the server of child processes must start", error.decode(errors="replace").strip() or "no answer in 120 s"
            )

    def run(self, function: str, args: Mapping[str, Any], *, folder: Path, limits: StageLimits) -> StageOutcome:
        """Run one stage to its end in `folder` (made if missing; also the child's working directory) and say how it ended.

        Never raises for what the stage does. A dead server is started again and the stage repeated once.
        """
        folder.mkdir(parents=True, exist_ok=True)
        outcome = self._run_once(function, args, folder, limits)
        if outcome.cause is Cause.INFRA:
            outcome = self._run_once(function, args, folder, limits)
        return outcome

    def _run_once(self, function: str, args: Mapping[str, Any], folder: Path, limits: StageLimits) -> StageOutcome:
        (folder / RESULT_FILE).unlink(missing_ok=True)
        request = {"function": function, "args": args, "folder": str(folder), "timeout_s": limits.timeout_s, "memory_bytes": limits.memory_bytes}
        killed_before = _oom_kills()
        try:
            self.start()
            assert self._socket is not None
            self._socket.sendall(dump_json(request, indent=None).encode() + b"\n")
            reply = self._read_message(limits.timeout_s + GRACE_S)
        except (OSError, EnvironmentFault) as error:
            self.close()
            return StageOutcome(None, Cause.INFRA, f"the server of child processes failed: {error}")
        finally:
            shutil.rmtree(folder / SCRATCH_FOLDER, ignore_errors=True)
        if reply is None:
            self.close()
            return StageOutcome(None, Cause.INFRA, "the server of child processes ended or did not answer")
        return _outcome(reply, folder, limits, oom_killed=_oom_kills() > killed_before)

    def _read_message(self, timeout_s: float) -> dict[str, Any] | None:
        """Next JSON line from the server, or None when it is gone or silent for too long."""
        assert self._socket is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                part = self._socket.recv(65536)
            except TimeoutError:
                return None
            except OSError:
                return None
            if not part:
                return None
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """End the server and whatever stage it runs."""
        if self._socket is not None:
            self._socket.close()  # the server sees the end of its input, kills its child's group and leaves
        if self._process is not None:
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if self._process.stderr is not None:
                self._process.stderr.close()
        self._socket = self._process = None


def _outcome(reply: Mapping[str, Any], folder: Path, limits: StageLimits, *, oom_killed: bool) -> StageOutcome:
    """Turn a wait status and a result file into a cause and words."""
    facts: dict[str, Any] = {"seconds": reply["seconds"], "peak_rss_bytes": reply["peak_rss_bytes"], "output_tail": reply["tail"]}
    if reply["timed_out"]:
        return StageOutcome(None, Cause.TIMEOUT, f"no end after {limits.timeout_s:g} s; killed", **facts)
    result: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        result = json.loads((folder / RESULT_FILE).read_text())
    if "value" in result:
        return StageOutcome(result["value"], **facts)
    if "error" in result:
        error = result["error"]
        cause = {"exit": Cause.EXIT, "oom": Cause.OOM}.get(error["kind"], Cause.EXCEPTION)
        return StageOutcome(None, cause, error["message"], **facts)
    status = reply["status"]
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name
        if number == signal.SIGKILL and oom_killed:
            return StageOutcome(None, Cause.OOM, "killed by the kernel for want of memory", **facts)
        tail = _last_line(reply["tail"])
        return StageOutcome(None, Cause.SIGNAL, f"ended by {name}" + (f"; last words: {tail}" if tail else ""), **facts)
    return StageOutcome(None, Cause.EXIT, f"ended with exit status {os.WEXITSTATUS(status)} and no result", **facts)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _oom_kills() -> int:
    """Processes that the kernel killed for memory in this control group so far (v2), else 0."""
    try:
        for line in Path("/sys/fs/cgroup/memory.events").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0


# ---------------------------------------------------------------------------------------------------------------- the server


def _serve(fd: int, preload: Sequence[str]) -> None:
    # The end of the caller shows as the end of its socket. The kernel's parent-death signal would not do: it follows the thread
    # that started this process, and Ray runs each trial in a thread of its own.
    for name in preload:
        importlib.import_module(name)
    channel = socket.socket(fileno=fd)
    channel.sendall(dump_json({"ready": True, "threads": len(os.listdir("/proc/self/task"))}, indent=None).encode() + b"\n")
    buffer = b""
    while True:
        while b"\n" not in buffer:
            part = channel.recv(65536)
            if not part:
                return
            buffer += part
        line, _, buffer = buffer.partition(b"\n")
        reply = _run_child(json.loads(line), channel)
        if reply is None:
            return
        channel.sendall(dump_json(reply, indent=None).encode() + b"\n")


def _run_child(request: Mapping[str, Any], channel: socket.socket) -> dict[str, Any] | None:
    """Fork, watch and reap one stage; None when the other side is gone (then the stage is killed)."""
    read_end, write_end = os.pipe()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        channel.close()
        _be_the_child(request, write_end)
    os.close(write_end)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # both sides set it: whoever comes second finds it done
    deadline = started + request["timeout_s"]
    output, timed_out, caller_gone = b"", False, False
    child = os.pidfd_open(pid)
    watched = [child, read_end, channel.fileno()]
    try:
        while True:
            ready, _, _ = select.select(watched, [], [], max(0.0, deadline - time.monotonic()))
            if read_end in ready:
                part = os.read(read_end, 65536)
                output = (output + part)[-KEPT_OUTPUT_BYTES:]
                if not part:
                    watched.remove(read_end)
            if channel.fileno() in ready and not channel.recv(1, socket.MSG_PEEK):
                caller_gone = True
                break
            if child in ready:
                break
            if time.monotonic() >= deadline:
                timed_out = True
                break
    finally:
        _kill_group(pid)  # grandchildren go too, whoever ended first
        _, status, usage = os.wait4(pid, 0)
        os.close(child)
    os.set_blocking(read_end, False)
    with contextlib.suppress(BlockingIOError):
        while part := os.read(read_end, 65536):
            output = (output + part)[-KEPT_OUTPUT_BYTES:]
    os.close(read_end)
    if output:
        with contextlib.suppress(OSError):
            Path(request["folder"], LOG_FILE).write_bytes(output)
    if caller_gone:
        return None
    return {
        "status": status, "timed_out": timed_out, "seconds": time.monotonic() - started,
        "peak_rss_bytes": usage.ru_maxrss * 1024, "tail": output[-4000:].decode(errors="replace"),
    }  # fmt: skip


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _be_the_child(request: Mapping[str, Any], write_end: int) -> NoReturn:
    """Everything a stage does; ends the process whatever happens."""
    code = 1
    try:
        os.setpgid(0, 0)
        _die_with_parent()
        os.dup2(write_end, 1)
        os.dup2(write_end, 2)
        os.close(write_end)
        os.chdir(request["folder"])
        scratch = Path(request["folder"], SCRATCH_FOLDER)
        scratch.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)  # a killed stage leaves nothing in the system's own
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if request["memory_bytes"]:
            resource.setrlimit(resource.RLIMIT_DATA, (request["memory_bytes"], request["memory_bytes"]))
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        module, _, name = request["function"].partition(":")
        value = getattr(importlib.import_module(module), name)(request["args"])
        result = {"value": value}
        code = 0
    except SystemExit as error:
        result = {"error": {"kind": "exit", "message": f"the stage called sys.exit({error.code!r})"}}
    except BaseException as error:  # whatever a user's code or a library raises ends this stage only
        traceback.print_exc()
        result = {"error": {"kind": "oom" if _is_memory(error) else "exception", "message": _words(error)}}
    with contextlib.suppress(BaseException):
        Path(request["folder"], RESULT_FILE).write_text(dump_json(result))
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _words(error: BaseException) -> str:
    if isinstance(error, AutotuneError):
        return str(error)
    text = str(error).strip().replace("\n", " ")
    return f"{type(error).__name__}: {text[:1000]}" if text else type(error).__name__


def _is_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in _OUT_OF_MEMORY_WORDS)


def _die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent dies (Linux): no orphans, whatever ends the sweep."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2:])
