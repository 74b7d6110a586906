"""The options of direct preference optimisation: a frozen record that checks itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import objectives
from torchrl_data.checks import NOT_NEGATIVE, check_numbers, one_of

from .token_options import TokenOptions, aggregation_name

if TYPE_CHECKING:
    from objectives import functional as F

_AGGREGATIONS: Final[tuple[F.Aggregation, ...]] = ("sequence_sum", "sequence_mean")


@dataclass(frozen=True, kw_only=True)
class DPOOptions(TokenOptions):
    """Options of :class:`~objectives.DPOLoss`, checked when they are made.

    Raises:
        ValueError: an option is unknown, out of range, or cannot take effect with the others.

    Example:
        >>> DPOOptions(loss_function="ipo").named_aggregation
        'sequence_mean'
    """

    aggregation: str | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """What an answer's log-prob is: the sum over its tokens (``"sequence_sum"``), or their mean
    (``"sequence_mean"``); None is the mean for ``"ipo"`` and where the loss is ``reference_free``,
    and the sum otherwise."""
    temperature: float | None = 1.0
    """The logits are divided by it."""
    loss_function: F.PreferenceFunction | str = "sigmoid"
    """``"sigmoid"``, ``"hinge"``, ``"ipo"`` or ``"robust"``; see
    :func:`~objectives.functional.preference_loss`."""
    beta: float = 0.1
    """How much a difference counts: the smaller, the further the policy goes from the reference."""
    label_smoothing: float = 0.0
    """The share of pairs that are the wrong way round, for ``"sigmoid"`` and ``"robust"``."""
    reference_free: bool = False
    """Whether the log-prob itself is the score of an answer, and not that less the reference's."""
    margin: float = 0.0
    """By which ``beta`` times the score of the better answer has to lead, for ``"sigmoid"``."""
    sft_coeff: float | None = None
    """Weight of the negative log-likelihood of the better answer, mean over its tokens; None or 0
    for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("aggregation", self.named_aggregation, _AGGREGATIONS)
        objectives.functional.check_preference(
            self.beta, self.loss_function, self.label_smoothing, self.margin
        )
        check_numbers("", NOT_NEGATIVE, sft_coeff=self.sft_coeff)

    @property
    def named_aggregation(self) -> F.Aggregation:
        """See the base class."""
        is_mean = self.loss_function == "ipo" or self.reference_free
        usual = "sequence_mean" if is_mean else "sequence_sum"
        return aggregation_name(self.aggregation or usual)
