"""Records of what a parser of tool calls finds."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class ToolCall(NamedTuple):
    """A call that is well formed; whether such a tool exists is for the environment to say."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None
    """How the model calls this call, where its format has such names."""
    is_text: bool = False
    """The arguments are text, as formats write that do not quote them; the tool's schema says what
    each stands for."""


class MalformedCall(NamedTuple):
    """A call that could not be read."""

    error: str
    """What is wrong with it, so that the model can repair it."""


class FoundCall(NamedTuple):
    """A call and where it is in the text."""

    start: int
    end: int
    call: ToolCall | MalformedCall


class ParsedTurn(NamedTuple):
    """The content of one assistant turn."""

    content: str
    """The text outside the calls."""
    calls: list[ToolCall | MalformedCall]
    """Calls in the order in which they were written."""
    positions: Sequence[int] = ()
    """Where each call starts, in characters of the turn; none where that is not known: all of them
    then count as at its beginning."""
