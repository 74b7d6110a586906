"""Settings of an evaluation, typed, with what they mean; ``evaluate.py --help`` shows all."""

from dataclasses import dataclass, field
from typing import Final

from torchrl_agents.settings.schema import (
    EngineConfig,
    EpisodeConfig,
    Recipe,
    RecipeConfig,
    SamplesConfig,
)

ENGINES: Final = ("transformers", "vllm", "chat")


@dataclass
class EvaluationConfig(RecipeConfig):
    """Settings of ``evaluate.py``."""

    episodes: EpisodeConfig = field(default_factory=EpisodeConfig)
    evaluate: SamplesConfig = field(default_factory=lambda: SamplesConfig(num_samples=8))


SETTINGS: Final = Recipe(
    name="evaluate",
    summary="Evaluation: a model, a run's folder or a server on any task.",
    example="task=gsm8k task.dataset=test.jsonl policy.model=outputs/grpo/gsm8k/seed0",
    config=EvaluationConfig,
    groups={"engine": {name: EngineConfig(name=name) for name in ENGINES}},
    pretrained={"policy.gradient_checkpointing": False},
)
