"""Causes of a gap between the log-prob of a token and the one that is computed again."""

from enum import StrEnum
from typing import Final


class Cause(StrEnum):
    """The reason why the log-prob of a token is not the one that is computed again."""

    TOKENS = "tokens"
    """The policy read other tokens than the row has: another template, or another tokenizer."""
    MASK = "mask"
    """The token counts as sampled, or was trained, and the policy did not sample it."""
    TRUNCATION = "truncation"
    """Top-k, top-p or min-p left out others than the settings say, or none."""
    ROUTING = "routing"
    """A mixture of experts sent the token to other experts."""
    NUMBERS = "type of numbers"
    """It was computed in other numbers, such as bfloat16."""
    BATCH = "batch shape"
    """It depends on the rows that were computed beside it."""
    CACHE = "stale cache"
    """Keys and values of what comes before it were those of other weights."""
    VERSION = "weight version"
    """Other weights drew it than those of its version."""
    TEMPERATURE = "temperature"
    """The logits were divided by another temperature."""
    ADAPTER = "adapter"
    """The adapters did not act."""


UNEXPLAINED: Final = "unexplained"
"""Stands for the cause of a gap that none of the causes explains."""
