"""Models of several agents over one base, with adapters of their own: new ones, or a run's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from torchrl_agents.settings.errors import SettingsError
from torchrl_modules import models_over_one_base

from .saved_agents import SavedAgents


def models_with_adapters(
    base: nn.Module, names: Sequence[str], saved: SavedAgents | None, new: Mapping[str, Any]
) -> dict[str, nn.Module]:
    """Models over one base: with adapters that a run left, with new ones, or without any.

    Args:
        base: without adapters; without weights (on ``meta``) the adapters alone have some.
        names: of the agents.
        saved: by the run, if there was one.
        new: configurations of agents that get adapters, where the run left none of theirs.

    Raises:
        SettingsError: adapters of the run have another rank.
    """
    import peft

    left = [] if saved is None else [name for name in names if saved.adapter(name).is_dir()]
    configs = dict(new)
    for name in left:
        assert saved is not None
        config: Any = peft.PeftConfig.from_pretrained(str(saved.adapter(name)))
        if name in new and config.r != new[name].r:
            raise SettingsError(
                f"policy.lora_rank={new[name].r}: the adapters of {name} in {saved.adapter(name)} "
                f"have rank {config.r}. Give policy.lora_rank={config.r}."
            )
        config.inference_mode = False
        config.base_model_name_or_path = None  # the base is here, wherever it was then
        configs[name] = config
    adapted = models_over_one_base(base, configs)
    for name in left:
        assert saved is not None
        load_adapter(adapted[name], saved.adapter(name))
    return {name: adapted.get(name, base) for name in names}


def load_adapter(model: Any, folder: Path) -> None:
    """Give a model with adapters the weights that a folder has of them.

    Args:
        model: of PEFT.
        folder: with adapters of the same shapes.
    """
    import peft

    weights = peft.load_peft_weights(str(folder), device="cpu")
    if not next(model.parameters()).is_meta:
        peft.set_peft_model_state_dict(model, weights)
        return
    # PEFT would move them to where the base has no data.
    own = {
        name.replace(f".{part}.", f".{part}.{model.active_adapter}."): value
        for name, value in weights.items()
        for part in ("lora_A", "lora_B")
        if f".{part}." in name
    }
    unknown = model.load_state_dict(own, strict=False, assign=True).unexpected_keys
    if unknown or len(own) < len(weights):
        raise SettingsError(
            f"{folder} has {len(weights)} weights, of which {len(own) - len(unknown)} are LoRA "
            "adapters of the base that the run names. Leave the folder of the run as it was."
        )
