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
import gc
import importlib
import json
import os
import random
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn

from autotune.digest import dump_json
from autotune.errors import AutotuneError, EnvironmentFault
from autotune.records import Cause

RESULT_FILE = "result.json"
LOG_FILE = "log.txt"
SCRATCH_FOLDER = "tmp"
KEPT_OUTPUT_BYTES = 64 * 1024  # of what a stage prints: the last part
GRACE_S = 5.0
WAIT_S = 1.0  # between two calls of whoever wants to know that a stage still runs
SPARE_BYTES = 64 * 2**20  # above the memory limit: enough to say that it was met
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
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
    """How a stage ended. `value` is what its function returned, or None with a cause and a message in words.

    `seconds` is from fork to end, `work_s` what the function itself took. `peak_rss_bytes` counts what the child shares with its server.
    """

    value: dict[str, Any] | None
    cause: Cause | None = None
    message: str = ""
    seconds: float = 0.0
    work_s: float = 0.0
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
        self._errors: IO[bytes] | None = None
        self.on_wait: Callable[[], None] | None = None  # called every second while a stage runs
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
        # One order of sets for all: what a pass makes must not hang on the server that it ran under.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 -- closed with the server; a pipe that nobody reads could fill up
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "autotune.stages", str(theirs.fileno()), *self.preload],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._errors,
            env=environment, start_new_session=True,  # a Ctrl-C in the terminal is the sweep's to handle
        )  # fmt: skip
        theirs.close()
        self._socket, self._buffer = ours, b""
        ready = self._read_message(120.0)
        self.server_threads = ready["threads"] if ready else 0
        if ready is None:
            self._errors.seek(0)
            error = self._errors.read()[-2000:].decode(errors="replace").strip()
            self.close()
            raise EnvironmentFault("stages", "the server of child processes must start", error or "no answer in 120 s")

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
            self._socket.settimeout(max(0.01, min(WAIT_S, deadline - time.monotonic())))
            try:
                part = self._socket.recv(65536)
            except TimeoutError:
                if time.monotonic() >= deadline:
                    return None
                if self.on_wait is not None:
                    self.on_wait()
                continue
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
        if self._errors is not None:
            self._errors.close()
        self._socket = self._process = self._errors = None


def _outcome(reply: Mapping[str, Any], folder: Path, limits: StageLimits, *, oom_killed: bool) -> StageOutcome:
    """Turn a wait status and a result file into a cause and words."""
    tail = reply["tail"]
    facts: dict[str, Any] = {"seconds": reply["seconds"], "peak_rss_bytes": reply["peak_rss_bytes"], "output_tail": tail}
    if reply["timed_out"]:
        return StageOutcome(None, Cause.TIMEOUT, _with_last_words(f"no end after {limits.timeout_s:g} s; killed", tail), **facts)
    result: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        result = json.loads((folder / RESULT_FILE).read_text())
    facts["work_s"] = result.get("work_s", 0.0)
    if "value" in result:
        return StageOutcome(result["value"], **facts)
    if "error" in result:
        error = result["error"]
        cause = {"exit": Cause.EXIT, "oom": Cause.OOM}.get(error["kind"], Cause.EXCEPTION)
        return StageOutcome(None, cause, error["message"], **facts)
    status = reply["status"]
    if os.WIFSIGNALED(status):
        return StageOutcome(None, *_signalled(os.WTERMSIG(status), tail, reply["peak_rss_bytes"], limits, oom_killed=oom_killed), **facts)
    message = f"ended with exit status {os.WEXITSTATUS(status)} and no result"
    return StageOutcome(None, Cause.EXIT, _with_last_words(message, tail), **facts)


def _signalled(number: int, tail: str, peak_bytes: int, limits: StageLimits, *, oom_killed: bool) -> tuple[Cause, str]:
    """Cause and words for a stage that a signal ended."""
    name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
    peak = f"at a peak of {peak_bytes / 1e6:.0f} MB"
    if number == signal.SIGKILL:
        if oom_killed:
            return Cause.OOM, f"killed by the kernel for want of memory, {peak}"
        # Nobody here kills a stage but for its time limit. With this much memory held, want of it is by far the likeliest reason.
        here = _memory_here()
        if here and peak_bytes > here / 2:
            return Cause.OOM, f"killed from outside {peak} of the {here / 1e6:.0f} MB here: most likely for want of memory"
        return Cause.SIGNAL, _with_last_words(f"ended by SIGKILL from outside, {peak}", tail)
    if any(word in tail.lower() for word in _OUT_OF_MEMORY_WORDS):
        limit = f" (limit {limits.memory_bytes / 1e6:.0f} MB)" if limits.memory_bytes else ""
        return Cause.OOM, _with_last_words(f"ended by {name} for want of memory{limit}", tail)
    near = f" {peak}, near the limit of {limits.memory_bytes / 1e6:.0f} MB" if peak_bytes > limits.memory_bytes * 0.8 > 0 else ""
    return Cause.SIGNAL, _with_last_words(f"ended by {name}{near}", tail)


def _with_last_words(message: str, tail: str) -> str:
    """A message with the last line of the output, where there is one."""
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return f"{message}; last words: {lines[-1][:300]}" if lines else message


def _oom_kills() -> int:
    """Processes that the kernel has killed for memory: in this process's control group where it tells, else on the whole machine."""
    found = [_field(path, "oom_kill") for path in _memory_group("memory.events", "memory.oom_control")]
    counts = [count for count in found if count is not None]
    return sum(counts) if counts else _field(Path("/proc/vmstat"), "oom_kill") or 0


def _memory_here() -> int:
    """Bytes of memory that this process may hope for: the control group's limit or the machine's; 0 where neither can be read."""
    total = (_field(Path("/proc/meminfo"), "MemTotal:") or 0) * 1024
    for path in _memory_group("memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limit = int(path.read_text())
            total = min(total, limit) if total else limit
    return total


def _memory_group(unified: str, legacy: str) -> list[Path]:
    """Files of this process's memory control group, by the name that each version of the interface gives them; they need not exist."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            # In a container the path may be the host's while the mount shows this group as its root.
            if not controllers:
                found += [Path(f"/sys/fs/cgroup{group}", unified), Path("/sys/fs/cgroup", unified)]
            elif "memory" in controllers.split(","):
                found += [Path(f"/sys/fs/cgroup/memory{group}", legacy), Path("/sys/fs/cgroup/memory", legacy)]
    return list(dict.fromkeys(found))


def _field(path: Path, name: str) -> int | None:
    """A number from a file of `name value` lines; None where there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in path.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return None


# ---------------------------------------------------------------------------------------------------------------- the server


def _serve(fd: int, preload: Sequence[str]) -> None:
    # The end of the caller shows as the end of its socket. The kernel's parent-death signal would not do: it follows the thread
    # that started this process, and Ray runs each trial in a thread of its own.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # what a thread of the caller's blocked, this process would block as well
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for name in preload:
        with contextlib.suppress(ImportError):  # it is a matter of speed only: the stage that needs the module says that it is missing
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or the first collection in each child would touch every object, and the kernel copy every page that holds one
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
        _kill_orphans()
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


def _kill_orphans() -> None:
    """End what a stage left behind in groups or sessions of its own: this process is the subreaper, so all of it is a child here now."""
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # the usual case, and a cheap one: none is left
            return
        if ended == 0:
            for pid in _children():
                _kill_group(pid)
            time.sleep(0.002)


def _children() -> list[int]:
    """Processes whose parent is this one (Linux)."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                if int(Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                    found.append(int(name))
    return found


def _be_the_child(request: Mapping[str, Any], write_end: int) -> NoReturn:
    """Everything a stage does; ends the process whatever happens."""
    code, began = 1, 0.0
    result: dict[str, Any]
    try:
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no orphans, whatever ends the server
        os.dup2(write_end, 1)
        os.dup2(write_end, 2)
        os.close(write_end)
        os.chdir(request["folder"])
        scratch = Path(request["folder"], SCRATCH_FOLDER)
        scratch.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)  # a killed stage leaves nothing in the system's own
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if request["memory_bytes"]:
            resource.setrlimit(resource.RLIMIT_DATA, (request["memory_bytes"], request["memory_bytes"] + SPARE_BYTES))
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _seed(int(request["args"].get("seed") or 0))
        module, _, name = request["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
        began = time.perf_counter()
        value = function(request["args"])
        if not isinstance(value, dict):
            raise TypeError(f"a stage must return a dictionary; got {type(value).__name__}")
        text = dump_json({"value": value, "work_s": time.perf_counter() - began})
        code = 0
    except BaseException as error:  # whatever a user's code or a library raises ends this stage only
        with contextlib.suppress(BaseException):
            if request["memory_bytes"]:
                resource.setrlimit(resource.RLIMIT_DATA, (request["memory_bytes"] + SPARE_BYTES,) * 2)
        result = {"error": _told(error), "work_s": time.perf_counter() - began if began else 0.0}
        with contextlib.suppress(BaseException):
            traceback.print_exc()
        text = dump_json(result)
    with contextlib.suppress(BaseException):
        Path(request["folder"], RESULT_FILE).write_text(text)
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # threads and handlers that the stage left go with it


def _seed(seed: int) -> None:
    """Give every stage the same start: the generators that libraries share follow the caller's seed, never the server's age."""
    random.seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def _told(error: BaseException) -> dict[str, str]:
    """Kind and words of what a stage raised; an exception of a user's may fail at its own text."""
    try:
        if isinstance(error, SystemExit):
            return {"kind": "exit", "message": f"the stage called sys.exit({error.code!r})"}
        return {"kind": "oom" if _is_memory(error) else "exception", "message": _words(error)}
    except BaseException:
        return {"kind": "exception", "message": f"{type(error).__name__}, whose text can't be had"}


def _words(error: BaseException) -> str:
    if isinstance(error, AutotuneError):
        return str(error)
    text = str(error).strip().replace("\n", " ")
    return f"{type(error).__name__}: {text[:1000]}" if text else type(error).__name__


def _is_memory(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, is for want of memory."""
    seen: list[BaseException] = []
    while error not in seen:
        seen.append(error)
        if isinstance(error, MemoryError) or any(word in str(error).lower() for word in _OUT_OF_MEMORY_WORDS):
            return True
        error = error.__cause__ or error.__context__ or error
    return False


def _prctl(option: int, value: int) -> None:
    """Tell the kernel something about this process (Linux only; elsewhere nothing happens)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2:])
