"""A Transformers model served to asyncio: rows join and leave between two tokens."""

import asyncio
import random
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_data.checks import check_counts
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.weights.expected_weights import UpdateRefused

from .continuous import ContinuousDecoding
from .drawn_tokens import TokenDraw
from .engine import Generation
from .engine_thread import EngineThread, SteppedEngine
from .kept_caches import KeptCaches
from .request import Request, drawn_alike
from .transformers import TransformersEngine


class AsyncTransformersEngine(ChecksAttributes, SteppedEngine):
    """An :class:`~torchrl_modules.engines.engine.AsyncEngine` over a Transformers model.

    A thread draws one token of every running row at a time, or as many as ``tokens_per_look`` of
    the engine says. Rows join and leave between two of these, none waits for another, and weights
    are replaced between two. A response depends on its
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
        shared: of :func:`~.shared_weights.copies_of_shared`: what the copy has in common with those
            of other engines.
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
        shared: Mapping[int, Tensor] | None = None,
        max_running: int = 256,
        max_cached_tokens: int | None = None,
        stall_timeout_s: float = 30.0,
        update_timeout_s: float = 600.0,
    ) -> None:
        who = type(self).__name__
        check_counts(who, max_running=max_running)
        check_counts(who, 0, max_cached_tokens=max_cached_tokens)
        self._inside = self._engine = engine.copied(shared) if copy_model else engine
        self._decoding = ContinuousDecoding(
            self._engine,
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
        """The model that it draws from: a copy, unless that was declined."""
        return self._engine.model

    @property
    def num_prompt_tokens_read(self) -> int:
        """Tokens of prompts that the model has read: without those that were kept or shared."""
        slots = self._decoding.slots
        return 0 if slots is None else slots.num_read

    @property
    def num_tokens_drawn(self) -> int:
        """Tokens of all responses, those that were cancelled included."""
        return self._decoding.num_drawn

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of earlier turns that are kept now."""
        return self._decoding.kept.num_tokens

    def check_sampling(self, params: SamplingParameters) -> None:
        """Check that the engine can report what is asked for.

        Args:
            params: the distribution, and what to report of each token.

        Raises:
            ValueError: it is asked for the experts of tokens.
        """
        if params.routed_experts:
            raise ValueError(
                "AsyncTransformersEngine: rows that join and leave between two tokens have no "
                "record of their experts. Draw whole batches (collector=sync, LLMCollector), or "
                "leave routed_experts out."
            )

    async def respond(
        self,
        prompt: Sequence[int],
        params: SamplingParameters,
        *,
        max_new_tokens: int | None = None,
        session: Hashable = None,
    ) -> Generation:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.respond`."""
        return await self._respond(prompt, params, max_new_tokens, session)

    async def _respond(
        self,
        prompt: Sequence[int],
        params: SamplingParameters,
        max_new_tokens: int | None,
        session: Hashable,
        mark: int = 0,
    ) -> Generation:
        params.check_stops_are_found()
        self.check_sampling(params)
        budget = params.max_new_tokens if max_new_tokens is None else max_new_tokens
        error = self._engine.refusal(prompt, budget)
        if error is not None:
            self._thread.check_alive()
            return Generation([], [], "error", error)
        # The same for parameters by which rows can be drawn together.
        early = params.min_tokens and params.stop_token_ids
        alike = (*drawn_alike(params), tuple(params.logit_bias.items()), early)
        seed = params.row_seeds(1)[0]
        seed = int(torch.randint(1 << 31, ())) if seed is None else seed
        request = Request(
            tokens=list(prompt),
            mark=mark,
            params=params,
            budget=budget,
            stream=random.Random(seed),
            session=session,
            draw=self._draws.setdefault(alike, TokenDraw(params)),
        )
        self._thread.put(lambda: self._decoding.waiting.append(request), request.settle)
        try:
            return await self._thread.wait(asyncio.wrap_future(request.future))
        finally:
            if request.future.cancel():  # nobody waits any more
                with suppress(RuntimeError):  # It has ended, and so has the request.
                    self._thread.put(lambda: self._decoding.abort(request), lambda _: None)

    can_keep_caches = True
    """`update_weights` takes ``recompute=False``."""

    async def update_weights(
        self,
        state_dict: Mapping[str, Tensor],
        *,
        version: int | None = None,
        recompute: bool = True,
    ) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.update_weights`.

        Args:
            state_dict: as there.
            version: as there.
            recompute: what running responses have so far is read again, so that the log-probs of
                their further tokens are those of the new weights. ``False`` goes on with what the
                old weights have read, which is faster, and the log-probs are of neither version
                alone. New requests never meet what old weights have read.
        """
        await self._load(self._engine, state_dict, version, recompute)

    async def _load(
        self,
        engine: TransformersEngine,
        state_dict: Mapping[str, Tensor],
        version: int | None,
        recompute: bool,
    ) -> None:
        load = partial(engine.update_weights, state_dict, version=version)
        await self._thread.call(
            partial(self._decoding.update, load, recompute),
            spares=lambda error: isinstance(error, UpdateRefused),
        )

    def end_session(self, session: Hashable) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.end_session`."""
        with suppress(RuntimeError):  # It has ended, and keeps nothing.
            self._thread.put(lambda: self._decoding.end_session(session), lambda _: None)
