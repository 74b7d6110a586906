"""Errors and warnings of checkpoints."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the file and what is wrong."""


class CheckpointWarning(RuntimeWarning):
    """Something is wrong with a checkpoint, and the run goes on without it."""


class NoCheckpoint(CheckpointError):
    """Nothing was saved where a checkpoint was looked for."""
