"""An asynchronous engine for callers that wait: whole batches, from any number of threads."""

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Self, TypeVar

from torch import Tensor

from torchrl_modules.engines.protocol import EngineDied, Generation
from torchrl_modules.sampling.params import SamplingParameters

from .async_engine import AsyncVLLMEngine
from .stream import VersionedGeneration

T = TypeVar("T")


class BlockingVLLMEngine:
    """An :class:`~torchrl_modules.engines.protocol.Engine` over an `AsyncVLLMEngine`.

    Calls of several threads share the engine's steps, and weights can be updated while they wait:
    each response then says which version drew which token.

    Args:
        engine: stays usable by itself; it is not closed with this.
    """

    def __init__(self, engine: AsyncVLLMEngine) -> None:
        self.engine = engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="vllm-callers", daemon=True
        )
        self._thread.start()

    @property
    def version(self) -> int:
        """Of the weights that serve."""
        return self.engine.version

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.engine.vocab_size

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its response together."""
        return self.engine.max_model_len

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParameters,
        *,
        max_new_tokens: Sequence[int] | None = None,
    ) -> list[Generation]:
        """Draw one response per prompt; see :meth:`torchrl_modules.Engine.generate`.

        Args:
            prompts: as for `VLLMEngine.generate`.
            params: as for `VLLMEngine.generate`.
            max_new_tokens: as for `VLLMEngine.generate`.

        Raises:
            EngineDied: the engine ended, or makes no progress.
            ValueError: ``max_new_tokens`` has not one value per prompt.
        """
        budgets = max_new_tokens
        if budgets is None:
            budgets = [params.max_new_tokens] * len(prompts)
        if len(budgets) != len(prompts):
            raise ValueError(
                f"BlockingVLLMEngine: {len(prompts)} prompts, but {len(budgets)} max_new_tokens."
            )

        async def draw() -> list[Any]:
            calls = [
                self.engine.generate(prompt, params, max_new_tokens=budget)
                for prompt, budget in zip(prompts, budgets, strict=True)
            ]
            return await asyncio.gather(*calls, return_exceptions=True)

        outcomes = self._wait(draw())
        error = next((one for one in outcomes if isinstance(one, BaseException)), None)
        if error is None:
            return [_with_figures(one, params) for one in outcomes]
        if isinstance(error, EngineDied):
            error.results = [
                None if isinstance(one, BaseException) else _with_figures(one, params)
                for one in outcomes
            ]
        raise error

    def update_weights(
        self, state_dict: Mapping[str, Tensor], *, version: int | None = None
    ) -> None:
        """Replace the weights, all or none, between two tokens of what is in flight.

        Args:
            state_dict: as for `VLLMEngine.update_weights`.
            version: as for `VLLMEngine.update_weights`.

        Raises:
            EngineDied: the engine ended.
            TypeError: as for `VLLMEngine.update_weights`.
            ValueError: as for `VLLMEngine.update_weights`.
        """
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
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _with_figures(result: VersionedGeneration, params: SamplingParameters) -> Generation:
    generation = result.generation._replace(versions=result.versions)
    if params.untempered_log_probs:  # the same, `check_reported` says
        generation = generation._replace(untempered_log_probs=generation.log_probs)
    return generation
