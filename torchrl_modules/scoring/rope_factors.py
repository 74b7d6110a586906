"""Rotary embeddings whose factors change with the length of a row (LongRoPE).

Transformers picks the factors of a whole batch by its longest row, so a row would depend on its
neighbours, and a token on what comes after it: nothing that can be trained. The factors are settled
once instead, by the longest row there may be, as vLLM does.
"""

from typing import Any, Final

import torch.distributed
from torch import Tensor
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
    modules: list[Any] = list(model.modules())
    changing = [m for m in modules if getattr(m, "rope_type", None) in (_BY_LENGTH, _LONG)]
    if not changing:
        return None
    limits = [m.config.rope_parameters["original_max_position_embeddings"] for m in changing]
    limit, name = min(limits), type(model).__name__
    if max_model_len is None:
        raise ValueError(
            f"{who}: {name} computes rows of more than {limit} tokens with other rotary factors "
            "(longrope), so a token's log-prob would depend on how its row goes on. Give "
            f"max_model_len: up to {limit} the short factors are used, above it the long ones for "
            "every row. vLLM does the same with its max_model_len; give both the same side."
        )
    if max_model_len <= limit:
        if any(module.rope_type == _LONG for module in changing):
            raise ValueError(
                f"{who}: max_model_len={max_model_len} is for the short rotary factors of {name}, "
                "but another policy has set this model to its long ones."
            )
        return limit
    for module, original in zip(changing, limits, strict=True):
        if module.rope_type == _BY_LENGTH:
            # Its own code sets the factors for this length; under another name it leaves them.
            device = module.inv_freq.device
            module(torch.zeros(1, 1, 1, device=device), torch.tensor([[original]], device=device))
            module.rope_type = _LONG
    return None


def check_longest(
    model: PreTrainedModel, lengths: Tensor, most: int | None, *, what: str, who: str
) -> None:
    """Check that rows are no longer than :func:`settle_rope_factors` has settled for a model.

    Args:
        model: without wrappers.
        lengths: int64 ``[B]``, of the rows.
        most: what was settled.
        what: the method that got the rows.
        who: has to be given a larger ``max_model_len``.

    Raises:
        ValueError: one is longer.
    """
    longest = int(lengths.max()) if len(lengths) else 0
    if most is not None and longest > most:
        raise ValueError(
            f"{what}: a row has {longest} tokens, but {type(model).__name__} computes with the "
            f"rotary factors of rows of at most {most}. Give {who} a larger max_model_len."
        )
