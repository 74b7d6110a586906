"""A process group beside the default one, between a trainer and the workers of an engine."""

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

dist: Any = torch.distributed  # it names little of what is used here as exported


class BroadcastGroup:
    """Rank 0 sends, the others receive; the store where they met has to live as long."""

    def __init__(self, backend: Any, store: Any, timeout_s: float) -> None:
        self._backend: Any = backend
        self._store: Any = store
        self._timeout = timedelta(seconds=timeout_s)

    def broadcast(self, tensor: Tensor) -> None:
        """Send a contiguous tensor to all ranks, or receive it into one of its type and size.

        Raises:
            RuntimeError: another member is gone, or did not come in time; the group is of no more
                use then.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        work = self._backend.broadcast([tensor], options)
        if not tensor.is_cuda:
            work.wait(self._timeout)
            return
        # NCCL's wait() returns at once, and its watchdog would end the process, not the call.
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not work.is_completed():
            if time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"a broadcast took longer than {self._timeout}")
            time.sleep(1e-3)
        torch.cuda.current_stream(tensor.device).synchronize()

    def close(self) -> None:
        """Leave the group. May be called twice."""
        backend, self._backend, self._store = self._backend, None, None
        if hasattr(backend, "abort"):  # NCCL: free the communicator now
            backend.abort()


def stateless_init_process_group(
    master_address: str,
    master_port: int,
    rank: int,
    world_size: int,
    device: torch.device | str = "cpu",
    *,
    timeout_s: float = 120.0,
    prefixes: Sequence[str] = ("torchrl-weights",),
) -> BroadcastGroup:
    """Join a group without touching the default one of ``torch.distributed``.

    A process may be in many such groups, and twice in the same one. All ranks have to call this at
    the same time.

    Args:
        master_address: of rank 0.
        master_port: where rank 0 listens.
        rank: of this member; 0 sends.
        world_size: members of the group.
        device: gloo carries tensors of the CPU, NCCL those of a CUDA device, of which each rank
            needs one of its own.
        timeout_s: for joining, and for each broadcast.
        prefixes: under which the members find each other in the store, the outermost last.

    Raises:
        RuntimeError: the others did not come in time.
        ValueError: the rank is not below ``world_size``.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"stateless_init_process_group: rank {rank} of {world_size} members.")
    device, timeout = torch.device(device), timedelta(seconds=timeout_s)
    server = dist.TCPStore(
        master_address,
        master_port,
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
    )
    store: Any = server
    for prefix in prefixes:
        store = dist.PrefixStore(prefix, store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = 2 * timeout  # after `broadcast` has given up
        with torch.cuda.device(device):
            backend: Any = dist.ProcessGroupNCCL(store, rank, world_size, options)
    else:
        gloo = dist.ProcessGroupGloo._Options()
        gloo._timeout = timeout
        # The interface that leads to the others: on one machine nothing listens to the outside.
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
        own = {"interface": interface} if interface else {"hostname": own_address(master_address)}
        gloo._devices = [dist.ProcessGroupGloo.create_device(**own)]
        backend = dist.ProcessGroupGloo(store, rank, world_size, gloo)
    return BroadcastGroup(backend, server, timeout_s)


def free_port(address: str = "127.0.0.1") -> int:
    """A port of an address of this machine on which nobody listens.

    Args:
        address: of this machine.
    """
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def own_address(host: str) -> str:
    """The address of this machine on the way to another one, or to itself.

    Args:
        host: a name or an address.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # nothing is sent
        return probe.getsockname()[0]
