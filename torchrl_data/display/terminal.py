"""A conversation in the terminal: by message, coloured by role, or by token, coloured by source."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text as RichText
from torch import Tensor

from torchrl_data.conversation import Conversations, Source
from torchrl_data.messages import Message

from .text import message_text, message_title, reward_text, token_texts

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


def colour_legend(names: Iterable[tuple[str, str]]) -> RichText:
    """A line of names in their colours."""
    legend = RichText()
    for name, style in names:
        legend.append(f" {name} ", style=f"{style} reverse").append(" ")
    return legend


def coloured_tokens(texts: Iterable[tuple[str, str]]) -> RichText:
    """Tokens in their colours; every other one is underlined."""
    coloured = RichText()
    for i, (text, style) in enumerate(texts):
        coloured.append(text, style=f"{style} underline" if i % 2 else style)
    return coloured


def show_messages(
    messages: Sequence[Message],
    *,
    reward: float | Tensor | None = None,
    console: Console | None = None,
) -> None:
    """Print messages, a panel each, coloured by role.

    Args:
        messages: in the chat format.
        reward: printed at the end: a number, or a tensor of one element, ``[1, 1]`` say.
        console: where to print; a new one on standard output when not given.

    Example:
        >>> show_messages([{"role": "user", "content": "2 + 2?"}], reward=1.0)
        ╭─ user ───...
        │ 2 + 2? ...
        reward: 1
    """
    _print(_panels(messages), reward, console)


def show_conversation(
    conversations: Conversations,
    row: int = 0,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    reward: float | Tensor | None = None,
    console: Console | None = None,
) -> None:
    """Print a row: a panel per message, coloured by role, then its tokens and the reward.

    What a collector gives has ``rows["history", "full"].show()``.

    Args:
        conversations: the snapshot that holds the row.
        row: which row.
        tokenizer: when given, the row's tokens are printed below, coloured by who wrote them.
        reward: printed at the end: a number, or a tensor of one element, ``[1, 1]`` say.
        console: where to print; a new one on standard output when not given.

    Raises:
        TypeError: these are no :class:`Conversations`.

    Example:
        >>> from torchrl_data import Conversations
        >>> chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
        >>> show_conversation(Conversations.from_messages([chat]), reward=1.0)
        ╭─ user ───...
        │ 2 + 2? ...
        ╭─ assistant ───...
        │ 4 ...
        reward: 1
    """
    check_conversations("show_conversation", conversations)
    shown = _panels(conversations.messages(row))
    if tokenizer is not None:
        sources = conversations.sources(row).tolist()
        texts = token_texts(conversations.ids(row), tokenizer)
        styles = [SOURCE_STYLES[source] for source in sources]
        title = f"{len(texts)} tokens, {sources.count(Source.MODEL)} sampled by the policy"
        tokens = coloured_tokens(zip(texts, styles, strict=True))
        shown.append(Panel(tokens, title=title, title_align="left"))
        shown.append(colour_legend((s.name.lower(), style) for s, style in SOURCE_STYLES.items()))
    _print(shown, reward, console)


def check_conversations(who: str, found: object) -> None:
    """Refuse an object that is no :class:`~torchrl_data.Conversations`."""
    if not isinstance(found, Conversations):
        raise TypeError(
            f"{who} takes Conversations, got {type(found).__name__}. Rows of a collector are shown "
            'by rows["history", "full"].show(), and are a page by .to_html().'
        )


def _panels(messages: Sequence[Message]) -> list[RenderableType]:
    """A panel for each message, then what the colours mean."""
    shown: list[RenderableType] = []
    for message in messages:
        # RichText, and not str: content may hold what looks like Rich's markup.
        title, style = RichText(message_title(message)), ROLE_STYLES.get(message["role"], "white")
        text = RichText(message_text(message))
        shown.append(Panel(text, title=title, title_align="left", border_style=style))
    names = ("system", "user", "tool", "assistant")
    return [*shown, colour_legend((role, ROLE_STYLES[role]) for role in names)]


def _print(
    shown: Sequence[RenderableType], reward: float | Tensor | None, console: Console | None
) -> None:
    closing = [] if reward is None else [RichText(reward_text(float(reward)), style="bold red")]
    (console or Console()).print(Group(*shown, *closing))
