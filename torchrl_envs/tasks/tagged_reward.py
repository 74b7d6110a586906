"""The reward of an answer between tags, for data whose answers are known."""

from collections.abc import Mapping
from typing import Any, Final

from torchrl_data.keys import REWARD
from torchrl_envs.graders.answers import read_tags
from torchrl_envs.rewards.answer import AnswerReward

NONE_BESIDE: Final[Any] = {"num_held_out": 0, "num_demonstrations": 0}
"""Settings of a task that is an environment alone."""


class TaggedReward(AnswerReward):
    """Scores what stands in ``<answer>``: right, another answer, or none."""

    component_keys = ("reward_answer", "reward_think", "reward_right", "success")

    def __init__(
        self, *, format_reward: float = 0.1, correct_reward: float = 1.0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.format_reward = format_reward
        self.correct_reward = correct_reward

    def _is_right(self, answer: str, row: Mapping[str, Any]) -> bool:
        """Return whether an answer, which is not empty, is right."""
        raise NotImplementedError

    def components(self, text: str, row: Mapping[str, Any], query: str) -> dict[str, Any]:
        """See :class:`AnswerReward`."""
        del query
        tags = read_tags(text)
        success = bool(tags.answer) and self._is_right(tags.answer, row)
        wrong = self.format_reward if tags.answer else 0.0
        reward = self.correct_reward if success else wrong
        return {
            REWARD: reward,
            "reward_answer": float(bool(tags.answer)),
            "reward_think": float(bool(tags.think)),
            "reward_right": reward,
            "success": success,
        }
