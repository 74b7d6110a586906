"""Reward models that a task names (``task.rewards=FOLDER``): checked, and loaded for a run."""

from collections.abc import Iterable

import torch
from transformers import AutoModelForSequenceClassification

from torchrl_agents.settings.errors import refusing
from torchrl_envs import RewardFunctions, RewardModel
from torchrl_envs.tasks.task import TaskEnv

from .outline import outline


def task_reward_models(envs: Iterable[TaskEnv]) -> list[RewardModel]:
    """Reward models of some environments that are loaded from files, each once.

    Args:
        envs: which.
    """
    parts = (part for env in envs for part in env.transforms_of(RewardFunctions))
    scoring = (each for part in parts for each in part.functions.values())
    found = dict.fromkeys(each for each in scoring if isinstance(each, RewardModel))
    return [each for each in found if each.source is not None]


def check_reward_models(envs: Iterable[TaskEnv]) -> None:
    """Check that the reward models of some environments can be loaded, without their weights.

    Args:
        envs: which.

    Raises:
        SettingsError: one can't.
    """
    for each in task_reward_models(envs):
        with refusing(f"task.rewards={each.source}", foreign=True):
            outline(
                str(each.source),
                AutoModelForSequenceClassification,
                dtype=torch.float32,
                any_head=True,
            )


def load_reward_models(envs: Iterable[TaskEnv], device: str | None) -> None:
    """Load the weights of the reward models of some environments.

    Args:
        envs: which.
        device: where to; the accelerator, if there is one, when not given.

    Raises:
        SettingsError: files lack some.
    """
    for each in task_reward_models(envs):
        with refusing(f"task.rewards={each.source}", foreign=True):
            each.load(device)
