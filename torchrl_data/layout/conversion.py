"""Conversations as the ragged groups of a batch.

Shape legend: B rows, T tokens of a row (ragged).
"""

import torch

from torchrl_data.conversation.conversations import Conversations
from torchrl_data.keys import FULL

from .columns import conversation_columns, split_columns
from .containers import LogProbs, Masks, Tokens


def conversation_tokens(conversations: Conversations) -> tuple[Tokens, Masks, LogProbs]:
    """The ragged groups of conversations, with exactly the tokens that they hold.

    Args:
        conversations: B rows.

    Returns:
        Tokens, masks and log-probs, each ``[B, T]``.
    """
    rows = range(len(conversations))
    columns = conversation_columns(conversations)
    masks = Masks.from_rows(
        all_attention_mask=[torch.ones_like(ids, dtype=torch.bool) for ids in columns[FULL]],
        all_assistant_mask=[conversations.assistant_mask(i) for i in rows],
    )
    log_probs = split_columns(
        [conversations.log_probs(i) for i in rows],
        [conversations.position(i).response_start for i in rows],
    )
    return Tokens.from_rows(**columns), masks, LogProbs.from_rows(**log_probs)
