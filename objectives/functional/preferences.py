"""Losses of preferences: of two answers to one prompt, which is the better one.

Shape legend: P pairs.
"""

from typing import Final, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

PreferenceFunction = Literal["sigmoid", "hinge", "ipo", "robust"]
PREFERENCE_FUNCTIONS: Final[tuple[PreferenceFunction, ...]] = ("sigmoid", "hinge", "ipo", "robust")
SMOOTHED: Final = ("sigmoid", "robust")
"""Functions that take ``label_smoothing``."""


def preference_loss(
    chosen: Float[Tensor, " P"],
    rejected: Float[Tensor, " P"],
    *,
    beta: float = 0.1,
    loss_function: PreferenceFunction | str = "sigmoid",
    label_smoothing: float = 0.0,
    margin: float = 0.0,
) -> Float[Tensor, " P"]:
    r"""The loss of each pair, from a score of either answer.

    In DPO the score of an answer is its log-probability less that under the reference, in a reward
    model (with ``beta=1``) what the model says of it. With :math:`\Delta` for the difference of the
    two and :math:`\epsilon` for ``label_smoothing``:

    * ``"sigmoid"``: :math:`-(1-\epsilon)\log\sigma(\beta\Delta-\gamma)
      -\epsilon\log\sigma(\gamma-\beta\Delta)`, where :math:`\gamma` is ``margin``;
    * ``"robust"``: :math:`(-(1-\epsilon)\log\sigma(\beta\Delta)
      +\epsilon\log\sigma(-\beta\Delta))/(1-2\epsilon)`, whose mean over pairs that are swapped with
      probability :math:`\epsilon` is that of pairs that are not;
    * ``"hinge"``: :math:`\max(0, 1-\beta\Delta)`;
    * ``"ipo"``: :math:`(\Delta-1/(2\beta))^2`.

    Args:
        chosen: score of the better answer, ``[P]``.
        rejected: score of the other one, ``[P]``.
        beta: how much a difference counts.
        loss_function: one of the four.
        label_smoothing: the share of pairs that are the wrong way round.
        margin: by which the better answer has to lead, of ``beta`` times the scores; of
            ``"sigmoid"`` alone.

    Returns:
        ``[P]``.

    Raises:
        ValueError: an argument is out of range, or has no effect on the function.

    See Also:
        Rafailov et al., 2023, arXiv:2305.18290, equation 7, and Mitchell, 2023, "A note on DPO with
        noisy preferences", for ``"sigmoid"``; Chowdhury et al., 2024, arXiv:2403.00409, equation
        12, for ``"robust"``; Zhao et al., 2023, arXiv:2305.10425, for ``"hinge"``; Azar et al.,
        2023, arXiv:2310.12036, equation 17, for ``"ipo"``; Meng et al., 2024, arXiv:2405.14734,
        equation 6, for the margin.

    Example:
        >>> chosen, rejected = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0])
        >>> preference_loss(chosen, rejected, beta=1.0)  # log(1 + 1 / e), log 2
        tensor([0.3133, 0.6931])
    """
    check_preference(beta, loss_function, label_smoothing, margin)
    difference = chosen - rejected
    if loss_function == "ipo":
        return (difference - 1 / (2 * beta)).square()
    logits = beta * difference - margin
    if loss_function == "hinge":
        return torch.relu(1 - logits)
    right, wrong = (-nn.functional.logsigmoid(x) for x in (logits, -logits))
    if loss_function == "robust":
        own = (1 - label_smoothing) * right - label_smoothing * wrong
        return own / (1 - 2 * label_smoothing)
    return (1 - label_smoothing) * right + label_smoothing * wrong


def check_preference(
    beta: float, loss_function: str, label_smoothing: float, margin: float
) -> None:
    """Check the arguments of :func:`preference_loss`.

    Raises:
        ValueError: one is out of range, or has no effect on the function.
    """
    if loss_function not in PREFERENCE_FUNCTIONS:
        raise ValueError(
            f"loss_function must be one of {PREFERENCE_FUNCTIONS}, got {loss_function!r}."
        )
    if not beta > 0:
        raise ValueError(f"beta must be positive, got {beta}.")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            "label_smoothing is the share of pairs that are the wrong way round, at least 0 and "
            f"less than 0.5, got {label_smoothing}."
        )
    if label_smoothing and loss_function not in SMOOTHED:
        raise ValueError(
            f"label_smoothing={label_smoothing} goes with loss_function 'sigmoid' or 'robust', got "
            f"{loss_function!r}: leave it out."
        )
    if not margin >= 0:
        raise ValueError(f"margin must not be negative, got {margin}.")
    if margin and loss_function != "sigmoid":
        raise ValueError(
            f"margin={margin} goes with loss_function 'sigmoid', got {loss_function!r}: leave it "
            "out."
        )
