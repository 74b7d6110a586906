"""Fenced code blocks in what a model wrote."""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

_FENCE: Final = re.compile(r"(?P<indent>[ \t]*)(?P<ticks>`{3,})(?P<info>[^`]*)")
PYTHON: Final = frozenset({"python", "py", "python3"})


class CodeBlock(NamedTuple):
    """A fenced block."""

    code: str
    """Its lines, without the indentation of the fence."""
    language: str
    """First word after the opening fence, in lower case; may be empty."""
    position: int
    """Where the opening fence is, in characters."""
    is_closed: bool
    """Whether there was a closing fence."""


def code_blocks(text: str) -> Iterator[CodeBlock]:
    """The fenced blocks of a text, in order; total, and linear in its length."""
    # A block opens with a line of three or more backticks, and a language; it closes with a line of
    # at least as many backticks and nothing else. A fence inside a block is its content.
    opening: re.Match[str] | None = None
    start, lines = 0, []
    position = 0
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line.rstrip())
        if opening is None:
            if fence is not None:
                opening, start, lines = fence, position, []
        elif fence and not fence["info"].strip() and len(fence["ticks"]) >= len(opening["ticks"]):
            yield _block(opening, lines, start, is_closed=True)
            opening = None
        else:
            indent = min(len(opening["indent"]), len(line) - len(line.lstrip(" \t")))
            lines.append(line[indent:])
        position += len(line) + 1
    if opening is not None:
        yield _block(opening, lines, start, is_closed=False)


def _block(opening: re.Match[str], lines: list[str], start: int, *, is_closed: bool) -> CodeBlock:
    language = "".join(opening["info"].lower().split()[:1])
    return CodeBlock("\n".join(lines), language, start, is_closed)
