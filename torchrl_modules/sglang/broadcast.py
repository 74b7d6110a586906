"""The trainer's end of a broadcast to the workers of a server of SGLang."""

import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from torchrl_modules.weight_transfer.broadcast_group import (
    BroadcastGroup,
    free_port,
    own_address,
    stateless_init_process_group,
)
from torchrl_modules.weight_transfer.layout import WeightLayout
from torchrl_modules.weights.lazy_weights import shells


class WeightBroadcast:
    """Sends weights to the workers of a server: gloo between CPUs, NCCL between GPUs.

    Args:
        post: asks the server; raises `RuntimeError` where it does not answer with 200.
        url: of the server.
        num_workers: processes that hold parts of the weights.
        is_cuda: they compute on GPUs.
        dtype: in which they compute.
        master_address: see `SGLangServerEngine.join`.
        master_port: the same.
        device: the same.
        bucket_bytes: tensors of one request have at most so many, or one does.
        timeout_s: for meeting, and for each request.

    Raises:
        RuntimeError: the workers did not come.
    """

    def __init__(
        self,
        post: Callable[[str, Mapping[str, Any]], Any],
        *,
        url: str,
        num_workers: int,
        is_cuda: bool,
        dtype: torch.dtype | None,
        master_address: str | None = None,
        master_port: int | None = None,
        device: torch.device | str | None = None,
        bucket_bytes: int = 256 << 20,
        timeout_s: float = 120.0,
    ) -> None:
        self._post = post
        self._name = f"weights-{uuid.uuid4().hex}"  # SGLang takes no name twice
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._group: BroadcastGroup | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="weight-broadcast")
        self._device = torch.device(
            device or ("cuda" if is_cuda and torch.cuda.is_available() else "cpu")
        )
        address = master_address or own_address(urlsplit(url).hostname or "127.0.0.1")
        master_port = master_port or free_port(address)
        body = {
            "master_address": address,
            "master_port": master_port,
            "rank_offset": 1,
            "world_size": 1 + num_workers,
            "group_name": self._name,
            "backend": "nccl" if self._device.type == "cuda" else "gloo",
        }
        joined = self._threads.submit(post, "/init_weights_update_group", body)
        try:
            self._group = stateless_init_process_group(
                address,
                master_port,
                0,
                1 + num_workers,
                self._device,
                timeout_s=timeout_s,
                # As `torch.distributed` nests them for a group of this name.
                prefixes=(self._name, f"{self._name}/", f"{self._device.type}/"),
            )
            joined.result(timeout_s)
        except (RuntimeError, TimeoutError) as error:
            self.close()
            if joined.done() and not joined.cancelled():
                joined.result()  # says more
            raise RuntimeError(
                f"SGLangServerEngine: the server's workers did not join within {timeout_s} s "
                f"({error})."
            ) from error
        except BaseException:
            self.close()
            raise

    @property
    def is_closed(self) -> bool:
        """True once another one has to be made for the next update."""
        return self._group is None

    def send(self, weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> None:
        """Send checked weights, which the workers load as they come.

        Args:
            weights: name to value.
            options: of the last request: the label of the weights, and whether caches are flushed.

        Raises:
            RuntimeError: they did not arrive, or were not loaded; this is closed then.
        """
        assert self._group is not None
        layout = WeightLayout.of(shells(weights, self._dtype), self._bucket_bytes)
        buckets = list(layout.buckets())
        try:
            self._post("/begin_weight_update", {})
            for number, bucket in enumerate(buckets, 1):
                last = number == len(buckets)
                further = options if last else {"flush_cache": False}
                self._send_bucket(weights, layout, bucket, further)
            self._post("/end_weight_update", {})
        except BaseException:
            self.close()
            raise

    def _send_bucket(
        self,
        weights: Mapping[str, Tensor],
        layout: WeightLayout,
        bucket: list[str],
        options: Mapping[str, Any],
    ) -> None:
        places = [layout.places[name] for name in bucket]
        body = {
            "names": bucket,
            "dtypes": [str(place.dtype).removeprefix("torch.") for place in places],
            "shapes": [list(place.shape) for place in places],
            "group_name": self._name,
            **options,
        }
        loaded = self._threads.submit(self._post, "/update_weights_from_distributed", body)
        assert self._group is not None
        for name, place in zip(bucket, places, strict=True):
            value = weights[name].detach().to(self._device, place.dtype).contiguous()
            self._group.broadcast(value)
        loaded.result(self._timeout_s)

    def close(self) -> None:
        """Leave the group; the server goes on. May be called twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        group, self._group = self._group, None
        if group is not None:
            group.close()
            with suppress(RuntimeError, ConnectionError):  # it is gone, or has left by itself
                self._post("/destroy_weights_update_group", {"group_name": self._name})
