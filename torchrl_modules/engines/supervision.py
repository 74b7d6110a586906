"""Engines are watched: their state, their process, and how one that died comes back."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple

# Whether an engine may serve: a state machine without any engine in it.


class EngineState(Enum):
    """The state of an engine."""

    DEAD = "dead"
    """There is none, or it is gone or stuck."""
    RESTARTING = "restarting"
    """Another one is being started, or looked for."""
    STALE = "stale"
    """It runs, but has not acknowledged the weights that are wanted."""
    SUSPECT = "suspect"
    """It has acknowledged them, but did not answer as it should; nothing new is asked of it."""
    HEALTHY = "healthy"
    """It runs, and has acknowledged them."""


_RUNNING = (EngineState.STALE, EngineState.SUSPECT, EngineState.HEALTHY)


@dataclass(frozen=True)
class Supervision:
    """The present engine and the weights that are wanted; never changed in place.

    An engine that comes back is stale, whatever it says it has: only an acknowledgement by the
    present incarnation makes it healthy. News of earlier incarnations change nothing.
    """

    state: EngineState = EngineState.DEAD
    incarnation: int = 0
    """How many engines have been started."""
    served: int | None = None
    """The version that the present one acknowledged."""
    wanted: int = 0
    """The version that may be served; an older one may not."""

    @property
    def may_serve(self) -> bool:
        """Tokens drawn now are of the weights that are wanted."""
        return self.state is EngineState.HEALTHY

    def restarting(self) -> "Supervision":
        """Another engine is being started.

        Raises:
            RuntimeError: the earlier one is not known to be dead.
        """
        self._check_next(EngineState.DEAD)
        return replace(self, state=EngineState.RESTARTING)

    def started(self) -> "Supervision":
        """A new engine runs.

        Raises:
            RuntimeError: the earlier one is not known to be dead.
        """
        self._check_next(EngineState.DEAD, EngineState.RESTARTING)
        return replace(self, state=EngineState.STALE, incarnation=self.incarnation + 1, served=None)

    def _check_next(self, *states: EngineState) -> None:
        if self.state not in states:
            raise RuntimeError(
                f"Supervision: engine {self.incarnation} is {self.state.value}; another one is "
                "started only after it died."
            )

    def acknowledged(self, incarnation: int, version: int) -> "Supervision":
        """An engine says which version it serves; a newer one is wanted from now on."""
        if incarnation != self.incarnation or self.state not in _RUNNING:
            return self
        fresh = version >= self.wanted
        return replace(
            self,
            state=EngineState.HEALTHY if fresh else EngineState.STALE,
            served=version,
            wanted=max(version, self.wanted),
        )

    def wants(self, version: int) -> "Supervision":
        """A newer version is wanted from now on; who serves another one is stale."""
        wanted = max(version, self.wanted)
        is_stale = self.state in _RUNNING and self.served != wanted
        return replace(self, state=EngineState.STALE if is_stale else self.state, wanted=wanted)

    def suspected(self, incarnation: int) -> "Supervision":
        """An engine that serves did not answer as it should."""
        if incarnation != self.incarnation or self.state is not EngineState.HEALTHY:
            return self
        return replace(self, state=EngineState.SUSPECT)

    def cleared(self, incarnation: int) -> "Supervision":
        """An engine that was suspected answers."""
        if incarnation != self.incarnation or self.state is not EngineState.SUSPECT:
            return self
        return replace(self, state=EngineState.HEALTHY)

    def died(self, incarnation: int) -> "Supervision":
        """An engine is gone or stuck, or another one did not start."""
        if incarnation != self.incarnation:
            return self
        return replace(self, state=EngineState.DEAD, served=None)


# Notices an engine in another process that is gone, or makes no progress.
#
# Progress is what counts, not an open connection: a stopped process keeps its connections open.


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


# Whether a process can do anything at all, without asking it; how one ends with its parent.

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
