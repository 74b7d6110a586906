"""Views of conversations as text or as tokens.

The record of tokens stays the truth; a view is worked out when somebody looks.

Shape legend: B rows, T tokens of a row (ragged).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tensordict import lazy_stack
from torch import Tensor

from .batched_object import nested_in_shape
from .conversation import Conversations
from .history import History, history_of
from .keys import FULL, HISTORY, PROMPT, RESPONSE, TEXT
from .messages import PLACEHOLDER_ROLE, Message


@dataclass(frozen=True)
class ConversationView:
    """A part of conversations as messages or, with an encoder, as text or as token ids."""

    # part: `"prompt"`, `"response"` or `"full"`. A prompt ends with the open header of the next
    # turn: what waits in the conversations is encoded when somebody looks.

    part: str
    mode: str = HISTORY
    encoder: Any = None

    def show(self, conversations: Conversations, shape: Sequence[int]) -> Any:
        """A ``History`` ``[*B, M]``, or the rows as nested lists of a batch's shape."""
        if self.mode == HISTORY:
            return history_view(conversations, shape, response_only=self.part == RESPONSE)
        return nested_in_shape(self.rows(conversations), shape)

    def rows(self, conversations: Conversations) -> list[Any]:
        """The part of each row: B histories ``[M]``, strings, or tensors of ids, int64 ``[T]``."""
        if self.mode == HISTORY:
            return list(self.show(conversations, [len(conversations)]).unbind(0))
        if self.part == PROMPT:
            # A row that can't be encoded shows what it has; whoever runs it says what is wrong.
            conversations = self.encoder.encode_rows(conversations).conversations
        starts = [position.response_start for position in conversations.positions]
        if self.mode != TEXT:
            rows = [conversations.token_ids(i) for i in range(len(starts))]
            return split_columns(rows, starts)[self.part] if self.part == RESPONSE else rows
        ids = [conversations.ids(i) for i in range(len(starts))]
        full = self.encoder.decode(ids)
        if self.part != RESPONSE:
            return full
        before = self.encoder.decode([row[:n] for row, n in zip(ids, starts, strict=True)])
        return [
            text[len(prompt) :] if text.startswith(prompt) else self.encoder.decode([row[n:]])[0]
            for text, prompt, row, n in zip(full, before, ids, starts, strict=True)
        ]


PARTS: Final = (PROMPT, RESPONSE, FULL)
"""Names of the three parts."""


def split_columns(full: Sequence[Tensor], starts: Sequence[int]) -> dict[str, list[Tensor]]:
    """The three parts of full rows, B tensors ``[T]`` each, whose responses start somewhere."""
    pairs = list(zip(full, starts, strict=True))
    return {
        PROMPT: [row[:start] for row, start in pairs],
        RESPONSE: [row[start:] for row, start in pairs],
        FULL: list(full),
    }


def history_view(
    conversations: Conversations, batch_size: Sequence[int], *, response_only: bool = False
) -> History:
    """The messages as a ``History``.

    Args:
        conversations: as many as the batch has elements.
        batch_size: the batch; the history has one dimension more.
        response_only: the last message only; a placeholder where the policy has not answered.
    """
    stacked: list[Any] = []
    for row, position in enumerate(conversations.positions):
        messages = conversations.messages(row)
        if response_only:
            unanswered: Message = {"role": PLACEHOLDER_ROLE, "content": ""}
            messages = [unanswered if position.awaits_response else messages[-1]]
        stacked.append(history_of(messages))
    for size in reversed(batch_size):
        stacked = [lazy_stack(stacked[i : i + size]) for i in range(0, len(stacked), size)]
    return stacked[0]
