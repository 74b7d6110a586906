"""Worker processes that answer requests, and are killed when they take too long."""

import threading
import weakref
from collections.abc import Sequence
from typing import Final

from .frames import framed
from .worker_process import ToolProcessError, WorkerProcess

_START_S: Final = 120.0
_STOP_S: Final = 5.0


class WorkerStartError(ToolProcessError):
    """A worker could not begin; the message says why."""


class WorkerPool:
    """Asks a handler that runs in worker processes, each request with a deadline."""

    # Workers are fresh interpreters, which do not run the program again, and start when they are
    # needed. A worker handles one request at a time. One that misses the deadline is killed with
    # what it started, one that dies is replaced, and the other requests go on. Workers end with
    # `close`, with the object, and with this process, however that ends.
    # max_memory_mb: what a worker may allocate beside what it starts with, in MiB; beyond it there
    # is a `MemoryError`. No limit when not given.

    def __init__(
        self,
        handler: bytes,
        *,
        num_processes: int,
        timeout_s: float,
        max_memory_mb: int | None = None,
        preload: Sequence[str] = (),
    ) -> None:
        self._handler = handler
        self._setup = {"max_memory_mb": max_memory_mb, "preload": list(preload)}
        self._deadline_s = min(timeout_s, threading.TIMEOUT_MAX)
        self._free = threading.Semaphore(num_processes)
        self._changed = threading.Condition()
        self._idle: list[WorkerProcess] = []
        self._used: set[WorkerProcess] = set()
        """Each of them by a thread."""
        self._generation = 0
        """How often they were closed."""
        weakref.finalize(self, _end_workers, self._changed, self._idle, self._used)

    def start(self) -> None:
        """Start the first worker."""
        self._put_back(self._start(self._generation))

    def ask(self, request: bytes) -> bytes:
        """Handle a request as soon as a worker is free; from any thread."""
        generation = self._generation
        with self._free:
            worker = self._take() or self._start(generation)
            try:
                answer = worker.ask(framed(request), self._deadline_s)
            except BaseException:
                self._end(worker)
                raise
            self._put_back(worker)
        return answer

    def _take(self) -> WorkerProcess | None:
        """An idle worker; those that died meanwhile are given up."""
        with self._changed:
            while self._idle:
                worker = self._idle.pop()
                if worker.ending() is None:
                    self._used.add(worker)
                    return worker
                worker.end()
        return None

    def _start(self, generation: int) -> WorkerProcess:
        with self._changed:
            if generation != self._generation:
                raise ToolProcessError("the tools were closed")
            worker = WorkerProcess(self._setup, self._handler)
            self._used.add(worker)
        try:
            problem = worker.ask(worker.setup, _START_S).decode()
        except BaseException as error:
            self._end(worker)
            if isinstance(error, Exception) and generation == self._generation:
                raise WorkerStartError(f"a worker process did not start: {error}") from error
            raise
        if problem:
            self._end(worker)
            raise WorkerStartError(problem)
        return worker

    def _put_back(self, worker: WorkerProcess) -> None:
        with self._changed:
            self._used.remove(worker)
            self._idle.append(worker)
            self._changed.notify_all()

    def _end(self, worker: WorkerProcess) -> None:
        with self._changed:
            self._used.remove(worker)
            worker.end()
            self._changed.notify_all()

    def close(self) -> None:
        """Kill the workers, and with them the requests that run; a later one starts new workers."""
        with self._changed:
            self._generation += 1
            _end_workers(self._changed, self._idle, self._used)


def _end_workers(
    changed: threading.Condition, idle: list[WorkerProcess], used: set[WorkerProcess]
) -> None:
    """Apart from the pool, so that it goes when nobody holds it any more."""
    with changed:
        for worker in used:
            worker.kill()
        # The thread that uses one sees that, and ends it.
        changed.wait_for(lambda: not used, timeout=_STOP_S)
        for worker in idle:
            worker.end()
        idle.clear()
