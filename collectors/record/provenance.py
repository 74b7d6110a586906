"""Who wrote each token of a conversation, and in which message.

Shape legend: T tokens of a conversation.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from torchrl_data.conversation.record import Source
from torchrl_data.display.display_text import visible

from .samples import TokenSpan


def token_spans(
    sources: Sequence[int], texts: Sequence[str], messages: Sequence[dict[str, Any]]
) -> list[TokenSpan]:
    """Runs of tokens by writer, with the message that they spell.

    A turn of the policy is the next message of the role ``assistant``. Content is looked up in the
    messages in order, from where the content before it ended.

    Args:
        sources: of each token, ``[T]``.
        texts: of each token, ``[T]``.
        messages: of the conversation.
    """
    place = _Place(messages)
    spans, start = [], 0
    for source, run in groupby(sources):
        length = sum(1 for _ in run)
        if source == Source.TEMPLATE:
            spans.append(TokenSpan("template", "", None, length))
        elif source == Source.MODEL:
            spans.append(TokenSpan("model", "assistant", place.next_turn(), length))
        else:
            number = place.find("".join(texts[start : start + length]).strip())
            role = "" if number is None else str(messages[number]["role"])
            spans.append(TokenSpan(_writer(role), role, number, length))
        start += length
    return spans


def _writer(role: str) -> str:
    if role in ("tool", "function", "ipython"):
        return "tool"
    return "user" if role else "context"


class _Place:
    """How far one has read in the messages of a conversation."""

    def __init__(self, messages: Sequence[dict[str, Any]]) -> None:
        self._roles = [message.get("role") for message in messages]
        self._texts = [visible(_content(message)) for message in messages]
        self._message = self._offset = 0

    def next_turn(self) -> int | None:
        """The next message of the assistant."""
        for number in range(self._message, len(self._roles)):
            if self._roles[number] == "assistant":
                self._message, self._offset = number + 1, 0
                return number
        return None

    def find(self, text: str) -> int | None:
        """The message in which a text comes next; where none has it, nothing is read."""
        if not text:
            return None
        offset = self._offset
        for number in range(self._message, len(self._texts)):
            at = self._texts[number].find(text, offset)
            if at >= 0:
                self._message, self._offset = number, at + len(text)
                return number
            offset = 0
        return None


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = [part.get("text", "") for part in content or [] if isinstance(part, dict)]
    return "\n".join(str(part) for part in parts)
