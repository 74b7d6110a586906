"""Sampling from a Transformers model in this process."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_modules.sampling.params import SamplingParameters
from torchrl_modules.scoring.evaluation_mode import evaluation_mode
from torchrl_modules.scoring.rope_factors import settle_rope_factors
from torchrl_modules.scoring.wrapped_models import is_sharded, unwrapped, without_ddp
from torchrl_modules.weights.state import ExpectedWeights, next_version

from .decode_loop import DecodeLoop
from .prompt_readers import PromptReader
from .protocol import Generation
from .reader_choice import find_prompt_reader, group_rows, num_positions


class TransformersEngine:
    """An :class:`~torchrl_modules.engines.protocol.Engine` over a Transformers model.

    Args:
        model: a causal language model, with or without adapters of PEFT. It continues rows with a
            cache of keys and values where that gives its own log-probs, which is tried on a few
            short rows; otherwise with whatever it keeps itself, rows of one length together;
            otherwise it reads whole rows again for every token, with a warning.
        max_model_len: most tokens of a row, prompt and response; the model's own limit when not
            given.
        autocast_dtype: compute in this type, with the parameters as they are.
        check: try the model now; ``False`` tries it before the first token is drawn, for an engine
            that may draw none.

    Raises:
        TypeError: the model has adapters that are not layers of it, such as prompts.
        ValueError: ``max_model_len`` is not positive, or above the positions that the model has; or
            the model can't be sampled from.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_model_len: int | None = None,
        autocast_dtype: torch.dtype | None = None,
        check: bool = True,
    ) -> None:
        who = "TransformersEngine"
        self._inside = unwrapped(model, who=who)
        own = num_positions(self._inside)
        if max_model_len is not None and max_model_len < 1:
            raise ValueError(f"{who}: max_model_len must be at least 1, got {max_model_len}.")
        if max_model_len is not None and own is not None and max_model_len > own:
            raise ValueError(
                f"{who}: max_model_len={max_model_len}, but {type(self._inside).__name__} has "
                f"positions for {own} tokens."
            )
        settle_rope_factors(self._inside, max_model_len, who=who)
        self.model = model
        self.max_model_len = max_model_len or own or 1 << 62
        """Most tokens of a prompt and its response together."""
        self._autocast_dtype = autocast_dtype
        self._version = 0
        if check and not is_sharded(model):
            self._reader  # noqa: B018

    @cached_property
    def _reader(self) -> type[PromptReader]:
        """How the model continues rows."""
        if is_sharded(self.model):
            raise ValueError(
                f"TransformersEngine: {type(self._inside).__name__} is sharded by fully_shard, and "
                "drawing tokens would gather every layer for every token, on all ranks in step. "
                "Sample with vLLM or from a copy that is whole, and push the weights to it."
            )
        return find_prompt_reader(self._inside)

    @property
    def version(self) -> int:
        """How many updates the weights have seen, or the number that the last one was given."""
        return self._version

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._inside.config.get_text_config().vocab_size

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
        reader = self._reader
        with evaluation_mode(self._inside), self._precision():
            generated = {
                i: generation
                for group in group_rows(prompts, good, by_length=reader.needs_one_length)
                for i, generation in zip(
                    group,
                    DecodeLoop(
                        reader(self._inside),
                        [prompts[i] for i in group],
                        params,
                        [budgets[i] for i in group],
                    ).run(),
                    strict=True,
                )
            }
        for i, generation in generated.items():
            results[i] = generation
        return results

    def _precision(self) -> Any:
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self._inside.device.type, dtype=self._autocast_dtype)

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
        expected = ExpectedWeights.of(without_ddp(self.model).state_dict())
        weights = expected.check(state_dict, who=type(self).__name__)
        with torch.no_grad():
            for name in reversed(weights):  # What was checked last may be in the cache.
                expected.own[name].copy_(weights[name])
        self._version = version
