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
    "AddThinkingPrompt": "torchrl_envs.transforms.thinking_prompt",
    "AgentCommand": "torchrl_envs.agents.programs",
    "AgentEndpoint": "torchrl_envs.agents.programs",
    "AgentProgram": "torchrl_envs.agents.agent_program",
    "Answer": "torchrl_envs.episode.tool_source",
    "AnswerReward": "torchrl_envs.rewards.answer",
    "BrowserTransform": "torchrl_envs.tools.browser",
    "ChatCompletions": "torchrl_envs.graders.judges",
    "ChatEnv": "torchrl_envs.episode.chat_env",
    "CountdownEnv": "torchrl_envs.tasks.questions",
    "CountdownRewardParser": "torchrl_envs.tasks.questions",
    "DataExhaustedError": "torchrl_envs.datasets.primer",
    "DataLoadingPrimer": "torchrl_envs.datasets.primer",
    "DifficultyPools": "torchrl_envs.datasets.primer",
    "DataOptions": "torchrl_envs.datasets.rows",
    "DatasetChatEnv": "torchrl_envs.compat",
    "EnvironmentRuleError": "torchrl_envs.testing",
    "EnvironmentTools": "torchrl_envs.tools.environments",
    "DropReasoning": "torchrl_envs.transforms.context",
    "Episode": "torchrl_envs.episode.episode",
    "EpisodeEnv": "torchrl_envs.episode.episode_env",
    "EpisodeStartError": "torchrl_envs.episode.transform",
    "EpisodeLostError": "torchrl_envs.concurrency",
    "EpisodeTransform": "torchrl_envs.episode.transform",
    "FoldContext": "torchrl_envs.transforms.context",
    "FunctionTools": "torchrl_envs.tools.functions",
    "GSM8KEnv": "torchrl_envs.tasks.questions",
    "GSM8KPrepareQuestion": "torchrl_envs.tasks.questions",
    "GSM8KRewardParser": "torchrl_envs.tasks.questions",
    "IFEvalEnv": "torchrl_envs.tasks.ifeval",
    "IFEvalScoreData": "torchrl_envs.tasks.ifeval",
    "IfEvalScorer": "torchrl_envs.tasks.ifeval",
    "Job": "torchrl_envs.episode.tool_source",
    "KLComputation": "torchrl_envs.rewards.kl",
    "KLRewardTransform": "torchrl_envs.rewards.kl",
    "LLMEnv": "torchrl_envs.compat",
    "LLMHashingEnv": "torchrl_envs.compat",
    "LLMJudge": "torchrl_envs.graders.judges",
    "MATHEnv": "torchrl_envs.tasks.questions",
    "MCPToolTransform": "torchrl_envs.tools.mcp",
    "MLGymWrapper": "torchrl_envs.tasks.mlgym",
    "MathVerifyReward": "torchrl_envs.graders.answers",
    "PolicyAnswers": "torchrl_envs.graders.judges",
    "PolicyVersion": "torchrl_envs.transforms.policy_version",
    "PromptLimit": "torchrl_envs.datasets.rows",
    "PythonInterpreter": "torchrl_envs.tools.functions",
    "RetrieveKL": "torchrl_envs.rewards.kl",
    "RetrieveLogProb": "torchrl_envs.rewards.kl",
    "RewardErrorLimit": "torchrl_envs.episode.episode_env",
    "RewardFunctions": "torchrl_envs.rewards.functions",
    "RepetitionPenalty": "torchrl_envs.graders.answers",
    "RewardModel": "torchrl_envs.graders.judges",
    "Sandbox": "torchrl_envs.sandbox",
    "SandboxLimits": "torchrl_envs.sandbox",
    "SandboxResult": "torchrl_envs.sandbox",
    "SandboxSession": "torchrl_envs.sandbox",
    "StepEnvironments": "torchrl_envs.tools.environments",
    "StepCounter": "torchrl.envs.transforms",
    "TemplateTransform": "torchrl_envs.transforms.tokenizer",
    "TokenBudget": "torchrl_envs.transforms.context",
    "Tokenizer": "torchrl_envs.transforms.tokenizer",
    "TooManyRewardErrors": "torchrl_envs.episode.episode_env",
    "ToolSource": "torchrl_envs.episode.tool_source",
    "as_nested_tensor": "torchrl_envs.entries",
    "as_padded_tensor": "torchrl_envs.entries",
    "check_env": "torchrl_envs.testing",
    "load_rows": "torchrl_envs.datasets.rows",
    "make_gsm8k_env": "torchrl_envs.tasks.questions",
    "make_mlgym": "torchrl_envs.tasks.mlgym",
    "reward_metrics": "torchrl_envs.rewards.answer",
    "row_reward": "torchrl_envs.rewards.functions",
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
    value = getattr(import_module(_HOMES[name]), name)
    return import_module("torchrl_data.checks").knows_torchrl(value)
