"""Environments: conversations, and transforms that add data, tools, rewards and limits."""

from typing import TYPE_CHECKING

from torchrl_data import lazy_names

if TYPE_CHECKING:
    from torchrl.envs import LLMHashingEnv
    from torchrl.envs.transforms import StepCounter

    from .agents.agent_program import AgentProgram
    from .agents.programs import AgentCommand, AgentEndpoint
    from .compat import DatasetChatEnv, LLMEnv
    from .concurrency import EpisodeLostError
    from .datasets.primer import DataExhaustedError, DataLoadingPrimer, DifficultyPools
    from .datasets.rows import DataOptions, PromptLimit, load_rows
    from .entries import as_nested_tensor, as_padded_tensor
    from .episode.episode import Episode
    from .episode.episode_env import ChatEnv, EpisodeEnv, RewardErrorLimit, TooManyRewardErrors
    from .episode.transform import Answer, EpisodeStartError, EpisodeTransform, Job, ToolSource
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

__all__ = [
    "AddThinkingPrompt", "AgentCommand", "AgentEndpoint", "AgentProgram", "Answer",
    "AnswerReward", "BrowserTransform", "ChatCompletions", "ChatEnv", "CountdownEnv",
    "CountdownRewardParser", "DataExhaustedError", "DataLoadingPrimer", "DataOptions",
    "DatasetChatEnv", "DifficultyPools", "DropReasoning", "EnvironmentRuleError",
    "EnvironmentTools", "Episode", "EpisodeEnv", "EpisodeLostError", "EpisodeStartError",
    "EpisodeTransform", "FoldContext", "FunctionTools", "GSM8KEnv", "GSM8KPrepareQuestion",
    "GSM8KRewardParser", "IFEvalEnv", "IFEvalScoreData", "IfEvalScorer", "Job", "KLComputation",
    "KLRewardTransform", "LLMEnv", "LLMHashingEnv", "LLMJudge", "MATHEnv", "MCPToolTransform",
    "MLGymWrapper", "MathVerifyReward", "PolicyAnswers", "PolicyVersion", "PromptLimit",
    "PythonInterpreter", "RepetitionPenalty", "RetrieveKL", "RetrieveLogProb", "RewardErrorLimit",
    "RewardFunctions", "RewardModel", "Sandbox", "SandboxLimits", "SandboxResult",
    "SandboxSession", "StepCounter", "StepEnvironments", "TemplateTransform", "TokenBudget",
    "Tokenizer", "TooManyRewardErrors", "ToolSource", "as_nested_tensor", "as_padded_tensor",
    "check_env", "load_rows", "make_gsm8k_env", "make_mlgym", "reward_metrics", "row_reward",
]  # fmt: skip

__getattr__ = lazy_names(__name__, __file__)
