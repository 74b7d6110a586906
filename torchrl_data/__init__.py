"""What a batch of conversations looks like: tokens, messages, layouts, templates, entry names.

Every public name is imported when it is first used, so that importing this package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import keys
    from .conversation.content import ContentBase
    from .conversation.conversations import Conversations
    from .conversation.record import (
        ConversationRecord,
        EncodedMessages,
        Position,
        Source,
        Turn,
        check_messages,
    )
    from .display.html_page import conversation_html, messages_html
    from .display.terminal import show_conversation, show_messages
    from .display.text_history import TextHistory
    from .errors import MissingEntryError, require_entries
    from .history.history import History
    from .layout.containers import ChatHistory, LogProbs, Masks, Text, Tokens
    from .layout.conversation_io import read_conversations, row_tensordicts, write_conversations
    from .layout.conversion import conversation_tokens
    from .layout.export import history_view
    from .layout.row_state import row_from_state, row_state
    from .protocols import TokenScorer, TokenScores
    from .ragged.packed import cumulative_lengths, pack, pad, sequence_index, unpack
    from .templates.control_tokens import ControlTokenGuard
    from .templates.demonstrations import encode_demonstrations
    from .templates.encoder import ConversationEncoder
    from .templates.image_processor import ImageProcessor
    from .templates.registry import (
        add_chat_template,
        builtin_template,
        resolve_template,
        template_names,
    )
    from .templates.rendering_identity import check_same_rendering
    from .templates.tools_shown import ToolsNotShownError
    from .tool_calls.parse import parse_tool_calls

_HOME = {
    "ChatHistory": "layout.containers",
    "ContentBase": "conversation.content",
    "ControlTokenGuard": "templates.control_tokens",
    "ConversationEncoder": "templates.encoder",
    "ImageProcessor": "templates.image_processor",
    "ConversationRecord": "conversation.record",
    "Conversations": "conversation.conversations",
    "EncodedMessages": "conversation.record",
    "History": "history.history",
    "LogProbs": "layout.containers",
    "Masks": "layout.containers",
    "MissingEntryError": "errors",
    "Position": "conversation.record",
    "Source": "conversation.record",
    "Text": "layout.containers",
    "TextHistory": "display.text_history",
    "TokenScorer": "protocols",
    "TokenScores": "protocols",
    "Turn": "conversation.record",
    "Tokens": "layout.containers",
    "ToolsNotShownError": "templates.tools_shown",
    "add_chat_template": "templates.registry",
    "builtin_template": "templates.registry",
    "check_messages": "conversation.record",
    "check_same_rendering": "templates.rendering_identity",
    "conversation_html": "display.html_page",
    "conversation_tokens": "layout.conversion",
    "cumulative_lengths": "ragged.packed",
    "encode_demonstrations": "templates.demonstrations",
    "history_view": "layout.export",
    "messages_html": "display.html_page",
    "pack": "ragged.packed",
    "pad": "ragged.packed",
    "parse_tool_calls": "tool_calls.parse",
    "read_conversations": "layout.conversation_io",
    "require_entries": "errors",
    "resolve_template": "templates.registry",
    "row_from_state": "layout.row_state",
    "row_state": "layout.row_state",
    "row_tensordicts": "layout.conversation_io",
    "sequence_index": "ragged.packed",
    "show_conversation": "display.terminal",
    "show_messages": "display.terminal",
    "template_names": "templates.registry",
    "unpack": "ragged.packed",
    "write_conversations": "layout.conversation_io",
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
    "ImageProcessor",
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
    "ToolsNotShownError",
    "Turn",
    "add_chat_template",
    "builtin_template",
    "check_messages",
    "check_same_rendering",
    "conversation_html",
    "conversation_tokens",
    "cumulative_lengths",
    "encode_demonstrations",
    "history_view",
    "keys",
    "messages_html",
    "pack",
    "pad",
    "parse_tool_calls",
    "read_conversations",
    "require_entries",
    "resolve_template",
    "row_from_state",
    "row_state",
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
    if name == "TopKRewardSelector":  # where TorchRL has it
        raise AttributeError(
            f"module {__name__!r} has no {name}: it is made of advantages, so it is in "
            "'objectives' (from objectives import TopKRewardSelector)."
        )
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
