"""Environments on OpenEnv servers, over a thin client of their WebSocket protocol."""

from typing import TYPE_CHECKING

from torchrl_data import lazy_names

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

__all__ = [
    "EnvResult", "OpenEnvCapacityError", "OpenEnvConnectionError", "OpenEnvError",
    "OpenEnvProtocolError", "OpenEnvServerError", "OpenEnvSession", "OpenEnvTimeoutError",
    "OpenEnvTools", "SessionNotResetError",
]  # fmt: skip

__getattr__ = lazy_names(__name__, __file__)
