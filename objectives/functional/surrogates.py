"""The policy objective of each algorithm on importance ratios, per token, not reduced.

All surrogates take the token's log-ratio (:func:`~.ratios.log_ratio`, of any level), and its
advantage; what lies outside the mask counts as ratio 1 and loss 0 and gets no gradient. GSPO is the
clipped surrogate on :func:`~.ratios.sequence_log_ratio`.

Shape legend: B sequences, T tokens, N packed tokens; ``*shape`` is ``[B, T]`` or ``[N]``.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .sequences import check_alike, masked


class Surrogate(NamedTuple):
    """The output of a surrogate, each field of the shape of its input."""

    loss: Tensor
    """To be minimised; 0 outside the mask."""
    ratio: Tensor
    """The ratio before clipping, or what weighs the gradient instead; detached, 1 outside."""
    clipped_low: Tensor
    """bool: the lower bound is what counts, so the token has no gradient."""
    clipped_high: Tensor
    """bool: the upper bound is what counts."""


def clipped_surrogate(
    log_ratio: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_cap: float | None = None,
) -> Surrogate:
    """PPO's clipped objective: ``-min(r A, clip(r, 1 - low, 1 + high) A)``.

    Args:
        log_ratio: log of r, in nats, ``[B, T]`` or ``[N]``.
        advantage: same shape; never differentiated.
        mask: True where the token is trained; None for all.
        clip_low: the ratio is kept above ``1 - clip_low``.
        clip_high: the ratio is kept below ``1 + clip_high`` (above ``clip_low``: DAPO's
            clip-higher).
        ratio_cap: the first r is kept below it ("delta", or dual clip: it bounds the loss of a bad
            token whose ratio has run away). None for no cap.

    Returns:
        Loss, ratio and clip flags. A flag is set where the bound removes the gradient: too low
        with a negative advantage, too high with a positive one.

    Raises:
        ValueError: a clip bound is negative, ``clip_low`` is above 1, or ``ratio_cap`` is not
            above ``1 + clip_high``.

    See Also:
        Schulman et al., 2017, arXiv:1707.06347, eq. 7; Yu et al., 2025 (DAPO), arXiv:2503.14476,
        eq. 10; Ye et al., 2020 (dual clip), arXiv:1912.09729, eq. 4.
    """
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low must lie in [0, 1], got {clip_low}.")
    if not clip_high >= 0:
        raise ValueError(f"clip_high must not be negative, got {clip_high}.")
    if ratio_cap is not None and not ratio_cap > 1 + clip_high:
        raise ValueError(f"ratio_cap must be above 1 + clip_high = {1 + clip_high}: {ratio_cap}.")
    check_alike(log_ratio=log_ratio, advantage=advantage)
    ratio = masked(log_ratio, mask).exp()
    advantage = masked(advantage.detach(), mask)
    first = ratio if ratio_cap is None else ratio.clamp(max=ratio_cap)
    loss = -torch.minimum(first * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    return Surrogate(
        loss=loss,
        ratio=ratio.detach(),
        clipped_low=(ratio < 1 - clip_low) & (advantage < 0),
        clipped_high=(ratio > 1 + clip_high) & (advantage > 0),
    )


def cispo(
    log_ratio: Float[Tensor, "*shape"],
    log_prob: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    *,
    max_ratio: float = 5.0,
) -> Surrogate:
    """CISPO: ``-sg(min(r, c)) A log pi``; every token keeps its gradient, with a bounded weight.

    Args:
        log_ratio: log of r, in nats, ``[B, T]`` or ``[N]``.
        log_prob: log-probability under the policy that is trained, in nats.
        advantage: same shape; never differentiated.
        mask: True where the token is trained; None for all.
        max_ratio: c, a bound on the ratio itself (not an epsilon: 0.2 would scale every
            gradient to a fifth).

    Returns:
        Loss, ratio and clip flags (high: the weight was cut).

    Raises:
        ValueError: ``max_ratio`` is below 1.

    See Also:
        MiniMax, 2025, arXiv:2506.13585, eq. 4 and 5.
    """
    if not max_ratio >= 1:
        raise ValueError(
            f"max_ratio bounds the ratio itself and must be at least 1, got {max_ratio}; "
            "for an epsilon pass 1 + epsilon."
        )
    check_alike(log_ratio=log_ratio, log_prob=log_prob, advantage=advantage)
    ratio = masked(log_ratio.detach(), mask).exp()
    weight = ratio.clamp(max=max_ratio) * masked(advantage.detach(), mask)
    return Surrogate(
        loss=-weight * masked(log_prob, mask),
        ratio=ratio,
        clipped_low=torch.zeros_like(ratio, dtype=torch.bool),
        clipped_high=ratio > max_ratio,
    )


def sapo(
    log_ratio: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> Surrogate:
    """SAPO: ``-(4 / tau) sigmoid(tau (r - 1)) A``, a soft gate in place of the clip.

    Args:
        log_ratio: log of r, in nats, ``[B, T]`` or ``[N]``.
        advantage: same shape; never differentiated.
        mask: True where the token is trained; None for all.
        temperature_positive: tau where the advantage is above 0.
        temperature_negative: tau elsewhere; higher, so that bad tokens fade sooner.

    Returns:
        Loss and ratio; nothing is ever clipped.

    Raises:
        ValueError: a temperature is not positive, or not finite.

    See Also:
        Gao et al., 2025, arXiv:2511.20347.
    """
    for name, value in (
        ("temperature_positive", temperature_positive),
        ("temperature_negative", temperature_negative),
    ):
        if not 0 < value < torch.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}.")
    check_alike(log_ratio=log_ratio, advantage=advantage)
    ratio = masked(log_ratio, mask).exp()
    advantage = masked(advantage.detach(), mask)
    positive = torch.full_like(advantage, temperature_positive)
    tau = torch.where(advantage > 0, positive, temperature_negative)
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    loss = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantage
    return Surrogate(loss, ratio.detach(), nothing, nothing)
