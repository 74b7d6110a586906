"""An asynchronous engine for those who ask for whole batches."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from torchrl_modules.sampling.parameters import SamplingParameters

from .engine import AsyncEngine, ClosedOnLeaving, EngineDied, EngineOver, Generation
from .loop_thread import LoopThread, gather_rows

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
            own = params
            if seed is not None or self.takes_seeds:  # Drawn again, it is the same.
                seed = int(torch.randint(1 << 31, ())) if seed is None else seed
                own = replace(params, seed=seed)
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
