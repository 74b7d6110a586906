"""Settings of online preference learning, typed; ``online_dpo.py --help`` shows all."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchrl_agents.settings.field_rules import NOT_NEGATIVE, setting
from torchrl_agents.settings.preference_loss_config import PreferenceLossConfig
from torchrl_agents.settings.schema import EpochsTrainConfig, RolloutsConfig


@dataclass
class OnlineDPOTrainConfig(EpochsTrainConfig):
    """Online preference learning: of each group of rollouts, the best and the worst are a pair."""

    min_difference: float = setting(0.0, NOT_NEGATIVE)
    """By which the rewards of the two differ at least; rollouts of equal reward are never a
    pair."""
    shuffle_rewards: bool = False
    """A control: rewards are dealt out at random, so nothing can be learnt."""


@dataclass
class OnlineDPOConfig(RolloutsConfig):
    """Settings of ``online_dpo.py``."""

    loss: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)
    train: OnlineDPOTrainConfig = field(default_factory=OnlineDPOTrainConfig)
