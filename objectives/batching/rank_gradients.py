"""The gradient of a model that several ranks train: its norm, and how it is clipped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .ranks import Ranks


def norm_over(ranks: Ranks, grads: Sequence[Tensor]) -> Tensor:
    """The norm of the whole gradient, the same on every rank."""
    if ranks.size == 1:
        return torch.nn.utils.get_total_norm(grads)
    shards = [grad for grad in grads if num_shards(grad) > 1]
    copies = [_local(grad) for grad in grads if num_shards(grad) == 1]
    of_shards: Any = torch.nn.utils.get_total_norm(shards)
    of_shards = of_shards.full_tensor() if shards else of_shards
    of_copies = torch.nn.utils.get_total_norm(copies)
    _check_same(ranks.gather(float(of_copies)))
    return torch.hypot(of_shards.double().cpu(), of_copies.double().cpu())


def clip_over(ranks: Ranks, parameters: Sequence[Tensor], norm: Tensor, most: float) -> None:
    """Scale gradients down to a norm."""
    if ranks.size == 1:
        torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
        return
    factor = min(1.0, most / (float(norm) + 1e-6))
    for parameter in parameters:
        if parameter.grad is not None:
            _local(parameter.grad).mul_(factor)


def first_reason(ranks: Ranks, reason: str) -> str:
    """What is wrong on any rank, and on which; empty where nothing is."""
    if ranks.size == 1:
        return reason
    reasons = enumerate(ranks.gather(reason))
    return next((f"of rank {rank} {found}" for rank, found in reasons if found), "")


def num_shards(value: Any) -> int:
    """Over how many ranks a tensor is spread; 1 where it is whole."""
    mesh = getattr(value, "device_mesh", None)
    return 1 if mesh is None else mesh.size()


def _local(value: Any) -> Tensor:
    """What this process has of a tensor, in the same memory."""
    to_local = getattr(value, "to_local", None)
    return value if to_local is None else to_local()


def _check_same(norms: Sequence[float]) -> None:
    """Gradients of whole parameters have been reduced, or every rank trains another model."""
    low, high = min(norms), max(norms)
    if math.isfinite(high - low) and high - low > 1e-4 * high:
        raise RuntimeError(
            "NonFiniteGate: the gradients of parameters that every rank holds have different norms "
            f"({', '.join(f'{norm:.6g}' for norm in norms)} by rank), so they were not reduced. "
            "Give the policy DistributedDataParallel(model), or the model after fully_shard(model)."
        )
