"""Environments: conversations, and transforms that add data, tools, rewards and limits."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl.envs.transforms import StepCounter

    from .agents.agent_program import AgentProgram
    from .agents.programs import AgentCommand, AgentEndpoint
    from .compat.hashing_env import LLMHashingEnv
    from .compat.llm_env import LLMEnv
    from .datasets.checks import PromptLimit
    from .datasets.dataset_chat_env import DatasetChatEnv
    from .datasets.difficulty import DifficultyPools
    from .datasets.loading import load_rows
    from .datasets.options import DataOptions
    from .datasets.primer import DataExhaustedError, DataLoadingPrimer
    from .entries.stacking import as_nested_tensor, as_padded_tensor
    from .episode.chat_env import ChatEnv
    from .episode.episode import Episode
    from .episode.episode_env import EpisodeEnv, RewardErrorLimit, TooManyRewardErrors
    from .episode.episode_transform import EpisodeStartError, EpisodeTransform
    from .episode.tool_source import Answer, Job, ToolSource
    from .errors import EpisodeLostError
    from .graders.judges import ChatCompletions, PolicyAnswers
    from .graders.llm_judge import LLMJudge
    from .graders.math_verify_reward import MathVerifyReward
    from .graders.repetition import RepetitionPenalty
    from .graders.reward_model import RewardModel
    from .rewards.answer import AnswerReward
    from .rewards.calls import row_reward
    from .rewards.functions import RewardFunctions
    from .rewards.kl import KLComputation, KLRewardTransform, RetrieveKL, RetrieveLogProb
    from .rewards.metrics import reward_metrics
    from .sandbox import Sandbox, SandboxLimits, SandboxResult, SandboxSession
    from .tasks.countdown import CountdownEnv, CountdownRewardParser
    from .tasks.gsm8k import GSM8KEnv, GSM8KPrepareQuestion, GSM8KRewardParser, make_gsm8k_env
    from .tasks.ifeval import IFEvalEnv, IFEvalScoreData, IfEvalScorer
    from .tasks.math_problems import MATHEnv
    from .tasks.mlgym.env import MLGymWrapper, make_mlgym
    from .testing.check_env import EnvironmentRuleError, check_env
    from .tools.browser import BrowserTransform
    from .tools.environment_tools import EnvironmentTools
    from .tools.function_tools import FunctionTools
    from .tools.mcp_tools import MCPToolTransform
    from .tools.python_interpreter import PythonInterpreter
    from .tools.step_environments import StepEnvironments
    from .transforms.drop_reasoning import DropReasoning
    from .transforms.fold_context import FoldContext
    from .transforms.policy_version import PolicyVersion
    from .transforms.thinking_prompt import AddThinkingPrompt
    from .transforms.token_budget import TokenBudget
    from .transforms.tokenizer import TemplateTransform, Tokenizer

_HOMES = {
    "AddThinkingPrompt": "torchrl_envs.transforms.thinking_prompt",
    "AgentCommand": "torchrl_envs.agents.programs",
    "AgentEndpoint": "torchrl_envs.agents.programs",
    "AgentProgram": "torchrl_envs.agents.agent_program",
    "Answer": "torchrl_envs.episode.tool_source",
    "AnswerReward": "torchrl_envs.rewards.answer",
    "BrowserTransform": "torchrl_envs.tools.browser",
    "ChatCompletions": "torchrl_envs.graders.judges",
    "ChatEnv": "torchrl_envs.episode.chat_env",
    "CountdownEnv": "torchrl_envs.tasks.countdown",
    "CountdownRewardParser": "torchrl_envs.tasks.countdown",
    "DataExhaustedError": "torchrl_envs.datasets.primer",
    "DataLoadingPrimer": "torchrl_envs.datasets.primer",
    "DifficultyPools": "torchrl_envs.datasets.difficulty",
    "DataOptions": "torchrl_envs.datasets.options",
    "DatasetChatEnv": "torchrl_envs.datasets.dataset_chat_env",
    "EnvironmentRuleError": "torchrl_envs.testing.check_env",
    "EnvironmentTools": "torchrl_envs.tools.environment_tools",
    "DropReasoning": "torchrl_envs.transforms.drop_reasoning",
    "Episode": "torchrl_envs.episode.episode",
    "EpisodeEnv": "torchrl_envs.episode.episode_env",
    "EpisodeStartError": "torchrl_envs.episode.episode_transform",
    "EpisodeLostError": "torchrl_envs.errors",
    "EpisodeTransform": "torchrl_envs.episode.episode_transform",
    "FoldContext": "torchrl_envs.transforms.fold_context",
    "FunctionTools": "torchrl_envs.tools.function_tools",
    "GSM8KEnv": "torchrl_envs.tasks.gsm8k",
    "GSM8KPrepareQuestion": "torchrl_envs.tasks.gsm8k",
    "GSM8KRewardParser": "torchrl_envs.tasks.gsm8k",
    "IFEvalEnv": "torchrl_envs.tasks.ifeval",
    "IFEvalScoreData": "torchrl_envs.tasks.ifeval",
    "IfEvalScorer": "torchrl_envs.tasks.ifeval",
    "Job": "torchrl_envs.episode.tool_source",
    "KLComputation": "torchrl_envs.rewards.kl",
    "KLRewardTransform": "torchrl_envs.rewards.kl",
    "LLMEnv": "torchrl_envs.compat.llm_env",
    "LLMHashingEnv": "torchrl_envs.compat.hashing_env",
    "LLMJudge": "torchrl_envs.graders.llm_judge",
    "MATHEnv": "torchrl_envs.tasks.math_problems",
    "MCPToolTransform": "torchrl_envs.tools.mcp_tools",
    "MLGymWrapper": "torchrl_envs.tasks.mlgym.env",
    "MathVerifyReward": "torchrl_envs.graders.math_verify_reward",
    "PolicyAnswers": "torchrl_envs.graders.judges",
    "PolicyVersion": "torchrl_envs.transforms.policy_version",
    "PromptLimit": "torchrl_envs.datasets.checks",
    "PythonInterpreter": "torchrl_envs.tools.python_interpreter",
    "RetrieveKL": "torchrl_envs.rewards.kl",
    "RetrieveLogProb": "torchrl_envs.rewards.kl",
    "RewardErrorLimit": "torchrl_envs.episode.episode_env",
    "RewardFunctions": "torchrl_envs.rewards.functions",
    "RepetitionPenalty": "torchrl_envs.graders.repetition",
    "RewardModel": "torchrl_envs.graders.reward_model",
    "Sandbox": "torchrl_envs.sandbox",
    "SandboxLimits": "torchrl_envs.sandbox",
    "SandboxResult": "torchrl_envs.sandbox",
    "SandboxSession": "torchrl_envs.sandbox",
    "StepEnvironments": "torchrl_envs.tools.step_environments",
    "StepCounter": "torchrl.envs.transforms",
    "TemplateTransform": "torchrl_envs.transforms.tokenizer",
    "TokenBudget": "torchrl_envs.transforms.token_budget",
    "Tokenizer": "torchrl_envs.transforms.tokenizer",
    "TooManyRewardErrors": "torchrl_envs.episode.episode_env",
    "ToolSource": "torchrl_envs.episode.tool_source",
    "as_nested_tensor": "torchrl_envs.entries.stacking",
    "as_padded_tensor": "torchrl_envs.entries.stacking",
    "check_env": "torchrl_envs.testing.check_env",
    "load_rows": "torchrl_envs.datasets.loading",
    "make_gsm8k_env": "torchrl_envs.tasks.gsm8k",
    "make_mlgym": "torchrl_envs.tasks.mlgym.env",
    "reward_metrics": "torchrl_envs.rewards.metrics",
    "row_reward": "torchrl_envs.rewards.calls",
}

__all__ = [
    "AddThinkingPrompt",
    "AgentCommand",
    "AgentEndpoint",
    "AgentProgram",
    "Answer",
    "AnswerReward",
    "BrowserTransform",
    "ChatCompletions",
    "ChatEnv",
    "CountdownEnv",
    "CountdownRewardParser",
    "DataExhaustedError",
    "DataLoadingPrimer",
    "DataOptions",
    "DatasetChatEnv",
    "DifficultyPools",
    "DropReasoning",
    "EnvironmentRuleError",
    "EnvironmentTools",
    "Episode",
    "EpisodeEnv",
    "EpisodeLostError",
    "EpisodeStartError",
    "EpisodeTransform",
    "FoldContext",
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
    "PromptLimit",
    "PythonInterpreter",
    "RepetitionPenalty",
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
    "StepEnvironments",
    "TemplateTransform",
    "TokenBudget",
    "Tokenizer",
    "TooManyRewardErrors",
    "ToolSource",
    "as_nested_tensor",
    "as_padded_tensor",
    "check_env",
    "load_rows",
    "make_gsm8k_env",
    "make_mlgym",
    "reward_metrics",
    "row_reward",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("torchrl_data").__version__
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
