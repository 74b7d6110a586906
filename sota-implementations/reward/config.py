"""Settings of the training of a reward model, typed; ``reward.py --help`` shows all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from objectives.losses.reward_model_options import RewardModelOptions
from torchrl_agents.settings.field_rules import AT_LEAST_0, AT_LEAST_1, FINITE, setting
from torchrl_agents.settings.option_settings import option_settings
from torchrl_agents.settings.schema import (
    EpisodeConfig,
    EvaluateConfig,
    PairsConfig,
    TrainConfig,
    TrainingConfig,
)

_OptionSettings = option_settings("RewardModelOptionSettings", RewardModelOptions)
_NO_TEXT: Final = "a reward model samples nothing"
_NO_EPISODE: Final = "nothing acts in the task; its prompts and demonstrations alone are used"
_NO_ENGINE: Final = "the model that is trained reads the pairs itself"
_NO_SPLIT: Final = "a layer, or a row, is not shared out to ranks here; train.parallel=fsdp2 shards"

UNUSED: Final = {
    "episodes": _NO_EPISODE,
    "policy.show_tool_schemas": "rewards in a run are of messages alone, without schemas of tools",
    "policy.load_in_4bit": "the model that is trained has whole weights",
    "policy.quantization": "the model that is trained computes with whole numbers",
    **dict.fromkeys(
        (
            *("policy.tool_call_format", "policy.max_new_tokens", "policy.stop"),
            *("policy.temperature", "policy.top_p", "policy.top_k", "policy.min_p"),
            *("policy.sampling_mask", "policy.routed_experts"),
        ),
        _NO_TEXT,
    ),
    **dict.fromkeys(
        (
            *("engine.url", "engine.urls", "engine.num_engines", "engine.devices"),
            *("engine.nodes", "engine.per_node"),
            *("engine.engine_kwargs", "engine.batch_invariant", "engine.colocate"),
        ),
        _NO_ENGINE,
    ),
    **dict.fromkeys(
        (
            *("evaluate.num_prompts", "evaluate.num_samples", "evaluate.ks"),
            *("evaluate.solved_at", "evaluate.solved_by", "evaluate.max_rollouts"),
        ),
        "data.num_held_out pairs are tested, and no prompts are answered",
    ),
    **dict.fromkeys(
        (
            *("train.tensor_parallel_size", "train.expert_parallel_size"),
            "train.context_parallel_size",
        ),
        _NO_SPLIT,
    ),
}
"""Settings of all recipes without an effect here."""


@dataclass
class RewardLossConfig(_OptionSettings):
    """The loss; see docs/preferences.md. None takes the loss's own."""


@dataclass
class RewardEvaluateConfig(EvaluateConfig):
    """The test of the held-out pairs, before and after training."""

    every: int | None = setting(10, AT_LEAST_1)
    """Also every so many steps; all tests are in evaluations.jsonl, and as held_out/ where metrics
    go. None: only before and after."""
    num_prompts: int = 1
    num_shown: int = 3
    """Pairs that are shown, with their rewards."""


@dataclass
class RewardTrainConfig(TrainConfig):
    """Training of a reward model."""

    num_steps: int = setting(200, AT_LEAST_0)
    """0 tests a reward model and makes no step."""
    batch_size: int = setting(32, AT_LEAST_1)
    """Pairs of a step."""
    stop_at: float | None = setting(None, FINITE)
    """The run ends after a test (evaluate.every) whose held-out accuracy is at least this."""


@dataclass
class RewardConfig(TrainingConfig):
    """Settings of ``reward.py``."""

    data: PairsConfig = field(default_factory=PairsConfig)
    loss: RewardLossConfig = field(default_factory=RewardLossConfig)
    episodes: EpisodeConfig = field(default_factory=EpisodeConfig)
    train: RewardTrainConfig = field(default_factory=RewardTrainConfig)
    evaluate: RewardEvaluateConfig = field(default_factory=RewardEvaluateConfig)
