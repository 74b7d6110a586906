"""Checkpoints on the disk: written whole or not at all, verified when they are read, no pickle."""

from .files import CheckpointError as CheckpointError
from .files import CheckpointWarning as CheckpointWarning
from .reading import Checkpoint as Checkpoint
from .store import CheckpointStore as CheckpointStore
