"""Models with adapters of PEFT, which is not imported: a model that has adapters has done it."""

import sys
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def model_inside(model: Any) -> PreTrainedModel:
    """The causal language model that computes what a PEFT model does."""
    # Adapters such as LoRA are layers of the model inside, so that it gives the PEFT model's logits
    # and gradients by itself.
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    for config in model.peft_config.values():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if config.is_prompt_learning or kind == "POLY":
            what = kind
        elif getattr(config, "alora_invocation_tokens", None):
            what = "aLoRA"
        else:
            continue
        raise TypeError(
            f"{type(model).__name__} has adapters of the kind {what}, which are not layers of the "
            "model. Train one that is, such as LoRA."
        )
    return model.get_base_model()


def acting_adapters(model: nn.Module) -> tuple[tuple[bool, tuple[Any, ...]], ...]:
    """Of each layer with adapters of PEFT, whether they are off, and which act when they are not.

    Args:
        model: of PEFT, or any other one.
    """
    peft: Any = sys.modules.get("peft")
    if peft is None:
        return ()
    layers: list[Any] = list(model.modules())
    return tuple(
        (bool(layer.disable_adapters), tuple(layer.active_adapters))
        for layer in layers
        if isinstance(layer, peft.tuners.tuners_utils.BaseTunerLayer)
    )


def is_linear(module: Any) -> bool:
    """Whether a module computes ``x @ weight.T + bias`` with its own ``weight`` and ``bias``."""
    peft: Any = sys.modules.get("peft")
    if peft is not None and type(module) is peft.utils.ModulesToSaveWrapper:
        module = module.original_module
    return type(module) is nn.Linear


def draws_dropout(model: nn.Module) -> bool:
    """Whether a module of the model leaves values out at random now."""
    return any(
        isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0
        for module in model.modules()
    )
