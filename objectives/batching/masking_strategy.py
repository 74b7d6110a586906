"""The names of the tokens that a loss trains."""

from __future__ import annotations

from typing import Final, Literal

from torchrl_data.checks import one_of

MaskingStrategy = Literal["assistant", "response", "all"]
MASKING_STRATEGIES: Final[tuple[MaskingStrategy, ...]] = ("assistant", "response", "all")


def resolve_masking_strategy(name: str) -> MaskingStrategy:
    """Resolve the name of a masking strategy, or TorchRL's for it."""
    theirs: dict[str, MaskingStrategy] = {"rlhf": "assistant", "sft": "response", "generic": "all"}
    return one_of("masking_strategy", name, MASKING_STRATEGIES, theirs)
