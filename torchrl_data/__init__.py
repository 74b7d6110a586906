"""What a batch of conversations looks like: tokens, messages, layouts, templates, entry names.

Every public name is imported when it is first used, so that importing this package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .chat_templates import builtin_template, resolve_template
    from .control_tokens import ControlTokenGuard
    from .conversation import (
        ConversationRecord,
        Conversations,
        EncodedMessages,
        Position,
        Source,
    )
    from .encoder import ConversationEncoder
    from .errors import MissingEntryError, require_entries
    from .loop_state import read_conversations, write_conversations
    from .packed import cumulative_lengths, pack, pad, sequence_index, unpack
    from .protocols import TokenScorer, TokenScores
    from .show import show_conversation

_HOME = {
    "ControlTokenGuard": "control_tokens",
    "ConversationEncoder": "encoder",
    "ConversationRecord": "conversation",
    "Conversations": "conversation",
    "EncodedMessages": "conversation",
    "MissingEntryError": "errors",
    "Position": "conversation",
    "Source": "conversation",
    "TokenScorer": "protocols",
    "TokenScores": "protocols",
    "builtin_template": "chat_templates",
    "cumulative_lengths": "packed",
    "pack": "packed",
    "pad": "packed",
    "read_conversations": "loop_state",
    "require_entries": "errors",
    "resolve_template": "chat_templates",
    "sequence_index": "packed",
    "show_conversation": "show",
    "unpack": "packed",
    "write_conversations": "loop_state",
}

__all__ = [
    "ControlTokenGuard",
    "ConversationEncoder",
    "ConversationRecord",
    "Conversations",
    "EncodedMessages",
    "MissingEntryError",
    "Position",
    "Source",
    "TokenScorer",
    "TokenScores",
    "builtin_template",
    "cumulative_lengths",
    "keys",
    "pack",
    "pad",
    "read_conversations",
    "require_entries",
    "resolve_template",
    "sequence_index",
    "show_conversation",
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
