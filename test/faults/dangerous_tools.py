"""Tools that do their worst, and a program that they must not outlive."""

import ctypes
import os
import re
import subprocess
import sys
import threading

from torchrl_envs.concurrency.outcome import EpisodeLostError  # its package would import torch


def leave(code: int) -> str:
    """End the process.

    Args:
        code: What it says.
    """
    os._exit(code)


def crash() -> str:
    """Read where nothing is."""
    return ctypes.string_at(0).decode()


def hold() -> str:
    """Never give the interpreter's lock back."""
    return str(re.match("(a|aa)+$", "a" * 200 + "b"))


def hang() -> str:
    """Never return, and have a child that does not either."""
    subprocess.run(["sleep", "600"])


def hold_with_child() -> str:
    """Both."""
    child = subprocess.Popen(["sleep", "600"])
    return hold() + str(child)


def hide_child() -> int:
    """Have a child in a session of its own, whose parent is gone."""
    read, write = os.pipe()
    if (starter := os.fork()) == 0:
        os.setsid()
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        os.write(write, str(child.pid).encode())
        os._exit(0)
    os.waitpid(starter, 0)
    return int(os.read(read, 32))


def hide_child_and_hang() -> str:
    """Both."""
    hide_child()
    return hang()


def leave_with_child() -> str:
    """End the process, but for a child that has its socket."""
    if os.fork() == 0:
        threading.Event().wait()
    os._exit(9)


def die_later() -> str:
    """Answer, and die."""
    threading.Timer(0.1, os._exit, [7]).start()
    return "fine"


def lose() -> str:
    """Lose the environment."""
    raise EpisodeLostError("gone")


def give_up() -> str:
    """End the program, politely."""
    raise SystemExit(3)


def say() -> object:
    """Speak where the answers might be."""
    sys.stdout.write('{"error": "no"}')
    sys.stdout.flush()
    os.write(1, b"\0" * 100)
    return sys.stdin.read()


def odd_value() -> object:
    """Return what can't be pickled."""
    return threading.Lock()


def odd_error() -> object:
    """Raise what can't be made again."""

    class OddError(Exception):
        def __init__(self, a, b):
            super().__init__(a + b)

    raise OddError("o", "dd")


def eat() -> int:
    """Take all memory."""
    return len(bytearray(2**30))


def flood() -> str:
    """Say far too much."""
    return "y" * 1_000_000


async def double(x: int) -> object:
    """Double a number.

    Args:
        x: The number.
    """
    return {"is": 2 * x}


if __name__ == "__main__":
    import dangerous_tools

    from torchrl_envs.processes import ToolProcesses

    functions = {"a": dangerous_tools.hide_child_and_hang, "b": dangerous_tools.hold_with_child}
    tools = ToolProcesses(functions, num_processes=2, timeout_s=600, max_result_bytes=100)
    calls = [threading.Thread(target=tools.call, args=(name, {}), daemon=True) for name in "ab"]
    for call in calls:
        call.start()
    sys.stdout.write("started\n")
    sys.stdout.flush()
    sys.stdin.read()
