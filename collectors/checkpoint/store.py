"""Checkpoints of a folder: saved whole or not at all, and the newest that verifies."""

import re
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist

from torchrl_data import __version__
from torchrl_data.checks import check_counts, check_numbers, one_of

from .checkpoint import SHARDED, STATE, TENSORS, Checkpoint, read_checkpoint
from .checkpoint_group import CheckpointGroup
from .errors import CheckpointError, CheckpointWarning, NoCheckpoint
from .format import StagingBuffers, known_tensorclasses
from .manifest import MANIFEST
from .retention import StoredCheckpoint, stored
from .saver import FileWriter, Saver

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
        self._ranks = CheckpointGroup(process_group)
        keep = (keep_last, keep_best, best)
        self._saver = Saver(self.folder, self._tensorclasses, keep, self._ranks)
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._saver.end)

    @property
    def rank(self) -> int:
        """Rank of this process among those that save and load together; 0 is the first."""
        return self._ranks.rank

    @property
    def last_error(self) -> CheckpointError | None:
        """Error of the last save; ``None`` if it did not fail."""
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

    def _read(self, one: StoredCheckpoint, broken: list[str]) -> Checkpoint | None:
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
