"""What ranks that train a model together have to do alike."""

from typing import Any

import torch
import torch.distributed
from torch import nn

from .wrapped_models import is_distributed


def check_wrapped_whole(model: nn.Module, *, who: str) -> None:
    """Refuse a model of which only parts are sharded or replicated: the rest would not be reduced.

    Raises:
        TypeError: names such a part.
    """
    if is_distributed(model):
        return
    for name, part in model.named_modules():
        if name and is_distributed(part):
            raise TypeError(
                f"{who}: {name} of {type(model).__name__} is sharded or replicated, but not the "
                "model, so that the gradients of the rest would stay different on every rank. Call "
                "fully_shard(model) last, on the very model that is given."
            )


def most_of_ranks(count: int, device: torch.device) -> int:
    """The largest of the ranks' numbers."""
    dist: Any = torch.distributed
    most = torch.tensor(count, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)
