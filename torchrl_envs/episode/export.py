"""The entries that every step of an episode has, whether or not anything happened in it.

Shape legend: B rows, in whatever batch shape; T tokens of the longest row.
"""

import math
from collections.abc import Sequence

import torch
from tensordict import NestedKey, NonTensorData, TensorDictBase
from torchrl.data import Binary, Composite, NonTensor, Unbounded

from torchrl_data.conversation.object_entries import write_objects
from torchrl_data.keys import (
    GROUP_ID,
    MAX_NEW_TOKENS,
    REWARD,
    REWARDS,
    ROW,
    SCORABLE,
    SEED,
    STOP_REASON,
)
from torchrl_envs.entries.padded import TOKEN_ENTRIES
from torchrl_envs.entries.rewards import REWARD_ERRORS, RewardSource

from .episode_transform import EpisodeTransform


class EpisodeEntries(EpisodeTransform):
    """The last word of an :class:`~torchrl_envs.EpisodeEnv` on what it emits.

    Declares ``stop_reason``, ``max_new_tokens``, what data loading carries, and the rewards, so
    that the specs are those of the data. Before the end of an episode ``reward`` is 0,
    ``("rewards", source)`` is NaN and ``scorable`` is False.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sources: Sequence[RewardSource] = ()
        """All sources of rewards; the environment keeps them up to date."""
        self.dense = False
        """Whether a transform can make the reward dense; the environment keeps it up to date."""
        self.loads_data = False
        """Whether data is loaded; the environment keeps it up to date."""

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:  # type: ignore[override]
        """Declares the entries of every observation."""
        shape = observation_spec.shape
        observation_spec[STOP_REASON] = NonTensor(shape=shape, example_data="")
        observation_spec[MAX_NEW_TOKENS] = Unbounded(shape=shape, dtype=torch.int64)
        if self.loads_data:
            for key in (GROUP_ID, SEED):
                observation_spec[key] = Unbounded(shape=shape, dtype=torch.int64)
            observation_spec[ROW] = NonTensor(shape=shape, example_data={})
        return observation_spec

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:  # type: ignore[override]
        """Declares the rewards of all sources; ``[*B, -1, 1]`` if it can be dense."""
        sources = self._sources()
        if not sources:
            return reward_spec
        shape = reward_spec.shape
        reward_spec[REWARD] = Unbounded(shape=torch.Size((*shape, -1 if self.dense else 1, 1)))
        reward_spec[SCORABLE] = Binary(n=1, shape=torch.Size((*shape, 1)), dtype=torch.bool)
        names = [name for source in sources for name in source.reward_names]
        single = Unbounded(shape=torch.Size((*shape, 1, 1)))
        reward_spec[REWARDS] = Composite({name: single.clone() for name in names}, shape=shape)
        reward_spec[REWARD_ERRORS] = NonTensor(shape=shape, example_data="")
        if self.dense:
            reward_spec[TOKEN_ENTRIES] = NonTensor(shape=shape, example_data={})
        return reward_spec

    def _sources(self) -> list[RewardSource]:
        return [source for source in self.sources if source.reward_names]

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        del tensordict
        sources = self._sources()
        if not sources:
            return next_tensordict
        size = next_tensordict.batch_size
        nothing: dict[NestedKey, torch.Tensor] = {
            REWARD: torch.zeros(*size, 1, 1),
            SCORABLE: torch.zeros(*size, 1, dtype=torch.bool),
        }
        for source in sources:
            for name in source.reward_names:
                nothing[REWARDS, name] = torch.full((*size, 1, 1), math.nan)
        for key, value in nothing.items():
            if next_tensordict.get(key, None) is None:
                next_tensordict.set(key, value)
        if next_tensordict.get(REWARD_ERRORS, None) is None:
            write_objects(next_tensordict, REWARD_ERRORS, [""] * next_tensordict.numel())
        if self.dense:
            next_tensordict.set(TOKEN_ENTRIES, NonTensorData({}, batch_size=size))
        return next_tensordict
