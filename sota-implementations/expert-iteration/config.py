"""Settings of expert iteration, typed, with what they mean; ``--help`` shows all."""

from dataclasses import dataclass, field

from torchrl_agents.settings.schema import RolloutsConfig, TrainConfig


@dataclass
class ExpertTrainConfig(TrainConfig):
    """Expert iteration: of each group of rollouts, the best are trained on."""

    top_k: int = 4
    """Rollouts kept of each group, at most; none of them at or below the group's median."""
    num_epochs: int | None = None
    """Passes over the rollouts that were kept, an optimizer step each."""
    shuffle_rewards: bool = False
    """A control: rewards are dealt out at random, so nothing can be learnt."""


@dataclass
class ExpertConfig(RolloutsConfig):
    """Settings of ``expert_iteration.py``."""

    train: ExpertTrainConfig = field(default_factory=ExpertTrainConfig)
