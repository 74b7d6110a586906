"""Transforms that add to a chat environment; one a file.

The transforms of the other folders have their names here too, where TorchRL's users look for them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl.envs.transforms import StepCounter

    from torchrl_envs.datasets.primer import DataLoadingPrimer
    from torchrl_envs.entries.stacking import as_nested_tensor, as_padded_tensor
    from torchrl_envs.episode.episode_env import RewardErrorLimit
    from torchrl_envs.episode.episode_transform import EpisodeTransform
    from torchrl_envs.episode.tool_source import ToolSource
    from torchrl_envs.graders.llm_judge import LLMJudge
    from torchrl_envs.graders.math_verify_reward import MathVerifyReward
    from torchrl_envs.graders.reward_model import RewardModel
    from torchrl_envs.rewards.answer import AnswerReward
    from torchrl_envs.rewards.functions import RewardFunctions
    from torchrl_envs.rewards.kl import (
        KLComputation,
        KLRewardTransform,
        RetrieveKL,
        RetrieveLogProb,
    )
    from torchrl_envs.tools.browser import BrowserTransform
    from torchrl_envs.tools.environment_tools import EnvironmentTools
    from torchrl_envs.tools.function_tools import FunctionTools
    from torchrl_envs.tools.mcp_tools import MCPToolTransform
    from torchrl_envs.tools.python_interpreter import PythonInterpreter

    from .policy_version import PolicyVersion
    from .thinking_prompt import AddThinkingPrompt
    from .token_budget import TokenBudget
    from .tokenizer import TemplateTransform, Tokenizer

__all__ = [
    "AddThinkingPrompt",
    "AnswerReward",
    "BrowserTransform",
    "DataLoadingPrimer",
    "EnvironmentTools",
    "EpisodeTransform",
    "FunctionTools",
    "KLComputation",
    "KLRewardTransform",
    "LLMJudge",
    "MCPToolTransform",
    "MathVerifyReward",
    "PolicyVersion",
    "PythonInterpreter",
    "RetrieveKL",
    "RetrieveLogProb",
    "RewardErrorLimit",
    "RewardFunctions",
    "RewardModel",
    "StepCounter",
    "TemplateTransform",
    "TokenBudget",
    "Tokenizer",
    "ToolSource",
    "as_nested_tensor",
    "as_padded_tensor",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("torchrl_envs"), name)
