"""Groups of ragged rows in a TensorDict, and their padded, nested and packed views.

A ragged group is a stack of one TensorDict per row, which is never padded; a dense group is an
ordinary TensorDict ``[B]``.

Shape legend: B rows, T tokens of the longest row, N tokens of all of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
)
from torch import Tensor

from .packed import pack, pad


def entries_of(group: Any) -> TensorDictBase:
    """The TensorDict inside a TensorClass, or the TensorDict itself."""
    return group if isinstance(group, TensorDictBase) else group._tensordict


def value_stack(values: Sequence[Any]) -> Any:
    """One leaf of a TensorDict that holds a Python value per element."""
    stack: Any = NonTensorStack
    return stack(*[NonTensorData(value) for value in values])


def ragged_entries(columns: Mapping[str, Sequence[Any]]) -> LazyStackedTensorDict:
    """A stack of one TensorDict per row.

    Args:
        columns: by name, the values of the B rows: tensors ``[T_i]`` or leaves of TensorDict.

    Raises:
        ValueError: there are no rows, or the columns differ in their number.
    """
    counts = {len(values) for values in columns.values()}
    if len(counts) != 1 or not counts.copy().pop():
        raise ValueError(
            f"A ragged group needs columns of one number of rows, got "
            f"{ {name: len(values) for name, values in columns.items()} }."
        )
    size = torch.Size([])
    rows = [
        TensorDict._new_unsafe(dict(zip(columns, values, strict=True)), batch_size=size)
        for values in zip(*columns.values(), strict=True)
    ]
    return LazyStackedTensorDict(*rows)


def rows_of(group: Any, name: str) -> list[Any]:
    """The rows of an entry: B tensors ``[T_i]`` (of one length each, if the group is dense).

    Args:
        group: a TensorDict or TensorClass of batch size ``[B]``.
        name: the entry.

    Raises:
        KeyError: the group has no such entry.
    """
    entries = entries_of(group)
    if not isinstance(entries, LazyStackedTensorDict):
        value = entries.get(name)
        # Conversations show their rows as a list (see ``conversation_faces``).
        return list(value.data if is_non_tensor(value) else value.unbind(0))
    return [row.get(name) for row in entries.unbind(0)]


def packed_view(group: Any, name: str) -> tuple[Tensor, Tensor]:
    """An entry's rows one after the other, without padding.

    Args:
        group: of batch size ``[B]``.
        name: the entry.

    Returns:
        The values ``[N]`` and the lengths, int64 ``[B]``.
    """
    return pack(rows_of(group, name))


def padded_view(
    group: Any, name: str, *, value: float | int | bool = 0, side: str = "right"
) -> Tensor:
    """An entry as a dense tensor ``[B, T]``.

    Args:
        group: of batch size ``[B]``.
        name: the entry.
        value: what fills the gaps.
        side: where they are, ``"right"`` or ``"left"``.
    """
    return pad(rows_of(group, name), value=value, side=side)


def nested_view(group: Any, name: str) -> Tensor:
    """An entry as a jagged nested tensor ``[B, T_i]``.

    Args:
        group: of batch size ``[B]``.
        name: the entry.
    """
    values, lengths = packed_view(group, name)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return torch.nested.nested_tensor_from_jagged(values, offsets)
