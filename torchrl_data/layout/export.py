"""What conversations look like from outside: messages as a ``History``.

Shape legend: M messages of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import lazy_stack

from torchrl_data.conversation.conversations import Conversations
from torchrl_data.conversation.record import PLACEHOLDER_ROLE, Message
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
