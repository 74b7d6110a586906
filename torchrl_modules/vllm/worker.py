"""What vLLM's workers are given so that they can be asked for their limits and sent new weights.

vLLM takes it with ``worker_extension_cls="torchrl_modules.vllm.worker.vLLMWorker"``, which
``VLLMEngine`` and ``python -m torchrl_modules.vllm.server`` add. Its import in a worker also
registers the weight transfer ``"c10d"``. Nobody else imports it: it imports vLLM.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file

from torchrl_modules.engines.supervision import this_process
from torchrl_modules.weight_transfer import (
    BroadcastGroup,
    WeightLayout,
    stateless_init_process_group,
)

from .requests import own_ends
from .runtime import register_weight_transfer, vllm_module
from .weights import load_all_or_none

register_weight_transfer("c10d", __name__, "C10dWeightTransferEngine")


class vLLMWorker:
    """Methods that vLLM mixes into its worker, so that a trainer can update its weights.

    TorchRL's class of this name was a worker itself; today's vLLM has its own for each device and
    takes extensions. Called over HTTP, so the methods take and give JSON.
    """

    model_config: Any
    model_runner: Any
    vllm_config: Any
    weight_transfer_engine: Any

    def torchrl_limits(self) -> dict[str, Any]:
        """What requests are checked against.

        Returns:
            ``vocab_size``, ``max_model_len``, the model's ``own_ends`` and ``dtype``, and how many
            workers there are, ``num_workers``.
        """
        return {
            "num_workers": self.vllm_config.parallel_config.world_size_across_dp,
            "vocab_size": self.model_config.get_vocab_size(),
            "max_model_len": self.model_config.max_model_len,
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "own_ends": own_ends(self.model_config),
        }

    def torchrl_process(self) -> dict[str, Any]:
        """Which process this is, see `this_process`; and the engine's, where it is another one."""
        return this_process() | {"parent": os.getppid()}

    def torchrl_load_weights(self, path: str) -> dict[str, str]:
        """Check the weights of a file as a whole, then load them, between two steps.

        Args:
            path: a safetensors file with every parameter, by Transformers' names.

        Returns:
            ``{}``; or what was wrong: ``refused``, and nothing was changed, or ``failed``, and the
            weights are a mixture.
        """
        return load_all_or_none(self, self.model_runner.get_model(), lambda: load_file(path))

    def torchrl_transfer_outcome(self) -> dict[str, str] | None:
        """How the last update by weight transfer went, as for `torchrl_load_weights`."""
        return self.weight_transfer_engine.outcome


# The worker's end of vLLM's weight transfer over a c10d broadcast: gloo on a CPU, NCCL on GPUs.
#
# A back-end of ``vllm.distributed.weight_transfer``; vLLM's own ones need an accelerator. Nothing
# of the model is touched before all weights have come and were checked as a whole.

_base = vllm_module("distributed.weight_transfer.base")


@dataclass
class C10dInitInfo(_base.WeightTransferInitInfo):
    """Where the trainer, rank 0, waits."""

    master_address: str
    master_port: int
    world_size: int
    timeout_s: float


@dataclass
class C10dUpdateInfo(_base.WeightTransferUpdateInfo):
    """What comes: see :class:`~torchrl_modules.weight_transfer.WeightLayout`."""

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
            update_info.names, update_info.dtype_names, update_info.shapes, update_info.bucket_bytes
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
