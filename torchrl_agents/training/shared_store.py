"""Checkpoints to which every rank of a run adds what it holds of the model and the optimizer."""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from collectors import CheckpointStore, RunState
from collectors.checkpoint.reading import Checkpoint
from collectors.resume.sharded_parts import Sharded
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.schema import CheckpointConfig

from .crew import Crew


class SharedStore(CheckpointStore):
    """The store of a run, on rank 0: what it does the other ranks do with it.

    Args:
        folder: of the checkpoints, in that of the run.
        cfg: how many are kept.
        crew: the ranks that save, each of which has a :class:`Shares`.

    Raises:
        SettingsError: ranks of other machines don't see the run's folder.
    """

    def __init__(self, folder: Path, cfg: CheckpointConfig, crew: Crew) -> None:
        self._crew = crew
        crew.tell("open checkpoints", str(folder.resolve()), cfg)
        _check_seen(folder, crew)
        super().__init__(folder, cfg.keep_last, cfg.keep_best, process_group=_group(crew))

    def save(self, step: int, state: Mapping[str, Any], **options: Any) -> Path | None:
        """See :meth:`CheckpointStore.save`."""
        about = {name: options[name] for name in ("metric", "wait")}
        self._crew.tell("save checkpoint", step, about)
        return super().save(step, state, **options)

    def load(self, step: int | str | Path | None = None) -> Checkpoint:
        """See :meth:`CheckpointStore.load`; the others load their shares then."""
        self._crew.tell("load checkpoint")
        return super().load(step)


class Shares:
    """What a rank other than 0 does of a run's checkpoints.

    Args:
        crew: of the run.
        parts: of which this rank has its share.
    """

    def __init__(self, crew: Crew, parts: Mapping[str, Sharded]) -> None:
        self._crew = crew
        self._state = RunState(identity={}, **parts)
        self._store: CheckpointStore
        crew.learn_job("open checkpoints", self._open)
        crew.learn_job("save checkpoint", self._save)
        crew.learn_job("load checkpoint", self._load)

    def _open(self, folder: str, cfg: CheckpointConfig) -> None:
        _check_seen(Path(folder), self._crew)
        self._store = CheckpointStore(
            folder, cfg.keep_last, cfg.keep_best, process_group=_group(self._crew)
        )

    def _save(self, step: int, about: Mapping[str, Any]) -> None:
        self._state.save(self._store, step, **about)

    def _load(self) -> None:
        self._state.restore(self._store)

    def close(self) -> None:
        """Wait for the last save."""
        self._store.close()


def _group(crew: Crew) -> Any:
    return None if crew.ranks.size == 1 else dist.group.WORLD


def _check_seen(folder: Path, crew: Crew) -> None:
    """Check that all ranks write to one and the same folder; they call it together.

    Raises:
        SettingsError: on rank 0, for all of them.
    """
    seen = crew.ranks.gather((folder.parent.is_dir(), socket.gethostname()))
    blind = [f"{rank} on {host}" for rank, (there, host) in enumerate(seen) if not there]
    if blind and crew.ranks.rank == 0:
        raise SettingsError(
            f"train.parallel: each rank writes its share of a checkpoint, and ranks {blind} don't "
            f"see {folder.parent.resolve()}. Start in a folder on a disk that all machines share."
        )
