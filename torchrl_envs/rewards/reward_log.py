"""What reward functions log beside their rewards, and what they are told of the training."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from torchrl_envs.episode.episode import Episode

LOGGED_METRICS: Final = "logged_metrics"
"""Numbers that reward functions logged, a dictionary per row."""
LOGGED_EXTRA: Final = "logged_extra"
"""Further values of each rollout that reward functions logged, a dictionary per row."""


@dataclass
class TrainerState:
    """How far the training is: what a reward function gets as ``trainer_state``."""

    global_step: int = 0
    """Updates of the policy's weights since the first batch; a collector counts them."""
    max_steps: int = 0
    """Of the whole training; 0 where nobody has set it."""


class RewardLog:
    """What one call of a reward function logs, of the rollouts that it scores.

    Args:
        num_rollouts: how many.
    """

    def __init__(self, num_rollouts: int) -> None:
        self.num_rollouts = num_rollouts
        self._metrics: dict[str, list[float]] = defaultdict(list)
        self._extra: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        """Log a number; a step's metric is the mean over the rollouts of the calls that log it.

        Args:
            name: of the metric.
            value: a number; of several in one call the mean counts.

        Raises:
            TypeError: it is none.
        """
        number = float(value)
        self._metrics[str(name)].append(number)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a value of each rollout, to be shown beside it.

        Args:
            column: its name.
            values: one per rollout, in order.

        Raises:
            ValueError: there are more or fewer.
        """
        given = list(values)
        if len(given) != self.num_rollouts:
            raise ValueError(
                f"log_extra({column!r}) takes one value per rollout: expected "
                f"{self.num_rollouts}, got {len(given)}."
            )
        self._extra[str(column)] = given

    def log_value(self, column: str, value: Any) -> None:
        """:meth:`log_extra` of a function of one rollout."""
        self.log_extra(column, [value])

    def write_to(self, episodes: Sequence[Episode]) -> None:
        """Give the rollouts what was logged of them.

        Args:
            episodes: the rollouts.
        """
        # A function that missed its deadline may still be logging.
        means = {name: fmean(values) for name, values in list(self._metrics.items())}
        extra = dict(self._extra)
        if not (means or extra):
            return
        for i, episode in enumerate(episodes):
            own = {column: values[i] for column, values in extra.items()}
            for key, values in ((LOGGED_METRICS, means), (LOGGED_EXTRA, own)):
                if values:
                    episode.metrics[key] = {**episode.metrics.get(key, {}), **values}
