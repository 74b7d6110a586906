"""Collectors that still collect when their program ends: they are shut down first."""

import concurrent.futures.thread  # noqa: F401 - its own end has to come after this one
import logging
import os
import threading
from typing import Any, Final

_log = logging.getLogger(__name__)

_WAIT_S: Final = 10.0
_RUNNING: Final[dict[int, tuple[int, Any]]] = {}
"""The process in which a collector was started, and the collector."""


def shut_down_at_end(collector: Any) -> None:
    """Shut a collector down as the program ends, unless that has been done.

    Its threads would be cut off in the middle of a step of the engine, which aborts the process.

    Args:
        collector: has ``async_shutdown(timeout)``. It is kept until it is shut down.
    """
    _RUNNING[id(collector)] = (os.getpid(), collector)


def was_shut_down(collector: Any) -> None:
    """Let go of a collector."""
    _RUNNING.pop(id(collector), None)


def shut_down_running() -> None:
    """Shut down what was started in this process and still runs; what fails is logged."""
    for process, collector in [*_RUNNING.values()]:
        if process != os.getpid():  # a fork has the collectors of its parent, but no threads
            continue
        try:
            collector.async_shutdown(_WAIT_S)
        except Exception as error:
            who = type(collector).__name__
            _log.warning("%s, shut down at the end of the program: %s", who, error)


# `atexit` comes too late: no thread pool takes work by then, which a collector needs to end.
threading._register_atexit(shut_down_running)  # type: ignore[attr-defined]
