"""Settings of expert iteration, typed, with what they mean; ``--help`` shows all."""

from dataclasses import dataclass, field
from typing import Final

from torchrl_agents.settings.schema import Recipe, RolloutsConfig, TrainConfig


@dataclass
class ExpertTrainConfig(TrainConfig):
    """Expert iteration: of each group of rollouts, the best are trained on."""

    num_steps: int = 40
    top_k: int = 4
    """Rollouts kept of each group, at most."""
    keep_above: str | float = "mean"
    """What their reward is above: mean or median of the group, or a number. With the median, a
    group gives nothing that is more than half solved; with 0.5, all that is right is kept."""
    num_epochs: int | None = None
    """Passes over the rollouts that were kept, an optimizer step each."""
    shuffle_rewards: bool = False
    """A control: rewards are dealt out at random, so nothing can be learnt."""


@dataclass
class ExpertConfig(RolloutsConfig):
    """Settings of ``expert_iteration.py``."""

    train: ExpertTrainConfig = field(default_factory=ExpertTrainConfig)


SETTINGS: Final = Recipe(
    name="expert_iteration",
    summary="Expert iteration: sample, keep the best of each group, fine-tune on them, and again.",
    example="task=gsm8k task.dataset=rows.jsonl policy.model=Qwen/Qwen3-0.6B profile=gpu",
    config=ExpertConfig,
    embedded={"optim.learning_rate": 2e-3},
)
