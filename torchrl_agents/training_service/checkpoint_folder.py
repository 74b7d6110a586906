"""Saved adapters on the disk, by the ``tinker://`` paths that clients know them by."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .adapted_model import AdapterShape, AdapterState
from .errors import RefusedRequest

Kind = Literal["weights", "sampler_weights"]
_KINDS: Final[tuple[Kind, ...]] = ("weights", "sampler_weights")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
_ABOUT, _OPTIMIZER, _ADAPTER = "about.json", "optimizer.safetensors", "adapter_model.safetensors"


class Saved(NamedTuple):
    """A checkpoint."""

    run: str
    kind: Kind
    name: str
    about: Mapping[str, Any]
    """``base_model``, ``time`` in seconds since 1970, ``user_metadata`` and the adapter's shape."""
    num_bytes: int

    @property
    def path(self) -> str:
        """By which clients know it."""
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    @property
    def shape(self) -> AdapterShape:
        """Of the adapter."""
        return AdapterShape(**self.about["shape"])


class CheckpointFolder:
    """Adapters below a folder: ``RUN/weights/NAME`` to go on from, ``RUN/sampler_weights/NAME``.

    Each holds what PEFT and vLLM load, and those to go on from the optimizer's state.

    Args:
        root: made when something is saved.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def save(
        self,
        run: str,
        kind: Kind,
        name: str,
        weights: AdapterState,
        write: Callable[[AdapterState, Path], None],
        *,
        base_model: str,
        base_digest: str = "",
        optimizer: Mapping[str, Tensor] | None = None,
        user_metadata: Mapping[str, str] | None = None,
        overwrite: bool = False,
    ) -> Saved:
        """Save an adapter, whole or not at all.

        Args:
            run: whose.
            kind: to go on from, or to sample with.
            name: of the checkpoint.
            weights: of the adapter.
            write: writes them into a folder.
            base_model: the name of the model.
            base_digest: of its frozen weights; none where it is not known.
            optimizer: its state, for one to go on from.
            user_metadata: kept with it.
            overwrite: take the place of one of this name.

        Raises:
            RefusedRequest: the name is none, or taken.
        """
        if not _NAME.fullmatch(name):
            raise RefusedRequest(
                f"The name {name!r} of a checkpoint must be letters, digits, '.', '_', ':' or '-', "
                "at most 200, and begin with a letter or digit."
            )
        final = self.root / run / kind / name
        if final.exists() and not overwrite:
            raise RefusedRequest(
                f"There is a checkpoint tinker://{run}/{kind}/{name}; give another name, or "
                "overwrite=True.",
                409,
            )
        partial = final.with_name(f".{name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        about = {
            "base_model": base_model,
            "base_digest": base_digest,
            "shape": asdict(weights.shape),
            "time": time.time(),
            "user_metadata": None if user_metadata is None else dict(user_metadata),
        }
        try:
            write(weights, partial)
            if optimizer is not None:
                save_file(dict(optimizer), partial / _OPTIMIZER)
            (partial / _ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
            for path in partial.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return self.find(f"tinker://{run}/{kind}/{name}")

    def find(self, path: str) -> Saved:
        """Return a checkpoint.

        Args:
            path: ``tinker://RUN/weights/NAME`` or ``tinker://RUN/sampler_weights/NAME``.

        Raises:
            RefusedRequest: it is no such path, or there is no such checkpoint.
        """
        run, kind, name = _parts(path)
        folder = self.root / run / kind / name
        try:
            about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RefusedRequest(f"There is no checkpoint {path} here.", 404) from None
        size = sum(file.stat().st_size for file in folder.iterdir())
        return Saved(run, kind, name, about, size)

    def check_base(self, saved: Saved, base_model: str, base_digest: str) -> None:
        """Check that a checkpoint is of an adapter over a model that is served.

        Args:
            saved: which.
            base_model: the name of the model that is to have it.
            base_digest: of its frozen weights; empty where it is not known.

        Raises:
            RefusedRequest: it is an adapter over another one.
        """
        name, known = saved.about["base_model"], saved.about.get("base_digest")
        if known and base_digest and known != base_digest:
            raise RefusedRequest(
                f"{saved.path} is an adapter of {name!r} with other weights than those that "
                f"{base_model!r} has here. Serve the model that it was trained over."
            )
        if not (known and base_digest) and name != base_model:
            raise RefusedRequest(f"{saved.path} is an adapter of {name!r}, not of {base_model!r}.")

    def load(self, saved: Saved) -> AdapterState:
        """Read the weights of a checkpoint.

        Raises:
            RefusedRequest: they can't be read.
        """
        return AdapterState(saved.shape, self._read(saved, _ADAPTER))

    def load_optimizer(self, saved: Saved) -> dict[str, Tensor]:
        """Read the optimizer's state of a checkpoint.

        Raises:
            RefusedRequest: it has none, as one to sample with, or it can't be read.
        """
        if not (self.root / saved.run / saved.kind / saved.name / _OPTIMIZER).is_file():
            raise RefusedRequest(f"{saved.path} has no state of an optimizer.")
        return self._read(saved, _OPTIMIZER)

    def _read(self, saved: Saved, name: str) -> dict[str, Tensor]:
        file = self.root / saved.run / saved.kind / saved.name / name
        try:
            return load_file(file)
        except (OSError, SafetensorError) as error:
            raise RefusedRequest(
                f"{saved.path} can't be read: {file} is not whole: {error}. Take another one."
            ) from error

    def delete(self, saved: Saved) -> None:
        """Delete a checkpoint."""
        shutil.rmtree(self.root / saved.run / saved.kind / saved.name)

    def of_run(self, run: str) -> list[Saved]:
        """Return the checkpoints of a run, oldest first."""
        found = self._found(run) if _NAME.fullmatch(run) else ()
        return sorted(found, key=lambda saved: saved.about["time"])

    def __iter__(self) -> Iterator[Saved]:
        return self._found("*")

    def _found(self, run: str) -> Iterator[Saved]:
        for file in sorted(self.root.glob(f"{run}/*/*/{_ABOUT}")):
            own, kind, name = file.parts[-4:-1]
            if kind in _KINDS and not name.startswith("."):
                yield self.find(f"tinker://{own}/{kind}/{name}")


def _parts(path: str) -> tuple[str, Kind, str]:
    scheme, _, rest = path.partition("://")
    parts = rest.split("/")
    if scheme != "tinker" or len(parts) != 3 or parts[1] not in _KINDS:
        raise RefusedRequest(
            f"{path!r} is no path of a checkpoint: tinker://RUN/weights/NAME or "
            "tinker://RUN/sampler_weights/NAME."
        )
    if not (_NAME.fullmatch(parts[0]) and _NAME.fullmatch(parts[2])):
        raise RefusedRequest(f"{path!r} has a name that no checkpoint has.")
    kind: Any = parts[1]
    return parts[0], kind, parts[2]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of an optimizer as tensors by name, ``NUMBER.NAME``."""
    state = optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": value.detach().cpu().clone()
        for number, values in state.items()
        for name, value in values.items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Set the state that :func:`optimizer_tensors` gave.

    Raises:
        RefusedRequest: it is that of other parameters.
    """
    whole = optimizer.state_dict()
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = value
    known = set(whole["param_groups"][0]["params"])
    if state and set(state) != known:
        raise RefusedRequest("The optimizer's state is that of an adapter of another shape.")
    optimizer.load_state_dict({**whole, "state": state})
