"""The generators of reasoning-gym that a model of 0.1 million parameters learns within minutes.

``docs/learning.md`` has what it learnt of each, and how that was measured.
"""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

RIGHT_FRACTION: Final = 0.35
"""Of the demonstrations, that have no slip."""


@dataclass(frozen=True, kw_only=True)
class Easy:
    """Settings that make a generator's questions easy."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Of the generator, with which its questions are short."""
    num_warm_steps: int = 600
    """Steps of the warm start."""
    right_fraction: float = RIGHT_FRACTION
    """Of its demonstrations; less where an answer may have a slip and be right all the same."""


_TABLES: Final = tomllib.loads(Path(__file__).with_name("easy.toml").read_text("utf-8"))
EASY: Final = {name: Easy(**table) for name, table in _TABLES.items()}
"""Generators by name."""
