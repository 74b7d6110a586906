"""Checkpoints are written whole or not at all, beside training, and old ones are removed."""

import json
import re
import secrets
import threading
import warnings
import weakref
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from shutil import rmtree
from typing import Any, Final, Literal, NamedTuple

import torch
import torch.distributed as dist

from torchrl_data import __version__
from torchrl_data.checks import check_counts, check_numbers, one_of

from .files import (
    MANIFEST,
    CheckpointError,
    CheckpointWarning,
    Entry,
    NoCheckpoint,
    WriterLock,
    make_folders,
    problems_of,
    read_manifest,
    sync_folder,
    synced,
    tree,
    write_manifest,
    write_tensors,
)
from .format import Encoder, StagingBuffers, known_tensorclasses
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


def stored(folder: Path) -> list[Stored]:
    """The checkpoints of a folder, the newest first."""
    paths = list(folder.iterdir()) if folder.is_dir() else []
    found = [(path, _NAME.fullmatch(path.name)) for path in paths]
    return sorted((Stored(int(m[2]), int(m[1]), path) for path, m in found if m), reverse=True)


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
    whole: list[Stored] = []
    metrics: dict[Stored, float] = {}
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
            removed = one.path.with_name(_REMOVING + one.path.name)
            one.path.rename(removed)
            # Before the first file goes, or a crash could bring half a checkpoint back.
            sync_folder(folder)
            rmtree(removed)


# One save, from a state in memory to a folder on the disk, on one rank or on many.

FileWriter = Callable[[Path], object]


class Encoded(NamedTuple):
    """A state as it will be written."""

    tree: Any
    entries: dict[str, Entry]
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
        ranks: Ranks,
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
            if path.name.startswith((STAGING, _REMOVING)):
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
        """What is left to do when a store goes away without having been closed."""
        self.lock.release()
        if not self.is_told:
            warnings.warn(CheckpointWarning(str(self.error)), stacklevel=2)


# Checkpoints of a folder: saved whole or not at all, and the newest that verifies.

_SAVE: Final = "CheckpointStore.save"
_FILE_NAME: Final = re.compile(r"[^/\0\ud800-\udfff]+")
_RESERVED: Final = (MANIFEST, STATE, TENSORS, SHARDED)


class CheckpointStore(AbstractContextManager["CheckpointStore", None]):
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

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, CheckpointStore(folder) as store:
        ...     _ = store.save(10, {"weight": torch.ones(2), "seed": 3})
        ...     print(store.load().step, store.load().state)
        10 {'weight': tensor([1., 1.]), 'seed': 3}
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
        self._tensorclasses = known_tensorclasses(tensorclasses)
        self._ranks = Ranks(process_group)
        keep = (keep_last, keep_best, best)
        self._saver = Saver(self.folder, self._tensorclasses, keep, self._ranks)
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._saver.end)

    @property
    def rank(self) -> int:
        """Of this process among those that save and load together; 0 is the first."""
        return self._ranks.rank

    @property
    def last_error(self) -> CheckpointError | None:
        """Why the last save failed; ``None`` if it did not."""
        return self._saver.error

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
        with self._ranks.agreed():
            self._check(step, state, metric, files, sharded)
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
        is_one_of_many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if sharded and self._ranks.group is None and is_one_of_many:
            raise ValueError(
                f"{_SAVE}: sharded needs all {dist.get_world_size()} ranks. Give "
                "CheckpointStore(process_group=torch.distributed.group.WORLD)."
            )

    def _tell(self) -> bool:
        """Raise or warn of what failed; whether there is a checkpoint."""
        saver = self._saver
        note, saver.note = saver.note, None
        if note is not None:
            warnings.warn(CheckpointWarning(note), stacklevel=3)
        if saver.error is None:
            return True
        saver.is_told = True
        if self._on_error == "raise":
            raise saver.error
        warnings.warn(CheckpointWarning(str(saver.error)), stacklevel=3)
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
            self._saver.lock.release()
            self._saver.buffers = StagingBuffers()

    def __exit__(self, *exc_info: object) -> None:
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
                if broken:
                    raise CheckpointError(
                        f"{self.folder}: no checkpoint is whole. {' '.join(broken)}"
                    )
                which = "" if step is None else f" of step {step} (there are {self.steps()})"
                raise NoCheckpoint(f"{self.folder}: holds no checkpoint{which}.")
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
                self._saver.broken.add(one.path)
                broken.append(str(error))
            return None
        if broken:
            warnings.warn(
                CheckpointWarning(f"Step {one.step} is loaded instead: {' '.join(broken)}"),
                stacklevel=3,
            )
        return checkpoint


def _check_name(name: Any) -> None:
    fine = isinstance(name, str) and _FILE_NAME.fullmatch(name) is not None
    if not fine or name in (".", "..", *_RESERVED) or len(name.encode()) > 255:
        raise ValueError(
            f"{_SAVE}: files has {name!r:.300}, which is no name of a file or folder in a "
            f"checkpoint; it has no '/', and is none of {_RESERVED}."
        )
