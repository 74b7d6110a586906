"""A response while it is drawn: tokens as they come, and the version that drew each."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple, Self

from torchrl_modules.engines.engine import Generation, VersionSpan
from torchrl_modules.engines.responding_engine import VersionedGeneration
from torchrl_modules.sampling.stop_strings import StopStrings


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
