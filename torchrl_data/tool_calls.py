"""Tool calls in what a model wrote: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

The format of the Hermes and Qwen families. The parser is total: any text gives calls and errors,
never an exception, in time linear in its length.
"""

import json
import math
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

MAX_CALLS: Final = 16
"""Most calls of one turn; further ones are refused with one error."""
MAX_CALL_CHARS: Final = 64 * 1024
"""Most characters of one call."""
MAX_DEPTH: Final = 64
"""Most nested braces and brackets of one call."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class ToolCall(NamedTuple):
    """A call that is well formed; whether such a tool exists is for the environment to say."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None
    """How the model calls this call, where its format has such names."""


class ParsedTurn(NamedTuple):
    """What one assistant turn holds."""

    content: str
    """The text outside the calls."""
    calls: list["ToolCall | MalformedCall"]
    """Calls in the order in which they were written."""
    positions: Sequence[int] = ()
    """Where each call starts, in characters of the turn."""

    @property
    def has_calls(self) -> bool:
        """Whether the model tried to call anything, rightly or not."""
        return bool(self.calls)


class MalformedCall(NamedTuple):
    """A call that could not be read."""

    error: str
    """What is wrong with it, so that the model can repair it."""


def parse_tool_calls(text: str) -> ParsedTurn:
    """Find the tool calls of an assistant turn.

    Args:
        text: what the model wrote, in any shape.

    Returns:
        The text outside the calls, and the calls in order.
    """
    content: list[str] = []
    calls: list[ToolCall | MalformedCall] = []
    positions: list[int] = []
    position = 0
    while (start := text.find(_OPEN, position)) >= 0:
        content.append(text[position:start])
        positions.append(start)
        body_start = start + len(_OPEN)
        end = text.find(_CLOSE, body_start)
        position = len(text) if end < 0 else end + len(_CLOSE)
        if len(calls) == MAX_CALLS:
            calls.append(MalformedCall(f"at most {MAX_CALLS} calls in a turn; the rest is ignored"))
            position = len(text)
        elif end < 0:
            calls.append(MalformedCall(f"the call is not closed with {_CLOSE}"))
        else:
            calls.append(_parse_call(text[body_start:end]))
    content.append(text[position:])
    return ParsedTurn("".join(content).strip(), calls, positions)


def _parse_call(body: str) -> ToolCall | MalformedCall:
    if len(body) > MAX_CALL_CHARS:
        return MalformedCall(f"the call has {len(body)} characters; at most {MAX_CALL_CHARS}")
    if _depth(body) > MAX_DEPTH:
        return MalformedCall(f"the call is nested deeper than {MAX_DEPTH} levels")
    try:
        value = json.loads(
            body,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse,
            parse_float=_parse_float,
            parse_int=_parse_int,
        )
    except (ValueError, RecursionError) as error:
        return MalformedCall(f"the call is not valid JSON: {error}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return MalformedCall('a call is {"name": <tool>, "arguments": {...}}')
    unknown = sorted(value.keys() - {"name", "arguments", "id"})
    if unknown:
        return MalformedCall(f'a call has "name" and "arguments", not {", ".join(unknown)}')
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return MalformedCall('"arguments" must be an object')
    return ToolCall(value["name"], arguments)


def _depth(body: str) -> int:
    """Deepest nesting of brackets outside strings."""
    depth = deepest = 0
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', body):
        if token.group() in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif token.group() in "]}":
            depth -= 1
    return deepest


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError(f"a key is given twice in {keys[:8]}")
    return dict(pairs)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number")


def _parse_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits:.40} is not finite")
    return value


def _parse_int(digits: str) -> int:
    if len(digits) > 1000:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)
