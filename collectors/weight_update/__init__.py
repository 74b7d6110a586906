"""Ways in which a trainer's weights reach a policy; one a file."""

from typing import TYPE_CHECKING

from torchrl_data import lazy_names

if TYPE_CHECKING:
    from .updaters import InProcessUpdater as InProcessUpdater
    from .updaters import WeightUpdater as WeightUpdater
    from .updaters import vLLMUpdater as vLLMUpdater
    from .weights import contribute_weights as contribute_weights
    from .weights import gathered_state_dict as gathered_state_dict


__getattr__ = lazy_names(__name__, __file__)
