"""A conversation in the terminal, coloured by who wrote it."""

from typing import TYPE_CHECKING, Final

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text as RichText

from .conversation import Conversations, Source
from .messages import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLE_STYLES: Final = {
    "system": "magenta",
    "user": "blue",
    "tool": "yellow",
    "assistant": "green",
}
"""Colour of a message, by role."""
SOURCE_STYLES: Final = {
    Source.TEMPLATE: "dim",
    Source.CONTENT: "blue",
    Source.MODEL: "green",
}
"""Colour of a token, by who wrote it."""


def message_text(message: Message) -> str:
    """What a message says, its tool calls included, for people to read.

    Args:
        message: a chat message; its content may be a list of parts.
    """
    content = message.get("content")
    if isinstance(content, str):
        parts = [content]
    else:
        parts = [
            str(part.get("text", f"[{part.get('type', 'part')}]")) for part in content or [] if part
        ]
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        parts.append(f"-> {function.get('name')}({function.get('arguments')})")
    return "\n".join(part for part in parts if part)


def _title(message: Message) -> str:
    name = message.get("name")
    return f"{message['role']} ({name})" if name else str(message["role"])


def _legend() -> RichText:
    legend = RichText("colours: ")
    for role, style in ROLE_STYLES.items():
        legend.append(f" {role} ", style=f"{style} reverse").append(" ")
    return legend


def show_conversation(
    conversations: Conversations,
    row: int = 0,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    reward: float | None = None,
    console: Console | None = None,
) -> None:
    """Print a row: a panel per message, coloured by role, then the reward.

    Args:
        conversations: the snapshot that holds the row.
        row: which row.
        tokenizer: when given, the row's tokens are printed below, coloured by who wrote them.
        reward: printed at the end.
        console: where to print; a new one on standard output when not given.
    """
    panels: list[RenderableType] = [
        Panel(
            RichText(message_text(message)),
            title=RichText(_title(message)),
            title_align="left",
            border_style=ROLE_STYLES.get(message["role"], "white"),
        )
        for message in conversations.messages(row)
    ]
    if tokenizer is not None:
        panels.append(Panel(_coloured_tokens(conversations, row, tokenizer), title="tokens"))
    panels.append(_legend())
    if reward is not None:
        panels.append(RichText(f"reward: {reward:g}", style="bold red"))
    (console or Console()).print(Group(*panels))


def _coloured_tokens(
    conversations: Conversations, row: int, tokenizer: "PreTrainedTokenizerBase"
) -> RichText:
    text = RichText()
    sources = conversations.sources(row).tolist()
    for index, source in zip(conversations.ids(row), sources, strict=True):
        text.append(str(tokenizer.decode([index])), style=SOURCE_STYLES[Source(source)])
    return text
