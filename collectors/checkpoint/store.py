"""Checkpoints are written whole or not at all, beside training, and old ones are removed."""

import hashlib
import json
import re
import secrets
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self

import torch
import torch.distributed as dist

from torchrl_data import __version__
from torchrl_data.checks import check_counts, check_numbers, one_of

from . import fsio
from .files import (
    MANIFEST,
    CheckpointError,
    CheckpointWarning,
    Entry,
    NoCheckpoint,
    WriterLock,
    Written,
    check_header,
    check_lengths,
    read_manifest,
    write_file,
    write_manifest,
    write_tensors,
)
from .format import StagingBuffers, StateEncoder, Tensorclasses
from .reading import (
    SHARDED,
    STATE,
    TENSORS,
    Checkpoint,
    Ranks,
    Shards,
    flatten,
    plan_shards,
    read_checkpoint,
)

# Which checkpoints a folder holds, and which of them are kept.

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


# One checkpoint on its way to the disk: a staged folder, then a single rename.


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


# One save, from a state in memory to a folder on the disk, on one rank or on many.

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


# Checkpoints of a folder: saved whole or not at all, and the newest that verifies.

_SAVE: Final = "CheckpointStore.save"
_FILE_NAME: Final = re.compile(r"[^/\0\ud800-\udfff]+")
_RESERVED: Final = (MANIFEST, STATE, TENSORS, SHARDED)


class CheckpointStore:
    """Checkpoints in a folder.

    A save is staged beside the others, every file is synced and hashed, and the whole gets its name
    in one rename, so that at every moment the folder holds whole checkpoints only::

        with CheckpointStore("run/checkpoints") as store:
            store.save(10, {"model": model.state_dict(), "seed": 3}, wait=False)
        state = CheckpointStore("run/checkpoints").load().state

    A state is nested dictionaries (keys are str or int), lists and tuples of JSON's values, bytes,
    tensors of any dtype, numpy arrays, and the TensorDicts that collectors and replay buffers hold.
    All comes back with its type and to the bit, tensors on the CPU. Tensors go to a safetensors
    file, the rest to JSON; nothing is pickled or unpickled.

    Args:
        folder: made when something is saved. One store at a time saves into it.
        keep_last: how many of the newest are kept, at least 2.
        keep_best: how many more are kept for their metric.
        best: whether the metric is better when it is ``"max"`` or ``"min"``.
        on_error: what a save does that fails for a reason of the disk: ``"warn"`` and go on, or
            ``"raise"``. The checkpoints that are there stay, whichever it is.
        tensorclasses: classes of your own that may be stored in a state, and loaded.
        process_group: of all ranks that save and load together; each makes a store of the same
            folder. ``None``: this process by itself.

    Raises:
        ValueError: a setting has no meaning.
        TypeError: one of ``tensorclasses`` is none.
    """

    def __init__(
        self,
        folder: str | Path,
        keep_last: int = 2,
        keep_best: int = 0,
        *,
        best: Literal["max", "min"] = "max",
        on_error: Literal["raise", "warn"] = "warn",
        tensorclasses: Sequence[type] = (),
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        check_counts("CheckpointStore", keep_last=keep_last)
        if keep_last < 2:
            raise ValueError(
                "CheckpointStore: keep_last is 1, and the only checkpoint may be the one that the "
                "disk has spoiled. Keep at least 2."
            )
        check_counts("CheckpointStore", 0, keep_best=keep_best)
        one_of("best", best, ("max", "min"), who="CheckpointStore")
        one_of("on_error", on_error, ("raise", "warn"), who="CheckpointStore")
        self.folder = Path(folder)
        """Where the checkpoints are."""
        self._keep_best = keep_best
        self._on_error = on_error
        self._tensorclasses = Tensorclasses(tensorclasses)
        self._ranks = Ranks(process_group)
        self._retention = Retention(keep_last, keep_best, best)
        self._lock = WriterLock(self.folder)
        self._saver = Saver(
            self.folder, self._tensorclasses, self._retention, self._lock, self._ranks
        )
        self._thread: threading.Thread | None = None
        weakref.finalize(self, farewell, self._lock, self._saver.outcome)

    @property
    def rank(self) -> int:
        """Of this process among those that save and load together; 0 is the first."""
        return self._ranks.rank

    @property
    def last_error(self) -> CheckpointError | None:
        """Why the last save failed; ``None`` if it did not."""
        return self._saver.outcome.error

    # Saving -------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metric: float | None = None,
        wait: bool = True,
        files: Mapping[str, FileWriter] | None = None,
        sharded: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Path | None:
        """Save a state; with a process group all ranks call it together.

        A step may be saved again; the new checkpoint takes the place of the old one once it is
        whole.

        Args:
            step: of training, 0 or more.
            state: what to save; its keys are strings. That of the first rank is.
            metric: by which ``keep_best`` ranks it.
            wait: ``False`` returns as soon as the state is copied, and writes it on a thread. What
                fails there is told by the next ``save``, by :meth:`wait` or :meth:`close`.
            files: further files or folders by name, each written by a function that gets the path.
                They are called before ``save`` returns, on the first rank.
            sharded: state dicts by name of which every rank holds a part: nested dictionaries and
                lists of DTensors, of tensors that are the same on all ranks, and of plain values.
                :meth:`Checkpoint.load_sharded` reads them.

        Returns:
            The checkpoint's folder; ``None`` if saving failed and ``on_error`` is ``"warn"``.

        Raises:
            CheckpointError: something can't be stored, the message says where; or another store
                saves into the folder. With ``on_error="raise"`` also: this or the last save could
                not be written.
            ValueError: an argument has no meaning.
        """
        self.wait()
        files, sharded = dict(files or {}), dict(sharded or {})
        self._ranks.agree(lambda: self._check(step, state, metric, files, sharded))
        about = {
            "step": int(step),
            "metric": None if metric is None else float(metric),
            "torch": torch.__version__,
            "library": __version__,
        }
        encoded = self._saver.encode(state, sharded, copy=not wait)
        staged = self._saver.begin(int(step), files, sharded)
        if staged is None:
            self._tell()
            return None
        if wait:
            self._saver.write(staged, encoded, about)
            return staged.path if self._tell() else None
        # No daemon: a process that ends meanwhile waits for its last checkpoint.
        self._thread = threading.Thread(
            target=self._saver.write, args=(staged, encoded, about), name="checkpoint"
        )
        self._thread.start()
        return staged.path

    def _check(
        self, step: int, state: Any, metric: float | None, files: Any, sharded: Mapping[str, Any]
    ) -> None:
        check_counts(_SAVE, 0, step=step)
        if not isinstance(state, Mapping) or not all(type(key) is str for key in state):
            raise ValueError(
                f"{_SAVE}: state is a {type(state).__name__}; it has to be a mapping with strings "
                "as keys."
            )
        check_numbers(_SAVE, metric=metric)
        if metric is None and self._keep_best:
            raise ValueError(
                f"{_SAVE}: keep_best={self._keep_best} ranks checkpoints by a metric, and step "
                f"{step} has none. Give metric=."
            )
        for name in (*files, *sharded):
            _check_name(name)
        if sharded and self._ranks.group is None and _world_size() > 1:
            raise ValueError(
                f"{_SAVE}: sharded needs all {_world_size()} ranks. Give "
                "CheckpointStore(process_group=torch.distributed.group.WORLD)."
            )

    def _tell(self) -> bool:
        """Raise or warn of what failed; whether there is a checkpoint."""
        outcome = self._saver.outcome
        note, outcome.note = outcome.note, None
        if note is not None:
            warnings.warn(CheckpointWarning(note), stacklevel=3)
        if outcome.error is None:
            return True
        outcome.told = True
        if self._on_error == "raise":
            raise outcome.error
        warnings.warn(CheckpointWarning(str(outcome.error)), stacklevel=3)
        return False

    def wait(self) -> None:
        """Wait until what was saved with ``wait=False`` is on the disk.

        Raises:
            CheckpointError: it could not be written, and ``on_error`` is ``"raise"``.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._tell()

    def close(self) -> None:
        """Wait for the last save, and let another store save into the folder.

        Raises:
            CheckpointError: as :meth:`wait`.
        """
        try:
            self.wait()
        finally:
            self._lock.release()
            self._saver.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Loading ------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, in order; only :meth:`load` verifies them."""
        return sorted({one.step for one in stored(self.folder)})

    def load(self, step: int | str | Path | None = None) -> Checkpoint:
        """Verify and read a checkpoint.

        Args:
            step: the newest of a step, or the folder of a checkpoint; ``None`` for the one that was
                saved last. Where the newest is broken, the one before it is read, with a
                :class:`CheckpointWarning` that names each broken file.

        Returns:
            The checkpoint; everything in it is on the CPU.

        Raises:
            CheckpointError: there is none that is whole; the message names the files.
        """
        self.wait()
        if isinstance(step, str | Path):
            return read_checkpoint(Path(step), self._tensorclasses, self._ranks)
        check_counts("CheckpointStore.load", 0, step=step)
        seen: set[Path] = set()
        broken: list[str] = []
        while True:
            # Again while a store that saves meanwhile removes what is looked at.
            found = self._ranks.gather(stored(self.folder))[0]
            new = [one for one in found if one.path not in seen and step in (None, one.step)]
            if not new:
                raise self._none_whole(step, broken)
            for one in new:
                checkpoint = self._read(one, broken)
                if checkpoint is not None:
                    return checkpoint
            seen.update(one.path for one in new)

    def _read(self, one: Stored, broken: list[str]) -> Checkpoint | None:
        """A checkpoint, if it is whole; what is wrong with it is added to that of others."""
        try:
            if one.path.is_symlink():
                raise CheckpointError(f"{one.path}: is a link, not a checkpoint.")
            checkpoint = read_checkpoint(one.path, self._tensorclasses, self._ranks)
            said = checkpoint.manifest["step"], checkpoint.manifest["save"]
            if said != (one.step, one.save):
                raise CheckpointError(f"{one.path}: is step {said[0]}, save {said[1]}, renamed.")
        except CheckpointError as error:
            if one.path.exists():
                self._retention.broken.add(one.path)
                broken.append(str(error))
            return None
        if broken:
            warnings.warn(
                CheckpointWarning(f"Step {one.step} is loaded instead: {' '.join(broken)}"),
                stacklevel=3,
            )
        return checkpoint

    def _none_whole(self, step: int | None, broken: list[str]) -> CheckpointError:
        if broken:
            return CheckpointError(f"{self.folder}: no checkpoint is whole. {' '.join(broken)}")
        which = "" if step is None else f" of step {step} (there are {self.steps()})"
        return NoCheckpoint(f"{self.folder}: holds no checkpoint{which}.")


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _check_name(name: Any) -> None:
    fine = isinstance(name, str) and _FILE_NAME.fullmatch(name) is not None
    if not fine or name in (".", "..", *_RESERVED) or len(name.encode()) > 255:
        raise ValueError(
            f"{_SAVE}: files has {name!r:.300}, which is no name of a file or folder in a "
            f"checkpoint; it has no '/', and is none of {_RESERVED}."
        )
