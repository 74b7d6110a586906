"""Untrusted Python code: no network, no files but its own, bounded means; or it does not run."""

from .confinement import (
    Isolation,
    SandboxLimits,
    SandboxResult,
    SandboxStartError,
    SandboxUnavailableError,
    UnsandboxedCodeWarning,
)
from .sandbox import Sandbox, SandboxSession

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
