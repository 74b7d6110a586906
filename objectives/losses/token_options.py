"""The options that all losses over tokens have: a frozen record that checks itself.

Records of options need torch when one is made, not when they are imported: a command line shows
their fields at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import objectives
from objectives.batching.masking_strategy import resolve_masking_strategy
from torchrl_data.checks import POSITIVE, check_counts, check_numbers, one_of

if TYPE_CHECKING:
    from objectives import functional as F


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """Options of a loss over tokens, checked when they are made.

    Raises:
        ValueError: an option is unknown, out of range, or cannot take effect with the others.
    """

    aggregation: str = "token_mean"
    """``"token_mean"``, ``"sequence_mean"`` (TorchRL's ``"prompt_mean"``), ``"fixed_length"`` or
    ``"sequence_sum"``; ``"none"`` gives ``[K]`` values."""
    max_tokens: int | None = None
    """What ``"fixed_length"`` divides by."""
    masking_strategy: str = "assistant"
    """``"assistant"``: what the policy sampled; ``"response"``: everything from the first sampled
    token on; ``"all"``. (TorchRL: ``"rlhf"``, ``"sft"``, ``"generic"``.)"""
    temperature: float | None = None
    """The logits are divided by it."""

    def __post_init__(self) -> None:
        resolve_masking_strategy(self.masking_strategy)
        check_numbers("", POSITIVE, temperature=self.temperature)
        fixed = self.named_aggregation == "fixed_length"
        if fixed != (self.max_tokens is not None):
            raise ValueError(
                "max_tokens goes with aggregation 'fixed_length': give both or none, got "
                f"aggregation={self.aggregation!r} and max_tokens={self.max_tokens}."
            )
        check_counts(max_tokens=self.max_tokens)

    @property
    def named_aggregation(self) -> F.Aggregation:
        """The aggregation by its own name, without aliases."""
        return aggregation_name(self.aggregation)


def aggregation_name(aggregation: str) -> F.Aggregation:
    """The name of an aggregation, from it or from TorchRL's name."""
    theirs: dict[str, F.Aggregation] = {"prompt_mean": "sequence_mean"}
    return one_of("aggregation", aggregation, objectives.functional.AGGREGATIONS, theirs)
