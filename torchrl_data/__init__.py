"""What a batch of conversations looks like: tokens, messages, layouts, templates, entry names.

Every public name is imported when it is first used, so that importing this package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import keys
    from .batch_io import (
        read_conversations,
        row_from_state,
        row_state,
        row_tensordicts,
        write_conversations,
    )
    from .checks import MissingEntryError, TokenScorer, TokenScores, require_entries
    from .conversation import Conversations
    from .display import (
        TextHistory,
        conversation_html,
        messages_html,
        show_conversation,
        show_messages,
    )
    from .history import ContentBase, History
    from .layout import (
        ChatHistory,
        LogProbs,
        Masks,
        Text,
        Tokens,
        conversation_tokens,
        history_view,
    )
    from .messages import (
        ConversationRecord,
        EncodedMessages,
        Position,
        Source,
        Turn,
        check_messages,
    )
    from .ragged import cumulative_lengths, pack, pad, sequence_index, unpack
    from .templates.control_tokens import ControlTokenGuard
    from .templates.encoder import ConversationEncoder, ImageProcessor, encode_demonstrations
    from .templates.template import (
        ToolsNotShownError,
        add_chat_template,
        builtin_template,
        check_same_rendering,
        resolve_template,
        template_names,
    )
    from .tool_calls import parse_tool_calls

_HOME = {
    "ChatHistory": "layout",
    "ContentBase": "history",
    "ControlTokenGuard": "templates.control_tokens",
    "ConversationEncoder": "templates.encoder",
    "ImageProcessor": "templates.encoder",
    "ConversationRecord": "messages",
    "Conversations": "conversation",
    "EncodedMessages": "messages",
    "History": "history",
    "LogProbs": "layout",
    "Masks": "layout",
    "MissingEntryError": "checks",
    "Position": "messages",
    "Source": "messages",
    "Text": "layout",
    "TextHistory": "display",
    "TokenScorer": "checks",
    "TokenScores": "checks",
    "Turn": "messages",
    "Tokens": "layout",
    "ToolsNotShownError": "templates.template",
    "add_chat_template": "templates.template",
    "builtin_template": "templates.template",
    "check_messages": "messages",
    "check_same_rendering": "templates.template",
    "conversation_html": "display",
    "conversation_tokens": "layout",
    "cumulative_lengths": "ragged",
    "encode_demonstrations": "templates.encoder",
    "history_view": "layout",
    "messages_html": "display",
    "pack": "ragged",
    "pad": "ragged",
    "parse_tool_calls": "tool_calls",
    "read_conversations": "batch_io",
    "require_entries": "checks",
    "resolve_template": "templates.template",
    "row_from_state": "batch_io",
    "row_state": "batch_io",
    "row_tensordicts": "batch_io",
    "sequence_index": "ragged",
    "show_conversation": "display",
    "show_messages": "display",
    "template_names": "templates.template",
    "unpack": "ragged",
    "write_conversations": "batch_io",
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
