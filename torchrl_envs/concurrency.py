"""Many calls of users' code at once: threads, an event loop, deadlines, and closing."""

import asyncio
import contextlib
import functools
import inspect
import logging
import math
import queue
import random
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Final, NamedTuple

# An environment that is lost ends its row.


class EpisodeLostError(Exception):
    """The environment of a rollout can't go on: its server does not answer, its process is gone.

    Raised by a tool, it ends the row: truncated, unscorable, with the error in ``stop_reason``. Any
    other exception is something that the model reads, and may repair.
    """


# A thread pool whose threads do not hold up the end of the program, and may be lost.

_log = logging.getLogger(__name__)
_Job = tuple[Future[Any], Callable[[], Any]]


class DaemonThreads:
    """Runs calls on daemon threads, which are started as they are needed."""

    def __init__(self, limit: int) -> None:
        self._allowed = limit
        self._limit = limit
        """With those that stand in for threads which nobody waits for."""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_alive = 0
        self._num_unfinished = 0
        self._num_lost = 0
        self._running: set[Future[Any]] = set()

    def allow(self, limit: int) -> None:
        """Allow at least so many threads."""
        with self._lock:
            more = max(0, limit - self._allowed)
            self._allowed += more
            self._limit += more
            for _ in range(more):
                self._start_if_needed()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Run a call as soon as a thread is free; that of a cancelled future is not started."""
        future: Future[Any] = Future()
        with self._lock:
            self._num_unfinished += 1
            self._jobs.put((future, call))
            self._start_if_needed()
        return future

    def give_up(self, future: Future[Any]) -> None:
        """Nobody waits for a call any more; until it returns, another thread replaces its own."""
        with self._lock:
            if not future.cancel() and future in self._running:
                self._running.remove(future)
                self._limit += 1
                self._start_if_needed()
                self._count_lost()

    def _count_lost(self) -> None:
        self._num_lost += 1
        if self._num_lost & (self._num_lost - 1) == 0:  # at 1, 2, 4, ...
            _log.warning(
                "%d calls missed their deadlines and go on in their threads, which nothing can "
                "stop. FunctionTools(num_processes=...) runs functions where they can be killed.",
                self._num_lost,
            )

    def close(self) -> None:
        """End each thread when what was submitted is done; a later call starts others."""
        with self._lock:
            for _ in range(self._num_alive):
                self._jobs.put(None)
            self._num_alive = 0

    def _start_if_needed(self) -> None:
        if self._num_alive < min(self._num_unfinished, self._limit):
            self._num_alive += 1
            threading.Thread(target=self._work, name="call", daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            with self._lock:
                runs = future.set_running_or_notify_cancel()
                if runs:
                    self._running.add(future)
            result, error = _result(call) if runs else (None, None)
            is_last = self._is_last(future, runs)
            if error is not None:
                future.set_exception(error)
            elif runs:
                future.set_result(result)
            del job, future, call, result, error  # not to be kept alive by an idle thread
            if is_last:
                return

    def _is_last(self, future: Future[Any], has_run: bool) -> bool:
        """A call is done; whether its thread, which was replaced, has to end."""
        with self._lock:
            self._num_unfinished -= 1
            if future in self._running:
                self._running.remove(future)
            elif has_run:
                self._limit -= 1
            is_last = self._num_alive > self._limit
            self._num_alive -= is_last
            return is_last


def _result(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    # SystemExit and KeyboardInterrupt raised by a tool are the tool's errors, not the program's.
    try:
        return call(), None
    except BaseException as error:
        return None, error


# An event loop on a thread of its own, and another one when a coroutine blocks it.

_REACTS_S: Final = 0.5
"""A loop that runs nothing for so long, though asked to, is blocked."""
_STOP_GRACE_S: Final = 1.0


class LoopThread:
    """One event loop on a daemon thread, started when it is first needed."""

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
        self._ending = self.loop.create_task(_cancel_and_stop() if cancel else _finish_and_stop())


async def _finish_and_stop() -> None:
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(tasks)
    await _stop()


async def _cancel_and_stop() -> None:
    if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_STOP_GRACE_S)
    await _stop()


async def _stop() -> None:
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    loop.stop()


# Users' functions get the arguments that they name, and run many at once, each with a deadline.
#
# Sync and async; results in order.

Call = Callable[[], Any]
_LOOK_S: Final = 0.25
"""How often one looks whether a loop is blocked that has not begun what it was given."""


class Outcome(NamedTuple):
    """What one call gave: a value or an error."""

    value: Any = None
    error: BaseException | None = None
    seconds: float | None = None
    """That the call took; ``None`` where it did not start."""


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
            raise ValueError(
                f"timeout_s must be positive and max_threads at least 1, got {timeout_s!r} and "
                f"{max_threads!r}."
            )
        self.timeout_s = timeout_s
        self.max_threads = max_threads
        self._threads = DaemonThreads(max_threads)
        self._loop = LoopThread()
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
        settings = {"timeout_s": self.timeout_s, "max_threads": self.max_threads}
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
            self._wait(running)
        finally:
            self._waited_for.difference_update(running)
        return [chain.results() for chain in started]

    async def run_async(
        self,
        chains: Sequence[Sequence[Call]],
        timeouts_s: Sequence[Sequence[float]],
    ) -> list[list[Outcome]]:
        """Run all chains as :meth:`run` does, awaited in an event loop that goes on meanwhile."""
        # Cancelling the caller gives up what still runs. To be called in one event loop only, which
        # is not the one that runs the calls.
        started = [_Chain(calls, limits) for calls, limits in zip(chains, timeouts_s, strict=True)]
        running = [chain for chain in started if chain.calls]
        for chain in running:
            self._start(chain)
        try:
            if len(running) == 1:
                await self._await(running[0])
            elif running:
                await asyncio.gather(*map(self._await, running))
        finally:
            for chain in running:
                if not chain.done.done():  # the caller was cancelled
                    chain.finish()
                    self._let_go(chain)
        return [chain.results() for chain in started]

    async def _await(self, chain: "_Chain") -> None:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        chain.done.add_done_callback(lambda _: _notify(loop, done))
        if chain.is_async:
            self._awaited.add(chain)
            if self._watch is None or self._watch.done():
                self._watch = loop.create_task(self._watch_loop())
        try:
            while not done.is_set():
                try:
                    async with asyncio.timeout(chain.remaining_s()):
                        await done.wait()
                except TimeoutError:
                    if chain.give_up_if_late():
                        self._let_go(chain)
                        return
        finally:
            self._awaited.discard(chain)

    async def _watch_loop(self) -> None:
        """Leave a loop that is blocked, as long as somebody awaits what runs there."""
        while self._awaited:
            await asyncio.sleep(_LOOK_S)
            if self._awaited:
                await asyncio.to_thread(self._loop.replace_if_blocked)
            for chain in list(self._awaited):
                if chain.waits_for_loop_before(self._loop.generation):
                    self._start_on(self._loop.submit_apart, chain, math.inf)

    def _start(self, chain: "_Chain") -> None:
        if not chain.is_async:
            chain.thread = self._threads.submit(chain.run)
            return
        self._start_on(self._loop.submit, chain, self._loop.generation)

    def _start_on(
        self, submit: Callable[[Any], Future[Any]], chain: "_Chain", generation: float
    ) -> None:
        chain.give_to(generation)
        chain.task = submit(self._run_async(chain, generation))
        # If the loop is closed, which may be before the task has begun.
        chain.task.add_done_callback(lambda task: chain.finish() if task.cancelled() else None)

    async def _run_async(self, chain: "_Chain", generation: float) -> None:
        if not chain.claim(generation):
            return  # It was given to another loop, because this one was blocked.
        for call in chain.calls:
            if is_async(call):
                await chain.run_async(call)
            else:
                chain.wait_for_thread()
                chain.thread = self._threads.submit(functools.partial(chain.run_sync, call))
                await asyncio.wrap_future(chain.thread)

    def _wait(self, running: "list[_Chain]") -> None:
        """Until every chain has ended or was given up."""
        while running:
            remaining_s = min(chain.remaining_s() for chain in running)
            if any(chain.waits_for_loop_before(math.inf) for chain in running):
                remaining_s = min(remaining_s, _LOOK_S)
            wait([chain.done for chain in running], min(remaining_s, threading.TIMEOUT_MAX))
            running = [chain for chain in running if not chain.done.done()]
            for chain in running:
                if chain.give_up_if_late():
                    self._let_go(chain)
            if any(chain.is_async for chain in running):
                self._loop.replace_if_blocked()
            running = [chain for chain in running if not chain.done.done()]
            for chain in running:
                if chain.waits_for_loop_before(self._loop.generation):
                    # One of those that were on that loop blocked it: so may each of the others.
                    self._start_on(self._loop.submit_apart, chain, math.inf)

    def _let_go(self, chain: "_Chain") -> None:
        if chain.task is not None:
            chain.task.cancel()
        if chain.thread is not None:
            self._threads.give_up(chain.thread)

    def abandon(self) -> None:
        """Give up what runs now in :meth:`run`: who waits for it gets errors at once."""
        for chain in list(self._waited_for):
            chain.finish()
            self._let_go(chain)

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
        self._timeouts_s = timeouts_s
        self._lock = threading.Lock()
        self._outcomes: list[Outcome] = []
        # None while it waits for a thread, or for a loop to begin with it: it gets one.
        self._deadline: float | None = None
        self._began_at: float | None = None
        self._is_given_up = False
        self._generation: float | None = None

    # For its runner -----------------------------------------------------------------------------

    def run(self) -> None:
        """Run all calls, none of them async, on this thread."""
        for call in self.calls:
            self.run_sync(call)

    def run_sync(self, call: Call) -> None:
        """Run the next call on this thread."""
        if self._begin():
            self._end(_guarded(call))

    async def run_async(self, call: Call) -> None:
        """Run the next call on this loop."""
        if self._begin():
            self._end(await _guarded_async(call))

    def wait_for_thread(self) -> None:
        """The next call is not late before it has a thread."""
        with self._lock:
            self._deadline = None

    def _begin(self) -> bool:
        with self._lock:
            if not self._is_given_up:
                self._began_at = time.monotonic()
                self._deadline = self._began_at + self._limit_s()
            return not self._is_given_up

    def _end(self, outcome: Outcome) -> None:
        with self._lock:
            if not self._is_given_up:
                now = time.monotonic()
                self._outcomes.append(outcome._replace(seconds=self._seconds(now)))
                self._began_at = None
                # Until the next one begins: the loop that has to begin it may be blocked.
                self._deadline = now + self._limit_s()
                if len(self._outcomes) == len(self.calls):
                    self.done.set_result(None)

    def _limit_s(self) -> float:
        return self._timeouts_s[min(len(self._outcomes), len(self.calls) - 1)]

    # For the one who waits ----------------------------------------------------------------------

    def remaining_s(self) -> float:
        """It is not late before so many seconds."""
        with self._lock:
            if self._deadline is None:
                return self._limit_s()
            return max(0.0, self._deadline - time.monotonic())

    def give_up_if_late(self) -> bool:
        """Whether a call missed its deadline; then nothing more of the chain starts or counts."""
        with self._lock:
            if self._deadline is None or time.monotonic() < self._deadline:
                return False
            self._fill(CallTimeoutError(f"no answer within {self._limit_s():g} s"))
            return True

    def finish(self) -> None:
        """No more is run of it."""
        with self._lock:
            self._fill(asyncio.CancelledError("closed before it was done"))

    def _seconds(self, now: float) -> float | None:
        return None if self._began_at is None else now - self._began_at

    def _fill(self, error: BaseException) -> None:
        missing = len(self.calls) - len(self._outcomes)
        if missing:
            self._is_given_up = True
            late = Outcome(error=error, seconds=self._seconds(time.monotonic()))
            self._outcomes += [late] + [Outcome(error=error)] * (missing - 1)
            self.done.set_result(None)

    def results(self) -> list[Outcome]:
        """An outcome per call."""
        return self._outcomes

    # Which loop runs it -------------------------------------------------------------------------

    def give_to(self, generation: float) -> None:
        """The loop of a generation is to run it, and no earlier one, if none has begun."""
        with self._lock:
            self._generation = generation

    def claim(self, generation: float) -> bool:
        """A loop begins with it; False if that is another one's to do."""
        with self._lock:
            if self._generation != generation:
                return False
            self._generation = None
            return True

    def waits_for_loop_before(self, generation: float) -> bool:
        """Whether an older loop is to run it, and has not begun."""
        with self._lock:
            return self._generation is not None and self._generation < generation


def _notify(loop: asyncio.AbstractEventLoop, done: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # The loop is closed, and nobody waits.
        loop.call_soon_threadsafe(done.set)


def run_call(call: Call) -> Outcome:
    """Run one call here and now; a coroutine function gets an event loop of its own."""
    return _guarded(lambda: asyncio.run(call()) if is_async(call) else call())


def is_async(call: Callable[..., Any]) -> bool:
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
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # by this side, not by the call itself
        return Outcome(error=error)


def accepted_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any], *, drop: str = ""
) -> dict[str, Any]:
    """The arguments that a function names, or all but ``drop`` if it takes ``**kwargs``."""
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {
        name: value
        for name, value in arguments.items()
        if name in parameters or (takes_any and name != drop)
    }


# Giving back what is held, all of it, whatever goes wrong on the way.


def close_all(
    objects: Sequence[Any], calls: ConcurrentCalls, timeout_s: float | None = None
) -> None:
    """Close objects, all at once."""
    # An error or a missed deadline is logged, with the object's class: the others are closed all
    # the same, and whoever gives something back has nothing to repair.
    closing = [each for each in objects if getattr(each, "close", None) is not None]
    if closing:
        results = calls.run([[each.close] for each in closing], timeout_s)
        for each, (outcome,) in zip(closing, results, strict=True):
            log_close_error(each, outcome)


def log_close_error(closed: Any, outcome: Outcome) -> None:
    """Log what went wrong when an object was closed, if anything did."""
    if outcome.error is not None:
        _log.warning("%s.close failed", type(closed).__name__, exc_info=outcome.error)


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


# Python's global random numbers, for code that draws from them and shares them with others.

_GLOBAL_RANDOM = threading.Lock()


class OwnRandom:
    """A state of Python's global random numbers that is in force inside a ``with`` block only."""

    # Blocks of all threads run one after the other; what is outside finds its state as it was.

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Put the state in force."""
        with _GLOBAL_RANDOM:
            outside = random.getstate()
            random.setstate(self._state)
            try:
                yield
            finally:
                self._state = random.getstate()
                random.setstate(outside)
