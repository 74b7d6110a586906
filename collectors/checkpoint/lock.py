"""A lock for one writer at a time, which ends with its process, whatever becomes of that."""

import fcntl
import os
from pathlib import Path
from typing import Final

from .errors import CheckpointError

LOCK: Final = ".lock"
# Record locks do not hold within a process, and end when it closes the file anywhere: it is opened
# once, by whoever enters its name here.
_held_here: set[tuple[int, str]] = set()


class WriterLock:
    """The right to write into a folder, once :meth:`acquire` got it."""

    # A record lock, because one of `flock` would live on in processes that were forked meanwhile.

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None
        self._name = (0, "")

    def acquire(self) -> None:
        """Get the lock, unless it is held already.

        Raises:
            CheckpointError: somebody else has it.
            OSError: the file system has no locks, or does not let us write.
        """
        if self._descriptor is not None and self._name[0] == os.getpid():
            return
        self._name = (os.getpid(), str(self._folder.resolve()))
        if self._name in _held_here:
            raise CheckpointError(
                f"{self._folder}: another CheckpointStore of this process saves here. Close it, or "
                "give this one a folder of its own."
            )
        descriptor = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            writer = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            os.close(descriptor)
            if not isinstance(error, BlockingIOError | PermissionError):
                raise
            raise CheckpointError(
                f"{self._folder}: another process saves here ({writer or 'unknown'}). Two runs "
                "can't share a folder: end the other one, or choose another folder."
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        self._descriptor = descriptor
        _held_here.add(self._name)

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _held_here.discard(self._name)
