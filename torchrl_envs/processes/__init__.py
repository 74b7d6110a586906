"""Functions in processes of their own, which may die and can be killed."""

from .tool_processes import ToolProcesses as ToolProcesses
from .worker_pool import WorkerPool as WorkerPool
from .worker_pool import WorkerStartError as WorkerStartError
from .worker_process import ToolProcessError as ToolProcessError
from .worker_process import kept_command as kept_command
