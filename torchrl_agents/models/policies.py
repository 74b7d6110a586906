"""The actor that is trained and the policy that samples, from the settings."""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from torchrl_agents.settings.errors import SettingsError, refusing
from torchrl_agents.settings.schema import (
    PolicyConfig,
    RecipeConfig,
    RolloutsConfig,
    TrainingConfig,
    agents_settings,
    collects_on_ray,
)
from torchrl_agents.settings.started_ranks import num_ranks
from torchrl_data import page
from torchrl_envs.tasks.task import Task
from torchrl_modules import LLMWrapperBase, TransformersWrapper
from torchrl_modules.engines.transformers import TransformersEngine
from torchrl_modules.model_splits import plans_of
from torchrl_modules.policies.compute_dtype import check_quantization, warn_of_other_dtype
from torchrl_modules.weights.quantized_weights import quantization_of

from .chat_server_policy import ChatServerPolicy
from .loading import load_model, load_processor, load_tokenizer, refusing_to_load
from .own_engine import engine_factory, own_engine_policy
from .policy_arguments import wrapper_arguments
from .served_model import check_adapted_model, check_served
from .sglang_policy import sglang_policy
from .sources import model_source, name_of_model, task_tokenizer
from .vllm_policy import vllm_policy


def build_policies(cfg: RecipeConfig, task: Task) -> tuple[Any, Any]:
    """The actor that is trained and the policy that samples.

    With Transformers they are one, so that the weights are there once (a streaming collector makes
    a copy to draw from); vLLM and SGLang have their own copies, which
    every update replaces. On Ray collectors have
    policies of their own, and what this process samples, to test the model, it samples from that.

    Args:
        cfg: the settings.
        task: for the embedded model, and the tokenizer beside a server.

    Returns:
        A :class:`TransformersWrapper` and a :class:`LLMWrapperBase`; the second alone, after
        ``None``, where nothing is trained and an engine has the model.

    Raises:
        SettingsError: the model can't be loaded, or used as the settings say.
    """
    if cfg.engine.name == "chat":
        # What it says is written down in tokens that are not its own.
        arguments = wrapper_arguments(cfg.policy, task_tokenizer(task))
        url, model = cast("str", cfg.engine.url), cast("str", cfg.policy.model)
        with refusing("engine=chat"):
            return None, ChatServerPolicy(url, model, **cfg.engine.engine_kwargs, **arguments)
    is_library = cfg.engine.is_library and not collects_on_ray(cfg)
    if cfg.engine.is_own:
        engine_factory(cfg.engine)  # what is wrong with it shows before weights are loaded
    is_elsewhere = is_library or cfg.engine.is_own
    with model_source(cfg, task) as source:
        if is_elsewhere and not isinstance(cfg, TrainingConfig):
            with refusing_to_load("policy.model", source):
                tokenizer = load_tokenizer(cfg.policy, source)
                processor = load_processor(cfg.policy, source)
            check_served(cfg, source)
            return None, _sampler(cfg, source, tokenizer, processor)
        model, tokenizer = load_model(cfg.policy, source, images=True)
        processor = load_processor(cfg.policy, source)
        check_images(cfg, processor)
        _check_quantization(cfg, model)
        check_split(cfg, model)
        with refusing(f"{name_of_model(cfg)} can't be used so"):
            actor = transformers_policy(cfg, model, tokenizer, processor=processor)
        if not is_elsewhere:
            return actor, actor
        sampler = _sampler(cfg, source, tokenizer, processor)
        warn_of_other_dtype(actor, sampler)
        with refusing("policy.quantization"):
            if not cfg.engine.is_own:  # the user's, which may not say
                check_quantization(actor, sampler)
        check_adapted_model(cfg, actor, sampler)
        return actor, sampler


def _sampler(
    cfg: RecipeConfig, source: str, tokenizer: PreTrainedTokenizerBase, processor: Any
) -> LLMWrapperBase:
    """The policy that samples with another engine than the model itself."""
    if cfg.engine.is_own:
        return own_engine_policy(cfg, tokenizer)
    if cfg.engine.name == "sglang":
        return sglang_policy(cfg, source, tokenizer)
    return vllm_policy(cfg, source, tokenizer, processor)


def _check_quantization(cfg: RecipeConfig, model: PreTrainedModel) -> None:
    kind = quantization_of(model)
    if kind is None or not isinstance(cfg, TrainingConfig):
        return
    who = f"policy.model={cfg.policy.model}"
    if kind != "4bit":
        raise SettingsError(
            f"{who} has weights that {kind} quantised, over which nothing is trained here. Give "
            "whole weights; policy.load_in_4bit=true keeps them in 4 bits."
        )
    if cfg.policy.lora_rank is None:
        raise SettingsError(f"{who} has weights of 4 bits: train adapters, policy.lora_rank=16.")


def check_images(cfg: RecipeConfig, processor: Any) -> None:
    """Check that a model that reads images can be trained so.

    Args:
        cfg: the settings.
        processor: of the model; ``None`` of one that reads no images.

    Raises:
        SettingsError: it can't.
    """
    if processor is None:
        return
    policy = cfg.policy
    faults = {
        "policy.lora_rank": policy.lora_rank is not None,
        "policy.load_in_4bit": policy.load_in_4bit,
        "policy.add_control_tokens": policy.add_control_tokens,
        f"{num_ranks()} ranks": num_ranks() > 1,
        "engine=sglang": cfg.engine.name == "sglang",
        "agents.trained": agents_settings(cfg) is not None,
    }
    if isinstance(cfg, RolloutsConfig):
        collector, streams = cfg.collector, cfg.collector.mode == "streaming"
        by_transformers, in_turn = cfg.engine.name == "transformers", collector.max_staleness == 0
        faults |= {
            "collector=ray": collects_on_ray(cfg),
            "collector.verify_every": bool(collector.verify_every),
            "collector=streaming and engine=transformers": streams and by_transformers,
            "collector=streaming and collector.max_staleness=0": streams and in_turn,
        }
    for setting, is_set in faults.items():
        if is_set:
            raise SettingsError(
                f"policy.model={policy.model} is a vision-language model, which is not trained "
                f"with {setting}. See {page('docs/images.md')}."
            )


def check_split(cfg: RecipeConfig, model: PreTrainedModel) -> None:
    """Check that ranks can compute parts of a layer of the model, where the settings want it.

    Args:
        cfg: the settings.
        model: with weights or without.

    Raises:
        SettingsError: they can't.
    """
    if not isinstance(cfg, TrainingConfig) or not cfg.train.splits_model:
        return
    with refusing(f"policy.model={cfg.policy.model}"):
        plans_of(
            model,
            tensor_parallel_size=cfg.train.tensor_parallel_size,
            expert_parallel_size=cfg.train.expert_parallel_size,
            num_ranks=num_ranks(),
            who="train",
        )


def transformers_policy(
    cfg: RecipeConfig,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    generate: bool = True,
    processor: Any = None,
    context_group: Any = None,
) -> TransformersWrapper:
    """A policy over a model that is there, as the settings say.

    Args:
        cfg: the settings.
        model: with its wrappers.
        tokenizer: its tokenizer.
        generate: whether it samples.
        processor: of a model that reads images.
        context_group: ranks that share out the tokens of its rows.

    Raises:
        ValueError: the model can't be used so.
    """
    train = cfg.train if isinstance(cfg, TrainingConfig) else None
    autocast = train is not None and train.autocast
    arguments = wrapper_arguments(cfg.policy, tokenizer)
    if isinstance(cfg, RolloutsConfig) and cfg.record.kept_counts:
        arguments["generate_kwargs"] = replace(arguments["generate_kwargs"], kept_counts=True)
    return TransformersWrapper(
        model,
        generate=generate,
        max_model_len=cfg.policy.max_model_len,
        autocast_dtype=torch.bfloat16 if autocast else None,
        compile_layers=None if train is None else train.compile_layers,
        batch_invariant=cfg.engine.batch_invariant and cfg.engine.name == "transformers",
        processor=processor,
        context_group=context_group,
        **arguments,
    )


def set_generation(cfg: PolicyConfig, policy: TransformersWrapper) -> TransformersWrapper:
    """Let the model, once saved, sample as it did here, and stop where it did."""
    settings = cast("TransformersEngine", policy.engine).inside.generation_config
    assert settings is not None
    settings._from_model_config = False  # or Transformers makes them anew
    settings.update(
        do_sample=True,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
        max_new_tokens=policy.sampling.max_new_tokens,
        eos_token_id=list(policy.sampling.stop_token_ids or ()) or settings.eos_token_id,
        pad_token_id=policy.tokenizer.pad_token_id,
    )
    return policy
