"""The trainer's end of a broadcast to the workers of an engine, whose end is `vLLMWorker`."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from torchrl_modules.weights.expected_weights import ExpectedWeights
from torchrl_modules.weights.lazy_weights import shells

from .broadcast_group import BroadcastGroup, free_port, stateless_init_process_group
from .layout import WeightLayout


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
        master_port = master_port or free_port(master_address)
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
