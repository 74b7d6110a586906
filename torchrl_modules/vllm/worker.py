"""What vLLM's workers are given so that they can be asked for their limits and sent new weights.

vLLM takes it with ``worker_extension_cls="torchrl_modules.vllm.worker.vLLMWorker"``, which
``VLLMEngine`` and ``python -m torchrl_modules.vllm.launch`` add. Its import in a worker also
registers the weight transfer ``"c10d"``.
"""

import ctypes
import os
import signal
import sys
from typing import Any

from torchrl_modules.engines.process_state import this_process

from .runtime import PARENT_VARIABLE, import_vllm, register_weight_transfer
from .weights import ExpectedWeights, load_weights

_PR_SET_PDEATHSIG = 1

if PARENT_VARIABLE in os.environ and sys.platform == "linux":
    # This process is the engine of a server that ends with its parent. If the server is killed, the
    # kernel ends this one too, even while it is stopped.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
register_weight_transfer("c10d", "torchrl_modules.vllm.transfer", "C10dWeightTransferEngine")


class vLLMWorker:
    """Methods that vLLM mixes into its worker, so that a trainer can update its weights.

    TorchRL's class of this name was a worker itself; today's vLLM has its own for each device and
    takes extensions. Called over HTTP, so the methods take and give JSON.
    """

    model_config: Any
    vllm_config: Any
    weight_transfer_engine: Any

    def torchrl_limits(self) -> dict[str, int]:
        """What requests are checked against.

        Returns:
            ``vocab_size``, ``max_model_len``, and how many workers there are, ``num_workers``.
        """
        return {
            "num_workers": self.vllm_config.parallel_config.world_size_across_dp,
            "vocab_size": self.model_config.get_vocab_size(),
            "max_model_len": self.model_config.max_model_len,
        }

    def torchrl_process(self) -> dict[str, Any]:
        """Which process this is, see `this_process`."""
        return this_process()

    def torchrl_load_weights(self, path: str) -> dict[str, str]:
        """Check the weights of a file as a whole, then load them, between two steps.

        Args:
            path: a safetensors file with every parameter, by Transformers' names.

        Returns:
            ``{}``; or what was wrong: ``refused``, and nothing was changed, or ``failed``, and the
            weights are a mixture.
        """
        from safetensors.torch import load_file

        config = self.model_config
        try:
            if config.quantization is not None:
                raise ValueError("the model is quantised, which cannot be updated.")
            expected = ExpectedWeights.from_config(
                config.hf_config, config.dtype, trust_remote_code=config.trust_remote_code
            )
            weights = expected.check(load_file(path))
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {error}"}
        try:
            load_weights(self, import_vllm(in_process=False), weights)
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}"}
        return {}

    def torchrl_transfer_outcome(self) -> dict[str, str] | None:
        """How the last update by weight transfer went, as for `torchrl_load_weights`."""
        return self.weight_transfer_engine.outcome
