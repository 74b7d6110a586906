"""Settings of recipes: their schema, the files that all have, the command line and its help."""

import os
from typing import Final

TYPED_AS: Final = "TORCHRL_AGENTS_TYPED_AS"
"""The variable in which the command says what was typed to the script that it becomes."""


def program(recipe: str) -> str:
    """Give what was typed for a recipe, with which its messages begin.

    Args:
        recipe: its name.

    Returns:
        ``torchrl-agents grpo``, or ``grpo.py`` where the script itself was started.
    """
    return os.environ.get(TYPED_AS, f"{recipe}.py")
