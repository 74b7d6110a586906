"""Environments on OpenEnv servers, over a thin client of their WebSocket protocol."""

from typing import TYPE_CHECKING

from torchrl_data import lazy_names

if TYPE_CHECKING:
    from .session import EnvResult as EnvResult
    from .session import OpenEnvCapacityError as OpenEnvCapacityError
    from .session import OpenEnvConnectionError as OpenEnvConnectionError
    from .session import OpenEnvError as OpenEnvError
    from .session import OpenEnvProtocolError as OpenEnvProtocolError
    from .session import OpenEnvServerError as OpenEnvServerError
    from .session import OpenEnvSession as OpenEnvSession
    from .session import OpenEnvTimeoutError as OpenEnvTimeoutError
    from .session import SessionNotResetError as SessionNotResetError
    from .tools import OpenEnvTools as OpenEnvTools


__getattr__ = lazy_names(__name__, __file__)
