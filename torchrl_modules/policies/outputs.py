"""What a policy writes into a batch: prompt, response and full, tokens, masks and log-probs.

Shape legend: B rows, T tokens of a row (ragged).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    lazy_stack,
)
from torch import Tensor

from torchrl_data.conversation.conversations import Conversations
from torchrl_data.keys import (
    ASSISTANT_MASK,
    ATTENTION_MASK,
    FULL,
    PROMPT,
    RESPONSE,
    TEXT,
    TOKENS,
    TOKENS_FULL,
)
from torchrl_data.layout.containers import TOKEN_GROUPS
from torchrl_data.layout.conversation_io import row_tensordicts, write_parts
from torchrl_data.ragged.padded import padded_rows
from torchrl_data.ragged.reading import entries_of, read_rows
from torchrl_data.templates.encoder import ConversationEncoder

from .inputs import RowsToScore


class PolicyOutput:
    """Writes turns into batches of one input mode."""

    # `("history", "full")` and `("history", "response")` are written in every mode.

    def __init__(
        self,
        mode: str,
        encoder: ConversationEncoder,
        *,
        write_tokens: bool,
        pad_output: bool,
        who: str,
    ) -> None:
        if pad_output and not write_tokens:
            raise ValueError(
                f"{who}: pad_output pads what write_tokens writes; write_tokens is False."
            )
        self.mode = mode
        self.encoder = encoder
        self.write_tokens = write_tokens
        self.pad_output = pad_output

    def write(self, batch: TensorDictBase, prompt: Conversations, full: Conversations) -> None:
        """Write a turn of each row."""
        parts = {PROMPT: prompt, RESPONSE: full, FULL: full}
        # Where the tokens are written as ragged rows, the record is in the history alone.
        if self.mode == TEXT or (self.mode == TOKENS and not self.write_tokens):
            write_parts(batch, parts, mode=self.mode, encoder=self.encoder)
            del parts[PROMPT]
        write_parts(batch, parts)
        if self.write_tokens:
            rows = self._token_rows(full).reshape(batch.batch_size)
            set_groups(batch, rows, padded=self.pad_output)

    def _token_rows(self, full: Conversations) -> TensorDictBase:
        rows = row_tensordicts(full)
        if not self.pad_output:
            return lazy_stack(rows)
        pad: Any = self.encoder.tokenizer.pad_token_id
        return padded_rows(rows, pad_token_id=0 if pad is None else pad)


def set_groups(batch: TensorDictBase, groups: TensorDictBase, *, padded: bool = False) -> None:
    """Set groups of token rows; entries of other layouts give way to them."""
    for name in list(groups.keys()):
        stored = batch.get(name, None)
        stored = None if stored is None or is_non_tensor(stored) else entries_of(stored)
        if isinstance(stored, LazyStackedTensorDict):
            stored.update(entries_of(groups.get(name)))
            continue
        entries, kind = groups.get(name), TOKEN_GROUPS.get(name)
        if kind is not None and not isinstance(entries, kind):
            if padded:
                entries.set("padded", NonTensorData(True, batch_size=entries.batch_size))
            entries = kind._from_tensordict(entries, {})
        batch.set(name, entries)


def write_scores(
    batch: TensorDictBase, rows: RowsToScore, values: Mapping[Any, Sequence[Tensor]]
) -> None:
    """Write what was scored, aligned with the full tokens; those too, if the batch lacks them."""
    # values: by entry, B tensors [T] without padding.
    if rows.keep is not None:
        for key, scored in values.items():
            padded = [
                row.new_zeros(len(keep)).masked_scatter(keep.to(row.device), row)
                for row, keep in zip(scored, rows.keep, strict=True)
            ]
            batch.set(key, torch.stack(padded).reshape(*batch.batch_size, -1))
        return
    columns: dict[Any, Sequence[Tensor]] = dict(values)
    if read_rows(batch, TOKENS_FULL) is None:
        columns[TOKENS_FULL] = rows.ids
        columns[ASSISTANT_MASK] = rows.masks
        columns[ATTENTION_MASK] = [torch.ones_like(mask) for mask in rows.masks]
    groups = lazy_stack(
        [_row(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
    )
    set_groups(batch, groups.reshape(batch.batch_size))


def _row(entries: dict[Any, Tensor]) -> TensorDictBase:
    row = TensorDict({}, batch_size=[])
    for key, value in entries.items():
        row.set(key, value)
    return row
