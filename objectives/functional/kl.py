"""Estimates of the KL divergence from single samples.

Shape legend: ``*shape`` is ``[B, T]`` or ``[N]`` tokens, V vocabulary.
"""

from typing import Final, Literal

from jaxtyping import Bool, Float
from torch import Tensor

from .ratios import LOG_RATIO_LIMIT
from .sequences import at_least_float32, check_alike, masked

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
    check_alike(log_prob=log_prob, ref_log_prob=ref_log_prob)
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
