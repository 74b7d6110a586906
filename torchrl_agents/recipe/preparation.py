"""The task, its environments and the model, before a recipe's own part begins."""

from typing import Any, NamedTuple

import torch

from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.recipe import Recipe
from torchrl_agents.settings.schema import EpisodeConfig, RolloutsConfig, defaults_of, fill_in
from torchrl_envs import TokenBudget
from torchrl_envs.tasks.registry import make_task
from torchrl_envs.tasks.task import Task, TaskEnv
from torchrl_modules import LLMWrapperBase, TransformersWrapper

from .policies import build_policies
from .report import RunLog
from .warm_start import warm_start


class Setup(NamedTuple):
    """What a run is made of before its model is loaded."""

    task: Task
    env: TaskEnv
    held_out_env: TaskEnv


def build_task(recipe: Recipe, cfg: RolloutsConfig, settings: dict[str, Any]) -> Setup:
    """The task and its environments; whatever is wrong with them shows before a model is loaded.

    Args:
        recipe: whose defaults are filled in.
        cfg: the settings.
        settings: those of the task.

    Raises:
        SettingsError: the task's settings or data can't be used.
    """
    try:
        task = make_task(
            cfg.task.id, seed=cfg.seed, num_held_out=cfg.evaluate.num_prompts, **settings
        )
        defaults = defaults_of(cfg, recipe.embedded, recipe.pretrained)
        if cfg.policy.model is None:
            defaults["policy.max_new_tokens"] = task.max_new_tokens
            if not task.demonstrations:
                defaults["warm_start.num_steps"] = 0
        fill_in(cfg, defaults)
        if cfg.warm_start.num_steps and not task.demonstrations:
            raise ValueError("it has no demonstrations: set warm_start.num_steps=0")
        common: dict[str, Any] = {
            "shuffle": False,
            "seed": cfg.seed,
            "max_steps": cfg.collector.max_turns,
            "show_schemas": cfg.policy.show_tool_schemas,
        }
        group_size = cfg.collector.group_size
        num_rollouts = cfg.collector.num_prompts * group_size
        env = TaskEnv(task, num_envs=num_rollouts, repeats=group_size, **common)
        held_out_env = TaskEnv(task, held_out=True, num_envs=len(task.held_out_rows), **common)
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise SettingsError(f"task={cfg.task.id}: {error}") from error
    return Setup(task, env, held_out_env)


def load_policies(
    cfg: RolloutsConfig, setup: Setup, log: RunLog
) -> tuple[TransformersWrapper, LLMWrapperBase]:
    """The model that is trained, warmed up, and the policy that samples with its weights.

    The environments get a budget of tokens, which depends on the model's length.
    """
    task, env, held_out_env = setup
    with log.phase("loading the model"):
        actor, policy = build_policies(cfg, task)
        for each in (env, held_out_env):
            each.append_transform(token_budget(cfg.collector, policy))
    torch.manual_seed(cfg.seed)

    # Warm start: demonstrations teach the format.
    num_warm = cfg.warm_start.num_steps or 0
    if num_warm:
        with log.phase("warm start"), log.steps("warm start", num_warm) as steps:
            warm_start(
                actor,
                task.demonstrations,
                num_steps=num_warm,
                batch_size=cfg.warm_start.batch_size,
                learning_rate=cfg.warm_start.learning_rate,
                on_step=lambda step, loss: steps.done(step, {"loss": loss}, quiet=step % 100 > 0),
            )
    return actor, policy


def token_budget(cfg: EpisodeConfig, policy: LLMWrapperBase) -> TokenBudget:
    """Bounds the tokens of an episode, by the model's length at least."""
    return TokenBudget(
        cfg.max_episode_tokens,
        max_model_len=policy.engine.max_model_len,  # type: ignore[attr-defined]
        min_turn_tokens=cfg.min_turn_tokens,
        encoder=policy.encoder,
    )
