"""Low-rank adapters (LoRA) on the model that is trained, by PEFT."""

import hashlib
from typing import Any

import torch
from torch import nn

from collectors.weight_update.merged_adapters import whole
from collectors.weight_update.plain_weights import unwrapped_module
from torchrl_agents.settings.errors import refusing
from torchrl_agents.settings.schema import PolicyConfig, RolloutsConfig, TrainingConfig
from torchrl_data.token_scorer import TokenScorer, TokenScores
from torchrl_modules import LLMWrapperBase, TransformersWrapper
from torchrl_modules.weights.quantized_weights import quantization_of

from .policies import transformers_policy


def add_adapters(
    cfg: TrainingConfig, actor: TransformersWrapper, policy: LLMWrapperBase
) -> tuple[TransformersWrapper, LLMWrapperBase]:
    """Freeze the model and put adapters on it, where the settings say so.

    Args:
        cfg: the settings.
        actor: its model is trained; its weights don't change from here on.
        policy: that samples; the actor itself, or an engine which gets merged weights.

    Returns:
        Both, over the model with adapters. What they compute is the same until a step is made.

    Raises:
        SettingsError: the model has no such modules.
    """
    if cfg.policy.lora_rank is None:
        return actor, policy
    trained = transformers_policy(cfg, with_adapters(cfg.policy, actor.model), actor.tokenizer)
    return trained, trained if policy is actor else policy


def with_adapters(settings: PolicyConfig, model: Any) -> Any:
    """A model with new adapters, which change nothing yet, its own weights frozen.

    Raises:
        SettingsError: the model has no such modules.
    """
    import peft

    config = adapter_config(settings, model)
    with refusing("policy.lora_target_modules"):
        return peft.get_peft_model(model, config)


def adapter_config(settings: PolicyConfig, model: Any) -> Any:
    """The configuration of PEFT for adapters on a model, as the settings say."""
    import peft

    assert settings.lora_rank is not None
    alpha: Any = settings.lora_alpha or 2 * settings.lora_rank  # PEFT divides it
    modules = list(settings.lora_target_modules) or "all-linear"
    # Of a reward model the head is trained, too, and saved beside the adapters.
    kind = "SEQ_CLS" if hasattr(model, "score") else "CAUSAL_LM"
    return peft.LoraConfig(
        r=settings.lora_rank, lora_alpha=alpha, target_modules=modules, task_type=kind
    )


def is_adapted(model: Any) -> bool:
    """Return whether a model has adapters; of agents' models, whether one of them has."""
    models = model.values() if isinstance(model, nn.ModuleDict) else [model]
    return any(hasattr(unwrapped_module(each), "peft_config") for each in models)


def is_over_given(cfg: TrainingConfig, model: nn.Module) -> bool:
    """Return whether a model has adapters over the very weights that ``policy.model`` has.

    These need not be saved. A warm start changes the weights that adapters are put on, unless they
    are of 4 bits: then it trains the adapters.

    Args:
        cfg: the settings, filled in.
        model: with adapters or without, in wrappers or not.
    """
    if not is_adapted(model) or cfg.policy.model is None:
        return False
    is_warmed = isinstance(cfg, RolloutsConfig) and bool(cfg.warm_start.num_steps)
    return not is_warmed or quantization_of(unwrapped_module(model)) is not None


def frozen_weights(model: nn.Module) -> str:
    """A digest of the weights that are not trained; all ranks take part.

    Args:
        model: whole or sharded, which gives the same.
    """
    frozen = (p for p in model.parameters() if not p.requires_grad)
    sums = [float(whole(each).double().sum()) for each in frozen]
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:16]


class WithoutAdapters(TokenScorer):
    """Scores tokens by the model as it was before there were adapters.

    Args:
        actor: whose model has them.
    """

    def __init__(self, actor: TransformersWrapper) -> None:
        self._actor = actor

    def score_packed(self, *args: Any, images: Any = None, **options: Any) -> TokenScores:
        """Score as the actor does, its adapters off meanwhile."""
        model: Any = self._actor.model
        with model.disable_adapter(), torch.no_grad():
            return self._actor.score_packed(*args, images=images, **options)

    def state_dict(self) -> dict[str, Any]:
        """The weights of that model, by the names that it had; a checkpoint may have them."""
        model: Any = unwrapped_module(self._actor.model)
        weights = model.get_base_model().state_dict()
        plain = {n: x for n, x in weights.items() if ".lora_" not in n}
        return {name.replace(".base_layer.", "."): value for name, value in plain.items()}

    def load_state_dict(self, state_dict: Any) -> None:
        """Nothing: they are the frozen weights of the model with adapters, which is restored."""
