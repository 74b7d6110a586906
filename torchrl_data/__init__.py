"""What a batch of conversations looks like: tokens, messages, layouts, templates, entry names.

Every public name is imported when it is first used, so that importing this package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import keys
    from .chat_templates import (
        add_chat_template,
        builtin_template,
        resolve_template,
        template_names,
    )
    from .content import ContentBase
    from .control_tokens import ControlTokenGuard
    from .conversation import ConversationRecord, Conversations, EncodedMessages, Position, Source
    from .conversation_views import history_view, row_tensordicts
    from .encoder import ConversationEncoder
    from .errors import MissingEntryError, require_entries
    from .history import History
    from .html_page import conversation_html, messages_html
    from .layout import ChatHistory, LogProbs, Masks, Text, Tokens
    from .layout_conversion import conversation_tokens
    from .loop_state import read_conversations, write_conversations
    from .messages import check_messages
    from .packed import cumulative_lengths, pack, pad, sequence_index, unpack
    from .protocols import TokenScorer, TokenScores
    from .show import show_conversation, show_messages
    from .text_history import TextHistory
    from .tool_calls import parse_tool_calls

_HOME = {
    "ChatHistory": "layout",
    "ContentBase": "content",
    "ControlTokenGuard": "control_tokens",
    "ConversationEncoder": "encoder",
    "ConversationRecord": "conversation",
    "Conversations": "conversation",
    "EncodedMessages": "conversation",
    "History": "history",
    "LogProbs": "layout",
    "Masks": "layout",
    "MissingEntryError": "errors",
    "Position": "conversation",
    "Source": "conversation",
    "Text": "layout",
    "TextHistory": "text_history",
    "TokenScorer": "protocols",
    "TokenScores": "protocols",
    "Tokens": "layout",
    "add_chat_template": "chat_templates",
    "builtin_template": "chat_templates",
    "check_messages": "messages",
    "conversation_html": "html_page",
    "conversation_tokens": "layout_conversion",
    "cumulative_lengths": "packed",
    "history_view": "conversation_views",
    "messages_html": "html_page",
    "pack": "packed",
    "pad": "packed",
    "parse_tool_calls": "tool_calls",
    "read_conversations": "loop_state",
    "require_entries": "errors",
    "resolve_template": "chat_templates",
    "row_tensordicts": "conversation_views",
    "sequence_index": "packed",
    "show_conversation": "show",
    "show_messages": "show",
    "template_names": "chat_templates",
    "unpack": "packed",
    "write_conversations": "loop_state",
}

__all__ = [
    "ChatHistory",
    "ContentBase",
    "ControlTokenGuard",
    "ConversationEncoder",
    "ConversationRecord",
    "Conversations",
    "EncodedMessages",
    "History",
    "LogProbs",
    "Masks",
    "MissingEntryError",
    "Position",
    "Source",
    "Text",
    "TextHistory",
    "TokenScorer",
    "TokenScores",
    "Tokens",
    "add_chat_template",
    "builtin_template",
    "check_messages",
    "conversation_html",
    "conversation_tokens",
    "cumulative_lengths",
    "history_view",
    "keys",
    "messages_html",
    "pack",
    "pad",
    "parse_tool_calls",
    "read_conversations",
    "require_entries",
    "resolve_template",
    "row_tensordicts",
    "sequence_index",
    "show_conversation",
    "show_messages",
    "template_names",
    "unpack",
    "write_conversations",
]


def __getattr__(name: str) -> Any:
    if name == "keys":
        return import_module(".keys", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
