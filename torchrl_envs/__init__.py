"""Environments: conversations, and transforms that add data, tools, rewards and limits."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl.envs.transforms import StepCounter

    from .chat_env import ChatEnv
    from .episode_env import EpisodeEnv
    from .transforms.data_loading import DataExhaustedError, DataLoadingPrimer
    from .transforms.environment_tools import EnvironmentTools
    from .transforms.episode_transform import EpisodeTransform
    from .transforms.reward_functions import RewardFunctions
    from .transforms.tool_source import Answer, Job, ToolSource

_HOMES = {
    "Answer": "torchrl_envs.transforms.tool_source",
    "ChatEnv": "torchrl_envs.chat_env",
    "DataExhaustedError": "torchrl_envs.transforms.data_loading",
    "DataLoadingPrimer": "torchrl_envs.transforms.data_loading",
    "EnvironmentTools": "torchrl_envs.transforms.environment_tools",
    "EpisodeEnv": "torchrl_envs.episode_env",
    "EpisodeTransform": "torchrl_envs.transforms.episode_transform",
    "Job": "torchrl_envs.transforms.tool_source",
    "RewardFunctions": "torchrl_envs.transforms.reward_functions",
    "StepCounter": "torchrl.envs.transforms",
    "ToolSource": "torchrl_envs.transforms.tool_source",
}

__all__ = [
    "Answer",
    "ChatEnv",
    "DataExhaustedError",
    "DataLoadingPrimer",
    "EnvironmentTools",
    "EpisodeEnv",
    "EpisodeTransform",
    "Job",
    "RewardFunctions",
    "StepCounter",
    "ToolSource",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
