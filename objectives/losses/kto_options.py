"""The options of learning from labelled answers: a frozen record that checks itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import objectives
from torchrl_data.checks import one_of

from .token_options import TokenOptions

FUNCTIONS: Final = ("kto", "apo_zero_unpaired")


@dataclass(frozen=True, kw_only=True)
class KTOOptions(TokenOptions):
    """Options of :class:`~objectives.KTOLoss`, checked when they are made.

    Raises:
        ValueError: an option is unknown or out of range.

    Example:
        >>> KTOOptions(undesirable_weight=1.5).compares_with_kl
        True
    """

    # The score of an answer is that of all of its tokens.
    aggregation: ClassVar[str] = "sequence_sum"  # pyright: ignore[reportIncompatibleVariableOverride]
    max_tokens: ClassVar[None] = None  # pyright: ignore[reportIncompatibleVariableOverride]

    temperature: float | None = 1.0
    """The logits are divided by it."""
    loss_function: str = "kto"
    """``"kto"``, or ``"apo_zero_unpaired"``: answers are compared with the reference itself, and
    not with how far the policy is from it; see :func:`~objectives.functional.kto_loss`."""
    beta: float = 0.1
    """How much a difference counts: the smaller, the further the policy goes from the reference."""
    desirable_weight: float = 1.0
    """Of the desirable answers. Where there are few of them, more, so that with their number it is
    as much as that of the others, or up to a third more."""
    undesirable_weight: float = 1.0
    """Of the undesirable answers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("loss_function", self.loss_function, FUNCTIONS)
        objectives.functional.check_kto(self.beta, self.desirable_weight, self.undesirable_weight)

    @property
    def compares_with_kl(self) -> bool:
        """Return whether mismatched answers are needed, of which the divergence is estimated."""
        return self.loss_function == "kto"
