"""What all losses over tokens can be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from objectives import functional as F
from objectives.batching.packed_batch import resolve_masking_strategy
from torchrl_data.validation import POSITIVE, check_counts, check_numbers, one_of

_TORCHRL_AGGREGATIONS: Final[Mapping[str, F.Aggregation]] = {"prompt_mean": "sequence_mean"}


def aggregation_name(aggregation: str) -> F.Aggregation:
    """The name of an aggregation, from it or from TorchRL's name."""
    return one_of("aggregation", aggregation, F.AGGREGATIONS, _TORCHRL_AGGREGATIONS)


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """Options of a loss over tokens, checked when they are made.

    Args:
        aggregation: ``"token_mean"``, ``"sequence_mean"`` (TorchRL's ``"prompt_mean"``),
            ``"fixed_length"``, ``"sequence_sum"``; ``"none"`` gives ``[K]`` values.
        max_tokens: what ``"fixed_length"`` divides by.
        masking_strategy: ``"assistant"``: what the policy sampled; ``"response"``: everything
            from the first sampled token on; ``"all"``. (TorchRL: ``"rlhf"``, ``"sft"``,
            ``"generic"``.)
        temperature: the logits are divided by it.

    Raises:
        ValueError: an option is unknown, out of range, or cannot take effect with the others.
    """

    aggregation: str = "token_mean"
    max_tokens: int | None = None
    masking_strategy: str = "assistant"
    temperature: float | None = None

    def __post_init__(self) -> None:
        resolve_masking_strategy(self.masking_strategy)
        check_numbers("", POSITIVE, temperature=self.temperature)
        fixed = aggregation_name(self.aggregation) == "fixed_length"
        if fixed != (self.max_tokens is not None):
            raise ValueError(
                "max_tokens goes with aggregation 'fixed_length': give both or none, got "
                f"aggregation={self.aggregation!r} and max_tokens={self.max_tokens}."
            )
        check_counts(max_tokens=self.max_tokens)
