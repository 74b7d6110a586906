"""Policy objectives whose ratio belongs to a whole sequence: VESPO and GMPO.

Shape legend: B sequences, T tokens, N packed tokens; ``*shape`` is ``[B, T]`` or ``[N]``.
"""

import math
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .ratios import LOG_RATIO_LIMIT
from .sequences import check_alike, masked, sequence_mean, sequence_sum, spread
from .surrogates import Surrogate

VESPO_LOG_WEIGHT_FLOOR: Final = math.log(1e-8)
"""The log of VESPO's sequence weight is kept above this, in nats."""


def vespo(
    log_ratio: Float[Tensor, "*shape"],
    log_prob: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    lengths: Int[Tensor, " B"] | None = None,
    *,
    positive: tuple[float, float] = (2.0, 3.0),
    negative: tuple[float, float] = (3.0, 2.0),
    sampler_log_ratio: Float[Tensor, "*shape"] | None = None,
) -> Surrogate:
    """VESPO: ``-sg(exp(lam + k ln w - lam w)) A log pi``, w the ratio of the whole sequence.

    w is the product of the token ratios, as in the paper: the gamma-shaped weight is what keeps
    it from running away, so there is no mean over the tokens here.

    Args:
        log_ratio: log-ratio of each token, in nats, ``[B, T]`` or ``[N]``.
        log_prob: log-probability under the policy that is trained, in nats.
        advantage: same shape; never differentiated.
        mask: True where the token is trained; None for all.
        lengths: ``[B]`` when packed.
        positive: (k, lam) where the advantage is at least 0.
        negative: (k, lam) where it is below 0.
        sampler_log_ratio: log of the sampler correction of each token, in nats, which belongs
            inside w (not in front of the loss). None for none.

    Returns:
        Loss, and the weight in place of the ratio; nothing is ever clipped.

    Raises:
        ValueError: a k or lam is negative or not finite, or the shapes are neither layout.

    See Also:
        Shen et al., 2026, arXiv:2602.10693.
    """
    if not all(0 <= setting < torch.inf for setting in (*positive, *negative)):
        raise ValueError(f"k and lam must be finite and not negative: {positive=}, {negative=}.")
    check_alike(log_ratio=log_ratio, log_prob=log_prob, advantage=advantage)
    total = sequence_sum(log_ratio.detach(), mask, lengths)
    if sampler_log_ratio is not None:
        total = total + sequence_sum(sampler_log_ratio.detach(), mask, lengths)
    log_weight = spread(total.clamp(VESPO_LOG_WEIGHT_FLOOR, LOG_RATIO_LIMIT), log_ratio, lengths)
    advantage = masked(advantage.detach(), mask)
    good = advantage >= 0
    k = torch.where(good, torch.full_like(advantage, positive[0]), negative[0])
    lam = torch.where(good, torch.full_like(advantage, positive[1]), negative[1])
    weight = (lam + k * log_weight - lam * log_weight.exp()).exp()
    nothing = torch.zeros_like(good)
    loss = -weight * advantage * masked(log_prob, mask)
    return Surrogate(loss, masked(weight, mask, 1.0), nothing, nothing)


def gmpo(
    log_ratio: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    lengths: Int[Tensor, " B"] | None = None,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> Surrogate:
    """GMPO: ``-r A``, r the geometric mean of the token ratios, each clipped by its sign.

    A good token's log-ratio is kept below ``clip_high``, a bad one's above ``-clip_low``; the
    bounds are on the **log**-ratio, in nats.

    Args:
        log_ratio: log-ratio of each token, in nats, ``[B, T]`` or ``[N]``.
        advantage: same shape; never differentiated.
        mask: True where the token is trained; None for all.
        lengths: ``[B]`` when packed.
        clip_low: a bad token's log-ratio is kept above ``-clip_low``.
        clip_high: a good token's log-ratio is kept below ``clip_high``.

    Returns:
        Loss (r is the same on all tokens of a sequence), the unclipped token ratio, clip flags.

    Raises:
        ValueError: a clip bound is negative, or the shapes are neither layout.

    See Also:
        Zhao et al., 2025, arXiv:2507.20673, eq. 4 and algorithm 1.
    """
    if not (clip_low >= 0 and clip_high >= 0):
        raise ValueError(f"Clip bounds must not be negative, got {clip_low=}, {clip_high=}.")
    check_alike(log_ratio=log_ratio, advantage=advantage)
    log_ratio = masked(log_ratio, mask)
    advantage = masked(advantage.detach(), mask)
    good, bad = advantage > 0, advantage < 0
    clipped = torch.where(good, log_ratio.clamp(max=clip_high), log_ratio)
    clipped = torch.where(bad, log_ratio.clamp(min=-clip_low), clipped)
    ratio = spread(sequence_mean(clipped, mask, lengths).exp(), log_ratio, lengths)
    return Surrogate(
        loss=-ratio * advantage,
        ratio=log_ratio.detach().exp(),
        clipped_low=bad & (log_ratio < -clip_low),
        clipped_high=good & (log_ratio > clip_high),
    )
