"""Settings of self-play, typed, with what they mean; ``--help`` shows all."""

from dataclasses import dataclass, field

from torchrl_agents.settings.field_rules import AT_LEAST_1, NOT_NEGATIVE, interval, setting
from torchrl_agents.settings.schema import CollectorConfig, EpochsTrainConfig, RolloutsConfig


@dataclass
class OpponentsConfig:
    """Past versions of the policy that it plays against, beside itself."""

    every: int | None = setting(None, AT_LEAST_1)
    """A version is taken before the first step and after every so many; none: it only plays
    itself."""
    max_size: int = setting(4, AT_LEAST_1)
    """Versions that are kept; the oldest goes first."""
    share: float = setting(0.5, interval("(0, 1]"))
    """Of the games of a step, those against a version; one version plays all games of a step."""


@dataclass
class SelfPlayTrainConfig(EpochsTrainConfig):
    """Self-play: both seats of each game are trained."""

    baseline_decay: float = setting(0.95, interval("[0, 1)"))
    """Of the running mean of each seat's rewards, which is its baseline."""
    kl_to_ref_coeff: float | None = setting(None, NOT_NEGATIVE)
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
