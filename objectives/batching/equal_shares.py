"""Rows of a batch, dealt out to ranks that compute in step.

Shape legend: B rows, N tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise, starmap

import torch.distributed
from torch import Tensor

from .packed_batch import PackedBatch, run_ends


def equal_shares(batch: PackedBatch, size: int, *, max_tokens: int) -> list[list[PackedBatch]]:
    """Micro-batches for each rank, equally many, alike in tokens where they are computed together.

    Runs of rows are cut so that the largest is as small as it can be, then dealt out by their size.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be a positive number, got {max_tokens}.")
    if batch.images and any(batch.images):
        raise ValueError(
            f"{sum(map(bool, batch.images))} of {batch.num_rows} rows have images, which are not "
            "dealt out to ranks. Train a vision-language model in one process."
        )
    lengths, together = batch.lengths.tolist(), batch.rows_together
    each = 1
    while (most := smallest_bound(lengths, size * each, together)) > max_tokens:
        each += 1
    ends = run_ends(lengths, most, together)
    ends += [len(lengths)] * (size * each - len(ends))
    parts = list(starmap(batch.run, pairwise([0, *ends])))
    parts.sort(key=lambda part: -len(part.ids))
    return [parts[rank::size] for rank in range(size)]


def smallest_bound(lengths: Sequence[int], num_parts: int, rows_together: int = 1) -> int:
    """The least number of tokens that ``num_parts`` runs of whole rows can be kept within.

    A longer row is a run of its own.

    Args:
        lengths: tokens of the rows.
        num_parts: so many runs.
        rows_together: so many rows that follow each other are not parted.
    """
    low, high = 1, max(1, sum(lengths))
    while low < high:
        middle = (low + high) // 2
        if len(run_ends(lengths, middle, rows_together)) <= num_parts:
            high = middle
        else:
            low = middle + 1
    return low


def moved_to(part: PackedBatch, device: torch.device | str) -> PackedBatch:
    """A batch in memory of its own, on a device."""
    entries = {name: value.to(device, copy=True) for name, value in part.entries.items()}
    held = {f.name: getattr(part, f.name) for f in fields(part)}
    own = {n: x.to(device, copy=True) for n, x in held.items() if isinstance(x, Tensor)}
    return replace(part, **own, entries=entries)
