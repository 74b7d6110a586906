"""Checkpoints on the disk: written whole or not at all, verified when they are read, no pickle."""

from .files import CheckpointError, CheckpointWarning
from .reading import Checkpoint
from .store import CheckpointStore

__all__ = ["Checkpoint", "CheckpointError", "CheckpointStore", "CheckpointWarning"]
