"""Transforms that add to a chat environment; one a file.

The transforms of the other folders have their names here too, where TorchRL's users look for them.
"""

from typing import TYPE_CHECKING

from torchrl_data import lazy_names

if TYPE_CHECKING:
    from torchrl.envs.transforms import StepCounter as StepCounter

    from torchrl_envs.datasets.primer import DataLoadingPrimer as DataLoadingPrimer
    from torchrl_envs.entries.stacking import as_nested_tensor as as_nested_tensor
    from torchrl_envs.entries.stacking import as_padded_tensor as as_padded_tensor
    from torchrl_envs.episode.episode_transform import EpisodeTransform as EpisodeTransform
    from torchrl_envs.episode.reward_error_limit import RewardErrorLimit as RewardErrorLimit
    from torchrl_envs.episode.tool_source import ToolSource as ToolSource
    from torchrl_envs.graders.llm_judge import LLMJudge as LLMJudge
    from torchrl_envs.graders.math_verify import MathVerifyReward as MathVerifyReward
    from torchrl_envs.graders.reward_model import RewardModel as RewardModel
    from torchrl_envs.rewards.answer import AnswerReward as AnswerReward
    from torchrl_envs.rewards.functions import RewardFunctions as RewardFunctions
    from torchrl_envs.rewards.kl import KLComputation as KLComputation
    from torchrl_envs.rewards.kl import KLRewardTransform as KLRewardTransform
    from torchrl_envs.rewards.kl import RetrieveKL as RetrieveKL
    from torchrl_envs.rewards.kl import RetrieveLogProb as RetrieveLogProb
    from torchrl_envs.rewards.span_log_probs import RetrieveSpanLogProb as RetrieveSpanLogProb
    from torchrl_envs.tools.browser import BrowserTransform as BrowserTransform
    from torchrl_envs.tools.environments import EnvironmentTools as EnvironmentTools
    from torchrl_envs.tools.functions import FunctionTools as FunctionTools
    from torchrl_envs.tools.mcp import MCPToolTransform as MCPToolTransform
    from torchrl_envs.tools.python_interpreter import PythonInterpreter as PythonInterpreter

    from .branch_rollouts import BranchRollouts as BranchRollouts
    from .policy_version import PolicyVersion as PolicyVersion
    from .simulated_user import SimulatedUser as SimulatedUser
    from .thinking_prompt import AddThinkingPrompt as AddThinkingPrompt
    from .token_budget import TokenBudget as TokenBudget
    from .tokenizer import TemplateTransform as TemplateTransform
    from .tokenizer import Tokenizer as Tokenizer


__getattr__ = lazy_names(__name__, __file__)
