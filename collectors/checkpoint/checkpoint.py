"""Checkpoint that was read and verified."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from safetensors import safe_open

from .checkpoint_group import CheckpointGroup
from .errors import CheckpointError
from .files import open_file
from .format import Decoder
from .manifest import problems_of, read_manifest
from .shards import flatten, leaves, load_shards

STATE: Final = "state.json"
TENSORS: Final = "tensors.safetensors"
SHARDED: Final = "sharded"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that :meth:`CheckpointStore.load` read, all of it verified."""

    step: int
    """Of training, as it was given to ``save``."""
    state: dict[str, Any]
    """What was saved, on the CPU."""
    path: Path
    """The checkpoint's folder; what ``files`` wrote lies there under its name."""
    manifest: Mapping[str, Any]
    """Step, metric, versions, and the length and SHA-256 of every file."""
    _plain: Mapping[str, Mapping[str, Any]] = field(repr=False)
    _ranks: CheckpointGroup = field(repr=False)

    @property
    def sharded(self) -> tuple[str, ...]:
        """The names under which state dicts were saved as ``sharded``."""
        return tuple(self._plain)

    def load_sharded(
        self, name: str, target: dict[str, Any], *, may_lack: str | None = None
    ) -> list[str]:
        """Fill a state dict with one that was saved as ``sharded``; all ranks call it together.

        Args:
            name: under which it was saved.
            target: nested dictionaries and lists of tensors, sharded in whatever way over however
                many ranks; they are filled in place. Other values are replaced.
            may_lack: places of tensors that may not have been saved begin with this: the keys that
                lead to one, joined by dots. ``None``: all have been.

        Returns:
            The places of those that were not, which stay as they are.

        Raises:
            CheckpointError: there is none of the name, or it holds others, or of other shapes.
        """
        if name not in self._plain:
            raise CheckpointError(
                f"{self.path}: has no sharded state {name!r}; it has {sorted(self._plain)}."
            )
        tensors, _ = flatten(name, target)
        folder = self.path / SHARDED / name
        lacking = load_shards(folder, name, tensors, self._ranks, may_lack=may_lack)
        plain = self._plain[name]
        for holder, key, place, value in leaves(target):
            if not isinstance(value, torch.Tensor):
                if place not in plain:
                    raise CheckpointError(f"sharded {name!r}: {place!r} is not in the checkpoint.")
                holder[key] = plain[place]
        return lacking


def read_checkpoint(
    path: Path, tensorclasses: Mapping[str, Any], ranks: CheckpointGroup
) -> Checkpoint:
    """Verify and read the checkpoint of a folder; all ranks call it together.

    Raises:
        CheckpointError: it is not whole.
    """
    with ranks.agreed():
        manifest = read_manifest(path)
        try:
            problems = problems_of(path, manifest, (ranks.rank, ranks.size))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error}).") from error
        if problems:
            raise CheckpointError("; ".join(problems) + ".")
        try:
            with open_file(path / STATE) as file:
                tree = json.loads(file.read(), parse_constant=_refuse)
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path / STATE}: {error or type(error).__name__}.") from error
        try:
            tensors: Any = safe_open(path / TENSORS, framework="pt")
        except Exception as error:
            raise CheckpointError(f"{path / TENSORS}: {error}.") from error
        with tensors:
            try:
                # A copy, since what the library gives is the file itself.
                decoder = Decoder(lambda name: tensors.get_tensor(name).clone(), tensorclasses)
                decoded = decoder.decode(tree)
            except Exception as error:
                # The file says what was never saved; whatever that leads to, the file is wrong.
                raise CheckpointError(
                    f"{path / STATE}: {error} ({type(error).__name__})."
                ) from error
        match decoded:
            case {"state": dict(state), "sharded": dict(plain)}:
                pass
            case _:
                raise CheckpointError(f"{path / STATE}: holds no state.")
    return Checkpoint(manifest["step"], state, path, manifest, plain, ranks)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
