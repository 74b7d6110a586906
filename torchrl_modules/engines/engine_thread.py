"""The thread that steps an engine for asyncio, and runs commands between two steps."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, Protocol, TypeVar

from .protocol import EngineDied

T = TypeVar("T")
_CLOSE_TIMEOUT_S = 10.0
_GATHER_S = 0.001
"""An idle engine waits so long for those who come with the first one: they share their prompt."""


class Stepped(Protocol):
    """What is stepped; everything is called in the thread."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def step(self) -> None:
        """Make one step. What it raises ends the thread."""
        ...

    def end(self, error: BaseException | None) -> None:
        """Let all who wait go: the thread ends, because of an error or because it was closed."""
        ...


class _Command(NamedTuple):
    run: Callable[[], object]
    """Called between two steps."""
    refuse: Callable[[BaseException], object]
    """Called instead, or after it raised, when the engine ends."""


class EngineThread:
    """Steps an engine while it has work; a command never meets a step half done.

    Args:
        stepped: the engine.
        who: is named in errors.
        stall_timeout_s: an engine that has work, is not paused and makes no step for so long is
            taken for stuck.
        command_timeout_s: the same for a command between two steps, such as loading weights.

    Raises:
        ValueError: a time is not positive.
    """

    def __init__(
        self, stepped: Stepped, *, who: str, stall_timeout_s: float, command_timeout_s: float
    ) -> None:
        if min(stall_timeout_s, command_timeout_s) <= 0:
            raise ValueError(
                f"{who}: timeouts are positive, got {stall_timeout_s} and {command_timeout_s} s."
            )
        self._stepped = stepped
        self._who = who
        self.stall_timeout_s = stall_timeout_s
        self._command_timeout_s = command_timeout_s
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._paused = self._closing = self._in_command = False
        self._error: BaseException | None = None
        self._progress_s = time.monotonic()
        self._thread = threading.Thread(target=self._serve, name=who, daemon=True)
        self._thread.start()

    def put(self, run: Callable[[], object], refuse: Callable[[BaseException], object]) -> None:
        """Let something run between two steps; what it raises ends the engine.

        Args:
            run: called in the thread.
            refuse: called in the thread with what ended the engine, if it ends before.

        Raises:
            EngineDied: it died.
            RuntimeError: it is closed.
        """
        with self._gate:  # Once the thread has ended, nobody would run it.
            self.check_alive()
            self._commands.put(_Command(run, refuse))

    async def call(
        self, function: Callable[[], T], *, spares: Callable[[Exception], bool] | None = None
    ) -> T:
        """Run something between two steps, and wait for it.

        Args:
            function: called in the thread.
            spares: whether an error leaves the engine as it was; others end it. Both come to the
                caller.

        Raises:
            EngineDied: the engine died, or is stuck.
            RuntimeError: it is closed.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
                if spares is None or not spares(error):
                    raise

        def refuse(error: BaseException) -> None:
            if not future.done():
                future.set_exception(error)

        self.put(run, refuse)
        return await self.wait(asyncio.wrap_future(future))

    async def set_paused(self, paused: bool) -> None:
        """Make no steps, or go on; raises as :meth:`call`."""
        await self.call(lambda: self._set_paused(paused))

    async def wait(self, future: "asyncio.Future[T]") -> T:
        """Wait for what the thread does, as long as it does anything."""
        while not (await asyncio.wait({future}, timeout=self.stall_timeout_s))[0]:
            self.check_progress()
        return future.result()

    def _set_paused(self, paused: bool) -> None:
        self._progress_s = time.monotonic()  # before anybody can take the pause for a stall
        self._paused = paused

    def check_alive(self) -> None:
        """Check that it runs.

        Raises:
            EngineDied: it died.
            RuntimeError: it is closed.
        """
        if self._error is not None:
            raise self._died(self._error)
        if self._closing:
            raise RuntimeError(f"{self._who} is closed.")

    def check_progress(self) -> None:
        """Check that it runs and makes steps; raises as `check_alive`."""
        self.check_alive()
        name = "update_timeout_s" if self._in_command else "stall_timeout_s"
        timeout_s = self._command_timeout_s if self._in_command else self.stall_timeout_s
        idle_s = time.monotonic() - self._progress_s
        if idle_s >= timeout_s and (self._in_command or not self._paused):
            raise EngineDied(
                f"{self._who} has made no step for {idle_s:.0f} s, though it has requests. It is "
                f"stuck; end this process, or raise {name} if it may take longer."
            )

    def close(self) -> None:
        """End the thread. May be called twice.

        Raises:
            EngineDied: a step, or a command between two, does not end.
        """
        with self._gate:
            self._closing = True
            self._commands.put(_Command(lambda: None, lambda _: None))  # wakes the thread
        timeout_s = self._command_timeout_s if self._in_command else self.stall_timeout_s
        self._thread.join(timeout_s + _CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise EngineDied(
                f"{self._who}: its thread has not ended {timeout_s + _CLOSE_TIMEOUT_S:.0f} s after "
                "it was closed. It is stuck; end this process."
            )

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._run_commands()
                if self._stepped.has_work and not self._paused and not self._closing:
                    self._stepped.step()
                    self._progress_s = time.monotonic()
        except BaseException as error:
            self._error = error
        self._end()

    def _run_commands(self) -> None:
        waiting = self._paused or not self._stepped.has_work
        while not self._closing:
            try:
                command = self._commands.get(block=waiting)
            except queue.Empty:
                return
            # The order lets nobody take a command's time for a step's, or the other way round.
            self._progress_s = time.monotonic()
            self._in_command = True
            try:
                command.run()
            except BaseException as error:
                command.refuse(self._died(error))
                raise
            self._progress_s = time.monotonic()
            self._in_command = False
            if waiting and self._stepped.has_work:
                time.sleep(_GATHER_S)
            waiting = False

    def _end(self) -> None:
        with self._gate:
            self._closing = True
        error = None if self._error is None else self._died(self._error)
        self._stepped.end(error)
        closed = error or RuntimeError(f"{self._who} was closed.")
        while not self._commands.empty():
            self._commands.get().refuse(closed)

    def _died(self, error: BaseException) -> EngineDied:
        died = EngineDied(f"{self._who}: the engine has ended: {error!r}.")
        died.__cause__ = error
        return died
