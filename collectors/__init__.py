"""Collectors: a policy in an environment fills a replay buffer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .llm_collector import LLMCollector
    from .weight_update.in_process import InProcessUpdater
    from .weight_update.interface import WeightUpdater

_HOMES = {
    "InProcessUpdater": ".weight_update.in_process",
    "LLMCollector": ".llm_collector",
    "WeightUpdater": ".weight_update.interface",
}

__all__ = ["InProcessUpdater", "LLMCollector", "WeightUpdater"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
