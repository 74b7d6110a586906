"""What a model of 0.1 million parameters learns of reasoning-gym within minutes.

``docs/learning.md`` has what it learnt of each, and how that was measured.
"""

from typing import Any, Final

NUM_WARM_STEPS: Final = 1000
"""Steps of the warm start."""
EASY: Final[dict[str, dict[str, Any]]] = {
    "binary_matrix": {"min_n": 3, "max_n": 4},
    "complex_arithmetic": {
        **{"min_real": 0, "max_real": 9, "min_imag": 0, "max_imag": 9},
        **{"operations": ("+",), "operations_weights": (1.0,)},
    },
    "number_format": {"min_num_candidates": 2, "max_num_candidates": 2, "max_n": 2000},
    "number_sorting": {
        **{"min_numbers": 3, "max_numbers": 3},
        **{"max_decimals": 0, "min_value": 0, "max_value": 9},
    },
    "palindrome_generation": {"min_length": 3, "max_length": 5},
    "rotate_matrix": {"min_n": 2, "max_n": 2, "min_rotations": 1, "max_rotations": 1},
    "simple_equations": {
        **{"min_terms": 2, "max_terms": 2, "max_value": 9},
        **{"operators": ("+", "-"), "operators_weights": (0.5, 0.5)},
    },
    "spell_backward": {"min_word_len": 3, "max_word_len": 5},
    "string_insertion": {"min_string_length": 5, "max_string_length": 6},
    "word_sequence_reversal": {"min_words": 2, "max_words": 2},
    "word_sorting": {"min_words": 2, "max_words": 2, "max_word_length": 4},
}
"""A generator's settings that make its questions short, by its name."""


def easy_settings(generator: str) -> dict[str, Any]:
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
    return dict(EASY[generator])
