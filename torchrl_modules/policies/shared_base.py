"""Models with adapters of their own over one model, whose weights they share."""

from collections.abc import Mapping
from copy import deepcopy
from itertools import chain
from typing import Any

from torch import nn

from torchrl_data import import_package


def models_over_one_base(model: nn.Module, configs: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Models with adapters of their own over one model, whose weights they share.

    Each is a model by itself, which is scored, drawn from, trained and saved as any other with
    adapters. The weights of the base are there once, and are not trained.

    Args:
        model: a causal language model without adapters.
        configs: of PEFT, such as ``LoraConfig``, by the name that each model is asked for by.

    Returns:
        PEFT models, by these names.

    Raises:
        ImportError: ``peft`` is missing.
        ValueError: the model has adapters already, or an adapter trains whole weights of the base,
            which the others would see.

    Example:
        >>> from peft import LoraConfig
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        >>> base = tiny_qwen3(len(tokenizer))
        >>> models = models_over_one_base(base, {"first": config, "second": config})
        >>> len({id(m.get_input_embeddings().weight) for m in models.values()})
        1
    """
    install = "pip install 'torchrl-agents[lora]'"
    peft: Any = import_package("peft", who="models_over_one_base", install=install)
    if any(".lora_" in name or "modules_to_save" in name for name, _ in model.named_parameters()):
        raise ValueError(
            "models_over_one_base: the model has adapters already. Merge them "
            "(model.merge_and_unload()), or give the model below them."
        )
    models: dict[str, nn.Module] = {}
    for name, config in configs.items():
        shared: dict[int, Any] = {
            id(value): value for value in chain(model.parameters(), model.buffers())
        }
        of_base = {*shared}
        own: Any = deepcopy(model, shared)
        models[name] = peft.get_peft_model(own, deepcopy(config))
        trained = [n for n, value in models[name].named_parameters() if value.requires_grad]
        if whole := [n for n in trained if id(models[name].get_parameter(n)) in of_base]:
            raise ValueError(
                f"models_over_one_base: the adapter {name!r} trains weights of the base, such as "
                f"{whole[0]}, which the other models have too. Leave bias= out of its config."
            )
    return models
