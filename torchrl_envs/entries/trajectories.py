"""Batches of finished trajectories, taken apart into rows and put together again."""

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase, lazy_stack


def copied_rows(batch: TensorDictBase) -> list[TensorDictBase]:
    """The rows of a batch; setting an entry of one does not change the batch."""
    if batch.ndim == 0:
        return [batch.copy()]
    flat = batch if batch.ndim == 1 else batch.reshape(-1)
    return [row.copy() for row in flat.unbind(0)]


def joined_rows(rows: Sequence[TensorDictBase], batch_size: torch.Size) -> TensorDictBase:
    """The inverse of :func:`copied_rows`: a lazy stack of a shape."""
    if not batch_size:
        return rows[0]
    stacked = lazy_stack(list(rows))
    return stacked if len(batch_size) == 1 else stacked.reshape(batch_size)
