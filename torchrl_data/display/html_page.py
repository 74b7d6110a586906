"""Conversations as one self-contained HTML page that runs nothing, whatever they spell.

The page has no script and loads nothing; its content security policy allows its own style sheet
and refuses everything else. Whatever comes from a conversation is escaped text.
"""

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Final

from torch import Tensor

from torchrl_data.conversation.conversations import Conversations, Source
from torchrl_data.conversation.record import Message

from .display_text import message_text, message_title, rewards_of_rows, token_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        ValueError: there are not as many rewards as rows.
    """
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
