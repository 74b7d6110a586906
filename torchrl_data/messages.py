"""Messages in the chat format: which are refused, and where a turn has begun."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

Message = dict[str, Any]
"""``role`` and ``content``, and where they apply ``tool_calls``, ``tool_call_id``, ``name``,
``reasoning_content``."""

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles that a message may have."""
PLACEHOLDER_ROLE: Final = "<none>"
"""Role of a message that only fills a gap in a batch; it is never rendered."""
_KNOWN_ROLES = frozenset((*ROLES, PLACEHOLDER_ROLE))


def check_messages(
    messages: Sequence[Message], *, first: int = 0, row: int | tuple[int, ...] | None = None
) -> None:
    """Check roles and contents, before anything is rendered.

    Args:
        messages: the messages to check.
        first: the number of the first of them, for the error.
        row: the row that they belong to, for the error.

    Raises:
        ValueError: a role is unknown, or a message has neither content nor tool calls.
        TypeError: a message, its role or its content has the wrong type.
    """
    for number, message in enumerate(messages, first):
        # The common case first, as this runs for every message of every step.
        if (
            type(message) is dict
            and message.get("role") in _KNOWN_ROLES
            and type(message.get("content")) is str
        ):
            continue
        where = f"Message {number}" if row is None else f"Message {number} of row {row}"
        _check_message(message, where)


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, Mapping):
        found = f"{type(message).__name__} ({message!r:.80})"
        raise TypeError(f"{where} is a {found}, not a dict with 'role' and 'content'.")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise TypeError(f"{where} has the role {role!r}; a role is a string, one of {list(ROLES)}.")
    if role not in _KNOWN_ROLES:
        raise ValueError(
            f"{where} has the unknown role {role!r}; the roles are {list(ROLES)}. Rename it, or "
            "put the name of the speaker in 'name'."
        )
    where = f"{where} ({role})"
    if content is None:
        if not message.get("tool_calls") and not message.get("reasoning_content"):
            raise ValueError(
                f"{where} has no content and no tool calls. Give it a string, which may be empty."
            )
    elif isinstance(content, Sequence) and not isinstance(content, str | bytes):
        for part in content:
            if not isinstance(part, Mapping) or "type" not in part:
                raise TypeError(
                    f"{where} has a content part {part!r:.80}; a part is a dict with a 'type', "
                    "such as {'type': 'text', 'text': ...}."
                )
    elif not isinstance(content, str):
        raise TypeError(
            f"{where} has content of type {type(content).__name__} ({content!r:.80}); content is "
            "a string or a list of parts. Convert it with str() or json.dumps()."
        )


def begun_turn(messages: Sequence[Message]) -> str:
    """The text of the assistant that a prompt ends with, in which the policy goes on; or none."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return ""
    return content if isinstance(content, str) else ""
