"""What changes logits because of the tokens so far: penalties, a bias, stop tokens too early.

A turn's output are the tokens that it has drawn; its prompt is all that came before it.

Shape legend: K positions, N packed tokens, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_data.ragged.packed import cumulative_lengths, sequence_index

from .params import SamplingParameters


class TokenHistory(NamedTuple):
    """What a turn has before it draws its next token, at each of K positions."""

    num_drawn: Tensor
    """int64 ``[K]``: tokens of the output."""
    seen: Tensor | None = None
    """bool ``[K, V]``: tokens that the prompt or the output hold; only for penalties."""
    counts: Tensor | None = None
    """float32 ``[K, V]``: how often the output holds them; only for penalties."""


class TargetHistory(NamedTuple):
    """Where the history of each target lies in packed sequences."""

    ids: Tensor
    """int64 ``[N]``."""
    first: Tensor
    """int64 ``[K]``: where the target's sequence begins."""
    turn: Tensor
    """int64 ``[K]``: where its turn begins."""
    at: Tensor
    """int64 ``[K]``: where it is itself."""

    @classmethod
    def of(cls, ids: Tensor, lengths: Tensor, target_mask: Tensor) -> "TargetHistory":
        """Of all targets; a turn is a run of targets."""
        at = target_mask.nonzero().squeeze(1)
        begins = target_mask.clone()
        begins[1:] &= ~target_mask[:-1]
        places = torch.arange(len(ids), device=ids.device)
        turn = torch.where(begins, places, 0).cummax(0).values[at]
        first = cumulative_lengths(lengths)[:-1][sequence_index(lengths)[at]]
        return cls(ids, first, turn, at)

    def part(self, rows: slice) -> "TargetHistory":
        """Of some of the targets."""
        return TargetHistory(self.ids, self.first[rows], self.turn[rows], self.at[rows])

    @property
    def longest(self) -> int:
        """Most tokens before a target."""
        return int((self.at - self.first).max()) if len(self.at) else 0

    def read(self, vocab_size: int, params: SamplingParameters) -> TokenHistory:
        """The tokens themselves, as far as the parameters need them: memory of K x V."""
        num_drawn = self.at - self.turn
        if not params.penalises:
            return TokenHistory(num_drawn)
        index = self.first[:, None] + torch.arange(self.longest, device=self.ids.device)
        tokens = self.ids[index.clamp(max=len(self.ids) - 1)]
        tokens = tokens.masked_fill(index >= self.at[:, None], vocab_size)  # an extra column
        output = tokens.masked_fill(index < self.turn[:, None], vocab_size)
        shape = (len(self.at), vocab_size + 1)
        seen = torch.zeros(shape, dtype=torch.bool, device=self.ids.device)
        counts = torch.zeros(shape, device=self.ids.device)
        seen.scatter_(1, tokens, True)
        counts.scatter_add_(1, output, torch.ones_like(output, dtype=counts.dtype))
        return TokenHistory(num_drawn, seen[:, :vocab_size], counts[:, :vocab_size])


def changed_logits(logits: Tensor, params: SamplingParameters, history: TokenHistory) -> Tensor:
    """Logits ``[K, V]`` with the bias and the penalties, as vLLM applies them; differentiable."""
    if params.logit_bias:
        tokens = torch.tensor(list(params.logit_bias), device=logits.device)
        values = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype)
        bias = torch.zeros(logits.shape[1], dtype=logits.dtype, device=logits.device)
        logits = logits + bias.index_copy(0, tokens, values.to(logits.device))
    if history.seen is not None and params.repetition_penalty != 1.0:
        penalty = params.repetition_penalty
        penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(history.seen, penalised, logits)
    if history.counts is not None:
        logits = logits - params.frequency_penalty * history.counts
        logits = logits - params.presence_penalty * (history.counts > 0)
    return logits


def too_early(logits: Tensor, params: SamplingParameters, history: TokenHistory) -> Tensor | None:
    """Stop tokens that ``min_tokens`` does not allow yet, bool ``[K, V]``; ``None`` for none."""
    early = history.num_drawn < params.min_tokens
    if not params.stop_token_ids or not bool(early.any()):
        return None
    banned = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    banned[:, list(params.stop_token_ids)] = early[:, None]
    return banned
