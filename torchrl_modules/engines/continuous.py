"""The asynchronous engine over a Transformers model: rows join and leave between two tokens."""

import asyncio
import random
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_data.checks import check_counts
from torchrl_data.devices import on_device
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.scoring.models import evaluation_mode
from torchrl_modules.weights.expected_weights import UpdateRefused

from .bridges import EngineThread, SteppedEngine
from .decoding import (
    AlikeRows,
    DrawnRow,
    KeptCaches,
    PromptReader,
    SlotReader,
    TokenDraw,
    draw_block,
    look,
    start_history,
)
from .engine import Generation, VersionSpan
from .readers import group_rows
from .transformers import TransformersEngine

# A response while it is drawn: its tokens so far, and what they are drawn from next.


@dataclass(eq=False, slots=True, kw_only=True)
class Request(DrawnRow):
    """A response while it is drawn; only the thread changes it."""

    stream: random.Random
    session: Hashable
    draw: TokenDraw
    """Requests with the same are drawn from one distribution."""
    future: Future[Generation] = field(default_factory=Future)
    starts: list[tuple[int, int]] = field(default_factory=list)
    """Versions, and how many tokens there were before the first of each."""
    seen: Tensor | None = None
    counts: Tensor | None = None

    def settle(self, outcome: Generation | BaseException) -> None:
        """Hand over to whoever waits for it, if anybody still does."""
        if not self.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, BaseException):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)

    def generation(self) -> Generation:
        """The whole response."""
        if self.finish_reason == "error":
            error = f"the log-prob of token {self.num_drawn} is not finite"
            return Generation([], [], "error", error)
        ends = [start for _, start in self.starts[1:]] + [self.num_drawn]
        versions = [
            VersionSpan(version, start, end)
            for (version, start), end in zip(self.starts, ends, strict=True)
        ]
        return DrawnRow.generation(self)._replace(versions=versions)


def alike_rows(rows: Sequence[Request], logits: Tensor, at: Tensor | None) -> AlikeRows:
    """Requests that are alike, to be drawn.

    Args:
        rows: the requests, of one :class:`~.decoding.TokenDraw`.
        logits: of their batch.
        at: where they are in it; ``None`` where they are all of it.
    """
    seen = counts = None
    if rows[0].params.penalises:
        for row in rows:
            if row.seen is None:
                (row.seen,), (row.counts,) = start_history([row.tokens], logits[:1])
        seen = torch.stack([row.seen for row in rows if row.seen is not None])
        counts = torch.stack([row.counts for row in rows if row.counts is not None])
        for row, own_seen, own_counts in zip(rows, seen, counts, strict=True):
            row.seen, row.counts = own_seen, own_counts
    return AlikeRows(
        rows[0].draw,
        [row.num_drawn for row in rows],
        at=at,
        streams=[row.stream for row in rows],
        seen=seen,
        counts=counts,
    )


_alike = attrgetter(
    *("temperature", "top_p", "top_k", "min_p", "min_tokens", "untempered_log_probs", "entropy"),
    "kept_counts",
    "sampling_mask",
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


# Continuous batching: requests that wait, and rows that run, a token at a time.

_WAITING_FRACTION: Final = 0.125
_MAX_STEPS_WAITING: Final = 4
"""New rows are read together: once so many wait, as a fraction of those that run, or so long."""


class ContinuousDecoding:
    """Draws for many requests at once; for the one thread that steps it.

    With a :class:`~.decoding.SlotReader` all rows are in one cache. What other readers keep can't
    be put together: rows that came together stay a group of their own, which is right for every
    model, and slower.

    Args:
        engine: whose model and reader are taken.
        max_running: most rows that are drawn at a time.
        kept: what is kept of earlier turns.
        is_own: nobody else has the model.
    """

    def __init__(
        self, engine: TransformersEngine, *, max_running: int, kept: KeptCaches, is_own: bool
    ) -> None:
        self._engine = engine
        self._model = model = engine.inside
        self._max_running = max_running
        self.kept = kept
        self.slots: SlotReader | None = None
        """What reads all rows, if one can."""
        self._groups: list[tuple[PromptReader, list[Request]]] = []
        if issubclass(engine.reader, SlotReader):
            self.slots = engine.reader(model, kept)
            self._groups = [(self.slots, [])]
        else:
            warnings.warn(
                f"AsyncTransformersEngine: rows of {type(model).__name__} can't be put together "
                "while they run, so they are drawn in groups of those that came together, and each "
                "turn reads its whole prompt. Models that keep plain keys and values are faster.",
                stacklevel=3,
            )
        self.waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._num_steps_waited = 0
        self.num_drawn = 0
        """Tokens of all responses."""
        # Of a model that others have, too: they must not change it, and may train it by its modes.
        self._watched = [] if is_own else list(model.parameters())
        self._evaluating = nullcontext if is_own else partial(evaluation_mode, model)
        if is_own:
            model.eval()
        self._changes = self._num_changes()

    @property
    def has_work(self) -> bool:
        """Whether a token is to be drawn."""
        return bool(self.waiting or self._running)

    @torch.no_grad()
    def step(self) -> None:
        """Some tokens for every row that runs, and the first one for those that join."""
        if self._num_changes() != self._changes:
            raise RuntimeError(
                "the weights were changed by somebody else than update_weights. Train a copy, or "
                "leave copy_model=True"
            )
        with self._evaluating(), self._engine.precision():
            num_steps = 0
            for reader, members in [*self._groups] if self._running else ():
                left = [row.budget - row.num_drawn for row in members if id(row) in self._running]
                if left:
                    most = (max if reader.reads_past_ends else min)(left)
                    num_steps = min(self._engine.tokens_per_look, most)
                    last = on_device([row.tokens[-1] for row in members], self._model.device)
                    self._draw(reader, members, reader.advance(last), last, num_steps)
            # Those that wait and may run: a pass over few prompts costs as much as over many.
            room = min(self._max_running - len(self._running), len(self.waiting))
            self._num_steps_waited += max(1, num_steps) if room > 0 else 0
            is_enough = room >= _WAITING_FRACTION * len(self._running)
            if room > 0 and (is_enough or self._num_steps_waited >= _MAX_STEPS_WAITING):
                self._num_steps_waited = 0
                new = [self.waiting.popleft() for _ in range(room)]
                self._running |= {id(row): row for row in new}
                # Read the tokens of those that join, and draw their first ones.
                prompts = [row.tokens for row in new]
                by_length = self._engine.reader.needs_one_length
                for group in group_rows(prompts, range(len(new)), by_length=by_length):
                    if self.slots is None:
                        self._groups.append((self._engine.reader(self._model), []))
                    reader, members = self._groups[-1]
                    joining = [new[at] for at in group]
                    logits = reader.read([row.tokens for row in joining])
                    members += joining
                    last = on_device([row.tokens[-1] for row in joining], self._model.device)
                    self._draw(reader, joining, logits, last, 1)

    def _draw(
        self,
        reader: PromptReader,
        rows: Sequence[Request],
        logits: Tensor,
        last: Tensor,
        num_steps: int,
    ) -> None:
        """Draw the next tokens of each row that runs, and let those go that end with them."""
        groups: dict[TokenDraw, list[int]] = defaultdict(list)
        for at, request in enumerate(rows):
            if id(request) in self._running:
                groups[request.draw].append(at)
        alike = [[rows[at] for at in group] for group in groups.values()]
        parts = [
            alike_rows(
                some,
                logits,
                None if len(some) == len(rows) else on_device(group, logits.device),
            )
            for some, group in zip(alike, groups.values(), strict=True)
        ]
        drawn, _ = draw_block(parts, logits, last, reader.advance, num_steps)
        ended: list[Request] = []
        for some, steps in zip(alike, look(drawn, logits.shape[-1]), strict=True):
            for at, request in enumerate(some):
                before, version = request.num_drawn, self._engine.version
                if not request.starts or request.starts[-1][0] != version:
                    request.starts.append((version, before))
                request.take(steps, at)
                self.num_drawn += request.num_drawn - before
                if request.finish_reason is not None:
                    ended.append(request)
        if ended:
            self._leave(ended)
            for request in ended:
                request.settle(request.generation())

    def _leave(self, requests: Sequence[Request]) -> None:
        """Let rows go; the last ones of their group take the places of those that go."""
        for request in requests:
            del self._running[id(request)]
        groups, self._groups = self._groups, []
        for reader, members in groups:
            order = list(range(len(members)))
            for at in reversed(range(len(members))):
                row = members[at]
                if id(row) in self._running:
                    continue
                if self.slots is not None and row.finish_reason == "error":
                    self.slots.wipe(at)
                elif self.slots is not None and row.session is not None:
                    self.slots.leave_behind(at, row.tokens, row.session)
                last = order.pop()
                if at < len(order):
                    order[at] = last
            if not order and self.slots is None:
                continue
            # Where a cache can't leave a row out, it is read on without use.
            if len(order) < len(members) and reader.can_drop:
                reader.keep(order)
                members = [members[at] for at in order]
            self._groups.append((reader, members))

    def update(self, load: Callable[[], None], recompute: bool) -> None:
        """Load weights between two tokens."""
        load()
        self._changes = self._num_changes()
        self.kept.clear()
        if not recompute:
            for request in self._running.values():
                request.session = None
        elif self._running:
            # All that was read of each row that runs is read again: all but its last token.
            with torch.no_grad(), self._evaluating(), self._engine.precision():
                for at, (_, members) in enumerate(self._groups):
                    left = [row for row in members if id(row) in self._running]
                    read = [row.tokens[:-1] for row in left]
                    if self.slots is not None:
                        self.slots.fill(read, range(len(left)))
                    else:
                        reader = self._engine.reader(self._model)
                        reader.read(read)
                        self._groups[at] = reader, left

    def abort(self, request: Request) -> None:
        """Let a request go that nobody waits for."""
        if id(request) in self._running:
            request.session = None
            self._leave([request])
        elif request in self.waiting:
            self.waiting.remove(request)

    def end_session(self, session: Hashable) -> None:
        """Keep nothing of a conversation."""
        self.kept.end(session)
        for request in (*self.waiting, *self._running.values()):
            if request.session == session:
                request.session = None

    def end(self, error: BaseException | None) -> None:
        """Everybody who waits is told."""
        for request in (*self.waiting, *self._running.values()):
            request.settle(error or RuntimeError("the engine was closed"))

    def _num_changes(self) -> int:
        return sum(weight._version for weight in self._watched)


# A Transformers model served to asyncio: rows join and leave between two tokens.


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
        check_counts(who, max_running=max_running)
        check_counts(who, 0, max_cached_tokens=max_cached_tokens)
        self._inside = self._engine = engine.copied() if copy_model else engine
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
        params.check_stops_are_found()
        self.check_sampling(params)
        budget = params.max_new_tokens if max_new_tokens is None else max_new_tokens
        error = self._engine.refusal(prompt, budget)
        if error is not None:
            self._thread.check_alive()
            return Generation([], [], "error", error)
        # The same for parameters by which rows can be drawn together.
        early = params.min_tokens and params.stop_token_ids
        alike = (*_alike(params), tuple(params.logit_bias.items()), early)
        seed = params.row_seeds(1)[0]
        seed = int(torch.randint(1 << 31, ())) if seed is None else seed
        request = Request(
            tokens=list(prompt),
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
        load = partial(self._engine.update_weights, state_dict, version=version)
        await self._thread.call(
            partial(self._decoding.update, load, recompute),
            spares=lambda error: isinstance(error, UpdateRefused),
        )

    def end_session(self, session: Hashable) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.end_session`."""
        with suppress(RuntimeError):  # It has ended, and keeps nothing.
            self._thread.put(lambda: self._decoding.end_session(session), lambda _: None)
