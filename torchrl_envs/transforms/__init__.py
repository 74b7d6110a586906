"""Transforms that add to a chat environment; one a file.

The transforms of the other folders have their names here too, where TorchRL's users look for them.
"""

from typing import TYPE_CHECKING

from torchrl_data import lazy_names

if TYPE_CHECKING:
    from torchrl.envs.transforms import StepCounter

    from torchrl_envs.datasets.primer import DataLoadingPrimer
    from torchrl_envs.entries import as_nested_tensor, as_padded_tensor
    from torchrl_envs.episode.episode_env import RewardErrorLimit
    from torchrl_envs.episode.transform import EpisodeTransform, ToolSource
    from torchrl_envs.graders.answers import MathVerifyReward
    from torchrl_envs.graders.judges import LLMJudge, RewardModel
    from torchrl_envs.rewards.answer import AnswerReward
    from torchrl_envs.rewards.functions import RewardFunctions
    from torchrl_envs.rewards.kl import (
        KLComputation,
        KLRewardTransform,
        RetrieveKL,
        RetrieveLogProb,
    )
    from torchrl_envs.tools.browser import BrowserTransform
    from torchrl_envs.tools.environments import EnvironmentTools
    from torchrl_envs.tools.functions import FunctionTools, PythonInterpreter
    from torchrl_envs.tools.mcp import MCPToolTransform

    from .context import TokenBudget
    from .policy_version import PolicyVersion
    from .thinking_prompt import AddThinkingPrompt
    from .tokenizer import TemplateTransform, Tokenizer

__all__ = [
    "AddThinkingPrompt", "AnswerReward", "BrowserTransform", "DataLoadingPrimer",
    "EnvironmentTools", "EpisodeTransform", "FunctionTools", "KLComputation", "KLRewardTransform",
    "LLMJudge", "MCPToolTransform", "MathVerifyReward", "PolicyVersion", "PythonInterpreter",
    "RetrieveKL", "RetrieveLogProb", "RewardErrorLimit", "RewardFunctions", "RewardModel",
    "StepCounter", "TemplateTransform", "TokenBudget", "Tokenizer", "ToolSource",
    "as_nested_tensor", "as_padded_tensor",
]  # fmt: skip

__getattr__ = lazy_names(__name__, __file__)
