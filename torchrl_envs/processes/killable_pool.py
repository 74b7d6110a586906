"""Processes that grade, and are killed when they take too long.

A thread can't be killed, and graders that limit themselves with ``signal.alarm`` work in a main
thread only. Needs the package ``pebble`` (``pip install torchrl-agents[graders]``).
"""

import multiprocessing
import os
import resource
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib import import_module
from typing import Any

_STOP_S = 5.0
_WATCH_S = 0.5


class KillablePool:
    """Runs functions in processes of their own, each call with a deadline.

    The processes start with the first call, by ``spawn``: a script that uses one needs the usual
    ``if __name__ == "__main__":``. A call past its deadline has its process killed, which is
    replaced; the other calls go on. The processes end with :meth:`close`, with the object, and
    with this process, however that ends.

    Args:
        num_workers: processes.
        timeout_s: deadline of one call, from when a process takes it up.
        max_memory_mb: what a process may allocate beside what it starts with; beyond it a call
            raises ``MemoryError``.
        preload: modules that a process imports when it starts, before any deadline runs.

    Raises:
        ValueError: a setting is not positive.
        ImportError: pebble is not installed.
    """

    def __init__(
        self,
        *,
        num_workers: int = 2,
        timeout_s: float = 5.0,
        max_memory_mb: int = 2048,
        preload: Sequence[str] = (),
    ) -> None:
        if num_workers < 1 or not timeout_s > 0 or max_memory_mb < 1:
            raise ValueError(
                "KillablePool: num_workers, timeout_s and max_memory_mb must be positive, got "
                f"{num_workers}, {timeout_s} and {max_memory_mb}."
            )
        try:
            self._pebble = import_module("pebble")
        except ImportError as error:
            raise ImportError(
                "Graders run in a killable pool of the package pebble, which is not installed: "
                "pip install torchrl-agents[graders]."
            ) from error
        self.num_workers = num_workers
        self.timeout_s = timeout_s
        self.max_memory_mb = max_memory_mb
        self.preload = tuple(preload)
        self._lock = threading.Lock()
        self._pool: Any = None
        self._stop: weakref.finalize | None = None

    def submit(self, function: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Call a function in a process.

        Args:
            function: a function of a module, found there by name.
            *args: its arguments, picklable.

        Returns:
            Its result; ``TimeoutError`` past the deadline, an error of pebble if the process died.
        """
        with self._lock:
            if self._pool is None:
                self._pool = self._pebble.ProcessPool(
                    max_workers=self.num_workers,
                    context=multiprocessing.get_context("spawn"),
                    initializer=_start_worker,
                    initargs=(os.getpid(), self.max_memory_mb, self.preload),
                )
                self._stop = weakref.finalize(self, _stop_pool, self._pool)
            return self._pool.schedule(function, args=args, timeout=self.timeout_s)

    def close(self) -> None:
        """Kill the processes; a later call starts new ones."""
        with self._lock:
            if self._stop is not None:
                self._stop()
            self._pool = self._stop = None


def _stop_pool(pool: Any) -> None:
    pool.stop()
    pool.join(timeout=_STOP_S)


def _start_worker(parent: int, max_memory_mb: int, preload: Sequence[str]) -> None:
    """Limit the memory, and end with the process that started this one, whatever runs here."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    for module in preload:
        import_module(module)
    with open("/proc/self/statm") as statm:
        held = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limit = held + max_memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(1)
