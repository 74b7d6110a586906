"""Token rows of a batch in whatever layout: ragged, dense, nested, or padded beside a mask.

Shape legend: B rows, T tokens of a row (ragged).
"""

import torch
from tensordict import (
    TensorDictBase,
)
from torch import Tensor

from torchrl_data.keys import ATTENTION_MASK, PROMPT, TOKENS
from torchrl_data.missing_entry import missing_entry

from .packed import Rows, pack, read_rows
from .token_rows import is_padded


class TokenEntries:
    """One part of the tokens of a batch, and what is aligned with it, without padding."""

    def __init__(self, batch: TensorDictBase, which: str, *, who: str) -> None:
        self._batch, self._key, self._who = batch, (TOKENS, which), who
        rows, size = read_rows(batch, self._key), batch.batch_size.numel()
        if rows is None:
            raise missing_entry(batch, self._key, who)
        if (found := len(rows.lengths)) != size:
            raise ValueError(f"{who}: {self._key} has {found} rows in a batch of {size}.")
        if rows.values.is_floating_point() or rows.values.dtype == torch.bool:
            raise TypeError(f"{who}: token ids are integers, {self._key} has {rows.values.dtype}.")
        self._rows = rows
        # Which of the values are tokens, bool ``[N]``; ``None`` where all are.
        mask, padded = read_rows(batch, ATTENTION_MASK), is_padded(batch.get(TOKENS))
        if mask is not None and which == PROMPT:
            # A row begins with its prompt, and the mask is of the whole row.
            parts = zip(mask.split(), rows.lengths.tolist(), strict=True)
            mask = Rows(*pack([row[:length] for row, length in parts]))
        is_aligned = mask is not None and torch.equal(mask.lengths, rows.lengths)
        is_token = mask.values.bool() if mask is not None and is_aligned else None
        if is_token is None and padded:
            raise ValueError(
                f"{who}: {self._key} is padded, and a pad id may be a real token too. Put a bool "
                f"mask of its shape at {ATTENTION_MASK}, or use ragged rows: Tokens.from_rows(...)."
            )
        has_gaps = is_token is not None and (padded or not bool(is_token.all()))
        self._mask = is_token if has_gaps else None

    @property
    def keep(self) -> list[Tensor] | None:
        """Where the tokens are among padding, a bool tensor per row; ``None`` without padding."""
        return None if self._mask is None else Rows(self._mask, self._rows.lengths).split()

    def ids(self) -> list[list[int]]:
        """Token ids per row."""
        return [row.tolist() for row in self._kept(self._rows)]

    def aligned(self, key: tuple[str, str]) -> list[Tensor] | None:
        """Rows of an entry that is aligned with the tokens, or ``None`` if there is none."""
        rows = read_rows(self._batch, key)
        if rows is None:
            return None
        pairs = zip(rows.lengths.tolist(), self._rows.lengths.tolist(), strict=True)
        for row, (found, length) in enumerate(pairs):
            if found != length:
                raise ValueError(
                    f"{self._who}: {key} has {found} values in row {row}, which has {length} "
                    f"tokens at {self._key}. They must be aligned."
                )
        return self._kept(rows)

    def _kept(self, rows: Rows) -> list[Tensor]:
        return (rows if self._mask is None else rows.where(self._mask)).split()
