"""What a model of 0.1 million parameters learns of reasoning-gym within minutes.

``docs/learning.md`` has what it learnt of each, and how that was measured.
"""

from typing import Any, Final

NUM_WARM_STEPS: Final = 1000
"""Steps of the warm start."""
EASY: Final[dict[str, dict[str, Any]]] = {
    "rotate_matrix": {"min_n": 2, "max_n": 2, "min_rotations": 1, "max_rotations": 1},
    "spell_backward": {"min_word_len": 3, "max_word_len": 5},
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
