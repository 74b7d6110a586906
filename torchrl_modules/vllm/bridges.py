"""Asynchronous engines for callers that wait, and engines that block for callers that await."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import (
    AbstractContextManager,
    ExitStack,
    nullcontext,
)
from functools import partial
from typing import Any

from torch import Tensor

from torchrl_modules.engines.blocking_engine import BlockingEngine
from torchrl_modules.engines.engine import ClosedOnLeaving, EngineDied, EngineLoad, Generation
from torchrl_modules.engines.loop_thread import gather_rows
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.weights.adapter_weights import AdapterWeights

from .async_engine import AsyncVLLMEngine
from .generation_stream import RespondingEngine
from .server_engine import VLLMServerEngine
from .whole_batch_engine import KeptAdapters, Row, WholeBatchEngine


class BlockingVLLMEngine(WholeBatchEngine, BlockingEngine):
    """An :class:`~torchrl_modules.engines.engine.Engine` over an `AsyncVLLMEngine`."""

    # Calls of several threads share the engine's steps, and weights can be updated while they wait:
    # each response then says which version drew which token.

    # That of the engine inside, which knows the model's own end tokens.
    check_sampling = BlockingEngine.check_sampling  # type: ignore[assignment]
    end_token_ids = BlockingEngine.end_token_ids  # type: ignore[assignment]

    def __init__(self, engine: AsyncVLLMEngine) -> None:
        super().__init__(engine)
        self.engine = engine

    def _draw(self, rows: list[Row], params: SamplingParameters) -> list[Generation]:
        # The calls have deadlines of their own: `stall_timeout_s` of the engine.
        return self._loop.run(gather_rows(self.engine.draw(row, params) for row in rows))

    def keep_adapters(self, weights: AdapterWeights) -> KeptAdapters:
        """See :meth:`~torchrl_modules.vllm.whole_batch_engine.WholeBatchEngine.keep_adapters`."""
        return self._loop.run(self.engine.keep_adapters(weights))

    def drop_adapters(self, kept: KeptAdapters) -> None:
        """See :meth:`~torchrl_modules.vllm.whole_batch_engine.WholeBatchEngine.drop_adapters`."""
        self._loop.run(self.engine.drop_adapters(kept))

    def close(self) -> None:
        """End the thread that waits; the engine goes on. May be called twice."""
        self._loop.close()


class AsyncServerEngine(RespondingEngine, ClosedOnLeaving):
    """An :class:`~torchrl_modules.engines.engine.AsyncEngine` over a vLLM server.

    More callers than the client has connections (its ``num_connections``) stand in line.

    Args:
        engine: the client; it is not closed with this.
    """

    def __init__(self, engine: VLLMServerEngine) -> None:
        self._inside: VLLMServerEngine = engine
        self._control = ThreadPoolExecutor(1, thread_name_prefix="vllm-control")
        self._prober = ThreadPoolExecutor(1, thread_name_prefix="vllm-prober")
        self._running: set[Future[Generation]] = set()
        self._is_closed = False

    async def draw(self, row: Row, params: SamplingParameters) -> Generation:
        """See `RespondingEngine.draw`."""
        self._check_open()
        version, call = self.version, self._inside.draw_one(row, params)
        self._running.add(call)
        try:
            generation = await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and task is not None and not task.cancelling():
                raise EngineDied("AsyncServerEngine was closed.") from None
            raise
        finally:
            self._running.discard(call)
        # A server that has no labels has one version.
        return generation.drawn_by(version)

    can_keep_caches = True
    """`update_weights` takes ``recompute=False``."""

    async def update_weights(
        self,
        state_dict: Mapping[str, Tensor],
        *,
        version: int | None = None,
        recompute: bool = True,
    ) -> None:
        """See :meth:`~torchrl_modules.VLLMServerEngine.update_weights`."""
        update = partial(
            self._inside.update_weights, state_dict, version=version, recompute=recompute
        )
        await self._submit(self._control, update)

    async def pause(self) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.pause`."""
        await self._submit(self._control, self._inside.pause)

    async def resume(self) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.resume`."""
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
        """See :meth:`~torchrl_modules.VLLMServerEngine.measure_load`."""
        return await self._submit(self._prober, self._inside.measure_load)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("AsyncServerEngine is closed.")

    def _submit(self, pool: ThreadPoolExecutor, function: Callable[[], Any]) -> asyncio.Future[Any]:
        self._check_open()
        return asyncio.wrap_future(pool.submit(function))

    def close(self) -> None:
        """Abort what is in flight and end the threads; the server goes on. May be called twice."""
        self._is_closed = True
        for call in list(self._running):
            call.cancel()
        for pool in (self._control, self._prober):
            pool.shutdown(cancel_futures=True)


class OwnServerEngine(AsyncServerEngine):
    """An :class:`~torchrl_modules.AsyncEngine` that has its server to itself.

    Args:
        start: the URL of a server that runs; or gives a context manager that starts one, gives its
            URL, and ends it on leaving, such as ``partial(start_server, "Qwen/Qwen3-0.6B")``.
        client_settings: of :class:`~torchrl_modules.VLLMServerEngine`, for instance
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
