"""Ctrl-C, SIGTERM and SLURM's warning: what was trained is saved before the run ends."""

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

_LOG = logging.getLogger("torchrl_agents")
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""SLURM sends the last before it takes a machine away: ``sbatch --signal=USR1@120``."""
AT_ONCE_S: Final = 2.0
"""After a second signal the run may give back what it holds for so long."""
ONE_S: Final = 0.3
"""What comes so soon after the first signal is the same one: ``timeout`` and others send it to a
process and to its group."""
_WAKES: Final = signal.SIGURG
_FIRST_S: Final = 0.2


class StopRequested(BaseException):
    """A signal came while something ran that is not worth waiting for."""


class StopSignals:
    """Turns signals into a request that the loop reads; outside of :meth:`held` they end the run.

    A second signal ends the run wherever it is, be that in native code that never comes back:
    a thread hears of signals though the main thread does not.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The signal that asked to stop."""
        self._received_s = 0.0
        self._is_held = self._may_break = False
        self._before: dict[signal.Signals, Any] = {}
        self._wakes_before: tuple[int, Any] = (-1, None)
        self._pipe: int | None = None

    @property
    def status(self) -> int:
        """The exit status: 128 and the signal's number, as a shell has it; 0 without a signal."""
        return 0 if self.received is None else 128 + self.received

    def __enter__(self) -> "StopSignals":
        # Who starts a run with nohup, or behind a shell's "&", wants it to be left alone.
        heard = [each for each in SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._receive) for number in heard}
        read, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        wakes = signal.signal(_WAKES, lambda *_: None)
        # The numbers of signals are written here, whatever the main thread does.
        self._wakes_before = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False), wakes
        # What reaches a child is not for this process.
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._watch, args=(read,), name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._pipe is not None:
            signal.set_wakeup_fd(self._wakes_before[0])
            signal.signal(_WAKES, self._wakes_before[1])
            os.close(self._pipe)
            self._pipe = None
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

    def _forget(self) -> None:
        if self._pipe is not None and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)

    def _watch(self, read: int) -> None:
        """Wake the main thread, and end the process after a second signal.

        Python handles signals between two steps of its main thread. That may wait, and not be woken
        by one that came just before; it is woken again. It may be in native code that does not come
        back.
        """
        count, pause_s, first_s = 0, _FIRST_S, -ONE_S
        poll = select.poll()  # and not `select`, which knows the first 1,024 open files alone
        poll.register(read, select.POLLIN)
        while True:
            is_unheard = count > 0 and self.received is None
            if not poll.poll(1e3 * pause_s if is_unheard else None):
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
