"""Asynchronous engine of whole responses, over whatever draws one."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from torchrl_data.templates.image_processor import ImageProcessor
from torchrl_modules.sampling.parameters import SamplingParameters

from .engine import EngineOver, Generation, VersionSpan
from .whole_batch_engine import Row, finished


class VersionedGeneration(NamedTuple):
    """A response, and the versions of the weights that drew it."""

    generation: Generation
    """The whole response; ``finish_reason`` may also be ``"abort"``, with the tokens so far."""
    versions: list[VersionSpan]
    """In order, without gaps, from 0 to the number of tokens."""


class RespondingEngine(EngineOver, ABC):
    """Gives whole responses, by whatever draws one."""

    @property
    def images(self) -> ImageProcessor | None:
        """What images become; ``None`` where rows with images are refused."""
        return getattr(self._inside, "images", None)

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParameters,
        *,
        max_new_tokens: int | None = None,
        images: Sequence[str] = (),
    ) -> VersionedGeneration:
        """Draw one response. Cancelling the caller aborts the request.

        It takes and raises what `submit` does; also `EngineDied` if there is no progress.

        Returns:
            The response, with the versions that drew it.
        """
        drawn = await self.respond(prompt, params, max_new_tokens=max_new_tokens, images=images)
        return VersionedGeneration(drawn._replace(versions=()), list(drawn.versions))

    async def respond(
        self,
        prompt: Sequence[int],
        params: SamplingParameters,
        *,
        max_new_tokens: int | None = None,
        session: Hashable = None,
        images: Sequence[str] = (),
    ) -> Generation:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.respond`.

        An engine of a library finds what it has read by the tokens alone, so ``session`` changes
        nothing.
        """
        del session
        drawn = await self.draw(self._row(prompt, params, max_new_tokens, images), params)
        return finished(drawn, params)

    def end_session(self, session: Hashable) -> None:
        """Nothing: what was not used for the longest time is forgotten."""

    @abstractmethod
    async def draw(self, row: Row, params: SamplingParameters) -> Generation:
        """Draw one response and say which versions drew it; with a seed of its own."""

    def _row(
        self,
        prompt: Sequence[int],
        params: SamplingParameters,
        max_new_tokens: int | None,
        images: Sequence[str],
    ) -> Row:
        self.check_sampling(params)
        budget = params.max_new_tokens if max_new_tokens is None else max_new_tokens
        return Row(prompt, budget, params.row_seeds(1)[0], images)
