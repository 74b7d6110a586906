"""Sampling from a Transformers model in this process."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_modules.adapters import model_inside
from torchrl_modules.sampling.params import SamplingParameters
from torchrl_modules.weights.state import ExpectedWeights, next_version

from .decode_loop import DecodeLoop
from .protocol import Generation


class TransformersEngine:
    """An :class:`~torchrl_modules.engines.protocol.Engine` over a Transformers model.

    Args:
        model: a causal language model with a key-value cache, with or without adapters of PEFT.
        max_model_len: most tokens of a row, prompt and response; the model's own limit when not
            given.

    Raises:
        TypeError: the model has adapters that are not layers of it, such as prompts.
        ValueError: the model has a recurrent state, which can't be kept row by row here, or
            ``max_model_len`` is not positive.
    """

    def __init__(self, model: PreTrainedModel, *, max_model_len: int | None = None) -> None:
        self._inside = model_inside(model)
        if getattr(self._inside, "_is_stateful", False):
            raise ValueError(
                f"TransformersEngine: {type(model).__name__} has a recurrent state instead of a "
                "key-value cache. Sample with vLLM."
            )
        if max_model_len is not None and max_model_len < 1:
            raise ValueError(
                f"TransformersEngine: max_model_len must be at least 1, got {max_model_len}."
            )
        self.model = model
        own = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.max_model_len = max_model_len or own or 1 << 62
        """Most tokens of a prompt and its response together."""
        self._version = 0

    @property
    def version(self) -> int:
        """How many updates the weights have seen, or the number that the last one was given."""
        return self._version

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.model.config.get_text_config().vocab_size

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParameters,
        *,
        max_new_tokens: Sequence[int] | None = None,
    ) -> list[Generation]:
        """See :meth:`torchrl_modules.Engine.generate`.

        At temperature 0 the log-probs are those at temperature 1.
        """
        params.check_stops_are_found()
        budgets = list(max_new_tokens or [params.max_new_tokens] * len(prompts))
        errors = [self._refusal(p, b) for p, b in zip(prompts, budgets, strict=True)]
        good = [i for i, error in enumerate(errors) if error is None]
        results = [Generation([], [], "error", error) for error in errors]
        if not good:
            return results
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            loop = DecodeLoop(
                self._inside, [prompts[i] for i in good], params, [budgets[i] for i in good]
            )
            generated = loop.run()
        finally:
            for module, mode in modes:  # one by one: some may be kept in evaluation mode
                module.training = mode
        for i, generation in zip(good, generated, strict=True):
            results[i] = generation
        return results

    def _refusal(self, prompt: Sequence[int], budget: int) -> str | None:
        """Why a row can't be served, or ``None``."""
        if not len(prompt):
            return "the prompt is empty"
        if budget < 1:
            return f"no token may be generated (the budget is {budget})"
        if len(prompt) + budget > self.max_model_len:
            return (
                f"the prompt has {len(prompt)} tokens and may grow by {budget}, but the model "
                f"takes {self.max_model_len}"
            )
        if not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
            return f"the prompt holds a token outside the vocabulary of {self.vocab_size}"
        return None

    def update_weights(
        self, state_dict: Mapping[str, Tensor], *, version: int | None = None
    ) -> None:
        """See :meth:`torchrl_modules.engines.protocol.Engine.update_weights`."""
        version = next_version(version, self._version, who=f"{type(self).__name__}.update_weights")
        expected = ExpectedWeights.of(self.model.state_dict())
        weights = expected.check(state_dict, who=type(self).__name__)
        with torch.no_grad():
            for name in reversed(weights):  # What was checked last may be in the cache.
                expected.own[name].copy_(weights[name])
        self._version = version
