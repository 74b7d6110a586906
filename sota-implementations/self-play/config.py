"""Settings of self-play, typed, with what they mean; ``--help`` shows all."""

from dataclasses import dataclass, field

from games import OpponentsConfig

from torchrl_agents.settings.schema import CollectorConfig, RolloutsConfig, TrainConfig


@dataclass
class SelfPlayTrainConfig(TrainConfig):
    """Self-play: both seats of each game are trained."""

    num_epochs: int | None = None
    """Passes over the games of a step, an optimizer step each."""
    baseline_decay: float = 0.95
    """Of the running mean of each seat's rewards, which is its baseline."""
    kl_to_ref_coeff: float | None = None
    """Weight of the KL to the model that it started from; without one early games decide for
    good which moves are tried at all."""
    shuffle_rewards: bool = False
    """A control: rewards are dealt out at random, so nothing can be learnt."""


@dataclass
class SelfPlayConfig(RolloutsConfig):
    """Settings of ``self_play.py``."""

    collector: CollectorConfig = field(
        default_factory=lambda: CollectorConfig(num_prompts=128, group_size=2)
    )
    train: SelfPlayTrainConfig = field(default_factory=SelfPlayTrainConfig)
    opponents: OpponentsConfig = field(default_factory=OpponentsConfig)
