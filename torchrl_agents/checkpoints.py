"""Checkpoints of a run: when it is saved, and how it goes on."""

import copy
import logging
import math
import socket
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from collectors import CheckpointMismatch, CheckpointStore, CheckpointWarning, RunState
from collectors.streaming.background_collector import BackgroundCollector
from objectives import Ranks

from .found_run import CHECKPOINTS
from .rank_jobs import RankJob, tell
from .run import Failures
from .settings.errors import SettingsError
from .settings.schema import CheckpointConfig

_LOG = logging.getLogger("torchrl_agents")
_UNCHANGED_BY_COLLECTING = ("model", "optimizer", "opponents", "reference")


class Checkpoints:
    """Saves a run every so many steps and when it is stopped; every rank adds what it holds.

    Rank 0 opens, saves and restores, and the others open, load and write with it.

    Args:
        cfg: how often a run is saved, and how many checkpoints are kept.
        ranks: those that save.
        state: the parts of the run; of another rank than 0, those of which it has a share.
    """

    def __init__(self, cfg: CheckpointConfig, ranks: Ranks, state: RunState) -> None:
        self._cfg = cfg
        self._ranks = ranks
        self._state = state
        self._mark: dict[str, Any] | None = None
        self._store: CheckpointStore | None = None
        self.failures = Failures("checkpoint")
        """Saves that failed."""

    def open(self, folder: Path) -> Self:
        """Open the checkpoints in the folder of a run.

        Raises:
            SettingsError: ranks of other machines don't see it; on rank 0, for all of them.
        """
        ranks = self._ranks
        if ranks.rank == 0:
            tell(ranks, RankJob.OPEN_CHECKPOINTS, folder.resolve())
        seen = ranks.gather((folder.is_dir(), socket.gethostname()))
        blind = [f"{rank} on {host}" for rank, (there, host) in enumerate(seen) if not there]
        if blind and ranks.rank == 0:
            raise SettingsError(
                f"train.parallel: each rank writes its share of a checkpoint, and ranks {blind} "
                f"don't see {folder.resolve()}. Start in a folder on a disk that all share."
            )
        self._store = CheckpointStore(
            folder / CHECKPOINTS,
            self._cfg.keep_last,
            self._cfg.keep_best,
            on_error="raise" if self._cfg.on_error == "stop" else "warn",
            process_group=None if ranks.size == 1 else dist.group.WORLD,
        )
        return self

    def load(self) -> int:
        """Load the newest checkpoint, as every rank does; gives its step, or 0."""
        assert self._store is not None
        return self._state.restore(self._store)

    def write(self, step: int, **options: Any) -> None:
        """Write the share of this rank; the options are those of :meth:`.RunState.save`."""
        assert self._store is not None
        self._state.save(self._store, step, **options)

    def close(self) -> None:
        """Wait for the last save, and let another run save into the folder."""
        if self._store is not None:
            self._store.close()
            self.failures.note(self._store.last_error)

    def restore(self) -> tuple[int, Mapping[str, Any]]:
        """Go on from the newest checkpoint.

        Returns:
            The steps that were made, and what was kept beside the parts; 0 and nothing where there
            is no checkpoint.

        Raises:
            SettingsError: it belongs to another run.
        """
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                tell(self._ranks, RankJob.LOAD_CHECKPOINT)
                step = self.load()
        except CheckpointMismatch as error:
            raise SettingsError(f"resume: {error}") from error
        except ValueError as error:  # of a part
            raise SettingsError(f"resume: the checkpoint can't be used here: {error}") from error
        for each in told:
            if issubclass(each.category, CheckpointWarning):  # of one that is damaged
                _LOG.warning("resume: %s", each.message)
            else:
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        return step, self._state.further

    def mark(self) -> None:
        """A batch is about to be collected; if that is cut short the run is saved as it is now."""
        if not isinstance(self._state.parts.get("collector"), BackgroundCollector):
            self._mark = copy.deepcopy(self._state.state_dict(without=_UNCHANGED_BY_COLLECTING))

    def unmark(self) -> None:
        """The batch is there."""
        self._mark = None

    def after(self, step: int, metrics: Mapping[str, float], further: Mapping[str, Any]) -> None:
        """A step is over: save it if it is time; see :meth:`save`."""
        if self._cfg.every is not None and step % self._cfg.every == 0:
            self.save(step, metrics, further, wait=False)

    def save(
        self,
        step: int,
        metrics: Mapping[str, float],
        further: Mapping[str, Any],
        *,
        wait: bool = True,
    ) -> None:
        """Save now.

        Args:
            step: steps that are over.
            metrics: of the last one; the best are kept by its reward, or else its loss.
            further: what to keep beside the parts.
            wait: until it is on the disk.

        Raises:
            CheckpointError: with ``checkpoint.on_error=stop``, this save or the one before failed.
        """
        assert self._store is not None
        self._store.wait()
        self.failures.note(self._store.last_error)
        metric = metrics.get("reward", -metrics.get("loss", 0.0))
        metric = metric if math.isfinite(metric) else -sys.float_info.max
        about: Any = {"metric": metric, "wait": wait}
        tell(self._ranks, RankJob.SAVE_CHECKPOINT, step, **about)
        self.write(step, **about, further=further, since=self._mark)
        self.failures.note(self._store.last_error)
