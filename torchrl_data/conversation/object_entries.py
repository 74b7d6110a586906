"""Python values in a TensorDict, one per row: strings, messages, data rows.

They travel as one opaque list for the whole batch, which costs the same whatever the batch, and
follow the batch when it is indexed, stacked or partly reset.
"""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase

from torchrl_data.keys import QUERY

from .batched_object import BatchedObject, RowObjects, view_of


def write_objects(batch: TensorDictBase, key: str, values: Sequence[Any]) -> None:
    """Set one Python value per row."""
    if len(values) != batch.numel():
        raise ValueError(f"{key!r}: {len(values)} values for {batch.numel()} rows.")
    batch.set(key, BatchedObject.of(RowObjects(values), batch.batch_size))


def read_objects(batch: TensorDictBase, key: str, default: Any = None) -> list[Any]:
    """One Python value per row, in a new list; one that was set for the whole batch is repeated."""
    entry = batch.get(key, None)
    if entry is None:
        return [default] * batch.numel()
    return objects_of_leaf(entry, batch.batch_size, one_chat=key == QUERY)


def objects_of_leaf(entry: Any, shape: torch.Size, *, one_chat: bool = False) -> list[Any]:
    """One Python value per row of a leaf, in a new list; a single value is repeated."""
    if isinstance(entry, BatchedObject):
        view = view_of(entry)
        return list(entry.snapshot() if view is None else view.rows(entry.snapshot()))
    if isinstance(entry, NonTensorStack):
        return _flat(entry.tolist(), len(shape))
    value = entry.data if isinstance(entry, NonTensorData) else entry
    size = shape.numel()
    if isinstance(value, list | tuple) and not (
        one_chat and all(isinstance(item, dict) for item in value)
    ):
        if len(value) == size:
            return list(value)
        nested = _flat(value, len(shape))
        if len(nested) == size:
            return nested
    return [value] * size


def _flat(values: Any, dims: int) -> list[Any]:
    """The values of nested lists, ``dims`` deep."""
    if dims <= 1:
        return list(values) if dims == 1 and isinstance(values, list | tuple) else [values]
    if not isinstance(values, list | tuple):
        return [values]
    return [value for part in values for value in _flat(part, dims - 1)]
