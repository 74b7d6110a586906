"""Sampling with ``generate`` of Transformers, with the log-probability of every sampled token.

Shape legend: B rows, V vocabulary.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from torchrl_data.packed import pad

from .engine import Generation
from .sampling import SamplingParameters
from .weights import check_state_dict


class TransformersEngine:
    """An :class:`~torchrl_modules.engine.Engine` over a Transformers model.

    Args:
        model: a causal language model.
        max_model_len: most tokens of a row, prompt and response; the model's own limit when not
            given.
    """

    def __init__(self, model: PreTrainedModel, *, max_model_len: int | None = None) -> None:
        self.model = model
        own = getattr(model.config, "max_position_embeddings", None)
        self.max_model_len = max_model_len or own or 1 << 62

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParameters,
        *,
        max_new_tokens: Sequence[int] | None = None,
    ) -> list[Generation]:
        """See :meth:`torchrl_modules.engine.Engine.generate`."""
        budgets = list(max_new_tokens or [params.max_new_tokens] * len(prompts))
        errors = [self._refusal(p, b) for p, b in zip(prompts, budgets, strict=True)]
        good = [i for i, error in enumerate(errors) if error is None]
        results = [Generation([], [], "error", error) for error in errors]
        if good:
            generated = self._generate(
                [prompts[i] for i in good], params, [budgets[i] for i in good]
            )
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
        vocabulary = self.model.config.get_text_config().vocab_size
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            return f"the prompt holds a token outside the vocabulary of {vocabulary}"
        return None

    def _generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParameters, budgets: Sequence[int]
    ) -> list[Generation]:
        rows = [torch.tensor(prompt, device=self.model.device) for prompt in prompts]
        input_ids = pad(rows, value=0, side="left")
        attention_mask = pad([torch.ones_like(row) for row in rows], value=0, side="left")
        recorder = _SampledLogProbs()
        stops = params.stop_token_ids or ()
        limits = _RowBudgets(input_ids.shape[1], torch.tensor(budgets, device=input_ids.device))
        was_training = self.model.training
        self.model.eval()
        try:
            output = self.model.generate(  # type: ignore[operator]
                input_ids=input_ids,
                attention_mask=attention_mask,
                generation_config=_generation_config(params, max(budgets), stops),
                logits_processor=LogitsProcessorList([*_warpers(params), recorder]),
                stopping_criteria=StoppingCriteriaList([limits]),
            )
        finally:
            self.model.train(was_training)
        sampled = output[:, input_ids.shape[1] :]
        log_probs = recorder.finish(sampled)
        return [
            _cut(ids, values, budget, stops)
            for ids, values, budget in zip(
                sampled.tolist(), log_probs.tolist(), budgets, strict=True
            )
        ]

    def update_weights(self, state_dict: Mapping[str, Tensor]) -> None:
        """See :meth:`torchrl_modules.engine.Engine.update_weights`."""
        own = self.model.state_dict()
        check_state_dict(state_dict, own, who=type(self).__name__)
        with torch.no_grad():
            for name, value in state_dict.items():
                own[name].copy_(value)


def _generation_config(
    params: SamplingParameters, max_new_tokens: int, stops: Sequence[int]
) -> GenerationConfig:
    """Neutral settings: the model's own defaults must not change the distribution."""
    return GenerationConfig(
        do_sample=params.temperature > 0,
        max_new_tokens=max_new_tokens,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=list(stops) or None,
        pad_token_id=0,
        use_cache=True,
    )


def _warpers(params: SamplingParameters) -> list[LogitsProcessor]:
    warpers: list[LogitsProcessor] = []
    if params.temperature not in (0.0, 1.0):
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers


class _SampledLogProbs(LogitsProcessor):
    """Keeps the log-prob of each sampled token; it must come last.

    It sees a step's scores before the token is drawn, so it reads the token one step later; only
    one step's ``[B, V]`` is ever held.
    """

    def __init__(self) -> None:
        self._pending: Tensor | None = None
        self._columns: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._collect(input_ids[:, -1])
        self._pending = torch.log_softmax(scores.float(), -1)
        return scores

    def _collect(self, tokens: Tensor) -> None:
        if self._pending is not None:
            self._columns.append(self._pending.gather(1, tokens[:, None]))

    def finish(self, sampled: Tensor) -> Tensor:
        """Log-probs of all sampled tokens, float32, same shape as ``sampled``."""
        self._collect(sampled[:, -1])
        return torch.cat(self._columns, 1)


class _RowBudgets(StoppingCriteria):
    """Stops each row at its own number of new tokens."""

    def __init__(self, prompt_width: int, budgets: Tensor) -> None:
        self._prompt_width = prompt_width
        self._budgets = budgets

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        del scores, kwargs
        return input_ids.shape[1] - self._prompt_width >= self._budgets


def _cut(ids: list[int], log_probs: list[float], budget: int, stops: Sequence[int]) -> Generation:
    """A row up to its first stop token, that token included, or to its budget."""
    for i, token in enumerate(ids[:budget]):
        if token in stops:
            return Generation(ids[: i + 1], log_probs[: i + 1], "stop")
    return Generation(ids[:budget], log_probs[:budget], "length")
