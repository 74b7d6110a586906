"""A checkpoint that was loaded, and how it is."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from . import fsio
from .errors import CheckpointError
from .manifest import read_manifest, verify
from .ranks import Ranks
from .sharded import fill, flatten, load_shards
from .tensor_file import TensorFile
from .tensordicts import StateDecoder, Tensorclasses

STATE: Final = "state.json"
TENSORS: Final = "tensors.safetensors"
SHARDED: Final = "sharded"


@dataclass(frozen=True)
class Checkpoint:
    """What :meth:`CheckpointStore.load` read, all of it verified."""

    step: int
    """Of training, as it was given to ``save``."""
    state: dict[str, Any]
    """What was saved, on the CPU."""
    path: Path
    """The checkpoint's folder; what ``files`` wrote lies there under its name."""
    manifest: Mapping[str, Any]
    """Step, metric, versions, and the length and SHA-256 of every file."""
    _plain: Mapping[str, Mapping[str, Any]] = field(repr=False)
    _ranks: Ranks = field(repr=False)

    @property
    def sharded(self) -> tuple[str, ...]:
        """The names under which state dicts were saved as ``sharded``."""
        return tuple(self._plain)

    def load_sharded(self, name: str, target: dict[str, Any]) -> None:
        """Fill a state dict with one that was saved as ``sharded``; all ranks call it together.

        Args:
            name: under which it was saved.
            target: nested dictionaries and lists of tensors, sharded in whatever way over however
                many ranks; they are filled in place. Other values are replaced.

        Raises:
            CheckpointError: there is none of the name, or it holds others, or of other shapes.
        """
        if name not in self._plain:
            raise CheckpointError(
                f"{self.path}: has no sharded state {name!r}; it has {sorted(self._plain)}."
            )
        flat = flatten(name, target)
        load_shards(self.path / SHARDED / name, name, flat.tensors, self._ranks)
        fill(name, target, self._plain[name])


def read_checkpoint(path: Path, tensorclasses: Tensorclasses, ranks: Ranks) -> Checkpoint:
    """Verify and read the checkpoint of a folder; all ranks call it together.

    Raises:
        CheckpointError: it is not whole.
    """
    return ranks.agree(lambda: _read(path, tensorclasses, ranks))


def _read(path: Path, tensorclasses: Tensorclasses, ranks: Ranks) -> Checkpoint:
    manifest = read_manifest(path)
    verify(path, manifest, (ranks.rank, ranks.size))
    tree = _read_tree(path / STATE)
    try:
        tensors = TensorFile(path / TENSORS)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / TENSORS}: {error}.") from error
    try:
        decoded = StateDecoder(tensors, tensorclasses).decode(tree)
    except Exception as error:
        # The file says what was never saved; whatever that leads to, it is the file that is wrong.
        raise CheckpointError(f"{path / STATE}: {error} ({type(error).__name__}).") from error
    finally:
        tensors.close()
    match decoded:
        case {"state": dict(state), "sharded": dict(plain)}:
            return Checkpoint(manifest["step"], state, path, manifest, plain, ranks)
    raise CheckpointError(f"{path / STATE}: holds no state.")


def _read_tree(path: Path) -> Any:
    try:
        descriptor = fsio.open_file(path)
        try:
            text = b"".join(bytes(chunk) for chunk in fsio.chunks(descriptor))
        finally:
            fsio.close(descriptor)
        return json.loads(text, parse_constant=_refuse)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error or type(error).__name__}.") from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
