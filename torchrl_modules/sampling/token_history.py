"""Changes of logits by the tokens so far: penalties, a bias, stop tokens too early.

A turn's output are the tokens that it has drawn; its prompt is all that came before it.

Shape legend: K positions, N packed tokens, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_data.devices import on_device
from torchrl_data.ragged.packed import cumulative_lengths, sequence_index

from .parameters import SamplingParameters


class TokenHistory(NamedTuple):
    """Tokens that a turn has before it draws its next one, at each of K positions."""

    num_drawn: Tensor | None
    """int64 ``[K]``: tokens of the output; ``None`` where all are known to have ``min_tokens``."""
    seen: Tensor | None = None
    """bool ``[K, V]``: tokens that the prompt or the output hold; only for penalties."""
    counts: Tensor | None = None
    """float32 ``[K, V]``: how often the output holds them; only for penalties."""


class TargetHistory(NamedTuple):
    """Place of the history of each target in packed sequences; on the host."""

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
        """Histories of all targets; a turn is a run of targets."""
        at = target_mask.nonzero().squeeze(1)
        begins = target_mask.clone()
        begins[1:] &= ~target_mask[:-1]
        places = torch.arange(len(ids), device=ids.device)
        turn = torch.where(begins, places, 0).cummax(0).values[at]
        first = cumulative_lengths(lengths)[:-1][sequence_index(lengths)[at]]
        return cls(ids, first, turn, at)

    def part(self, rows: slice | Tensor) -> "TargetHistory":
        """Histories of some of the targets."""
        return TargetHistory(self.ids, self.first[rows], self.turn[rows], self.at[rows])

    @property
    def longest(self) -> int:
        """Most tokens before a target."""
        return int((self.at - self.first).max()) if len(self.at) else 0

    def read(
        self, vocab_size: int, params: SamplingParameters, device: torch.device
    ) -> TokenHistory:
        """The tokens themselves on a device, as far as they are needed: memory of K x V."""
        count, num_drawn = self.at - self.turn, None
        if params.stop_token_ids and bool((count < params.min_tokens).any()):
            num_drawn = on_device(count, device)
        if not params.penalises:
            return TokenHistory(num_drawn)
        index = self.first[:, None] + torch.arange(self.longest)
        tokens = self.ids[index.clamp(max=len(self.ids) - 1)]
        tokens = tokens.masked_fill(index >= self.at[:, None], vocab_size)  # an extra column
        output = on_device(tokens.masked_fill(index < self.turn[:, None], vocab_size), device)
        tokens = on_device(tokens, device)
        shape = (len(self.at), vocab_size + 1)
        seen = torch.zeros(shape, dtype=torch.bool, device=device)
        counts = torch.zeros(shape, device=device)
        seen.scatter_(1, tokens, True)
        counts.scatter_add_(1, output, torch.ones_like(output, dtype=counts.dtype))
        return TokenHistory(num_drawn, seen[:, :vocab_size], counts[:, :vocab_size])


def changed_logits(logits: Tensor, params: SamplingParameters, history: TokenHistory) -> Tensor:
    """Logits ``[K, V]`` with the bias and the penalties, as vLLM applies them; differentiable."""
    if params.logit_bias:
        tokens = on_device(list(params.logit_bias), logits.device)
        values = on_device(list(params.logit_bias.values()), logits.device, logits.dtype)
        bias = torch.zeros(logits.shape[1], dtype=logits.dtype, device=logits.device)
        logits = logits + bias.index_copy(0, tokens, values)
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
    if not params.stop_token_ids or not params.min_tokens or history.num_drawn is None:
        return None
    early = history.num_drawn < params.min_tokens
    stops = on_device(params.stop_token_ids, logits.device)
    banned = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    return banned.index_copy_(1, stops, early[:, None].expand(-1, len(stops)))
