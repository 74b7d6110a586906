"""Whether a chat template shows all that it is given: tools, and what messages hold."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from torchrl_data.conversation.record import PLACEHOLDER_ROLE, Message

_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "Tool7",
        "description": "D",
        "parameters": {"type": "object", "properties": {}},
    },
}


class ToolsNotShownError(ValueError):
    """A chat template leaves tools out of the prompt, so the policy would not know of them."""


def shows_tools(render: Callable[[Sequence[dict[str, Any]] | None], str]) -> bool:
    """Whether what a template renders depends on the tools that it is given."""
    without = render(None)
    try:
        return render([_TOOL]) != without
    except ValueError:
        return True  # it looks at them, and says what is wrong with one


def check_tools_are_named(
    tools: Sequence[dict[str, Any]], messages: Sequence[Message], template: str
) -> None:
    """Raise ``ToolsNotShownError`` unless messages name the tools that a template leaves out."""
    text = "\n".join(str(message.get("content")) for message in messages)
    names = [str((tool.get("function") or tool).get("name")) for tool in tools]
    missing = [name for name in names if name not in text]
    if missing:
        raise ToolsNotShownError(
            f"The chat template does not show tools, so the policy would not know of {missing}: "
            f"{template!r:.120}. Use a template that does (chat_template_name='chatml', say), or "
            "name the tools in a system prompt."
        )


# What messages hold -----------------------------------------------------------------------------

_MAX_SHAPES: Final = 512
TOOL_ROLES: Final = ("tool", "function", "ipython")
"""Roles of what a tool answers; which one it was is told by the order, too."""
# Nobody can guess it, so nothing else in a rendered text can spell it.
_SECRET: Final = f"mark{secrets.token_hex(8)}"


class Entry(NamedTuple):
    """Something that a message holds, and that a template may leave out."""

    message: int
    key: str
    """Of the message: ``content``, ``name``, ``reasoning_content`` or ``tool_calls``."""
    call: int = 0
    part: str = ""
    """Of a call: ``name`` or ``arguments``."""

    def told(self, message: Message) -> str:
        """The entry in words.

        Args:
            message: that has it.
        """
        if not self.part:
            return repr(self.key)
        name = _function(message["tool_calls"][self.call]).get("name")
        return f"a call of {name!r}" if self.part == "name" else f"the arguments for {name!r}"


def entries_of(messages: Sequence[Message]) -> Iterator[Entry]:
    """Whatever is to be read in messages, but for what is only white space."""
    for i, message in enumerate(messages):
        role = message["role"]
        if role == PLACEHOLDER_ROLE:
            continue
        if _text(message.get("content")).strip():
            yield Entry(i, "content")
        if _text(message.get("reasoning_content")).strip():
            yield Entry(i, "reasoning_content")
        name = message.get("name")
        if name and name != role and role not in TOOL_ROLES:
            yield Entry(i, "name")
        for j, call in enumerate(message.get("tool_calls") or ()):
            function = _function(call)
            yield Entry(i, "tool_calls", j, "name")
            if function.get("arguments") not in (None, {}, "", "{}"):
                yield Entry(i, "tool_calls", j, "arguments")


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if part["type"] == "text")
    return content if isinstance(content, str) else ""


def _function(call: Any) -> dict[str, Any]:
    return call.get("function") or call


def _replaced(message: Message, entry: Entry, mark: str) -> Message:
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


def _with_marks(messages: Sequence[Message], entries: Sequence[Entry]) -> list[Message]:
    marked = list(messages)
    for n, entry in enumerate(entries):
        marked[entry.message] = _replaced(marked[entry.message], entry, f"{_SECRET}n{n}x")
    return marked


class EntriesShown:
    """Finds what a template leaves out of messages, by a look at each shape of messages once."""

    def __init__(self) -> None:
        self._suspects: dict[Any, tuple[Entry, ...]] = {}

    def dropped(
        self, messages: Sequence[Message], render: Callable[[Sequence[Message]], str], context: Any
    ) -> list[Entry]:
        """What the rendered text does not tell of.

        What a template leaves out because the conversation has gone on (the thoughts of earlier
        turns) is no loss: it was shown when it was the last message.

        Args:
            messages: escaped, as they are rendered.
            render: of such messages.
            context: what else decides what is rendered, to be told from other contexts.
        """
        entries = tuple(entries_of(messages))
        shape = (context, tuple([(m["role"], tuple(m)) for m in messages]), entries)
        suspects = self._suspects.get(shape)
        if suspects is None:
            suspects = _suspects(messages, entries, render)
            if len(self._suspects) < _MAX_SHAPES:
                self._suspects[shape] = suspects
        return [entry for entry in suspects if _is_dropped(messages, entry, render)]


def _suspects(
    messages: Sequence[Message], entries: tuple[Entry, ...], render: Callable[..., str]
) -> tuple[Entry, ...]:
    """Entries whose marks are not found where all entries are marked; all, where none may be."""
    marked = _with_marks(messages, entries)
    try:
        text = render(marked).casefold()
        missing = [n for n, _ in enumerate(entries) if f"{_SECRET}n{n}x" not in text]
        return tuple(
            entries[n]
            for n in missing
            if entries[n].key != "reasoning_content"
            or f"{_SECRET}n{n}x" not in render(marked[: entries[n].message + 1]).casefold()
        )
    except ValueError:  # the template looks at what it shows
        return entries


def _is_dropped(messages: Sequence[Message], entry: Entry, render: Callable[..., str]) -> bool:
    """Whether another value in the place of an entry leaves the text as it is."""
    others = list(messages)
    others[entry.message] = _replaced(messages[entry.message], entry, _SECRET)
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
    dropped: Sequence[Entry],
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
    message = messages[number]
    what = " and ".join(entry.told(message) for entry in dropped if entry.message == number)
    where = f"Message {first + number} ({message['role']})"
    where += "" if row is None else f" of row {row}"
    return (
        f"{where} has {what}, "
        "which the chat template leaves out, so that nobody would read or learn it. "
        f"{remedy or 'Use a chat template that shows it'}, or say it in the message's 'content'."
    )
