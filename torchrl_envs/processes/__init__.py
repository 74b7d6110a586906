"""Functions in processes of their own, which may die and can be killed."""

from .pool import ToolProcessError, ToolProcesses, WorkerPool, WorkerStartError, kept_command

__all__ = ["ToolProcessError", "ToolProcesses", "WorkerPool", "WorkerStartError", "kept_command"]
