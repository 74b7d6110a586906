"""Conversations that nobody sampled, and that are there to be learnt."""

from collections.abc import Sequence
from math import nan
from typing import Any

from torchrl_data.conversation.conversations import (
    ConversationRecord,
    Conversations,
    EncodedMessages,
    Position,
    Source,
)
from torchrl_data.conversation.images import with_plain_images
from torchrl_data.conversation.record import Message

from .encoder import ConversationEncoder


def encode_demonstrations(
    encoder: ConversationEncoder,
    chats: Sequence[Sequence[Message]],
    *,
    tools: Sequence[Sequence[dict[str, Any]] | None] | None = None,
) -> Conversations:
    """Whole conversations to learn from: what the assistant says counts as the policy's.

    Args:
        encoder: with the chat template.
        chats: messages of each row; the assistant says something in each.
        tools: JSON schemas that the template shows, per row.

    Returns:
        The conversations; :func:`~torchrl_data.row_tensordicts` makes the rows that ``SFTLoss``
        reads. Nothing is left open at the end. Log-probs of what the assistant says are NaN,
        because nobody sampled it.

    Raises:
        ValueError: the assistant says nothing in a row, a message has an unknown role, or the
            template can't render the messages, or leaves out something that one holds.
        TypeError: a content has the wrong type.
    """
    tools = [None] * len(chats) if tools is None else tools
    encoded = encoder.encode_each(chats, tools)
    records, positions = [], []
    for row, (chat, new) in enumerate(zip(chats, encoded, strict=True)):
        if Source.MODEL not in new.sources:
            raise ValueError(
                f"encode_demonstrations: the assistant says nothing in row {row}, whose roles are "
                f"{[message['role'] for message in chat]}. Leave the row out."
            )
        record, position = _record(new, chat, tools[row])
        records.append(record)
        positions.append(position)
    return Conversations(records, positions)


def _record(
    encoded: EncodedMessages, chat: Sequence[Message], tools: Sequence[dict[str, Any]] | None
) -> tuple[ConversationRecord, Position]:
    ids, sources = encoded
    end = len(sources) - sources[::-1].index(Source.MODEL)
    if chat[-1]["role"] == "assistant":  # ends like a sampled turn, with its closing token
        ids, sources = ids[:end], sources[:end]
    record = ConversationRecord(tools)
    record.extend_tokens(ids, sources, [nan if s == Source.MODEL else 0.0 for s in sources])
    record.messages.extend(map(with_plain_images, chat))
    start = len(record.sources[:end].rstrip(bytes([Source.MODEL])))
    n, m = len(record.ids), len(record.messages)
    return record, Position(n, m, m, response_start=start)
