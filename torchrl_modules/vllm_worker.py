"""What a vLLM server is given so that it can be asked for its limits and sent new weights.

A server takes it with ``--worker-extension-cls torchrl_modules.vllm_worker.WeightLoading``, which
``python -m torchrl_modules.vllm_serve`` adds.
"""

from typing import Any

from .vllm_runtime import import_vllm
from .vllm_weights import ExpectedWeights, load_weights


class WeightLoading:
    """Methods that vLLM mixes into its worker; called over HTTP, so they take and give JSON."""

    model_config: Any

    def torchrl_limits(self) -> dict[str, int]:
        """What requests are checked against.

        Returns:
            ``vocab_size`` and ``max_model_len``.
        """
        return {
            "vocab_size": self.model_config.get_vocab_size(),
            "max_model_len": self.model_config.max_model_len,
        }

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
