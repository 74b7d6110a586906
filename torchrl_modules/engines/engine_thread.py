"""The thread that steps an engine for asyncio, and runs commands between two steps."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from torchrl_data.checks import POSITIVE, check_numbers

from .engine import ClosedOnLeaving, EngineDied, EngineOver
from .loop_thread import T

_CLOSE_TIMEOUT_S = 10.0
_GATHER_S = 0.001
"""An idle engine waits so long for those who come with the first one: they share their prompt."""


class Stepped(Protocol):
    """Protocol of something that a thread steps; everything is called in that thread."""

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


_Command = tuple[Callable[[], object], Callable[[BaseException], object]]
"""What is called between two steps, and instead, or after it raised, when the engine ends."""


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
        check_numbers(who, POSITIVE, stall_timeout_s=stall_timeout_s)
        check_numbers(who, POSITIVE, update_timeout_s=command_timeout_s)
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
            self._commands.put((run, refuse))

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

        def apply() -> None:
            self._progress_s = time.monotonic()  # before anybody can take the pause for a stall
            self._paused = paused

        await self.call(apply)

    async def wait(self, future: "asyncio.Future[T]") -> T:
        """Wait for what the thread does, as long as it does anything."""
        while not (await asyncio.wait({future}, timeout=self.stall_timeout_s))[0]:
            self.check_progress()
        return future.result()

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
            self._commands.put((lambda: None, lambda _: None))  # wakes the thread
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
        with self._gate:
            self._closing = True
        died = None if self._error is None else self._died(self._error)
        self._stepped.end(died)
        closed = died or RuntimeError(f"{self._who} was closed.")
        while not self._commands.empty():
            self._commands.get()[1](closed)

    def _run_commands(self) -> None:
        waiting = self._paused or not self._stepped.has_work
        while not self._closing:
            try:
                run, refuse = self._commands.get(block=waiting)
            except queue.Empty:
                return
            # The order lets nobody take a command's time for a step's, or the other way round.
            self._progress_s = time.monotonic()
            self._in_command = True
            try:
                run()
            except BaseException as error:
                refuse(self._died(error))
                raise
            self._progress_s = time.monotonic()
            self._in_command = False
            if waiting and self._stepped.has_work:
                time.sleep(_GATHER_S)
            waiting = False

    def _died(self, error: BaseException) -> EngineDied:
        died = EngineDied(f"{self._who}: the engine has ended: {error!r}.")
        died.__cause__ = error
        return died


class SteppedEngine(EngineOver, ClosedOnLeaving):
    """An engine that an `EngineThread` steps."""

    _thread: EngineThread

    async def pause(self) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.pause`."""
        await self._thread.set_paused(True)

    async def resume(self) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.resume`."""
        await self._thread.set_paused(False)

    async def check_health(self) -> None:
        """Say whether it is there.

        Raises:
            EngineDied: it died.
            RuntimeError: it is closed.
        """
        self._thread.check_alive()

    def close(self) -> None:
        """Abort what is in flight and end the thread. May be called twice.

        Raises:
            EngineDied: a step, or a command between two, does not end.
        """
        self._thread.close()
