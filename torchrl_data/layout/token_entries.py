"""Token rows of a batch in whatever layout: ragged, dense, nested, or padded beside a mask.

Shape legend: B rows, T tokens of a row (ragged).
"""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor
from torch import Tensor

from torchrl_data.conversation.object_entries import objects_of_leaf
from torchrl_data.errors import missing_part
from torchrl_data.keys import ATTENTION_MASK, TOKENS
from torchrl_data.ragged.ragged import entries_of


def token_rows(batch: TensorDictBase, key: tuple[str, str]) -> list[Tensor] | None:
    """The rows of a per-token entry, B tensors ``[T]`` with their padding, or ``None``."""
    group = batch.get(key[0], None)
    return None if group is None or is_non_tensor(group) else rows_in(group, key[1])


def rows_in(group: Any, name: str) -> list[Tensor] | None:
    """The rows of an entry of a group, see :func:`token_rows`."""
    entries = entries_of(group)
    if isinstance(entries, LazyStackedTensorDict):
        parts = [rows_in(part, name) for part in entries.unbind(0)]
        found = [part for part in parts if part is not None]
        return [row for part in found for row in part] if len(found) == len(parts) else None
    value = entries.get(name, None)
    if value is None:
        return None
    if is_non_tensor(value):
        given = objects_of_leaf(value, entries.batch_size)
        return (
            None
            if any(row is None for row in given)
            else [torch.as_tensor(row).reshape(-1) for row in given]
        )
    if value.is_nested:
        return list(value.unbind())
    return list(value.reshape(entries.numel(), value.shape[-1]).unbind(0))


class TokenEntries:
    """One part of the tokens of a batch, and what is aligned with it, without padding."""

    def __init__(self, batch: TensorDictBase, which: str, *, who: str) -> None:
        self._batch, self._which, self._who = batch, which, who
        rows = token_rows(batch, (TOKENS, which))
        if rows is None:
            raise missing_part(batch, (TOKENS, which), who)
        if len(rows) != batch.numel():
            raise ValueError(
                f"{who}: {(TOKENS, which)} has {len(rows)} rows in a batch of {batch.numel()}."
            )
        for row, ids in enumerate(rows):
            if ids.is_floating_point() or ids.dtype == torch.bool:
                raise TypeError(f"{who}: token ids are integers, row {row} has {ids.dtype}.")
        self._rows = rows
        self.keep = self._attention()
        """Where the tokens are among padding, a bool tensor per row; ``None`` without padding."""

    def _attention(self) -> list[Tensor] | None:
        masks = token_rows(self._batch, ATTENTION_MASK)
        lengths = [len(row) for row in self._rows]
        if masks is not None and [len(mask) for mask in masks] == lengths:
            keep = [mask.bool() for mask in masks]
            return None if all(bool(mask.all()) for mask in keep) else keep
        if _says_padded(self._batch):
            raise ValueError(
                f"{self._who}: {(TOKENS, self._which)} is padded, and a pad id may be a real token "
                f"too. Put a bool mask of its shape at {ATTENTION_MASK}, or use ragged rows: "
                "Tokens.from_rows(...)."
            )
        return None

    def ids(self) -> list[list[int]]:
        """Token ids per row."""
        return [row.tolist() for row in self._kept(self._rows)]

    def aligned(self, key: tuple[str, str]) -> list[Tensor] | None:
        """Rows of an entry that is aligned with the tokens, or ``None`` if there is none."""
        rows = token_rows(self._batch, key)
        if rows is None:
            return None
        for i, (row, ids) in enumerate(zip(rows, self._rows, strict=True)):
            if len(row) != len(ids):
                raise ValueError(
                    f"{self._who}: {key} has {len(row)} values in row {i}, which has {len(ids)} "
                    f"tokens at {(TOKENS, self._which)}. They must be aligned."
                )
        return self._kept(rows)

    def _kept(self, rows: Sequence[Tensor]) -> list[Tensor]:
        if self.keep is None:
            return list(rows)
        return [row[keep] for row, keep in zip(rows, self.keep, strict=True)]


def _says_padded(batch: TensorDictBase) -> bool:
    """Whether the tokens of a batch say that they are padded."""
    entries = entries_of(batch.get(TOKENS))
    while isinstance(entries, LazyStackedTensorDict):
        entries = entries_of(entries.tensordicts[0])
    leaf = entries.get("padded", None)
    if leaf is None:
        return False
    value = leaf.data if is_non_tensor(leaf) else leaf
    return bool(value.any()) if isinstance(value, Tensor) else bool(value)
