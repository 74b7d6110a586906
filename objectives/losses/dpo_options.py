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
    (``"sequence_mean"``); None is the mean for ``"ipo"`` and ``"orpo"`` and where the loss is
    ``reference_free``, and the sum otherwise."""
    temperature: float | None = 1.0
    """The logits are divided by it."""
    loss_function: F.PreferenceFunction | str = "sigmoid"
    """``"sigmoid"``, ``"hinge"``, ``"ipo"``, ``"robust"``, ``"exo_pair"``, ``"apo_zero"``,
    ``"apo_down"``, ``"bco_pair"``, ``"nca_pair"``, ``"sppo_hard"`` or ``"orpo"``; see
    :func:`~objectives.functional.preference_loss`."""
    beta: float = 0.1
    """How much a difference counts: the smaller, the further the policy goes from the reference;
    for ``"orpo"`` the weight of its odds ratio."""
    label_smoothing: float = 0.0
    """The share of pairs that are the wrong way round, for ``"sigmoid"``, ``"robust"`` and
    ``"exo_pair"``."""
    reference_free: bool | None = None
    """Whether the log-prob itself is the score of an answer, and not that less the reference's;
    None is True for ``"orpo"``, and False otherwise."""
    margin: float = 0.0
    """By which ``beta`` times the score of the better answer has to lead, for ``"sigmoid"``."""
    sft_coeff: float | None = None
    """Weight of the negative log-likelihood of the better answer, mean over its tokens; None is 1
    for ``"orpo"``, and 0 otherwise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("aggregation", self.named_aggregation, _AGGREGATIONS)
        objectives.functional.check_preference(
            self.beta, self.loss_function, self.label_smoothing, self.margin
        )
        check_numbers("", NOT_NEGATIVE, sft_coeff=self.sft_coeff)
        self._check_scores()

    def _check_scores(self) -> None:
        """Check that the scores are those that the function is of."""
        is_sum = self.named_aggregation == "sequence_sum"
        if self.is_orpo and (self.reference_free is False or is_sum):
            raise ValueError(
                "loss_function='orpo' goes by the mean log-prob of an answer's tokens, and has no "
                f"reference; got reference_free={self.reference_free} and "
                f"aggregation={self.aggregation!r}: leave both out."
            )
        if self.reference_free and self.loss_function in objectives.functional.AGAINST_REFERENCE:
            raise ValueError(
                f"loss_function={self.loss_function!r} compares each answer with the reference; "
                "with reference_free=True there is none. Leave it out, or take 'sigmoid'."
            )

    @property
    def is_orpo(self) -> bool:
        """Return whether the loss goes by odds: no reference, and a likelihood beside them."""
        return self.loss_function == "orpo"

    @property
    def has_reference(self) -> bool:
        """Return whether the log-prob of an answer under a reference counts."""
        return not (self.reference_free or self.is_orpo)

    @property
    def nll_coeff(self) -> float:
        """The weight of the likelihood of the better answer; 0 for none."""
        return float(self.is_orpo) if self.sft_coeff is None else self.sft_coeff

    @property
    def named_aggregation(self) -> F.Aggregation:
        """See the base class."""
        is_mean = self.loss_function == "ipo" or not self.has_reference
        usual = "sequence_mean" if is_mean else "sequence_sum"
        return aggregation_name(self.aggregation or usual)
