"""Losses of preferences: of two answers to one prompt, which is the better one.

Shape legend: P pairs.
"""

import math
from typing import Final, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

PreferenceFunction = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "apo_zero",
    "apo_down",
    "bco_pair",
    "nca_pair",
    "sppo_hard",
    "orpo",
]
PREFERENCE_FUNCTIONS: Final[tuple[PreferenceFunction, ...]] = get_args(PreferenceFunction)
SMOOTHED: Final = ("sigmoid", "robust", "exo_pair")
"""Functions that take ``label_smoothing``."""
AGAINST_REFERENCE: Final = ("apo_zero", "apo_down", "bco_pair", "nca_pair", "sppo_hard")
"""Functions that also compare each score with 0, which the reference's own answers have."""


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
    model (with ``beta=1``) what the model says of it. With :math:`r_c` and :math:`r_r` for ``beta``
    times the two, :math:`\Delta=r_c-r_r` and :math:`\epsilon` for ``label_smoothing``:

    * ``"sigmoid"``: :math:`-(1-\epsilon)\log\sigma(\Delta-\gamma)
      -\epsilon\log\sigma(\gamma-\Delta)`, where :math:`\gamma` is ``margin``;
    * ``"robust"``: :math:`(-(1-\epsilon)\log\sigma(\Delta)
      +\epsilon\log\sigma(-\Delta))/(1-2\epsilon)`, whose mean over pairs that are swapped with
      probability :math:`\epsilon` is that of pairs that are not;
    * ``"hinge"``: :math:`\max(0, 1-\Delta)`;
    * ``"ipo"``: :math:`(\Delta/\beta-1/(2\beta))^2`;
    * ``"exo_pair"``: the KL divergence of :math:`(\sigma(\Delta),\sigma(-\Delta))` from
      :math:`(1-\epsilon,\epsilon)`, where :math:`\epsilon` is not 0;
    * ``"apo_zero"``: :math:`1-\sigma(r_c)+\sigma(r_r)`: the better answer becomes likelier, and
      the other one less likely;
    * ``"apo_down"``: :math:`\sigma(r_c)+1-\sigma(\Delta)`: both become less likely, the better
      one less so;
    * ``"bco_pair"``: :math:`-\log\sigma(r_c)-\log\sigma(-r_r)`, which is BCO without its shift of
      the rewards;
    * ``"nca_pair"``: :math:`-\log\sigma(r_c)-(\log\sigma(-r_c)+\log\sigma(-r_r))/2`;
    * ``"sppo_hard"``: :math:`(r_c/\beta-1/(2\beta))^2+(r_r/\beta+1/(2\beta))^2`;
    * ``"orpo"``: :math:`-\beta\log\sigma(\log(o_c/o_r))`, where a score is the mean log-probability
      of an answer's tokens, and its odds are :math:`o=p/(1-p)`. ORPO adds it to the negative
      log-likelihood of the better answer.

    Args:
        chosen: score of the better answer, ``[P]``.
        rejected: score of the other one, ``[P]``.
        beta: how much a difference counts; for ``"orpo"`` the weight of the loss.
        loss_function: one of these.
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
        equation 6, for the margin; Ji et al., 2024, arXiv:2402.00856, equation 16, for
        ``"exo_pair"``; D'Oosterlinck et al., 2024, arXiv:2408.06266, equations 7 and 8, for
        ``"apo_zero"`` and ``"apo_down"``; Jung et al., 2024, arXiv:2404.04656, for ``"bco_pair"``;
        Chen et al., 2024, arXiv:2402.05369, for ``"nca_pair"``; Wu et al., 2024, arXiv:2405.00675,
        equation 4.7, for ``"sppo_hard"``; Hong et al., 2024, arXiv:2403.07691, equation 7, for
        ``"orpo"``.

    Example:
        >>> chosen, rejected = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0])
        >>> preference_loss(chosen, rejected, beta=1.0)  # log(1 + 1 / e), log 2
        tensor([0.3133, 0.6931])
    """
    check_preference(beta, loss_function, label_smoothing, margin)
    if loss_function == "orpo":
        return -beta * nn.functional.logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    if loss_function in AGAINST_REFERENCE:
        return _loss_against_reference(chosen, rejected, beta, loss_function)
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
    if loss_function == "exo_pair":
        of_right = right + math.log(1 - label_smoothing)
        of_wrong = wrong + math.log(label_smoothing)
        return -torch.sigmoid(logits) * of_right - torch.sigmoid(-logits) * of_wrong
    return (1 - label_smoothing) * right + label_smoothing * wrong


def _loss_against_reference(
    chosen: Tensor, rejected: Tensor, beta: float, loss_function: str
) -> Tensor:
    """The functions that also compare each score with 0, ``[P]``."""
    if loss_function == "sppo_hard":
        return (chosen - 1 / (2 * beta)).square() + (rejected + 1 / (2 * beta)).square()
    better, other = beta * chosen, beta * rejected
    if loss_function == "apo_zero":
        return torch.sigmoid(-better) + torch.sigmoid(other)
    if loss_function == "apo_down":
        return torch.sigmoid(better) + torch.sigmoid(other - better)
    logsigmoid = nn.functional.logsigmoid
    if loss_function == "nca_pair":
        return -logsigmoid(better) - (logsigmoid(-better) + logsigmoid(-other)) / 2
    return -logsigmoid(better) - logsigmoid(-other)


def _log_odds(log_prob: Tensor) -> Tensor:
    """Of a probability by its logarithm; one that rounds to 1 has the largest odds below it."""
    log_prob = log_prob.clamp(max=-torch.finfo(log_prob.dtype).eps)
    return log_prob - (-torch.expm1(log_prob)).log()


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
            f"label_smoothing={label_smoothing} goes with loss_function 'sigmoid', 'robust' or "
            f"'exo_pair', got {loss_function!r}: leave it out."
        )
    if not label_smoothing and loss_function == "exo_pair":
        raise ValueError(
            "loss_function='exo_pair' needs label_smoothing above 0, such as 1e-3: without it the "
            "divergence is infinite."
        )
    if not margin >= 0:
        raise ValueError(f"margin must not be negative, got {margin}.")
    if margin and loss_function != "sigmoid":
        raise ValueError(
            f"margin={margin} goes with loss_function 'sigmoid', got {loss_function!r}: leave it "
            "out."
        )
