"""Many calls at once, sync and async, each with a deadline, results in order."""

import asyncio
import contextlib
import functools
import inspect
import queue
import threading
import time
import types
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

Call = Callable[[], Any]
_STOP_GRACE_S = 1.0


class Outcome(NamedTuple):
    """What one call gave: a value or an error."""

    value: Any = None
    error: BaseException | None = None


class CallTimeoutError(TimeoutError):
    """A call did not return before its deadline."""


class ConcurrentCalls:
    """Runs chains of calls; the chains run concurrently, the calls of one chain in order.

    Sync functions run on daemon threads, coroutine functions on one event loop. A thread can't be
    killed: a sync call that never returns keeps its thread, but nobody waits for it and another
    thread takes its place.

    Args:
        timeout_s: deadline of one call for which :meth:`run` is given none.
        max_threads: sync calls that run at once, calls past their deadline not counted.

    Raises:
        ValueError: a setting is not positive.
    """

    def __init__(self, *, timeout_s: float = 30.0, max_threads: int = 64) -> None:
        if not timeout_s > 0 or max_threads < 1:
            raise ValueError(
                f"timeout_s must be positive and max_threads at least 1, got {timeout_s!r} and "
                f"{max_threads!r}."
            )
        self.timeout_s = timeout_s
        self.max_threads = max_threads
        self._threads = _DaemonThreads(max_threads)
        self._loop = LoopThread()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has threads of its own."""
        settings = {"timeout_s": self.timeout_s, "max_threads": self.max_threads}
        return functools.partial(type(self), **settings), ()

    def run(
        self,
        chains: Sequence[Sequence[Call]],
        timeouts_s: Sequence[Sequence[float]] | float | None = None,
    ) -> list[list[Outcome]]:
        """Run all chains.

        Args:
            chains: calls without arguments; coroutine functions are awaited.
            timeouts_s: deadline of each call, or one for all.

        Returns:
            One outcome per call, in the order given. After a call that missed its deadline the rest
            of its chain is not started, and has that error too.
        """
        if timeouts_s is None or isinstance(timeouts_s, int | float):
            same = self.timeout_s if timeouts_s is None else timeouts_s
            timeouts_s = [[same] * len(chain) for chain in chains]
        running = [
            self._start(chain, limits) for chain, limits in zip(chains, timeouts_s, strict=True)
        ]
        return [self._wait(chain, *started) for chain, started in zip(chains, running, strict=True)]

    def _start(
        self, chain: Sequence[Call], timeouts_s: Sequence[float]
    ) -> tuple["_Progress", Future[None] | None]:
        progress = _Progress(timeouts_s)
        if not chain:
            return progress, None
        if any(is_async(call) for call in chain):
            return progress, self._loop.submit(self._run_async(chain, progress))
        return progress, self._threads.submit(functools.partial(_run_sync, chain, progress))

    async def _run_async(self, chain: Sequence[Call], progress: "_Progress") -> None:
        for call in chain:
            progress.begin()
            if is_async(call):
                progress.outcomes.append(await _guarded_async(call))
            else:
                future = self._threads.submit(functools.partial(_guarded, call))
                progress.outcomes.append(await asyncio.wrap_future(future))

    def _wait(
        self, chain: Sequence[Call], progress: "_Progress", future: Future[None] | None
    ) -> list[Outcome]:
        if future is None:
            return []
        while not future.done():
            remaining = progress.remaining()
            if remaining <= 0:
                future.cancel()
                done = list(progress.outcomes)
                if not is_async(chain[min(len(done), len(chain) - 1)]):
                    self._threads.replace_stuck()
                error = CallTimeoutError(f"no answer within {progress.timeout_s:g} s")
                return done + [Outcome(error=error)] * (len(chain) - len(done))
            try:
                future.exception(timeout=remaining)
            except TimeoutError:
                continue
        return list(progress.outcomes)

    def close(self) -> None:
        """Stop the idle threads and the event loop."""
        self._threads.close()
        self._loop.close()


class _Progress:
    """How far a chain has got; written by its runner, read by the one who waits.

    A chain that waits for a thread is not late. Chains get threads in the order in which they are
    waited for, and a stuck thread is replaced, so it does get one.
    """

    def __init__(self, timeouts_s: Sequence[float]) -> None:
        self._timeouts_s = timeouts_s
        self._deadline: float | None = None
        self.timeout_s = timeouts_s[0] if timeouts_s else 0.0
        self.outcomes: list[Outcome] = []

    def begin(self) -> None:
        self.timeout_s = self._timeouts_s[len(self.outcomes)]
        self._deadline = time.monotonic() + self.timeout_s

    def remaining(self) -> float:
        if self._deadline is None:
            return self.timeout_s
        return self._deadline - time.monotonic()


class _DaemonThreads:
    """A thread pool whose threads do not hold up the end of the program."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Call] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._alive = 0
        self._unfinished = 0

    def submit(self, call: Call) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            self._unfinished += 1
            self._jobs.put((future, call))
            self._start_if_needed()
        return future

    def replace_stuck(self) -> None:
        """A thread is lost to a call that does not return: another takes its place."""
        with self._lock:
            self._limit += 1
            self._start_if_needed()

    def _start_if_needed(self) -> None:
        if self._alive < min(self._unfinished, self._limit):
            self._alive += 1
            threading.Thread(target=self._work, name="call", daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            outcome = _guarded(call) if future.set_running_or_notify_cancel() else None
            with self._lock:
                self._unfinished -= 1
            if outcome is None:
                continue
            if outcome.error is None:
                future.set_result(outcome.value)
            else:
                future.set_exception(outcome.error)

    def close(self) -> None:
        with self._lock:
            for _ in range(self._alive):
                self._jobs.put(None)
            self._alive = 0


class LoopThread:
    """One event loop on a daemon thread, started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, coroutine: Any) -> Future[Any]:
        """Run a coroutine on the loop; cancelling the future cancels it."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="calls-loop", daemon=True
                )
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancel what still runs, and stop the loop."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(_STOP_GRACE_S)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout=_STOP_GRACE_S)
            if not thread.is_alive():
                loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


def run_call(call: Call) -> Outcome:
    """Run one call here and now; a coroutine function gets an event loop of its own."""
    return _guarded(lambda: asyncio.run(call()) if is_async(call) else call())


def _run_sync(chain: Sequence[Call], progress: _Progress) -> None:
    for call in chain:
        progress.begin()
        progress.outcomes.append(_guarded(call))


def is_async(call: Call) -> bool:
    """Whether a call has to be awaited."""
    while isinstance(call, functools.partial):
        call = call.func
    if isinstance(call, types.FunctionType | types.MethodType):
        return inspect.iscoroutinefunction(call)
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
        getattr(call, "__call__", None)  # noqa: B004
    )


def _guarded(call: Call) -> Outcome:
    # SystemExit and KeyboardInterrupt raised by a tool are the tool's errors, not the program's.
    try:
        return Outcome(call())
    except BaseException as error:
        return Outcome(error=error)


async def _guarded_async(call: Call) -> Outcome:
    try:
        return Outcome(await call())
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return Outcome(error=error)
