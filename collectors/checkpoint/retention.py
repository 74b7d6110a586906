"""Checkpoints that a folder holds, and those of them that are kept."""

import re
from collections.abc import Collection
from pathlib import Path
from shutil import rmtree
from typing import Final, NamedTuple

from .errors import CheckpointError
from .files import sync_folder
from .manifest import problems_of, read_manifest

STAGING: Final = ".staging-"
REMOVING: Final = ".removing-"
_NAME: Final = re.compile(r"step-(\d{8,})\.save-(\d{5,})")


class StoredCheckpoint(NamedTuple):
    """A checkpoint's folder, as its name says it."""

    save: int
    """The number of the save: a later one is newer, whatever its step."""
    step: int
    path: Path


def stored(folder: Path) -> list[StoredCheckpoint]:
    """The checkpoints of a folder, the newest first."""
    paths = list(folder.iterdir()) if folder.is_dir() else []
    found = [(path, _NAME.fullmatch(path.name)) for path in paths]
    return sorted(
        (StoredCheckpoint(int(m[2]), int(m[1]), path) for path, m in found if m), reverse=True
    )


def prune(
    folder: Path, keep_last: int, keep_best: int, best: str, known_broken: Collection[Path]
) -> None:
    """Remove the checkpoints that need not be kept.

    Args:
        folder: of a store.
        keep_last: how many of the newest are kept; those that are broken don't count.
        keep_best: how many of the best are kept.
        best: whether the metric is better when it is ``"max"`` or ``"min"``.
        known_broken: checkpoints that were found broken.
    """
    checkpoints = stored(folder)
    whole: list[StoredCheckpoint] = []
    metrics: dict[StoredCheckpoint, float] = {}
    for one in checkpoints:
        try:
            manifest = read_manifest(one.path)
            if one.path in known_broken or problems_of(one.path, manifest):
                continue
        except (CheckpointError, OSError):
            # `load` names what is wrong with it, where it matters.
            continue
        whole.append(one)
        if manifest["metric"] is not None:
            metrics[one] = manifest["metric"] * (1 if best == "max" else -1)
    # The newest of each step; the others were saved again.
    newest = list({one.step: one for one in reversed(whole)}.values())
    newest.sort(reverse=True)
    scored = [one for one in newest if one in metrics]
    scored.sort(key=lambda one: (metrics[one], one.save), reverse=True)
    kept = {*newest[:keep_last], *scored[:keep_best]}
    oldest = newest[keep_last - 1].save if len(newest) >= keep_last else -1
    for one in checkpoints:
        # What is broken stays as long as it may be wanted in place of something older.
        if one not in kept and (one in whole or one.save < oldest):
            removed = one.path.with_name(REMOVING + one.path.name)
            one.path.rename(removed)
            # Before the first file goes, or a crash could bring half a checkpoint back.
            sync_folder(folder)
            rmtree(removed)
