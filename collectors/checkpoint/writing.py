"""One checkpoint on its way to the disk: a staged folder, then a single rename."""

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import fsio
from .manifest import write_manifest
from .reading import STATE, TENSORS
from .retention import STAGING, folder_name
from .tensor_file import Entry, Written, write_file, write_tensors


class StagedCheckpoint:
    """A checkpoint that nobody can see yet.

    Args:
        folder: of the store.
        step: of training.
        save: the number of the save.
    """

    def __init__(self, folder: Path, step: int, save: int) -> None:
        self.path = folder / folder_name(step, save)
        """Where it will be."""
        self.step = step
        """Of training."""
        self._folder = folder
        self._save = save
        self._staged = folder / f"{STAGING}{self.path.name}-{secrets.token_hex(4)}"
        self._written: dict[str, Written] = {}
        fsio.make_folder(self._staged)

    def write_files(self, files: Mapping[str, Callable[[Path], None]]) -> None:
        """Let others write files and folders of their own."""
        for name, write in files.items():
            write(self._staged / name)

    def write_state(self, tree: Any, entries: dict[str, Entry]) -> None:
        """Write the state."""
        self._written[TENSORS] = write_tensors(self._staged / TENSORS, entries)
        text = json.dumps(tree, allow_nan=False, check_circular=False, separators=(",", ":"))
        self._written[STATE] = write_file(self._staged / STATE, [text.encode()])

    def publish(self, about: dict[str, Any]) -> None:
        """Sync everything and give the folder its name: from now on it is there, whole."""
        for name, count in fsio.tree(self._staged).items():
            if name not in self._written:
                if count is None:
                    raise ValueError(
                        f"{name}: `files` made something that is neither a file nor a folder"
                    )
                self._written[name] = _synced(self._staged / name)
        write_manifest(
            self._staged, {"step": self.step, "save": self._save, **about}, self._written
        )
        for folder in fsio.folders(self._staged):
            fsio.sync_folder(folder)
        fsio.rename(self._staged, self.path)
        fsio.sync_folder(self._folder)

    def discard(self) -> None:
        """Remove what was staged, as far as that is possible; the next save removes the rest."""
        try:
            if self._staged.is_dir():
                fsio.remove_tree(self._staged)
        except OSError:
            return


def _synced(path: Path) -> Written:
    """A file that somebody else wrote, now synced and read-only."""
    digest, count = hashlib.sha256(), 0
    descriptor = fsio.open_file(path)
    try:
        for chunk in fsio.chunks(descriptor):
            digest.update(chunk)
            count += len(chunk)
        fsio.make_read_only(descriptor)
        fsio.sync(descriptor)
    finally:
        fsio.close(descriptor)
    return Written(count, digest.hexdigest())
