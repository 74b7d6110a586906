"""Metrics to watch, from the same tensors as the loss; nothing is differentiated.

Shape legend: B sequences, T tokens, N packed tokens; ``*shape`` is ``[B, T]`` or ``[N]``.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .aggregation import Count, token_mean
from .sequences import flagged, masked


def effective_sample_fraction(
    log_ratio: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"] | None = None
) -> Float[Tensor, ""]:
    """Effective sample size of the importance weights, as a fraction of the active tokens.

    Args:
        log_ratio: in nats, ``[B, T]`` or ``[N]``.
        mask: True where a token counts; None for all.

    Returns:
        ``(sum r)^2 / (n sum r^2)``, in (0, 1]; 1 when all weights are equal, and when nothing is
        active.

    See Also:
        Kong, 1992, "A note on importance sampling using standardized weights".
    """
    weights = masked(log_ratio.detach(), mask, -torch.inf).flatten()
    count = masked(torch.ones_like(weights), None if mask is None else mask.flatten()).sum()
    # A low number beside them, any number of times, so that there is a finite largest one.
    floor = weights.new_full((1,), -1e30)  # mutate: equivalent (any large number)
    scaled = (weights - torch.cat([weights, floor]).max()).exp()
    fraction = scaled.sum().square() / (count * scaled.square().sum())
    return fraction.masked_fill(count == 0, 1.0)


def flag_fraction(
    flag: Bool[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    *,
    num_active_tokens: Count | None = None,
) -> Float[Tensor, ""]:
    """Fraction of the active tokens that carry a flag, such as a clip.

    Args:
        flag: ``[B, T]`` or ``[N]``.
        mask: True where a token counts; None for all.
        num_active_tokens: of the whole window; None for those of this batch.

    Returns:
        A scalar in [0, 1].
    """
    return token_mean(flagged(flag, mask).float(), mask, num_active_tokens=num_active_tokens)
