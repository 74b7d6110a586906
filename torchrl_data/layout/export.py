"""What conversations look like from outside: messages as a ``History``.

Shape legend: M messages of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import NonTensorStack, lazy_stack

from torchrl_data.conversation.batched_object import BatchedObject
from torchrl_data.conversation.conversations import Conversations
from torchrl_data.conversation.messages import PLACEHOLDER_ROLE, Message
from torchrl_data.history.history import History
from torchrl_data.keys import RESPONSE


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
