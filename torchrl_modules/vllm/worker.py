"""What vLLM's workers are given so that they can be asked for their limits and sent new weights.

vLLM takes it with ``worker_extension_cls="torchrl_modules.vllm.worker.vLLMWorker"``, which
``VLLMEngine`` and ``python -m torchrl_modules.vllm.server`` add. Its import in a worker also
registers the weight transfer ``"c10d"``.
"""

import os
from typing import Any

from safetensors.torch import load_file

from torchrl_modules.engines.supervision import end_with_parent, this_process

from .requests import own_ends
from .runtime import PARENT_VARIABLE, register_weight_transfer
from .weights import load_all_or_none

if PARENT_VARIABLE in os.environ:
    end_with_parent()  # the engine of a server that ends with its own parent
register_weight_transfer("c10d", "torchrl_modules.vllm.weights", "C10dWeightTransferEngine")


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
            ``vocab_size``, ``max_model_len``, the model's ``own_ends``, and how many workers there
            are, ``num_workers``.
        """
        return {
            "num_workers": self.vllm_config.parallel_config.world_size_across_dp,
            "vocab_size": self.model_config.get_vocab_size(),
            "max_model_len": self.model_config.max_model_len,
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
