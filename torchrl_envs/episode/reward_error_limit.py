"""Limit of the errors of rewards, beyond which a run ends."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from torchrl.envs import Transform

from torchrl_data import page
from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_data.checks import check_counts, check_numbers
from torchrl_data.stop_reason import StopReason, stop_reason_of
from torchrl_envs.entries.rewards import kinds_of

from .episode import Episode


class TooManyRewardErrors(RuntimeError):
    """More of the recent rollouts could not be scored than the limit allows."""


class RewardErrorLimit(ChecksAttributes, Transform):
    """Stops the run when the rewards of more than a fraction of the recent rollouts fail.

    Every :class:`~torchrl_envs.EpisodeEnv` has one with the defaults; append another
    to change them.

    Args:
        max_error_fraction: of the last ``window`` rollouts. A run stops as soon as the number of
            errors that this allows is exceeded, before ``window`` rollouts were seen too; 1 never
            stops.
        window: number of rollouts.

    Raises:
        ValueError: the fraction is not in [0, 1], or the window is not positive.
    """

    def __init__(self, max_error_fraction: float = 0.05, *, window: int = 200) -> None:
        super().__init__()
        check_counts("RewardErrorLimit", window=window)
        self.max_error_fraction: float = self._checked_change(
            "max_error_fraction", max_error_fraction
        )
        self._recent: deque[str] = deque(maxlen=window)

    changeable = frozenset({"max_error_fraction"})

    def _checked_change(self, name: str, value: Any) -> Any:
        check_numbers("RewardErrorLimit", "[0, 1]", **{name: value})
        return value

    def record(self, episodes: Sequence[Episode]) -> None:
        """Take note of rollouts that have just ended.

        Args:
            episodes: with their scores.

        Raises:
            TooManyRewardErrors: the limit is exceeded; the message counts the kinds of errors.
        """
        self._recent.extend(episode.score.error for episode in episodes)
        failed = [error for error in self._recent if error]
        window = self._recent.maxlen or 1
        if len(failed) <= self.max_error_fraction * window:
            return
        summary = "\n".join(f"  {each}" for each in kinds_of(failed))
        # Those of which the episode failed were never scored.
        num_ended = sum(
            stop_reason_of(error, StopReason.TRUNCATED)[0].is_failure for error in failed
        )
        what = "The rewards of " if num_ended == 0 else ""
        how = f"failed, {num_ended} of them before they could be scored" if num_ended else "failed"
        mend = "what ended the rollouts"
        if num_ended < len(failed):
            mend = "the reward (None, not NaN, says that it does not apply)"
        raise TooManyRewardErrors(
            f"{what}{len(failed)} of the last {len(self._recent)} rollouts {how}; "
            f"{self.max_error_fraction:.0%} of {window} are allowed:\n{summary}\nThe last one:\n"
            f"{failed[-1]}\nMend {mend}, or allow more with "
            "collector.max_error_fraction= of a recipe (episodes.max_error_fraction= of one "
            "without a collector), or RewardErrorLimit(max_error_fraction=...). "
            f"See {page('docs/rewards.md')}."
        )

    def get_extra_state(self) -> list[str]:
        """The errors of the recent rollouts, part of ``state_dict()``."""
        return list(self._recent)

    def set_extra_state(self, state: list[str]) -> None:
        """Go back to a state; what ``load_state_dict()`` calls.

        Args:
            state: what :meth:`get_extra_state` gave.
        """
        self._recent = deque(state, maxlen=self._recent.maxlen)

    @staticmethod
    def deal_extra_states(states: Sequence[list[str]], count: int) -> list[list[str]]:
        """Return what copies of it remember, dealt out to another number of copies.

        Args:
            states: what :meth:`get_extra_state` gave, of each.
            count: how many there are now.

        Returns:
            A state for each of them; every error is in one.
        """
        errors = [error for state in states for error in state]
        return [errors[number::count] for number in range(count)]
