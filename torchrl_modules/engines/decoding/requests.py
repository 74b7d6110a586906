"""A response while it is drawn: its tokens so far, and what they are drawn from next.

Shape legend: A requests that are drawn from one distribution, V vocabulary.
"""

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchrl_modules.engines.protocol import Generation, VersionSpan
from torchrl_modules.sampling.params import SamplingParameters
from torchrl_modules.sampling.token_history import TokenHistory

from .decode_loop import RowStream, TokenDraw


@dataclass(eq=False, slots=True)
class Request:
    """A response while it is drawn; only the thread changes it."""

    tokens: list[int]
    params: SamplingParameters
    budget: int
    stream: RowStream
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
    history = _history(rows, logits)
    drawn = rows[0].draw(logits, history, [row.stream for row in rows])
    columns = {
        "log_probs": drawn.log_probs,
        "untempered_log_probs": drawn.untempered_log_probs,
        "entropies": drawn.entropies,
    }
    for name, values in columns.items():
        if values is not None:
            for row, value in zip(rows, values.tolist(), strict=True):
                getattr(row, name).append(value)
    finite = drawn.log_probs.isfinite().tolist()
    for row, token, is_finite in zip(rows, drawn.ids.tolist(), finite, strict=True):
        if not row.starts or row.starts[-1][0] != version:
            row.starts.append((version, row.num_drawn))
        row.tokens.append(token)
        row.is_broken = not is_finite
    if history.seen is not None and history.counts is not None:
        for row, seen, counts in zip(rows, history.seen, history.counts, strict=True):
            row.seen, row.counts = seen, counts


def _history(rows: Sequence[Request], logits: Tensor) -> TokenHistory:
    device, params = logits.device, rows[0].params
    num_drawn = torch.tensor([row.num_drawn for row in rows], device=device)
    if not params.penalises:
        return TokenHistory(num_drawn)
    for row in rows:
        if row.seen is None:
            row.seen = torch.zeros(logits.shape[1], dtype=torch.bool, device=device)
            row.seen[torch.tensor(row.tokens, device=device)] = True
            row.counts = torch.zeros(logits.shape[1], device=device)
    seen = torch.stack([row.seen for row in rows if row.seen is not None])
    counts = torch.stack([row.counts for row in rows if row.counts is not None])
    return TokenHistory(num_drawn, seen, counts)


def distribution_of(params: SamplingParameters) -> Hashable:
    """The same for parameters by which rows can be drawn together."""
    return (
        params.temperature,
        params.top_p,
        params.top_k,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        tuple(params.logit_bias.items()),
        params.min_tokens,
        params.min_tokens and params.stop_token_ids,
        params.untempered_log_probs,
        params.entropy,
    )
