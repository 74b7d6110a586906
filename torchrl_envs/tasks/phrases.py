"""What the tokenizer of the embedded model has as one token: calls of tools, and parts of them."""

import json
from typing import Any

from .games.catch import NUM_COLUMNS, NUM_ROWS


def call_text(tool: str, arguments: dict[str, Any]) -> str:
    """A call as the template writes it between its control tokens.

    Args:
        tool: its name.
        arguments: by name.
    """
    return f"\n{json.dumps({'name': tool, 'arguments': arguments})}\n"


def around_argument(tool: str, argument: str) -> list[str]:
    """What stands before and after the value in a call with one argument, but for quotes.

    Args:
        tool: its name.
        argument: its name.
    """
    return [part.strip(" ") for part in call_text(tool, {argument: 0}).split("0")]


def catch_phrases() -> list[str]:
    """Moves, lines of the board with something in them, and how many lines have nothing."""
    moves = [call_text("move", {"direction": each}) for each in ("left", "right")]
    nothing = "." * NUM_COLUMNS
    marked = [
        f"{nothing[:column]}{mark}{nothing[column + 1 :]}"
        for mark in "o=*"
        for column in range(NUM_COLUMNS)
    ]
    empty = ["\n".join([nothing] * count) for count in range(1, NUM_ROWS)]
    return [*moves, call_text("stay", {}), *marked, *empty]
