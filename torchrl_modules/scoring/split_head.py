"""A head whose rows ranks share out: each computes the logits of its part of the vocabulary.

What a log-probability needs of all logits is three numbers of each part, so ranks tell each other
these and never the logits.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor
from torch.autograd import Function

dist: Any = torch.distributed  # it names little of what is used here as exported


class _SummedGradient(Function):
    """The value itself; the gradients of all ranks of a group are added up."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Gathered(Function):
    """The values of all ranks of a group, of which all compute the same."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.rank = dist.get_rank(group)
        each = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
        dist.all_gather(each, value.contiguous(), group=group)
        return torch.stack(each)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.rank], None


def sum_gradient(value: Tensor, group: Any) -> Tensor:
    """Return a value that all ranks of a group have; it gets the sum of their gradients.

    Args:
        value: the same on each of them.
        group: of ``torch.distributed``.
    """
    return _SummedGradient.apply(value, group)  # type: ignore[return-value]


class HeadPart(NamedTuple):
    """The rows of a head that this rank has."""

    weight: Tensor
    """``[V / ranks, D]``, differentiable."""
    bias: Tensor | None
    """``[V / ranks]``."""
    first: int
    """The token of the first row."""
    group: Any
    """The ranks that have the other rows."""

    def join(
        self, targets: Tensor, log_prob: Tensor, entropy: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies under the logits of all ranks, ``[K]`` each.

        Args:
            targets: int64 ``[K]``, of the whole vocabulary.
            log_prob: ``[K]``, under the logits of this rank; of a target that is elsewhere minus
                ``lse``.
            entropy: ``[K]``, under the logits of this rank; anything where it is not asked for.
            lse: ``[K]``, log of the sum of ``exp(logit)`` over this rank's logits.
        """
        here = (targets >= self.first) & (targets < self.first + len(self.weight))
        logit = torch.where(here, log_prob + lse, 0.0)
        each = _Gathered.apply(torch.stack([logit, lse, lse - entropy]), self.group)
        logits, sums, means = each.unbind(1)  # [ranks, K]; the mean logit of each part
        total = sums.logsumexp(0)
        return logits.sum(0) - total, total - (sums.softmax(0) * means).sum(0)


def head_part(weight: Any, bias: Any) -> HeadPart | None:
    """Return the rows of a head that this rank has; ``None`` where it has all.

    Args:
        weight: ``[V, D]``; a ``DTensor`` in equal parts of rows, or a tensor.
        bias: ``[V]``, the same way; or ``None``.
    """
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None:
        return None
    own = weight.to_local()
    return HeadPart(
        own,
        None if bias is None else bias.to_local(),
        mesh.get_local_rank() * len(own),
        mesh.get_group(),
    )


def whole_head(weight: Any) -> Tensor:
    """Return all rows of a head, or all of its bias, on every rank that has a part."""
    return weight.full_tensor() if hasattr(weight, "device_mesh") else weight
