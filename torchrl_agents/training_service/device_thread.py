"""The one thread that uses the model: jobs in order, those that go together at once."""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

_QUIET_S: Final = 0.005
"""What goes together is begun when no further job came for so long,"""
_MOST_S: Final = 0.05
"""or after so long."""


@dataclass(eq=False)
class DeviceJob:
    """Something to be done, and what comes of it."""

    run: Callable[[Sequence["DeviceJob"]], Sequence[Any]]
    """Given this job and those that are done with it; one result for each, or an exception."""
    payload: Any = None
    together: Hashable = None
    """Jobs that wait and have the same are done at once; ``None`` for this one alone."""
    size: int = 1
    """How much it adds to what is done at once."""
    result: Future[Any] = field(default_factory=Future)

    def cancel(self) -> bool:
        """Drop it, if it has not begun."""
        return self.result.cancel()


class DeviceThread:
    """Does jobs one after the other, on a thread of its own.

    Args:
        max_together: most of what is done at once, in :attr:`DeviceJob.size`.
    """

    def __init__(self, max_together: int) -> None:
        self._max_together = max_together
        self._jobs: deque[DeviceJob] = deque()
        self._wake = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="training-service", daemon=True)
        self._thread.start()

    def submit(self, job: DeviceJob) -> None:
        """Do a job after those that wait.

        Raises:
            RuntimeError: it is closed.
        """
        with self._wake:
            if self._is_closed:
                raise RuntimeError("the server is about to end")
            self._jobs.append(job)
            self._wake.notify()

    def close(self) -> None:
        """Finish the job at hand, drop the others and end."""
        with self._wake:
            self._is_closed = True
            for job in self._jobs:
                job.cancel()
            self._jobs.clear()
            self._wake.notify()
        self._thread.join()

    def _take(self) -> list[DeviceJob] | None:
        """Wait for the next job, and take with it what can be done at once."""
        with self._wake:
            while True:
                while self._jobs:
                    first = self._jobs.popleft()
                    if first.result.set_running_or_notify_cancel():
                        if first.together is not None:
                            self._wait_for_more()
                        return [first, *self._alike(first)]
                if self._is_closed:
                    return None
                self._wake.wait()

    def _wait_for_more(self) -> None:
        """Let those come that are sent at the same time."""
        end = time.monotonic() + _MOST_S
        seen = -1
        while seen < len(self._jobs) and time.monotonic() < end:
            seen = len(self._jobs)
            self._wake.wait(_QUIET_S)

    def _alike(self, first: DeviceJob) -> list[DeviceJob]:
        if first.together is None:
            return []
        found, room = [], self._max_together - first.size
        for job in list(self._jobs):
            if job.together == first.together and job.size <= room:
                self._jobs.remove(job)
                if job.result.set_running_or_notify_cancel():
                    found.append(job)
                    room -= job.size
        return found

    def _run(self) -> None:
        while (jobs := self._take()) is not None:
            try:
                results = jobs[0].run(jobs)
            except BaseException as error:  # which whoever waits for the job is given
                for job in jobs:
                    job.result.set_exception(error)
                continue
            for job, result in zip(jobs, results, strict=True):
                if isinstance(result, BaseException):
                    job.result.set_exception(result)
                else:
                    job.result.set_result(result)
