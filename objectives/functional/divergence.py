"""Policy objectives that mask by a divergence: DPPO, and the two-sided masks of IPO and KPop.

A ratio is a poor measure of a move: that of a rare token is large while nothing has changed, that
of a frequent one small while everything has. The divergence here is that of the two-event
distributions (this token, any other one), of which both probabilities are known.

Shape legend: ``*shape`` is ``[B, T]`` or ``[N]`` tokens.
"""

import math
from collections.abc import Mapping
from typing import Final, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .ratios import log_ratio
from .sequences import at_least_float32, check_alike, flagged, masked
from .surrogates import Surrogate

BinaryDivergence = Literal["tv", "kl", "symmetric_kl"]
BINARY_DIVERGENCES: Final[tuple[BinaryDivergence, ...]] = ("tv", "kl", "symmetric_kl")
DIVERGENCE_THRESHOLDS: Final[Mapping[str, float]] = {"tv": 0.15, "kl": 0.05, "symmetric_kl": 0.1}
"""The thresholds of the papers: a probability for ``"tv"``, nats for the others."""
PROBABILITY_FLOOR: Final = 1e-6
"""For the KL a probability is kept this far from 0 and 1: an engine rounds 1 - 1e-9 to 1, and the
divergence from what never happens is infinite."""


def binary_divergence(
    log_prob: Float[Tensor, "*shape"],
    behavior_log_prob: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    *,
    divergence: BinaryDivergence | str = "tv",
) -> Float[Tensor, "*shape"]:
    """Return how far a token's probability p has moved from that of the policy that sampled it, q.

    Args:
        log_prob: log p, in nats, ``[B, T]`` or ``[N]``.
        behavior_log_prob: log q, in nats.
        mask: True where the token counts; None for all. Elsewhere the result is 0.
        divergence: ``"tv"``: ``|p - q|``; ``"kl"``: ``KL((q, 1 - q) || (p, 1 - p))``;
            ``"symmetric_kl"``: the larger of the two directions.

    Returns:
        Never negative, never differentiated; in nats for the KLs.

    Raises:
        ValueError: the divergence is unknown.

    See Also:
        Qi et al., 2026 (DPPO), arXiv:2602.04879, section 4.
    """
    if divergence not in BINARY_DIVERGENCES:
        raise ValueError(f"divergence must be one of {BINARY_DIVERGENCES}, got {divergence!r}.")
    log_p = masked(at_least_float32(log_prob.detach()), mask)
    log_q = masked(at_least_float32(behavior_log_prob.detach()), mask)
    if divergence == "tv":
        return (log_p.exp() - log_q.exp()).abs()
    forward = _binary_kl(log_q, log_p)
    if divergence == "kl":
        return forward
    return torch.maximum(forward, _binary_kl(log_p, log_q))


def _binary_kl(
    log_p: Float[Tensor, "*shape"], log_q: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """KL of (p, 1 - p) to (q, 1 - q), in nats."""
    low, high = math.log(PROBABILITY_FLOOR), math.log1p(-PROBABILITY_FLOOR)
    log_p, log_q = log_p.clamp(low, high), log_q.clamp(low, high)
    # log(1 - p), exact also where p is near 1.
    rest_p, rest_q = ((-each.expm1()).log() for each in (log_p, log_q))
    return log_p.exp() * (log_p - log_q) + rest_p.exp() * (rest_p - rest_q)


def divergence_masked(
    log_prob: Float[Tensor, "*shape"],
    behavior_log_prob: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    *,
    divergence: BinaryDivergence | str = "tv",
    threshold: float | None = None,
    one_sided: bool = True,
) -> Surrogate:
    """``-M r A``: the policy gradient of the tokens within a divergence of where they were sampled.

    M is 0 where the divergence exceeds the threshold *and* the step would move the token further
    away: up (r > 1) with a positive advantage, down (r < 1) with a negative one (DPPO). With
    ``one_sided=False`` it is 0 wherever the divergence exceeds it (IPO with ``"tv"``, KPop with
    ``"symmetric_kl"``).

    Args:
        log_prob: log-probability under the policy that is trained, in nats, ``[B, T]`` or ``[N]``.
        behavior_log_prob: under the policy that sampled, in nats; never differentiated.
        advantage: same shape; never differentiated.
        mask: True where the token is trained; None for all.
        divergence: see :func:`binary_divergence`.
        threshold: the most that is kept; None for that of :data:`DIVERGENCE_THRESHOLDS`.
        one_sided: whether the direction of the step decides too.

    Returns:
        Loss, ratio, and the tokens that are masked, by the side on which they have left.

    Raises:
        ValueError: the divergence is unknown, or the threshold is not positive.

    See Also:
        Qi et al., 2026 (DPPO), arXiv:2602.04879, eq. 12; Guo et al., 2026 (KPop),
        https://ringtech.notion.site/kpop.
    """
    check_alike(log_prob=log_prob, advantage=advantage)
    distance = binary_divergence(log_prob, behavior_log_prob, mask, divergence=divergence)
    threshold = DIVERGENCE_THRESHOLDS[divergence] if threshold is None else threshold
    if not threshold > 0:
        raise ValueError(f"threshold must be positive, got {threshold}.")
    move = log_ratio(log_prob, behavior_log_prob, mask)
    advantage = masked(advantage.detach(), mask)
    outside = flagged(distance > threshold, mask)
    low, high = outside & (move < 0), outside & (move > 0)
    if one_sided:
        low, high = low & (advantage < 0), high & (advantage > 0)
    ratio = move.exp()
    loss = (-ratio * advantage).masked_fill(low | high, 0.0)
    return Surrogate(loss, ratio.detach(), low, high)
