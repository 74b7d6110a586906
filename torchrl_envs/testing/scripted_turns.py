"""A policy without a model, which says what a script tells it to.

Shape legend: B rows.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tensordict import TensorDictBase

from torchrl_data import keys
from torchrl_data.batched_object import write_objects
from torchrl_data.conversation import Conversations, Turn
from torchrl_data.conversation_io import (
    active_rows,
    read_conversations,
    stored_conversations,
    write_conversations,
)
from torchrl_data.templates.encoder import ConversationEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ScriptedTurns:
    """Says the turns of a script, the same in every row, each token with log-prob -1."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", turns: Sequence[str]) -> None:
        self.encoder = ConversationEncoder(tokenizer)
        self._turns = [self.encoder.encode_turn(text, close=True) for text in turns]
        self._num_turns = 0
        self.sampled: list[int] = []
        """Token ids of the last turn."""

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Write ``full`` and ``finish_reason``, in the mode of the batch's prompt."""
        mode = next(
            m for m in keys.INPUT_MODES if stored_conversations(batch, m, keys.PROMPT) is not None
        )
        ids, content = self._turns[min(self._num_turns, len(self._turns) - 1)]
        self._num_turns += 1
        self.sampled = list(ids)
        prompt = read_conversations(batch, keys.PROMPT, who="ScriptedTurns")
        active = active_rows(batch).tolist()
        opened = self.encoder.encode_waiting(prompt)
        size = len(prompt)
        index = [row if is_active else size + row for row, is_active in enumerate(active)]
        prompt = Conversations.cat([opened, prompt])[index]
        turn = Turn(ids, [-1.0] * len(ids), {"role": "assistant", "content": content})
        full = prompt.append_turns([turn if is_active else None for is_active in active])
        for which, value in ((keys.PROMPT, prompt), (keys.FULL, full)):
            write_conversations(batch, which, value, mode=mode, encoder=self.encoder)
        write_objects(batch, keys.FINISH_REASON, ["stop"] * size)
        return batch
