"""Whether a process of this machine can do anything at all, without asking it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_STOPPED = "TtZX"  # by a signal, by a debugger, ended and not yet reaped, gone


def this_process() -> dict[str, Any]:
    """Names this process, for :func:`is_stopped` in another one; as JSON can carry it."""
    return {"pid": os.getpid(), "machine": _machine()}


def is_stopped(process: Mapping[str, Any]) -> bool:
    """Whether a process makes no step, because it is stopped or has ended.

    Args:
        process: what :func:`this_process` gave there.

    Returns:
        ``False`` also where it can't be known: on another machine or in another container, and on
        systems other than Linux.
    """
    if process["machine"] is None or process["machine"] != _machine():
        return False
    try:
        status = Path(f"/proc/{process['pid']}/stat").read_text()
    except OSError:  # it is gone
        return True
    # "pid (name) state ...", where the name may hold anything.
    return status.rpartition(") ")[2][:1] in _STOPPED


def _machine() -> str | None:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None
