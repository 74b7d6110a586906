"""A save, from a state in memory to a folder on the disk, on one rank or on many."""

import json
import secrets
import warnings
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

from .checkpoint import SHARDED, STATE, TENSORS
from .checkpoint_group import CheckpointGroup
from .errors import CheckpointError, CheckpointWarning
from .files import make_folders, sync_folder, synced, tree
from .format import Encoder, StagingBuffers
from .lock import WriterLock
from .manifest import write_manifest
from .retention import REMOVING, STAGING, prune, stored
from .shards import Shards, flatten, plan_shards
from .tensor_file import TensorEntry, write_tensors

FileWriter = Callable[[Path], object]


class Encoded(NamedTuple):
    """A state as it will be written."""

    tree: Any
    entries: dict[str, TensorEntry]
    shards: dict[str, Shards]


class Staged(NamedTuple):
    """A checkpoint that nobody can see yet."""

    folder: Path
    """In which it is written."""
    path: Path
    """Where it will be."""
    save: int


def publish(staged: Staged, about: dict[str, Any], written: dict[str, dict[str, Any]]) -> None:
    """Sync everything and give the folder its name: from now on it is there, whole.

    Args:
        staged: with all files in it.
        about: what the manifest says beside the files.
        written: the files that are synced already, as the manifest lists them.
    """
    for name in tree(staged.folder):
        if name not in written:
            written[name] = synced(staged.folder / name)
    write_manifest(staged.folder, {**about, "save": staged.save}, written)
    below = sorted(path for path in staged.folder.rglob("*") if path.is_dir())
    for folder in (*reversed(below), staged.folder):
        sync_folder(folder)
    staged.folder.rename(staged.path)
    sync_folder(staged.path.parent)


class Saver:
    """Encodes and writes checkpoints of a folder, and knows what became of the last one.

    Args:
        folder: of the store.
        tensorclasses: that may be in a state.
        keep: how many are kept, for what: the arguments of :func:`prune`.
        ranks: all that save.
    """

    # Apart from the store, so that a store that nobody holds any more goes while its thread writes.

    def __init__(
        self,
        folder: Path,
        tensorclasses: Mapping[str, Any],
        keep: tuple[int, int, str],
        ranks: CheckpointGroup,
    ) -> None:
        self.error: CheckpointError | None = None
        """Why there is no checkpoint of the last save."""
        self.note: str | None = None
        """What else went wrong."""
        self.is_told = True
        """Whether somebody was told of the error."""
        self.broken: set[Path] = set()
        """Checkpoints that were found broken."""
        self.lock = WriterLock(folder)
        self.buffers = StagingBuffers()
        self._folder = folder
        self._tensorclasses = tensorclasses
        self._keep = keep
        self._ranks = ranks

    def encode(
        self, state: Mapping[str, Any], sharded: Mapping[str, Mapping[str, Any]], *, copy: bool
    ) -> Encoded:
        """The state as it will be written; with ``copy`` it may change from then on.

        Raises:
            CheckpointError: something can't be stored.
        """
        self.buffers.begin()
        buffers = self.buffers if copy else None
        encoder, tree = Encoder(self._tensorclasses, buffers), {}
        with self._ranks.agreed():
            flat = {name: flatten(name, sharded[name]) for name in sharded}
            if self._ranks.rank == 0:
                try:
                    tree["state"] = encoder.encode(dict(state))
                    encoder.root = "sharded"
                    plain = {name: values for name, (_, values) in flat.items()}
                    tree["sharded"] = encoder.encode(plain)
                except (ValueError, RecursionError) as error:
                    raise CheckpointError(f"state: {error}.") from error
        shards = {
            name: plan_shards(name, tensors, self._ranks, buffers)
            for name, (tensors, _) in flat.items()
        }
        self.buffers.finish()
        return Encoded(tree, encoder.entries, shards)

    def begin(
        self, step: int, files: Mapping[str, FileWriter], sharded: Collection[str]
    ) -> Staged | None:
        """A staged folder with the files of others in it; ``None`` if the disk did not let us.

        Raises:
            CheckpointError: others made something that is neither a file nor a folder.
        """
        new: Staged | None = None
        failure: CheckpointError | None = None
        with self._ranks.agreed():
            try:
                if self._ranks.rank == 0:
                    new = self._make_room(step)
                    for name, write in files.items():
                        write(new.folder / name)
                    odd = [name for name, count in tree(new.folder).items() if count is None]
                    if odd:
                        raise CheckpointError(
                            f"CheckpointStore.save: files made {odd}, which are links or devices. "
                            "A checkpoint holds files and folders only: copy what they point to."
                        )
                    for name in sharded:
                        (new.folder / SHARDED / name).mkdir(parents=True)
            except BaseException as error:
                if new is not None:
                    rmtree(new.folder, ignore_errors=True)  # The next save removes the rest.
                if not isinstance(error, OSError):
                    raise
                failure, new = self._failure(step, error), None
        (new, self.error), *_ = self._ranks.gather((new, failure))
        self.is_told = self.error is None
        return new

    def _make_room(self, step: int) -> Staged:
        """An empty folder for the next save."""
        make_folders(self._folder)
        self.lock.acquire()
        # What writers that died left: none of them is alive, now that we have the lock.
        for path in sorted(self._folder.iterdir()):
            if path.name.startswith((STAGING, REMOVING)):
                rmtree(path)
        save = max((one.save for one in stored(self._folder)), default=0) + 1
        name = f"step-{step:08d}.save-{save:05d}"
        folder = self._folder / f"{STAGING}{name}-{secrets.token_hex(4)}"
        folder.mkdir()
        return Staged(folder, self._folder / name, save)

    def write(self, staged: Staged, encoded: Encoded, about: dict[str, Any]) -> None:
        """Write and publish, and remove what need not be kept; what fails is noted."""
        is_first, written = self._ranks.rank == 0, dict[str, dict[str, Any]]()
        try:
            with self._ranks.agreed():
                for name, shard in encoded.shards.items():
                    if shard.entries:
                        path = f"{SHARDED}/{name}/{shard.file}.safetensors"
                        write_tensors(staged.folder / path, shard.entries, shard.metadata)
                        written[path] = synced(staged.folder / path)
                if is_first:
                    write_tensors(staged.folder / TENSORS, encoded.entries)
                    strict: Any = {"allow_nan": False, "check_circular": False}
                    text = json.dumps(encoded.tree, separators=(",", ":"), **strict)
                    (staged.folder / STATE).write_bytes(text.encode())
            parts = self._ranks.gather(written)
            with self._ranks.agreed():
                if is_first:
                    publish(staged, about, dict(ChainMap(*parts)))
        except BaseException as error:
            if is_first:
                rmtree(staged.folder, ignore_errors=True)  # The next save removes the rest.
            if not isinstance(error, Exception):
                raise
            self.error, self.is_told = self._failure(about["step"], error), False
            return
        if is_first:
            try:
                prune(self._folder, *self._keep, self.broken)
            except OSError as error:
                self.note = f"{self._folder}: old checkpoints can't be removed ({error})."

    def _failure(self, step: int, error: Exception) -> CheckpointError:
        where = getattr(error, "filename", None) or self._folder
        why = str(error).rstrip(".")
        failure = CheckpointError(
            f"{where}: step {step} could not be saved ({why}). The checkpoints that are there stay."
        )
        failure.__cause__ = error
        return failure

    def end(self) -> None:
        """Finish when a store goes away without having been closed."""
        self.lock.release()
        if not self.is_told:
            warnings.warn(CheckpointWarning(str(self.error)), stacklevel=2)
