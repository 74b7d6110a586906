"""Log-probs from logits, which tokens count, and how much."""

from typing import Final, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .aggregation import at_least_float32, flagged, masked, sequence_mean, spread, token_mean
from .surrogates import log_ratio, sequence_log_ratio

# From logits to the log-probability of a token and the entropy of its distribution.
#
# Shape legend: K tokens, V vocabulary.


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


# Weights for the gap between the engine that sampled and the trainer's copy of the same policy.
#
# Shape legend: B sequences, T tokens, N packed tokens; ``*shape`` is ``[B, T]`` or ``[N]``.

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


# Masks that keep some of the trained tokens: by entropy, by trust region, by staleness, by length.
#
# Each gives a boolean keep-mask within the given mask; nothing is differentiated.
#
# Shape legend: B sequences, T tokens, N packed tokens; ``*shape`` is ``[B, T]`` or ``[N]``.


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
