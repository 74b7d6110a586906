"""Untrusted Python code: no network, no files but its own, bounded means; or it does not run."""

from .errors import SandboxStartError, SandboxUnavailableError, UnsandboxedCodeWarning
from .limits import SandboxLimits
from .result import Isolation, SandboxResult
from .sandbox import Sandbox
from .session import SandboxSession

__all__ = [
    "Isolation",
    "Sandbox",
    "SandboxLimits",
    "SandboxResult",
    "SandboxSession",
    "SandboxStartError",
    "SandboxUnavailableError",
    "UnsandboxedCodeWarning",
]
