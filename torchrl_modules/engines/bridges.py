"""Between engines that block and engines for asyncio, in both directions."""

import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from torchrl_data.checks import POSITIVE, check_numbers
from torchrl_modules.sampling.parameters import SamplingParameters

from .engine import (
    AsyncEngine,
    ClosedOnLeaving,
    Engine,
    EngineDied,
    EngineOver,
    Generation,
    checked,
    seeded,
)

# Rows that are drawn together.


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


# The thread that steps an engine for asyncio, and runs commands between two steps.

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


# A synchronous engine served to asyncio: requests become batches.


class _Request(NamedTuple):
    session: Any
    prompt: Sequence[int]
    params: SamplingParameters
    budget: int
    future: "asyncio.Future[Generation]"


def _are_alike(first: SamplingParameters, other: SamplingParameters) -> bool:
    """Return whether two requests can be drawn in one batch: they differ in their seeds at most."""
    if first is other:
        return True
    if None in (first.seed, other.seed):
        return False
    return replace(first, seed=0) == replace(other, seed=0)


class BatchingEngine(EngineOver):
    """An :class:`~torchrl_modules.engines.engine.AsyncEngine` over one that draws batches.

    A batch holds whoever asked while the last one was drawn, and is drawn in a thread; updates come
    between two batches. With ``num_expected`` it waits until so many have asked and puts them in
    the order of their sessions: what is drawn then is, to the bit, what the engine draws for the
    same batch when it is called by itself.

    Args:
        engine: draws the batches.
        num_expected: how many requests make a batch; asked whenever one comes in, and by
            :meth:`check`. Without it nobody is waited for.
    """

    def __init__(self, engine: Engine, *, num_expected: Callable[[], float] | None = None) -> None:
        self._inside = engine
        self._num_expected = num_expected
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batching-engine")
        self._waiting: list[_Request] = []
        self._drawing: asyncio.Task[None] | None = None
        self._running = asyncio.Event()
        self._running.set()
        self._is_closed = False

    @property
    def model(self) -> Any:
        """The model that it draws from, where that is in this process."""
        return getattr(self._inside, "model", None)

    async def respond(
        self,
        prompt: Sequence[int],
        params: SamplingParameters,
        *,
        max_new_tokens: int | None = None,
        session: Hashable = None,
    ) -> Generation:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.respond`."""
        self._check_open()
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        budget = params.max_new_tokens if max_new_tokens is None else max_new_tokens
        request = _Request(session, prompt, params, budget, future)
        self._waiting.append(request)
        self.check()
        try:
            return await future
        finally:
            if request in self._waiting:  # the caller was cancelled
                self._waiting.remove(request)
                self.check()

    def check(self) -> None:
        """Begin a batch if everybody who is expected has asked."""
        if self._drawing is not None or not self._waiting:
            return
        if self._num_expected is not None and len(self._waiting) < self._num_expected():
            return
        self._drawing = asyncio.get_running_loop().create_task(self._draw())

    async def _draw(self) -> None:
        try:
            await asyncio.sleep(0)  # whoever is ready now comes along
            await self._running.wait()
            waiting, self._waiting = self._waiting, []
            batch: list[_Request] = []
            for request in waiting:
                is_alike = not batch or _are_alike(batch[0].params, request.params)
                (batch if is_alike else self._waiting).append(request)
            if self._num_expected is not None:
                batch.sort(key=lambda request: request.session)
            if batch:
                await self._answer(batch)
        finally:
            self._drawing = None
            if not self._is_closed:
                self.check()

    async def _answer(self, batch: list[_Request]) -> None:
        def generate() -> list[Generation]:
            version = self._inside.version
            seeds = [each.params.seed for each in batch if each.params.seed is not None]
            params, own = seeded(self._inside, batch[0].params, seeds)
            generations = self._inside.generate(
                [request.prompt for request in batch],
                params,
                max_new_tokens=[request.budget for request in batch],
                **own,
            )
            given = checked(self._inside, generations, batch[0].params, len(batch))
            return [each.drawn_by(version) for each in given]

        outcomes: Sequence[Generation | Exception]
        try:
            outcomes = await asyncio.get_running_loop().run_in_executor(self._thread, generate)
        except Exception as error:
            outcomes = [error] * len(batch)
        for request, outcome in zip(batch, outcomes, strict=True):
            if request.future.done():
                continue
            if isinstance(outcome, Exception):
                request.future.set_exception(outcome)
            else:
                request.future.set_result(outcome)

    async def update_weights(
        self, state_dict: Mapping[str, Tensor], *, version: int | None = None
    ) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.update_weights`."""
        self._check_open()
        update = partial(self._inside.update_weights, state_dict, version=version)
        await asyncio.get_running_loop().run_in_executor(self._thread, update)

    async def pause(self) -> None:
        """Begin no further batch; one that is drawn is drawn to its end."""
        self._running.clear()

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self._running.set()

    def end_session(self, session: Hashable) -> None:
        """Nothing is kept."""

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("BatchingEngine is closed.")

    def close(self) -> None:
        """Take nothing more on; the engine inside stays open, and is free."""
        self._is_closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)


# An asynchronous engine for those who ask for whole batches.

_MAX_DEATHS: Final = 3


class BlockingEngine(EngineOver, ClosedOnLeaving):
    """An :class:`~torchrl_modules.Engine` over an asynchronous one, for policies and batches.

    Rows whose engine dies are drawn again, as long as another one serves.

    Args:
        engine: such as an :class:`~torchrl_modules.EngineFleet`; it is closed with this.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._inside = self.inside = engine
        self._loop = LoopThread(type(self).__name__)
        self.images: Any = getattr(engine, "images", None)
        """What images become; ``None`` where rows with images are refused."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParameters,
        *,
        max_new_tokens: Sequence[int] | None = None,
        seeds: Sequence[int | None] | None = None,
        images: Sequence[Sequence[str]] | None = None,
    ) -> list[Generation]:
        """See :meth:`torchrl_modules.engines.engine.Engine.generate`.

        Args:
            prompts: as there.
            params: as there.
            max_new_tokens: as there.
            seeds: one per prompt, in place of the one in ``params``.
            images: as there.

        Raises:
            ValueError: ``max_new_tokens``, ``seeds`` or ``images`` has not one value per prompt.
        """
        budgets = max_new_tokens or [params.max_new_tokens] * len(prompts)
        seeds = seeds or params.row_seeds(len(prompts))
        media = [()] * len(prompts) if images is None else images
        if not len(budgets) == len(seeds) == len(media) == len(prompts):
            raise ValueError(
                f"{type(self).__name__}.generate: {len(prompts)} prompts, but {len(budgets)} "
                f"max_new_tokens, {len(seeds)} seeds and the images of {len(media)}."
            )

        async def draw_row(
            prompt: Sequence[int], budget: int, seed: int | None, own_images: Sequence[str]
        ) -> Generation:
            further: dict[str, Any] = {"images": own_images} if own_images else {}
            seed = int(torch.randint(1 << 31, ())) if seed is None else seed
            own = replace(params, seed=seed)  # Drawn again, it is the same.
            for _ in range(_MAX_DEATHS):
                with suppress(EngineDied):
                    return await self.inside.respond(prompt, own, max_new_tokens=budget, **further)
            return await self.inside.respond(prompt, own, max_new_tokens=budget, **further)

        return self._loop.run(gather_rows(map(draw_row, prompts, budgets, seeds, media)))

    def update_weights(
        self, state_dict: Mapping[str, Tensor], *, version: int | None = None
    ) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.update_weights`."""
        self._loop.run(self.inside.update_weights(state_dict, version=version))

    def close(self) -> None:
        """Close the engine. May be called twice."""
        self._loop.close()
        self.inside.close()


# Which class serves an engine to asyncio.

_SERVER: Final = "torchrl_modules.vllm.bridges:AsyncServerEngine"
_ASYNC: Final = {
    "torchrl_modules.engines.transformers.TransformersEngine": (
        "torchrl_modules.engines.continuous:AsyncTransformersEngine"
    ),
    "torchrl_modules.vllm.engine.VLLMEngine": "torchrl_modules.vllm.async_engine:AsyncVLLMEngine",
    "torchrl_modules.vllm.server_engine.VLLMServerEngine": _SERVER,
}
"""By what an engine is served to asyncio; loaded when it is asked for."""


def open_async(engine: object, **options: Any) -> AsyncEngine:
    """Serve an engine to asyncio; it belongs to what is returned until that is closed.

    Args:
        engine: a ``TransformersEngine``, ``VLLMEngine``, ``VLLMServerEngine`` or
            ``SupervisedEngine``; the URL of a vLLM server; a list of any of these, which are served
            as an :class:`~torchrl_modules.EngineFleet`; what is an :class:`AsyncEngine` already, or
            was made of one; or any other :class:`Engine`, which draws in batches of those that came
            together (:class:`BatchingEngine`).
        options: of the class that serves it, such as ``stall_timeout_s`` of
            :class:`~torchrl_modules.vllm.async_engine.AsyncVLLMEngine`, or of the client of a URL.

    Raises:
        TypeError: nothing here serves such an engine, or an option is not known.
        RuntimeError: the engine is closed or in use elsewhere.
        ConnectionError: nobody answers at the URL.

    Example:
        >>> import asyncio
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> async def main():
        ...     params = SamplingParameters(max_new_tokens=4, min_tokens=4)
        ...     async with open_async(TransformersEngine(tiny_qwen3(len(tokenizer)))) as engine:
        ...         prompts = [tokenizer.encode(text) for text in ("hello", "What is 2 + 2?")]
        ...         return await asyncio.gather(*(engine.respond(ids, params) for ids in prompts))
        >>> [len(generation.ids) for generation in asyncio.run(main())]
        [4, 4]
    """
    if isinstance(engine, str):
        return resolve_name("torchrl_modules.vllm.bridges:OwnServerEngine")(engine, **options)
    if isinstance(engine, list | tuple):
        return resolve_name("torchrl_modules.engines.fleet:EngineFleet")(engine, **options)
    for cls in type(engine).__mro__:
        home = _ASYNC.get(f"{cls.__module__}.{cls.__qualname__}")
        if home is not None:
            return resolve_name(home)(engine, **options)
    if isinstance(engine, BlockingEngine):
        engine = engine.inside
    if isinstance(engine, AsyncEngine):
        if options:
            raise TypeError(
                f"open_async: {type(engine).__name__} is asynchronous already and takes no "
                f"options, got {sorted(options)}. Give them when you build it."
            )
        return engine
    if isinstance(engine, Engine):
        return BatchingEngine(engine, **options)
    raise TypeError(
        "open_async takes an Engine (version, generate, update_weights), an AsyncEngine (respond, "
        "update_weights, pause, resume, end_session, close), the URL of a vLLM server, or a list "
        f"of these, got {type(engine).__name__}."
    )
