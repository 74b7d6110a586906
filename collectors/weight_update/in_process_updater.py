"""Weight updates of a policy that lives in the trainer's process."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from .plain_weights import unwrapped_module
from .weight_updater import WeightUpdater


class InProcessUpdater(WeightUpdater):
    """Hands weights to the policy's engine, whatever it is, by reference.

    An engine of this process copies them; a vLLM server of this machine gets them in a file. Of a
    model that the policy itself samples from, the weights are there: a push checks that they are
    finite and counts the version, and adapters (PEFT) stay as they are.

    Example:
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> policy = TransformersWrapper(tiny_qwen3(len(tokenizer)), tokenizer=tokenizer)
        >>> updater = InProcessUpdater(policy)  # what LLMCollector(env, policy) makes
        >>> updater.push(policy.model), policy.policy_version
        (1, 1)
    """

    def _gathered(self, source: Any, engine: Any) -> Mapping[str, Any]:
        model = getattr(engine, "model", None)
        has_shared = getattr(engine, "shared_names", None)
        if isinstance(source, nn.Module) and isinstance(model, nn.Module) and not has_shared:
            inside = unwrapped_module(source)
            if inside is unwrapped_module(model):
                return inside.state_dict()
        return super()._gathered(source, engine)
