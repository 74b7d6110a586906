"""Settings of learning from labelled answers, typed; ``kto.py --help`` shows all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from objectives.losses.kto_options import KTOOptions
from torchrl_agents.settings.field_rules import AT_LEAST_1, setting
from torchrl_agents.settings.option_settings import option_settings
from torchrl_agents.settings.schema import (
    EpisodeConfig,
    GivenDataConfig,
    TrainConfig,
    TrainingConfig,
)

_OptionSettings = option_settings(
    "LabelOptions", KTOOptions, leave_out=("temperature", "masking_strategy")
)
"""The options of the loss, but for those that have no meaning for whole answers."""


@dataclass
class LabelLossConfig(_OptionSettings):
    """The loss; see docs/preferences.md. None takes the loss's own."""


@dataclass
class LabelledConfig(GivenDataConfig):
    """Answers that are desirable or not: columns prompt, completion and label, as TRL reads them.

    A row with chosen and rejected instead gives two answers. Without a data set one half of the
    task's demonstrations are desirable answers, and the others get the answer of another question.
    """

    what: ClassVar[str] = "labelled answers"

    shuffle_labels: bool = False
    """A control: labels are drawn at random among the answers, so nothing can be learnt."""


@dataclass
class KTOTrainConfig(TrainConfig):
    """Learning from labelled answers."""

    num_steps: int = 200
    batch_size: int = setting(64, AT_LEAST_1)
    """Answers of a step."""


@dataclass
class KTOConfig(TrainingConfig):
    """Settings of ``kto.py``."""

    data: LabelledConfig = field(default_factory=LabelledConfig)
    loss: LabelLossConfig = field(default_factory=LabelLossConfig)
    episodes: EpisodeConfig = field(default_factory=EpisodeConfig)
    train: KTOTrainConfig = field(default_factory=KTOTrainConfig)
