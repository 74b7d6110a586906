"""Parser of the tool calls in a model's text, in the format of its family.

The parser is total: any text gives calls and errors, never an exception, in time linear in its
length.
"""

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from torchrl_data.import_path import import_callable
from torchrl_data.templates.registry import (
    DEFAULT_TEMPLATE,
    builtin_template,
    family_of,
    own_template,
)

from .formats import FORMATS, Format, after_mark
from .records import FoundCall, MalformedCall, ParsedTurn, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MAX_CALLS: Final = 16
"""Most calls of one turn; further ones are refused with one error."""
DEFAULT_FORMAT: Final = "hermes"

TurnParser = Callable[[str], ParsedTurn]
_THOUGHT, _THOUGHT_END = "<think>", "</think>"


def parse_tool_calls(text: str, format: str = DEFAULT_FORMAT) -> ParsedTurn:
    """Find the tool calls of an assistant turn.

    What a model calls while it thinks (before ``</think>``) is no call.

    Args:
        text: what the model wrote, in any shape.
        format: one of :data:`FORMATS`.

    Returns:
        The text outside the calls, and the calls in order.

    Raises:
        ValueError: there is no such format.

    Example:
        >>> call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
        >>> turn = parse_tool_calls("Let me add. " + call)
        >>> turn.content, turn.calls[0].name, turn.calls[0].arguments
        ('Let me add.', 'add', {'a': 1, 'b': 2})
    """
    written = _format(format)
    # A turn may begin with a thought, which may never end.
    thinks = text.lstrip().startswith(_THOUGHT)
    found = _collect(written, text, after_mark(text, _THOUGHT_END, 0) if thinks else 0)
    end = 0
    if _THOUGHT_END in text:
        # Where the first thought ends, but for one that an argument of a call spells.
        read = [(start, stop) for start, stop, call in found if isinstance(call, ToolCall)]
        marks = (mark.span() for mark in re.finditer(_THOUGHT_END, text))
        ends = (end for at, end in marks if not any(start < at < stop for start, stop in read))
        end = next(ends, 0)
    if end > 0:
        after = _collect(written, text, end)
        # A call that is broken may have spelled the end of a thought itself.
        if after or not any(start < end < stop for start, stop, _ in found):
            found = after
    if not found:
        return ParsedTurn(text.strip(), [], [])
    content, position = "", 0
    for start, stop, _ in found:
        content += text[position:start]
        position = max(position, stop)
    starts, _, calls = map(list, zip(*found, strict=True))
    return ParsedTurn((content + text[position:]).strip(), calls, starts)


def tool_call_parser(
    format: str | TurnParser | None = None, tokenizer: "PreTrainedTokenizerBase | None" = None
) -> TurnParser:
    """Give the parser of a format; your own has to be total.

    Args:
        format: a name of :data:`FORMATS`; a function of your own from the text of a turn to a
            :class:`ParsedTurn`, or where it is, ``package.module:name``; ``None`` for the format
            that the chat template teaches.
        tokenizer: has the chat template.

    Raises:
        ValueError: there is no such format, or no such function.
        TypeError: the function gives something else, of a turn without text.
    """
    if isinstance(format, str) and ":" in format:
        format = import_callable("tool_call_format", format)
    if callable(format):
        turn = format("")
        if not isinstance(turn, ParsedTurn):
            raise TypeError(
                f"tool_call_format: {format!r:.80} must give a ParsedTurn(content, calls) of any "
                f"text, got {turn!r:.80} of an empty one."
            )
        return format
    name = format or detect_tool_call_format(tokenizer)
    _format(name, or_else=", or mine:f, a function of yours")
    return functools.partial(parse_tool_calls, format=name)


_SIGNS: Final = (
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm"),
    ("<minimax:tool_call>", "minimax"),
    ("<|tool_call_begin|>", "kimi"),
    ("<TOOLCALL>", "nemotron"),
    ("<|tool_call|>", "phi4mini"),
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁call▁begin｜>", "deepseek"),
    ("<|channel|>", "harmony"),
    ("<tool_call>", "hermes"),
    ("<|start_header_id|>", "llama3"),
    ('{"name": function name, "parameters"', "llama3"),
)
_FAMILIES: Final = {"deepseek": "deepseek"}
"""Formats of families whose built-in template does not show any."""


def detect_tool_call_format(tokenizer: "PreTrainedTokenizerBase | None") -> str:
    """The format that a model's chat template teaches."""
    family = family_of(tokenizer) or ""
    template = own_template(tokenizer) or builtin_template(family or DEFAULT_TEMPLATE)
    return format_of_template(template, family=family)


def format_of_template(template: str, *, family: str = "") -> str:
    """The format that a chat template teaches; ``hermes`` where it teaches none.

    Args:
        template: Jinja source.
        family: of the tokenizer, for templates that show no call.
    """
    shown = (name for sign, name in _SIGNS if sign in template)
    return next(shown, _FAMILIES.get(family, DEFAULT_FORMAT))


def _format(name: str, *, or_else: str = "") -> Format:
    if name not in FORMATS:
        known = sorted(FORMATS)
        raise ValueError(f"There is no tool call format {name!r}; there are {known}{or_else}.")
    return FORMATS[name]


def _collect(format: Format, text: str, start: int) -> list[FoundCall]:
    """Calls; those that are malformed say how to write one."""
    found: list[FoundCall] = []
    for item in format.find(text, start):
        if len(found) == MAX_CALLS:
            error = MalformedCall(f"at most {MAX_CALLS} calls in a turn; the rest is ignored")
            found.append(FoundCall(item.start, len(text), error))
            break
        if isinstance(item.call, MalformedCall):
            error = f"{item.call.error}; write a call as {format.example}"
            found.append(item._replace(call=MalformedCall(error)))
        else:
            found.append(item)
    return found
