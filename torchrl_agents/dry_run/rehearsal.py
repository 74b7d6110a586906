"""What a dry run checks: all that a run would refuse later, but for what weights alone can tell."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from collectors.composition_checks import check_fit
from torchrl_agents.engines.own_engines import collects_on_ray, vllm_policy, wrapper_arguments
from torchrl_agents.recipe.adapters import with_adapters
from torchrl_agents.recipe.policies import build_sampler, load_model, model_source
from torchrl_agents.recipe.preparation import set_token_budget
from torchrl_agents.recipe.trackers import check_loggers
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.recipe import Recipe
from torchrl_agents.settings.schema import (
    EpisodeConfig,
    RecipeConfig,
    RolloutsConfig,
    TrainingConfig,
)
from torchrl_data import encode_demonstrations
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_envs.tasks.task import Task
from torchrl_modules import LLMWrapperBase
from torchrl_modules.engines.transformers_engine import TransformersEngine

from .outline import outline


def check_run(recipe: Recipe, cfg: RecipeConfig, setup: Any) -> None:
    """Refuse what a run would refuse after its data: model, adapters, template, servers, trackers.

    Args:
        recipe: whose run it is.
        cfg: the settings, filled in.
        setup: the task and its environments.

    Raises:
        SettingsError: as the run would, or in place of what it would break with.
    """
    task, *envs = setup
    policy = _policy_without_weights(cfg, task)
    if policy is not None:
        limits = next(v for v in vars(cfg).values() if isinstance(v, EpisodeConfig))
        with _told_of(f"task={cfg.task.id}"):
            for env in envs:
                set_token_budget(env, limits, policy)
                check_fit(env, policy, who=recipe.name)
            if isinstance(cfg, RolloutsConfig) and cfg.warm_start.num_steps:
                encode_demonstrations(policy.encoder, task.demonstrations)
        if recipe.rehearse is not None:
            recipe.rehearse(cfg, task, policy)
    if isinstance(cfg, TrainingConfig):
        check_loggers(cfg, recipe.name)


def _policy_without_weights(cfg: RecipeConfig, task: Task) -> Any:
    """What samples, and how it reads and writes; nothing, where an engine alone would tell."""
    if cfg.engine.name == "chat":
        return build_sampler(cfg, task)
    starts_here = cfg.engine.name == "vllm" and not (cfg.engine.url or cfg.engine.urls)
    if collects_on_ray(cfg):
        _check_package("collector=ray", "ray", "pip install 'torchrl-agents[ray]'")
    elif starts_here:
        _check_package("engine=vllm", "vllm", "see docs/vllm.md, or give engine.url=")
    with model_source(cfg, task) as source:
        if cfg.engine.name == "vllm" and not isinstance(cfg, TrainingConfig):
            # What Transformers can't compute an engine of vLLM may.
            with _told_of(f"policy.model={source!r}"):
                AutoConfig.from_pretrained(source)
                tokenizer = AutoTokenizer.from_pretrained(source)
                ConversationEncoder(tokenizer, chat_template_name=cfg.policy.chat_template_name)
            return None if starts_here else _reached(cfg, source, tokenizer)
        settings = replace(cfg.policy, device="meta")
        model, tokenizer = load_model(settings, source, load=outline)
        with _told_of(f"policy.model={source!r} can't be used so"):
            engine = TransformersEngine(model, max_model_len=cfg.policy.max_model_len, check=False)
            policy = LLMWrapperBase(engine, **wrapper_arguments(cfg.policy, tokenizer))
        if cfg.policy.lora_rank is not None:
            with_adapters(cfg.policy, model)
        serves = cfg.engine.name == "vllm" and not starts_here and not collects_on_ray(cfg)
        return _reached(cfg, source, tokenizer) if serves else policy


def _check_package(who: str, package: str, hint: str) -> None:
    if find_spec(package) is None:
        raise SettingsError(f"{who} needs the package {package}, which is not here: {hint}.")


def _reached(cfg: RecipeConfig, source: str, tokenizer: Any) -> LLMWrapperBase:
    """A policy over servers that run."""
    with _told_of("engine"):
        return vllm_policy(cfg, source, tokenizer)


@contextmanager
def _told_of(what: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        raise SettingsError(f"{what}: {error}") from error
