"""Tool calls in what a model wrote, in the format of its family.

The parser is total: any text gives calls and errors, never an exception, in time linear in its
length.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from torchrl_data.templates.registry import family_of, own_template

from .formats import FORMATS, Format
from .records import Found, MalformedCall, ParsedTurn, ToolCall
from .strict_json import MAX_CHARS as MAX_CALL_CHARS
from .strict_json import MAX_DEPTH

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "FORMATS",
    "MAX_CALLS",
    "MAX_CALL_CHARS",
    "MAX_DEPTH",
    "MalformedCall",
    "ParsedTurn",
    "ToolCall",
    "detect_tool_call_format",
    "parse_tool_calls",
    "tool_call_parser",
]

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
    """
    written = _format(format)
    found = _collect(written, text, _start(text))
    end = _thought_end(text, found)
    if end > 0:
        after = _collect(written, text, end)
        # A call that is broken may have spelled the end of a thought itself.
        if after or not any(start < end < stop for start, stop, _ in found):
            found = after
    if not found:
        return ParsedTurn(text.strip(), [], [])
    pieces: list[str] = []
    position = 0
    for start, stop, _ in found:
        pieces.append(text[position:start])
        position = max(position, stop)
    pieces.append(text[position:])
    return ParsedTurn(
        "".join(pieces).strip(), [call for _, _, call in found], [start for start, _, _ in found]
    )


def tool_call_parser(
    format: str | TurnParser | None = None, tokenizer: "PreTrainedTokenizerBase | None" = None
) -> TurnParser:
    """The parser of a format, of the tokenizer's if none is given; your own has to be total."""
    if callable(format):
        return format
    name = format or detect_tool_call_format(tokenizer)
    _format(name)
    return functools.partial(parse_tool_calls, format=name)


_SIGNS: Final = (
    ("<function=", "qwen3_coder"),
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁call▁begin｜>", "deepseek"),
    ("<|channel|>", "harmony"),
    ("<tool_call>", "hermes"),
    ("<|start_header_id|>", "llama3"),
)
_FAMILIES: Final = {
    "llama": "llama3",
    "mistral": "mistral",
    "deepseek": "deepseek",
    "deepseek3": "deepseek",
}


def detect_tool_call_format(tokenizer: "PreTrainedTokenizerBase | None") -> str:
    """The format that a model's chat template teaches."""
    template = own_template(tokenizer) or ""
    for sign, name in _SIGNS:
        if sign in template:
            return name
    return _FAMILIES.get(family_of(tokenizer) or "", DEFAULT_FORMAT)


def _format(name: str) -> Format:
    if name not in FORMATS:
        raise ValueError(f"There is no tool call format {name!r}; there are {sorted(FORMATS)}.")
    return FORMATS[name]


def _collect(format: Format, text: str, start: int) -> list[Found]:
    """Calls; those that are malformed say how to write one."""
    found: list[Found] = []
    for item in format.find(text, start):
        if len(found) == MAX_CALLS:
            error = MalformedCall(f"at most {MAX_CALLS} calls in a turn; the rest is ignored")
            found.append(Found(item.start, len(text), error))
            break
        if isinstance(item.call, MalformedCall):
            error = f"{item.call.error}; write a call as {format.example}"
            found.append(item._replace(call=MalformedCall(error)))
        else:
            found.append(item)
    return found


def _start(text: str) -> int:
    """Where the answer starts in a turn that begins with a thought, which may never end."""
    if not text.lstrip().startswith(_THOUGHT):
        return 0
    end = text.find(_THOUGHT_END)
    return len(text) if end < 0 else end + len(_THOUGHT_END)


def _thought_end(text: str, found: list[Found]) -> int:
    """The end of a thought that began before the turn; an argument may spell it too."""
    end = text.find(_THOUGHT_END)
    while end >= 0:
        if not any(
            start < end < stop and isinstance(call, ToolCall) for start, stop, call in found
        ):
            return end + len(_THOUGHT_END)
        end = text.find(_THOUGHT_END, end + 1)
    return 0
