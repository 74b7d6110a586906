"""Containers of docker and podman, by their command lines."""

from .container import CommandResult as CommandResult
from .container import Container as Container
from .container import HeldContainer as HeldContainer
from .engine import ContainerEngine as ContainerEngine
from .engine import ContainerError as ContainerError
