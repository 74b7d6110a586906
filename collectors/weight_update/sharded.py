"""Weights that are spread over the ranks of a trainer, on their way to an engine of one of them.

They are made whole a bucket at a time, when the engine reads them: all ranks compute a bucket, and
the rank that pushes keeps it until the next one. No rank ever has the whole model beside its shard.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torchrl_modules.weights.buckets import WeightLayout
from torchrl_modules.weights.lazy import LazyWeights, WeightFacts
from torchrl_modules.weights.state import UpdateRefused

from .gathering import plain_weights, unwrapped
from .merged_adapters import has_adapters, whole
from .sharded_adapters import LazyMerge

dist: Any = torch.distributed  # it names little of what is used here as exported
BUCKET_BYTES: Final = 256 << 20
"""Most bytes of the weights that are whole at a time; a larger one is alone."""
_PUSHES, _CONTRIBUTES = True, False


def is_spread(source: nn.Module | Mapping[str, Tensor]) -> bool:
    """Whether weights are shards of which other processes have the rest.

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
def pushed_weights(source: nn.Module | Mapping[str, Tensor]) -> Iterator[LazyWeights]:
    """The weights for the engine of this rank, to be read inside, while the others take part."""
    shards = ShardedWeights(source)
    own = dist.get_rank()
    leaders = [i for i, role in enumerate(_roles(_PUSHES, shards.device)) if role is _PUSHES]
    for rank in leaders[: leaders.index(own)]:
        shards.serve(rank)
    end: Exception | None = RuntimeError(f"The push of rank {own} broke off in the middle.")
    try:
        yield _Pushed(shards, own)
        end = None
    except UpdateRefused as error:
        end = UpdateRefused(str(error))
        raise
    finally:
        shards.say(end, own)
        for rank in leaders[leaders.index(own) + 1 :]:
            shards.serve(rank)


class ShardedWeights:
    """How the weights of a model are made whole by all of its ranks, bucket by bucket.

    Every rank makes one at the same time.
    """

    def __init__(self, source: nn.Module | Mapping[str, Tensor]) -> None:
        self._makers: list[Callable[[], dict[str, Tensor]]] = []
        self.facts: dict[str, WeightFacts] = {}
        """Of every weight, by Transformers' names, in order."""
        self.bucket_of: dict[str, int] = {}
        """Where each weight is made whole."""
        self.same: dict[str, Any] = {}
        """Equal for names of one and the same tensor."""
        rest = source
        if isinstance(rest, nn.Module):
            module = unwrapped(rest)
            _reshard(module)
            rest = self._add_merged(module) if has_adapters(module) else module.state_dict()
        rest = plain_weights(rest)
        self.device = next(iter(rest.values())).device
        self._add_unchanged(rest)

    def _add_merged(self, module: nn.Module) -> dict[str, Tensor]:
        """Layers with adapters; gives the weights that none of them changes."""
        merge = LazyMerge(module)
        for make in merge.layers:  # merged once to be looked at, and again to be sent
            for name, value in make().items():
                self.bucket_of[name] = len(self._makers)
                self.facts[name] = WeightFacts(value.shape, value.dtype, _largest(value))
            self._makers.append(make)
        return merge.unchanged

    def _add_unchanged(self, values: Mapping[str, Tensor]) -> None:
        largest = torch.tensor([_largest(_local(x)) for x in values.values()], dtype=torch.float64)
        largest = largest.to(self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        for (name, value), most in zip(values.items(), largest.tolist(), strict=True):
            self.facts[name] = WeightFacts(value.shape, value.dtype, most)
            self.same[name] = (_local(value).data_ptr() or id(value), value.shape)
        for bucket in WeightLayout.of(values, BUCKET_BYTES).buckets():
            self.bucket_of |= dict.fromkeys(bucket, len(self._makers))
            some = {name: values[name] for name in bucket}
            self._makers.append(lambda some=some: {n: whole(x) for n, x in some.items()})

    def make(self, bucket: int) -> dict[str, Tensor]:
        """The whole weights of a bucket; every rank calls it."""
        return self._makers[bucket]()

    def serve(self, leader: int) -> Exception | None:
        """Make the buckets that another rank asks for; gives what was wrong, if anything was."""
        while isinstance(asked := self.say(None, leader), int):
            self.make(asked)
        return asked

    def say(self, value: Any, leader: int) -> Any:
        """What the leader says to all ranks: a bucket that it needs, or how it ended."""
        said = [value]
        dist.broadcast_object_list(said, src=leader, device=self.device)
        return said[0]


class _Pushed(LazyWeights):
    """The weights on the rank that pushes them: reading one makes its bucket."""

    def __init__(self, shards: ShardedWeights, leader: int) -> None:
        self._shards = shards
        self._leader = leader
        self._at = -1
        self._bucket: dict[str, Tensor] = {}

    @property
    def facts(self) -> Mapping[str, WeightFacts]:
        return self._shards.facts

    def __getitem__(self, name: str) -> Tensor:
        at = self._shards.bucket_of[name]
        if at != self._at:
            self._at, self._bucket = -1, {}  # gone before the next one comes
            self._shards.say(at, self._leader)
            self._bucket = self._shards.make(at)
            self._at = at
        return self._bucket[name]

    def same_values(self, first: str, second: str) -> bool:
        same = self._shards.same
        known = first in same and same[first] == same.get(second)
        return known or super().same_values(first, second)


def _roles(own: bool, device: torch.device) -> list[bool]:
    """Which ranks push."""
    roles = [torch.zeros(1, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(roles, torch.full((1,), float(own), device=device))
    return [bool(role.item()) for role in roles]


def _reshard(module: nn.Module) -> None:
    """A model of which a forward pass has gathered parameters holds its shards again."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _local(value: Any) -> Tensor:
    to_local = getattr(value, "to_local", None)
    return value if to_local is None else to_local()


def _largest(value: Tensor) -> float:
    """The largest absolute value, infinity for NaN; 0 where there is none."""
    if not value.numel() or not value.is_floating_point():
        return 0.0
    most = float(torch.linalg.vector_norm(value.detach(), ord=torch.inf))
    return most if most == most else float("inf")
