"""How weights reach another process: in buckets, over a process group or a shared file."""

import json
import math
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from .weights import ExpectedWeights, refuse, shells, value_faults

# Weights as one flat run of bytes, cut into buckets: how both ends of a transfer lay them out.

_ALIGNMENT = 64  # bytes; a tensor of any type may begin there


class WeightLayout:
    """Where each tensor lies; those of up to ``bucket_bytes`` go together, a larger one alone."""

    def __init__(
        self,
        names: Sequence[str],
        dtype_names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        bucket_bytes: int,
    ) -> None:
        if not len(names) == len(dtype_names) == len(shapes) == len(set(names)):
            raise ValueError(
                f"WeightLayout: {len(names)} names ({len(set(names))} different ones), "
                f"{len(dtype_names)} types and {len(shapes)} shapes."
            )
        self.bucket_bytes = bucket_bytes
        self.message = {
            "names": list(names),
            "dtype_names": list(dtype_names),
            "shapes": [list(shape) for shape in shapes],
            "bucket_bytes": bucket_bytes,
        }
        """The arguments of the class, as JSON can carry them."""
        self.places: dict[str, _Place] = {}
        end = 0
        for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True):
            dtype = getattr(torch, dtype_name, None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"WeightLayout: {name} is of {dtype_name!r}, which is no type.")
            size = math.prod(shape) * dtype.itemsize
            self.places[name] = _Place(end, end + size, dtype, tuple(shape))
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = end

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], bucket_bytes: int) -> "WeightLayout":
        """The layout of some weights."""
        return cls(
            list(weights),
            [str(value.dtype).removeprefix("torch.") for value in weights.values()],
            [list(value.shape) for value in weights.values()],
            bucket_bytes,
        )

    def buckets(self) -> Iterator[list[str]]:
        """Names of the tensors that are sent together, in order."""
        bucket: list[str] = []
        for name, place in self.places.items():
            if bucket and place.end - self.places[bucket[0]].start > self.bucket_bytes:
                yield bucket
                bucket = []
            bucket.append(name)
        if bucket:
            yield bucket

    def size_of(self, bucket: Sequence[str]) -> int:
        """How many bytes a bucket has."""
        return self.places[bucket[-1]].end - self.places[bucket[0]].start

    def fill(self, buffer: Tensor, bucket: Sequence[str], weights: Mapping[str, Tensor]) -> Tensor:
        """Copy a bucket's tensors into a uint8 buffer, and give the part that is the bucket."""
        first = self.places[bucket[0]].start
        for name in bucket:
            place = self.places[name]
            target = buffer[place.start - first : place.end - first]
            target.view(place.dtype).view(place.shape).copy_(weights[name], non_blocking=True)
        return buffer[: self.size_of(bucket)]

    def views(self, flat: Tensor, bucket: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of a bucket in its bytes, uint8, without a copy."""
        first = self.places[bucket[0]].start
        for name in bucket:
            start, end, dtype, shape = self.places[name]
            yield name, flat[start - first : end - first].view(dtype).view(shape)


class _Place(NamedTuple):
    start: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]


# A process group beside the default one, between a trainer and the workers of an engine.

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

    Raises:
        RuntimeError: the others did not come in time.
        ValueError: the rank is not below ``world_size``.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"stateless_init_process_group: rank {rank} of {world_size} members.")
    device, timeout = torch.device(device), timedelta(seconds=timeout_s)
    store = dist.TCPStore(
        master_address,
        master_port,
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
    )
    prefix = dist.PrefixStore("torchrl-weights", store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = 2 * timeout  # after `broadcast` has given up
        with torch.cuda.device(device):
            backend: Any = dist.ProcessGroupNCCL(prefix, rank, world_size, options)
    else:
        gloo = dist.ProcessGroupGloo._Options()
        gloo._timeout = timeout
        # The interface that leads to the others: on one machine nothing listens to the outside.
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
        own = {"interface": interface} if interface else {"hostname": own_address(master_address)}
        gloo._devices = [dist.ProcessGroupGloo.create_device(**own)]
        backend = dist.ProcessGroupGloo(prefix, rank, world_size, gloo)
    return BroadcastGroup(backend, store, timeout_s)


def own_address(host: str) -> str:
    """The address of this machine on the way to another one, or to itself.

    Args:
        host: a name or an address.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # nothing is sent
        return probe.getsockname()[0]


# The trainer's end of a broadcast to the workers of an engine; see `vLLMWorker` for the other end.


class C10dWeightTransfer:
    """Sends weights to the workers of an engine: gloo between CPUs, NCCL between GPUs."""

    # `rpc` calls a method of the workers by its name, and gives their answer, as JSON carries it;
    # `VLLMServerEngine.join` says what the others are. A broadcast, and the memory that this
    # takes, have at most `bucket_bytes`. NCCL needs a device for each rank: a trainer that shares
    # its only GPU with the engine sends by file instead.

    def __init__(
        self,
        rpc: Callable[..., Any],
        *,
        master_address: str = "127.0.0.1",
        master_port: int | None = None,
        device: torch.device | str | None = None,
        bucket_bytes: int = 256 << 20,
        timeout_s: float = 120.0,
    ) -> None:
        self._rpc = rpc
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="weight-transfer")
        self._buffer: Tensor | None = None
        self._group: BroadcastGroup | None = None
        limits = rpc("torchrl_limits")
        self._dtype = getattr(torch, limits.get("dtype", ""), None)
        is_cuda = limits.get("device") == "cuda" and torch.cuda.is_available()
        self._device = torch.device(device or ("cuda" if is_cuda else "cpu"))
        if not master_port:
            with socket.socket() as probe:  # a free one
                probe.bind((master_address, 0))
                master_port = int(probe.getsockname()[1])
        size = 1 + limits["num_workers"]
        meeting = [master_address, master_port, size, self._device.type, timeout_s]
        joined = self._threads.submit(rpc, "torchrl_join", *meeting)
        try:
            self._group = stateless_init_process_group(
                master_address, master_port, 0, size, self._device, timeout_s=timeout_s
            )
            self.expected = ExpectedWeights.from_message(joined.result(timeout_s), self._dtype)
            """Checks an update as a whole, and gives what `send` takes."""
        except (RuntimeError, TimeoutError) as error:
            self.close()
            if joined.done() and not joined.cancelled():
                joined.result()  # says more
            raise RuntimeError(
                f"C10dWeightTransfer: the workers did not join within {timeout_s} s ({error})."
            ) from error
        except BaseException:
            self.close()
            raise

    def send(self, weights: Mapping[str, Tensor]) -> dict[str, str]:
        """Send checked weights, which the workers load as they come; gives their outcome."""
        group = self._group
        if group is None:
            raise RuntimeError("C10dWeightTransfer is closed. Make another one.")
        layout = WeightLayout.of(shells(weights, self._dtype), self._bucket_bytes)
        loaded = self._threads.submit(self._rpc, "torchrl_receive_weights", layout.message)
        try:
            for bucket in layout.buckets():
                room = max(layout.size_of(bucket), min(layout.num_bytes, self._bucket_bytes))
                if self._buffer is None or self._buffer.numel() < room:
                    self._buffer = torch.empty(room, dtype=torch.uint8, device=self._device)
                group.broadcast(layout.fill(self._buffer, bucket, weights))
            return loaded.result(self._timeout_s)
        except (RuntimeError, TimeoutError) as error:
            self.close()  # whoever still waits for a bucket gets an error
            if loaded.done() and (outcome := loaded.result()):
                return outcome  # says more
            return {"failed": f"the weights did not arrive within {self._timeout_s} s ({error})"}

    def close(self) -> None:
        """Leave the group; the engine goes on. May be called twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        group, self._group = self._group, None
        if group is not None:
            group.close()

    @property
    def is_closed(self) -> bool:
        """Whether another one has to be made for the next update."""
        return self._group is None


# Weights handed to another process of this machine in memory, of which no kill leaves a trace.

_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""As safetensors names them."""


@contextmanager
def weights_file(
    state_dict: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    directory: str | None,
    is_near: bool,
    who: str,
) -> Iterator[str]:
    """Gives the path of a safetensors file for another process of this user."""
    # The file has no name: it is a descriptor of this process, and gone with it, however it ends.
    refuse(value_faults(state_dict), who=who)
    sent = shells(state_dict, dtype)
    unknown = {name: value.dtype for name, value in sent.items() if value.dtype not in _DTYPES}
    refuse([f"{name} is {kind}, which can't be sent" for name, kind in unknown.items()], who=who)
    with ExitStack() as stack:
        if not is_near:
            named = tempfile.NamedTemporaryFile(prefix="weights-", dir=directory)  # noqa: SIM115
            file: Any = stack.enter_context(named)
        elif directory is None:
            file = stack.enter_context(os.fdopen(os.memfd_create("weights"), "wb"))
        else:
            descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
            file = stack.enter_context(os.fdopen(descriptor, "wb"))
        # The library's own writer needs a name, and leaves it behind when killed.
        header: dict[str, object] = {}
        end = 0
        for name, value in sent.items():
            begin, end = end, end + value.numel() * value.element_size()
            place = {"shape": list(value.shape), "data_offsets": [begin, end]}
            header[name] = {"dtype": _DTYPES[value.dtype], **place}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # so that the values are aligned
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shell in sent.items():
            value = state_dict[name].detach().to("cpu", shell.dtype).contiguous()
            file.write(value.view(-1).view(torch.uint8).numpy())
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}" if is_near else str(file.name)
