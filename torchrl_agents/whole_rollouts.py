"""Tasks of which two whole rollouts can be compared, each by one reward."""

from typing import Any

from torchrl_envs import AgentProgram
from torchrl_envs.episode.episode_env import EpisodeEnv

from .settings.errors import refusing
from .settings.recipe import Recipe
from .setup import Setup, build_task


def build_whole_rollouts(recipe: Recipe, cfg: Any, settings: dict[str, Any]) -> Setup:
    """The task and its environments, see :func:`.build_task`.

    Args:
        recipe: whose run it is.
        cfg: the settings.
        settings: those of the task.

    Raises:
        SettingsError: the task's settings or data can't be used, or its rollouts not be compared.
    """
    setup = build_task(recipe, cfg, settings)
    with refusing(f"task={cfg.task.id}"):
        _check_rewards(setup.env)
    return setup


def _check_rewards(env: EpisodeEnv) -> None:
    """Check that a rollout has one reward, by which it is compared with another one.

    Raises:
        ValueError: agents of a program have rewards of their own.
    """
    named = [program.agents for program in env.transforms_of(AgentProgram) if program.agents]
    if named:
        raise ValueError(
            f"the agents {list(named[0])} have rewards and rows of their own, and a pair is of two "
            "whole rollouts. Take the recipe grpo with loss.credit=agent."
        )
