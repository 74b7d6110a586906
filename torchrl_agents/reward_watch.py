"""Watch over the reward of a run that goes on: what is gamed is warned of, or ends the run."""

import logging
import time
from pathlib import Path
from typing import Final

from torchrl_agents.settings.schema import RolloutsConfig, TrainingConfig

from .run import Failures

_LOG: Final = logging.getLogger("torchrl_agents")
_SHARE: Final = 0.03
"""Of the time since the check before, what one may take."""


class RewardWatch:
    """Reads the record of a run for a reward that is gamed, and warns once of each finding.

    A check that would take more than 3 % of the time since the one before waits for the next turn,
    unless the run is to end with what it finds.

    Args:
        cfg: the settings: how often, and with which findings the run ends.
        folder: of the run.
    """

    def __init__(self, cfg: TrainingConfig, folder: Path) -> None:
        record = cfg.record if isinstance(cfg, RolloutsConfig) else None
        self._every = None if record is None else record.check_every
        self._stop_on = [] if record is None else record.stop_on
        self._folder = folder
        self._told: set[str] = set()
        self._since = time.monotonic()
        self._cost_s = 0.0
        self.ends_run = False
        """Whether something of ``record.stop_on`` was found."""
        self._failures = Failures("record.check_every")  # the run goes on without a check

    def after(self, step: int) -> None:
        """Check what is recorded, if it is time to.

        Args:
            step: that was recorded last, from 1.
        """
        began = time.monotonic()
        has_time = self._cost_s <= _SHARE * (began - self._since) or self._stop_on
        if self._every is None or step % self._every or not has_time:
            return
        try:
            found = self._check(step)
        except Exception as error:
            self._failures.note(error)
            return
        self._since = time.monotonic()
        self._cost_s = self._since - began
        ends = [code for code in self._stop_on if code in found]
        if ends:
            self.ends_run = True
            _LOG.warning("done: record.stop_on found %s", ", ".join(ends))

    def _check(self, step: int) -> set[str]:
        """Warn of what is new; gives the codes of all that is found."""
        from .explain.explanation import gamed_rewards  # most runs end before the first check

        found = gamed_rewards(self._folder)
        for finding in found:
            if finding.code not in self._told:
                row = finding.rows[0]
                _LOG.warning(
                    "step %d: the reward may be gamed (%s). %s %s See torchrl-agents view %s "
                    "--step %d --group %d --sample %d, and docs/explain.md.",
                    *(step, finding.code, finding.what, finding.change, self._folder, *row),
                )
        self._told |= {finding.code for finding in found}
        return {finding.code for finding in found}
