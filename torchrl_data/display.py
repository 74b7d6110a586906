"""Conversations for people: in a terminal, as HTML, and as the text that grew in an episode."""

import base64
import hashlib
import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import torch
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text as RichText
from torch import Tensor

from .conversation import Conversations
from .messages import Message, Source, image_label, is_image

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Messages and tokens as text for people: what is invisible is made visible.

_KEPT: Final = "\n\t"
_REPLACEMENT: Final = "\ufffd"
_MAX_BYTES: Final = 4
_SUSPECT = re.compile(r"[^\x20-\x7e\n\t]")


def visible(text: str) -> str:
    """Text whose control, direction and format characters are spelled out."""
    # Nobody can hide a terminal's escape sequence or turn the direction of a line with the result.
    return _SUSPECT.sub(lambda match: _visible(match.group()), text)


def _visible(character: str) -> str:
    # Zero-width joiners make emoji what they are.
    if character in _KEPT or character == "\u200d":
        return character
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return f"\\u{ord(character):04x}"
    return character


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
    if isinstance(content, str):
        parts.append(content)
    else:
        parts += [_part_text(part) for part in content or []]
    for call in message.get("tool_calls") or []:
        function = call.get("function", call) if isinstance(call, dict) else {"name": call}
        parts.append(f"-> {function.get('name')}({function.get('arguments')})")
    return visible("\n".join(part for part in parts if part))


def _part_text(part: Any) -> str:
    if is_image(part):
        return image_label(part)
    if isinstance(part, dict):
        return str(part.get("text") or f"[{part.get('type', 'part')}: {part.get('url') or '...'}]")
    return str(part)


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


def token_texts(
    ids: Sequence[int],
    tokenizer: "PreTrainedTokenizerBase",
    known: dict[int, str] | None = None,
) -> list[str]:
    """The text of each token; tokens that only together make a character share it.

    ``known`` keeps what single tokens spell from call to call.
    """
    known = {} if known is None else known
    if new := sorted(set(ids) - known.keys()):
        decoded = tokenizer.batch_decode([[i] for i in new], clean_up_tokenization_spaces=False)
        known.update(zip(new, decoded, strict=True))
    single = [known[i] for i in ids]
    texts: list[str] = []
    while len(texts) < len(ids):
        at = len(texts)
        texts += _character(ids, at, single[at], tokenizer)
    return [visible(text) for text in texts]


def _character(
    ids: Sequence[int], at: int, single: str, tokenizer: "PreTrainedTokenizerBase"
) -> list[str]:
    if _REPLACEMENT in single:
        for count in range(2, _MAX_BYTES + 1):
            joined = str(tokenizer.decode(list(ids[at : at + count])))
            if _REPLACEMENT not in joined and at + count <= len(ids):
                return [joined] + [""] * (count - 1)
    return [single]


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

    What a collector gives has ``rows["history", "full"].show()``.

    Args:
        conversations: the snapshot that holds the row.
        row: which row.
        tokenizer: when given, the row's tokens are printed below, coloured by who wrote them.
        reward: printed at the end: a number, or a tensor of one element.
        console: where to print; a new one on standard output when not given.

    Raises:
        TypeError: these are no :class:`Conversations`.
    """
    _check_conversations("show_conversation", conversations)
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


def _check_conversations(who: str, found: object) -> None:
    if not isinstance(found, Conversations):
        raise TypeError(
            f"{who} takes Conversations, got {type(found).__name__}. Rows of a collector are shown "
            'by rows["history", "full"].show(), and are a page by .to_html().'
        )


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


# Conversations as one self-contained HTML page that runs nothing, whatever they spell.
#
# The page has no script and loads nothing; its content security policy allows its own style sheet
# and refuses everything else. Whatever comes from a conversation is escaped text.

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1d2330; background: #fff; }
article { margin-bottom: 3rem; }
section { border-left: 4px solid #8a93a5; margin: .6rem 0; padding: .2rem .9rem; }
h2 { font-size: 1rem; } h3 { font-size: .8rem; margin: 0; color: #5b6475; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0; font: inherit; }
.system, .developer { border-color: #a23bb0; } .user { border-color: #2563c9; }
.tool { border-color: #b7791f; } .assistant { border-color: #1d8a4b; }
.tokens { font-family: ui-monospace, monospace; font-size: .8rem; border-color: #d5d9e0; }
.TEMPLATE { color: #737b8c; } .CONTENT { background: #dbe8fd; } .MODEL { background: #cdeed8; }
.tokens span { border-right: 1px solid #fff; }
.legend span { padding: 0 .4rem; margin-right: .4rem; } .reward { font-weight: 600; }
"""
_ROLES: Final = frozenset(("system", "developer", "user", "tool", "assistant"))


def _policy() -> str:
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


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
    articles = [_messages(chat) for chat in chats]
    return _page(articles, rewards_of_rows(reward, rewards, len(articles)))


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
        reward: where there is one row.
        rewards: of each row, or a tensor of as many elements.

    Raises:
        TypeError: these are no :class:`Conversations`.
        ValueError: there are not as many rewards as rows.
    """
    _check_conversations("conversation_html", conversations)
    articles = []
    for row in range(len(conversations)):
        article = _messages(conversations.messages(row))
        if tokenizer is not None:
            article += _tokens(conversations, row, tokenizer)
        articles.append(article)
    return _page(articles, rewards_of_rows(reward, rewards, len(articles)))


def _messages(messages: Sequence[Message]) -> str:
    return "".join(
        f'<section class="{message["role"] if message["role"] in _ROLES else "other"}">'
        f"<h3>{escape(message_title(message))}</h3><pre>{escape(message_text(message))}</pre>"
        "</section>\n"
        for message in messages
    )


def _tokens(conversations: Conversations, row: int, tokenizer: "PreTrainedTokenizerBase") -> str:
    ids = conversations.ids(row)
    columns = zip(
        ids,
        token_texts(ids, tokenizer),
        conversations.sources(row).tolist(),
        conversations.log_probs(row).tolist(),
        conversations.policy_versions(row).tolist(),
        strict=True,
    )
    spans = []
    for index, text, source, log_prob, version in columns:
        title = f"id {index}"
        if source == Source.MODEL:
            title += f", log-prob {log_prob:.4g}, policy version {version}"
        spans.append(f'<span class="{Source(source).name}" title="{title}">{escape(text)}</span>')
    legend = "".join(f'<span class="{s.name}">{s.name.lower()}</span>' for s in Source)
    return (
        f'<section class="tokens"><h3>{len(ids)} tokens</h3><pre>{"".join(spans)}</pre>'
        f'<p class="legend">{legend}</p></section>\n'
    )


def _page(articles: Sequence[str], rewards: Sequence[float | None]) -> str:
    body = "".join(
        f"<article><h2>Conversation {row}</h2>\n{article}"
        + ("" if reward is None else f'<p class="reward">reward: {reward:g}</p>')
        + "</article>\n"
        for row, (article, reward) in enumerate(zip(articles, rewards, strict=True))
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Conversations</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}</body>\n"
        "</html>\n"
    )


# An episode as text segments: who wrote which part of the text and of the tokens.

PROMPT_STYLE: Final = "bright_black"
SYSTEM_STYLE: Final = "magenta"
MODEL_STYLE: Final = "green"
_LEGEND: Final = (("prompt", PROMPT_STYLE), ("system", SYSTEM_STYLE), ("model", MODEL_STYLE))


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
        ids = conversations.token_ids(row)
        all_log_probs = conversations.log_probs(row)
        mask = conversations.sources(row) == Source.MODEL
        start = 0
        for sampled, group in groupby(mask.tolist()):
            segment = ids[start : start + len(list(group))]
            start += len(segment)
            text = str(tokenizer.decode(segment.tolist()))
            log_probs = all_log_probs[start - len(segment) : start]
            history.append_segment(text, segment, system=not sampled, log_probs=log_probs)
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
        if log_probs is None:
            log_probs = torch.zeros(len(tokens))
        if len(log_probs) != len(tokens):
            raise ValueError(
                f"A segment of {len(tokens)} tokens needs as many log-probs, got {len(log_probs)}."
            )
        self.text_spans.append((len(self.text), len(self.text) + len(text)))
        self.token_spans.append((len(self.tokens), len(self.tokens) + len(tokens)))
        self.system_spans.append(system)
        self.text += text
        self.tokens = torch.cat([self.tokens, tokens])
        written = torch.full((len(tokens),), int(not system), dtype=torch.int64)
        self.token_masks = torch.cat([self.token_masks, written])
        self.log_probs = torch.cat([self.log_probs, log_probs])

    def complete(self, truncated: bool = False, *, stop_reason: str = "") -> None:
        """Say that the episode has ended.

        Args:
            truncated: by a limit, and not by itself.
            stop_reason: why.
        """
        self.completed = True
        self.truncated = truncated
        self.stop_reason = stop_reason

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

    def _styles(self) -> list[str]:
        styles = [SYSTEM_STYLE if system else MODEL_STYLE for system in self.system_spans]
        if self.system_spans and self.system_spans[0]:
            styles[0] = PROMPT_STYLE
        return styles

    def show_text(self, *, show_legend: bool = False, console: Console | None = None) -> None:
        """Print the text, coloured by who wrote it, and the reward, if any, once it has ended.

        Args:
            show_legend: print the colours' meaning too.
            console: where to print; a new one on standard output when not given.
        """
        text = RichText()
        for (start, end), style in zip(self.text_spans, self._styles(), strict=True):
            text.append(visible(self.text[start:end]), style=style)
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
        texts = token_texts(self.tokens.tolist(), tokenizer)
        text = RichText()
        for (start, end), style in zip(self.token_spans, self._styles(), strict=True):
            for i in range(start, end):
                text.append(texts[i], style=f"{style} underline" if i % 2 else style)
        self._print(text, show_legend, console)

    def show_colour_legend(self, console: Console | None = None) -> None:
        """Print what the colours mean.

        Args:
            console: where to print; a new one on standard output when not given.
        """
        (console or Console()).print(colour_legend(_LEGEND))

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
