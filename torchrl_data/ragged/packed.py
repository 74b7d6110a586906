"""Packed sequences: rows one after the other, without padding, beside their lengths.

Packed is the layout from buffer to loss; padded is a view for whoever asks for it. Whatever a
batch holds ragged rows in, :func:`read_rows` gives them packed.

Shape legend: B sequences, T tokens of the longest one, N tokens of all of them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    unravel_key,
)
from torch import Tensor

from torchrl_data.batched_object import objects_of_leaf
from torchrl_data.keys import AGENT, FULL, IMAGES, ROUTED_EXPERTS, SAMPLING_MASK
from torchrl_data.routed_experts import unknown_expert
from torchrl_data.sampling_masks import BYTES, LENGTHS, SamplingMasks


def pack(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Concatenate ragged rows.

    Args:
        rows: B tensors ``[T_i, ...]`` of one dtype; empty rows are allowed, no rows are not.

    Returns:
        The values ``[N, ...]`` and the lengths, int64 ``[B]``.

    Raises:
        ValueError: there are no rows.

    Example:
        >>> values, lengths = pack([torch.tensor([1, 2, 3]), torch.tensor([4])])
        >>> values
        tensor([1, 2, 3, 4])
        >>> lengths
        tensor([3, 1])
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

    Example:
        >>> unpack(torch.tensor([1, 2, 3, 4]), torch.tensor([3, 1]))
        (tensor([1, 2, 3]), tensor([4]))
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
    """The sequence that each packed token belongs to.

    Args:
        lengths: int64 ``[B]``.

    Returns:
        int64 ``[N]``.
    """
    if lengths.device.type == "cpu":  # in one thread: several take longer to be woken up
        return torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths.numpy()))
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

    Example:
        >>> pad([torch.tensor([1, 2, 3]), torch.tensor([4])], value=0, side="left")
        tensor([[1, 2, 3],
                [0, 0, 4]])
    """
    if side not in ("left", "right"):
        raise ValueError(f"pad: side must be 'left' or 'right', got {side!r}.")
    return torch.nn.utils.rnn.pad_sequence(
        list(rows), batch_first=True, padding_value=value, padding_side=side
    )


class Rows(NamedTuple):
    """Ragged rows, one after the other."""

    values: Tensor
    """``[N]``."""
    lengths: Tensor
    """int64 ``[B]``, on the CPU, summing to N."""

    def split(self) -> list[Tensor]:
        """B views ``[T]`` of the values."""
        return list(unpack(*self))

    def where(self, mask: Tensor) -> "Rows":
        """The values where a mask over all of them, bool ``[N]``, is True."""
        before = torch.nn.functional.pad(mask.cumsum(0), (1, 0)).cpu()
        ends = self.lengths.cumsum(0)
        return Rows(self.values[mask], before[ends] - before[ends - self.lengths])


def entries_of(group: Any) -> TensorDictBase:
    """The TensorDict inside a TensorClass, or the TensorDict itself."""
    return group if isinstance(group, TensorDictBase) else group._tensordict


def first_entries(group: Any) -> TensorDictBase:
    """The TensorDict of a stack's first row, or the TensorDict itself."""
    # Ragged rows can't be one tensor, so what all rows have in common is looked up in the first.
    entries = entries_of(group)
    while isinstance(entries, LazyStackedTensorDict):
        entries = entries_of(entries.tensordicts[0])
    return entries


def read_rows(batch: Any, key: NestedKey) -> Rows | None:
    """The rows of an entry, one after the other; ``None`` where the batch, or a row, has none.

    The entry may be a tensor, dense ``[*B, T]`` or nested; a stack of rows of different lengths;
    or one Python object per row: tensors, lists of numbers, conversations shown as tokens.

    Args:
        batch: a TensorDict or TensorClass ``[*B]``, lazily stacked or not; without batch size it
            is one row.
        key: the entry. More dimensions than ``[*B, T]`` are flattened into T.
    """
    path: Any = unravel_key(key)
    values: list[Tensor] = []
    lengths: list[int] = []
    if not _collect(batch, (path,) if isinstance(path, str) else path, values, lengths):
        return None
    packed = torch.cat(values) if len(values) != 1 else values[0]
    return Rows(packed, torch.tensor(lengths, dtype=torch.int64))


def set_rows(batch: TensorDictBase, key: NestedKey, rows: Sequence[Tensor]) -> None:
    """Write an entry whose rows may be of different lengths, as :func:`read_rows` finds it.

    Args:
        batch: ``[B]``.
        key: the entry.
        rows: B tensors, ``[T, ...]``; of a batch that is no stack of rows, of one length.
    """
    if isinstance(batch, LazyStackedTensorDict):
        for row, values in zip(batch.unbind(0), rows, strict=True):
            row.set(key, values)
    else:
        batch.set(key, torch.stack(list(rows)))


def _collect(group: Any, path: tuple[str, ...], values: list[Tensor], lengths: list[int]) -> bool:
    """Add the rows of an entry to those so far; whether all of them have it."""
    entries = entries_of(group)
    if isinstance(entries, LazyStackedTensorDict):
        for row in entries.unbind(0):
            # What nearly every row is, read with one call.
            leaf = row.get(path, None) if type(row) is TensorDict and not row.batch_size else None
            if type(leaf) is Tensor and not leaf.is_nested:
                values.append(leaf if leaf.ndim == 1 else leaf.reshape(-1))
                lengths.append(leaf.numel())
            elif not _collect(row, path, values, lengths):
                return False
        return True
    leaf = entries.get(path[0], None)
    if leaf is None or (len(path) > 1 and (is_non_tensor(leaf) or isinstance(leaf, Tensor))):
        return False
    if len(path) > 1:
        return _collect(leaf, path[1:], values, lengths)
    if isinstance(leaf, Tensor) and not leaf.is_nested:
        count = entries.batch_size.numel()
        values.append(leaf.reshape(-1))
        lengths.extend([leaf.numel() // max(count, 1)] * count)
        return True
    if isinstance(leaf, Tensor):
        rows: Sequence[Any] = leaf.unbind()
    else:
        rows = objects_of_leaf(leaf, entries.batch_size) if is_non_tensor(leaf) else [None]
    if any(row is None for row in rows):
        return False
    flat = [torch.as_tensor(row).reshape(-1) for row in rows]
    values.extend(flat)
    lengths.extend(map(len, flat))
    return True


def _objects_of_rows(batch: Any, key: str) -> list[Any] | None:
    """A Python value per row, ``None`` for one without; ``None`` where no row has the entry."""
    # Rows of a lazy stack are asked one by one: some of them may lack the entry.
    entries = entries_of(batch)
    if isinstance(entries, LazyStackedTensorDict):
        parts = entries.unbind(0)
        found = [_objects_of_rows(part, key) for part in parts]
        if all(rows is None for rows in found):
            return None
        sizes = [part.batch_size.numel() for part in parts]
        lists = [[None] * n if rows is None else rows for rows, n in zip(found, sizes, strict=True)]
        return [row for rows in lists for row in rows]
    leaf = entries.get(key, None)
    if leaf is None or isinstance(leaf, Tensor):
        return None
    return objects_of_leaf(leaf, entries.batch_size)


def read_agents(batch: Any) -> list[str] | None:
    """The author of each row; ``None`` where no row has one."""
    agents = [str(agent or "") for agent in _objects_of_rows(batch, AGENT) or ()]
    return agents if any(agents) else None


def read_images(batch: Any) -> list[list[str]] | None:
    """The images of each row, in order and in base 64; ``None`` where no row has any."""
    rows = _objects_of_rows(batch, IMAGES)
    if rows is None:
        return None
    return [[] if row is None else list(row["data"]) for row in rows]


def read_sampling_masks(batch: Any, lengths: Sequence[int], *, who: str) -> SamplingMasks | None:
    """Read the sets of all tokens of a batch, padding included.

    Args:
        batch: ``[B]``, of rows of their own or padded.
        lengths: tokens of each row as the batch has them.
        who: the component that reads, named in the error.

    Returns:
        A set for each token, one row after the other; of rows without the entry none. ``None``
        where no row has it.

    Raises:
        ValueError: the entry is not aligned with the tokens.
    """
    counts, parts = (_leaves(batch, (SAMPLING_MASK, name)) for name in (LENGTHS, BYTES))
    if not any(part is not None for part in parts):
        return None
    sizes, data = [], []
    for row, (own, values, length) in enumerate(zip(counts, parts, lengths, strict=True)):
        if own is None and values is None:
            sizes.append(torch.zeros(length, dtype=torch.int64))
            continue
        if own is None or values is None:
            raise ValueError(
                f"{who}: {SAMPLING_MASK!r} of row {row} needs both {LENGTHS!r} and {BYTES!r}."
            )
        own, values = own.long().cpu(), values.cpu()
        if len(own) != length or int(own.sum()) > len(values) or values.dtype != torch.uint8:
            raise ValueError(
                f"{who}: {SAMPLING_MASK!r} of row {row} has {len(own)} lengths, which sum to "
                f"{int(own.sum())}, and {len(values)} values of {values.dtype}, for {length} "
                "tokens. It has a number of bytes for each token, and these bytes, uint8."
            )
        sizes.append(own)
        data.append(values[: int(own.sum())])
    return SamplingMasks(torch.cat(data), torch.cat(sizes))


def read_experts(batch: Any, lengths: Sequence[int], *, who: str) -> list[Tensor] | None:
    """Read the experts of all tokens of a batch, padding included.

    Args:
        batch: ``[B]``, of rows of their own or padded.
        lengths: tokens of each row as the batch has them.
        who: the component that reads, named in the error.

    Returns:
        Of each row ``[T, L, S]``, on the host, unknown ones in rows without the entry; ``None``
        where no row has it.

    Raises:
        ValueError: the entry is not aligned with the tokens.
    """
    return completed_experts(_leaves(batch, (ROUTED_EXPERTS, FULL)), lengths, who=who)


def completed_experts(
    rows: Sequence[Tensor | None], lengths: Sequence[int], *, who: str
) -> list[Tensor] | None:
    """Give rows without experts unknown ones; ``None`` where no row has any.

    Args:
        rows: of each row ``[T, L, S]``, or ``None``.
        lengths: T of each.
        who: the component that reads, named in the error.

    Raises:
        ValueError: the experts are of other shapes.
    """
    first = next((row for row in rows if row is not None), None)
    if first is None:
        return None
    unknown = unknown_expert(first.dtype)
    out = []
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        own = first.new_full((length, *first.shape[1:]), unknown) if row is None else row
        if own.shape != (length, *first.shape[1:]) or own.dtype != first.dtype:
            raise ValueError(
                f"{who}: {ROUTED_EXPERTS!r} of row {number} is {own.dtype} {tuple(own.shape)}, for "
                f"{length} tokens, of rows of {first.dtype} {tuple(first.shape[1:])} a token."
            )
        out.append(own.cpu())
    return out


def _leaves(batch: Any, key: tuple[str, str]) -> list[Tensor | None]:
    """An entry of each row."""
    entries = entries_of(batch)
    if isinstance(entries, LazyStackedTensorDict):
        return [leaf for row in entries.unbind(0) for leaf in _leaves(row, key)]
    group, size = entries.get(key[0], None), entries.batch_size
    if group is not None and isinstance(entries_of(group), LazyStackedTensorDict):
        return [row.get(key[1], None) for row in entries_of(group).unbind(0)]
    leaf = None if group is None else group.get(key[1], None)
    if leaf is None:
        return [None] * size.numel()
    return list(leaf.flatten(0, len(size) - 1).unbind(0)) if len(size) else [leaf]
