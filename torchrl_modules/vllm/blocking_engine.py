"""An asynchronous engine for callers that wait: whole batches, from any number of threads."""

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from torch import Tensor

from torchrl_modules.engines.protocol import EngineDied, Generation
from torchrl_modules.sampling.params import SamplingParameters

from .async_engine import AsyncVLLMEngine
from .base import EngineOver, Row, WholeBatchEngine
from .stream import VersionedGeneration

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
        async def draw() -> list[Any]:
            calls = [self.engine.draw(row, params) for row in rows]
            return await asyncio.gather(*calls, return_exceptions=True)

        outcomes = self._wait(draw())
        results = [_with_versions(one) for one in outcomes]
        error = next((one for one in outcomes if isinstance(one, BaseException)), None)
        if isinstance(error, EngineDied):
            error.results = results
        if error is not None:
            raise error
        return [result for result in results if result is not None]

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


def _with_versions(outcome: VersionedGeneration | BaseException) -> Generation | None:
    if isinstance(outcome, BaseException):
        return None
    return outcome.generation._replace(versions=outcome.versions)
