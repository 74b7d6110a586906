"""Arguments that every policy is made with, whatever its engine."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from torchrl_agents.settings.schema import PolicyConfig
from torchrl_modules import SamplingParameters


def sampling_of(cfg: PolicyConfig) -> SamplingParameters:
    """Return how turns are sampled."""
    return SamplingParameters(
        max_new_tokens=cfg.max_new_tokens or 1,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
        min_p=cfg.min_p,
        sampling_mask=cfg.sampling_mask,
        routed_experts=cfg.routed_experts,
        stop=tuple(cfg.stop or ()),
    )


def wrapper_arguments(cfg: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return what every policy is made with."""
    about = {"tokenizer": tokenizer, "chat_template_name": cfg.chat_template_name}
    return {**about, "generate_kwargs": sampling_of(cfg), "write_tokens": False}
