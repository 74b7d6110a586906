"""Losses on tokens that someone else wrote: fine-tuning and distillation, one value per token.

Reduce with ``aggregation.py``.

Shape legend: ``*shape`` is ``[B, T]`` or ``[N]`` tokens, V vocabulary.
"""

import math
from typing import Final, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .kl import kl_between, kl_estimate
from .ratios import LOG_RATIO_LIMIT, log_ratio
from .sequences import at_least_float32, check_alike, masked

KLDirection = Literal["forward", "reverse"]
KL_DIRECTIONS: Final[tuple[KLDirection, ...]] = ("forward", "reverse")


def negative_log_likelihood(
    log_prob: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"] | None = None
) -> Float[Tensor, "*shape"]:
    """``-log pi`` of each token.

    Args:
        log_prob: in nats, ``[B, T]`` or ``[N]``.
        mask: True where the token is trained; None for all. Elsewhere 0, without gradient.

    Returns:
        In nats, the shape of the input.
    """
    return -masked(log_prob, mask)


def minor_sft(
    sequence_log_prob: Float[Tensor, "*shape"],
    ref_sequence_log_prob: Float[Tensor, "*shape"],
    *,
    beta: float = 0.1,
) -> Float[Tensor, "*shape"]:
    """Minor SFT: ``-log sigmoid(beta (log pi - log ref))``, which stops where it has learnt.

    Args:
        sequence_log_prob: summed (or averaged) log-probability of each answer, in nats, ``[B]``.
        ref_sequence_log_prob: the same under the reference; never differentiated.
        beta: how soon the gradient fades.

    Returns:
        ``[B]``.

    Raises:
        ValueError: ``beta`` is not positive.

    See Also:
        Xie et al., 2024, arXiv:2408.10642.
    """
    if not beta > 0:
        raise ValueError(f"beta must be positive, got {beta}.")
    difference = sequence_log_prob - ref_sequence_log_prob.detach()
    return -torch.nn.functional.logsigmoid(beta * difference)


def sampled_distillation(
    log_prob: Float[Tensor, "*shape"],
    teacher_log_prob: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    *,
    direction: KLDirection | str = "reverse",
) -> Float[Tensor, "*shape"]:
    """KL to a teacher from the log-probs of single tokens, by the k3 estimator.

    Args:
        log_prob: under the student, in nats, ``[B, T]`` or ``[N]``.
        teacher_log_prob: under the teacher, in nats; never differentiated.
        mask: True where the token counts; None for all. Elsewhere 0, without gradient.
        direction: ``"reverse"``: KL(student || teacher), for tokens that the student sampled;
            ``"forward"``: KL(teacher || student), for tokens that the teacher sampled.

    Returns:
        In nats, the shape of the input.

    Raises:
        ValueError: the direction is unknown.

    See Also:
        Agarwal et al., 2024, arXiv:2306.13649.
    """
    if direction not in KL_DIRECTIONS:
        raise ValueError(f"direction must be one of {KL_DIRECTIONS}, got {direction!r}.")
    if direction == "reverse":
        return kl_estimate(log_prob, teacher_log_prob, mask, estimator="k3")
    check_alike(log_prob=log_prob, teacher_log_prob=teacher_log_prob)
    difference = at_least_float32(log_prob) - at_least_float32(teacher_log_prob.detach())
    difference = masked(difference, mask)
    return difference.clamp(max=LOG_RATIO_LIMIT).expm1() - difference


def distillation_advantage(
    log_prob: Float[Tensor, "*shape"],
    teacher_log_prob: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """``log q - log p`` of sampled tokens: distillation by policy gradient.

    As the advantage of a surrogate, times the ratio to the policy that sampled, its gradient is
    that of KL(student || teacher) at the student as it is now, also on tokens of an older one.

    Args:
        log_prob: log p, under the student, in nats, ``[B, T]`` or ``[N]``; never differentiated.
        teacher_log_prob: log q, under the teacher, in nats; never differentiated.
        mask: True where the token counts; None for all. Elsewhere 0.

    Returns:
        In nats, within plus or minus :data:`~.surrogates.LOG_RATIO_LIMIT`.

    See Also:
        Lu et al., 2025, "On-policy distillation", https://thinkingmachines.ai/blog.
    """
    return log_ratio(teacher_log_prob.detach(), log_prob, mask)


def generalized_jsd(
    logits: Float[Tensor, "*shape V"],
    teacher_logits: Float[Tensor, "*shape V"],
    *,
    weight: float = 0.5,
) -> Float[Tensor, "*shape"]:
    """Generalised Jensen-Shannon divergence of student and teacher, over the whole vocabulary.

    Args:
        logits: of the student, in nats, ``[..., V]``.
        teacher_logits: of the teacher, same shape; never differentiated.
        weight: beta, of the teacher in the mixture; 0 is the forward KL(teacher || student), 1
            the reverse KL(student || teacher).

    Returns:
        In nats, ``[...]``.

    Raises:
        ValueError: the weight is outside [0, 1].

    See Also:
        Agarwal et al., 2024, arXiv:2306.13649, eq. 1.
    """
    if not 0 <= weight <= 1:
        raise ValueError(f"weight must lie in [0, 1], got {weight}.")
    teacher_logits = teacher_logits.detach()
    if weight == 0:
        return kl_between(teacher_logits, logits)
    if weight == 1:
        return kl_between(logits, teacher_logits)
    student = at_least_float32(logits).log_softmax(-1)
    teacher = at_least_float32(teacher_logits).log_softmax(-1)
    mixture = torch.logaddexp(student + math.log(1 - weight), teacher + math.log(weight))
    return weight * kl_between(teacher, mixture) + (1 - weight) * kl_between(student, mixture)
