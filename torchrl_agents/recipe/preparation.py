"""The task, its environments and the model, before a recipe's own part begins."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.recipe import Recipe
from torchrl_agents.settings.schema import (
    EpisodeConfig,
    RecipeConfig,
    RolloutsConfig,
    defaults_of,
    fill_in,
)
from torchrl_envs import TokenBudget
from torchrl_envs.tasks.registry import make_task
from torchrl_envs.tasks.task import Task, TaskEnv
from torchrl_modules import LLMWrapperBase, TransformersWrapper

from .adapters import add_adapters
from .origin import origin_of
from .policies import build_policies
from .report import RunLog
from .warm_start import warm_start

_LOG = logging.getLogger("torchrl_agents")


class Test(NamedTuple):
    """A task, and the environment of its held-out rows."""

    task: Task
    held_out_env: TaskEnv


class Setup(NamedTuple):
    """What a run with rollouts is made of before its model is loaded."""

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
    with _told_of(cfg):
        task = _make_task(recipe, cfg, settings, num_held_out=cfg.evaluate.num_prompts)
        if cfg.warm_start.num_steps and not task.demonstrations:
            raise ValueError("it has no demonstrations: set warm_start.num_steps=0")
        group_size = cfg.collector.group_size
        num_rollouts = cfg.collector.num_prompts * group_size
        cfg.collector.max_turns = cfg.collector.max_turns or task.max_turns
        common = _common(cfg, cfg.collector)
        env = TaskEnv(task, num_envs=num_rollouts, repeats=group_size, **common)
        held_out_env = TaskEnv(task, held_out=True, num_envs=len(task.held_out_rows), **common)
    return Setup(task, env, held_out_env)


def build_test(
    recipe: Recipe,
    cfg: RecipeConfig,
    settings: dict[str, Any],
    *,
    limits: EpisodeConfig,
    num_prompts: int,
    num_samples: int = 1,
    num_envs: int | None = None,
) -> Test:
    """The task and an environment of its held-out rows, for a recipe that samples nothing else.

    Args:
        recipe: whose defaults are filled in.
        cfg: the settings.
        settings: those of the task.
        limits: of an episode.
        num_prompts: held-out rows.
        num_samples: rollouts of each.
        num_envs: rollouts at once; all of them when not given.

    Raises:
        SettingsError: the task's settings or data can't be used.
    """
    with _told_of(cfg):
        task = _make_task(recipe, cfg, settings, num_held_out=num_prompts)
        env = TaskEnv(
            task,
            held_out=True,
            num_envs=num_envs or len(task.held_out_rows) * num_samples,
            repeats=num_samples,
            num_epochs=1,
            **_common(cfg, limits),
        )
    return Test(task, env)


@contextmanager
def _told_of(cfg: RecipeConfig) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise SettingsError(f"task={cfg.task.id}: {error}") from error


def _make_task(
    recipe: Recipe, cfg: RecipeConfig, settings: dict[str, Any], *, num_held_out: int
) -> Task:
    origin = origin_of(cfg.policy.model)
    is_embedded = origin.model is None
    made_easy = is_embedded and settings.get("level", "") is None
    if made_easy:
        cfg.task.level = settings["level"] = "easy"
    task = make_task(cfg.task.id, seed=cfg.seed, num_held_out=num_held_out, **settings)
    if made_easy:
        _LOG.info("what the embedded model is asked is easy: task.level=easy")
    defaults = defaults_of(cfg, recipe.embedded, recipe.pretrained, origin=origin.model)
    if is_embedded:
        defaults["policy.max_new_tokens"] = task.max_new_tokens
        if task.entropy_coeff is not None and "loss.entropy_coeff" in defaults:
            defaults["loss.entropy_coeff"] = task.entropy_coeff
        if "warm_start.num_steps" in defaults:
            own = task.num_warm_steps or defaults["warm_start.num_steps"]
            is_new = cfg.policy.model is None
            defaults["warm_start.num_steps"] = own if is_new and task.demonstrations else 0
    inherited = dict(origin.settings)
    if origin.task != cfg.task.id:
        inherited.pop("policy.max_new_tokens", None)  # its turns were as long as its task's are
    fill_in(cfg, defaults | inherited)
    if inherited:
        _LOG.info("as in the run that left %s: %s", cfg.policy.model, inherited)
    return task


def _common(cfg: RecipeConfig, limits: EpisodeConfig) -> dict[str, Any]:
    return {
        "shuffle": False,
        "seed": cfg.seed,
        "max_steps": limits.max_turns,
        "show_schemas": cfg.policy.show_tool_schemas,
    }


def load_policies(
    cfg: RolloutsConfig, setup: Setup, log: RunLog, *, warm: bool = True
) -> tuple[TransformersWrapper, LLMWrapperBase]:
    """:func:`load_models`, then :func:`warm_up`."""
    return warm_up(cfg, setup, log, *load_models(cfg, setup, log), warm=warm)


def load_models(
    cfg: RolloutsConfig, setup: Setup, log: RunLog
) -> tuple[TransformersWrapper, LLMWrapperBase]:
    """The model that is trained, as it is loaded, and the policy that samples with its weights.

    The environments get a budget of tokens, which depends on the model's length.
    """
    with log.phase("loading the model"):
        actor, policy = build_policies(cfg, setup.task)
        for each in (setup.env, setup.held_out_env):
            set_token_budget(each, cfg.collector, policy)
    return actor, policy


def warm_up(
    cfg: RolloutsConfig,
    setup: Setup,
    log: RunLog,
    actor: TransformersWrapper,
    policy: LLMWrapperBase,
    *,
    warm: bool = True,
) -> tuple[TransformersWrapper, LLMWrapperBase]:
    """Demonstrations teach the format; then adapters, if there are any, are put on the model.

    Args:
        cfg: the settings.
        setup: the task and its environments.
        log: told of the phases.
        actor: what is trained.
        policy: samples with its weights.
        warm: whether to warm up; not where a checkpoint has the weights.
    """
    torch.manual_seed(cfg.seed)
    num_warm = (cfg.warm_start.num_steps or 0) if warm else 0
    if num_warm:
        rate = cfg.warm_start.learning_rate
        assert rate is not None  # filled in
        with log.phase("warm start"), log.steps("warm start", num_warm) as steps:
            warm_start(
                actor,
                setup.task.demonstrations,
                num_steps=num_warm,
                batch_size=cfg.warm_start.batch_size,
                learning_rate=rate,
                micro_batch_tokens=cfg.train.micro_batch_tokens,
                on_step=lambda step, loss: steps.done(step, {"loss": loss}, quiet=step % 100 > 0),
            )
    return add_adapters(cfg, actor, policy)


def set_token_budget(env: TaskEnv, cfg: EpisodeConfig, policy: Any) -> None:
    """Bound the tokens of an episode, by the model's length at least, where there is a bound."""
    max_model_len = getattr(policy, "max_model_len", None)
    if isinstance(policy, LLMWrapperBase):
        max_model_len = policy.engine.max_model_len  # type: ignore[attr-defined]
    if cfg.max_episode_tokens is None and max_model_len is None:
        return
    budget = TokenBudget(
        cfg.max_episode_tokens,
        max_model_len=max_model_len,
        min_turn_tokens=cfg.min_turn_tokens,
        encoder=policy.encoder,
    )
    env.append_transform(budget)
