"""What a batch of conversations looks like: tokens, messages, layouts, templates, entry names.

Every public name is imported when it is first used, so that importing this package costs nothing.
"""

import ast
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
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
    from .conversation import (
        ConversationRecord,
        Conversations,
        EncodedMessages,
        Position,
        Source,
        Turn,
    )
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
    from .messages import check_messages
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


def page(path: str) -> str:
    """Where a page is that an error names: its address, where the distribution has one.

    Args:
        path: in the repository, ``docs/vllm.md``; what is given where there is no address.
    """
    installed = import_module("importlib.metadata").distributions(name="torchrl-agents")
    urls = [url for each in installed for url in each.metadata.get_all("Project-URL") or ()]
    first = dict(url.split(", ") for url in reversed(urls)).get("Documentation", "docs/index.md")
    return first.removesuffix("docs/index.md") + path


@cache
def _homes(file: str) -> dict[str, str]:
    """Of each name that a package imports ``if TYPE_CHECKING``, the module that it is in."""
    body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    lines = [line for block in body if isinstance(block, ast.If) for line in block.body]
    return {
        name.name: "." * line.level + (line.module or name.name)
        for line in lines
        if isinstance(line, ast.ImportFrom)
        for name in line.names
    }


def lazy_names(package: str, file: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package that imports each public name when it is first used.

    Args:
        package: its ``__name__``.
        file: its ``__file__``. What is imported there ``if TYPE_CHECKING`` says where names are.
    """

    def find(name: str) -> Any:
        if name == "__version__":
            return __version__
        homes = _homes(file)
        if name not in homes:
            have = ", ".join(homes)
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {have}.")
        module = import_module(homes[name], package)
        if homes[name] == f".{name}":
            return module
        return import_module(".checks", __name__).knows_torchrl(getattr(module, name))

    return find


_find = lazy_names(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "TopKRewardSelector":  # where TorchRL has it
        raise AttributeError(
            f"module {__name__!r} has no {name}: it is made of advantages, so it is in "
            "'objectives' (from objectives import TopKRewardSelector)."
        )
    globals()[name] = value = _find(name)  # found once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
