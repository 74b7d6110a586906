"""Environments on OpenEnv servers, over a thin client of their WebSocket protocol."""

from typing import TYPE_CHECKING

from torchrl_data import lazy_names

if TYPE_CHECKING:
    from .errors import OpenEnvCapacityError as OpenEnvCapacityError
    from .errors import OpenEnvConnectionError as OpenEnvConnectionError
    from .errors import OpenEnvError as OpenEnvError
    from .errors import OpenEnvProtocolError as OpenEnvProtocolError
    from .errors import OpenEnvServerError as OpenEnvServerError
    from .errors import OpenEnvTimeoutError as OpenEnvTimeoutError
    from .errors import SessionNotResetError as SessionNotResetError
    from .messages import EnvResult as EnvResult
    from .session import OpenEnvSession as OpenEnvSession
    from .tools import OpenEnvTools as OpenEnvTools


__getattr__ = lazy_names(__name__, __file__)
