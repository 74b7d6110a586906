"""An event loop in a thread of its own, and rows that are drawn together in one."""

import asyncio
import threading
from collections.abc import Awaitable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from .engine import EngineDied, Generation


async def gather_rows(calls: Iterable[Awaitable[Generation]]) -> list[Generation]:
    """The responses of all rows, once each call has ended.

    Raises:
        BaseException: the first that a call raised; :class:`EngineDied` says what was finished.
    """
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    results = [None if isinstance(one, BaseException) else one for one in outcomes]
    error = next((one for one in outcomes if isinstance(one, BaseException)), None)
    if isinstance(error, EngineDied):
        lost = f"{results.count(None)} of {len(results)} rows were lost"
        raise EngineDied(f"{error} ({lost})", results=results) from error
    if error is not None:
        raise error
    return [result for result in results if result is not None]


T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own, for callers that wait and callers in other loops.

    Args:
        who: is named in errors.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._gate = threading.Lock()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=who, daemon=True)
        self._thread.start()

    def submit(self, call: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin a call; cancelling the future cancels it.

        Raises:
            RuntimeError: it is closed.
        """
        with self._gate:  # Once the loop has ended, nobody would run it.
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(call, self._loop)
        call.close()
        raise RuntimeError(f"{self._who} is closed.")

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Wait for a call; who is interrupted cancels it. Raises as `submit`, and as the call."""
        future = self.submit(call)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def call(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine as `run` does, for a caller in another event loop."""
        try:
            return await asyncio.wrap_future(self.submit(call))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and task is not None and not task.cancelling():
                raise RuntimeError(f"{self._who} was closed.") from None
            raise

    def _serve(self) -> None:
        self._loop.run_forever()
        while tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(tasks))
        # Connections that were closed let go of their sockets in the next round of the loop.
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def close(self) -> None:
        """Cancel what runs, and end the thread. May be called twice."""
        with self._gate:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
