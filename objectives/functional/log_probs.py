"""From logits to the log-probability of a token and the entropy of its distribution.

Shape legend: K tokens, V vocabulary.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .sequences import at_least_float32


class LogProbs(NamedTuple):
    """Per-token results, each ``[K]``, in nats."""

    log_prob: Tensor
    entropy: Tensor


def token_log_probs(
    logits: Float[Tensor, "K V"],
    ids: Int[Tensor, " K"],
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,  # mutate: equivalent (in all but memory)
) -> LogProbs:
    """Log-probability of each token, and entropy of the distribution it was drawn from.

    Works through the tokens in chunks, so that no second ``[K, V]`` tensor in float32 exists at
    once outside of autograd.

    Args:
        logits: of the position before each token, ``[K, V]``; a banned token may be ``-inf``.
        ids: the tokens, ``[K]``.
        temperature: the logits are divided by it before the softmax.
        chunk_tokens: tokens of one chunk.

    Returns:
        Both in float32 (float64 for float64 logits), differentiable.

    Raises:
        ValueError: the temperature or the chunk is not positive.
    """
    if not temperature > 0 or chunk_tokens < 1:
        raise ValueError(
            f"temperature and chunk_tokens must be positive, got {temperature=}, {chunk_tokens=}."
        )
    log_probs, entropies = [], []
    for rows, targets in zip(logits.split(chunk_tokens), ids.split(chunk_tokens), strict=True):
        log_p = (at_least_float32(rows) / temperature).log_softmax(-1)
        log_probs.append(log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1))
        information = log_p.masked_fill(log_p.isneginf(), 0.0)  # mutate: equivalent number (x 0)
        entropies.append(-(log_p.exp() * information).sum(-1))
    return LogProbs(torch.cat(log_probs), torch.cat(entropies))
