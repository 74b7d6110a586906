"""Ways in which a trainer's weights reach a policy; one a file."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gathering import gathered_state_dict
    from .in_process import InProcessUpdater
    from .interface import WeightUpdater
    from .sharded import contribute_weights
    from .vllm_updater import vLLMUpdater

_HOMES = {
    "InProcessUpdater": ".in_process",
    "WeightUpdater": ".interface",
    "contribute_weights": ".sharded",
    "gathered_state_dict": ".gathering",
    "vLLMUpdater": ".vllm_updater",
}

__all__ = [
    "InProcessUpdater",
    "WeightUpdater",
    "contribute_weights",
    "gathered_state_dict",
    "vLLMUpdater",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
