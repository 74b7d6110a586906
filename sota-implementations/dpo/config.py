"""Settings of preference learning, typed, with what they mean; ``dpo.py --help`` shows all."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchrl_agents.settings.field_rules import AT_LEAST_1, setting
from torchrl_agents.settings.preference_loss_config import PreferenceLossConfig
from torchrl_agents.settings.schema import (
    EpisodeConfig,
    PairsConfig,
    TrainConfig,
    TrainingConfig,
)


@dataclass
class DPOTrainConfig(TrainConfig):
    """Preference learning."""

    num_steps: int = 200
    batch_size: int = setting(32, AT_LEAST_1)
    """Pairs of a step."""


@dataclass
class DPOConfig(TrainingConfig):
    """Settings of ``dpo.py``."""

    data: PairsConfig = field(default_factory=PairsConfig)
    loss: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)
    episodes: EpisodeConfig = field(default_factory=EpisodeConfig)
    train: DPOTrainConfig = field(default_factory=DPOTrainConfig)
