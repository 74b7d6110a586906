"""Errors of a session of an OpenEnv server."""

from typing import Any

from torchrl_envs.concurrency.outcome import EpisodeLostError


class OpenEnvError(Exception):
    """The server or the connection to it failed."""


class OpenEnvConnectionError(OpenEnvError, EpisodeLostError):
    """No session could be opened, or the connection was lost; the session is dead."""


class OpenEnvCapacityError(OpenEnvConnectionError):
    """The server had no free session for as long as the client was willing to wait."""


class OpenEnvTimeoutError(OpenEnvConnectionError, TimeoutError):
    """The server did not answer before the deadline; the session is dead."""


class OpenEnvProtocolError(OpenEnvError, EpisodeLostError):
    """The server said something that is not an answer; the session is dead."""


class SessionNotResetError(OpenEnvError, EpisodeLostError):
    """A step was asked of a session that was never reset, or that is dead."""


class OpenEnvServerError(OpenEnvError):
    """The server answered with an error; the session lives on.

    Args:
        code: one of the server's codes (``VALIDATION_ERROR``, ``EXECUTION_ERROR``, ...).
        message: what it says.
        details: the rest of its answer.
    """

    def __init__(self, code: str, message: str, details: Any = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.details = details
