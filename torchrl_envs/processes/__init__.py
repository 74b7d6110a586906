"""Functions in processes of their own, which may die and can be killed."""

from .pool import ToolProcessError as ToolProcessError
from .pool import ToolProcesses as ToolProcesses
from .pool import WorkerPool as WorkerPool
from .pool import WorkerStartError as WorkerStartError
from .pool import kept_command as kept_command
