"""Settings of recipes: their schema, the files that all have, the command line and its help."""

import io
import os
import sys
from typing import Final

TYPED_AS: Final = "TORCHRL_AGENTS_TYPED_AS"
"""The variable in which the command says what was typed to the script that it becomes."""

SUBMITS: Final = "TORCHRL_AGENTS_SUBMITS"
"""The variable with which settings that are shown (``--cfg job``) are checked, too: those of a job
before it is submitted."""


def escape_what_the_output_lacks() -> None:
    """Print a letter that the encoding of the output lacks as an escape, as standard error does.

    What a policy has said may hold any letter, and printing it ends no run.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def program(recipe: str) -> str:
    """Give what was typed for a recipe, with which its messages begin.

    Args:
        recipe: its name.

    Returns:
        ``torchrl-agents grpo``, or ``grpo.py`` where the script itself was started.
    """
    return os.environ.get(TYPED_AS, f"{recipe}.py")
