"""Small changes to messages before a template renders them."""

import re
import secrets
from typing import Any, Final

from .messages import Message

_REASONING = re.compile(r"\s*<think>(.*?)</think>\n*", re.DOTALL)
_END_MARK: Final = f"\ua789{secrets.token_hex(8)}|"


def split_reasoning(message: Message) -> Message:
    """Move a ``<think>`` block that begins an assistant's content to ``reasoning_content``."""
    content = message.get("content")
    is_answer = message["role"] == "assistant" and message.get("reasoning_content") is None
    match = _REASONING.match(content) if is_answer and isinstance(content, str) else None
    if match is None:
        return message
    rest = match.string[match.end() :]
    return {**message, "reasoning_content": match[1].strip("\n"), "content": rest}


def with_end_mark(message: Message) -> Message:
    """Mark the end of a message's content, for :func:`cut_at_end_mark`."""
    content: Any = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _END_MARK}
    raise ValueError(
        f"continue_final_message continues the last message's text, but its content is "
        f"{content!r:.80}. Give it a string, or leave the option out."
    )


def cut_at_end_mark(rendered: str) -> str:
    """The rendered text up to the mark."""
    at = rendered.rfind(_END_MARK)
    if at < 0:
        raise ValueError("The chat template does not show the last message, so it can't end there.")
    return rendered[:at]
