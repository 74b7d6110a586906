"""A thread pool whose threads do not hold up the end of the program, and may be lost."""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from .outcome import Outcome, guarded

_log = logging.getLogger(__name__)
_Job = tuple[Future[Any], Callable[[], Any]]


class DaemonThreads:
    """Runs calls on daemon threads, which are started as they are needed."""

    def __init__(self, limit: int) -> None:
        self._allowed = limit
        self._limit = limit
        """With those that stand in for threads which nobody waits for."""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_alive = 0
        self._num_unfinished = 0
        self._num_lost = 0
        self._running: set[Future[Any]] = set()

    def allow(self, limit: int) -> None:
        """Allow at least so many threads."""
        with self._lock:
            more = max(0, limit - self._allowed)
            self._allowed += more
            self._limit += more
            for _ in range(more):
                self._start_if_needed()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Run a call as soon as a thread is free; that of a cancelled future is not started."""
        future: Future[Any] = Future()
        with self._lock:
            self._num_unfinished += 1
            self._jobs.put((future, call))
            self._start_if_needed()
        return future

    def give_up(self, future: Future[Any]) -> None:
        """Give a call up; until it returns, another thread replaces its own."""
        with self._lock:
            if not future.cancel() and future in self._running:
                self._running.remove(future)
                self._limit += 1
                self._start_if_needed()
                self._num_lost += 1
                if self._num_lost & (self._num_lost - 1) == 0:  # at 1, 2, 4, ...
                    _log.warning(
                        "%d calls missed their deadlines and go on in their threads, which nothing "
                        "can stop. FunctionTools(num_processes=...) runs functions where they can "
                        "be killed.",
                        self._num_lost,
                    )

    def close(self) -> None:
        """End each thread when what was submitted is done; a later call starts others."""
        with self._lock:
            for _ in range(self._num_alive):
                self._jobs.put(None)
            self._num_alive = 0

    def _start_if_needed(self) -> None:
        if self._num_alive < min(self._num_unfinished, self._limit):
            self._num_alive += 1
            threading.Thread(target=self._work, name="call", daemon=True).start()

    def _work(self) -> None:
        is_last = False
        while not is_last and (job := self._jobs.get()) is not None:
            future, call = job
            with self._lock:
                runs = future.set_running_or_notify_cancel()
                if runs:
                    self._running.add(future)
            outcome = guarded(call) if runs else Outcome()
            with self._lock:
                self._num_unfinished -= 1
                if future in self._running:
                    self._running.remove(future)
                elif runs:  # another thread stood in for this one
                    self._limit -= 1
                is_last = self._num_alive > self._limit
                self._num_alive -= is_last
            if outcome.error is not None:
                future.set_exception(outcome.error)
            elif runs:
                future.set_result(outcome.value)
            del job, future, call, outcome  # not to be kept alive by an idle thread
