"""The gradient of a model that several ranks train: its norm, and how it is clipped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch.distributed
from torch import Tensor

from .ranks import Ranks


def norm_over(ranks: Ranks, grads: Sequence[Tensor]) -> Tensor:
    """The norm of the whole gradient, the same on every rank."""
    if ranks.size == 1:
        return torch.nn.utils.get_total_norm(grads)
    by_pieces: dict[int, list[Tensor]] = {}
    for grad in grads:
        by_pieces.setdefault(num_pieces(grad), []).append(_local(grad))
    norms = {count: float(torch.nn.utils.get_total_norm(x)) for count, x in by_pieces.items()}
    each: list[dict[int, float]] = ranks.gather(norms)
    copies = [norms.get(1, 0.0) for norms in each]
    low, high = min(copies), max(copies)
    if math.isfinite(high - low) and high - low > 1e-4 * high:
        # Gradients of whole parameters have been reduced, or every rank trains another model.
        raise RuntimeError(
            "NonFiniteGate: the gradients of parameters that every rank holds have different norms "
            f"({', '.join(f'{norm:.6g}' for norm in copies)} by rank), so they were not reduced. "
            "Give the policy DistributedDataParallel(model), or the model after fully_shard(model)."
        )
    # Of a tensor in n pieces each is held by 1/n of the ranks.
    squares = [x * x * count / ranks.size for norms in each for count, x in norms.items()]
    return torch.tensor(math.fsum(squares) ** 0.5, dtype=torch.float64)


def clip_over(ranks: Ranks, parameters: Sequence[Tensor], norm: Tensor, most: float) -> None:
    """Scale gradients down to a norm."""
    if ranks.size == 1:
        torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
        return
    factor = min(1.0, most / (float(norm) + 1e-6))
    for parameter in parameters:
        if parameter.grad is not None:
            _local(parameter.grad).mul_(factor)


def num_shards(value: Any) -> int:
    """Over how many ranks a tensor is spread; 1 where it is whole."""
    mesh = getattr(value, "device_mesh", None)
    return 1 if mesh is None else mesh.size()


def num_pieces(value: Any) -> int:
    """In how many different pieces ranks hold a tensor; 1 where each has all of it."""
    mesh = getattr(value, "device_mesh", None)
    if mesh is None:
        return 1
    cut = zip(mesh.shape, value.placements, strict=True)
    return math.prod(size for size, placement in cut if not placement.is_replicate())


def _local(value: Any) -> Tensor:
    """Return what this process has of a tensor, in the same memory."""
    to_local = getattr(value, "to_local", None)
    return value if to_local is None else to_local()
