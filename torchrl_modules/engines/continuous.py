"""Continuous batching: requests that wait, and rows that run, a token at a time."""

import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Final

import torch
from torch import Tensor

from torchrl_data.devices import on_device
from torchrl_modules.scoring.wrapped_models import evaluation_mode

from .decoding import PromptReader
from .drawn_tokens import TokenDraw, advancing, draw_block, look
from .kept_caches import KeptCaches
from .readers import group_rows
from .request import Request, alike_rows
from .slot_reader import SlotReader
from .transformers import TransformersEngine

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
        model = engine.inside
        self._model = engine.drawing_model()
        self._max_running = max_running
        self.kept = kept
        self.slots: SlotReader | None = None
        """What reads all rows, if one can."""
        self._groups: list[tuple[PromptReader, list[Request]]] = []
        if issubclass(engine.reader, SlotReader):
            self.slots = engine.reader(self._model, kept)
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
        self._watched = [] if is_own else engine.drawn_with()
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
                    advance = advancing(reader.advance, members, last.device)
                    self._draw(advance, members, advance(last), last, num_steps)
            # Those that wait and may run: a pass over few prompts costs as much as over many.
            room = min(self._max_running - len(self._running), len(self.waiting))
            self._num_steps_waited += max(1, num_steps) if room > 0 else 0
            is_enough = room >= _WAITING_FRACTION * len(self._running)
            if room > 0 and (is_enough or self._num_steps_waited >= _MAX_STEPS_WAITING):
                self._num_steps_waited = 0
                new = [self.waiting.popleft() for _ in range(room)]
                self._running |= {id(row): row for row in new}
                # Read the tokens of those that join, and draw their first ones.
                prompts = [row.marked for row in new]
                by_length = self._engine.reader.needs_one_length
                for group in group_rows(prompts, range(len(new)), by_length=by_length):
                    if self.slots is None:
                        self._groups.append((self._engine.reader(self._model), []))
                    reader, members = self._groups[-1]
                    joining = [new[at] for at in group]
                    logits = reader.read([prompts[at] for at in group])
                    members += joining
                    last = on_device([row.tokens[-1] for row in joining], self._model.device)
                    self._draw(reader.advance, joining, logits, last, 1)

    def _draw(
        self,
        advance: Callable[[Tensor], Tensor],
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
        drawn, _ = draw_block(parts, logits, last, advance, num_steps)
        ended: list[Request] = []
        for some, steps in zip(alike, look(drawn, logits.shape[-1]), strict=True):
            for at, request in enumerate(some):
                before, version = request.num_drawn, self._engine.version_of(request.mark)
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
                    self.slots.leave_behind(at, row.marked, row.session)
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
        self._engine.drawing_model()  # which has the weights of now
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
                    read = [row.marked[:-1] for row in left]
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
