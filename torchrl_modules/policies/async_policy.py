"""A policy whose turns are taken one by one, many at once, in an event loop."""

import asyncio
from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from torchrl_data.conversation import Conversations
from torchrl_modules.engines.checked_generation import checked
from torchrl_modules.engines.engine import AsyncEngine, Generation

from .base import LLMWrapperBase, finish_reason_of


@dataclass(eq=False)
class AsyncPolicy:
    """Takes turns for conversations, each as soon as it is asked for."""

    # What is new in conversations is encoded together with that of all others that came in since
    # the event loop last ran; nothing else waits for anybody.

    policy: LLMWrapperBase
    engine: AsyncEngine
    _: KW_ONLY
    request_timeout_s: float | None = None
    waiting: list[tuple[Conversations, asyncio.Future[Conversations | Exception]]] = field(
        default_factory=list
    )
    """Conversations to be encoded."""

    @property
    def version(self) -> int:
        """Version of the weights that serve."""
        return self.engine.version

    async def take_turn(
        self,
        conversation: Conversations,
        *,
        max_new_tokens: int | None = None,
        session: Hashable = None,
        agent: str = "",
    ) -> tuple[Conversations, str]:
        """Sample a turn of one conversation. Cancelling the caller aborts it."""
        # Gives the conversation with the turn, and why the turn ended; where it could not be
        # generated the conversation as it was, encoded, and `"error: ..."`.
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Conversations | Exception] = loop.create_future()
        if not self.waiting:
            loop.call_soon(self._encode)
        self.waiting.append((conversation, future))
        encoded = await future
        if isinstance(encoded, Exception):
            return conversation, f"error: {encoded}"
        images = encoded.images(0)
        if images and getattr(self.engine, "images", None) is None:
            return encoded, (
                f"error: the prompt holds images, which {type(self.engine).__name__} does not read "
                "(a StreamingCollector over vLLM does, and an LLMCollector over a "
                "TransformersWrapper)"
            )
        further: dict[str, Any] = {"images": images} if images else {}
        if getattr(self.engine, "by_agent", None):
            further["agent"] = agent
        ids = encoded.ids(0)
        params = self.policy.drawn_by
        if (seeds := params.turn_seeds(encoded)) is not None:
            params = replace(params, seed=seeds[0])
        limit = params.max_new_tokens
        budget = limit if max_new_tokens is None else min(limit, max_new_tokens)
        version = self.engine.version
        deadline = asyncio.timeout(self.request_timeout_s)
        try:
            async with deadline:
                generation: Generation = await self.engine.respond(
                    ids,
                    params,
                    max_new_tokens=self.policy.bounded_turn(budget, len(ids)),
                    session=session,
                    **further,
                )
        except TimeoutError:
            if not deadline.expired():
                raise
            return encoded, f"error: no response within {self.request_timeout_s:g} s"
        given = checked(self.engine, [generation], params, 1)
        given = list(map(self.policy.without_drawn_media, given))
        full = self.policy.append_generations(encoded, given, version, params)
        return full, finish_reason_of(given[0], budget)

    def _encode(self) -> None:
        waiting, self.waiting = self.waiting, []
        try:
            asked = Conversations.cat([conversation for conversation, _ in waiting])
            encoded = self.policy.encoder.encode_rows(asked)
        except Exception as error:
            for _, future in waiting:
                if not future.done():
                    future.set_exception(error)
            return
        for row, (_, future) in enumerate(waiting):
            if not future.done():
                refused = encoded.errors.get(row)
                future.set_result(encoded.conversations[[row]] if refused is None else refused)
