"""Tokens of one pass that ranks share out, each a part of every row (context parallelism).

All but attention is computed token by token, so a rank computes it for its own tokens alone. For
attention it gets the keys and values of all tokens, a layer at a time, and gives back what its
queries add to their gradients::

    two ranks, tokens in four chunks: rank 0 has the first and the last, rank 1 those between

    tokens     0 0 0 1 1 1 1 1 1 0 0 0
    queries of rank 0 see   3 keys and 12, of rank 1 6 and 9: 15 chunks' worth each

Shape legend: N tokens of the pass, n those of a rank (N / ranks), K targets, H heads, D head size.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor
from torch.autograd import Function

from torchrl_data.devices import on_device

dist: Any = torch.distributed  # it names little of what is used here as exported
_HAS_SINGLE: Final = hasattr(dist, "all_gather_single")
"""PyTorch 2.13 has new names for collectives of one tensor, and warns of the old ones."""
GATHER: Final = "all_gather_single" if _HAS_SINGLE else "all_gather_into_tensor"
SUM: Final = "reduce_scatter_single" if _HAS_SINGLE else "reduce_scatter_tensor"
"""How values of all ranks are put together, and gradients added up and dealt out."""


@dataclass(frozen=True)
class ContextShare:
    """Tokens of a pass that this rank reads: two chunks, the n-th from each end.

    Early tokens see few others and late ones many, so that with one of each all ranks have about
    the same work.
    """

    group: Any
    """The ranks, of ``torch.distributed``; all of them have the same rows."""
    rank: int
    """Of this process in the group."""
    size: int
    """How many ranks there are."""
    num_tokens: int
    """Of the pass: a multiple of twice the number of ranks."""

    @classmethod
    def of(cls, group: Any, num_tokens: int) -> "ContextShare":
        """The share of this process in at least so many tokens."""
        size = dist.get_world_size(group)
        each = -(-max(num_tokens, 1) // (2 * size))
        return cls(group, dist.get_rank(group), size, 2 * size * each)

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return self.num_tokens // (2 * self.size)

    @property
    def ranges(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Where the chunks of this rank begin and end."""
        chunk, last = self.chunk, 2 * self.size - 1 - self.rank
        return (
            (self.rank * chunk, (self.rank + 1) * chunk),
            (last * chunk, (last + 1) * chunk),
        )

    def count_before(self, token: int) -> int:
        """Tokens of this rank that lie before one of the pass."""
        return sum(min(max(token - first, 0), end - first) for first, end in self.ranges)

    def own(self, values: Tensor) -> Tensor:
        """Values of this rank's tokens, ``[n, ...]`` of ``[N, ...]``."""
        return torch.cat([values[first:end] for first, end in self.ranges])

    def gather(self, values: Tensor) -> Tensor:
        """Values of all tokens, ``[N, ...]``, of those of each rank, ``[n, ...]``."""
        chunks = self.gather_alike(values).unflatten(1, (2, self.chunk))
        return torch.cat([chunks[:, 0], chunks[:, 1].flip(0)]).flatten(0, 1)

    def gather_alike(self, values: Tensor) -> Tensor:
        """Values of each rank, of one shape on all of them, ``[ranks, ...]``."""
        every = values.new_empty(self.size * values.numel())  # flat: gloo takes no more dimensions
        getattr(dist, GATHER)(every, values.contiguous().flatten(), group=self.group)
        return every.view(self.size, *values.shape)

    def sum_own(self, values: Tensor) -> Tensor:
        """Sums over the ranks of values of this rank's tokens, ``[n, ...]`` of ``[N, ...]``."""
        early, late = values.view(2, self.size, self.chunk, *values.shape[1:])
        sent = torch.stack([early, late.flip(0)], 1)
        total = values.new_empty(2 * self.chunk, *values.shape[1:])
        getattr(dist, SUM)(total, sent.flatten(0, 2), group=self.group)
        return total

    def gather_heads(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens, ``[N, H, D]``, in one message."""
        every = self.gather(torch.cat([key, value], -1))
        first, second = every.split([key.shape[-1], value.shape[-1]], -1)
        return first, second

    def sum_heads(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of the gradients of keys and values, ``[n, H, D]``, in one message."""
        total = self.sum_own(torch.cat([key, value], -1))
        first, second = total.split([key.shape[-1], value.shape[-1]], -1)
        return first, second


class _GatheredHeads(Function):
    """Keys and values of all tokens, of those of each rank."""

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, context: ContextShare
    ) -> tuple[Tensor, Tensor]:
        ctx.context = context
        first, second = context.gather_heads(key, value)
        return first.contiguous(), second.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return (*ctx.context.sum_heads(*grads), None)


def gathered_heads(key: Tensor, value: Tensor, context: ContextShare) -> tuple[Tensor, Tensor]:
    """Keys and values of all tokens, ``[1, H, N, D]`` of ``[1, H, n, D]``, differentiable."""
    found: Any = _GatheredHeads.apply(*(x[0].transpose(0, 1) for x in (key, value)), context)
    first, second = (x.transpose(0, 1)[None] for x in found)
    return first, second


@dataclass(frozen=True)
class TargetShare:
    """Targets that this rank scores, those that its tokens predict, and where the others are."""

    context: ContextShare
    index: Tensor
    """int64, on the host: which of the K; of a rank without any the first, which is then scored
    for nothing, because the others wait for its pass."""
    columns: Tensor
    """int64, on the host: which of its tokens predicts each."""
    counts: tuple[int, ...]
    """Targets of each rank."""
    order: Tensor
    """int64 ``[K]``, on the host: where each target is among those of all ranks, each with as many
    as the one that has most."""

    @classmethod
    def of(cls, context: ContextShare, at: Tensor) -> "TargetShare":
        """The share of this rank, by the tokens that predict the K targets, on the host."""
        chunks = at // context.chunk
        last = 2 * context.size - 1
        owners = torch.minimum(chunks, last - chunks)
        counts = owners.bincount(minlength=context.size).tolist()
        by_owner = owners.argsort(stable=True)
        firsts = torch.tensor([0, *counts]).cumsum(0)[:-1]
        places = torch.empty_like(at)
        places[by_owner] = torch.arange(len(at)) - firsts[owners[by_owner]]
        index = (owners == context.rank).nonzero().squeeze(1)
        if len(index):
            (first, _), (second, _) = context.ranges
            own = at[index]
            columns = torch.where(own >= second, own - second + context.chunk, own - first)
        else:
            index = columns = torch.zeros(1, dtype=torch.int64)
        return cls(context, index, columns, tuple(counts), owners * max(counts) + places)

    def join(self, values: Tensor) -> Tensor:
        """Values of all targets, ``[..., K]``, of those of this rank.

        The gradient is that of the ranks' mean, which `DistributedDataParallel` and `fully_shard`
        take: each has that of its own targets, as many times as there are ranks.
        """
        joined: Tensor = _Joined.apply(values, self)  # type: ignore[assignment]
        return joined


class _Joined(Function):
    """See :meth:`TargetShare.join`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, share: TargetShare) -> Tensor:
        ctx.share, ctx.given = share, values.shape[-1]
        context, most = share.context, max(share.counts)
        count = share.counts[context.rank]
        sent = values.new_zeros(*values.shape[:-1], most)
        sent[..., :count] = values[..., :count]
        return (
            context.gather_alike(sent)
            .movedim(0, -2)
            .flatten(-2)[..., on_device(share.order, values.device)]
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        share, (grad,) = ctx.share, grads
        count = share.counts[share.context.rank]
        own = grad.new_zeros(*grad.shape[:-1], ctx.given)
        if count:
            at = on_device(share.index, grad.device)
            own[..., :count] = grad[..., at] * share.context.size
        return own, None
