"""Weights that are spread over the ranks of a trainer, on their way to an engine of one of them.

They are made whole a bucket at a time, when the engine reads them: all ranks compute a bucket,
and the rank that pushes keeps it until the next one. No rank ever has the whole model beside its
shard.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torchrl_modules.weight_transfer.layout import WeightLayout
from torchrl_modules.weights.expected_weights import UpdateRefused
from torchrl_modules.weights.lazy_weights import (
    LazyWeights,
    WeightFacts,
    first_names,
    largest,
    narrowed,
)

from .merged_adapters import Maker, has_adapters, lazy_merge, whole
from .plain_weights import plain_weights, unwrapped_module

dist: Any = torch.distributed  # it names little of what is used here as exported
BUCKET_BYTES: Final = 256 << 20
"""Most bytes of the weights that are whole at a time; a larger one is alone."""
_PUSHES, _CONTRIBUTES = True, False


def is_spread(source: nn.Module | Mapping[str, Tensor]) -> bool:
    """Return whether weights are shards of which other processes have the rest.

    Args:
        source: a model, or its state dict.
    """
    values = source.parameters() if isinstance(source, nn.Module) else source.values()
    return any(mesh.size() > 1 for value in values if (mesh := getattr(value, "device_mesh", None)))


def contribute_weights(source: nn.Module | Mapping[str, Tensor]) -> None:
    """Take part in pushing sharded weights, on a rank that has no engine.

    Each rank of the trainer calls it at the same time, but for those that call
    ``collector.update_policy_weights_(source)`` or ``updater.push(source)`` in its place. It
    returns when they are done. Weights that are whole on every rank need nobody's part.

    Args:
        source: the model after ``fully_shard``, or its state dict.

    Raises:
        RuntimeError: no rank pushes, or the push failed in the middle.
        UpdateRefused: the engine refused the weights and goes on with its old ones.

    Example:
        >>> if ranks.rank == 0:  # doctest: +SKIP
        ...     version = collector.update_policy_weights_(model)
        ... else:
        ...     contribute_weights(model)
    """
    if not is_spread(source):
        return
    shards = ShardedWeights(source)
    roles = _roles(_CONTRIBUTES, shards.device)
    if _PUSHES not in roles:
        raise RuntimeError(
            f"contribute_weights: none of the {len(roles)} ranks pushes. One of them calls "
            "collector.update_policy_weights_(model)."
        )
    ends = [shards.serve(rank) for rank, role in enumerate(roles) if role is _PUSHES]
    for error in filter(None, ends):
        raise error


@contextmanager
def pushed_weights(
    source: nn.Module | Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> Iterator[LazyWeights]:
    """The weights for the engine of this rank, to be read inside, while the others take part.

    Args:
        source: the model, or its state dict.
        dtype: what the engine computes in: wider weights are converted before they are gathered.
    """
    shards = ShardedWeights(source, dtype)
    own = shards.rank
    leaders = [i for i, role in enumerate(_roles(_PUSHES, shards.device)) if role is _PUSHES]
    for rank in leaders[: leaders.index(own)]:
        shards.serve(rank)
    end: Exception | None = RuntimeError(f"The push of rank {own} broke off in the middle.")
    try:
        yield shards
        end = None
    except UpdateRefused as error:
        end = UpdateRefused(str(error))
        raise
    finally:
        shards.say(end, own)
        for rank in leaders[leaders.index(own) + 1 :]:
            shards.serve(rank)


class ShardedWeights(LazyWeights):
    """The weights of a model that all of its ranks make whole, bucket by bucket.

    Every rank makes one at the same time; on the one that pushes, reading a weight makes its
    bucket, while the others :meth:`serve`.
    """

    def __init__(
        self, source: nn.Module | Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> None:
        self.rank = dist.get_rank()
        self._dtype = dtype
        facts: dict[str, WeightFacts] = {}
        self.facts = facts
        """Of every weight, by Transformers' names, in order."""
        self._makers: list[Maker] = []
        self._bucket_of: dict[str, int] = {}
        self._at = -1
        self._bucket: dict[str, Tensor] = {}
        if isinstance(source, nn.Module):
            module = unwrapped_module(source)
            for part in module.modules():
                if isinstance(part, FSDPModule):  # A forward pass may have gathered parameters.
                    part.reshard()
            if not has_adapters(module):
                source = module.state_dict()
            else:
                makers, source = lazy_merge(module)
                for make in makers:  # merged once to be looked at, and again to be sent
                    for name, value in make(None).items():
                        self._bucket_of[name] = len(self._makers)
                        kind = narrowed(value, dtype)
                        facts[name] = WeightFacts(value.shape, kind, largest(value), name)
                    self._makers.append(make)
        rest = plain_weights(source)
        self.device = next(iter(rest.values())).device
        found = torch.tensor([largest(_local(x)) for x in rest.values()], dtype=torch.float64)
        found = found.to(self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        for (name, value), most in zip(rest.items(), found.tolist(), strict=True):
            place = (_local(value).data_ptr() or id(value), value.shape)
            facts[name] = WeightFacts(value.shape, narrowed(value, dtype), most, place)
        first = first_names({name: facts[name] for name in rest})
        once = {name: rest[name] for name, known in first.items() if name == known}
        for bucket in WeightLayout.of(once, BUCKET_BYTES).buckets():
            self._bucket_of |= dict.fromkeys(bucket, len(self._makers))
            some = {name: once[name] for name in bucket}
            self._makers.append(
                lambda kind, some=some: {n: whole(x, kind) for n, x in some.items()}
            )
        self._first = {name: name for name in facts} | first

    def __getitem__(self, name: str) -> Tensor:
        first = self._first[name]
        at = self._bucket_of[first]
        if at != self._at:
            self._at, self._bucket = -1, {}  # gone before the next one comes
            self.say((at, self._dtype), self.rank)
            self._bucket = self._makers[at](self._dtype)  # every rank calls it
            self._at = at
        return self._bucket[first]

    def serve(self, leader: int) -> Exception | None:
        """Make the buckets that another rank asks for; gives what was wrong, if anything was."""
        while isinstance(asked := self.say(None, leader), tuple):
            at, dtype = asked
            self._makers[at](dtype)
        return asked

    def say(self, value: Any, leader: int) -> Any:
        """Return what the leader says to all ranks: a bucket that it needs, or how it ended."""
        said = [value]
        dist.broadcast_object_list(said, src=leader, device=self.device)
        return said[0]


def _roles(own: bool, device: torch.device) -> list[bool]:
    """Return which ranks push."""
    roles = [torch.zeros(1, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(roles, torch.full((1,), float(own), device=device))
    return [bool(role.item()) for role in roles]


def _local(value: Any) -> Tensor:
    to_local = getattr(value, "to_local", None)
    return value if to_local is None else to_local()
