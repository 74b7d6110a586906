"""The processes that train one model together: what they tell each other, and how they end.

One process is the case of one rank, and does not touch ``torch.distributed``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any, Final

import torch.distributed
from torch import Tensor

from torchrl_data.checks import POSITIVE, check_numbers

from .equal_shares import equal_shares, moved_to
from .packed_batch import PackedBatch

dist: Any = torch.distributed  # it names little of what is used here as exported
_FAILURE: Final = "torchrl-ranks/first-failure"
_HEARSAY_S: Final = 5.0
"""How long a rank that lost another one waits for what that one has to say."""
_BUCKET_BYTES: Final = 64 << 20
"""Most bytes of gradients that are reduced at once; a larger one is alone."""


class RankFailedError(RuntimeError):
    """Another rank has failed first; the message says which one, and of what."""


class Ranks:
    """The processes of one training run; make it with :meth:`join`, or :meth:`alone`.

    Rank 0 collects, logs and saves; all of them train. A loss, a gate and an output take it, and do
    then what one process with all rows would::

        with Ranks.join() as ranks:
            gate = NonFiniteGate(optimizer, max_grad_norm=1.0, ranks=ranks)
            parts = ranks.scatter(packed, max_tokens=8192)  # None instead of packed but on rank 0
            window = loss.measure_window(parts, ranks=ranks)
            outputs = []
            for part in parts:
                outputs.append(loss(part, window=window))
                gate.backward(outputs[-1], part)
            outcome = gate.step()
            metrics = GRPOLossOutput.combine(outputs, ranks=ranks)

    What ranks tell each other goes over gloo, beside the gradients, and every rank calls it in the
    same order. As a context manager it ends all of them when one fails: the others raise
    :class:`RankFailedError` with the cause instead of waiting.

    Args:
        rank: of this process, from 0.
        size: how many there are.
        device: where this rank computes.
        control: a gloo group of all ranks; ``None`` where there is one.
        store: where a rank that fails says why; ``None`` where there is one rank, or where the
            default group was somebody else's.
        data: one rank of each group that computes the same rows; ``None`` where each rank has rows
            of its own.
        context_group: ranks that share out the tokens of their rows; ``None`` for none.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        device: torch.device | str = "cpu",
        control: Any = None,
        store: Any = None,
        data: Ranks | None = None,
        context_group: Any = None,
    ) -> None:
        if not 0 <= rank < size or (size > 1) != (control is not None):
            raise ValueError(
                f"Ranks: rank {rank} of {size}, control group {control}. Make them with "
                "Ranks.join() or Ranks.alone()."
            )
        self.rank = rank
        """Of this process, from 0."""
        self.size = size
        """How many ranks there are."""
        self.device = torch.device(device)
        """Where this rank computes."""
        self.data = self if data is None else data
        """The ranks over whose rows a sum is taken: of each group of tensor or context
        parallelism, whose ranks have the same rows, the one of this rank's place in it. All ranks
        without such."""
        self.context_group = context_group
        """The ranks that share out the tokens of the rows that they have alike, of
        ``torch.distributed``; ``None`` without context parallelism."""
        self._control = control
        self._store = store
        self._owns_group = store is not None

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> Ranks:
        """A process by itself.

        Args:
            device: where it computes.
        """
        return cls(0, 1, device=device)

    @classmethod
    def join(
        cls,
        *,
        device: torch.device | str | None = None,
        timeout_s: float = 600.0,
        wait_s: float = 7200.0,
        tensor_parallel_size: int = 1,
        context_parallel_size: int = 1,
    ) -> Ranks:
        """The ranks that ``torchrun`` started, or this process alone where it started none.

        A default process group is made where there is none: gloo for tensors of the CPU, NCCL for
        those of GPUs.

        Args:
            device: where this rank computes; its own GPU (``LOCAL_RANK``) where there is one, when
                not given.
            timeout_s: the longest that a rank waits for the others in a collective of the
                training.
            wait_s: the longest that a rank waits for what rank 0 has to say or send, while that one
                collects, evaluates or saves.
            tensor_parallel_size: so many neighbouring ranks get the same rows, and compute each
                matrix together; see :func:`~torchrl_modules.split_model`.
            context_parallel_size: so many neighbouring ranks get the same rows, and each reads a
                part of the tokens of every row. Give the model that is trained their
                :attr:`context_group`; not beside ``tensor_parallel_size``.

        Raises:
            ValueError: a time is not positive, there are fewer GPUs than ranks of this machine, the
                number of ranks is no multiple of ``tensor_parallel_size`` or
                ``context_parallel_size``, or both are given.
            RuntimeError: the ranks do not find each other in time.
        """
        check_numbers("Ranks.join", POSITIVE, timeout_s=timeout_s, wait_s=wait_s)
        started = int(os.environ.get("WORLD_SIZE", "1"))
        size = dist.get_world_size() if dist.is_initialized() else started
        sizes = {"tensor": tensor_parallel_size, "context": context_parallel_size}
        _check_sizes(size, sizes)
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if where.type == "cuda" and where.index is None:
            local_rank = int(os.environ.get("LOCAL_RANK", "0")) if size > 1 else 0
            if local_rank >= torch.cuda.device_count():
                raise ValueError(
                    f"Ranks.join: rank {local_rank} of this machine finds "
                    f"{torch.cuda.device_count()} GPUs. Start one rank for each, or say "
                    "device='cpu'."
                )
            where = torch.device("cuda", local_rank)
        if size == 1:
            return cls.alone(where)
        store = None
        if where.type == "cuda":
            torch.cuda.set_device(where)
        if not dist.is_initialized():
            limit = timedelta(seconds=timeout_s)
            store, rank, size = next(iter(dist.rendezvous("env://", timeout=limit)))
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=limit,
            )
        wait = timedelta(seconds=wait_s)
        control, data = dist.new_group(backend="gloo", timeout=wait), None
        if (alike := max(sizes.values())) > 1:
            data = _data_ranks(size, alike, where, wait)
        context = None
        if context_parallel_size > 1:
            context = _own_group(size, context_parallel_size, timedelta(seconds=timeout_s))
        parts = {"control": control, "data": data, "context_group": context}
        return cls(dist.get_rank(), size, device=where, store=store, **parts)

    # What they tell each other --------------------------------------------------------------------

    def broadcast(self, value: Any = None) -> Any:
        """Return what rank 0 says.

        Args:
            value: of rank 0, anything that can be pickled; of others it is not read.

        Returns:
            Rank 0's value, on every rank.
        """
        said = [value]
        if self.size > 1:
            dist.broadcast_object_list(said, group_src=0, group=self._control)
        return said[0]

    def gather(self, value: Any) -> list[Any]:
        """Return what every rank says.

        Args:
            value: of this rank, anything that can be pickled.

        Returns:
            The values by rank, on every rank.
        """
        said = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(said, value, group=self._control)
        return said

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add numbers up over the ranks.

        Args:
            values: of this rank; equally many on each.

        Returns:
            The sums, on every rank, computed in float64.
        """
        total = torch.tensor(list(values), dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(total, group=self._control)
        return total.tolist()

    def scatter(
        self, batch: PackedBatch | None, *, max_tokens: int, count_shared_once: bool = False
    ) -> list[PackedBatch]:
        """Deal the rows of rank 0 out as micro-batches, equally many on every rank.

        Rows that lie together stay together as far as possible. The micro-batches that ranks
        compute at the same time have about as many tokens; too few rows leave some without any.

        Args:
            batch: what rank 0 trains on; ``None`` on the others.
            max_tokens: most tokens of a micro-batch; a longer row is one of its own.
            count_shared_once: of one process, see :meth:`PackedBatch.micro_batches`; the shares of
                several are equal in all of their tokens.

        Returns:
            This rank's micro-batches, on its device. One process gets those of
            :meth:`PackedBatch.micro_batches`.

        Raises:
            ValueError: rank 0 has no batch, or another one has; ``max_tokens`` is not positive.
        """
        if (batch is not None) != (self.rank == 0):
            raise ValueError(
                f"Ranks.scatter: rank {self.rank} of {self.size} gave "
                f"{'no batch' if batch is None else 'a batch'}. Rank 0 gives the rows of all."
            )
        shares: list[list[PackedBatch]] | None = None
        if batch is not None and self.data.size > 1:
            shares = equal_shares(batch, self.data.size, max_tokens=max_tokens)
        elif batch is not None:
            parts = batch.micro_batches(max_tokens=max_tokens, count_shared_once=count_shared_once)
            shares = [list(parts)]
        if self.size == 1:
            assert shares is not None
            return shares[0]
        # What is sent is pickled, and a view would take all that it is a view of with it.
        sent = shares and [[moved_to(part, "cpu") for part in share] for share in shares]
        # Neighbours compute the same rows.
        alike = self.size // self.data.size
        sent = sent and [share for share in sent for _ in range(alike)]
        own: list[Any] = [None]
        dist.scatter_object_list(own, sent, group_src=0, group=self._control)
        return [moved_to(part, self.device) for part in own[0]] if shares is None else shares[0]

    # How they begin alike, and end together -------------------------------------------------------

    @torch.no_grad()
    def copy_from_first(self, module: torch.nn.Module) -> None:
        """Give a module of every rank the parameters and buffers of rank 0's, on its device.

        What other ranks have on the meta device is made, so rank 0 alone has to load a model. What
        is sharded already stays as it is: so no other rank ever has more than a layer of it whole::

            for part in (*model.model.layers, model):
                ranks.copy_from_first(part)
                fully_shard(part)

        Args:
            module: of the same names and shapes on each rank.

        Raises:
            ValueError: it has other names or shapes than that of rank 0.
        """
        if self.size == 1:
            return
        named = chain(module.named_parameters(), module.named_buffers())
        tensors = {name: value for name, value in named if not hasattr(value, "device_mesh")}
        own = {name: value.shape for name, value in tensors.items()}
        kinds: dict[str, Any] = self.broadcast({n: (x.shape, x.dtype) for n, x in tensors.items()})
        differ = [n for n in {**own, **kinds} if own.get(n) != kinds.get(n, (None,))[0]]
        if differ:
            raise ValueError(
                f"Ranks.copy_from_first: {type(module).__name__} of rank {self.rank} differs from "
                f"that of rank 0 in {len(differ)} names or shapes, such as {differ[:4]}."
            )
        for name, value in tensors.items():
            shape, dtype = kinds[name]
            moved = value.detach() if self.rank == 0 else torch.empty(shape, dtype=dtype)
            moved = moved.to(self.device).contiguous()
            dist.broadcast(moved, 0)
            if value.is_meta:  # the module keeps it, by all its names
                trained = isinstance(value, torch.nn.Parameter)
                # A tensor of its own over those bytes: gloo may hold the one that it received.
                new = torch.nn.Parameter(moved, value.requires_grad) if trained else moved.detach()
                torch.utils.swap_tensors(value, new)
            else:
                value.data = moved

    def reduced_once(
        self, model: torch.nn.Module, parts: Sequence[PackedBatch]
    ) -> Iterator[PackedBatch]:
        """Micro-batches of a step, of which the last alone adds the gradients of all ranks up.

        Forward and backward pass of each come before the next one is asked for. Until the last one
        every rank has whole gradients, after ``fully_shard``, too.

        Args:
            model: in ``DistributedDataParallel``, or after ``fully_shard``.
            parts: this rank's share.

        Yields:
            Each of them.
        """
        sharded = getattr(model, "set_requires_gradient_sync", lambda _: None)
        for left in range(len(parts) - 1, -1, -1):
            if isinstance(model, torch.nn.parallel.DistributedDataParallel):
                model.require_backward_grad_sync = left == 0  # what `no_sync` sets
            sharded(left == 0)
            yield parts[-1 - left]

    @torch.no_grad()
    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace gradients by their means over the ranks, where no wrapper of a model does it.

        For models that each rank has whole and computes by itself, such as those of several agents:
        a rank may make other passes than the others, or none. Every rank calls it, before the step.

        Args:
            parameters: that are trained, in the same order on each rank. One without a gradient
                counts as 0 where another rank has one, and stays without where none has.

        Raises:
            ValueError: ranks give different numbers of parameters.
        """
        if self.size == 1:
            return
        every = list(parameters)
        has = self.gather([each.grad is not None for each in every])
        if len({len(flags) for flags in has}) > 1:
            raise ValueError(
                f"Ranks.average_gradients: ranks give {[len(flags) for flags in has]} parameters. "
                "Each gives those of the same models."
            )
        chosen = [each for each, *flags in zip(every, *has, strict=True) if any(flags)]
        for each in chosen:
            if each.grad is None:
                each.grad = torch.zeros_like(each)
        grads = [each.grad for each in chosen if each.grad is not None]
        for bucket in _buckets(grads):
            mean = torch.cat([grad.reshape(-1) for grad in bucket])
            dist.all_reduce(mean.div_(self.size))
            for grad, new in zip(bucket, mean.split([x.numel() for x in bucket]), strict=True):
                grad.copy_(new.view_as(grad))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.size == 1:
            return
        if error is None:
            if self._owns_group:
                dist.destroy_process_group()
            return
        first = self._first_failure(error)
        if first is not None:
            raise RankFailedError(f"Rank {self.rank} of {self.size} ends: {first}.") from error

    def _first_failure(self, error: BaseException) -> str | None:
        """Failure of another rank that came before; else that of this one is written down."""
        if self._store is None:
            return None
        own = f"rank {self.rank} failed of {type(error).__name__}: {error}"
        # Whether the error is a collective's, of which another rank may be the cause.
        text = str(error).lower()
        known = ("gloo", "nccl", "connection closed by peer", "connection reset", "timed out")
        is_loss = isinstance(error, RuntimeError) and (
            isinstance(error, dist.DistError) or any(word in text for word in known)
        )
        try:
            if is_loss:
                own = f"rank {self.rank} lost another one, which said nothing ({error})"
                deadline = time.monotonic() + _HEARSAY_S
                while not self._store.check([_FAILURE]) and time.monotonic() < deadline:
                    time.sleep(0.05)
            found = self._store.compare_set(_FAILURE, "", own).decode(errors="replace")
        except RuntimeError:  # the store has gone with the rank or the agent that had it
            return own if is_loss else None
        return None if found == own and not is_loss else found


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in order, some of one type at a time, of as many bytes as are reduced at once."""
    bucket: list[Tensor] = []
    size = 0
    for each in tensors:
        if bucket and (each.dtype != bucket[0].dtype or size + each.nbytes > _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(each)
        size += each.nbytes
    if bucket:
        yield bucket


def gathered_rows(ranks: Ranks | None, values: Tensor) -> Tensor:
    """Values of all rows one after the other, on the CPU; one process has its own."""
    if ranks is None or ranks.data.size == 1:
        return values.cpu()
    return torch.cat(ranks.data.gather(values.cpu()))


def _data_ranks(size: int, alike: int, device: torch.device, wait: timedelta) -> Ranks:
    """One rank of each group of neighbours, those in the place of this rank in its own."""
    places = [range(place, size, alike) for place in range(alike)]
    # Every rank takes part in making each group.
    groups = [dist.new_group(list(x), backend="gloo", timeout=wait) for x in places]
    rank, count = dist.get_rank(), size // alike
    control = groups[rank % alike] if count > 1 else None
    return Ranks(rank // alike, count, device=device, control=control)


def _check_sizes(num_ranks: int, sizes: Mapping[str, int]) -> None:
    """Check how many neighbours get the same rows, by the kind of parallelism."""
    for kind, size in sizes.items():
        if size < 1 or num_ranks % size:
            raise ValueError(
                f"Ranks.join: {kind}_parallel_size={size} has to divide the number of ranks, "
                f"{num_ranks}. Start a multiple of it by torchrun."
            )
    if min(sizes.values()) > 1:
        given = " and ".join(f"{kind}_parallel_size={size}" for kind, size in sizes.items())
        raise ValueError(f"Ranks.join: {given} do not go together. Leave one of them out.")


def _own_group(size: int, alike: int, limit: timedelta) -> Any:
    """The neighbours of this rank, a group for tensors of the training."""
    # Every rank takes part in making each group.
    firsts = range(0, size, alike)
    groups = [dist.new_group(range(first, first + alike), timeout=limit) for first in firsts]
    return groups[dist.get_rank() // alike]
