"""A dry run: all that a run would refuse later is checked, but for what weights alone can tell."""

import shutil
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from collectors.composition_checks import check_fit
from torchrl_data import page
from torchrl_data.pretrained import load_pretrained
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_data.templates.image_processor import ImageProcessor
from torchrl_envs.tasks.task import Task
from torchrl_modules import LLMWrapperBase
from torchrl_modules.engines.transformers import TransformersEngine

from .critic import check_critic
from .loggers import check_loggers
from .model_card import reach_hub
from .models.adapters import with_adapters
from .models.loading import (
    load_model,
    load_processor,
    load_tokenizer,
    place_of,
    refusing_to_load,
)
from .models.outline import outline
from .models.own_engine import engine_factory
from .models.policies import build_policies, check_images, check_split
from .models.policy_arguments import wrapper_arguments
from .models.sglang_policy import sglang_policy
from .models.sources import model_source, name_of_model
from .models.task_reward_models import check_reward_models
from .models.user_model import user_models
from .models.vllm_policy import vllm_policy
from .models.warm_start import drawn_demonstrations, short_enough
from .settings.errors import SettingsError, refusing
from .settings.recipe import Recipe
from .settings.schema import (
    RecipeConfig,
    RolloutsConfig,
    TrainingConfig,
    agents_settings,
    collects_on_ray,
)
from .setup import set_limits


def check_run(recipe: Recipe, cfg: RecipeConfig, setup: Any) -> Any:
    """Refuse what a run would refuse after its data: model, adapters, template, servers, trackers.

    Args:
        recipe: whose run it is.
        cfg: the settings, filled in.
        setup: the task and its environments.

    Returns:
        What the recipe's own rehearsal gives.

    Raises:
        SettingsError: as the run would, or in place of what it would break with.
    """
    rehearsed = None
    if (policy := _policy_without_weights(recipe, cfg, setup.task)) is not None:
        with refusing(f"task={cfg.task.id}"):
            set_limits(setup, cfg.limits, policy)
            for env in setup.envs:
                check_fit(env, policy, who=recipe.name)
            if isinstance(cfg, RolloutsConfig) and cfg.warm_start.num_steps:
                shown = drawn_demonstrations(cfg, setup.env, policy.encoder)
                short_enough(shown, policy.engine.max_model_len)
        if recipe.rehearse is not None:
            rehearsed = recipe.rehearse(cfg, setup, policy)
    for user, has_tools in user_models(setup.envs).items():
        user.check(has_tools=has_tools)
    check_reward_models(setup.envs)
    if isinstance(cfg, TrainingConfig):
        check_loggers(cfg, recipe.name)
        if cfg.push_to_hub is not None:
            reach_hub(cfg.push_to_hub, create=False)
    return rehearsed


def _policy_without_weights(recipe: Recipe, cfg: RecipeConfig, task: Task) -> Any:
    """Build a policy without weights; nothing, where an engine alone could say more."""
    if cfg.engine.name == "chat":
        return build_policies(cfg, task)[1]
    on_ray, is_vllm = collects_on_ray(cfg), cfg.engine.name == "vllm"
    if cfg.engine.is_own:
        engine_factory(cfg.engine)  # it is not made
    is_library = cfg.engine.is_library
    starts_here = is_library and not (cfg.engine.url or cfg.engine.urls)
    if on_ray and find_spec("ray") is None:
        hint = f"pip install 'torchrl-agents[ray]'; see {page('docs/clusters.md')}"
        raise SettingsError(f"collector=ray needs the package ray, which is not here: {hint}.")
    if starts_here and not on_ray:
        _check_installed(cfg)
    with model_source(cfg, task) as source:
        if is_library and not isinstance(cfg, TrainingConfig):
            # What Transformers can't compute an engine of a library may.
            with refusing_to_load("policy.model", source):
                load_pretrained(AutoConfig, source, **place_of(cfg.policy))
                tokenizer = load_tokenizer(cfg.policy, source)
                processor = load_processor(cfg.policy, source)
            with refusing(f"policy.model={source!r}"):
                ConversationEncoder(tokenizer, chat_template_name=cfg.policy.chat_template_name)
            policy = None
        else:
            settings = replace(cfg.policy, device="meta")
            load = partial(outline, any_head=recipe.gives_rewards)
            model, tokenizer = load_model(settings, source, load=load, images=True)
            processor = load_processor(cfg.policy, source)
            check_images(cfg, processor)
            check_split(cfg, model)
            if isinstance(cfg, TrainingConfig):
                check_critic(cfg, model.config, reads_images=processor is not None)
            with refusing(f"{name_of_model(cfg)} can't be used so"):
                longest = cfg.policy.max_model_len
                images = None if processor is None else ImageProcessor(processor)
                engine = TransformersEngine(
                    model, max_model_len=longest, images=images, check=False
                )
                policy = LLMWrapperBase(engine, **wrapper_arguments(cfg.policy, tokenizer))
            if cfg.policy.lora_rank is not None:
                with_adapters(cfg.policy, model)
        if is_vllm and not starts_here and not on_ray:
            return vllm_policy(cfg, source, tokenizer, processor)
        if is_library and not is_vllm and not starts_here:
            return sglang_policy(cfg, source, tokenizer)
        return policy


def _check_installed(cfg: RecipeConfig) -> None:
    """Check that the library of an engine that is started here can be found."""
    name = cfg.engine.name
    python = cfg.engine.engine_kwargs.get("python")
    if name == "sglang" and python is not None:
        if shutil.which(str(python)) is None:
            raise SettingsError(f"engine.engine_kwargs.python={python!r} is no program.")
    elif find_spec(name) is None:
        other = "engine.url=" if name == "vllm" else "+engine.engine_kwargs.python= or engine.url="
        hint = f"see {page(f'docs/{name}.md')}, or give {other}"
        raise SettingsError(f"engine={name} needs the package {name}, which is not here: {hint}.")


def summary_of(
    recipe: Recipe, cfg: RecipeConfig, setup: Any, folder: Path, *, rehearsed: Any
) -> str:
    """Return what a run with these settings would be, in a few lines.

    Args:
        recipe: whose run it is.
        cfg: the settings, filled in.
        setup: the task and its environments.
        folder: of the run.
        rehearsed: what :func:`check_run` gave.
    """
    policy, rows = cfg.policy, setup.task.train_rows
    model = policy.model or "the embedded model"
    adapters = f", adapters of rank {policy.lora_rank}" if policy.lora_rank else ""
    is_trained_on = isinstance(cfg, RolloutsConfig) and hasattr(rows, "__len__")
    count = f"{len(rows)} rows to train on, " if is_trained_on else ""
    lines = {
        "model": f"{model}{adapters}; engine {cfg.engine.name}",
        "task": f"{cfg.task.id}: {count}{len(setup.task.held_out_rows)} held out",
    }
    if (shown := getattr(cfg, "data", None)) is not None:
        num_trained = len(rehearsed) - shown.num_held_out
        lines["data"] = f"{num_trained} {shown.what} to train on, {shown.num_held_out} held out"
    if isinstance(cfg, RolloutsConfig):
        each = f"{cfg.collector.num_prompts} prompts x {cfg.collector.group_size} rollouts"
        lines["steps"] = f"{cfg.train.num_steps}, each of {each} ({cfg.collector.mode})"
    elif isinstance(cfg, TrainingConfig):
        lines["steps"] = f"{cfg.train.num_steps}"
    if (agents := agents_settings(cfg)) is not None:
        stay = f"; {', '.join(agents.frozen)} frozen" if agents.frozen else ""
        lines["agents"] = f"{', '.join(agents.trained)}, each with weights of its own{stay}"
    lines["settings"] = f"{folder / 'config.yaml'} has all of them"
    told = "\n".join(f"  {name:<10}{text}" for name, text in lines.items())
    return f"{recipe.name}: nothing is refused; no weights were loaded.\n{told}"
