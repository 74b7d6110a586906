"""A Transformers model served to asyncio: rows join and leave between two tokens."""

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from torchrl_modules.sampling.params import SamplingParameters
from torchrl_modules.weights.state import UpdateRefused

from .decoding.continuous import ContinuousDecoding
from .decoding.decode_loop import RowStream, TokenDraw
from .decoding.kept_caches import KeptCaches
from .decoding.requests import Request, distribution_of
from .engine_thread import EngineThread
from .protocol import Generation
from .transformers_engine import TransformersEngine


class AsyncTransformersEngine:
    """An :class:`~torchrl_modules.engines.async_protocol.AsyncEngine` over a Transformers model.

    A thread draws one token of every running row at a time. Rows join and leave between two tokens,
    none waits for another, and weights are replaced between two tokens. A response depends on its
    prompt, its seed and the weights, not on the rows beside it. Without a seed, torch's generator
    gives one when it is asked for.

    Models that keep plain keys and values are drawn from in one batch, and go on from what they
    read of a conversation's earlier turns. Others are drawn from in groups of the rows that came
    together, and read whole prompts; a warning says so.

    Args:
        engine: whose model and limits are taken.
        copy_model: draw from a copy of the model, so that the model may be trained meanwhile.
            ``False`` draws from the model itself, which nobody else may change until this is
            closed.
        max_running: most rows that are drawn at a time; more wait, in the order in which they came.
        max_cached_tokens: most tokens of earlier turns that are kept, the latest used ones;
            ``None`` for as many as take 1 GiB.
        stall_timeout_s: an engine that has requests, is not paused and makes no step for so long is
            taken for stuck.
        update_timeout_s: the same for an update of weights.

    Raises:
        ValueError: ``max_running`` is not positive, ``max_cached_tokens`` negative, a timeout not
            positive, or the model can't be sampled from.
    """

    def __init__(
        self,
        engine: TransformersEngine,
        *,
        copy_model: bool = True,
        max_running: int = 256,
        max_cached_tokens: int | None = None,
        stall_timeout_s: float = 30.0,
        update_timeout_s: float = 600.0,
    ) -> None:
        who = type(self).__name__
        if max_running < 1 or (max_cached_tokens is not None and max_cached_tokens < 0):
            raise ValueError(
                f"{who}: max_running must be at least 1 and max_cached_tokens at least 0 or None, "
                f"got {max_running} and {max_cached_tokens}."
            )
        self._engine = engine.copied() if copy_model else engine
        self._decoding = ContinuousDecoding(
            self._engine.inside,
            self._engine.reader,
            precision=self._engine.precision,
            version=lambda: self._engine.version,
            max_running=max_running,
            kept=KeptCaches(max_cached_tokens),
            is_own=copy_model,
        )
        # Of each distribution that is drawn from now.
        self._draws: WeakValueDictionary[Hashable, TokenDraw] = WeakValueDictionary()
        self._thread = EngineThread(
            self._decoding,
            who=who,
            stall_timeout_s=stall_timeout_s,
            command_timeout_s=update_timeout_s,
        )

    @property
    def model(self) -> nn.Module:
        """What it draws from: a copy, unless that was declined."""
        return self._engine.model

    @property
    def version(self) -> int:
        """Of the weights that serve."""
        return self._engine.version

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._engine.vocab_size

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its response together."""
        return self._engine.max_model_len

    @property
    def num_prompt_tokens_read(self) -> int:
        """Tokens of prompts that the model has read: without those that were kept or shared."""
        return self._decoding.num_read

    @property
    def num_tokens_drawn(self) -> int:
        """Tokens of all responses, those that were cancelled included."""
        return self._decoding.num_drawn

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of earlier turns that are kept now."""
        return self._decoding.kept.num_tokens

    async def respond(
        self,
        prompt: Sequence[int],
        params: SamplingParameters,
        *,
        max_new_tokens: int | None = None,
        session: Hashable = None,
    ) -> Generation:
        """See :meth:`torchrl_modules.engines.async_protocol.AsyncEngine.respond`."""
        params.check_stops_are_found()
        budget = params.max_new_tokens if max_new_tokens is None else max_new_tokens
        error = self._engine.refusal(prompt, budget)
        if error is not None:
            self._thread.check_alive()
            return Generation([], [], "error", error)
        seed = params.row_seeds(1)[0]
        seed = int(torch.randint(1 << 31, ())) if seed is None else seed
        loop = asyncio.get_running_loop()
        request = Request(
            tokens=list(prompt),
            params=params,
            budget=budget,
            stream=RowStream(seed),
            session=session,
            loop=loop,
            future=loop.create_future(),
            draw=self._draws.setdefault(distribution_of(params), TokenDraw(params)),
        )
        self._thread.put(
            lambda: self._decoding.waiting.append(request),
            lambda error: self._decoding.deliver([(request, error)]),
        )
        try:
            return await self._thread.wait(request.future)
        finally:
            if not request.future.done():
                request.future.cancel()
                with suppress(RuntimeError):  # It has ended, and so has the request.
                    self._thread.put(lambda: self._decoding.abort(request), _ignore)

    can_keep_caches = True
    """`update_weights` takes ``recompute=False``."""

    async def update_weights(
        self,
        state_dict: Mapping[str, Tensor],
        *,
        version: int | None = None,
        recompute: bool = True,
    ) -> None:
        """See :meth:`torchrl_modules.engines.async_protocol.AsyncEngine.update_weights`.

        Args:
            state_dict: as there.
            version: as there.
            recompute: what running responses have so far is read again, so that the log-probs of
                their further tokens are those of the new weights. ``False`` goes on with what the
                old weights have read, which is faster, and the log-probs are of neither version
                alone. New requests never meet what old weights have read.
        """

        def update() -> None:
            self._decoding.update(
                lambda: self._engine.update_weights(state_dict, version=version), recompute
            )

        await self._thread.call(update, spares=lambda error: isinstance(error, UpdateRefused))

    async def pause(self) -> None:
        """See :meth:`torchrl_modules.engines.async_protocol.AsyncEngine.pause`."""
        await self._thread.set_paused(True)

    async def resume(self) -> None:
        """See :meth:`torchrl_modules.engines.async_protocol.AsyncEngine.resume`."""
        await self._thread.set_paused(False)

    async def check_health(self) -> None:
        """Say whether it is there.

        Raises:
            EngineDied: it died.
            RuntimeError: it is closed.
        """
        self._thread.check_alive()

    def end_session(self, session: Hashable) -> None:
        """See :meth:`torchrl_modules.engines.async_protocol.AsyncEngine.end_session`."""
        with suppress(RuntimeError):  # It has ended, and keeps nothing.
            self._thread.put(lambda: self._decoding.end_session(session), _ignore)

    def close(self) -> None:
        """Abort what is in flight and end the thread. May be called twice.

        Raises:
            EngineDied: a step, or an update, does not end.
        """
        self._thread.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.to_thread(self.close)


def _ignore(_: BaseException) -> None:
    """What ended the engine ended this, too."""
