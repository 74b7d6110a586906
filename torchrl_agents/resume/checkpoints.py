"""When a run is saved, and how it goes on."""

import copy
import math
import sys
from collections.abc import Mapping
from typing import Any, Final, Self

from collectors import CheckpointMismatch, CheckpointStore, RunState
from collectors.base import BackgroundCollector
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.schema import CheckpointConfig

UNCHANGED_BY_COLLECTING: Final = ("model", "optimizer", "opponents", "reference")


class Checkpoints:
    """Saves a run every so many steps and when it is stopped.

    Args:
        cfg: how often.
        store: of the run.
        state: its parts.
    """

    def __init__(self, cfg: CheckpointConfig, store: CheckpointStore, state: RunState) -> None:
        self._every = cfg.every
        self._state = state
        self._store = store
        self._mark: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def restore(self) -> tuple[int, Mapping[str, Any]]:
        """Go on from the newest checkpoint.

        Returns:
            The steps that were made, and what was kept beside the parts; 0 and nothing where there
            is no checkpoint.

        Raises:
            SettingsError: it belongs to another run.
        """
        try:
            step = self._state.restore(self._store)
        except CheckpointMismatch as error:
            raise SettingsError(f"resume: {error}") from error
        except ValueError as error:  # of a part
            raise SettingsError(f"resume: the checkpoint can't be used here: {error}") from error
        return step, self._state.further

    def mark(self) -> None:
        """A batch is about to be collected; if that is cut short the run is saved as it is now."""
        if not isinstance(self._state.parts.get("collector"), BackgroundCollector):
            self._mark = copy.deepcopy(self._state.state_dict(without=UNCHANGED_BY_COLLECTING))

    def unmark(self) -> None:
        """The batch is there."""
        self._mark = None

    def after(self, step: int, metrics: Mapping[str, float], further: Mapping[str, Any]) -> None:
        """A step is over: save it if it is time.

        Args:
            step: its number.
            metrics: its own; the best are kept by its reward, or else its loss.
            further: what to keep beside the parts.
        """
        if self._every is not None and step % self._every == 0:
            self._save(step, metrics, further, wait=False)

    def save(self, step: int, metrics: Mapping[str, float], further: Mapping[str, Any]) -> None:
        """Save now, and wait until it is on the disk.

        Args:
            step: steps that are over.
            metrics: of the last one.
            further: what to keep beside the parts.
        """
        self._save(step, metrics, further, wait=True)

    def _save(
        self, step: int, metrics: Mapping[str, float], further: Mapping[str, Any], *, wait: bool
    ) -> None:
        metric = metrics.get("reward", -metrics.get("loss", 0.0))
        metric = metric if math.isfinite(metric) else -sys.float_info.max
        self._state.save(
            self._store, step, metric=metric, wait=wait, further=further, since=self._mark
        )
