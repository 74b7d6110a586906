"""What conversations look like to whoever reads them as text or as tokens.

The record of tokens stays the truth; a view is worked out when somebody looks.

Shape legend: B rows, T tokens of a row (ragged).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torchrl_data.keys import PROMPT, RESPONSE, TEXT

from .batched_object import in_shape
from .conversations import Conversations


class ConversationCodec(Protocol):
    """What spells conversations out: a ``ConversationEncoder``."""

    def encode_rows(self, conversations: Conversations) -> Any:
        """Encode what waits and open the policy's turn; ``.conversations`` is the result."""
        ...

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Text of token ids."""
        ...


@dataclass(frozen=True)
class ConversationView:
    """A part of conversations as text or as token ids."""

    # part: `"prompt"`, `"response"` or `"full"`. A prompt ends with the open header of the next
    # turn: what waits in the conversations is encoded when somebody looks.

    mode: str
    part: str
    encoder: ConversationCodec

    def show(self, conversations: Conversations, shape: Sequence[int]) -> Any:
        """The rows as nested lists of a batch's shape."""
        return in_shape(self.rows(conversations), shape)

    def rows(self, conversations: Conversations) -> list[Any]:
        """The part of each row: B strings, or B tensors of ids, int64 ``[T]``."""
        if self.part == PROMPT:
            # A row that can't be encoded shows what it has; whoever runs it says what is wrong.
            conversations = self.encoder.encode_rows(conversations).conversations
        if self.mode == TEXT:
            return self._texts(conversations)
        ids = [conversations.token_ids(i) for i in range(len(conversations))]
        if self.part != RESPONSE:
            return ids
        return [row[conversations.position(i).response_start :] for i, row in enumerate(ids)]

    def _texts(self, conversations: Conversations) -> list[str]:
        ids = [conversations.ids(i) for i in range(len(conversations))]
        full = self.encoder.decode(ids)
        if self.part != RESPONSE:
            return full
        starts = [conversations.position(i).response_start for i in range(len(conversations))]
        before = self.encoder.decode([row[:n] for row, n in zip(ids, starts, strict=True)])
        return [
            text[len(prompt) :] if text.startswith(prompt) else self.encoder.decode([row[n:]])[0]
            for text, prompt, row, n in zip(full, before, ids, starts, strict=True)
        ]
