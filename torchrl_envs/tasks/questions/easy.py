"""What a model of 0.1 million parameters learns of reasoning-gym within minutes.

``docs/learning.md`` has what it learnt of each, and how that was measured.
"""

from dataclasses import dataclass, field
from typing import Any, Final

RIGHT_FRACTION: Final = 0.35
"""Of the demonstrations, that have no slip."""


@dataclass(frozen=True, kw_only=True)
class Easy:
    """What makes a generator's questions easy."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Of the generator, with which its questions are short."""
    num_warm_steps: int = 600
    """Steps of the warm start."""
    right_fraction: float = RIGHT_FRACTION
    """Of its demonstrations; less where an answer may have a slip and be right all the same."""


EASY: Final[dict[str, Easy]] = {
    "complex_arithmetic": Easy(
        settings={
            **{"min_real": 1, "max_real": 9, "min_imag": 1, "max_imag": 9},
            **{"operations": ["+"], "operations_weights": [1.0]},
        }
    ),
    "mini_sudoku": Easy(settings={"min_empty": 1, "max_empty": 1}, num_warm_steps=500),
    "number_sorting": Easy(
        settings={
            **{"min_numbers": 3, "max_numbers": 3, "min_value": 0, "max_value": 9},
            **{"min_decimals": 0, "max_decimals": 0},
        },
        right_fraction=0.12,  # 7.1 is taken for 7.0
    ),
    "palindrome_generation": Easy(settings={"min_length": 3, "max_length": 4}, num_warm_steps=1200),
    "rotate_matrix": Easy(
        settings={"min_n": 2, "max_n": 2, "min_rotations": 1, "max_rotations": 1}
    ),
    "spell_backward": Easy(settings={"min_word_len": 3, "max_word_len": 5}, num_warm_steps=1000),
    "spiral_matrix": Easy(settings={"min_n": 2, "max_n": 2}),
    "string_insertion": Easy(settings={"min_string_length": 5, "max_string_length": 5}),
}
"""Generators by name."""


def easy_questions(generator: str) -> Easy:
    """Settings of a generator with which its questions are easy.

    Raises:
        ValueError: there are none.
    """
    if generator not in EASY:
        raise ValueError(
            f"there are no easy questions of {generator}, and the embedded model learns no others: "
            "give it a model (policy.model=...), take a generator that has some "
            f"({', '.join(EASY)}), or try its own settings all the same (task.level=own)."
        )
    return EASY[generator]
