"""Conversations as one TensorDict per row, for a loss and for a buffer.

Shape legend: B rows, T tokens of a row.
"""

from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict

from torchrl_data.conversation.conversations import Conversations, Source
from torchrl_data.keys import IMAGES

from .containers import row_group

_NO_BATCH = torch.Size([])


def row_tensordicts(conversations: Conversations) -> list[TensorDict]:
    """One TensorDict per row, with everything that a loss reads of its tokens.

    Args:
        conversations: a snapshot.

    Returns:
        B TensorDicts without batch size: ``tokens``, a :class:`Tokens` of prompt, response and
        full, int64; ``masks``, a :class:`Masks`, bool; ``log_probs``, a :class:`LogProbs` of
        response and full, float32; ``("policy_versions", "full")``, int64; further values as
        ``(name, "response" / "full")``, float32. All ``[T]``, aligned with the full tokens but
        for prompt and response, which are its beginning and end. ``images`` of a row that has any.
    """
    return [_row_tensordict(conversations, i) for i in range(len(conversations))]


def _row_tensordict(conversations: Conversations, row: int) -> TensorDict:
    record, position = conversations._records[row], conversations._positions[row]
    n, start = position.num_tokens, position.response_start
    ids = torch.from_numpy(np.array(record.ids[:n], np.int64))
    log_probs = torch.from_numpy(np.array(record.log_probs[:n], np.float32))
    groups = {
        "tokens": {"prompt": ids[:start], "response": ids[start:], "full": ids},
        "masks": {
            "all_attention_mask": torch.ones(n, dtype=torch.bool),
            "all_assistant_mask": torch.from_numpy(
                np.frombuffer(record.sources, np.uint8, n) == Source.MODEL.value
            ),
        },
        "log_probs": {"response": log_probs[start:], "full": log_probs},
        "policy_versions": {"full": torch.from_numpy(np.array(record.versions[:n], np.int64))},
    }
    for name, values in conversations.extra(row).items():
        groups[name] = {"response": values[start:], "full": values}
    entries: dict[str, Any] = {
        name: row_group(name, TensorDict._new_unsafe(group, batch_size=_NO_BATCH))
        for name, group in groups.items()
    }
    if images := conversations.images(row):
        entries[IMAGES] = NonTensorData({"data": images})
    return TensorDict._new_unsafe(entries, batch_size=_NO_BATCH)
