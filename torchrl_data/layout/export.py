"""What conversations look like from outside: messages as a ``History``, rows as TensorDicts.

Shape legend: B rows, T tokens of a row, M messages of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

from torchrl_data.conversation.batched_object import BatchedObject
from torchrl_data.conversation.conversations import Conversations, Source
from torchrl_data.conversation.messages import PLACEHOLDER_ROLE, Message
from torchrl_data.history.history import History
from torchrl_data.keys import RESPONSE

_NO_BATCH = torch.Size([])


@dataclass(frozen=True)
class HistoryView:
    """Conversations shown as a ``History``; of the part ``"response"`` the last message only."""

    part: str

    def rows(self, conversations: Conversations) -> list[History]:
        """The messages of each row, ``[M]``."""
        return list(self.show(conversations, [len(conversations)]).unbind(0))

    def show(self, conversations: Conversations, shape: Sequence[int]) -> History:
        """The messages, ``[*B, M]``."""
        return history_view(conversations, shape, response_only=self.part == RESPONSE)


def conversations_of(leaf: Any) -> Conversations | None:
    """The conversations that a leaf of a TensorDict stands for, or ``None`` if it holds others."""
    if isinstance(leaf, NonTensorStack):
        parts = [conversations_of(part) for part in leaf.unbind(0)]
        found = [part for part in parts if part is not None]
        return Conversations.cat(found) if len(found) == len(parts) else None
    data = leaf.snapshot() if isinstance(leaf, BatchedObject) else getattr(leaf, "data", None)
    return data if isinstance(data, Conversations) else None


def history_view(
    conversations: Conversations, batch_size: Sequence[int], *, response_only: bool = False
) -> History:
    """The messages as a ``History``.

    Args:
        conversations: as many as the batch has elements.
        batch_size: the batch; the history has one dimension more.
        response_only: the last message only; a placeholder where the policy has not answered.
    """
    rows = [
        History._from_messages(
            [_response(conversations, i)] if response_only else conversations.messages(i)
        )
        for i in range(len(conversations))
    ]
    stacked: Any = rows
    for size in reversed(batch_size):
        stacked = [lazy_stack(stacked[i : i + size]) for i in range(0, len(stacked), size)]
    return stacked[0]


def _response(conversations: Conversations, row: int) -> Message:
    if conversations.position(row).awaits_response:
        return {"role": PLACEHOLDER_ROLE, "content": ""}
    return conversations.last_message(row)


def row_tensordicts(conversations: Conversations) -> list[TensorDict]:
    """One TensorDict per row, with everything that a loss reads of its tokens.

    Args:
        conversations: a snapshot.

    Returns:
        B TensorDicts without batch size: ``("tokens", "prompt" / "response" / "full")``, int64;
        ``("masks", "all_attention_mask" / "all_assistant_mask")``, bool; ``("log_probs",
        "response" / "full")``, float32; ``("policy_versions", "full")``, int64; further figures
        as ``(name, "response" / "full")``, float32. All ``[T]``, aligned with the full tokens but
        for prompt and response, which are its beginning and end.
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
    return TensorDict._new_unsafe(
        {
            name: TensorDict._new_unsafe(group, batch_size=_NO_BATCH)
            for name, group in groups.items()
        },
        batch_size=_NO_BATCH,
    )
