"""One save, from a state in memory to a folder on the disk, on one rank or on many."""

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from . import fsio
from .encoding import StagingBuffers
from .errors import CheckpointError, CheckpointWarning
from .lock import WriterLock
from .ranks import Ranks
from .retention import Retention, remove_leftovers, stored
from .sharded import Shards, flatten, plan_shards
from .tensor_file import Entry, Written, check_header
from .tensordicts import StateEncoder, Tensorclasses
from .writing import StagedCheckpoint

FileWriter = Callable[[Path], object]


@dataclass
class Outcome:
    """What became of the last save."""

    error: CheckpointError | None = None
    """Why there is no checkpoint of it."""
    note: str | None = None
    """What else went wrong."""
    told: bool = True
    """Whether somebody was told."""

    def failed(self, error: CheckpointError) -> None:
        """Note why there is no checkpoint."""
        self.error, self.told = error, False


class Encoded(NamedTuple):
    """A state as it will be written."""

    tree: Any
    entries: dict[str, Entry]
    shards: dict[str, Shards]


class Saver:
    """Encodes and writes checkpoints of a folder.

    Args:
        folder: of the store.
        tensorclasses: that may be in a state.
        retention: which checkpoints are kept.
        lock: of the folder.
        ranks: all that save.
    """

    def __init__(
        self,
        folder: Path,
        tensorclasses: Tensorclasses,
        retention: Retention,
        lock: WriterLock,
        ranks: Ranks,
    ) -> None:
        self.outcome = Outcome()
        self._folder = folder
        self._tensorclasses = tensorclasses
        self._retention = retention
        self._lock = lock
        self._ranks = ranks
        self._buffers = StagingBuffers()

    def encode(
        self, state: Mapping[str, Any], sharded: Mapping[str, Mapping[str, Any]], *, copy: bool
    ) -> Encoded:
        """The state as it will be written; with ``copy`` it may change from then on.

        Raises:
            CheckpointError: something can't be stored.
        """
        self._buffers.begin()
        buffers = self._buffers if copy else None
        flat = {
            name: self._ranks.agree(partial(flatten, name, part)) for name, part in sharded.items()
        }
        encoder = StateEncoder(self._tensorclasses, buffers)
        plain = {name: one.plain for name, one in flat.items()}
        tree = self._ranks.agree(lambda: self._tree(encoder, state, plain))
        shards = {
            name: plan_shards(name, one.tensors, self._ranks, buffers) for name, one in flat.items()
        }
        self._buffers.finish()
        return Encoded(tree, encoder.entries, shards)

    def _tree(self, encoder: StateEncoder, state: Any, plain: Any) -> Any:
        if self._ranks.rank:
            return None
        try:
            tree = {"state": encoder.encode(dict(state))}
            encoder.root = "sharded"
            tree["sharded"] = encoder.encode(plain)
            check_header(encoder.entries)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"state: {error}.") from error
        return tree

    def begin(
        self, step: int, files: Mapping[str, FileWriter], sharded: Collection[str]
    ) -> StagedCheckpoint | None:
        """A staged folder with the files of others in it; ``None`` if the disk did not let us."""
        (paths, failure), *_ = self._ranks.gather(
            self._ranks.agree(lambda: self._begun(step, files, sharded))
        )
        if failure is not None:
            self.outcome.failed(failure)
            return None
        self.outcome.error = None
        return StagedCheckpoint(*paths)

    def _begun(
        self, step: int, files: Mapping[str, FileWriter], sharded: Collection[str]
    ) -> tuple[Any, CheckpointError | None]:
        """Where it is staged and will be, or why the disk did not let us."""
        if self._ranks.rank:
            return None, None
        staged = None
        try:
            fsio.make_folders(self._folder)
            self._lock.acquire()
            remove_leftovers(self._folder)
            saves = stored(self._folder)
            staged = StagedCheckpoint.begin(self._folder, step, saves[0].save + 1 if saves else 1)
            staged.write_files(files)
            staged.make_shard_folders(sharded)
        except BaseException as error:
            if staged is not None:
                staged.discard()
            if isinstance(error, OSError):
                return None, self._failure(step, error)
            raise
        return (staged.staged, staged.path), None

    def write(self, staged: StagedCheckpoint, encoded: Encoded, about: dict[str, Any]) -> None:
        """Write and publish, and remove what need not be kept; what fails is noted."""
        try:
            parts = self._ranks.agree(lambda: self._write_part(staged, encoded))
            for part in self._ranks.gather(parts):
                staged.written.update(part)
            self._ranks.agree(lambda: None if self._ranks.rank else staged.publish(about))
        except BaseException as error:
            if not self._ranks.rank:
                staged.discard()
            if not isinstance(error, Exception):
                raise
            self.outcome.failed(self._failure(about["step"], error))
            return
        if not self._ranks.rank:
            self._prune()

    def _write_part(self, staged: StagedCheckpoint, encoded: Encoded) -> dict[str, Written]:
        staged.write_shards(encoded.shards)
        if not self._ranks.rank:
            staged.write_state(encoded.tree, encoded.entries)
        return staged.written

    def _prune(self) -> None:
        try:
            self._retention.prune(self._folder)
        except OSError as error:
            self.outcome.note = f"{self._folder}: old checkpoints can't be removed ({error})."

    def _failure(self, step: int, error: Exception) -> CheckpointError:
        where = getattr(error, "filename", None) or self._folder
        failure = CheckpointError(
            f"{where}: step {step} could not be saved ({error}). The checkpoints that are there "
            "stay."
        )
        failure.__cause__ = error
        return failure

    def forget(self) -> None:
        """Give the memory of copies back."""
        self._buffers = StagingBuffers()


def farewell(lock: WriterLock, outcome: Outcome) -> None:
    """What is left to do when a store goes away without having been closed."""
    lock.release()
    if not outcome.told:
        warnings.warn(CheckpointWarning(str(outcome.error)), stacklevel=2)
