"""An event loop on a thread of its own, and another one when a coroutine blocks it."""

import asyncio
import contextlib
import importlib
import threading
import weakref
from concurrent.futures import Future
from typing import Any, Final

_REACTS_S: Final = 0.5
"""A loop that runs nothing for so long, though asked to, is blocked."""
_STOP_GRACE_S: Final = 1.0


async def import_aside(*modules: str) -> None:
    """Import modules on a thread: a loop that imports for half a second is taken for blocked.

    Args:
        *modules: what a coroutine is about to import; a large one takes seconds the first time.
    """
    for module in modules:
        await asyncio.to_thread(importlib.import_module, module)


class ReplaceableLoop:
    """An event loop on a daemon thread, started when it is first needed."""

    # A coroutine that does not await (`time.sleep` in an `async` function) blocks the loop for all
    # others, and nothing can interrupt it. `replace_if_blocked` leaves such a loop behind. What
    # runs is cancelled when this object goes.

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: _Loop | None = None
        self._all: list[_Loop] = []
        """That one, and those that end when what runs on them does."""
        self.generation = 0
        """How many loops were left behind."""
        weakref.finalize(self, _end_all, self._all).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has a loop of its own."""
        return type(self), ()

    def submit(self, coroutine: Any) -> Future[Any]:
        """Run a coroutine on the loop; cancelling the future cancels it."""
        with self._lock:
            if self._loop is None:
                self._loop = self._another()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop.loop)

    def submit_apart(self, coroutine: Any) -> Future[Any]:
        """Run a coroutine on a loop that is its own, and ends with it."""
        with self._lock:
            loop = self._another()
            future = asyncio.run_coroutine_threadsafe(coroutine, loop.loop)
            loop.end(cancel=False)
            return future

    def _another(self) -> "_Loop":
        self._all[:] = [loop for loop in self._all if loop.thread.is_alive()]
        self._all.append(_Loop())
        return self._all[-1]

    def replace_if_blocked(self) -> None:
        """Leave a loop that does not react: what is submitted next gets another one."""
        # What has begun on the old one goes on when that reacts again; then it ends. Returns after
        # half a second if the loop is blocked, else at once.
        with self._lock:
            loop = self._loop
        if loop is None or loop.reacts():
            return
        with self._lock:
            if self._loop is loop:
                self._loop = None
                self.generation += 1
                loop.end(cancel=False)

    def close(self) -> None:
        """Cancel what still runs, and stop the loop; one that is blocked stops when it reacts."""
        with self._lock:
            last, self._loop = self._loop, None
            _end_all(self._all)
        if last is not None:
            last.thread.join(timeout=2 * _STOP_GRACE_S)


def _end_all(loops: "list[_Loop]") -> None:
    for loop in loops:
        loop.end(cancel=True)
    loops.clear()


class _Loop:
    """A loop, and the thread that runs it and closes it at the end."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="calls-loop", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def reacts(self) -> bool:
        reacted = threading.Event()
        self.loop.call_soon_threadsafe(reacted.set)
        return reacted.wait(_REACTS_S)

    def end(self, *, cancel: bool) -> None:
        """Stop when nothing runs any more, or soon, if what runs is cancelled."""
        with contextlib.suppress(RuntimeError):  # It has ended.
            self.loop.call_soon_threadsafe(self._begin_end, cancel)

    def _begin_end(self, cancel: bool) -> None:
        self._ending = self.loop.create_task(self._end(cancel))

    async def _end(self, cancel: bool) -> None:
        is_cancelled = False
        while not is_cancelled and (tasks := asyncio.all_tasks() - {asyncio.current_task()}):
            for task in tasks if cancel else ():
                task.cancel()
            await asyncio.wait(tasks, timeout=_STOP_GRACE_S if cancel else None)
            is_cancelled = cancel
        await self.loop.shutdown_asyncgens()
        self.loop.stop()
