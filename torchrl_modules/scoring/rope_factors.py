"""Rotary embeddings whose factors change with the length of a row (LongRoPE).

Transformers picks the factors of a whole batch by its longest row, so a row would depend on its
neighbours, and a token on what comes after it: nothing that can be trained. The factors are fixed
once instead, by the longest row there may be, as vLLM does.
"""

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

_BY_LENGTH: Final = "longrope"
_LONG: Final = "longrope with its long factors"


def settle_rope_factors(
    model: PreTrainedModel, max_model_len: int | None, *, who: str
) -> int | None:
    """Fix the factors of a model."""
    # model: changed in place where rows may be longer than it was pretrained on: it computes with
    # its long factors from now on, short rows too.
    # Gives the longest row that the factors are for; `None` where it makes no difference.
    changing = list(_changing(model))
    if not changing:
        return None
    limit = min(original for _, _, original in changing)
    name = type(model).__name__
    if max_model_len is None:
        raise ValueError(
            f"{who}: {name} computes rows of more than {limit} tokens with other rotary factors "
            "(longrope), so a token's log-prob would depend on how its row goes on. Give "
            f"max_model_len: up to {limit} the short factors are used, above it the long ones for "
            "every row. vLLM does the same with its max_model_len; give both the same side."
        )
    is_long = [rope_type == _LONG for _, rope_type, _ in changing]
    if max_model_len <= limit:
        if any(is_long):
            raise ValueError(
                f"{who}: max_model_len={max_model_len} is for the short rotary factors of {name}, "
                "but another policy has set this model to its long ones."
            )
        return limit
    for module, rope_type, original in changing:
        if rope_type == _BY_LENGTH:
            _take_long_factors(module, original)
    return None


def _changing(model: PreTrainedModel) -> Iterator[tuple[Any, str, int]]:
    """Rotary embeddings of this kind, their type, and where their factors change."""
    for module in model.modules():
        rope_type: Any = getattr(module, "rope_type", None)
        if rope_type in (_BY_LENGTH, _LONG):
            config: Any = module.config
            yield module, rope_type, config.rope_parameters["original_max_position_embeddings"]


def _take_long_factors(module: nn.Module, original: int) -> None:
    # Its own code sets the factors for this length; under another name it leaves them there.
    parameter = torch.zeros(1, 1, 1, device=module.inv_freq.device)  # type: ignore[arg-type]
    module(parameter, torch.tensor([[original]], device=parameter.device))
    module.rope_type = _LONG  # type: ignore[assignment]
