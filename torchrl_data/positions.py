"""Positions of a model: how many tokens it can read."""

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def num_positions(model: "PreTrainedModel") -> int | None:
    """Most tokens that a model has positions for; ``None`` where it names no limit.

    Args:
        model: of Transformers.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, module in model.named_modules():
        # Learnt positions that begin behind the padding index have that many fewer.
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            behind = 0 if module.padding_idx is None else module.padding_idx + 1
            limit = module.num_embeddings - behind
    return limit
