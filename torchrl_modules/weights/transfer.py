"""The trainer's end of vLLM's weight transfer over a c10d broadcast; vLLM is not imported.

See `torchrl_modules.vllm.transfer` for the worker's end.
"""

import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from .buckets import WeightLayout
from .process_group import BroadcastGroup, stateless_init_process_group


class TransferClient(Protocol):
    """vLLM's control of a transfer, wherever the engine runs."""

    def num_workers(self) -> int:
        """How many workers receive the weights."""
        ...

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the workers join; returns when they have."""
        ...

    def start_weight_update(self) -> None:
        """Begin an update."""
        ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let the workers receive; returns when they have."""
        ...

    def finish_weight_update(self) -> None:
        """Let the workers load what they have received."""
        ...

    def transfer_outcome(self) -> dict[str, str] | None:
        """How it went, of the worker with the most trouble."""
        ...


class C10dWeightTransfer:
    """Sends weights to the workers of an engine: gloo between CPUs, NCCL between GPUs.

    Args:
        client: of the engine.
        master_address: of this process, as the workers reach it.
        master_port: where they meet; a free one when not given.
        device: what the workers compute on. NCCL needs a device for each rank: a trainer that
            shares its only GPU with the engine sends by file instead.
        bucket_bytes: most bytes of a broadcast, and of memory that this takes.
        timeout_s: for joining and for each broadcast.

    Raises:
        RuntimeError: the workers did not join in time, or could not; nothing is left behind.
    """

    def __init__(
        self,
        client: TransferClient,
        *,
        master_address: str = "127.0.0.1",
        master_port: int | None = None,
        device: torch.device | str = "cpu",
        bucket_bytes: int = 256 << 20,
        timeout_s: float = 120.0,
    ) -> None:
        self._client = client
        self._device = torch.device(device)
        self._bucket_bytes = bucket_bytes
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="weight-transfer")
        self._buffer: Tensor | None = None
        meeting = {
            "master_address": master_address,
            "master_port": master_port or _free_port(master_address),
            "world_size": 1 + client.num_workers(),
            "timeout_s": timeout_s,
        }
        self._group: BroadcastGroup | None = None
        joined = self._threads.submit(client.init_weight_transfer_engine, meeting)
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
        """Send whole weights, and let the workers check and load them.

        Args:
            weights: parameter name to value, on any device.

        Returns:
            ``{}``; or what was ``refused``, and nothing was changed; or what ``failed``, and the
            weights are a mixture.

        Raises:
            RuntimeError: a worker is gone or did not take part in time; nothing was changed.
            ValueError: a value is no tensor with data.
        """
        for name, value in weights.items():
            if not isinstance(value, Tensor) or value.is_meta or hasattr(value, "full_tensor"):
                raise ValueError(f"{name} is no whole torch.Tensor with data, but {type(value)}.")
        group = self._group
        if group is None:
            raise RuntimeError("C10dWeightTransfer is closed. Make another one.")
        layout = WeightLayout.of(weights, self._bucket_bytes)
        self._client.start_weight_update()
        received = self._threads.submit(self._client.update_weights, layout.message())
        try:
            for bucket in layout.buckets():
                group.broadcast(layout.fill(self._room(layout, bucket), bucket, weights))
        except RuntimeError:
            if received.done():
                received.result()  # says more
            raise
        received.result()
        self._client.finish_weight_update()
        outcome = self._client.transfer_outcome()
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
