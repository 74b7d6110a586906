"""A synchronous engine served to asyncio: requests become batches."""

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from torchrl_modules.sampling.parameters import SamplingParameters

from .checked_generation import checked, seeded
from .engine import Engine, EngineOver, Generation


class _Request(NamedTuple):
    session: Any
    prompt: Sequence[int]
    params: SamplingParameters
    budget: int
    agent: str
    future: "asyncio.Future[Generation]"


def _are_alike(first: SamplingParameters, other: SamplingParameters) -> bool:
    """Return whether two requests can be drawn in one batch: they differ in their seeds at most."""
    if first is other:
        return True
    if None in (first.seed, other.seed):
        return False
    return replace(first, seed=0) == replace(other, seed=0)


class BatchingEngine(EngineOver):
    """An :class:`~torchrl_modules.engines.engine.AsyncEngine` over one that draws batches.

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
        self._inside = engine
        self._num_expected = num_expected
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batching-engine")
        self._waiting: list[_Request] = []
        self._drawing: asyncio.Task[None] | None = None
        self._running = asyncio.Event()
        self._running.set()
        self._is_closed = False

    @property
    def model(self) -> Any:
        """The model that it draws from, where that is in this process."""
        return getattr(self._inside, "model", None)

    @property
    def by_agent(self) -> Any:
        """The engines of agents, of which rows of all are in one batch; ``None`` of one policy."""
        return getattr(self._inside, "by_agent", None)

    async def respond(
        self,
        prompt: Sequence[int],
        params: SamplingParameters,
        *,
        max_new_tokens: int | None = None,
        session: Hashable = None,
        agent: str = "",
    ) -> Generation:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.respond`.

        Args:
            prompt: as there.
            params: as there.
            max_new_tokens: as there.
            session: as there.
            agent: the author of the row, for engines of agents.
        """
        self._check_open()
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        budget = params.max_new_tokens if max_new_tokens is None else max_new_tokens
        request = _Request(session, prompt, params, budget, agent, future)
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
            waiting, self._waiting = self._waiting, []
            batch: list[_Request] = []
            for request in waiting:
                is_alike = not batch or _are_alike(batch[0].params, request.params)
                (batch if is_alike else self._waiting).append(request)
            if self._num_expected is not None:
                batch.sort(key=lambda request: request.session)
            if batch:
                await self._answer(batch)
        finally:
            self._drawing = None
            if not self._is_closed:
                self.check()

    async def _answer(self, batch: list[_Request]) -> None:
        def generate() -> list[Generation]:
            version = self._inside.version
            seeds = [each.params.seed for each in batch if each.params.seed is not None]
            params, own = seeded(self._inside, batch[0].params, seeds)
            if self.by_agent is not None:
                own["agents"] = [request.agent for request in batch]
            generations = self._inside.generate(
                [request.prompt for request in batch],
                params,
                max_new_tokens=[request.budget for request in batch],
                **own,
            )
            given = checked(self._inside, generations, batch[0].params, len(batch))
            return [each.drawn_by(version) for each in given]

        outcomes: Sequence[Generation | Exception]
        try:
            outcomes = await asyncio.get_running_loop().run_in_executor(self._thread, generate)
        except Exception as error:
            outcomes = [error] * len(batch)
        for request, outcome in zip(batch, outcomes, strict=True):
            if request.future.done():
                continue
            if isinstance(outcome, Exception):
                request.future.set_exception(outcome)
            else:
                request.future.set_result(outcome)

    async def update_weights(
        self, state_dict: Mapping[str, Tensor], *, version: int | None = None
    ) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.update_weights`."""
        self._check_open()
        update = partial(self._inside.update_weights, state_dict, version=version)
        await asyncio.get_running_loop().run_in_executor(self._thread, update)

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
