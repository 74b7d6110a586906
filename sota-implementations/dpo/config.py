"""Settings of preference learning, typed, with what they mean; ``dpo.py --help`` shows all."""

from __future__ import annotations

from dataclasses import dataclass, field

from objectives.losses.dpo_options import DPOOptions
from torchrl_agents.settings.field_rules import AT_LEAST_1, setting
from torchrl_agents.settings.option_settings import option_settings
from torchrl_agents.settings.schema import (
    EpisodeConfig,
    PairsConfig,
    TrainConfig,
    TrainingConfig,
)

_OptionSettings = option_settings(
    "PreferenceOptions",
    DPOOptions,
    leave_out=("temperature", "max_tokens", "masking_strategy"),
)
"""The options of the loss, but for those that have no meaning for whole answers."""


@dataclass
class PreferenceLossConfig(_OptionSettings):
    """The loss; see docs/preferences.md. None takes the loss's own."""


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
