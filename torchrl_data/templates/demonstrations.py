"""Demonstrations as conversations: written by others, there to be learnt, sampled by no policy."""

from collections.abc import Sequence
from math import nan
from typing import Any

from torchrl_data.conversation import ConversationRecord, Conversations, Position, Source
from torchrl_data.images import with_plain_images
from torchrl_data.messages import Message

from .encoder import ConversationEncoder


def encode_demonstrations(
    encoder: ConversationEncoder,
    chats: Sequence[Sequence[Message]],
    *,
    tools: Sequence[Sequence[dict[str, Any]] | None] | None = None,
    first_row: int = 0,
    keep_end: bool = False,
) -> Conversations:
    """Whole conversations to learn from: what the assistant says counts as the policy's.

    Args:
        encoder: with the chat template.
        chats: messages of each row; the assistant says something in each.
        tools: JSON schemas that the template shows, per row.
        first_row: the number of the first row, for errors.
        keep_end: whether rows end with all that the template writes, as conversations do that a
            reward model reads; else with the closing token of the assistant's last turn, as what a
            policy samples does.

    Returns:
        The conversations; :func:`~torchrl_data.row_tensordicts` makes the rows that ``SFTLoss``
        reads. Nothing is left open at the end. Log-probs of what the assistant says are NaN,
        because nobody sampled it.

    Raises:
        ValueError: the assistant says nothing in a row, a message has an unknown role, or the
            template can't render the messages, or leaves out something that one holds.
        TypeError: a content has the wrong type.

    Example:
        >>> chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
        >>> conversations = encode_demonstrations(ConversationEncoder(tokenizer), [chat])
        >>> ids, mask = conversations.token_ids(0), conversations.assistant_mask(0)  # [T] each
        >>> ids.dtype, mask.dtype, ids.shape == mask.shape
        (torch.int64, torch.bool, True)
        >>> tokenizer.decode(ids[mask])
        '4<|im_end|>'
    """
    tools = [None] * len(chats) if tools is None else tools
    encoded = encoder.encode_each(chats, tools, first_row=first_row)
    records, positions = [], []
    for row, (chat, new) in enumerate(zip(chats, encoded, strict=True)):
        if Source.MODEL not in new.sources:
            raise ValueError(
                f"encode_demonstrations: the assistant says nothing in row {first_row + row}, "
                f"whose roles are {[message['role'] for message in chat]}. Leave the row out."
            )
        ids, sources = new
        end = len(sources) - sources[::-1].index(Source.MODEL)
        if chat[-1]["role"] == "assistant" and not keep_end:
            # Ends like a sampled turn, with its closing token.
            ids, sources = ids[:end], sources[:end]
        record = ConversationRecord(tools[row])
        record.extend_tokens(ids, sources, [nan if s == Source.MODEL else 0.0 for s in sources])
        record.messages.extend(map(with_plain_images, chat))
        start = len(record.sources[:end].rstrip(bytes([Source.MODEL])))
        n, m = len(record.ids), len(record.messages)
        records.append(record)
        positions.append(Position(n, m, m, response_start=start))
    return Conversations(records, positions)
