"""A response while it is drawn: tokens as they come, and the version that drew each."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from typing import NamedTuple, Self

from torchrl_data.templates.image_processor import ImageProcessor
from torchrl_modules.engines.engine import (
    EngineOver,
    Generation,
    VersionSpan,
)
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.sampling.stop_strings import StopStrings

from .requests import finished
from .whole_batch_engine import Row


class Delta(NamedTuple):
    """New tokens of a response."""

    ids: list[int]
    """One or more sampled tokens."""
    log_probs: list[float]
    """One per token, in nats, of the distribution that it was drawn from."""
    version: int
    """Of the weights that drew them."""
    sampling_masks: Sequence[bytes] = ()
    """One per token: the tokens that it was drawn from; only when asked for."""


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

        vLLM finds what it has read by the tokens alone, so ``session`` changes nothing.
        """
        del session
        drawn = await self.draw(self._row(prompt, params, max_new_tokens, images), params)
        return finished(drawn, params)

    def end_session(self, session: Hashable) -> None:
        """Nothing: vLLM forgets what was not used for the longest time."""

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


class GenerationStream:
    """A request to an `AsyncVLLMEngine`: iterate for the tokens, or await `result`."""

    # As a context manager it aborts the request on leaving, unless it is finished. Made by
    # `AsyncVLLMEngine.submit`; for one consumer.

    def __init__(
        self,
        abort: Callable[["GenerationStream"], None],
        check: Callable[[], None],
        stall_timeout_s: float,
        stops: StopStrings | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.has_masks = False
        """Its tokens come with what a truncation left."""
        self.request_id: str | None = None
        self.version: int | None = None  # of all its tokens, where that does not change
        self._abort = abort
        self._check = check
        self._stall_timeout_s = stall_timeout_s
        self._queue: asyncio.Queue[Delta | Generation | BaseException] = asyncio.Queue()
        self.deliver = self._queue.put_nowait
        """Takes tokens, why it ended, or what broke the engine; in the stream's event loop."""
        self._stops = stops
        self._drawn: list[int] = []  # the engine's side: what `stops` has been shown
        self._deltas: list[Delta] = []
        self._end: Generation | BaseException | None = None

    def completes_stop_string(self, ids: list[int]) -> bool:
        """Whether these next tokens end the response; called by the engine, in its thread."""
        if self._stops is None:
            return False
        self._drawn += ids
        return self._stops.just_ended(self._drawn)

    def abort(self) -> None:
        """Stop drawing. The result is then what there is, with ``finish_reason="abort"``."""
        self._abort(self)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while self._end is None:
            try:
                async with asyncio.timeout(self._stall_timeout_s):
                    item = await self._queue.get()
            except TimeoutError:
                self._check()
                continue
            if isinstance(item, Delta):
                self._deltas.append(item)
                return item
            self._end = item
        if isinstance(self._end, BaseException):
            raise self._end
        raise StopAsyncIteration

    async def result(self) -> VersionedGeneration:
        """Wait for the end."""
        async for _ in self:
            pass
        assert isinstance(self._end, Generation)
        ids = [token for delta in self._deltas for token in delta.ids]
        log_probs = [value for delta in self._deltas for value in delta.log_probs]
        sets = [each for delta in self._deltas for each in delta.sampling_masks]
        generation = self._end._replace(ids=ids, log_probs=log_probs, sampling_masks=sets)
        return VersionedGeneration(generation, version_spans(self._deltas))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._end is None:
            self.abort()


def version_spans(deltas: list[Delta]) -> list[VersionSpan]:
    """Spans over the tokens of a response, given its parts in order; neighbours are joined.

    Example:
        >>> version_spans([Delta([5, 6], [0.0, 0.0], 0), Delta([7], [0.0], 1)])
        [VersionSpan(version=0, start=0, end=2), VersionSpan(version=1, start=2, end=3)]
    """
    spans: list[VersionSpan] = []
    end = 0
    for delta in deltas:
        start, end = end, end + len(delta.ids)
        if spans and spans[-1].version == delta.version:
            start = spans.pop().start
        spans.append(VersionSpan(delta.version, start, end))
    return spans
