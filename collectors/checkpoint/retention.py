"""Which checkpoints a folder holds, and which of them are kept."""

import re
from pathlib import Path
from typing import Any, Final, NamedTuple

from . import fsio
from .errors import CheckpointError
from .manifest import check_lengths, read_manifest

STAGING: Final = ".staging-"
_REMOVING: Final = ".removing-"
_NAME: Final = re.compile(r"step-(\d{8,})\.save-(\d{5,})")


class Stored(NamedTuple):
    """A checkpoint's folder, as its name says it."""

    save: int
    """The number of the save: a later one is newer, whatever its step."""
    step: int
    path: Path


def folder_name(step: int, save: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step-{step:08d}.save-{save:05d}"


def stored(folder: Path) -> list[Stored]:
    """The checkpoints of a folder, the newest first."""
    if not folder.is_dir():
        return []
    found = [checkpoint_of(folder / name) for name in fsio.names(folder)]
    return sorted((one for one in found if one is not None), reverse=True)


def checkpoint_of(path: Path) -> Stored | None:
    """What a folder's name says, if it is the name of a checkpoint."""
    match = _NAME.fullmatch(path.name)
    return Stored(int(match[2]), int(match[1]), path) if match else None


def remove_leftovers(folder: Path) -> None:
    """Remove what writers that died left; the caller holds the lock, so none of it is alive."""
    for name in fsio.names(folder):
        if name.startswith((STAGING, _REMOVING)):
            fsio.remove_tree(folder / name)


class Retention:
    """Removes the checkpoints that need not be kept.

    Args:
        keep_last: how many of the newest are kept; those that are known to be broken don't count.
        keep_best: how many of the best are kept.
        best: whether the metric is better when it is ``"max"`` or ``"min"``.
    """

    def __init__(self, keep_last: int, keep_best: int, best: str) -> None:
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._sign = 1 if best == "max" else -1
        self.broken: set[Path] = set()
        """Checkpoints that were found broken."""
        self._manifests: dict[Path, dict[str, Any]] = {}

    def prune(self, folder: Path) -> None:
        """Remove all others."""
        checkpoints = stored(folder)
        whole = [one for one in checkpoints if self._is_whole(one.path)]
        steps: set[int] = set()
        # The newest of each step; the others were saved again.
        newest = [one for one in whole if not (one.step in steps or steps.add(one.step))]
        scored = [one for one in newest if self._metric(one) is not None]
        best = sorted(scored, key=lambda one: (self._metric(one), one.save), reverse=True)
        kept = {one.path for one in (*newest[: self._keep_last], *best[: self._keep_best])}
        oldest = newest[: self._keep_last][-1].save if len(newest) >= self._keep_last else -1
        for one in checkpoints:
            # What is broken stays as long as it may be wanted in place of something older.
            if one.path not in kept and (one in whole or one.save < oldest):
                self._remove(one.path)

    def _metric(self, one: Stored) -> float | None:
        metric = self._manifests[one.path]["metric"]
        return None if metric is None else self._sign * metric

    def _is_whole(self, path: Path) -> bool:
        if path in self.broken:
            return False
        try:
            if path not in self._manifests:
                self._manifests[path] = read_manifest(path)
            return not check_lengths(path, self._manifests[path])
        except (CheckpointError, OSError):
            # `load` names what is wrong with it, where it matters.
            return False

    def _remove(self, path: Path) -> None:
        removed = path.with_name(_REMOVING + path.name)
        fsio.rename(path, removed)
        # Before the first file goes, or a crash could bring half a checkpoint back.
        fsio.sync_folder(path.parent)
        fsio.remove_tree(removed)
        self._manifests.pop(path, None)
        self.broken.discard(path)
