"""Ways in which a trainer's weights reach a policy; one a file."""

from typing import TYPE_CHECKING

from torchrl_data import lazy_names

if TYPE_CHECKING:
    from .updaters import InProcessUpdater, WeightUpdater, vLLMUpdater
    from .weights import contribute_weights, gathered_state_dict

__all__ = [
    "InProcessUpdater",
    "WeightUpdater",
    "contribute_weights",
    "gathered_state_dict",
    "vLLMUpdater",
]

__getattr__ = lazy_names(__name__, __file__)
