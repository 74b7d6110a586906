"""The model from before training, which a KL term compares with."""

from copy import deepcopy
from typing import Any

from torch import nn

from objectives import Ranks
from torchrl_agents.recipe.adapters import WithoutAdapters, is_adapted
from torchrl_agents.settings.schema import TrainingConfig
from torchrl_data.protocols import TokenScorer
from torchrl_modules import TransformersWrapper

from .parallel import parallel_kind


def freeze_reference(
    cfg: TrainingConfig, ranks: Ranks, actor: TransformersWrapper
) -> tuple[TokenScorer, dict[str, nn.Module]]:
    """Keep the model as it is now: a copy of it, or itself with its adapters off.

    Args:
        cfg: the settings.
        ranks: of the run; where they share shards one of them can score nothing with them.
        actor: with the whole model, before ranks share it.

    Returns:
        What scores rows by it, and the parts that a checkpoint needs for that.
    """
    adapted = is_adapted(actor.model)
    if adapted and parallel_kind(cfg, ranks) != "fsdp2":
        return WithoutAdapters(actor), {}
    model: Any = deepcopy(actor.model)
    reference = TransformersWrapper(
        (model.unload() if adapted else model).eval().requires_grad_(False),
        tokenizer=actor.tokenizer,
        generate_kwargs=actor.sampling,
        generate=False,
    )
    return reference, {"reference": reference.model}
