"""Environments: conversations, and transforms that add data, tools, rewards and limits."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl.envs.transforms import StepCounter

    from .chat_env import ChatEnv
    from .conformance import EnvironmentRuleError, check_env
    from .dataset_chat_env import DatasetChatEnv
    from .episode_env import EpisodeEnv
    from .episode_lost import EpisodeLostError
    from .graders.judges import ChatCompletions, PolicyAnswers
    from .graders.llm_judge import LLMJudge
    from .graders.math_verify_reward import MathVerifyReward
    from .graders.reward_model import RewardModel
    from .hashing_env import LLMHashingEnv
    from .llm_env import LLMEnv
    from .reward_calls import row_reward
    from .reward_error_limit import RewardErrorLimit, TooManyRewardErrors
    from .reward_logging import reward_metrics
    from .sandbox import Sandbox, SandboxLimits, SandboxResult, SandboxSession
    from .stacking import as_nested_tensor, as_padded_tensor
    from .tasks.countdown import CountdownEnv, CountdownRewardParser
    from .tasks.gsm8k import GSM8KEnv, GSM8KPrepareQuestion, GSM8KRewardParser, make_gsm8k_env
    from .tasks.ifeval import IFEvalEnv, IFEvalScoreData, IfEvalScorer
    from .tasks.math_problems import MATHEnv
    from .tasks.mlgym_env import MLGymWrapper, make_mlgym
    from .transforms.answer_reward import AnswerReward
    from .transforms.browser import BrowserTransform
    from .transforms.data_loading import DataExhaustedError, DataLoadingPrimer
    from .transforms.environment_tools import EnvironmentTools
    from .transforms.episode_transform import EpisodeTransform
    from .transforms.function_tools import FunctionTools
    from .transforms.kl import KLComputation, KLRewardTransform, RetrieveKL, RetrieveLogProb
    from .transforms.mcp_tools import MCPToolTransform
    from .transforms.policy_version import PolicyVersion
    from .transforms.python_interpreter import PythonInterpreter
    from .transforms.reward_functions import RewardFunctions
    from .transforms.thinking_prompt import AddThinkingPrompt
    from .transforms.token_budget import TokenBudget
    from .transforms.tokenizer import TemplateTransform, Tokenizer
    from .transforms.tool_source import Answer, Job, ToolSource

_HOMES = {
    "AddThinkingPrompt": "torchrl_envs.transforms.thinking_prompt",
    "Answer": "torchrl_envs.transforms.tool_source",
    "AnswerReward": "torchrl_envs.transforms.answer_reward",
    "BrowserTransform": "torchrl_envs.transforms.browser",
    "ChatCompletions": "torchrl_envs.graders.judges",
    "ChatEnv": "torchrl_envs.chat_env",
    "CountdownEnv": "torchrl_envs.tasks.countdown",
    "CountdownRewardParser": "torchrl_envs.tasks.countdown",
    "DataExhaustedError": "torchrl_envs.transforms.data_loading",
    "DataLoadingPrimer": "torchrl_envs.transforms.data_loading",
    "DatasetChatEnv": "torchrl_envs.dataset_chat_env",
    "EnvironmentRuleError": "torchrl_envs.conformance",
    "EnvironmentTools": "torchrl_envs.transforms.environment_tools",
    "EpisodeEnv": "torchrl_envs.episode_env",
    "EpisodeLostError": "torchrl_envs.episode_lost",
    "EpisodeTransform": "torchrl_envs.transforms.episode_transform",
    "FunctionTools": "torchrl_envs.transforms.function_tools",
    "GSM8KEnv": "torchrl_envs.tasks.gsm8k",
    "GSM8KPrepareQuestion": "torchrl_envs.tasks.gsm8k",
    "GSM8KRewardParser": "torchrl_envs.tasks.gsm8k",
    "IFEvalEnv": "torchrl_envs.tasks.ifeval",
    "IFEvalScoreData": "torchrl_envs.tasks.ifeval",
    "IfEvalScorer": "torchrl_envs.tasks.ifeval",
    "Job": "torchrl_envs.transforms.tool_source",
    "KLComputation": "torchrl_envs.transforms.kl",
    "KLRewardTransform": "torchrl_envs.transforms.kl",
    "LLMEnv": "torchrl_envs.llm_env",
    "LLMHashingEnv": "torchrl_envs.hashing_env",
    "LLMJudge": "torchrl_envs.graders.llm_judge",
    "MATHEnv": "torchrl_envs.tasks.math_problems",
    "MCPToolTransform": "torchrl_envs.transforms.mcp_tools",
    "MLGymWrapper": "torchrl_envs.tasks.mlgym_env",
    "MathVerifyReward": "torchrl_envs.graders.math_verify_reward",
    "PolicyAnswers": "torchrl_envs.graders.judges",
    "PolicyVersion": "torchrl_envs.transforms.policy_version",
    "PythonInterpreter": "torchrl_envs.transforms.python_interpreter",
    "RetrieveKL": "torchrl_envs.transforms.kl",
    "RetrieveLogProb": "torchrl_envs.transforms.kl",
    "RewardErrorLimit": "torchrl_envs.reward_error_limit",
    "RewardFunctions": "torchrl_envs.transforms.reward_functions",
    "RewardModel": "torchrl_envs.graders.reward_model",
    "Sandbox": "torchrl_envs.sandbox",
    "SandboxLimits": "torchrl_envs.sandbox",
    "SandboxResult": "torchrl_envs.sandbox",
    "SandboxSession": "torchrl_envs.sandbox",
    "StepCounter": "torchrl.envs.transforms",
    "TemplateTransform": "torchrl_envs.transforms.tokenizer",
    "TokenBudget": "torchrl_envs.transforms.token_budget",
    "Tokenizer": "torchrl_envs.transforms.tokenizer",
    "TooManyRewardErrors": "torchrl_envs.reward_error_limit",
    "ToolSource": "torchrl_envs.transforms.tool_source",
    "as_nested_tensor": "torchrl_envs.stacking",
    "as_padded_tensor": "torchrl_envs.stacking",
    "check_env": "torchrl_envs.conformance",
    "make_gsm8k_env": "torchrl_envs.tasks.gsm8k",
    "make_mlgym": "torchrl_envs.tasks.mlgym_env",
    "reward_metrics": "torchrl_envs.reward_logging",
    "row_reward": "torchrl_envs.reward_calls",
}

__all__ = [
    "AddThinkingPrompt",
    "Answer",
    "AnswerReward",
    "BrowserTransform",
    "ChatCompletions",
    "ChatEnv",
    "CountdownEnv",
    "CountdownRewardParser",
    "DataExhaustedError",
    "DataLoadingPrimer",
    "DatasetChatEnv",
    "EnvironmentRuleError",
    "EnvironmentTools",
    "EpisodeEnv",
    "EpisodeLostError",
    "EpisodeTransform",
    "FunctionTools",
    "GSM8KEnv",
    "GSM8KPrepareQuestion",
    "GSM8KRewardParser",
    "IFEvalEnv",
    "IFEvalScoreData",
    "IfEvalScorer",
    "Job",
    "KLComputation",
    "KLRewardTransform",
    "LLMEnv",
    "LLMHashingEnv",
    "LLMJudge",
    "MATHEnv",
    "MCPToolTransform",
    "MLGymWrapper",
    "MathVerifyReward",
    "PolicyAnswers",
    "PolicyVersion",
    "PythonInterpreter",
    "RetrieveKL",
    "RetrieveLogProb",
    "RewardErrorLimit",
    "RewardFunctions",
    "RewardModel",
    "Sandbox",
    "SandboxLimits",
    "SandboxResult",
    "SandboxSession",
    "StepCounter",
    "TemplateTransform",
    "TokenBudget",
    "Tokenizer",
    "TooManyRewardErrors",
    "ToolSource",
    "as_nested_tensor",
    "as_padded_tensor",
    "check_env",
    "make_gsm8k_env",
    "make_mlgym",
    "reward_metrics",
    "row_reward",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
