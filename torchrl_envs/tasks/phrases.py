"""What the tokenizer of the embedded model has as one token: calls of tools, and parts of them."""

import json
from collections.abc import Iterable
from itertools import product
from typing import Any, Final

from .games.catch import NUM_COLUMNS, NUM_ROWS
from .games.wordle import NUM_LETTERS

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


def wordle_phrases(words: Iterable[str]) -> list[str]:
    """What stands around a guess; of a short list each word, and what is marked in it.

    Args:
        words: of the list, few; none where words are read letter by letter.
    """
    around = [*ROLES, "done", "found", *around_argument("guess", "word")]
    whole = [text for word in words for text in (word, " ".join(word.upper()))]
    marks = [" ".join(each) for each in product("GXY", repeat=NUM_LETTERS)] if whole else []
    return [*around, *whole, *marks]
