"""Conversations as one self-contained HTML page that runs nothing, whatever they spell.

The page has no script and loads nothing; its content security policy allows its own style sheet
and refuses everything else. Text of a conversation is always escaped.
"""

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torch import Tensor

from torchrl_data.conversation import Conversations, Source
from torchrl_data.messages import Message

from .terminal import ROLE_STYLES, check_conversations
from .text import message_text, message_title, reward_text, rewards_of_rows, token_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_STYLE: Final = "\n" + Path(__file__).with_name("html.css").read_text("utf-8")


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
    check_conversations("conversation_html", conversations)
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
