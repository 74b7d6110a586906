"""The worker's end of vLLM's weight transfer over a c10d broadcast: gloo on a CPU, NCCL on GPUs.

A back-end of ``vllm.distributed.weight_transfer``, registered as ``"c10d"`` by
`torchrl_modules.vllm.worker`; vLLM's own back-ends need an accelerator. Imported by vLLM's workers
only. Nothing of the model is touched before all weights have come and were checked as a whole.
"""

from dataclasses import dataclass

import torch

from torchrl_modules.weights.buckets import WeightLayout
from torchrl_modules.weights.process_group import BroadcastGroup, stateless_init_process_group

from .runtime import weight_transfer_base
from .weights import load_all_or_none

_base = weight_transfer_base()


@dataclass
class C10dInitInfo(_base.WeightTransferInitInfo):
    """Where the trainer, rank 0, waits."""

    master_address: str
    master_port: int
    world_size: int
    timeout_s: float


@dataclass
class C10dUpdateInfo(_base.WeightTransferUpdateInfo):
    """What comes: see :class:`~torchrl_modules.weights.buckets.WeightLayout`."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    bucket_bytes: int


class C10dWeightTransferEngine(_base.WeightTransferEngine):
    """Receives weights in buckets, keeps them until all are there, then loads them in one go."""

    init_info_cls = C10dInitInfo
    update_info_cls = C10dUpdateInfo
    supports_draft_weight_update = False

    _group: BroadcastGroup | None = None
    _received: dict[str, torch.Tensor] | None = None
    outcome: dict[str, str] | None = None
    """Of the last update: see `load_all_or_none`; ``None`` until its end."""

    def init_transfer_engine(self, init_info: C10dInitInfo) -> None:
        """Join the trainer's group; of an earlier trainer, leave it."""
        self.shutdown()
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = stateless_init_process_group(
            init_info.master_address,
            init_info.master_port,
            rank,
            init_info.world_size,
            self.device,
            timeout_s=init_info.timeout_s,
        )

    def start_weight_update(self) -> None:
        """Forget what an update that was broken off has left."""
        self._received, self.outcome = None, None

    def receive_weights(self, update_info: C10dUpdateInfo) -> None:
        """Receive all weights; the model stays as it is."""
        if self._group is None:
            raise RuntimeError("C10dWeightTransferEngine: no trainer has been named yet.")
        layout = WeightLayout(
            update_info.names,
            update_info.dtype_names,
            update_info.shapes,
            update_info.bucket_bytes,
        )
        flat = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self.device)
        for bucket in layout.buckets():
            self._group.broadcast(flat[layout.slice_of(bucket)])
        self._received = layout.views(flat)

    def finish_weight_update(self) -> None:
        """Check what has come as a whole, and load it; `outcome` says how it went."""
        weights, self._received = self._received, None
        self.outcome = load_all_or_none(self, self.model, lambda: weights or {})

    def shutdown(self) -> None:
        """Leave the trainer's group."""
        if self._group is not None:
            self._group.close()
            self._group = None
