"""Tools in processes of their own, which may die and can be killed."""

from .pool import ToolProcesses
from .process import ToolProcessError

__all__ = ["ToolProcessError", "ToolProcesses"]
