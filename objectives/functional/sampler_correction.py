"""Weights for the gap between the engine that sampled and the trainer's copy of the same policy.

Shape legend: B sequences, T tokens, N packed tokens; ``*shape`` is ``[B, T]`` or ``[N]``.
"""

from typing import Final, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .aggregation import token_mean
from .ratios import log_ratio, sequence_log_ratio
from .sequences import flagged, masked, sequence_mean, spread

CorrectionLevel = Literal["token", "sequence", "k3"]
CorrectionMode = Literal["truncate", "mask"]
CORRECTION_LEVELS: Final[tuple[CorrectionLevel, ...]] = ("token", "sequence", "k3")
CORRECTION_MODES: Final[tuple[CorrectionMode, ...]] = ("truncate", "mask")


class SamplerWeights(NamedTuple):
    """Result of :func:`sampler_correction`, each of the shape of its input."""

    weight: Tensor
    """What the token's loss is multiplied by; 1 outside the mask."""
    changed: Tensor
    """bool: the weight was truncated, or the token masked."""


def sampler_correction(
    train_log_prob: Float[Tensor, "*shape"],
    sampler_log_prob: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    lengths: Int[Tensor, " B"] | None = None,
    *,
    level: CorrectionLevel | str = "token",
    mode: CorrectionMode | str = "truncate",
    upper: float = 2.0,
    lower: float = 0.0,
    max_k3: float | None = None,
) -> SamplerWeights:
    """Importance weight ``pi_train_old / pi_sampler`` of each token, bounded.

    Args:
        train_log_prob: under the trainer's copy of the policy that sampled, in nats, ``[B, T]`` or
            ``[N]``; never differentiated.
        sampler_log_prob: what the engine reported, in nats; never differentiated.
        mask: True where a token counts; None for all.
        lengths: ``[B]`` when packed.
        level: ``"token"``, or ``"sequence"``: the geometric mean of the token weights, so the
            **mean** of the log-ratios; their sum would collapse with the length; or ``"k3"``: 1
            on every token, so that ``max_k3`` alone decides.
        mode: ``"truncate"`` cuts the weight into ``[lower, upper]``; ``"mask"`` makes it 0
            outside.
        upper: highest weight.
        lower: lowest weight.
        max_k3: in nats per token: a sequence of which the mean of ``w - log w - 1`` (k3 of the
            sampler's KL to the trainer) exceeds it has weight 0. None for no bound.

    Returns:
        Weights, and where they were changed.

    Raises:
        ValueError: a name is unknown, the bounds are not ``0 <= lower <= 1 <= upper``, ``max_k3``
            is not positive, or missing at its level, or the shapes are neither layout.

    See Also:
        Yao et al., 2025, https://fengyao.notion.site/off-policy-rl (truncated); Liu et al., 2025,
        "When speed kills stability" (masked, sequence level, k3).
    """
    if level not in CORRECTION_LEVELS:
        raise ValueError(f"level must be one of {CORRECTION_LEVELS}, got {level!r}.")
    if mode not in CORRECTION_MODES:
        raise ValueError(f"mode must be one of {CORRECTION_MODES}, got {mode!r}.")
    if not 0 <= lower <= 1 <= upper:
        raise ValueError(f"Bounds must be 0 <= lower <= 1 <= upper, got {lower=}, {upper=}.")
    if level == "k3" if max_k3 is None else not max_k3 > 0:
        raise ValueError(f"max_k3 must be positive, and given at level 'k3', got {max_k3}.")
    token_log_weight = log_ratio(train_log_prob.detach(), sampler_log_prob, mask)
    log_weight = torch.zeros_like(token_log_weight) if level == "k3" else token_log_weight
    if level == "sequence":
        log_weight = sequence_log_ratio(log_weight, mask, lengths)
    weight = masked(log_weight, mask).exp()
    outside = (weight > upper) | (weight < lower)
    weight = weight.masked_fill(outside, 0.0) if mode == "mask" else weight.clamp(lower, upper)
    if max_k3 is None:
        return SamplerWeights(weight, outside)
    k3 = sequence_mean(token_log_weight.expm1() - token_log_weight, mask, lengths)
    dropped = flagged(spread(k3, weight, lengths) > max_k3, mask)
    return SamplerWeights(weight.masked_fill(dropped, 0.0), outside | dropped)


def off_policy_gap(
    train_log_prob: Float[Tensor, "*shape"],
    sampler_log_prob: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, ""]:
    """Mean absolute gap between two scorings of the same tokens.

    Args:
        train_log_prob: in nats, ``[B, T]`` or ``[N]``.
        sampler_log_prob: in nats, same shape.
        mask: True where a token counts; None for all.

    Returns:
        In nats per token; 0 when nothing is active.
    """
    gap = (train_log_prob - sampler_log_prob).detach().abs()
    return token_mean(gap, mask)
