"""Environments: conversations, and transforms that add data, tools, rewards and limits."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl.envs.transforms import StepCounter

    from .agents.agent_program import AgentProgram
    from .agents.programs import AgentCommand, AgentEndpoint
    from .compat import DatasetChatEnv, LLMEnv, LLMHashingEnv
    from .concurrency import EpisodeLostError
    from .datasets.primer import DataExhaustedError, DataLoadingPrimer, DifficultyPools
    from .datasets.rows import DataOptions, PromptLimit, load_rows
    from .entries import as_nested_tensor, as_padded_tensor
    from .episode.chat_env import ChatEnv
    from .episode.episode import Episode
    from .episode.episode_env import EpisodeEnv, RewardErrorLimit, TooManyRewardErrors
    from .episode.tool_source import Answer, Job, ToolSource
    from .episode.transform import EpisodeStartError, EpisodeTransform
    from .graders.answers import MathVerifyReward, RepetitionPenalty
    from .graders.judges import ChatCompletions, LLMJudge, PolicyAnswers, RewardModel
    from .rewards.answer import AnswerReward, reward_metrics
    from .rewards.functions import RewardFunctions, row_reward
    from .rewards.kl import KLComputation, KLRewardTransform, RetrieveKL, RetrieveLogProb
    from .sandbox import Sandbox, SandboxLimits, SandboxResult, SandboxSession
    from .tasks.ifeval import IFEvalEnv, IFEvalScoreData, IfEvalScorer
    from .tasks.mlgym import MLGymWrapper, make_mlgym
    from .tasks.questions import (
        CountdownEnv,
        CountdownRewardParser,
        GSM8KEnv,
        GSM8KPrepareQuestion,
        GSM8KRewardParser,
        MATHEnv,
        make_gsm8k_env,
    )
    from .testing import EnvironmentRuleError, check_env
    from .tools.browser import BrowserTransform
    from .tools.environments import EnvironmentTools, StepEnvironments
    from .tools.functions import FunctionTools, PythonInterpreter
    from .tools.mcp import MCPToolTransform
    from .transforms.context import DropReasoning, FoldContext, TokenBudget
    from .transforms.policy_version import PolicyVersion
    from .transforms.thinking_prompt import AddThinkingPrompt
    from .transforms.tokenizer import TemplateTransform, Tokenizer

_HOMES = {
    "torchrl.envs.transforms": "StepCounter",
    "torchrl_envs.agents.agent_program": "AgentProgram",
    "torchrl_envs.agents.programs": "AgentCommand AgentEndpoint",
    "torchrl_envs.compat": "DatasetChatEnv LLMEnv LLMHashingEnv",
    "torchrl_envs.concurrency": "EpisodeLostError",
    "torchrl_envs.datasets.primer": "DataExhaustedError DataLoadingPrimer DifficultyPools",
    "torchrl_envs.datasets.rows": "DataOptions PromptLimit load_rows",
    "torchrl_envs.entries": "as_nested_tensor as_padded_tensor",
    "torchrl_envs.episode.chat_env": "ChatEnv",
    "torchrl_envs.episode.episode": "Episode",
    "torchrl_envs.episode.episode_env": "EpisodeEnv RewardErrorLimit TooManyRewardErrors",
    "torchrl_envs.episode.tool_source": "Answer Job ToolSource",
    "torchrl_envs.episode.transform": "EpisodeStartError EpisodeTransform",
    "torchrl_envs.graders.answers": "MathVerifyReward RepetitionPenalty",
    "torchrl_envs.graders.judges": "ChatCompletions LLMJudge PolicyAnswers RewardModel",
    "torchrl_envs.rewards.answer": "AnswerReward reward_metrics",
    "torchrl_envs.rewards.functions": "RewardFunctions row_reward",
    "torchrl_envs.rewards.kl": "KLComputation KLRewardTransform RetrieveKL RetrieveLogProb",
    "torchrl_envs.sandbox": "Sandbox SandboxLimits SandboxResult SandboxSession",
    "torchrl_envs.tasks.ifeval": "IFEvalEnv IFEvalScoreData IfEvalScorer",
    "torchrl_envs.tasks.mlgym": "MLGymWrapper make_mlgym",
    "torchrl_envs.tasks.questions": "CountdownEnv CountdownRewardParser GSM8KEnv "
    "GSM8KPrepareQuestion GSM8KRewardParser MATHEnv make_gsm8k_env",
    "torchrl_envs.testing": "EnvironmentRuleError check_env",
    "torchrl_envs.tools.browser": "BrowserTransform",
    "torchrl_envs.tools.environments": "EnvironmentTools StepEnvironments",
    "torchrl_envs.tools.functions": "FunctionTools PythonInterpreter",
    "torchrl_envs.tools.mcp": "MCPToolTransform",
    "torchrl_envs.transforms.context": "DropReasoning FoldContext TokenBudget",
    "torchrl_envs.transforms.policy_version": "PolicyVersion",
    "torchrl_envs.transforms.thinking_prompt": "AddThinkingPrompt",
    "torchrl_envs.transforms.tokenizer": "TemplateTransform Tokenizer",
}
"""Each module with its public names."""
_MODULES = {name: module for module, names in _HOMES.items() for name in names.split()}

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
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    return import_module("torchrl_data.checks").knows_torchrl(value)
