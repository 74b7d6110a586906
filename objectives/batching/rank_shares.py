"""How the rows of a batch are dealt out to ranks that compute in step.

Shape legend: B rows, N tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .packed_batch import PackedBatch


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
    lengths = batch.lengths.tolist()
    each = 1
    while (most := smallest_bound(lengths, size * each)) > max_tokens:
        each += 1
    ends = _ends(lengths, most)
    ends += [len(lengths)] * (size * each - len(ends))
    parts = [batch.run(a, b) for a, b in pairwise([0, *ends])]
    parts.sort(key=lambda part: -len(part.ids))
    return [parts[rank::size] for rank in range(size)]


def smallest_bound(lengths: Sequence[int], num_parts: int) -> int:
    """The least number of tokens that ``num_parts`` runs of whole rows can be kept within.

    A longer row is a run of its own.
    """
    low, high = 1, max(1, sum(lengths))
    while low < high:
        middle = (low + high) // 2
        if len(_ends(lengths, middle)) <= num_parts:
            high = middle
        else:
            low = middle + 1
    return low


def _ends(lengths: Sequence[int], bound: int) -> list[int]:
    """Where runs end that are filled up to a bound, one after the other."""
    ends, filled = [], 0
    for row, length in enumerate(lengths):
        if filled + length > bound and filled:
            ends.append(row)
            filled = 0
        filled += length
    return [*ends, len(lengths)] if lengths else []


_FIELDS = ("ids", "lengths", "target_mask", "target_lengths", "sampled", "left_out")


def to_tensors(parts: Sequence[PackedBatch]) -> dict[str, Tensor]:
    """Batches as tensors by name, on the CPU."""
    tensors: dict[str, Tensor] = {}
    for index, part in enumerate(parts):
        named = {name: getattr(part, name) for name in _FIELDS}
        named |= {f"entries.{name}": value for name, value in part.entries.items()}
        tensors |= {f"{index:06}.{name}": x.cpu().contiguous() for name, x in named.items()}
    return tensors


def from_tensors(tensors: Mapping[str, Tensor], device: torch.device) -> list[PackedBatch]:
    """The batches again."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name in sorted(tensors):
        index, _, rest = name.partition(".")
        parts.setdefault(index, {})[rest] = tensors[name].to(device)
    return [
        PackedBatch(
            **{name: named[name] for name in _FIELDS},  # pyright: ignore[reportArgumentType]
            entries={
                name.removeprefix("entries."): value
                for name, value in named.items()
                if name.startswith("entries.")
            },
        )
        for named in parts.values()
    ]
