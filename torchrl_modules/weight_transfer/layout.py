"""Weights as one flat run of bytes, cut into buckets: how both ends of a transfer lay them out."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed
from torch import Tensor

_ALIGNMENT = 64  # bytes; a tensor of any type may begin there


class WeightLayout:
    """Place of each tensor; those of up to ``bucket_bytes`` go together, a larger one alone."""

    def __init__(
        self,
        names: Sequence[str],
        dtype_names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        bucket_bytes: int,
    ) -> None:
        if not len(names) == len(dtype_names) == len(shapes) == len(set(names)):
            raise ValueError(
                f"WeightLayout: {len(names)} names ({len(set(names))} different ones), "
                f"{len(dtype_names)} types and {len(shapes)} shapes."
            )
        self.bucket_bytes = bucket_bytes
        self.message = {
            "names": list(names),
            "dtype_names": list(dtype_names),
            "shapes": [list(shape) for shape in shapes],
            "bucket_bytes": bucket_bytes,
        }
        """The arguments of the class, as JSON can carry them."""
        self.places: dict[str, _Place] = {}
        end = 0
        for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True):
            dtype = getattr(torch, dtype_name, None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"WeightLayout: {name} is of {dtype_name!r}, which is no type.")
            size = math.prod(shape) * dtype.itemsize
            self.places[name] = _Place(end, end + size, dtype, tuple(shape))
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = end

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], bucket_bytes: int) -> "WeightLayout":
        """The layout of some weights."""
        return cls(
            list(weights),
            [str(value.dtype).removeprefix("torch.") for value in weights.values()],
            [list(value.shape) for value in weights.values()],
            bucket_bytes,
        )

    def buckets(self) -> Iterator[list[str]]:
        """Names of the tensors that are sent together, in order."""
        bucket: list[str] = []
        for name, place in self.places.items():
            if bucket and place.end - self.places[bucket[0]].start > self.bucket_bytes:
                yield bucket
                bucket = []
            bucket.append(name)
        if bucket:
            yield bucket

    def size_of(self, bucket: Sequence[str]) -> int:
        """Return how many bytes a bucket has."""
        return self.places[bucket[-1]].end - self.places[bucket[0]].start

    def fill(self, buffer: Tensor, bucket: Sequence[str], weights: Mapping[str, Tensor]) -> Tensor:
        """Copy a bucket's tensors into a uint8 buffer, and give the part that is the bucket."""
        first = self.places[bucket[0]].start
        for name in bucket:
            place = self.places[name]
            target = buffer[place.start - first : place.end - first]
            target.view(place.dtype).view(place.shape).copy_(weights[name], non_blocking=True)
        return buffer[: self.size_of(bucket)]

    def views(self, flat: Tensor, bucket: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of a bucket in its bytes, uint8, without a copy."""
        first = self.places[bucket[0]].start
        for name in bucket:
            start, end, dtype, shape = self.places[name]
            yield name, flat[start - first : end - first].view(dtype).view(shape)


class _Place(NamedTuple):
    start: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]
