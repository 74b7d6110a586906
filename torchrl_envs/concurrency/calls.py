"""Calls of users' functions: with the arguments that they name, many at once, each with a deadline.

Sync and async; results in order.
"""

import asyncio
import contextlib
import functools
import inspect
import math
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Final

from .event_loop import ReplaceableLoop
from .outcome import CLOSED, Call, Outcome, guarded
from .threads import DaemonThreads

_NAMED: Final = weakref.WeakKeyDictionary[Any, tuple[set[str], bool]]()
"""What methods name, and whether they take any argument, see :func:`accepted_arguments`."""
_LOOK_S: Final = 0.25
"""How often one looks whether a loop is blocked that has not begun what it was given."""


class CallTimeoutError(TimeoutError):
    """A call did not return before its deadline."""


class ConcurrentCalls:
    """Runs chains of calls; the chains run concurrently, the calls of one chain in order."""

    # Sync functions run on daemon threads, coroutine functions on one event loop. Neither can be
    # killed: a sync call that never returns keeps its thread, and a coroutine that never awaits
    # keeps its loop. But nobody waits for it past its deadline, and another thread or loop takes
    # the place of that one. (What has begun on a blocked loop and waits for something there can't
    # go on either, and misses its own deadline; each chain that has not begun yet gets a loop of
    # its own.) Threads and loops end with `close`, and with the object.

    def __init__(self, *, timeout_s: float = 30.0, max_threads: int = 64) -> None:
        if not timeout_s > 0 or max_threads < 1:
            given = f"got {timeout_s!r} and {max_threads!r}"
            raise ValueError(f"timeout_s must be positive and max_threads at least 1, {given}.")
        self.timeout_s = timeout_s
        self.max_threads = max_threads
        self.lanes = weakref.WeakValueDictionary[Any, asyncio.Lock]()
        """Of events in a loop: what one of them runs there, no other one runs beside it."""
        self._threads = DaemonThreads(max_threads)
        self._loop = ReplaceableLoop()
        self._awaited: set[_Chain] = set()
        self._waited_for: set[_Chain] = set()
        self._watch: asyncio.Task[None] | None = None
        # Not the threads' own affair: they hold on to what they work for.
        weakref.finalize(self, self._threads.close).atexit = False

    def allow_threads(self, num_threads: int) -> None:
        """Let at least so many sync calls run at once."""
        self.max_threads = max(self.max_threads, num_threads)
        self._threads.allow(num_threads)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has threads of its own."""
        settings: Any = {"timeout_s": self.timeout_s, "max_threads": self.max_threads}
        return functools.partial(type(self), **settings), ()

    def run(
        self,
        chains: Sequence[Sequence[Call]],
        timeouts_s: Sequence[Sequence[float]] | float | None = None,
    ) -> list[list[Outcome]]:
        """Run all chains."""
        # timeouts_s: deadline of each call, or one for all; from when it starts, so that a call
        # which waits for a thread or for the loop is not late.
        # Gives one outcome per call, in the order given. After a call that missed its deadline the
        # rest of its chain is not started, and has that error too.
        if timeouts_s is None or isinstance(timeouts_s, int | float):
            same = self.timeout_s if timeouts_s is None else timeouts_s
            timeouts_s = [[same] * len(chain) for chain in chains]
        started = [_Chain(calls, limits) for calls, limits in zip(chains, timeouts_s, strict=True)]
        running = [chain for chain in started if chain.calls]
        self._waited_for.update(running)
        try:
            for chain in running:
                self._start(chain)
            while running:  # until each has ended or was given up
                remaining_s = min(chain.remaining_s() for chain in running)
                if any(chain.generation not in (None, math.inf) for chain in running):
                    remaining_s = min(remaining_s, _LOOK_S)
                wait([chain.done for chain in running], min(remaining_s, threading.TIMEOUT_MAX))
                running = [chain for chain in running if not chain.done.done()]
                for chain in running:
                    self._give_up(chain, only_if_late=True)
                if any(chain.is_async for chain in running):
                    self._loop.replace_if_blocked()
                self._start_apart(running)
        finally:
            self._waited_for.difference_update(started)
        return [chain.outcomes for chain in started]

    async def run_async(self, calls: Sequence[Call], timeouts_s: Sequence[float]) -> list[Outcome]:
        """Run one chain as :meth:`run` does, awaited in an event loop that goes on meanwhile."""
        # Cancelling the caller gives up what still runs. To be called in one event loop only, which
        # is not the one that runs the calls.
        chain = _Chain(calls, timeouts_s)
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def notify(_: Any) -> None:
            with contextlib.suppress(RuntimeError):  # The loop is closed, and nobody waits.
                loop.call_soon_threadsafe(done.set)

        self._start(chain)
        chain.done.add_done_callback(notify)
        if chain.is_async:
            self._awaited.add(chain)
            if self._watch is None or self._watch.done():
                self._watch = loop.create_task(self._watch_loop())
        try:
            while not done.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(chain.remaining_s()):
                        await done.wait()
                if not done.is_set() and self._give_up(chain, only_if_late=True):
                    break
        finally:
            self._awaited.discard(chain)
            if not chain.done.done():  # the caller was cancelled
                self._give_up(chain)
        return chain.outcomes

    async def _watch_loop(self) -> None:
        """Leave a loop that is blocked, as long as somebody awaits what runs there."""
        while self._awaited:
            await asyncio.sleep(_LOOK_S)
            if self._awaited:
                await asyncio.to_thread(self._loop.replace_if_blocked)
            self._start_apart(list(self._awaited))

    def _start(self, chain: "_Chain") -> None:
        if chain.is_async:
            chain.generation = self._loop.generation
            self._start_on(self._loop.submit, chain)
        else:
            chain.thread = self._threads.submit(functools.partial(chain.run_sync, *chain.calls))

    def _start_apart(self, chains: "Sequence[_Chain]") -> None:
        """Start calls that a loop left behind has not begun, in a loop of their own."""
        # One of those that were on that loop blocked it: so may each of the others.
        for chain in chains:
            if chain.leave_loops_before(self._loop.generation):
                self._start_on(self._loop.submit_apart, chain)

    def _start_on(self, submit: Callable[[Any], Future[Any]], chain: "_Chain") -> None:
        chain.task = submit(self._run_async(chain, chain.generation))
        # If the loop is closed, which may be before the task has begun.
        chain.task.add_done_callback(lambda task: chain.give_up() if task.cancelled() else None)

    async def _run_async(self, chain: "_Chain", generation: float | None) -> None:
        if not chain.claim(generation):
            return  # It was given to another loop, because this one was blocked.
        for call in chain.calls:
            if is_async(call):
                await chain.run_async(call)
            else:
                chain.deadline = None  # It is not late before it has a thread.
                chain.thread = self._threads.submit(functools.partial(chain.run_sync, call))
                await asyncio.wrap_future(chain.thread)

    def _give_up(self, chain: "_Chain", *, only_if_late: bool = False) -> bool:
        """Give a chain up, for which no caller waits any more; return whether that is so."""
        gives_up = chain.give_up(only_if_late=only_if_late)
        if gives_up and chain.task is not None:
            chain.task.cancel()
        if gives_up and chain.thread is not None:
            self._threads.give_up(chain.thread)
        return gives_up

    def abandon(self) -> None:
        """Give up what runs now in :meth:`run`: who waits for it gets errors at once."""
        for chain in list(self._waited_for):
            self._give_up(chain)

    def close(self) -> None:
        """Stop the idle threads and the event loop; a later call starts others."""
        self._threads.close()
        self._loop.close()


class _Chain:
    """Calls that run one after the other, and how far they have got."""

    def __init__(self, calls: Sequence[Call], timeouts_s: Sequence[float]) -> None:
        self.calls = calls
        self.is_async = any(is_async(call) for call in calls)
        self.done: Future[None] = Future()
        """When nothing more comes. (Its task's end shows only when the loop runs once more.)"""
        self.task: Future[Any] | None = None
        """On the loop, if one of the calls is async."""
        self.thread: Future[Any] | None = None
        """Of the call that runs on a thread, or waits for one."""
        self.outcomes: list[Outcome] = []
        """One per call, once it is done."""
        self.deadline: float | None = None
        """``None`` while it waits for a thread, or for a loop to begin with it: it gets one."""
        self.generation: float | None = None
        """Of the loop that is to run it, as long as that has not begun."""
        self._timeouts_s = timeouts_s
        self._lock = threading.Lock()
        self._began_at: float | None = None
        self._is_given_up = False

    # For its runner -----------------------------------------------------------------------------

    def run_sync(self, *calls: Call) -> None:
        """Run the next calls, none of them async, on this thread."""
        for call in calls:
            if self._begin():
                self._end(guarded(call))

    async def run_async(self, call: Call) -> None:
        """Run the next call on this loop."""
        if not self._begin():
            return
        try:
            outcome = Outcome(await call())
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # by this side, not by the call itself
            outcome = Outcome(error=error)
        self._end(outcome)

    def _begin(self) -> bool:
        with self._lock:
            if not self._is_given_up:
                self._began_at = time.monotonic()
                self.deadline = self._began_at + self._limit_s()
            return not self._is_given_up

    def _end(self, outcome: Outcome) -> None:
        with self._lock:
            if not self._is_given_up:
                now = time.monotonic()
                assert self._began_at is not None
                self.outcomes.append(Outcome(*outcome[:2], now - self._began_at))
                self._began_at = None
                # Until the next one begins: the loop that has to begin it may be blocked.
                self.deadline = now + self._limit_s()
                if len(self.outcomes) == len(self.calls):
                    self.done.set_result(None)

    def _limit_s(self) -> float:
        return self._timeouts_s[min(len(self.outcomes), len(self.calls) - 1)]

    def claim(self, generation: float | None) -> bool:
        """A loop begins with it; False if that is another one's to do."""
        with self._lock:
            is_own = self.generation == generation
            if is_own:
                self.generation = None
            return is_own

    # For the one who waits ----------------------------------------------------------------------

    def remaining_s(self) -> float:
        """Seconds until a call is late, at least."""
        with self._lock:
            deadline = self.deadline
            return self._limit_s() if deadline is None else max(0.0, deadline - time.monotonic())

    def give_up(self, *, only_if_late: bool = False) -> bool:
        """Nothing more of it starts or counts; whether that is so."""
        with self._lock:
            now, deadline = time.monotonic(), self.deadline
            error: BaseException = asyncio.CancelledError(CLOSED)
            if only_if_late:
                if deadline is None or now < deadline:
                    return False
                error = CallTimeoutError(f"no answer within {self._limit_s():g} s")
            missing = len(self.calls) - len(self.outcomes)
            if missing:
                self._is_given_up = True
                seconds = None if self._began_at is None else now - self._began_at
                self.outcomes += [Outcome(error=error, seconds=seconds)]
                self.outcomes += [Outcome(error=error)] * (missing - 1)
                self.done.set_result(None)
            return True

    def leave_loops_before(self, generation: float) -> bool:
        """Return whether an older loop was to run it, and has not begun: it is to have its own."""
        with self._lock:
            leaves = self.generation is not None and self.generation < generation
            if leaves:
                self.generation = math.inf
            return leaves and not self._is_given_up


def run_call(call: Call) -> Outcome:
    """Run one call here and now; a coroutine function gets an event loop of its own."""
    return guarded(lambda: asyncio.run(call()) if is_async(call) else call())


def is_async(call: Callable[..., Any]) -> bool:
    """Return whether a call has to be awaited."""
    while isinstance(call, functools.partial):
        call = call.func
    plain = getattr(call, "__func__", call)
    if isinstance(plain, types.FunctionType):
        # Only one that has attributes can have been marked as a coroutine function.
        is_marked = plain.__dict__ and inspect.iscoroutinefunction(plain)
        return bool(plain.__code__.co_flags & inspect.CO_COROUTINE or is_marked)
    its = getattr(call, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(its)


def accepted_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any], *, drop: str = ""
) -> dict[str, Any]:
    """The arguments that a function names, or all but ``drop`` if it takes ``**kwargs``."""
    # Of a method that is written in Python, the same for all objects: each row of a batch asks.
    its = getattr(function, "__func__", None) if isinstance(function, types.MethodType) else None
    named = _NAMED.get(its) if isinstance(its, types.FunctionType) else None
    if named is None:
        parameters = inspect.signature(function).parameters
        named = {*parameters}, any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if isinstance(its, types.FunctionType):
            _NAMED[its] = named
    names, takes_any = named
    return {n: v for n, v in arguments.items() if n in names or (takes_any and n != drop)}


def run_all(steps: Iterable[Callable[[], object]]) -> None:
    """Run every step in order, whatever those before it raise; then raise that, or all of it."""
    errors: list[BaseException] = []
    for step in steps:
        try:
            step()
        except BaseException as error:
            errors.append(error)
    if len(errors) > 1:
        raise BaseExceptionGroup("several parts could not be closed", errors)
    if errors:
        raise errors[0]
