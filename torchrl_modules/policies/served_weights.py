"""Tells by the log-probs of what an engine draws which weights it has."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from torchrl_modules.engines.engine import Generation
from torchrl_modules.sampling.parameters import SamplingParameters

_TEXT: Final = "The weather today is"
NUM_TOKENS: Final = 16
"""That an engine draws to show which weights it has."""
MOST_GAP: Final = 0.1
"""Mean distance of log-probs, in nats: 16 bits make less, other weights more."""
MOST_QUANTIZED_GAP: Final = 0.5
"""The same where the engine multiplies in 8 bits, which alone makes 0.2."""


def check_same_weights(
    tokenizer: Any,
    draw: Callable[[list[int], SamplingParameters], Generation],
    score: Callable[[Tensor, int], Tensor],
    *,
    quantized: bool = False,
    engine: str,
    model: str,
) -> float:
    """Let an engine draw a few tokens, and compare their log-probs with a model's.

    Args:
        tokenizer: of the model.
        draw: gives what the engine draws after a prompt.
        score: the log-probs of a row's tokens from one on, under the model's own softmax.
        quantized: the engine computes in 8 bits what the model does not.
        engine: its name in errors.
        model: its name in errors.

    Returns:
        The mean distance, in nats.

    Raises:
        ValueError: the engine has other weights, or can't draw.

    Example:
        >>> drawn = Generation([7, 8], [-1.0, -2.0], "length")
        >>> draw, score = (lambda *_: drawn), (lambda *_: torch.tensor([-1.0, -2.5]))
        >>> check_same_weights(tokenizer, draw, score, engine="vLLM", model="mine")
        Traceback (most recent call last):
            ...
        ValueError: vLLM has other weights than mine: its log-probs are 0.25 nats ...
    """
    prompt: list[int] = tokenizer(_TEXT, add_special_tokens=False)["input_ids"]
    drawn = draw(prompt, SamplingParameters(max_new_tokens=NUM_TOKENS, stop_token_ids=()))
    if drawn.error is not None:
        raise ValueError(f"{engine} can't draw: {drawn.error}.")
    scored = score(torch.tensor([*prompt, *drawn.ids]), len(prompt))
    gap = float((scored.float().cpu() - torch.tensor(drawn.log_probs)).abs().mean())
    if not gap <= (MOST_QUANTIZED_GAP if quantized else MOST_GAP):
        raise ValueError(
            f"{engine} has other weights than {model}: its log-probs are {gap:.2g} nats from the "
            "model's in the mean. Give one of the same model."
        )
    return gap


def check_engine_of(
    trainer: Any, sampler: Any, *, count: int = 1, engine: str, model: str
) -> float:
    """Check that a policy's engine draws with the weights of a policy over Transformers.

    Args:
        trainer: over the model.
        sampler: over the engine.
        count: of rows that are drawn at once: of a fleet, which shares them out, one for each.
        engine: its name in errors.
        model: its name in errors.

    Returns:
        As :func:`check_same_weights`.

    Raises:
        ValueError: the engine has other weights, or can't draw.
    """
    rows: list[Generation] = []

    def draw(prompt: list[int], params: SamplingParameters) -> Generation:
        if not rows:
            rows.extend(sampler.engine.generate([prompt] * count, params))
        return rows.pop()

    @torch.no_grad()
    def score(row: Tensor, first: int) -> Tensor:
        mask = torch.arange(len(row)) >= first
        return trainer.scorer.score_packed(row, torch.tensor([len(row)]), mask).log_prob

    quantized = getattr(sampler.engine, "quantization", None) is not None
    names = {"engine": engine, "model": model}
    return max(
        check_same_weights(trainer.tokenizer, draw, score, quantized=quantized, **names)
        for _ in range(count)
    )
