"""Environments on OpenEnv servers, over a thin client of their WebSocket protocol."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import (
        OpenEnvCapacityError,
        OpenEnvConnectionError,
        OpenEnvError,
        OpenEnvProtocolError,
        OpenEnvServerError,
        OpenEnvTimeoutError,
        SessionNotResetError,
    )
    from .messages import EnvResult
    from .session import OpenEnvSession
    from .tools import OpenEnvTools

_HOMES = {
    "EnvResult": ".messages",
    "OpenEnvCapacityError": ".errors",
    "OpenEnvConnectionError": ".errors",
    "OpenEnvError": ".errors",
    "OpenEnvProtocolError": ".errors",
    "OpenEnvServerError": ".errors",
    "OpenEnvSession": ".session",
    "OpenEnvTimeoutError": ".errors",
    "OpenEnvTools": ".tools",
    "SessionNotResetError": ".errors",
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
