"""A checkpoint that was loaded, and how it is."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from . import fsio
from .errors import CheckpointError
from .manifest import read_manifest, verify
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


def read_checkpoint(path: Path, tensorclasses: Tensorclasses) -> Checkpoint:
    """Verify and read the checkpoint of a folder.

    Raises:
        CheckpointError: it is not whole.
    """
    manifest = read_manifest(path)
    verify(path, manifest)
    tree = _read_tree(path / STATE)
    try:
        tensors = TensorFile(path / TENSORS)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / TENSORS}: {error}.") from error
    try:
        state = StateDecoder(tensors, tensorclasses).decode(tree)
    except Exception as error:
        # The file says what was never saved; whatever that leads to, it is the file that is wrong.
        raise CheckpointError(f"{path / STATE}: {error} ({type(error).__name__}).") from error
    finally:
        tensors.close()
    if not isinstance(state, dict):
        raise CheckpointError(f"{path / STATE}: holds a {type(state).__name__}, not a state.")
    return Checkpoint(manifest["step"], state, path, manifest)


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
