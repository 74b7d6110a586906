"""Notices an engine in another process that is gone, or makes no progress.

Progress is what counts, not an open connection: a stopped process keeps its connections.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final


class StallClock:
    """A clock of how long a figure has been the same."""

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._progress: object = None

    def idle_s(self, progress: object, now_s: float) -> float:
        """For how long a figure shows no progress; ``None`` says that nobody answered."""
        if progress is not None and progress != self._progress:
            self._progress, self._since_s = progress, now_s
        return now_s - self._since_s


_PROBE_S: Final = 0.5
"""Between two probes, at most."""


class ProgressWatch:
    """Watches an engine from a thread of its own, while somebody waits for it.

    Args:
        probe: gives a figure that grows with the tokens; ``None`` while it can't be had in time,
            which counts as no progress. Raises ``ConnectionError`` if the engine is gone.
        fail: called with the reason, and again while there is somebody who waits, to let them go.
        stall_timeout_s: an engine without progress for so long is stuck.
    """

    def __init__(
        self, probe: Callable[[], object], fail: Callable[[str], None], *, stall_timeout_s: float
    ) -> None:
        self._probe = probe
        self._fail = fail
        self._stall_timeout_s = stall_timeout_s
        self._interval_s = min(_PROBE_S, stall_timeout_s / 4)
        self._num_waiting = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Somebody waits for tokens meanwhile."""
        with self._lock:
            self._num_waiting += 1
            if self._num_waiting == 1:
                self._wake = threading.Event()
                threading.Thread(
                    target=self._watch, args=(self._wake,), name="engine-watch", daemon=True
                ).start()
        try:
            yield
        finally:
            with self._lock:
                self._num_waiting -= 1
                if not self._num_waiting:
                    self._wake.set()

    def _watch(self, ended: threading.Event) -> None:
        clock = StallClock(time.monotonic())
        while not ended.wait(self._interval_s):
            try:
                idle_s = clock.idle_s(self._probe(), time.monotonic())
            except ConnectionError as error:
                reason = str(error)
            else:
                if idle_s < self._stall_timeout_s:
                    continue
                reason = f"it has made no progress for {idle_s:.1f} s, though it has requests"
            break
        else:
            return
        self._fail(reason)
        while not ended.wait(self._interval_s):  # Those who came to wait only now, too.
            self._fail(reason)
