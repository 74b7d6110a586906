"""Environments on OpenEnv servers, over a thin client of their WebSocket protocol."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .session import (
        EnvResult,
        OpenEnvCapacityError,
        OpenEnvConnectionError,
        OpenEnvError,
        OpenEnvProtocolError,
        OpenEnvServerError,
        OpenEnvSession,
        OpenEnvTimeoutError,
        SessionNotResetError,
    )
    from .tools import OpenEnvTools

_HOMES = {
    "EnvResult": ".session",
    "OpenEnvCapacityError": ".session",
    "OpenEnvConnectionError": ".session",
    "OpenEnvError": ".session",
    "OpenEnvProtocolError": ".session",
    "OpenEnvServerError": ".session",
    "OpenEnvSession": ".session",
    "OpenEnvTimeoutError": ".session",
    "OpenEnvTools": ".tools",
    "SessionNotResetError": ".session",
}

__all__ = [
    "EnvResult",
    "OpenEnvCapacityError",
    "OpenEnvConnectionError",
    "OpenEnvError",
    "OpenEnvProtocolError",
    "OpenEnvServerError",
    "OpenEnvSession",
    "OpenEnvTimeoutError",
    "OpenEnvTools",
    "SessionNotResetError",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
