"""Stage functions that misbehave in one way each; run in child processes by the tests."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any


def double(args: dict[str, Any]) -> dict[str, Any]:
    return {"value": args["x"] * 2, "pid": os.getpid(), "cwd": os.getcwd()}


def segfault(_args: dict[str, Any]) -> dict[str, Any]:
    ctypes.string_at(0)
    return {}


def abort(_args: dict[str, Any]) -> dict[str, Any]:
    os.abort()


def leave_at_once(_args: dict[str, Any]) -> dict[str, Any]:
    os._exit(7)


def leave(_args: dict[str, Any]) -> dict[str, Any]:
    sys.exit(3)


def throw(_args: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("the library says\nno")


def hang_with_grandchild(args: dict[str, Any]) -> dict[str, Any]:
    child = subprocess.Popen(["sleep", "600"])
    with open(args["pid_file"], "w") as file:
        file.write(str(child.pid))
    time.sleep(600)
    return {}


def stop_itself(_args: dict[str, Any]) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGSTOP)
    return {}


def eat_memory(_args: dict[str, Any]) -> dict[str, Any]:
    kept = []
    while True:
        kept.append(bytearray(50_000_000))


def print_much(_args: dict[str, Any]) -> dict[str, Any]:
    for _ in range(100_000):
        print("x" * 200)
    print("the last words")
    return {"done": True}


def leave_scratch_and_die(_args: dict[str, Any]) -> dict[str, Any]:
    with open(os.path.join(tempfile.mkdtemp(), "kept"), "w") as file:
        file.write(tempfile.gettempdir())
    os._exit(1)


def where_scratch_is(_args: dict[str, Any]) -> dict[str, Any]:
    return {"folder": tempfile.mkdtemp()}


def change_everything(_args: dict[str, Any]) -> dict[str, Any]:
    os.chdir("/")
    os.environ["AUTOTUNE_TEST_LEAK"] = "1"
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return {}


def abort_like_bad_alloc(_args: dict[str, Any]) -> dict[str, Any]:
    print("terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc", file=sys.stderr, flush=True)
    os.abort()


def wait(args: dict[str, Any]) -> dict[str, Any]:
    with open(args["pid_file"], "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
    return {}


def return_a_set(_args: dict[str, Any]) -> Any:
    return {"value": {object()}}


def return_a_number(_args: dict[str, Any]) -> Any:
    return 5


def leave_a_thread_and_a_handler(args: dict[str, Any]) -> dict[str, Any]:
    import atexit
    import threading

    atexit.register(lambda: open(args["trace"], "w").close())
    threading.Thread(target=time.sleep, args=(600,)).start()
    return {"done": True}


def leave_a_daemon(args: dict[str, Any]) -> dict[str, Any]:
    """A process in a session of its own whose parent is gone, as daemons are; it never reads its pipe, and writes on."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(args["pid_file"], "w") as file:
                file.write(str(os.getpid()))
            while True:
                print("still here", flush=True)
        os._exit(0)
    os.wait()
    while not os.path.exists(args["pid_file"]) or not os.path.getsize(args["pid_file"]):
        time.sleep(0.01)
    return {"done": True}


def draw(_args: dict[str, Any]) -> dict[str, Any]:
    import random

    import numpy as np

    return {"drawn": [random.random(), float(np.random.rand())], "hash": hash("a word")}


def which_signals(_args: dict[str, Any]) -> dict[str, Any]:
    ignored = [n.name for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1) if signal.getsignal(n) is not signal.SIG_DFL]
    return {"ignored": ignored, "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])]}
