"""Settings of the loss of pairs, which recipes of given pairs and of sampled ones share."""

from dataclasses import dataclass

from objectives.losses.dpo_options import DPOOptions

from .option_settings import option_settings

_OptionSettings = option_settings(
    "PreferenceOptions",
    DPOOptions,
    leave_out=("temperature", "max_tokens", "masking_strategy"),
)
"""The options of the loss, but for those that have no meaning for whole answers."""


@dataclass
class PreferenceLossConfig(_OptionSettings):
    """The loss; see docs/preferences.md. None takes the loss's own."""
