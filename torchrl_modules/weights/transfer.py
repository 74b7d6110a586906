"""The trainer's end of vLLM's weight transfer over a c10d broadcast; vLLM is not imported.

See `torchrl_modules.vllm.transfer` for the worker's end.
"""

import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .buckets import WeightLayout
from .lazy import shells
from .process_group import BroadcastGroup, stateless_init_process_group
from .state import refuse, value_faults


@dataclass(frozen=True)
class TransferControl:
    """vLLM's control of a transfer, wherever the engine runs."""

    call: Callable[..., Any]
    """One step of vLLM's protocol by its name, with what the step takes."""
    rpc: Callable[[str], Any]
    """A method of the workers by its name; gives the answer of the one with most trouble."""


class C10dWeightTransfer:
    """Sends weights to the workers of an engine: gloo between CPUs, NCCL between GPUs."""

    # `vLLMUpdater` says what the arguments are; a broadcast, and the memory that this takes, have
    # at most `bucket_bytes`. NCCL needs a device for each rank: a trainer that shares its only GPU
    # with the engine sends by file instead.

    def __init__(
        self,
        control: TransferControl,
        *,
        master_address: str = "127.0.0.1",
        master_port: int | None = None,
        device: torch.device | str = "cpu",
        bucket_bytes: int = 256 << 20,
        timeout_s: float = 120.0,
    ) -> None:
        self._control = control
        self._timeout_s = timeout_s
        self._device = torch.device(device)
        self._bucket_bytes = bucket_bytes
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="weight-transfer")
        self._buffer: Tensor | None = None
        meeting = {
            "master_address": master_address,
            "master_port": master_port or _free_port(master_address),
            "world_size": 1 + control.rpc("torchrl_limits")["num_workers"],
            "timeout_s": timeout_s,
        }
        self._group: BroadcastGroup | None = None
        joined = self._threads.submit(
            control.call, "init_weight_transfer_engine", init_info=meeting
        )
        try:
            self._group = stateless_init_process_group(
                master_address,
                meeting["master_port"],
                0,
                meeting["world_size"],
                self._device,
                timeout_s=timeout_s,
            )
            joined.result(timeout_s)
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
        """Send whole weights, and let the workers check and load them; gives their outcome."""
        refuse(value_faults(weights), who="C10dWeightTransfer")
        group, call = self._group, self._control.call
        if group is None:
            raise RuntimeError("C10dWeightTransfer is closed. Make another one.")
        layout = WeightLayout.of(shells(weights), self._bucket_bytes)
        call("start_weight_update")
        received = self._threads.submit(call, "update_weights", update_info=layout.message())
        try:
            for bucket in layout.buckets():
                group.broadcast(layout.fill(self._room(layout, bucket), bucket, weights))
        except RuntimeError:
            if received.done():
                received.result()  # says more
            raise
        try:
            received.result(self._timeout_s)
        except TimeoutError as error:
            raise RuntimeError(
                f"C10dWeightTransfer: no worker says within {self._timeout_s} s that it has all."
            ) from error
        call("finish_weight_update")
        outcome = self._control.rpc("torchrl_transfer_outcome")
        return {"failed": "a worker gave no outcome"} if outcome is None else outcome

    def _room(self, layout: WeightLayout, bucket: list[str]) -> Tensor:
        place = layout.slice_of(bucket)
        num_bytes = max(place.stop - place.start, min(layout.num_bytes, self._bucket_bytes))
        if self._buffer is None or self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._buffer

    def close(self) -> None:
        """Leave the group; the engine goes on. May be called twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        group, self._group = self._group, None
        if group is not None:
            group.close()


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
