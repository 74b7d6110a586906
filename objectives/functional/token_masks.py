"""Masks that keep some of the trained tokens: by entropy, trust region, staleness, length.

Each gives a boolean keep-mask within the given mask; nothing is differentiated.

Shape legend: B sequences, T tokens, N packed tokens; ``*shape`` is ``[B, T]`` or ``[N]``.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .ratios import log_ratio
from .sequences import check_alike, check_mask, flagged, masked, sequence_mean, spread


def entropy_threshold(
    entropy: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    *,
    top_fraction: float,
) -> Float[Tensor, ""]:
    """The entropy that the given fraction of the active tokens reaches.

    Take it over the whole accumulation window, and every micro-batch masks alike.

    Args:
        entropy: in nats, ``[B, T]`` or ``[N]``.
        mask: True where a token counts; None for all.
        top_fraction: rho, in (0, 1].

    Returns:
        The ``1 - rho`` quantile (linear interpolation) in nats; NaN when nothing is active.

    Raises:
        ValueError: the fraction is outside (0, 1].
    """
    if not 0 < top_fraction <= 1:
        raise ValueError(f"top_fraction must lie in (0, 1], got {top_fraction}.")
    active = masked(entropy.detach(), mask, torch.nan).flatten()
    # One more NaN, which is ignored, so that there is something when there are no tokens.
    padded = torch.nn.functional.pad(active, (0, 1), value=torch.nan)  # mutate: equivalent (NaNs)
    return padded.nanquantile(1 - top_fraction)


def high_entropy_mask(
    entropy: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    *,
    top_fraction: float,
    threshold: Float[Tensor, ""] | None = None,
) -> Bool[Tensor, "*shape"]:
    """Keep the tokens of the top entropy quantile, the forks of the text.

    Args:
        entropy: in nats, ``[B, T]`` or ``[N]``.
        mask: True where a token counts; None for all.
        top_fraction: rho, in (0, 1].
        threshold: of the whole window, from :func:`entropy_threshold`; None to take it here.

    Returns:
        True on the active tokens whose entropy is at or above the threshold.

    Raises:
        ValueError: the fraction is outside (0, 1].

    See Also:
        Wang et al., 2025, arXiv:2506.01939, eq. 5 (rho = 0.2).
    """
    if threshold is None:
        threshold = entropy_threshold(entropy, mask, top_fraction=top_fraction)
    return flagged(entropy >= threshold, mask)


def trust_region_mask(
    log_prob: Float[Tensor, "*shape"],
    behavior_log_prob: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    *,
    threshold: float,
) -> Bool[Tensor, "*shape"]:
    """Drop the tokens that drifted too far from the policy that sampled them (KL-mask).

    Args:
        log_prob: under the policy that is trained, in nats, ``[B, T]`` or ``[N]``.
        behavior_log_prob: under the policy that sampled, in nats.
        mask: True where a token counts; None for all.
        threshold: in nats; a token is kept while half of its squared log-ratio (k2) does not
            exceed it.

    Returns:
        True where the token is kept.

    Raises:
        ValueError: the threshold is not positive.
    """
    if not threshold > 0:
        raise ValueError(f"threshold must be positive, got {threshold}.")
    divergence = log_ratio(log_prob, behavior_log_prob, mask).square() / 2
    return flagged(divergence <= threshold, mask)


def off_policy_sequence_mask(
    log_prob: Float[Tensor, "*shape"],
    sampler_log_prob: Float[Tensor, "*shape"],
    advantage: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    lengths: Int[Tensor, " B"] | None = None,
    *,
    threshold: float,
) -> Bool[Tensor, "*shape"]:
    """Drop the bad sequences that the policy has left behind.

    Kept where the advantage is at least 0, or where the mean over the sequence of
    ``sampler_log_prob - log_prob`` does not exceed the threshold.

    Args:
        log_prob: under the policy that is trained, in nats, ``[B, T]`` or ``[N]``.
        sampler_log_prob: under the policy (and engine) that sampled, in nats.
        advantage: same shape.
        mask: True where a token counts; None for all.
        lengths: ``[B]`` when packed.
        threshold: in nats per token.

    Returns:
        True where the token is kept.

    Raises:
        ValueError: the shapes are neither layout.

    See Also:
        DeepSeek-AI, 2025 (V3.2), arXiv:2512.02556, eq. 9.
    """
    check_alike(log_prob=log_prob, advantage=advantage)
    drift = sequence_mean(-log_ratio(log_prob, sampler_log_prob, mask), mask, lengths)
    close = spread(drift, log_prob, lengths) <= threshold
    return flagged((advantage >= 0) | close, mask)


def overlong_mask(
    truncated: Bool[Tensor, " B"],
    mask: Bool[Tensor, "*shape"],
    lengths: Int[Tensor, " B"] | None = None,
) -> Bool[Tensor, "*shape"]:
    """Drop the sequences that were cut off (overlong filtering).

    Args:
        truncated: True for a sequence that ran into its limit, ``[B]``.
        mask: True where a token counts, ``[B, T]`` or ``[N]``.
        lengths: ``[B]`` when packed.

    Returns:
        True where the token is kept.

    Raises:
        ValueError: the shapes are neither layout.

    See Also:
        Yu et al., 2025 (DAPO), arXiv:2503.14476, section 3.4.
    """
    check_mask(mask)
    check_mask(truncated, "truncated")
    return mask & (spread((~truncated).to(torch.float32), mask, lengths) > 0)


def overlong_penalty(
    num_tokens: Int[Tensor, " B"], *, max_tokens: int, buffer_tokens: int
) -> Float[Tensor, " B"]:
    """Return what a long response loses of its reward (soft overlong punishment).

    Args:
        num_tokens: tokens of each response, ``[B]``.
        max_tokens: at and above it the penalty is -1.
        buffer_tokens: the penalty falls linearly from 0 to -1 over the last so many tokens.

    Returns:
        float32 ``[B]`` in [-1, 0], to be added to the reward.

    Raises:
        ValueError: ``buffer_tokens`` does not lie in ``[1, max_tokens]``.

    See Also:
        Yu et al., 2025 (DAPO), arXiv:2503.14476, eq. 13.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens must lie in [1, {max_tokens}], got {buffer_tokens}.")
    into_buffer = num_tokens - (max_tokens - buffer_tokens)
    return -(into_buffer.to(torch.float32) / buffer_tokens).clamp(0.0, 1.0)
