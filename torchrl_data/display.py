"""Conversations for people: in a terminal, as HTML, and as the text that grew in an episode."""

import base64
import hashlib
import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text as RichText
from torch import Tensor

from .conversation import Conversations, Source
from .messages import Message, image_label, is_image

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Messages and tokens as text for people: what is invisible is made visible.

_REPLACEMENT: Final = "\ufffd"
_SUSPECT = re.compile(r"[^\x20-\x7e\n\t\u200d]")  # zero-width joiners make emoji what they are


def visible(text: str) -> str:
    """Text whose control, direction and format characters are spelled out."""
    # Nobody can hide a terminal's escape sequence or turn the direction of a line with the result.
    suspects = set(_SUSPECT.findall(text))
    hidden = [c for c in suspects if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    return text.translate({ord(c): f"\\u{ord(c):04x}" for c in hidden}) if hidden else text


def message_title(message: Message) -> str:
    """Role, and name if there is one."""
    title = visible(str(message["role"]))
    return f"{title} ({visible(str(message['name']))})" if message.get("name") else title


def message_text(message: Message) -> str:
    """What a message says, with its reasoning and its tool calls."""
    parts: list[str] = []
    if message.get("reasoning_content"):
        parts.append(f"(reasoning) {message['reasoning_content']}")
    content: Any = message.get("content")
    pieces: Sequence[Any] = [content] if isinstance(content, str) else content or []
    for part in pieces:
        if is_image(part):
            parts.append(image_label(part))
        elif isinstance(part, dict):
            place = f"[{part.get('type', 'part')}: {part.get('url') or '...'}]"
            parts.append(str(part.get("text") or place))
        else:
            parts.append(str(part))
    for call in message.get("tool_calls") or []:
        function = call.get("function", call) if isinstance(call, dict) else {"name": call}
        parts.append(f"-> {function.get('name')}({function.get('arguments')})")
    return visible("\n".join(part for part in parts if part))


def rewards_of_rows(reward: Any, rewards: Any, num_rows: int) -> list[float | None]:
    """One reward per row, from ``reward`` (of a single row) or ``rewards`` (of each)."""
    if reward is not None and rewards is not None:
        raise ValueError("Give either reward, of a single conversation, or rewards, of each.")
    if rewards is None:
        rewards = [None] * num_rows if reward is None else [reward]
    elif isinstance(rewards, Tensor):
        rewards = rewards.reshape(-1)
    if len(rewards) != num_rows:
        raise ValueError(f"There are {num_rows} rows, but {len(rewards)} rewards.")
    return [None if value is None else float(value) for value in rewards]


def reward_text(reward: float) -> str:
    """The line that shows a reward; NaN stands for an episode that could not be scored."""
    return "reward: none (not scored)" if math.isnan(reward) else f"reward: {reward:g}"


def token_texts(
    ids: Sequence[int], tokenizer: "PreTrainedTokenizerBase", known: dict[int, str] | None = None
) -> list[str]:
    """The text of each token; tokens that only together make a character share it.

    ``known`` keeps what single tokens spell from call to call.
    """
    known = {} if known is None else known
    if new := sorted(set(ids) - known.keys()):
        decoded = tokenizer.batch_decode([[i] for i in new], clean_up_tokenization_spaces=False)
        known.update(zip(new, decoded, strict=True))
    texts: list[str] = []
    while (at := len(texts)) < len(ids):
        text, end = known[ids[at]], at + 1
        while _REPLACEMENT in text and end < min(at + 4, len(ids)):  # bytes of a character
            end += 1
            text = str(tokenizer.decode(list(ids[at:end])))
        is_whole = _REPLACEMENT not in text
        texts += [text, *[""] * (end - at - 1)] if is_whole else [known[ids[at]]]
    return [visible(text) for text in texts]


# A conversation in the terminal: by message, coloured by role, or by token, coloured by source.

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


def _legend(names: Iterable[tuple[str, str]]) -> RichText:
    """A line of names in their colours."""
    legend = RichText()
    for name, style in names:
        legend.append(f" {name} ", style=f"{style} reverse").append(" ")
    return legend


def _tokens(texts: Iterable[tuple[str, str]]) -> RichText:
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
    _check_conversations("show_conversation", conversations)
    shown = _panels(conversations.messages(row))
    if tokenizer is not None:
        sources = conversations.sources(row).tolist()
        texts = token_texts(conversations.ids(row), tokenizer)
        styles = [SOURCE_STYLES[source] for source in sources]
        title = f"{len(texts)} tokens, {sources.count(Source.MODEL)} sampled by the policy"
        tokens = _tokens(zip(texts, styles, strict=True))
        shown.append(Panel(tokens, title=title, title_align="left"))
        shown.append(_legend((s.name.lower(), style) for s, style in SOURCE_STYLES.items()))
    _print(shown, reward, console)


def _check_conversations(who: str, found: object) -> None:
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
    return [*shown, _legend((role, ROLE_STYLES[role]) for role in names)]


def _print(
    shown: Sequence[RenderableType], reward: float | Tensor | None, console: Console | None
) -> None:
    closing = [] if reward is None else [RichText(reward_text(float(reward)), style="bold red")]
    (console or Console()).print(Group(*shown, *closing))


# Conversations as one self-contained HTML page that runs nothing, whatever they spell.
#
# The page has no script and loads nothing; its content security policy allows its own style sheet
# and refuses everything else. Whatever comes from a conversation is escaped text.

_STYLE: Final = "\n" + Path(__file__).with_name("display.css").read_text("utf-8")


def messages_html(
    chats: Sequence[Sequence[Message]],
    *,
    reward: float | Tensor | None = None,
    rewards: Sequence[float | None] | Tensor | None = None,
) -> str:
    """A page of conversations by message.

    Args:
        chats: the messages of each row.
        reward: where there is one row.
        rewards: of each row, or a tensor of as many elements.

    Raises:
        ValueError: there are not as many rewards as rows.
    """
    return _page(chats, rewards_of_rows(reward, rewards, len(chats)))


def conversation_html(
    conversations: Conversations,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    reward: float | Tensor | None = None,
    rewards: Sequence[float | None] | Tensor | None = None,
) -> str:
    """A page of conversations by message, and by token if there is a tokenizer.

    Args:
        conversations: the rows to show.
        tokenizer: decodes the tokens; each shows its id, log-prob and policy version when pointed
            at.
        reward: where there is one row: a number, or a tensor of one element.
        rewards: of each row, or a tensor of as many elements, ``[B, 1, 1]`` say.

    Raises:
        TypeError: these are no :class:`Conversations`.
        ValueError: there are not as many rewards as rows.

    Example:
        >>> from torchrl_data import Conversations
        >>> chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
        >>> page = conversation_html(Conversations.from_messages([chat]), reward=1.0)
        >>> page.startswith("<!doctype html>"), "2 + 2?" in page
        (True, True)
    """
    _check_conversations("conversation_html", conversations)
    rows = range(len(conversations))
    values = rewards_of_rows(reward, rewards, len(rows))
    tokens = []
    legend = "".join(f'<span class="{s.name}">{s.name.lower()}</span>' for s in Source)
    for row in rows:
        if tokenizer is None:
            break
        ids, spans = conversations.ids(row), []
        columns = zip(
            ids,
            token_texts(ids, tokenizer),
            map(Source, conversations.sources(row).tolist()),
            conversations.log_probs(row).tolist(),
            conversations.policy_versions(row).tolist(),
            strict=True,
        )
        for index, text, source, log_prob, version in columns:
            title = f"id {index}"
            if source == Source.MODEL:
                title += f", log-prob {log_prob:.4g}, policy version {version}"
            spans.append(f'<span class="{source.name}" title="{title}">{escape(text)}</span>')
        tokens.append(
            f'<section class="tokens"><h3>{len(ids)} tokens</h3><pre>{"".join(spans)}</pre>'
            f'<p class="legend">{legend}</p></section>\n'
        )
    return _page([conversations.messages(row) for row in rows], values, tokens)


def _page(
    chats: Sequence[Sequence[Message]], rewards: Sequence[float | None], tokens: Sequence[str] = ()
) -> str:
    """The page; ``tokens`` is what is shown below the messages of each row, as HTML."""
    body = ""
    for row, (messages, reward) in enumerate(zip(chats, rewards, strict=True)):
        body += f"<article><h2>Conversation {row}</h2>\n"
        for message in messages:
            role = message["role"] if message["role"] in ROLE_STYLES else "other"
            title, text = escape(message_title(message)), escape(message_text(message))
            body += f'<section class="{role}"><h3>{title}</h3><pre>{text}</pre></section>\n'
        body += tokens[row] if tokens else ""
        body += "" if reward is None else f'<p class="reward">{reward_text(reward)}</p>'
        body += "</article>\n"
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Conversations</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}</body>\n"
        "</html>\n"
    )


# An episode as text segments: who wrote which part of the text and of the tokens.

_SEGMENT_STYLES: Final = {"prompt": "bright_black", "system": "magenta", "model": "green"}


class TextHistory:
    """Segments of text with their tokens, written by the system or by the model in turn.

    Args:
        text: the first segment; nothing when empty.
        tokens: its token ids, int64 ``[T]``.
        system: whether the system wrote it, and not the model.

    Examples:
        >>> history = TextHistory("What is 2 + 2?", torch.tensor([5, 6]))
        >>> history.append_segment(" 4", torch.tensor([7]), system=False)
        >>> history.text, history.token_masks.tolist()
        ('What is 2 + 2? 4', [0, 0, 1])
    """

    def __init__(self, text: str = "", tokens: Tensor | None = None, system: bool = True) -> None:
        self.text = ""
        self.tokens = torch.zeros(0, dtype=torch.int64)
        self.text_spans: list[tuple[int, int]] = []
        self.token_spans: list[tuple[int, int]] = []
        self.system_spans: list[bool] = []
        self.token_masks = torch.zeros(0, dtype=torch.int64)
        self.log_probs = torch.zeros(0)
        self.completed = False
        self.truncated = False
        self.stop_reason = ""
        self.reward = math.nan  # none was given
        self.reward_error = ""
        if text:
            self.append_segment(text, tokens, system=system)

    @classmethod
    def from_conversations(
        cls,
        conversations: Conversations,
        row: int,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        reward: "float | Tensor | None" = None,
    ) -> "TextHistory":
        """The segments of a conversation: what the policy sampled, and everything else.

        Args:
            conversations: the snapshot.
            row: which row.
            tokenizer: decodes the tokens.
            reward: of the episode, if it has one: a number, or a tensor of one element.
        """
        history = cls()
        ids, log_probs = conversations.token_ids(row), conversations.log_probs(row)
        end = 0
        for sampled, group in groupby(conversations.assistant_mask(row).tolist()):
            start, end = end, end + len(list(group))
            text, span = str(tokenizer.decode(ids[start:end].tolist())), slice(start, end)
            history.append_segment(text, ids[span], not sampled, log_probs=log_probs[span])
        history.reward = math.nan if reward is None else float(reward)
        history.completed = not conversations.position(row).awaits_response
        return history

    @property
    def last_text_segment(self) -> str:
        """The text of the newest segment."""
        start, end = self.text_spans[-1]
        return self.text[start:end]

    def append_segment(
        self,
        text: str,
        tokens: Tensor | None,
        system: bool = True,
        *,
        log_probs: Tensor | None = None,
    ) -> None:
        """Add a segment.

        Args:
            text: its text.
            tokens: its token ids, int64 ``[T]``.
            system: whether the system wrote it, and not the model.
            log_probs: of its tokens as they were sampled, float32 ``[T]``, in nats; 0 when not
                given.

        Raises:
            ValueError: the text or the tokens are empty, or there are not as many log-probs.
        """
        if not text or tokens is None or not len(tokens):
            count = 0 if tokens is None else len(tokens)
            raise ValueError(f"A segment needs text and tokens, got {text!r} and {count} tokens.")
        count, start = len(tokens), len(self.tokens)
        log_probs = torch.zeros(count) if log_probs is None else log_probs
        if len(log_probs) != count:
            raise ValueError(
                f"A segment of {count} tokens needs as many log-probs, got {len(log_probs)}."
            )
        self.text_spans.append((len(self.text), len(self.text) + len(text)))
        self.token_spans.append((start, start + count))
        self.system_spans.append(system)
        self.text += text
        self.tokens = torch.cat([self.tokens, tokens])
        written = torch.full((count,), int(not system), dtype=torch.int64)
        self.token_masks = torch.cat([self.token_masks, written])
        self.log_probs = torch.cat([self.log_probs, log_probs])

    def complete(self, truncated: bool = False, *, stop_reason: str = "") -> None:
        """Say that the episode has ended.

        Args:
            truncated: by a limit, and not by itself.
            stop_reason: why.
        """
        self.completed, self.truncated, self.stop_reason = True, truncated, stop_reason

    def split_query_response_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens of the first segment, of the others, and the mask of the others.

        Raises:
            ValueError: there is no segment.
        """
        if not self.token_spans:
            raise ValueError("The history has no segment, so there is no query to split off.")
        end = self.token_spans[0][1]
        return self.tokens[:end], self.tokens[end:], self.token_masks[end:]

    # For people ---------------------------------------------------------------------------------

    def show_text(self, *, show_legend: bool = False, console: Console | None = None) -> None:
        """Print the text, coloured by who wrote it, and the reward, if any, once it has ended.

        Args:
            show_legend: print the colours' meaning too.
            console: where to print; a new one on standard output when not given.
        """
        text = RichText()
        for number, (start, end) in enumerate(self.text_spans):
            text.append(visible(self.text[start:end]), style=self._style(number))
        self._print(text, show_legend, console)

    def show_tokens(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        show_legend: bool = False,
        console: Console | None = None,
    ) -> None:
        """Print the tokens, coloured by who wrote them; every other one is underlined.

        Args:
            tokenizer: decodes them.
            show_legend: print the colours' meaning too.
            console: where to print; a new one on standard output when not given.
        """
        spans = enumerate(self.token_spans)
        styles = [self._style(number) for number, span in spans for _ in range(*span)]
        texts = token_texts(self.tokens.tolist(), tokenizer)
        self._print(_tokens(zip(texts, styles, strict=True)), show_legend, console)

    def show_colour_legend(self, console: Console | None = None) -> None:
        """Print what the colours mean.

        Args:
            console: where to print; a new one on standard output when not given.
        """
        (console or Console()).print(_legend(_SEGMENT_STYLES.items()))

    def _style(self, number: int) -> str:
        writer = "system" if self.system_spans[number] else "model"
        return _SEGMENT_STYLES["prompt" if writer == "system" and number == 0 else writer]

    def _print(self, text: RichText, show_legend: bool, console: Console | None) -> None:
        console = console or Console()
        console.print(Panel(text))
        if self.completed:
            lines = [] if math.isnan(self.reward) else [f"reward: {self.reward:g}"]
            lines += ["truncated"] if self.truncated else []
            if lines:
                console.print(RichText(", ".join(lines), style="bold red"))
        if show_legend:
            self.show_colour_legend(console)
