"""Continuous batching: requests that wait, and rows that run, a token at a time."""

import asyncio
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_modules.engines.protocol import Generation
from torchrl_modules.scoring.wrapped_models import evaluation_mode

from .decode_loop import PromptReader, TokenDraw
from .kept_caches import KeptCaches
from .requests import Request, draw_alike
from .running_rows import MergedRows, RowGroups, RunningRows
from .slot_reader import SlotReader

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
        self._rows: RunningRows[Request]
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
        self._evaluating: Callable[[], AbstractContextManager[Any]] = partial(
            evaluation_mode, model
        )
        if is_own:
            model.eval()
            self._evaluating = nullcontext
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
            if joining := self._joining():
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

    def _joining(self) -> list[Request]:
        """Those that wait and may run now; a pass over few prompts costs as much as over many."""
        room = min(self._max_running - len(self._running), len(self.waiting))
        if room <= 0:
            return []
        self._num_steps_waited += 1
        enough = room >= _WAITING_FRACTION * len(self._running)
        if not enough and self._num_steps_waited < _MAX_STEPS_WAITING:
            return []
        self._num_steps_waited = 0
        return [self.waiting.popleft() for _ in range(room)]

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
            reason = "error" if request.is_broken else request.finish_reason()
            if reason is not None:
                ended.append((request, _outcome(request, reason)))
        if ended:
            self._leave([request for request, _ in ended])
            self.deliver(ended)

    def _leave(self, requests: list[Request]) -> None:
        self._rows.leave({id(request) for request in requests})
        for request in requests:
            del self._running[id(request)]


def _outcome(request: Request, reason: str) -> Generation:
    if reason == "error":
        at = request.num_drawn
        return Generation([], [], reason, f"the log-prob of token {at} is not finite")
    return request.generation(reason)


def _settle(items: list[tuple[Request, Any]]) -> None:
    for request, outcome in items:
        if request.future.done():  # cancelled
            continue
        if isinstance(outcome, BaseException):
            request.future.set_exception(outcome)
        else:
            request.future.set_result(outcome)
