"""The fields of a ``History``, and how a message in the chat format maps to them."""

from collections.abc import Mapping
from typing import Any, Final

from torchrl_data.conversation.content import ContentBase
from torchrl_data.conversation.images import with_plain_images
from torchrl_data.conversation.record import Message

OPTIONAL: Final = (
    "tool_calls",
    "tool_responses",
    "tool_call_id",
    "name",
    "reasoning_content",
    "metadata",
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


def with_plain_parts(message: Any) -> Any:
    """A message whose parts are dictionaries of plain values, where it holds others."""
    return with_plain_images(_without_content_base(message))


def _without_content_base(message: Any) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, ContentBase):
        content = [content]
    if not isinstance(content, list | tuple):
        return message
    if not any(isinstance(part, ContentBase) for part in content):
        return message
    parts: list[Any] = []
    for part in content:
        if not isinstance(part, ContentBase):
            parts.append(part)
        else:
            parts += part.to_parts() if part.batch_dims else [part.to_part()]
    return {**message, "content": parts}


def message_fields(message: Message) -> dict[str, Any]:
    """Values of all fields for a message; entries that are no field go to ``metadata``."""
    fields: dict[str, Any] = dict.fromkeys(FIELDS)
    fields["is_complete"] = True
    other = {}
    for key, value in message.items():
        if key in fields and key != "metadata":
            fields[key] = value
        else:
            other[key] = value
    fields["metadata"] = other or None
    return fields


def to_message(fields: Mapping[str, Any]) -> Message:
    """The message in the chat format, without the fields that say nothing."""
    content = fields["content"]
    if isinstance(content, ContentBase):
        content = content.to_parts() if content.batch_dims else [content.to_part()]
    message: Message = {"role": fields["role"], "content": plain(content)}
    if fields["is_complete"] is False:
        message["is_complete"] = False
    for field in OPTIONAL[:-1]:
        if fields[field] is not None:
            message[field] = plain(fields[field])
    return message | plain(fields["metadata"] or {})
