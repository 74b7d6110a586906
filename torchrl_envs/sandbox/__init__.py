"""Untrusted Python code: no network, no files but its own, bounded means; or it does not run."""

from .confinement import Isolation as Isolation
from .confinement import SandboxLimits as SandboxLimits
from .confinement import SandboxResult as SandboxResult
from .confinement import SandboxStartError as SandboxStartError
from .confinement import SandboxUnavailableError as SandboxUnavailableError
from .confinement import UnsandboxedCodeWarning as UnsandboxedCodeWarning
from .sandbox import Sandbox as Sandbox
from .sandbox import SandboxSession as SandboxSession
