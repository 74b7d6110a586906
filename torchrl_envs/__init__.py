"""Environments: conversations, and transforms that add data, tools, rewards and limits."""

from typing import TYPE_CHECKING

from torchrl_data import lazy_names

if TYPE_CHECKING:
    from torchrl.envs import LLMHashingEnv as LLMHashingEnv
    from torchrl.envs.transforms import StepCounter as StepCounter

    from torchrl_tasks.ifeval.ifeval import IFEvalEnv as IFEvalEnv
    from torchrl_tasks.ifeval.ifeval import IFEvalScoreData as IFEvalScoreData
    from torchrl_tasks.ifeval.ifeval import IfEvalScorer as IfEvalScorer
    from torchrl_tasks.mlgym.wrapper import MLGymWrapper as MLGymWrapper
    from torchrl_tasks.mlgym.wrapper import make_mlgym as make_mlgym

    from .agents.agent_command import AgentCommand as AgentCommand
    from .agents.agent_command import AgentEndpoint as AgentEndpoint
    from .agents.agent_program import AgentProgram as AgentProgram
    from .answerers.chat_completions import ChatCompletions as ChatCompletions
    from .answerers.policy_answers import PolicyAnswers as PolicyAnswers
    from .compat.dataset_chat_env import DatasetChatEnv as DatasetChatEnv
    from .compat.llm_env import LLMEnv as LLMEnv
    from .concurrency.outcome import EpisodeLostError as EpisodeLostError
    from .datasets.difficulty_pools import DifficultyPools as DifficultyPools
    from .datasets.loading import load_rows as load_rows
    from .datasets.options import DataOptions as DataOptions
    from .datasets.primer import DataExhaustedError as DataExhaustedError
    from .datasets.primer import DataLoadingPrimer as DataLoadingPrimer
    from .datasets.prompt_limit import PromptLimit as PromptLimit
    from .entries.stacking import as_nested_tensor as as_nested_tensor
    from .entries.stacking import as_padded_tensor as as_padded_tensor
    from .episode.chat_env import ChatEnv as ChatEnv
    from .episode.episode import Episode as Episode
    from .episode.episode_env import EpisodeEnv as EpisodeEnv
    from .episode.episode_transform import EpisodeStartError as EpisodeStartError
    from .episode.episode_transform import EpisodeTransform as EpisodeTransform
    from .episode.reward_error_limit import RewardErrorLimit as RewardErrorLimit
    from .episode.reward_error_limit import TooManyRewardErrors as TooManyRewardErrors
    from .episode.tool_source import Answer as Answer
    from .episode.tool_source import Job as Job
    from .episode.tool_source import ToolSource as ToolSource
    from .graders.llm_judge import LLMJudge as LLMJudge
    from .graders.math_verify import MathVerifyReward as MathVerifyReward
    from .graders.repetition import RepetitionPenalty as RepetitionPenalty
    from .graders.reward_model import RewardModel as RewardModel
    from .rewards.answer import AnswerReward as AnswerReward
    from .rewards.functions import RewardFunctions as RewardFunctions
    from .rewards.kl import KLComputation as KLComputation
    from .rewards.kl import KLRewardTransform as KLRewardTransform
    from .rewards.kl import RetrieveKL as RetrieveKL
    from .rewards.kl import RetrieveLogProb as RetrieveLogProb
    from .rewards.metrics import reward_metrics as reward_metrics
    from .rewards.privileged_log_probs import RetrievePrivilegedLogProb as RetrievePrivilegedLogProb
    from .rewards.privileged_prompts import DemonstrationPrompt as DemonstrationPrompt
    from .rewards.privileged_prompts import FeedbackPrompt as FeedbackPrompt
    from .rewards.privileged_prompts import FinishedRollout as FinishedRollout
    from .rewards.scoring_call import row_reward as row_reward
    from .rewards.span_log_probs import RetrieveSpanLogProb as RetrieveSpanLogProb
    from .sandbox import ProgramLimits as ProgramLimits
    from .sandbox import Sandbox as Sandbox
    from .sandbox import SandboxLimits as SandboxLimits
    from .sandbox import SandboxResult as SandboxResult
    from .sandbox import SandboxSession as SandboxSession
    from .tasks.countdown import CountdownEnv as CountdownEnv
    from .tasks.countdown import CountdownRewardParser as CountdownRewardParser
    from .tasks.gsm8k import GSM8KEnv as GSM8KEnv
    from .tasks.gsm8k import GSM8KPrepareQuestion as GSM8KPrepareQuestion
    from .tasks.gsm8k import GSM8KRewardParser as GSM8KRewardParser
    from .tasks.gsm8k import make_gsm8k_env as make_gsm8k_env
    from .tasks.math_problems import MATHEnv as MATHEnv
    from .testing.environment_rules import EnvironmentRuleError as EnvironmentRuleError
    from .testing.environment_rules import check_env as check_env
    from .tool_schemas import user_tool as user_tool
    from .tools.browser import BrowserTransform as BrowserTransform
    from .tools.environments import EnvironmentTools as EnvironmentTools
    from .tools.functions import FunctionTools as FunctionTools
    from .tools.mcp import MCPToolTransform as MCPToolTransform
    from .tools.python_interpreter import PythonInterpreter as PythonInterpreter
    from .tools.step_environments import StepEnvironments as StepEnvironments
    from .transforms.branch_rollouts import BranchRollouts as BranchRollouts
    from .transforms.drop_reasoning import DropReasoning as DropReasoning
    from .transforms.fold_context import FoldContext as FoldContext
    from .transforms.policy_version import PolicyVersion as PolicyVersion
    from .transforms.simulated_user import SimulatedUser as SimulatedUser
    from .transforms.thinking_prompt import AddThinkingPrompt as AddThinkingPrompt
    from .transforms.token_budget import TokenBudget as TokenBudget
    from .transforms.tokenizer import TemplateTransform as TemplateTransform
    from .transforms.tokenizer import Tokenizer as Tokenizer


__getattr__ = lazy_names(__name__, __file__)
