"""Ways in which a trainer's weights reach a policy; one a file."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .updaters import InProcessUpdater, WeightUpdater, vLLMUpdater
    from .weights import contribute_weights, gathered_state_dict

_HOMES = {
    "InProcessUpdater": ".updaters",
    "WeightUpdater": ".updaters",
    "contribute_weights": ".weights",
    "gathered_state_dict": ".weights",
    "vLLMUpdater": ".updaters",
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
