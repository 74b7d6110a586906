"""Ways in which a trainer's weights reach a policy; one a file."""

from typing import TYPE_CHECKING

from torchrl_data import lazy_names

if TYPE_CHECKING:
    from .in_process_updater import InProcessUpdater as InProcessUpdater
    from .plain_weights import gathered_state_dict as gathered_state_dict
    from .sharded_weights import contribute_weights as contribute_weights
    from .vllm_updater import vLLMUpdater as vLLMUpdater
    from .weight_updater import WeightUpdater as WeightUpdater


__getattr__ = lazy_names(__name__, __file__)
