"""A synchronous engine served to asyncio: requests become batches."""

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from torch import Tensor

from torchrl_modules.sampling.params import SamplingParameters

from .protocol import Engine, Generation, VersionSpan


class _Request(NamedTuple):
    session: Any
    prompt: Sequence[int]
    params: SamplingParameters
    budget: int
    future: "asyncio.Future[Generation]"


class BatchingEngine:
    """An :class:`~torchrl_modules.engines.async_protocol.AsyncEngine` over one that draws batches.

    A batch holds whoever asked while the last one was drawn, and is drawn in a thread; updates come
    between two batches. With ``num_expected`` it waits until so many have asked and puts them in
    the order of their sessions: what is drawn then is, to the bit, what the engine draws for the
    same batch when it is called by itself.

    Args:
        engine: draws the batches.
        num_expected: how many requests make a batch; asked whenever one comes in, and by
            :meth:`check`. Without it nobody is waited for.
    """

    def __init__(self, engine: Engine, *, num_expected: Callable[[], float] | None = None) -> None:
        self.inside = engine
        """The engine that draws."""
        self._num_expected = num_expected
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batching-engine")
        self._waiting: list[_Request] = []
        self._drawing: asyncio.Task[None] | None = None
        self._running = asyncio.Event()
        self._running.set()
        self._is_closed = False

    @property
    def model(self) -> Any:
        """What it draws from, where that is in this process."""
        return getattr(self.inside, "model", None)

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

    async def respond(
        self,
        prompt: Sequence[int],
        params: SamplingParameters,
        *,
        max_new_tokens: int | None = None,
        session: Hashable = None,
    ) -> Generation:
        """See :meth:`torchrl_modules.engines.async_protocol.AsyncEngine.respond`."""
        self._check_open()
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        budget = params.max_new_tokens if max_new_tokens is None else max_new_tokens
        request = _Request(session, prompt, params, budget, future)
        self._waiting.append(request)
        self.check()
        try:
            return await future
        finally:
            if request in self._waiting:  # the caller was cancelled
                self._waiting.remove(request)
                self.check()

    def check(self) -> None:
        """Begin a batch if everybody who is expected has asked."""
        if self._drawing is not None or not self._waiting:
            return
        if self._num_expected is not None and len(self._waiting) < self._num_expected():
            return
        self._drawing = asyncio.get_running_loop().create_task(self._draw())

    async def _draw(self) -> None:
        try:
            await asyncio.sleep(0)  # whoever is ready now comes along
            await self._running.wait()
            first = self._waiting[0].params if self._waiting else None
            batch = [request for request in self._waiting if request.params is first]
            self._waiting = [request for request in self._waiting if request.params is not first]
            if self._num_expected is not None:
                batch.sort(key=lambda request: request.session)
            if batch:
                await self._answer(batch)
        finally:
            self._drawing = None
            if not self._is_closed:
                self.check()

    async def _answer(self, batch: list[_Request]) -> None:
        loop = asyncio.get_running_loop()
        try:
            generations = await loop.run_in_executor(self._thread, self._generate, batch)
        except Exception as error:
            for request in batch:
                if not request.future.done():
                    request.future.set_exception(error)
            return
        for request, generation in zip(batch, generations, strict=True):
            if not request.future.done():
                request.future.set_result(generation)

    def _generate(self, batch: list[_Request]) -> list[Generation]:
        version = self.inside.version
        generations = self.inside.generate(
            [request.prompt for request in batch],
            batch[0].params,
            max_new_tokens=[request.budget for request in batch],
        )
        return [
            each
            if each.versions or not each.ids
            else each._replace(versions=[VersionSpan(version, 0, len(each.ids))])
            for each in generations
        ]

    async def update_weights(
        self, state_dict: Mapping[str, Tensor], *, version: int | None = None
    ) -> None:
        """See :meth:`torchrl_modules.engines.async_protocol.AsyncEngine.update_weights`."""
        self._check_open()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(
            self._thread, lambda: self.inside.update_weights(state_dict, version=version)
        )

    async def pause(self) -> None:
        """Begin no further batch; one that is drawn is drawn to its end."""
        self._running.clear()

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self._running.set()

    def end_session(self, session: Hashable) -> None:
        """Nothing is kept."""

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("BatchingEngine is closed.")

    def close(self) -> None:
        """Take nothing more on; the engine inside stays open, and is free."""
        self._is_closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)
