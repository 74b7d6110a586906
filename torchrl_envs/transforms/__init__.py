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

_HOMES = {
    "AddThinkingPrompt": "torchrl_envs.transforms.thinking_prompt",
    "AnswerReward": "torchrl_envs.rewards.answer",
    "BrowserTransform": "torchrl_envs.tools.browser",
    "DataLoadingPrimer": "torchrl_envs.datasets.primer",
    "EnvironmentTools": "torchrl_envs.tools.environment_tools",
    "EpisodeTransform": "torchrl_envs.episode.episode_transform",
    "FunctionTools": "torchrl_envs.tools.function_tools",
    "KLComputation": "torchrl_envs.rewards.kl",
    "KLRewardTransform": "torchrl_envs.rewards.kl",
    "LLMJudge": "torchrl_envs.graders.llm_judge",
    "MCPToolTransform": "torchrl_envs.tools.mcp_tools",
    "MathVerifyReward": "torchrl_envs.graders.math_verify_reward",
    "PolicyVersion": "torchrl_envs.transforms.policy_version",
    "PythonInterpreter": "torchrl_envs.tools.python_interpreter",
    "RetrieveKL": "torchrl_envs.rewards.kl",
    "RetrieveLogProb": "torchrl_envs.rewards.kl",
    "RewardErrorLimit": "torchrl_envs.episode.episode_env",
    "RewardFunctions": "torchrl_envs.rewards.functions",
    "RewardModel": "torchrl_envs.graders.reward_model",
    "StepCounter": "torchrl.envs.transforms",
    "TemplateTransform": "torchrl_envs.transforms.tokenizer",
    "TokenBudget": "torchrl_envs.transforms.token_budget",
    "Tokenizer": "torchrl_envs.transforms.tokenizer",
    "ToolSource": "torchrl_envs.episode.tool_source",
    "as_nested_tensor": "torchrl_envs.entries.stacking",
    "as_padded_tensor": "torchrl_envs.entries.stacking",
}

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
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
