"""An event loop on a thread of its own, which the trainer's thread starts, asks and stops."""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from concurrent import futures
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, Final, TypeVar

T = TypeVar("T")
LOOK_S: Final = 0.5


class CollectionThread(ABC):
    """Runs tasks in an event loop until it is stopped, or one of them fails.

    Args:
        who: is told of in errors.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self.changed = threading.Condition()
        """Held while what is shared is read or written; told of every change."""
        self.error: BaseException | None = None
        self.is_over = False
        """It was stopped, or has failed."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # For the trainer's thread -------------------------------------------------------------------

    def start(self, *tasks: Coroutine[Any, Any, None]) -> None:
        """Start the event loop, and tasks in it; when one fails everything ends."""
        started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main(started, tasks)), name="collector", daemon=True
        )
        self._thread.start()
        started.wait()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run something in the event loop.

        Raises:
            RuntimeError: the collection has ended.
        """
        if self._loop is None or self.is_over:
            coroutine.close()
            self.check_open()
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def result_of(self, future: "Future[T]") -> T:
        """Wait for something that was submitted, as long as the collection goes on."""
        while not futures.wait([future], LOOK_S).done:
            self.check_open()
        try:
            return future.result()
        except CancelledError:
            self.check_open()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the event loop runs, and goes on."""
        return self._thread is not None and not self.is_over

    def check_open(self) -> None:
        """Check that it has neither failed nor was stopped.

        Raises:
            RuntimeError: it has, or was; what it failed of is the cause.
        """
        if self.error is not None:
            cause = getattr(self.error, "cause", None) or self.error  # Ray tells where it was.
            raise RuntimeError(
                f"{self._who}: the collection has failed: {type(cause).__name__}: {cause}"
            ) from self.error
        if self.is_over:
            raise RuntimeError(f"{self._who}: it was shut down.")

    def stop(self, timeout_s: float) -> None:
        """Cancel what runs, let it end, and end the thread.

        Raises:
            TimeoutError: it does not end.
        """
        self.is_over = True
        if self._thread is None:
            return
        self._call_soon(self._stopping.set)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"The collection did not end within {timeout_s:g} s: a tool, an environment or the "
                "engine holds it up."
            )

    def _call_soon(self, function: Callable[[], object]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(function)

    # In the event loop --------------------------------------------------------------------------

    async def _main(
        self, started: threading.Event, tasks: Sequence[Coroutine[Any, Any, None]]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        for task in tasks:
            self._spawn(task)
        started.set()
        try:
            await self._stopping.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            await self._end()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task; when it fails everything ends, and the trainer hears of it at once."""

        def done(task: "asyncio.Task[None]") -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None:
                self._fail(error)

        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(done)

    def _fail(self, error: BaseException) -> None:
        """Everything ends because of an error; the first one counts."""
        with self.changed:
            self.error, self.is_over = self.error or error, True
            self.changed.notify_all()
        self._stopping.set()

    @abstractmethod
    async def _end(self) -> None:
        """All tasks have ended: give back what is left."""
