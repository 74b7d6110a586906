"""An asynchronous engine for those who ask for whole batches."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from torchrl_modules.sampling.params import SamplingParameters

from .async_protocol import AsyncEngine
from .gathering import gather_rows
from .protocol import EngineDied, Generation

_MAX_DEATHS: Final = 3


class BlockingEngine:
    """An :class:`~torchrl_modules.Engine` over an asynchronous one, for policies and batches.

    Rows whose engine dies are drawn again, as long as another one serves.

    Args:
        engine: such as an :class:`~torchrl_modules.EngineFleet`; it is closed with this.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self.inside = engine
        """The engine that draws."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="blocking-engine")

    @property
    def version(self) -> int:
        """Of the weights that serve."""
        return self.inside.version

    @property
    def vocab_size(self) -> int | None:
        """Token ids are below it, where the engine knows it."""
        return getattr(self.inside, "vocab_size", None)

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of a prompt and its response, where the engine knows it."""
        return getattr(self.inside, "max_model_len", None)

    def check_sampling(self, params: SamplingParameters) -> None:
        """Check that the engine can draw from a distribution.

        Raises:
            ValueError: it can't.
        """
        check = getattr(self.inside, "check_sampling", None)
        if check is not None:
            check(params)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParameters,
        *,
        max_new_tokens: Sequence[int] | None = None,
    ) -> list[Generation]:
        """See :meth:`torchrl_modules.engines.protocol.Engine.generate`."""
        budgets = max_new_tokens or [params.max_new_tokens] * len(prompts)
        seeds = params.row_seeds(len(prompts))

        async def draw_row(prompt: Sequence[int], budget: int, seed: int | None) -> Generation:
            seed = int(torch.randint(1 << 31, ())) if seed is None else seed
            own = replace(params, seed=seed)  # Drawn again, it is the same.
            for _ in range(_MAX_DEATHS):
                with suppress(EngineDied):
                    return await self.inside.respond(prompt, own, max_new_tokens=budget)
            return await self.inside.respond(prompt, own, max_new_tokens=budget)

        rows = map(draw_row, prompts, budgets, seeds)
        return self._thread.submit(lambda: asyncio.run(gather_rows(rows))).result()

    def update_weights(
        self, state_dict: Mapping[str, Tensor], *, version: int | None = None
    ) -> None:
        """See :meth:`torchrl_modules.engines.async_protocol.AsyncEngine.update_weights`."""

        async def update() -> None:
            await self.inside.update_weights(state_dict, version=version)

        self._thread.submit(lambda: asyncio.run(update())).result()

    def close(self) -> None:
        """Close the engine. May be called twice."""
        self._thread.shutdown()
        self.inside.close()
