"""Whether a process can do anything at all, without asking it; how one ends with its parent."""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_STOPPED = "TtZX"  # by a signal, by a debugger, ended and not yet reaped, gone
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel end this process with the thread that started it, stopped or not (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def this_process() -> dict[str, Any]:
    """Names this process, for :func:`is_stopped` in another one; as JSON can carry it."""
    return {"pid": os.getpid(), "machine": _machine()}


def is_near(process: Mapping[str, Any]) -> bool:
    """Whether a process is known to see the process ids of this one."""
    return process["machine"] is not None and process["machine"] == _machine()


def is_stopped(process: Mapping[str, Any]) -> bool:
    """Whether a process, or the ``parent`` that it names, makes no step: it is stopped or gone.

    ``False`` also where it can't be known: on another machine or in another container, and on
    systems other than Linux.
    """
    if not is_near(process):
        return False
    return any(_state(process[name]) in _STOPPED for name in ("pid", "parent") if name in process)


def _state(pid: int) -> str:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X"
    # "pid (name) state ...", where the name may hold anything.
    return status.rpartition(") ")[2][:1]


def _machine() -> str | None:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None
