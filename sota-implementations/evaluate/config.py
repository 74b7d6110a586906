"""Settings of an evaluation, typed, with what they mean; ``evaluate.py --help`` shows all."""

from dataclasses import dataclass, field
from typing import Final

from torchrl_agents.settings.schema import EngineConfig, EpisodeConfig, Recipe, RecipeConfig

ENGINES: Final = ("transformers", "vllm", "chat")


@dataclass
class SamplesConfig:
    """Prompts that were not trained on, and how often each is answered."""

    num_prompts: int = 256
    num_samples: int = 8
    """Rollouts of each prompt."""
    ks: list[int] | None = None
    """Of pass@k and pass^k; none: 1, 2, 4, ... up to num_samples."""
    solved_at: float = 1.0
    """The reward from which on a rollout is correct."""
    level: float = 0.95
    """Of the bootstrap intervals."""
    max_rollouts: int = 256
    """Most rollouts at once, at least those of one prompt."""
    num_shown: int = 3
    """Conversations that are shown."""


@dataclass
class EvaluationConfig(RecipeConfig):
    """Settings of ``evaluate.py``."""

    episodes: EpisodeConfig = field(default_factory=EpisodeConfig)
    evaluate: SamplesConfig = field(default_factory=SamplesConfig)


SETTINGS: Final = Recipe(
    name="evaluate",
    summary="Evaluation: a model, a run's folder or a server on any task.",
    example="task=gsm8k task.dataset=test.jsonl policy.model=outputs/grpo/gsm8k/seed0",
    config=EvaluationConfig,
    groups={"engine": {name: EngineConfig(name=name) for name in ENGINES}},
    pretrained={"policy.gradient_checkpointing": False},
)
