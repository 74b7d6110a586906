"""A run that goes on where it was: every part of it, the random numbers, and what it belongs to."""

from .identity import CheckpointMismatch, identity_of
from .run_state import RunState
from .sharded_parts import ShardedModel, ShardedOptimizer

__all__ = ["CheckpointMismatch", "RunState", "ShardedModel", "ShardedOptimizer", "identity_of"]
