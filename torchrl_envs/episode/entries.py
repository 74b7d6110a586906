"""Episodes as entries of a batch, and back: read once, written once.

Shape legend: B rows, in whatever batch shape; T tokens of the longest row.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from tensordict import NonTensorData, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.data import Binary, Composite, NonTensor, Unbounded
from torchrl.envs import Transform

from torchrl_data.conversation.batched_object import read_objects, write_objects
from torchrl_data.keys import (
    DONE,
    GROUP_ID,
    MAX_NEW_TOKENS,
    NO_LIMIT,
    NUM_TOOL_CALLS,
    NUM_TOOL_ERRORS,
    REWARD,
    REWARDS,
    ROW,
    SCORABLE,
    SEED,
    STOP_REASON,
    TERMINATED,
    TRUNCATED,
)
from torchrl_envs.entries.rewards import (
    REWARD_ERRORS,
    TOKEN_ENTRIES,
    dense_reward,
    write_scores,
    write_token_entry,
)

from .episode import Episode
from .episode_transform import EpisodeTransform

EPISODE: Final = "episode"
"""The values of each row's :class:`Episode`: one opaque object for the whole batch."""
Flags = list[tuple[bool, bool, bool]]
"""Whether each row is done, terminated and truncated."""
_FLAGS: Final = (DONE, TERMINATED, TRUNCATED)
_DATA: Final = (GROUP_ID, SEED, ROW)


def read_episodes(batch: TensorDictBase) -> list[Episode]:
    """The episodes of a batch, to go on from; made of its entries where it holds none."""
    held = read_objects(batch, EPISODE)
    if set(map(type, held)) == {Episode}:
        return [each.fork() for each in held]
    episodes = [Episode(row) for row in range(len(held))]
    reasons = read_objects(batch, STOP_REASON, "")
    examples = read_objects(batch, ROW)
    for episode, reason, example in zip(episodes, reasons, examples, strict=True):
        episode.stop_reason, episode.example = reason, example
    for key in (GROUP_ID, SEED, NUM_TOOL_CALLS, NUM_TOOL_ERRORS):
        value = batch.get(key, None)
        if value is not None:
            for episode, number in zip(episodes, value.view(-1).tolist(), strict=True):
                setattr(episode, key, number)
    return episodes


def read_flags(batch: TensorDictBase) -> Flags:
    """The flags of each row; False where an entry is absent."""
    columns = []
    for key in _FLAGS:
        value = batch.get(key, None)
        columns.append([False] * batch.numel() if value is None else value.view(-1).tolist())
    return list(zip(*columns, strict=True))


def flags_of(episodes: Sequence[Episode]) -> Flags:
    """The flags of episodes."""
    return [(e.is_terminated or e.is_truncated, e.is_terminated, e.is_truncated) for e in episodes]


def write_flags(batch: TensorDictBase, episodes: Sequence[Episode]) -> None:
    """Write which episodes are over, and how."""
    shape = (*batch.batch_size, 1)
    for key, values in zip(_FLAGS, zip(*flags_of(episodes), strict=True), strict=True):
        batch.set(key, torch.tensor(values).view(shape))


def write_episodes(
    batch: TensorDictBase,
    episodes: Sequence[Episode],
    *,
    loads_data: bool,
    has_tools: bool,
    given: TensorDictBase | None = None,
) -> None:
    """Write episodes and what is seen of them; data entries as ``given`` has them, if it does."""
    write_objects(batch, EPISODE, episodes)
    write_objects(batch, STOP_REASON, [episode.stop_reason for episode in episodes])
    budgets = [NO_LIMIT if e.max_new_tokens is None else e.max_new_tokens for e in episodes]
    _write_int(batch, MAX_NEW_TOKENS, budgets)
    if has_tools:
        _write_int(batch, NUM_TOOL_CALLS, [e.num_tool_calls for e in episodes], 1)
        _write_int(batch, NUM_TOOL_ERRORS, [e.num_tool_errors for e in episodes], 1)
    if not loads_data:
        return
    held = {} if given is None else {key: given.get(key, None) for key in _DATA}
    if held and all(value is not None for value in held.values()):
        for key, value in held.items():
            batch.set(key, value)
        return
    _write_int(batch, GROUP_ID, [episode.group_id for episode in episodes])
    _write_int(batch, SEED, [episode.seed for episode in episodes])
    write_objects(batch, ROW, [episode.example for episode in episodes])


def _write_int(batch: TensorDictBase, key: str, values: Sequence[int], *shape: int) -> None:
    batch.set(key, torch.tensor(values, dtype=torch.int64).view(*batch.batch_size, *shape))


def write_rewards(
    batch: TensorDictBase, episodes: Sequence[Episode], names: Sequence[str], *, dense: bool
) -> None:
    """Write the rewards of episodes that just ended; what every step has, if there are none."""
    scores = [episode.score for episode in episodes]
    values = None
    if dense:
        batch.set(TOKEN_ENTRIES, NonTensorData({}, batch_size=batch.batch_size))
    if any(score.by_token is not None for score in scores):
        for episode in episodes:
            episode.token_entries[REWARD] = _dense_reward(episode)
        values = [last_row(episode, episode.token_entries[REWARD]) for episode in episodes]
    write_scores(batch, [episode.row for episode in episodes], scores, values, names)


def write_token_entries(batch: TensorDictBase, episodes: Sequence[Episode]) -> None:
    """Write what transforms computed by token of episodes that have just ended."""
    for key in dict.fromkeys(key for episode in episodes for key in episode.token_entries):
        own = [episode for episode in episodes if key in episode.token_entries]
        if key != REWARD:
            values = [last_row(episode, episode.token_entries[key]) for episode in own]
            row_key: Any = unravel_key(("next", key))
            write_token_entry(batch, key, [e.row for e in own], values, row_key=row_key)


def _dense_reward(episode: Episode) -> Tensor:
    score = episode.score
    return dense_reward(torch.tensor(score.total), score.by_token, episode.assistant_mask)


def last_row(episode: Episode, values: Tensor) -> Tensor:
    """Values of all tokens of an episode, ``[sum of T, ...]``, at those of its last row."""
    if not episode.segments:
        return values
    return values[len(values) - episode.conversation.num_tokens(0) :]


class EpisodeEntries(Transform):
    """Declares the entries of every step, and writes them.

    ``stop_reason``, ``max_new_tokens``, what data loading carries, the counts of tools, and the
    rewards. Before the end of an episode ``reward`` is 0, ``("rewards", source)`` is NaN and
    ``scorable`` is False.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reward_names: Sequence[str] = ()
        """Of all sources of rewards; the environment keeps them up to date."""
        self.dense = False
        """Whether a transform can make the reward dense; the environment keeps it up to date."""
        self.loads_data = False
        """Whether data is loaded; the environment keeps it up to date."""
        self.has_tools = False
        """Whether there are tools; the environment keeps it up to date."""
        self.has_sources = False
        """Whether somebody may give rewards; the environment keeps it up to date."""
        self.exporting: Sequence[EpisodeTransform] = ()
        """Transforms that write entries of their own; the environment keeps them up to date."""

    def write_values(
        self,
        batch: TensorDictBase,
        episodes: Sequence[Episode],
        given: TensorDictBase | None = None,
    ) -> None:
        """Write the values of episodes."""
        write_episodes(
            batch, episodes, loads_data=self.loads_data, has_tools=self.has_tools, given=given
        )

    def write_results(self, batch: TensorDictBase, ended: Sequence[Episode]) -> None:
        """Write what sources of rewards and other transforms gave episodes that have just ended."""
        if self.reward_names or (ended and self.has_sources):
            write_rewards(batch, ended, self.reward_names, dense=self.dense)
        write_token_entries(batch, ended)
        for transform in self.exporting:
            transform.export(batch, ended)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:  # type: ignore[override]
        """Declares the entries of every observation."""
        shape = observation_spec.shape
        observation_spec[EPISODE] = NonTensor(shape=shape, example_data=Episode())
        observation_spec[STOP_REASON] = NonTensor(shape=shape, example_data="")
        observation_spec[MAX_NEW_TOKENS] = Unbounded(shape=shape, dtype=torch.int64)
        if self.has_tools:
            counts = torch.Size((*shape, 1))
            for key in (NUM_TOOL_CALLS, NUM_TOOL_ERRORS):
                observation_spec[key] = Unbounded(shape=counts, dtype=torch.int64)
        if self.loads_data:
            for key in (GROUP_ID, SEED):
                observation_spec[key] = Unbounded(shape=shape, dtype=torch.int64)
            observation_spec[ROW] = NonTensor(shape=shape, example_data={})
        return observation_spec

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:  # type: ignore[override]
        """Declares the rewards of all sources; ``[*B, -1, 1]`` if it can be dense."""
        if not self.reward_names:
            return reward_spec
        shape = reward_spec.shape
        reward_spec[REWARD] = Unbounded(shape=torch.Size((*shape, -1 if self.dense else 1, 1)))
        reward_spec[SCORABLE] = Binary(n=1, shape=torch.Size((*shape, 1)), dtype=torch.bool)
        single = Unbounded(shape=torch.Size((*shape, 1, 1)))
        named = {name: single.clone() for name in self.reward_names}
        reward_spec[REWARDS] = Composite(named, shape=shape)
        reward_spec[REWARD_ERRORS] = NonTensor(shape=shape, example_data="")
        if self.dense:
            reward_spec[TOKEN_ENTRIES] = NonTensor(shape=shape, example_data={})
        return reward_spec

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        del tensordict
        return next_tensordict

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        del tensordict
        return tensordict_reset
