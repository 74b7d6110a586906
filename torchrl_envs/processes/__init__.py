"""Functions in processes of their own, which may die and can be killed."""

from .pool import WorkerPool, WorkerStartError
from .process import ToolProcessError, kept_command
from .tools import ToolProcesses

__all__ = [
    "ToolProcessError",
    "ToolProcesses",
    "WorkerPool",
    "WorkerStartError",
    "kept_command",
]
