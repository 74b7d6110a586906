"""Low-rank adapters (LoRA) on the model that is trained, by PEFT."""

import hashlib
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from collectors.weight_update.gathering import unwrapped
from collectors.weight_update.merged_adapters import whole
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.schema import PolicyConfig, RecipeConfig, TrainingConfig
from torchrl_data.protocols import TokenScorer, TokenScores
from torchrl_modules import LLMWrapperBase, TransformersWrapper

from .policies import transformers_policy


def check_adapters(cfg: RecipeConfig) -> None:
    """Refuse adapters that can't be had, or would change nothing.

    Raises:
        ValueError: names the setting.
    """
    policy = cfg.policy
    if policy.lora_rank is None:
        given = [n for n in ("lora_alpha", "lora_target_modules") if getattr(policy, n)]
        if given:
            raise ValueError(f"{given[0]} is for adapters: set policy.lora_rank, too.")
        return
    if not isinstance(cfg, TrainingConfig):
        raise ValueError(f"lora_rank={policy.lora_rank}: nothing is trained here. Leave it out.")
    if find_spec("peft") is None:
        raise ValueError("lora_rank needs the package peft: pip install 'torchrl-agents[lora]'.")


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

    assert settings.lora_rank is not None
    alpha = settings.lora_alpha or 2 * settings.lora_rank
    config = peft.LoraConfig(
        r=settings.lora_rank,
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType]  # PEFT divides it
        target_modules=list(settings.lora_target_modules) or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(model, config)
    except ValueError as error:
        raise SettingsError(f"policy.lora_target_modules: {error}") from error


def is_adapted(model: Any) -> bool:
    """Whether a model has adapters."""
    return hasattr(unwrapped(model), "peft_config")


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

    def score_packed(
        self,
        ids: Tensor,
        lengths: Tensor,
        target_mask: Tensor,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        images: Sequence[Sequence[str]] | None = None,
    ) -> TokenScores:
        """As the actor does, its adapters off meanwhile."""
        model: Any = self._actor.model
        with model.disable_adapter(), torch.no_grad():
            return self._actor.score_packed(
                ids, lengths, target_mask, temperature=temperature, entropy=entropy, images=images
            )
