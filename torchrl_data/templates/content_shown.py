"""Refusals of chat templates that leave out tools, or a part of what messages hold."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from torchrl_data.messages import PLACEHOLDER_ROLE, Message

_NO_PARAMETERS: Final = {"type": "object", "properties": {}}
TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": "Tool7", "description": "D", "parameters": _NO_PARAMETERS},
}


class ToolsNotShownError(ValueError):
    """A chat template leaves tools out of the prompt, so the policy would not know of them."""


_MAX_SHAPES: Final = 512
TOOL_ROLES: Final = ("tool", "function", "ipython")
"""Roles of what a tool answers; which one it was is told by the order, too."""
# Nobody can guess it, so nothing else in a rendered text can spell it.
_ENTRY: Final = f"mark{secrets.token_hex(8)}"


class MessageEntry(NamedTuple):
    """Something that a message holds, and that a template may leave out."""

    message: int
    key: str
    """Of the message: ``content``, ``name``, ``reasoning_content`` or ``tool_calls``."""
    call: int = 0
    part: str = ""
    """Of a call: ``name`` or ``arguments``."""


def message_entries(messages: Sequence[Message]) -> Iterator[MessageEntry]:
    """Whatever is to be read in messages, but for what is only white space."""
    for i, message in enumerate(messages):
        role = message["role"]
        if role == PLACEHOLDER_ROLE:
            continue
        if _text(message.get("content")).strip():
            yield MessageEntry(i, "content")
        if _text(message.get("reasoning_content")).strip():
            yield MessageEntry(i, "reasoning_content")
        name = message.get("name")
        if name and name != role and role not in TOOL_ROLES:
            yield MessageEntry(i, "name")
        for j, call in enumerate(message.get("tool_calls") or ()):
            function = _function(call)
            yield MessageEntry(i, "tool_calls", j, "name")
            if function.get("arguments") not in (None, {}, "", "{}"):
                yield MessageEntry(i, "tool_calls", j, "arguments")


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if part["type"] == "text")
    return content if isinstance(content, str) else ""


def _function(call: Any) -> dict[str, Any]:
    return call.get("function") or call


def _replaced(message: Message, entry: MessageEntry, mark: str) -> Message:
    """A message with a mark in the place of one entry."""
    value: Any = message[entry.key]
    if entry.part:
        calls = [dict(call) for call in value]
        call, function = calls[entry.call], dict(_function(calls[entry.call]))
        arguments = f'{{"{mark}": "{mark}"}}'
        if entry.part == "arguments" and not isinstance(function["arguments"], str):
            function["arguments"] = {mark: mark}
        else:
            function[entry.part] = arguments if entry.part == "arguments" else mark
        calls[entry.call] = {**call, "function": function} if call.get("function") else function
        value = calls
    elif isinstance(value, list):
        value = [{**part, "text": mark} if part["type"] == "text" else part for part in value]
    else:
        value = mark
    return {**message, entry.key: value}


Suspects = dict[Any, tuple[MessageEntry, ...]]
"""Entries that a template may leave out, by the shape of messages that was looked at once."""


def dropped_entries(
    messages: Sequence[Message],
    render: Callable[[Sequence[Message]], str],
    known: Suspects,
    context: Any = None,
) -> list[MessageEntry]:
    """Return what a template leaves out of messages: what the rendered text does not tell of.

    What it leaves out because the conversation has gone on (the thoughts of earlier turns) is no
    loss: it was shown when it was the last message.

    Args:
        messages: escaped, as they are rendered.
        render: of such messages.
        known: what is kept from call to call for one template.
        context: what else decides what is rendered, to be told from other contexts.
    """
    entries = tuple(message_entries(messages))
    shape = (context, tuple([(m["role"], tuple(m)) for m in messages]), entries)
    suspects = known.get(shape)
    if suspects is None:
        suspects = _suspects(messages, entries, render)
        if len(known) < _MAX_SHAPES:
            known[shape] = suspects
    return [entry for entry in suspects if _is_dropped(messages, entry, render)]


def _suspects(
    messages: Sequence[Message], entries: tuple[MessageEntry, ...], render: Callable[..., str]
) -> tuple[MessageEntry, ...]:
    """Entries whose marks are not found where all entries are marked; all, where none may be."""
    marks = [f"{_ENTRY}n{n}x" for n, _ in enumerate(entries)]
    marked = list(messages)
    for entry, mark in zip(entries, marks, strict=True):
        marked[entry.message] = _replaced(marked[entry.message], entry, mark)
    try:
        text = render(marked).casefold()
        return tuple(
            entry
            for entry, mark in zip(entries, marks, strict=True)
            if mark not in text
            and (
                entry.key != "reasoning_content"
                or mark not in render(marked[: entry.message + 1]).casefold()
            )
        )
    except ValueError:  # the template looks at what it shows
        return entries


def _is_dropped(
    messages: Sequence[Message], entry: MessageEntry, render: Callable[..., str]
) -> bool:
    """Return whether another value in the place of an entry leaves the text as it is."""
    others = list(messages)
    others[entry.message] = _replaced(messages[entry.message], entry, _ENTRY)
    rendered = render(messages)
    try:
        if render(others) != rendered:
            return False
        if entry.key != "reasoning_content":
            return True
        end = entry.message + 1
        return render(others[:end]) == render(messages[:end])
    except ValueError:
        return False  # it was looked at


def refusal(
    dropped: Sequence[MessageEntry],
    messages: Sequence[Message],
    *,
    first: int = 0,
    row: int | None = None,
    remedy: str = "",
) -> str:
    """The error for messages of which a template leaves something out.

    Args:
        dropped: what; the first message that has any is named.
        messages: all of them.
        first: the number of the first of them.
        row: whose they are.
        remedy: templates that show it, if some are known.
    """
    number = dropped[0].message
    message, what = messages[number], []
    for entry in dropped:
        if entry.message == number and entry.part:
            name = _function(message["tool_calls"][entry.call]).get("name")
            what.append(f"{'a call of' if entry.part == 'name' else 'the arguments for'} {name!r}")
        elif entry.message == number:
            what.append(repr(entry.key))
    where = f"Message {first + number} ({message['role']})"
    where += "" if row is None else f" of row {row}"
    return (
        f"{where} has {' and '.join(what)}, which the chat template leaves out, so that nobody "
        f"would read or learn it. {remedy or 'Use a chat template that shows it'}, or say it in "
        "the message's 'content'."
    )
