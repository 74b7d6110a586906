"""The options of the loss of a reward model: a frozen record that checks itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import objectives
from torchrl_data.checks import NOT_NEGATIVE, check_numbers

from .token_options import TokenOptions


@dataclass(frozen=True, kw_only=True)
class RewardModelOptions(TokenOptions):
    """Options of :class:`~objectives.RewardModelLoss`, checked when they are made.

    Raises:
        ValueError: an option is out of range.

    Example:
        >>> RewardModelOptions(center_coeff=0.01)
        RewardModelOptions(label_smoothing=0.0, margin=0.0, center_coeff=0.01)
    """

    # A row has one reward, of all that it holds: no tokens are reduced, or left out.
    aggregation: ClassVar[str] = "sequence_mean"  # pyright: ignore[reportIncompatibleVariableOverride]
    max_tokens: ClassVar[None] = None  # pyright: ignore[reportIncompatibleVariableOverride]
    masking_strategy: ClassVar[str] = "assistant"  # pyright: ignore[reportIncompatibleVariableOverride]
    temperature: ClassVar[None] = None  # pyright: ignore[reportIncompatibleVariableOverride]

    label_smoothing: float = 0.0
    """The share of pairs that are the wrong way round."""
    margin: float = 0.0
    """By which the reward of the better answer has to lead."""
    center_coeff: float | None = None
    """Weight of the square of the sum of the two rewards, mean over pairs, which keeps rewards
    around 0 (TRL's ``center_rewards_coefficient``, there 0.01); None or 0 for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        objectives.functional.check_preference(1.0, "sigmoid", self.label_smoothing, self.margin)
        check_numbers("", NOT_NEGATIVE, center_coeff=self.center_coeff)
