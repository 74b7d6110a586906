"""Rows join and leave the batch that a Transformers model decodes."""

import asyncio
import random
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_modules.sampling import SamplingParameters, TokenHistory
from torchrl_modules.scoring.models import evaluation_mode

from .decoding import KeptCaches, PromptReader, SlotReader, TokenDraw, start_history
from .engine import Generation, VersionSpan
from .readers import group_rows

# A response while it is drawn: its tokens so far, and what they are drawn from next.
#
# Shape legend: A requests that are drawn from one distribution, V vocabulary.


@dataclass(eq=False, slots=True)
class Request:
    """A response while it is drawn; only the thread changes it."""

    tokens: list[int]
    params: SamplingParameters
    budget: int
    stream: random.Random
    session: Hashable
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Generation]"
    draw: TokenDraw
    """Requests with the same are drawn from one distribution."""
    num_prompt: int = 0
    log_probs: list[float] = field(default_factory=list)
    untempered_log_probs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    starts: list[tuple[int, int]] = field(default_factory=list)
    """Versions, and how many tokens there were before the first of each."""
    seen: Tensor | None = None
    counts: Tensor | None = None
    is_broken: bool = False

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def num_drawn(self) -> int:
        """Tokens of the response so far."""
        return len(self.tokens) - self.num_prompt

    def finish_reason(self) -> str | None:
        """Why it ends with its last token, if it does."""
        if self.tokens[-1] in (self.params.stop_token_ids or ()):
            return "stop"
        matcher = self.params.stop_matcher
        if matcher is not None and matcher.just_ended(self.tokens[self.num_prompt :]):
            return "stop"
        return "length" if self.num_drawn >= self.budget else None

    def generation(self, reason: str) -> Generation:
        """The whole response."""
        ends = [start for _, start in self.starts[1:]] + [self.num_drawn]
        return Generation(
            ids=self.tokens[self.num_prompt :],
            log_probs=self.log_probs,
            finish_reason=reason,
            untempered_log_probs=self.untempered_log_probs,
            entropies=self.entropies,
            versions=[
                VersionSpan(version, start, end)
                for (version, start), end in zip(self.starts, ends, strict=True)
            ],
        )


def draw_alike(rows: Sequence[Request], logits: Tensor, version: int) -> None:
    """Draw the next token of requests that are alike, and write it down.

    Args:
        rows: the requests, of one :class:`TokenDraw`.
        logits: of their next tokens, ``[A, V]``.
        version: of the weights.
    """
    num_drawn = torch.tensor([row.num_drawn for row in rows], device=logits.device)
    history = TokenHistory(num_drawn)
    if rows[0].params.penalises:
        for row in rows:
            if row.seen is None:
                (row.seen,), (row.counts,) = start_history([row.tokens], logits[:1])
        seen = torch.stack([row.seen for row in rows if row.seen is not None])
        counts = torch.stack([row.counts for row in rows if row.counts is not None])
        history = TokenHistory(num_drawn, seen, counts)
        for row, own_seen, own_counts in zip(rows, seen, counts, strict=True):
            row.seen, row.counts = own_seen, own_counts
    drawn = rows[0].draw(logits, history, [row.stream for row in rows])
    for name in ("log_probs", "untempered_log_probs", "entropies"):
        values = getattr(drawn, name)
        if values is not None:
            for row, value in zip(rows, values.tolist(), strict=True):
                getattr(row, name).append(value)
    finite = drawn.log_probs.isfinite().tolist()
    for row, token, is_finite in zip(rows, drawn.ids.tolist(), finite, strict=True):
        if not row.starts or row.starts[-1][0] != version:
            row.starts.append((version, row.num_drawn))
        row.tokens.append(token)
        row.is_broken = not is_finite


_alike = attrgetter(
    *("temperature", "top_p", "top_k", "min_p", "min_tokens", "untempered_log_probs", "entropy"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def distribution_of(params: SamplingParameters) -> Hashable:
    """The same for parameters by which rows can be drawn together."""
    early = params.min_tokens and params.stop_token_ids
    return (*_alike(params), tuple(params.logit_bias.items()), early)


# The requests that an asynchronous engine draws tokens for: they join and leave between two tokens.
#
# Shape legend: A requests, V vocabulary.


class MergedRows:
    """All rows in one cache.

    Args:
        reader: without rows.
    """

    def __init__(self, reader: SlotReader) -> None:
        self.reader = reader
        self.rows: list[Request] = []

    def join(self, rows: Sequence[Request]) -> tuple[list[Request], Tensor]:
        """Read the tokens of new rows.

        Returns:
            They, perhaps in another order, and logits of their next tokens, ``[A', V]``.
        """
        logits = self.reader.read([row.tokens for row in rows])
        self.rows += rows
        return list(rows), logits

    def advance(self) -> tuple[list[Request], Tensor]:
        """Read the last token of each row; all rows and logits of their next tokens, ``[A, V]``."""
        tokens = [row.tokens[-1] for row in self.rows]
        device = self.reader.model.device
        return list(self.rows), self.reader.advance(torch.tensor(tokens, device=device))

    def leave(self, rows: Collection[int]) -> None:
        """Let rows go, by the ``id`` of each; the last ones take the places of those that go."""
        order = list(range(len(self.rows)))
        for at in reversed([at for at, row in enumerate(self.rows) if id(row) in rows]):
            row = self.rows[at]
            if row.is_broken:
                self.reader.wipe(at)
            elif row.session is not None:
                self.reader.leave_behind(at, row.tokens, row.session)
            last = order.pop()
            if at < len(order):
                order[at] = last
        if len(order) < len(self.rows):
            self.reader.keep(torch.tensor(order, dtype=torch.int64))
            self.rows = [self.rows[at] for at in order]

    def reread(self) -> None:
        """Read again, by new weights, all that was read of each row: all but its last token."""
        self.reader.fill([row.tokens[:-1] for row in self.rows], range(len(self.rows)))


class RowGroups:
    """Rows that came together stay together, each group by a reader of its own.

    For what models keep that can't be put together: right for every model, and slower.

    Args:
        model: in evaluation mode.
        reader: how the model continues rows.
    """

    def __init__(self, model: PreTrainedModel, reader: type[PromptReader]) -> None:
        self._model = model
        self._reader = reader
        self._groups: list[tuple[PromptReader, list[Request], set[int]]] = []

    def join(self, rows: Sequence[Request]) -> tuple[list[Request], Tensor]:
        """See `MergedRows`."""
        prompts = [row.tokens for row in rows]
        by_length = self._reader.needs_one_length
        joined, logits = [], []
        for group in group_rows(prompts, range(len(rows)), by_length=by_length):
            reader, members = self._reader(self._model), [rows[at] for at in group]
            logits.append(reader.read([row.tokens for row in members]))
            self._groups.append((reader, members, set()))
            joined += members
        return joined, torch.cat(logits)

    def advance(self) -> tuple[list[Request], Tensor]:
        """Read the last token of each row; all rows and logits of their next tokens, ``[A, V]``."""
        rows: list[Request] = []
        logits = []
        for reader, members, gone in self._groups:
            tokens = torch.tensor([row.tokens[-1] for row in members], device=self._model.device)
            own = reader.advance(tokens)
            here = [at for at, row in enumerate(members) if id(row) not in gone]
            rows += [members[at] for at in here]
            logits.append(own if not gone else own[here])
        return rows, torch.cat(logits)

    def leave(self, rows: Collection[int]) -> None:
        """See `MergedRows`; where a cache can't leave a row out, it is read on without use."""
        kept = []
        for reader, members, gone in self._groups:
            gone |= {id(row) for row in members if id(row) in rows}
            here = [at for at, row in enumerate(members) if id(row) not in gone]
            if here and gone and reader.can_drop:
                reader.keep(torch.tensor(here, device=self._model.device))
                members, gone = [members[at] for at in here], set()
            if here:
                kept.append((reader, members, gone))
        self._groups = kept

    def reread(self) -> None:
        """See `MergedRows`."""
        groups, self._groups = self._groups, []
        for _, members, gone in groups:
            left = [row for row in members if id(row) not in gone]
            reader = self._reader(self._model)
            reader.read([row.tokens[:-1] for row in left])
            self._groups.append((reader, left, set()))


# Continuous batching: requests that wait, and rows that run, a token at a time.

_WAITING_FRACTION: Final = 0.125
_MAX_STEPS_WAITING: Final = 4
"""New rows are read together: once so many wait, as a fraction of those that run, or so long."""


class ContinuousDecoding:
    """Draws for many requests at once; for the one thread that steps it.

    Args:
        model: gives the logits.
        reader: how it continues rows.
        precision: what it computes in, as a context manager.
        version: of its weights now.
        max_running: most rows that are drawn at a time.
        kept: what is kept of earlier turns.
        is_own: nobody else has the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        reader: type[PromptReader],
        *,
        precision: Callable[[], AbstractContextManager[Any]],
        version: Callable[[], int],
        max_running: int,
        kept: KeptCaches,
        is_own: bool,
    ) -> None:
        self._model = model
        self._precision = precision
        self._version = version
        self._max_running = max_running
        self.kept = kept
        self._slots: SlotReader | None = None
        self._rows: MergedRows | RowGroups
        if issubclass(reader, SlotReader):
            self._slots = reader(model, kept)
            self._rows = MergedRows(self._slots)
        else:
            self._rows = RowGroups(model, reader)
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
    def num_read(self) -> int:
        """Tokens of prompts that were read; 0 where they are not counted."""
        return 0 if self._slots is None else self._slots.num_read

    @property
    def has_work(self) -> bool:
        """Whether a token is to be drawn."""
        return bool(self.waiting or self._running)

    @torch.no_grad()
    def step(self) -> None:
        """One token for every row that runs, and the first one for those that join."""
        if self._num_changes() != self._changes:
            raise RuntimeError(
                "the weights were changed by somebody else than update_weights. Train a copy, or "
                "leave copy_model=True"
            )
        with self._evaluating(), self._precision():
            if self._running:
                self._draw(*self._rows.advance())
            # Those that wait and may run: a pass over few prompts costs as much as over many.
            room = min(self._max_running - len(self._running), len(self.waiting))
            self._num_steps_waited += room > 0
            is_enough = room >= _WAITING_FRACTION * len(self._running)
            if room > 0 and (is_enough or self._num_steps_waited >= _MAX_STEPS_WAITING):
                self._num_steps_waited = 0
                joining = [self.waiting.popleft() for _ in range(room)]
                self._running |= {id(request): request for request in joining}
                self._draw(*self._rows.join(joining))

    def update(self, load: Callable[[], None], recompute: bool) -> None:
        """Load weights between two tokens."""
        load()
        self._changes = self._num_changes()
        self.kept.clear()
        if not recompute:
            for request in self._running.values():
                request.session = None
        elif self._running:
            with torch.no_grad(), self._evaluating(), self._precision():
                self._rows.reread()

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
        lost = [*self.waiting, *self._running.values()]
        self.deliver([(one, error or RuntimeError("the engine was closed")) for one in lost])

    def deliver(self, outcomes: Sequence[tuple[Request, Any]]) -> None:
        """Hand generations or errors over to the event loops that wait for them."""
        sent: dict[asyncio.AbstractEventLoop, list[tuple[Request, Any]]] = defaultdict(list)
        for request, outcome in outcomes:
            sent[request.loop].append((request, outcome))
        for loop, items in sent.items():
            with suppress(RuntimeError):  # The loop is closed, and nobody waits for these.
                loop.call_soon_threadsafe(_settle, items)

    def _num_changes(self) -> int:
        return sum(weight._version for weight in self._watched)

    def _draw(self, rows: list[Request], logits: Tensor) -> None:
        groups: dict[TokenDraw, list[int]] = defaultdict(list)
        for at, request in enumerate(rows):
            groups[request.draw].append(at)
        for group in groups.values():
            own = logits if len(group) == len(rows) else logits[group]
            draw_alike([rows[at] for at in group], own, self._version())
        self.num_drawn += len(rows)
        ended = []
        for request in rows:
            if request.is_broken:
                error = f"the log-prob of token {request.num_drawn} is not finite"
                ended.append((request, Generation([], [], "error", error)))
            elif (reason := request.finish_reason()) is not None:
                ended.append((request, request.generation(reason)))
        if ended:
            self._leave([request for request, _ in ended])
            self.deliver(ended)

    def _leave(self, requests: list[Request]) -> None:
        self._rows.leave({id(request) for request in requests})
        for request in requests:
            del self._running[id(request)]


def _settle(items: list[tuple[Request, Any]]) -> None:
    for request, outcome in items:
        if request.future.done():  # cancelled
            continue
        if isinstance(outcome, BaseException):
            request.future.set_exception(outcome)
        else:
            request.future.set_result(outcome)
