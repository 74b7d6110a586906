"""Ctrl-C, SIGTERM and SLURM's warning: what was trained is saved before the run ends."""

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""SLURM sends the last before it takes a machine away: ``sbatch --signal=USR1@120``."""
AT_ONCE_S: Final = 2.0
"""After a second signal the run may give back what it holds for so long."""
ONE_S: Final = 0.3
"""What comes so soon after the first signal is the same one: ``timeout`` and others send it to a
process and to its group."""
_WAKES: Final = signal.SIGURG
_FIRST_S: Final = 0.2
_LOG = logging.getLogger("torchrl_agents")


class StopRequested(BaseException):
    """A signal came while something ran that is not worth waiting for."""


class StopSignals:
    """Turns signals into a request that the loop reads; outside of :meth:`held` they end the run.

    A second signal ends the run wherever it is, be that in native code that never comes back.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The signal that asked to stop."""
        self._received_s = 0.0
        self._is_held = self._may_break = False
        self._before: dict[signal.Signals, Any] = {}
        self._watch = _Watch(lambda: self.received is not None)

    @property
    def status(self) -> int:
        """The exit status: 128 and the signal's number, as a shell has it; 0 without a signal."""
        return 0 if self.received is None else 128 + self.received

    def __enter__(self) -> "StopSignals":
        # Who starts a run with nohup, or behind a shell's "&", wants it to be left alone.
        heard = [each for each in SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._receive) for number in heard}
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.stop()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """A signal in here is only noted."""
        for number in self._before:  # A library may have taken one: Ray takes SIGTERM.
            signal.signal(number, self._receive)
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
        self._may_break = True
        try:
            self.check()
            yield
        finally:
            self._may_break = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        again, now_s = self.received is not None, time.monotonic()
        if again and now_s - self._received_s < ONE_S:
            return
        self.received, self._received_s = signal.Signals(number), now_s
        if again or not self._is_held:
            _LOG.warning("%s: stopping now", self.received.name)
            raise SystemExit(self.status)
        _LOG.warning("%s: saving; once more stops at once", self.received.name)
        if self._may_break:
            self._may_break = False
            raise StopRequested


class _Watch:
    """A thread that hears of signals though the main thread does not.

    Python handles them between two steps of its main thread. That may wait, and not be woken by one
    that came just before; it is woken again. It may be in native code that does not come back; the
    process is ended after a second signal.

    Args:
        is_heard: whether the first one was handled.
    """

    def __init__(self, is_heard: Callable[[], bool]) -> None:
        self._is_heard = is_heard
        self._ends: tuple[int, int] | None = None
        self._before: tuple[int, Any] = (-1, None)

    def start(self) -> None:
        self._ends = read, write = os.pipe()
        os.set_blocking(write, False)
        wakes = signal.signal(_WAKES, lambda *_: None)
        # The numbers of signals are written here, whatever the main thread does.
        self._before = signal.set_wakeup_fd(write, warn_on_full_buffer=False), wakes
        # What reaches a child is not for this process.
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._serve, args=(read,), name="signals", daemon=True).start()

    def stop(self) -> None:
        if self._ends is not None:
            signal.set_wakeup_fd(self._before[0])
            signal.signal(_WAKES, self._before[1])
            os.close(self._ends[1])
            self._ends = None

    def _forget(self) -> None:
        if self._ends is not None and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)

    def _serve(self, read: int) -> None:
        count, pause_s, first_s = 0, _FIRST_S, -ONE_S
        while True:
            is_unheard = count > 0 and not self._is_heard()
            if not select.select([read], [], [], pause_s if is_unheard else None)[0]:
                pause_s *= 2
                main = threading.main_thread().ident
                assert main is not None
                signal.pthread_kill(main, _WAKES)
                continue
            number = os.read(read, 1)
            if not number:
                break
            if number[0] not in SIGNALS or time.monotonic() - first_s < ONE_S:
                continue
            count, first_s = count + 1, time.monotonic() if count == 0 else first_s
            if count == 2:
                time.sleep(AT_ONCE_S)
                os._exit(128 + number[0])
        os.close(read)
