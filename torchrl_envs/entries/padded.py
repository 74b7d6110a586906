"""Entries with one value per token in a batch of environment rows, whose token counts differ.

In the environment's batch such an entry is padded with zeros, ``[B, T, ...]``; a note beside it
says that it is one, so that whoever takes rows out of the batch cuts the padding off.

Shape legend: B rows, T tokens of the longest row written, T_i tokens of a row.
"""

from collections.abc import Sequence
from typing import Final

import torch
from tensordict import NestedKey, NonTensorData, TensorDictBase
from torch import Tensor

TOKEN_ENTRIES: Final = "token_entries"
"""Which entries are padded per-token ones: entry of the batch to entry of a row."""


def write_token_entry(
    batch: TensorDictBase,
    key: NestedKey,
    rows: Sequence[int],
    values: Sequence[Tensor],
    *,
    row_key: NestedKey | None = None,
) -> None:
    """Set one value per token for some rows."""
    # key: the entry, written as [B, T, ...], 0 where nothing was given; values: [T_i, ...] for
    # each.
    if not rows:
        return
    length = max(max(len(value) for value in values), 1)
    padded = values[0].new_zeros(batch.batch_size[0], length, *values[0].shape[1:])
    for row, value in zip(rows, values, strict=True):
        padded[row, : len(value)] = value
    batch.set(key, padded)
    note = batch.get(TOKEN_ENTRIES, None)
    noted = {} if note is None else dict(note.data)
    noted[key] = key if row_key is None else row_key
    batch.set(TOKEN_ENTRIES, NonTensorData(noted, batch_size=batch.batch_size))


def read_token_entry(
    batch: TensorDictBase, key: NestedKey, row: int, num_tokens: int
) -> Tensor | None:
    """One row of a per-token entry, without padding."""
    # Gives [T_i, ...], or `None` if there is no such per-token entry.
    note = batch.get(TOKEN_ENTRIES, None)
    if note is None or key not in note.data:
        return None
    value = batch.get(key)[row, :num_tokens]
    missing = num_tokens - len(value)
    return value if not missing else torch.cat([value, value.new_zeros(missing, *value.shape[1:])])


def token_entries_of_row(
    batch: TensorDictBase, row: int, num_tokens: int
) -> dict[NestedKey, Tensor]:
    """All per-token entries of a row, by their names in a row, each ``[T_i, ...]``."""
    note = batch.get(TOKEN_ENTRIES, None)
    found: dict[NestedKey, Tensor] = {}
    for key, row_key in ({} if note is None else note.data).items():
        value = read_token_entry(batch, key, row, num_tokens)
        if value is not None:
            found[row_key] = value
    return found
