"""Whether a process can do anything at all, without asking it; how one ends with its parent."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .supervision import EngineState

_STOPPED = "TtZX"  # by a signal, by a debugger, ended and not yet reaped, ending


def this_process() -> dict[str, Any]:
    """Names this process, for :func:`is_stopped` in another one; as JSON can carry it."""
    return {"pid": os.getpid(), "machine": _machine()}


def is_near(process: Mapping[str, Any]) -> bool:
    """Return whether a process is known to see the process ids of this one."""
    return process["machine"] is not None and process["machine"] == _machine()


def is_stopped(process: Mapping[str, Any]) -> bool:
    """Whether a process, or the ``parent`` that it names, makes no step: it is stopped or gone.

    ``False`` also where it can't be known: on another machine or in another container, and on
    systems other than Linux.
    """
    if not is_near(process):
        return False
    for pid in (process[name] for name in ("pid", "parent") if name in process):
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return True
        # "pid (name) state ...", where the name may hold anything.
        if status.rpartition(") ")[2][:1] in _STOPPED:
            return True
    return False


def _machine() -> str | None:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


class EngineHealth(NamedTuple):
    """The health of one engine of a fleet."""

    name: str
    """Its URL, or its number."""
    state: EngineState
    """It is asked for tokens only while this is ``HEALTHY``."""
    version: int | None
    """Of the weights that it has acknowledged; ``None``: of none."""
    num_requests: int
    """That are being drawn."""
    outstanding_tokens: int
    """Most tokens that it has still to read and to draw."""
    num_restarts: int
    """How often it was replaced, or connected to again."""
    reason: str
    """Why it does not serve, if it does not."""
