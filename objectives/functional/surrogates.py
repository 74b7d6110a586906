"""Log-ratios, KL estimators, and the policy term of each algorithm, one value per token."""

import math
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .aggregation import at_least_float32, flagged, masked, sequence_mean, sequence_sum, spread

# Importance ratios, and the policy objective of each algorithm on them, per token, not reduced.
#
# All surrogates take the token's log-ratio (:func:`log_ratio`, of any level), and its advantage;
# what lies outside the mask counts as ratio 1 and loss 0 and gets no gradient. Sequence-level terms
# (:func:`vespo`, :func:`gmpo`) are below.
#
# Shape legend: B sequences, T tokens, N packed tokens; ``*shape`` is ``[B, T]`` or ``[N]``.

LOG_RATIO_LIMIT: Final = 20.0
"""A log-ratio is kept within plus or minus this, in nats.

``exp(20)`` is 4.9e8: such a ratio carries no information, but its overflow to infinity a little
further on would turn ``0 * inf`` into NaN. No gradient flows beyond the limit.
"""

RatioLevel = Literal["token", "sequence", "sequence_token"]
RATIO_LEVELS: Final[tuple[RatioLevel, ...]] = ("token", "sequence", "sequence_token")


def log_ratio(
    log_prob: Float[Tensor, "*shape"],
    behavior_log_prob: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Log of the importance ratio of each token.

    Args:
        log_prob: log-probability under the policy that is trained, in nats, ``[B, T]`` or ``[N]``.
        behavior_log_prob: the same tokens under the policy that sampled them; never
            differentiated.
        mask: True where the token is trained; None for all. Elsewhere the result is 0, whatever
            the inputs hold (NaN and infinities included), and no gradient flows.

    Returns:
        ``log_prob - behavior_log_prob`` in nats, within plus or minus :data:`LOG_RATIO_LIMIT`;
        float32 at least, in which its exponential is finite.
    """
    difference = at_least_float32(log_prob) - at_least_float32(behavior_log_prob.detach())
    return masked(difference, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_log_ratio(
    token_log_ratio: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    lengths: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Mean log-ratio of each sequence, given to each of its tokens (GSPO).

    The mean, not the sum: the sum grows with the length, so that a gap of -0.001 nats a token
    leaves a 4,096-token sequence a weight of 0.017.

    Args:
        token_log_ratio: in nats, ``[B, T]`` or ``[N]``.
        mask: True where the token is trained; None for all.
        lengths: ``[B]`` when packed.

    Returns:
        The shape of the input; 0 on the sequences without trained tokens.

    Raises:
        ValueError: the shapes are neither layout.

    See Also:
        Zheng et al., 2025, arXiv:2507.18071, eq. 7.
    """
    return spread(sequence_mean(token_log_ratio, mask, lengths), token_log_ratio, lengths)


def leveled_log_ratio(
    token_log_ratio: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    lengths: Int[Tensor, " B"] | None = None,
    *,
    level: RatioLevel | str = "token",
) -> Float[Tensor, "*shape"]:
    """The log-ratio at the level at which it is clipped.

    Args:
        token_log_ratio: in nats, ``[B, T]`` or ``[N]``.
        mask: True where the token is trained; None for all.
        lengths: ``[B]`` when packed.
        level: ``"token"`` gives the input back; ``"sequence"`` the sequence's mean (GSPO, eq. 7);
            ``"sequence_token"`` the value of the mean with the gradient of the token (GSPO-token,
            eq. 14), for advantages that differ within a sequence.

    Returns:
        The shape of the input.

    Raises:
        ValueError: the level is unknown, or the shapes are neither layout.

    See Also:
        Zheng et al., 2025, arXiv:2507.18071, eq. 7 and 14.
    """
    if level not in RATIO_LEVELS:
        raise ValueError(f"level must be one of {RATIO_LEVELS}, got {level!r}.")
    if level == "token":
        return token_log_ratio
    sequence = sequence_log_ratio(token_log_ratio, mask, lengths)
    if level == "sequence":
        return sequence
    return sequence.detach() + token_log_ratio - token_log_ratio.detach()


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
    ratio = masked(log_ratio, mask).exp()
    advantage = masked(advantage.detach(), mask)
    positive = torch.full_like(advantage, temperature_positive)
    tau = torch.where(advantage > 0, positive, temperature_negative)
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    loss = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantage
    return Surrogate(loss, ratio.detach(), nothing, nothing)


# Estimates of the KL divergence from single samples.
#
# Shape legend: ``*shape`` is ``[B, T]`` or ``[N]`` tokens, V vocabulary.

KLEstimator = Literal["k1", "k2", "k3"]
KL_ESTIMATORS: Final[tuple[KLEstimator, ...]] = ("k1", "k2", "k3")


def kl_estimate(
    log_prob: Float[Tensor, "*shape"],
    ref_log_prob: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    *,
    estimator: KLEstimator | str = "k3",
    log_ratio: Float[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Estimate ``KL(pi || ref)`` from the sampled tokens, one value per token.

    With ``d = ref - pi``: k1 is ``-d`` (unbiased, high variance), k2 is ``d^2 / 2`` (biased; its
    gradient is the one of the KL), k3 is ``e^d - d - 1`` (unbiased, never negative).

    Args:
        log_prob: log-probability under the policy that is trained, in nats, ``[B, T]`` or ``[N]``.
        ref_log_prob: the same tokens under the reference, in nats; never differentiated.
        mask: True where the token counts; None for all. Elsewhere the result is 0, whatever the
            inputs hold.
        estimator: ``"k1"``, ``"k2"`` or ``"k3"``.
        log_ratio: log of the importance ratio r to the policy that sampled, in nats. When given
            the estimate is multiplied by r, differentiated, which makes it and its gradient
            unbiased off-policy (bias correction).

    Returns:
        In nats, the shape of the input; float32 at least.

    Raises:
        ValueError: the estimator is unknown.

    See Also:
        Schulman, 2020, http://joschu.net/blog/kl-approx.html; DeepSeek-AI, 2025 (V3.2),
        arXiv:2512.02556, eq. 7, for the correction.
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"estimator must be one of {KL_ESTIMATORS}, got {estimator!r}.")
    difference = at_least_float32(ref_log_prob.detach()) - at_least_float32(log_prob)
    difference = masked(difference, mask)
    if estimator == "k1":
        estimate = -difference
    elif estimator == "k2":
        estimate = difference.square() / 2
    else:
        estimate = difference.clamp(max=LOG_RATIO_LIMIT).expm1() - difference
    return estimate if log_ratio is None else estimate * masked(log_ratio, mask).exp()


def kl_between(
    logits: Float[Tensor, "*shape V"], other_logits: Float[Tensor, "*shape V"]
) -> Float[Tensor, "*shape"]:
    """Exact ``KL(p || q)`` of two categorical distributions over the vocabulary.

    Args:
        logits: of p, unnormalised log-probabilities in nats, ``[..., V]``.
        other_logits: of q, same shape.

    Returns:
        In nats, ``[...]``. Both sides are differentiated: detach a teacher.
    """
    log_p = at_least_float32(logits).log_softmax(-1)
    log_q = at_least_float32(other_logits).log_softmax(-1)
    impossible = log_p.isneginf()
    difference = (log_p - log_q).masked_fill(impossible, 0.0)  # mutate: equivalent number (times 0)
    return (log_p.exp() * difference).sum(-1)


# Policy objectives whose ratio belongs to a whole sequence: VESPO and GMPO.
#
# (GSPO is the clipped surrogate on :func:`~.surrogates.sequence_log_ratio`.)
#
# Shape legend: B sequences, T tokens, N packed tokens; ``*shape`` is ``[B, T]`` or ``[N]``.

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


# Policy objectives that mask by a divergence: DPPO, and the two-sided masks of IPO and KPop.
#
# A ratio is a poor measure of a move: that of a rare token is large while nothing has changed, that
# of a frequent one small while everything has. The divergence here is that of the two-event
# distributions (this token, any other one), of which both probabilities are known.
#
# Shape legend: ``*shape`` is ``[B, T]`` or ``[N]`` tokens.

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
