"""Fields of a ``History``, and how a message in the chat format maps to them."""

from collections.abc import Mapping
from typing import Any, Final

from .content import ContentBase
from .messages import Message

OPTIONAL: Final = (
    *("tool_calls", "tool_responses", "tool_call_id", "name", "reasoning_content", "metadata"),
)
"""Fields that most messages lack."""
FIELDS: Final = ("role", "content", "is_complete", *OPTIONAL)
"""All fields, in order."""


def plain(value: Any) -> Any:
    """Plain lists instead of the lists that write through to a TensorDict."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value


def plain_parts(part: Any) -> list[Any]:
    """A part of a content, or a stack of them, without :class:`ContentBase`."""
    if not isinstance(part, ContentBase):
        return [part]
    return part.to_parts() if part.batch_dims else [part.to_part()]


def message_of(fields: dict[str, Any]) -> Message:
    """The message in the chat format, without the fields that say nothing."""
    if isinstance(fields["content"], ContentBase):
        fields["content"] = plain_parts(fields["content"])
    if fields["is_complete"] is not False:
        del fields["is_complete"]
    more = plain(fields.pop("metadata") or {})
    said = {k: plain(v) for k, v in fields.items() if v is not None or k == "content"}
    return said | more
