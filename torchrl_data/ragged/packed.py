"""Packed sequences: rows one after the other, without padding, beside their lengths.

Packed is the layout from buffer to loss; padded is a view for whoever asks for it.

Shape legend: B sequences, T tokens of the longest one, N tokens of all of them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def pack(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Concatenate ragged rows.

    Args:
        rows: B tensors ``[T_i, ...]`` of one dtype; empty rows are allowed, no rows are not.

    Returns:
        The values ``[N, ...]`` and the lengths, int64 ``[B]``.

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("pack needs at least one row, got none.")
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return torch.cat(list(rows)), lengths


def unpack(values: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
    """Split packed values into rows, the inverse of :func:`pack`.

    Args:
        values: ``[N, ...]``.
        lengths: int64 ``[B]``; must sum to N.

    Returns:
        B views ``[T_i, ...]`` of the values.

    Raises:
        ValueError: the lengths do not sum to N.
    """
    if int(lengths.sum()) != len(values):
        raise ValueError(
            f"unpack: the lengths sum to {int(lengths.sum())}, but there are {len(values)} values."
        )
    return values.split(lengths.tolist())


def cumulative_lengths(lengths: Tensor) -> Tensor:
    """Offsets of packed sequences (``cu_seqlens``).

    Args:
        lengths: int64 ``[B]``.

    Returns:
        int64 ``[B + 1]``: 0, then the running sum; sequence i is ``values[out[i]:out[i + 1]]``.
    """
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def sequence_index(lengths: Tensor) -> Tensor:
    """Which sequence each packed token belongs to.

    Args:
        lengths: int64 ``[B]``.

    Returns:
        int64 ``[N]``.
    """
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def pad(rows: Sequence[Tensor], *, value: float | int | bool, side: str = "right") -> Tensor:
    """Padded view of ragged rows.

    Args:
        rows: B tensors ``[T_i]``.
        value: what fills the gaps.
        side: ``"right"`` or ``"left"``, where the padding goes.

    Returns:
        ``[B, T]``.

    Raises:
        ValueError: the side is neither.
    """
    if side not in ("left", "right"):
        raise ValueError(f"pad: side must be 'left' or 'right', got {side!r}.")
    return torch.nn.utils.rnn.pad_sequence(
        list(rows), batch_first=True, padding_value=value, padding_side=side
    )
