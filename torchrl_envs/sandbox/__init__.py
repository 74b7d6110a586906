"""Untrusted Python code: no network, no files but its own, bounded means; or it does not run."""

from .errors import SandboxStartError as SandboxStartError
from .errors import SandboxUnavailableError as SandboxUnavailableError
from .errors import UnsandboxedCodeWarning as UnsandboxedCodeWarning
from .limits import ProgramLimits as ProgramLimits
from .limits import SandboxLimits as SandboxLimits
from .result import Isolation as Isolation
from .result import SandboxResult as SandboxResult
from .sandbox import Sandbox as Sandbox
from .session import SandboxSession as SandboxSession
