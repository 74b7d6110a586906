"""Settings of self-play, typed, with what they mean; ``--help`` shows all."""

from dataclasses import dataclass, field

from torchrl_agents.settings.schema import CollectorConfig, EpochsTrainConfig, RolloutsConfig


@dataclass
class OpponentsConfig:
    """Past versions of the policy that it plays against, beside itself."""

    every: int | None = None
    """A version is taken before the first step and after every so many; none: it only plays
    itself."""
    max_size: int = 4
    """Versions that are kept; the oldest goes first."""
    share: float = 0.5
    """Of the games of a step, those against a version; one version plays all games of a step."""


@dataclass
class SelfPlayTrainConfig(EpochsTrainConfig):
    """Self-play: both seats of each game are trained."""

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
