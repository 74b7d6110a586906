"""When too many rewards fail, the run stops and says why."""

from collections import Counter, deque
from collections.abc import Sequence

from torchrl.envs import Transform

from .episode import Episode


class TooManyRewardErrors(RuntimeError):
    """More of the recent rollouts could not be scored than the limit allows."""


class RewardErrorLimit(Transform):
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
        if not 0 <= max_error_fraction <= 1 or window < 1:
            raise ValueError(
                "RewardErrorLimit: max_error_fraction must be in [0, 1] and window at least 1, got "
                f"{max_error_fraction} and {window}."
            )
        self.max_error_fraction = max_error_fraction
        self._recent: deque[str] = deque(maxlen=window)

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
        kinds = Counter(_kind(error) for error in failed).most_common(5)
        summary = "\n".join(f"  {count} x {kind}" for kind, count in kinds)
        raise TooManyRewardErrors(
            f"The rewards of {len(failed)} of the last {len(self._recent)} rollouts failed; "
            f"{self.max_error_fraction:.0%} of {window} are allowed:\n{summary}\nThe last one:\n"
            f"{failed[-1]}\nMend the reward, or allow more with "
            "RewardErrorLimit(max_error_fraction=...)."
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
        """What copies of it remember, dealt out to another number of copies.

        Args:
            states: what :meth:`get_extra_state` gave, of each.
            count: how many there are now.

        Returns:
            A state for each of them; every error is in one.
        """
        errors = [error for state in states for error in state]
        return [errors[number::count] for number in range(count)]


def _kind(error: str) -> str:
    """What errors of a kind have in common: who failed, and the last line of the traceback."""
    lines = error.splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0].split(' raised ')[0]} raised {lines[-1]}"
