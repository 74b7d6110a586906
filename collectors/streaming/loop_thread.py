"""An event loop on a thread of its own, which the trainer's thread starts, asks and stops."""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from .checks import WHO

T = TypeVar("T")


class LoopThread(ABC):
    """Runs tasks in an event loop until it is stopped, or one of them fails."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Held while what is shared is read or written; told of every change."""
        self.error: BaseException | None = None
        self.is_over = False
        """It was stopped, or has failed."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # For the trainer's thread -------------------------------------------------------------------

    def start(self) -> None:
        """Start the event loop."""
        started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main(started)), name="collector", daemon=True
        )
        self._thread.start()
        started.wait()

    def wake(self) -> None:
        """Look again whether there is anything to do."""
        if (loop := self._loop) is not None:
            with suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(self._wake.set)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run something in the event loop.

        Raises:
            RuntimeError: the collection has ended.
        """
        if self._loop is None or self.is_over:
            coroutine.close()
            self.check_alive()
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    @property
    def is_alive(self) -> bool:
        """Whether the event loop runs."""
        return self._thread is not None and self._thread.is_alive()

    def check_open(self) -> None:
        """Check that it has neither failed nor was stopped.

        Raises:
            RuntimeError: it has, or was; what it failed of is the cause.
        """
        if self.error is not None:
            raise RuntimeError(
                f"{WHO}: the collection has failed: {type(self.error).__name__}: {self.error}"
            ) from self.error
        if self.is_over:
            raise RuntimeError(f"{WHO}: it was shut down.")

    def check_alive(self) -> None:
        """Check that it is under way.

        Raises:
            RuntimeError: it is not; what it failed of is the cause.
        """
        self.check_open()
        if not self.is_alive:
            raise RuntimeError(f"{WHO}: the collection has ended.")

    def stop(self, timeout_s: float) -> None:
        """Cancel what runs, let it end, and end the thread.

        Raises:
            TimeoutError: it does not end.
        """
        self.is_over = True
        if self._thread is None:
            return
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"The collection did not end within {timeout_s:g} s: a tool, an environment or the "
                "engine holds it up."
            )

    # In the event loop --------------------------------------------------------------------------

    async def _main(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake, self._stopping = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._begin_in_loop()
        started.set()
        try:
            await self._stopping.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            await self._end()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run a task; when it fails everything ends, and the trainer hears of it at once."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            with self.changed:
                self.error, self.is_over = self.error or error, True
                self.changed.notify_all()
            self._stopping.set()

    @abstractmethod
    def _begin_in_loop(self) -> None:
        """Begin what runs in the event loop."""

    @abstractmethod
    async def _end(self) -> None:
        """All tasks have ended: give back what is left."""
