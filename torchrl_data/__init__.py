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

_ROOMS = {
    "batch_io": "read_conversations row_from_state row_state row_tensordicts write_conversations",
    "checks": "MissingEntryError TokenScorer TokenScores require_entries",
    "conversation": "Conversations",
    "display": "TextHistory conversation_html messages_html show_conversation show_messages",
    "history": "ContentBase History",
    "layout": "ChatHistory LogProbs Masks Text Tokens conversation_tokens history_view",
    "messages": "ConversationRecord EncodedMessages Position Source Turn check_messages",
    "ragged": "cumulative_lengths pack pad sequence_index unpack",
    "templates.control_tokens": "ControlTokenGuard",
    "templates.encoder": "ConversationEncoder ImageProcessor encode_demonstrations",
    "templates.template": "ToolsNotShownError add_chat_template builtin_template "
    "check_same_rendering resolve_template template_names",
    "tool_calls": "parse_tool_calls",
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names.split()}

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
