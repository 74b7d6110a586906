"""Token rows of a batch in whatever layout: ragged, dense, nested, or padded beside a mask.

Shape legend: B rows, T tokens of a row (ragged).
"""

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_data.errors import missing_part
from torchrl_data.keys import ATTENTION_MASK, FULL, PROMPT, TOKENS
from torchrl_data.ragged.packed import Rows, read_rows

from .token_rows import is_padded


class TokenEntries:
    """One part of the tokens of a batch, and what is aligned with it, without padding."""

    def __init__(self, batch: TensorDictBase, which: str, *, who: str) -> None:
        self._batch, self._key, self._who = batch, (TOKENS, which), who
        rows = read_rows(batch, self._key)
        if rows is None:
            raise missing_part(batch, self._key, who)
        size = batch.batch_size.numel()
        if len(rows.lengths) != size:
            raise ValueError(
                f"{who}: {self._key} has {len(rows.lengths)} rows in a batch of {size}."
            )
        if rows.values.is_floating_point() or rows.values.dtype == torch.bool:
            raise TypeError(f"{who}: token ids are integers, {self._key} has {rows.values.dtype}.")
        self._rows = rows
        self._mask = self._attention()

    def _attention(self) -> Tensor | None:
        """Which of the values are tokens, bool ``[N]``; ``None`` where all are."""
        mask = read_rows(self._batch, ATTENTION_MASK)
        if mask is not None:
            is_token = self._own_part(mask)
            if is_token is not None:
                return None if bool(is_token.all()) else is_token
        if is_padded(self._batch.get(TOKENS)):
            raise ValueError(
                f"{self._who}: {self._key} is padded, and a pad id may be a real token "
                f"too. Put a bool mask of its shape at {ATTENTION_MASK}, or use ragged rows: "
                "Tokens.from_rows(...)."
            )
        return None

    def _own_part(self, mask: Rows) -> Tensor | None:
        """What the mask of a batch says of this part; ``None`` where it is of other rows."""
        if torch.equal(mask.lengths, self._rows.lengths):
            return mask.values.bool()
        full = read_rows(self._batch, (TOKENS, FULL))
        is_full = full is not None and torch.equal(mask.lengths, full.lengths)
        if self._key[1] != PROMPT or not is_full or not is_padded(self._batch.get(TOKENS)):
            return None
        # A padded row begins with the padded prompt, and the mask is of the whole row.
        rows = zip(mask.split(), self._rows.lengths.tolist(), strict=True)
        return torch.cat([row[:length] for row, length in rows]).bool()

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
