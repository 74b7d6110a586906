"""Losses of answers that are labelled one by one, as desirable or not.

Shape legend: B answers.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def kto_loss(
    score: Float[Tensor, " B"],
    label: Bool[Tensor, " B"],
    *,
    reference_kl: float = 0.0,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Float[Tensor, " B"]:
    r"""Kahneman-Tversky optimisation: the loss of each answer, from its score and its label.

    With :math:`r` for the score, the log-probability of an answer less that under the reference,
    and :math:`z` for ``reference_kl``, the loss of a desirable answer is
    :math:`\lambda_D(1-\sigma(\beta(r-z)))`, and that of an undesirable one
    :math:`\lambda_U(1-\sigma(\beta(z-r)))`: it is largest where an answer is far on the wrong side
    of :math:`z`, and its gradient is largest near it.

    With ``reference_kl=0`` it is APO-zero of single answers.

    Args:
        score: of each answer, ``[B]``.
        label: True where it is desirable, ``[B]``.
        reference_kl: what scores are compared with, in nats: an estimate of the KL divergence of
            the policy from the reference, at least 0; no gradient goes through it.
        beta: how much a difference counts.
        desirable_weight: of the desirable answers.
        undesirable_weight: of the others.

    Returns:
        ``[B]``, from 0 to the answer's weight.

    Raises:
        ValueError: an argument is out of range.

    See Also:
        Ethayarajh et al., 2024, arXiv:2402.01306, equations 7 and 8; D'Oosterlinck et al., 2024,
        arXiv:2408.06266, equation 7.

    Example:
        >>> score, label = torch.tensor([1.0, 1.0]), torch.tensor([True, False])
        >>> kto_loss(score, label, reference_kl=1.0, undesirable_weight=2.0)
        tensor([0.5000, 1.0000])
    """
    check_kto(beta, desirable_weight, undesirable_weight)
    if not 0 <= reference_kl < math.inf:
        raise ValueError(f"reference_kl must be finite and at least 0, got {reference_kl}.")
    sign = label.to(score.dtype) * 2 - 1
    weight = torch.where(label, *map(score.new_tensor, (desirable_weight, undesirable_weight)))
    return weight * torch.sigmoid(-sign * beta * (score - reference_kl))


def check_kto(beta: float, desirable_weight: float, undesirable_weight: float) -> None:
    """Check the arguments of :func:`kto_loss`.

    Raises:
        ValueError: one is out of range.
    """
    if not 0 < beta < math.inf:
        raise ValueError(f"beta must be positive, got {beta}.")
    for name, weight in (
        ("desirable_weight", desirable_weight),
        ("undesirable_weight", undesirable_weight),
    ):
        if not 0 < weight < math.inf:
            raise ValueError(
                f"{name} must be positive, got {weight}. Leave these answers out of the data to "
                "learn nothing of them."
            )
