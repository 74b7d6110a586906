"""A response while it is drawn: its tokens so far, and what they are drawn from next."""

import random
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor

from .drawn_tokens import AlikeRows, DrawnRow, TokenDraw, start_history
from .engine import Generation, VersionSpan


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


drawn_alike = attrgetter(
    *("temperature", "top_p", "top_k", "min_p", "min_tokens", "untempered_log_probs", "entropy"),
    "kept_counts",
    "sampling_mask",
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
