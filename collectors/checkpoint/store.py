"""Checkpoints of a folder: saved whole or not at all, and the newest that verifies."""

import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import torch

from torchrl_data import __version__
from torchrl_data.validation import check_counts, check_numbers, one_of

from . import fsio
from .errors import CheckpointError, CheckpointWarning
from .lock import WriterLock
from .manifest import MANIFEST
from .reading import SHARDED, STATE, TENSORS, Checkpoint, read_checkpoint
from .retention import Retention, Stored, remove_leftovers, stored
from .staging import StagingBuffers
from .tensor_file import Entry, check_header
from .tensordicts import StateEncoder, Tensorclasses
from .writing import StagedCheckpoint

_SAVE: Final = "CheckpointStore.save"
_RESERVED: Final = (MANIFEST, STATE, TENSORS, SHARDED)
FileWriter = Callable[[Path], None]


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
        self.last_error: CheckpointError | None = None
        """Why the last save failed; ``None`` if it did not."""
        self._keep_best = keep_best
        self._on_error = on_error
        self._tensorclasses = Tensorclasses(tensorclasses)
        self._retention = Retention(keep_last, keep_best, best)
        self._buffers = StagingBuffers()
        self._lock = WriterLock(self.folder)
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._lock.release)

    # Saving -------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metric: float | None = None,
        wait: bool = True,
        files: Mapping[str, FileWriter] | None = None,
    ) -> Path | None:
        """Save a state.

        A step may be saved again; the new checkpoint takes the place of the old one once it is
        whole.

        Args:
            step: of training, 0 or more.
            state: what to save; its keys are strings.
            metric: by which ``keep_best`` ranks it.
            wait: ``False`` returns as soon as the state is copied, and writes it on a thread. What
                fails there is told by the next ``save``, by :meth:`wait` or :meth:`close`.
            files: further files or folders by name, each written by a function that gets the path.
                They are called before ``save`` returns.

        Returns:
            The checkpoint's folder; ``None`` if saving failed and ``on_error`` is ``"warn"``.

        Raises:
            CheckpointError: something in the state can't be stored; the message says where. With
                ``on_error="raise"`` also: it, or the save before it, could not be written.
            ValueError: an argument has no meaning.
        """
        self.wait()
        files = dict(files or {})
        self._check(step, state, metric, files)
        step = int(step)
        self._buffers.begin()
        encoder = StateEncoder(self._tensorclasses, None if wait else self._buffers)
        try:
            tree = encoder.encode(dict(state))
            check_header(encoder.entries)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"state: {error}.") from error
        self._buffers.finish()
        about = {"metric": metric, "torch": torch.__version__, "library": __version__}
        staged = self._begin(step, files)
        if staged is None:
            self._tell()
            return None
        if wait:
            self._finish(staged, tree, encoder.entries, about)
            return None if self._tell() else staged.path
        # No daemon: a process that ends meanwhile waits for its last checkpoint.
        self._thread = threading.Thread(
            target=self._finish, args=(staged, tree, encoder.entries, about), name="checkpoint"
        )
        self._thread.start()
        return staged.path

    def _check(
        self, step: int, state: Any, metric: float | None, files: Mapping[str, FileWriter]
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
        for name in files:
            _check_name(name)

    def _begin(self, step: int, files: Mapping[str, FileWriter]) -> StagedCheckpoint | None:
        """A staged folder with the files of others in it, unless that fails."""
        staged = None
        try:
            fsio.make_folders(self.folder)
            self._lock.acquire()
            remove_leftovers(self.folder)
            saves = stored(self.folder)
            staged = StagedCheckpoint(self.folder, step, saves[0].save + 1 if saves else 1)
            staged.write_files(files)
        except CheckpointError as error:
            self.last_error = error
        except OSError as error:
            self.last_error = _failed(self.folder, step, error)
        except BaseException:
            if staged is not None:
                staged.discard()
            raise
        else:
            self.last_error = None
            return staged
        if staged is not None:
            staged.discard()
        return None

    def _finish(
        self, staged: StagedCheckpoint, tree: Any, entries: dict[str, Entry], about: dict[str, Any]
    ) -> None:
        """Write, publish, and remove what need not be kept; what fails is noted."""
        try:
            staged.write_state(tree, entries)
            staged.publish(about)
        except Exception as error:
            staged.discard()
            self.last_error = _failed(self.folder, staged.step, error)
            return
        except BaseException:
            staged.discard()
            raise
        try:
            self._retention.prune(self.folder)
        except OSError as error:
            self.last_error = CheckpointError(
                f"{self.folder}: step {staged.step} is saved, but old checkpoints could not be "
                f"removed ({error})."
            )
            self.last_error.__cause__ = error

    def _tell(self) -> bool:
        """Raise or warn of what failed; whether something did."""
        error = self.last_error
        if error is None:
            return False
        if self._on_error == "raise":
            raise error
        warnings.warn(CheckpointWarning(str(error)), stacklevel=3)
        return True

    def wait(self) -> None:
        """Wait until what was saved with ``wait=False`` is on the disk.

        Raises:
            CheckpointError: it could not be written, and ``on_error`` is ``"raise"``.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
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
            self._buffers = StagingBuffers()

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
            return read_checkpoint(Path(step), self._tensorclasses)
        found = stored(self.folder)
        candidates = [one for one in found if step is None or one.step == step]
        if not candidates:
            which = "" if step is None else f" of step {step} (there are {self.steps()})"
            raise CheckpointError(f"{self.folder}: holds no checkpoint{which}.")
        return self._first_whole(candidates)

    def _first_whole(self, candidates: Sequence[Stored]) -> Checkpoint:
        broken: list[str] = []
        for one in candidates:
            try:
                checkpoint = read_checkpoint(one.path, self._tensorclasses)
            except CheckpointError as error:
                # A store that saves meanwhile may have removed it.
                if one.path.exists():
                    self._retention.broken.add(one.path)
                    broken.append(str(error))
                continue
            if broken:
                warnings.warn(
                    CheckpointWarning(f"Step {one.step} is loaded instead: {' '.join(broken)}"),
                    stacklevel=3,
                )
            return checkpoint
        raise CheckpointError(f"{self.folder}: no checkpoint is whole. {' '.join(broken)}")


def _check_name(name: Any) -> None:
    fine = isinstance(name, str) and name not in ("", ".", "..", *_RESERVED)
    if not fine or "/" in name or "\0" in name or len(name.encode(errors="replace")) > 255:
        raise ValueError(
            f"{_SAVE}: files has {name!r:.300}, which is no name of a file or folder in a "
            f"checkpoint; it has no '/', and is none of {_RESERVED}."
        )


def _failed(folder: Path, step: int, error: Exception) -> CheckpointError:
    where = getattr(error, "filename", None) or folder
    failure = CheckpointError(
        f"{where}: step {step} could not be saved ({error}). The checkpoints that are there stay."
    )
    failure.__cause__ = error
    return failure
