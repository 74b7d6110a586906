"""vLLM's engines for callers that wait, and with a server of their own."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torchrl_modules.engines.blocking_engine import BlockingEngine
from torchrl_modules.engines.engine import Generation
from torchrl_modules.engines.loop_thread import gather_rows
from torchrl_modules.engines.server_engines import OwnedServer
from torchrl_modules.engines.whole_batch_engine import KeptAdapters, Row, WholeBatchEngine
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.weights.adapter_weights import AdapterWeights

from .async_engine import AsyncVLLMEngine
from .server_engine import VLLMServerEngine


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
        """See `WholeBatchEngine.keep_adapters`."""
        return self._loop.run(self.engine.keep_adapters(weights))

    def drop_adapters(self, kept: KeptAdapters) -> None:
        """See `WholeBatchEngine.drop_adapters`."""
        self._loop.run(self.engine.drop_adapters(kept))

    def close(self) -> None:
        """End the thread that waits; the engine goes on. May be called twice."""
        self._loop.close()


class OwnServerEngine(OwnedServer):
    """An :class:`~torchrl_modules.AsyncEngine` that has its vLLM server to itself.

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
        super().__init__(start, VLLMServerEngine, **client_settings)
