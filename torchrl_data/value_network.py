"""Protocols of critics and reward models, so that packages need not import each other.

Shape legend: N packed tokens, B sequences, K target tokens (the ``True`` entries of a mask).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class ValueNetwork(Protocol):
    """Something that says what the rest of an episode is worth, before tokens are sampled.

    ``TransformersCritic`` is one; a loss takes any.
    """

    def value_packed(self, ids: Tensor, lengths: Tensor, target_mask: Tensor) -> Tensor:
        """Give the value of the state before each masked token: of all tokens before it.

        Args:
            ids: int64 ``[N]``, the sequences one after the other, without padding.
            lengths: int64 ``[B]``, tokens of each sequence; sums to N.
            target_mask: bool ``[N]``. The first token of a sequence has nothing before it and can't
                be a target.

        Returns:
            float32 ``[K]`` in packed order, differentiable.
        """
        ...


def check_value_network(who: str, model: object) -> None:
    """Check that a model gives the values of packed tokens."""
    if not isinstance(model, ValueNetwork):
        raise TypeError(
            f"{who} needs a model with a value_packed method (torchrl_data.ValueNetwork), "
            f"such as torchrl_modules.TransformersCritic, got {type(model)}."
        )


@runtime_checkable
class RewardNetwork(Protocol):
    """Something that says what a whole conversation is worth: a reward model.

    ``TransformersCritic`` is one; a loss takes any.
    """

    def reward_packed(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Give the reward of each sequence: the value after all of its tokens.

        Args:
            ids: int64 ``[N]``, the sequences one after the other, without padding.
            lengths: int64 ``[B]``, tokens of each sequence, none of them 0; sums to N.

        Returns:
            float32 ``[B]``, differentiable.
        """
        ...


def check_reward_network(who: str, model: object) -> None:
    """Check that a model gives the rewards of packed sequences."""
    if not isinstance(model, RewardNetwork):
        raise TypeError(
            f"{who} needs a model with a reward_packed method (torchrl_data.RewardNetwork), "
            f"such as torchrl_modules.TransformersCritic, got {type(model)}."
        )
