"""Turns of an episode as another one of its draw may take them again.

Shape legend: T tokens of a turn.
"""

from typing import NamedTuple, Self

from torch import Tensor

from torchrl_data.conversation import Conversations
from torchrl_data.messages import Message

from .episode import Episode
from .resources import Resources


class TurnPoint(NamedTuple):
    """A turn that the policy has taken, and how the episode stood when it was taken."""

    before: Episode
    """A fork of the episode, from before the turn; it holds nothing."""
    after: Conversations
    """One: the conversation with the turn."""
    finish_reason: str
    """Of the turn."""

    @classmethod
    def of(cls, before: Episode, after: Conversations, finish_reason: str) -> Self:
        """The turn that an episode has just taken.

        Args:
            before: the episode, which the turn is not told of yet.
            after: its conversation with the turn.
            finish_reason: of the turn.
        """
        fork = before.fork()
        fork.resources = Resources()
        return cls(fork, after, finish_reason)

    @property
    def log_probs(self) -> Tensor:
        """Of the tokens of the turn, in nats, float32 ``[T]``."""
        return self.after.log_probs(0)[self.after.position(0).response_start :]

    @property
    def message(self) -> Message:
        """What the policy said."""
        return self.after.last_message(0)
