"""Functions in processes of their own, which may die and can be killed."""

from .pool import WorkerPool as WorkerPool
from .pool import WorkerStartError as WorkerStartError
from .tool_processes import ToolProcesses as ToolProcesses
from .worker_process import ToolProcessError as ToolProcessError
from .worker_process import kept_command as kept_command
