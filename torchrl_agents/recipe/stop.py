"""Ctrl-C, SIGTERM and SLURM's warning: what was trained is saved before the run ends."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""SLURM sends the last before it takes a machine away: ``sbatch --signal=USR1@120``."""
_LOG = logging.getLogger("torchrl_agents")


class StopRequested(BaseException):
    """A signal came while something ran that is not worth waiting for."""


class StopSignals:
    """Turns signals into a request that the loop reads; outside of :meth:`held` they end the run.

    A second signal ends the run wherever it is.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The signal that asked to stop."""
        self._is_held = self._may_break = False
        self._before: dict[signal.Signals, Any] = {}

    @property
    def status(self) -> int:
        """The exit status: 128 and the signal's number, as a shell has it; 0 without a signal."""
        return 0 if self.received is None else 128 + self.received

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """A signal in here is only noted."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def check(self) -> None:
        """Raise :class:`StopRequested` if a signal came."""
        if self.received is not None:
            raise StopRequested

    @contextmanager
    def breaking(self) -> Iterator[None]:
        """A signal in here raises :class:`StopRequested`; so does one that came before."""
        self.check()
        self._may_break = True
        try:
            yield
        finally:
            self._may_break = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        again = self.received is not None
        self.received = signal.Signals(number)
        if again or not self._is_held:
            _LOG.warning("%s: stopping now", self.received.name)
            raise SystemExit(self.status)
        _LOG.warning("%s: saving; once more stops at once", self.received.name)
        if self._may_break:
            self._may_break = False
            raise StopRequested
