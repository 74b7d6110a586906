"""Texts of tool calls, of which the embedded model's tokenizer makes one token each."""

import json
from typing import Any, Final

ROLES: Final = ("user", "assistant")
"""As the template writes them; what a tool answers is the user's, too."""


def call_text(tool: str, arguments: dict[str, Any]) -> str:
    """A call as the template writes it between its control tokens.

    Args:
        tool: its name.
        arguments: by name.
    """
    return f"\n{json.dumps({'name': tool, 'arguments': arguments})}\n"


def around_argument(tool: str, argument: str) -> list[str]:
    """Return what stands before and after the value in a call with one argument, but for quotes.

    Args:
        tool: its name.
        argument: its name.
    """
    return [part.strip(" ") for part in call_text(tool, {argument: 0}).split("0")]
