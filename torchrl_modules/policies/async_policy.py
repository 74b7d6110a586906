"""A policy whose turns are taken one by one, many at once, in an event loop."""

import asyncio
from collections.abc import Hashable
from typing import NamedTuple

from torchrl_data.conversation.conversations import Conversations
from torchrl_modules.engines.async_protocol import AsyncEngine
from torchrl_modules.engines.protocol import Generation

from .base import LLMWrapperBase, finish_reason_of


class _Waiting(NamedTuple):
    conversation: Conversations
    future: "asyncio.Future[Conversations | Exception]"


class AsyncPolicy:
    """Takes turns for conversations, each as soon as it is asked for."""

    # What is new in conversations is encoded together with that of all others that came in since
    # the event loop last ran; nothing else waits for anybody.

    def __init__(
        self,
        policy: LLMWrapperBase,
        engine: AsyncEngine,
        *,
        request_timeout_s: float | None = None,
    ) -> None:
        self.policy = policy
        self.engine = engine
        self._request_timeout_s = request_timeout_s
        self._waiting: list[_Waiting] = []

    @property
    def version(self) -> int:
        """Of the weights that serve."""
        return self.engine.version

    async def take_turn(
        self,
        conversation: Conversations,
        *,
        max_new_tokens: int | None = None,
        session: Hashable = None,
    ) -> tuple[Conversations, str]:
        """Sample a turn of one conversation. Cancelling the caller aborts it."""
        # Gives the conversation with the turn, and why the turn ended; where it could not be
        # generated the conversation as it was, encoded, and `"error: ..."`.
        encoded = await self._encoded(conversation)
        if isinstance(encoded, Exception):
            return conversation, f"error: {encoded}"
        if encoded.images(0):
            return encoded, (
                "error: the prompt holds images, which engines of a StreamingCollector do not read "
                "(LLMCollector over a TransformersWrapper does)"
            )
        ids = encoded.ids(0)
        limit = self.policy.sampling.max_new_tokens
        budget = limit if max_new_tokens is None else min(limit, max_new_tokens)
        version = self.engine.version
        deadline = asyncio.timeout(self._request_timeout_s)
        try:
            async with deadline:
                generation: Generation = await self.engine.respond(
                    ids,
                    self.policy.sampling,
                    max_new_tokens=self.policy.bounded_turn(budget, len(ids)),
                    session=session,
                )
        except TimeoutError:
            if not deadline.expired():
                raise
            return encoded, f"error: no response within {self._request_timeout_s:g} s"
        full = self.policy.append_generations(encoded, [generation], version)
        return full, finish_reason_of(generation)

    async def _encoded(self, conversation: Conversations) -> Conversations | Exception:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Conversations | Exception] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._encode)
        self._waiting.append(_Waiting(conversation, future))
        return await future

    def _encode(self) -> None:
        waiting, self._waiting = self._waiting, []
        asked = Conversations.cat([each.conversation for each in waiting])
        try:
            encoded = self.policy.encoder.encode_rows(asked)
        except Exception as error:
            for each in waiting:
                if not each.future.done():
                    each.future.set_exception(error)
            return
        for row, each in enumerate(waiting):
            if not each.future.done():
                refused = encoded.errors.get(row)
                each.future.set_result(encoded.conversations[[row]] if refused is None else refused)
