"""Asynchronous engines for callers that wait, and engines that block for callers that await."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, Self, TypeVar

from torch import Tensor

from torchrl_modules.engines.gathering import gather_rows
from torchrl_modules.engines.load import EngineLoad
from torchrl_modules.engines.protocol import Generation, VersionSpan
from torchrl_modules.sampling.params import SamplingParameters

from .async_engine import AsyncVLLMEngine
from .base import EngineOver, Row, WholeBatchEngine
from .client import VLLMServerEngine
from .http import Interrupt
from .stream import RespondingEngine, VersionedGeneration
from .supervised import SupervisedEngine

T = TypeVar("T")
_CLOSE_TIMEOUT_S = 10.0


class BlockingVLLMEngine(EngineOver, WholeBatchEngine):
    """An :class:`~torchrl_modules.engines.protocol.Engine` over an `AsyncVLLMEngine`."""

    # Calls of several threads share the engine's steps, and weights can be updated while they wait:
    # each response then says which version drew which token.

    def __init__(self, engine: AsyncVLLMEngine) -> None:
        self.engine = self._inside = engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="vllm-callers", daemon=True
        )
        self._thread.start()

    def _draw(self, rows: list[Row], params: SamplingParameters) -> list[Generation]:
        async def draw(row: Row) -> Generation:
            drawn = await self.engine.draw(row, params)
            return drawn.generation._replace(versions=drawn.versions)

        return self._wait(gather_rows(map(draw, rows)))

    def update_weights(
        self, state_dict: Mapping[str, Tensor], *, version: int | None = None
    ) -> None:
        """See :meth:`~torchrl_modules.vllm.async_engine.AsyncVLLMEngine.update_weights`."""
        self._wait(self.engine.update_weights(state_dict, version=version))

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        # The calls have deadlines of their own: `stall_timeout_s` of the engine.
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # The caller was interrupted: abort what it asked for.
            raise

    def close(self) -> None:
        """End the thread that waits; the engine goes on. May be called twice."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise RuntimeError(
                f"BlockingVLLMEngine: its thread has not ended within {_CLOSE_TIMEOUT_S:.0f} s."
            )
        self._loop.close()


class AsyncServerEngine(RespondingEngine):
    """An :class:`~torchrl_modules.engines.async_protocol.AsyncEngine` over a vLLM server.

    A thread waits for each response; more callers than the client has connections stand in line.

    Args:
        engine: the client, or a server that is replaced when it dies; it is not closed with this.
        num_threads: most responses at a time; at most the client's ``num_connections``.

    Raises:
        ValueError: ``num_threads`` is not positive.
    """

    def __init__(
        self, engine: VLLMServerEngine | SupervisedEngine, *, num_threads: int = 128
    ) -> None:
        if num_threads < 1:
            raise ValueError(f"AsyncServerEngine: num_threads must be at least 1, {num_threads}.")
        self._inside: VLLMServerEngine | SupervisedEngine = engine
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="vllm-responses")
        self._control = ThreadPoolExecutor(1, thread_name_prefix="vllm-control")
        self._prober = ThreadPoolExecutor(1, thread_name_prefix="vllm-prober")
        self._running: set[Interrupt] = set()
        self._is_closed = False

    async def draw(self, row: Row, params: SamplingParameters) -> VersionedGeneration:
        """See `RespondingEngine.draw`."""
        version, interrupt = self.version, Interrupt()
        call = self._submit(self._pool, lambda: self._inside.draw_one(row, params, interrupt))
        self._running.add(interrupt)
        try:
            generation = await call
        finally:
            self._running.discard(interrupt)
            if call.cancelled():
                interrupt()
        # A server that has no labels has one version.
        spans = generation.versions or [VersionSpan(version, 0, len(generation.ids))]
        return VersionedGeneration(generation, list(spans) if generation.ids else [])

    can_keep_caches = True
    """`update_weights` takes ``recompute=False``."""

    async def update_weights(
        self,
        state_dict: Mapping[str, Tensor],
        *,
        version: int | None = None,
        recompute: bool = True,
    ) -> None:
        """See :meth:`~torchrl_modules.vllm.client.VLLMServerEngine.update_weights`."""
        update = partial(
            self._inside.update_weights, state_dict, version=version, recompute=recompute
        )
        await self._submit(self._control, update)

    async def pause(self) -> None:
        """See :meth:`torchrl_modules.engines.async_protocol.AsyncEngine.pause`."""
        await self._submit(self._control, self._inside.pause)

    async def resume(self) -> None:
        """See :meth:`torchrl_modules.engines.async_protocol.AsyncEngine.resume`."""
        await self._submit(self._control, lambda: self._inside.pause(paused=False))

    async def check_health(self) -> None:
        """Ask the server whether it is well.

        Raises:
            EngineDied: it is not, or it is gone.
            ConnectionError: it did not answer in time.
        """
        await self._submit(self._prober, self._inside.check_health)

    @property
    def tells_load(self) -> bool:
        """Whether the server reports its load, which it is asked for."""
        return self._inside.tells_load

    async def measure_load(self) -> EngineLoad:
        """See :meth:`~torchrl_modules.vllm.client.VLLMServerEngine.measure_load`."""
        return await self._submit(self._prober, self._inside.measure_load)

    def _submit(self, pool: ThreadPoolExecutor, function: Callable[[], T]) -> "asyncio.Future[T]":
        if self._is_closed:
            raise RuntimeError("AsyncServerEngine is closed.")
        return asyncio.wrap_future(pool.submit(function))

    def close(self) -> None:
        """Abort what is in flight and end the threads; the server goes on. May be called twice."""
        self._is_closed = True
        for interrupt in list(self._running):
            interrupt()
        for pool in (self._pool, self._control, self._prober):
            pool.shutdown(cancel_futures=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.to_thread(self.close)


class OwnServerEngine(AsyncServerEngine):
    """An :class:`~torchrl_modules.AsyncEngine` that has its server to itself.

    Args:
        start: the URL of a server that runs; or gives a context manager that starts one, gives its
            URL, and ends it on leaving, such as ``partial(start_server, "Qwen/Qwen3-0.6B")``.
        client_settings: of :class:`~torchrl_modules.vllm.client.VLLMServerEngine`, for instance
            ``stall_timeout_s``.

    Raises:
        ConnectionError: nobody answers at the URL.
        RuntimeError: the server can't be started, or takes no token ids.
    """

    def __init__(
        self, start: str | Callable[[], AbstractContextManager[str]], **client_settings: Any
    ) -> None:
        self.name = start if isinstance(start, str) else ""
        """Its URL, where that stays the same."""
        with ExitStack() as stack:
            url = stack.enter_context(nullcontext(start) if isinstance(start, str) else start())
            client = VLLMServerEngine(url, **client_settings)
            super().__init__(client)
            self._client = client
            self._process = stack.pop_all()

    def close(self) -> None:
        """Abort what is in flight, and end the server if it was started here."""
        self._process.close()  # first, so that nobody waits for it any more
        super().close()
        self._client.close()
