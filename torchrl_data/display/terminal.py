"""A conversation in the terminal: by message, coloured by role, or by token, coloured by source."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text as RichText
from torch import Tensor

from torchrl_data.conversation.conversations import Conversations, Source
from torchrl_data.conversation.record import Message

from .display_text import message_text, message_title, token_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLE_STYLES: Final = {
    "system": "magenta",
    "developer": "magenta",
    "user": "blue",
    "tool": "yellow",
    "assistant": "green",
}
"""Colour of a message, by role; others are white."""
SOURCE_STYLES: Final = {
    Source.TEMPLATE: "bright_black",
    Source.CONTENT: "blue",
    Source.MODEL: "green",
}
"""Colour of a token, by who wrote it."""
_LEGEND_ROLES: Final = ("system", "user", "tool", "assistant")


def colour_legend(names: Iterable[tuple[str, str]]) -> RichText:
    """A line of names in their colours."""
    legend = RichText()
    for name, style in names:
        legend.append(f" {name} ", style=f"{style} reverse").append(" ")
    return legend


def show_messages(
    messages: Sequence[Message],
    *,
    reward: float | Tensor | None = None,
    console: Console | None = None,
) -> None:
    """Print messages, a panel each, coloured by role.

    Args:
        messages: in the chat format.
        reward: printed at the end: a number, or a tensor of one element.
        console: where to print; a new one on standard output when not given.
    """
    legend = colour_legend((role, ROLE_STYLES[role]) for role in _LEGEND_ROLES)
    _print([*_panels(messages), legend], reward, console)


def show_conversation(
    conversations: Conversations,
    row: int = 0,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    reward: float | Tensor | None = None,
    console: Console | None = None,
) -> None:
    """Print a row: a panel per message, coloured by role, then its tokens and the reward.

    Args:
        conversations: the snapshot that holds the row.
        row: which row.
        tokenizer: when given, the row's tokens are printed below, coloured by who wrote them.
        reward: printed at the end: a number, or a tensor of one element.
        console: where to print; a new one on standard output when not given.
    """
    shown = _panels(conversations.messages(row))
    shown.append(colour_legend((role, ROLE_STYLES[role]) for role in _LEGEND_ROLES))
    if tokenizer is not None:
        sources = [Source(source) for source in conversations.sources(row).tolist()]
        texts = token_texts(conversations.ids(row), tokenizer)
        sampled = sources.count(Source.MODEL)
        title = f"{len(texts)} tokens, {sampled} sampled by the policy"
        shown.append(Panel(coloured_tokens(texts, sources), title=title, title_align="left"))
        shown.append(colour_legend((s.name.lower(), style) for s, style in SOURCE_STYLES.items()))
    _print(shown, reward, console)


def coloured_tokens(texts: Sequence[str], sources: Sequence[Source]) -> RichText:
    """Tokens in the colours of those who wrote them; every other one is underlined."""
    coloured = RichText()
    for i, (text, source) in enumerate(zip(texts, sources, strict=True)):
        style = SOURCE_STYLES[source]
        coloured.append(text, style=f"{style} underline" if i % 2 else style)
    return coloured


def _panels(messages: Sequence[Message]) -> list[RenderableType]:
    # RichText, and not str: content may hold what looks like Rich's markup.
    return [
        Panel(
            RichText(message_text(message)),
            title=RichText(message_title(message)),
            title_align="left",
            border_style=ROLE_STYLES.get(message["role"], "white"),
        )
        for message in messages
    ]


def _print(
    shown: Sequence[RenderableType], reward: float | Tensor | None, console: Console | None
) -> None:
    closing = []
    if reward is not None:
        closing.append(RichText(f"reward: {float(reward):g}", style="bold red"))
    (console or Console()).print(Group(*shown, *closing))
