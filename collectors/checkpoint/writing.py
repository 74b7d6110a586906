"""One checkpoint on its way to the disk: a staged folder, then a single rename."""

import hashlib
import json
import secrets
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Self

from . import fsio
from .errors import CheckpointError
from .manifest import write_manifest
from .reading import SHARDED, STATE, TENSORS
from .retention import STAGING, checkpoint_of, folder_name
from .sharded import Shards
from .tensor_file import Entry, Written, write_file, write_tensors


class StagedCheckpoint:
    """A checkpoint that nobody can see yet.

    Args:
        staged: the folder in which it is written.
        path: the folder that it will be.
    """

    def __init__(self, staged: Path, path: Path) -> None:
        self.path = path
        """Where it will be."""
        self.staged = staged
        """Where it is."""
        self.written: dict[str, Written] = {}
        """The files that are written and synced."""

    @classmethod
    def begin(cls, folder: Path, step: int, save: int) -> Self:
        """A new one."""
        path = folder / folder_name(step, save)
        staged = folder / f"{STAGING}{path.name}-{secrets.token_hex(4)}"
        fsio.make_folder(staged)
        return cls(staged, path)

    def write_files(self, files: Mapping[str, Callable[[Path], object]]) -> None:
        """Let others write files and folders of their own.

        Raises:
            CheckpointError: they made something that is neither a file nor a folder.
        """
        for name, write in files.items():
            write(self.staged / name)
        odd = [name for name, count in fsio.tree(self.staged).items() if count is None]
        if odd:
            raise CheckpointError(
                f"CheckpointStore.save: files made {odd}, which are links or devices. A checkpoint "
                "holds files and folders only: copy what they point to."
            )

    def make_shard_folders(self, names: Collection[str]) -> None:
        """Make the folders into which all ranks write."""
        if names:
            fsio.make_folder(self.staged / SHARDED)
        for name in names:
            fsio.make_folder(self.staged / SHARDED / name)

    def write_shards(self, shards: Mapping[str, Shards]) -> None:
        """Write what this rank has of sharded state dicts."""
        for name, shard in shards.items():
            if shard.entries:
                path = f"{SHARDED}/{name}/{shard.file}.safetensors"
                self.written[path] = write_tensors(
                    self.staged / path, shard.entries, shard.metadata
                )

    def write_state(self, tree: Any, entries: dict[str, Entry]) -> None:
        """Write the state."""
        self.written[TENSORS] = write_tensors(self.staged / TENSORS, entries)
        text = json.dumps(tree, allow_nan=False, check_circular=False, separators=(",", ":"))
        self.written[STATE] = write_file(self.staged / STATE, [text.encode()])

    def publish(self, about: dict[str, Any]) -> None:
        """Sync everything and give the folder its name: from now on it is there, whole."""
        for name in fsio.tree(self.staged):
            if name not in self.written:
                self.written[name] = _synced(self.staged / name)
        named = checkpoint_of(self.path)
        save = {} if named is None else {"save": named.save}
        write_manifest(self.staged, {**about, **save}, self.written)
        for folder in fsio.folders(self.staged):
            fsio.sync_folder(folder)
        fsio.rename(self.staged, self.path)
        fsio.sync_folder(self.path.parent)

    def discard(self) -> None:
        """Remove what was staged, as far as that is possible; the next save removes the rest."""
        try:
            if self.staged.is_dir():
                fsio.remove_tree(self.staged)
        except OSError:
            return


def _synced(path: Path) -> Written:
    """A file that somebody else wrote, now synced and read-only."""
    digest, count = hashlib.sha256(), 0
    descriptor = fsio.open_file(path)
    try:
        with fsio.named(path):
            for chunk in fsio.chunks(descriptor):
                digest.update(chunk)
                count += len(chunk)
            fsio.make_read_only(descriptor)
            fsio.sync(descriptor)
    finally:
        fsio.close(descriptor)
    return Written(count, digest.hexdigest())
