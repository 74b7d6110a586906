"""Settings of an evaluation, typed, with what they mean; ``evaluate.py --help`` shows all."""

from dataclasses import dataclass, field
from typing import Any, Final

from torchrl_agents.settings.schema import EngineConfig, EpisodeConfig, RecipeConfig


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


GROUPS: Final[dict[str, dict[str, Any]]] = {
    "engine": {
        "transformers": EngineConfig(),
        "vllm": EngineConfig(name="vllm"),
        "chat": EngineConfig(name="chat"),
    }
}
"""The choices of each group that differs."""
