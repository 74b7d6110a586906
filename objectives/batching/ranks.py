"""The processes that train one model together: what they tell each other, and how they end.

One process is the case of one rank, and does not touch ``torch.distributed``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Final

import torch
import torch.distributed
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from torchrl_data.validation import POSITIVE, check_numbers

from .packed_batch import PackedBatch
from .rank_shares import equal_shares, from_tensors, to_tensors

dist: Any = torch.distributed  # it names little of what is used here as exported
_FAILURE: Final = "torchrl-ranks/first-failure"
_HEARSAY_S: Final = 5.0
"""How long a rank that lost another one waits for what that one has to say."""


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
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        device: torch.device | str = "cpu",
        control: Any = None,
        store: Any = None,
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
        self._control = control
        self._store = store
        self._owns_group = store is not None

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> Ranks:
        """One process by itself.

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

        Raises:
            ValueError: a time is not positive, or there are fewer GPUs than ranks of this machine.
            RuntimeError: the ranks do not find each other in time.
        """
        check_numbers("Ranks.join", POSITIVE, timeout_s=timeout_s, wait_s=wait_s)
        started, local_rank = (int(os.environ.get(n, d)) for n, d in _TORCHRUN.items())
        size = dist.get_world_size() if dist.is_initialized() else started
        where = _own_device(device, local_rank if size > 1 else 0)
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
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))
        return cls(dist.get_rank(), size, device=where, control=control, store=store)

    # What they tell each other --------------------------------------------------------------------

    def broadcast(self, value: Any = None) -> Any:
        """What rank 0 says.

        Args:
            value: of rank 0, anything that can be pickled; of others it is not read.

        Returns:
            Rank 0's value, on every rank.
        """
        said = [value]
        if self.size > 1:
            dist.broadcast_object_list(said, src=0, group=self._control)
        return said[0]

    def gather(self, value: Any) -> list[Any]:
        """What every rank says.

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

    def scatter(self, batch: PackedBatch | None, *, max_tokens: int) -> list[PackedBatch]:
        """Deal the rows of rank 0 out as micro-batches, equally many on every rank.

        Rows that lie together stay together as far as possible. The micro-batches that ranks
        compute at the same time have about as many tokens; too few rows leave some without any.

        Args:
            batch: what rank 0 trains on; ``None`` on the others.
            max_tokens: most tokens of a micro-batch; a longer row is one of its own.

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
        if self.size == 1:
            assert batch is not None
            return list(batch.micro_batches(max_tokens=max_tokens))
        if batch is None:
            return self._receive()
        shares = equal_shares(batch, self.size, max_tokens=max_tokens)
        blobs = [save_tensors(to_tensors(share)) for share in shares[1:]]
        self.broadcast([len(blob) for blob in blobs])
        for to, blob in enumerate(blobs, 1):
            dist.send(torch.frombuffer(bytearray(blob), dtype=torch.uint8), to, self._control)
        return shares[0]

    def _receive(self) -> list[PackedBatch]:
        room = torch.empty(self.broadcast()[self.rank - 1], dtype=torch.uint8)
        dist.recv(room, 0, self._control)
        return from_tensors(load_tensors(room.numpy().tobytes()), self.device)

    # How they begin alike, and end together -------------------------------------------------------

    @torch.no_grad()
    def copy_from_first(self, module: torch.nn.Module) -> None:
        """Give a module of every rank the parameters and buffers of rank 0's.

        Args:
            module: whole, of the same shapes on each rank, before it is wrapped or sharded.
        """
        if self.size == 1:
            return
        for value in [*module.parameters(), *module.buffers()]:
            moved = value.detach().cpu().contiguous()
            dist.broadcast(moved, 0, group=self._control)
            value.copy_(moved)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        """What another rank has failed of before; otherwise this one's failure is written down."""
        if self._store is None:
            return None
        own = f"rank {self.rank} failed of {type(error).__name__}: {error}"
        is_loss = _is_loss_of_a_rank(error)
        try:
            if is_loss:
                own = f"rank {self.rank} lost another one, which said nothing ({error})"
                _wait_until(lambda: self._store.check([_FAILURE]), _HEARSAY_S)
            found = self._store.compare_set(_FAILURE, "", own).decode(errors="replace")
        except RuntimeError:  # the store has gone with the rank or the agent that had it
            return own if is_loss else None
        return None if found == own and not is_loss else found


_TORCHRUN: Final = {"WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def _own_device(device: torch.device | str | None, local_rank: int) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type != "cuda" or device.index is not None:
        return device
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"Ranks.join: rank {local_rank} of this machine finds {torch.cuda.device_count()} "
            "GPUs. Start one rank for each, or say device='cpu'."
        )
    return torch.device("cuda", local_rank)


def _is_loss_of_a_rank(error: BaseException) -> bool:
    """Whether an error is a collective's, of which another rank may be the cause."""
    text = str(error).lower()
    known = ("gloo", "nccl", "connection closed by peer", "connection reset", "timed out")
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError) or any(word in text for word in known)
    )


def _wait_until(holds: Any, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)


def gathered_rows(ranks: Ranks | None, values: Tensor) -> Tensor:
    """Values of all ranks one after the other, on the CPU; one process has its own."""
    if ranks is None or ranks.size == 1:
        return values.cpu()
    return torch.cat(ranks.gather(values.cpu()))
