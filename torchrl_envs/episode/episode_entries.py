"""Episodes as entries of a batch, and back: read once, written once.

Shape legend: B rows, in whatever batch shape; T tokens of the longest row.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.data import Binary, Composite, NonTensor, Unbounded
from torchrl.envs import Transform

from torchrl_data import keys
from torchrl_data.batched_object import read_objects, write_objects
from torchrl_data.conversation import Conversations
from torchrl_data.conversation_io import write_conversations
from torchrl_envs.entries.rewards import (
    REWARD_ERRORS,
    TOKEN_ENTRIES,
    dense_reward,
    write_rewards,
    write_token_entry,
)

from .episode import Episode
from .episode_transform import EpisodeTransform

EPISODE: Final = "episode"
"""The values of each row's :class:`Episode`: one opaque object for the whole batch."""
Flags = list[tuple[bool, bool, bool]]
"""Whether each row is done, terminated and truncated."""
FLAGS: Final = (keys.DONE, keys.TERMINATED, keys.TRUNCATED)
_DATA: Final = (keys.GROUP_ID, keys.SEED, keys.ROW)


def read_episodes(batch: TensorDictBase) -> list[Episode]:
    """The episodes of a batch, to go on from; made of its entries where it holds none."""
    held = read_objects(batch, EPISODE)
    if set(map(type, held)) == {Episode}:
        return [each.fork() for each in held]
    episodes = [Episode(row) for row in range(len(held))]
    reasons = read_objects(batch, keys.STOP_REASON, "")
    examples = read_objects(batch, keys.ROW)
    for episode, reason, example in zip(episodes, reasons, examples, strict=True):
        episode.stop_reason, episode.example = reason, example
    for key in (keys.GROUP_ID, keys.SEED, keys.NUM_TOOL_CALLS, keys.NUM_TOOL_ERRORS):
        value = batch.get(key, None)
        if value is not None:
            for episode, number in zip(episodes, value.view(-1).tolist(), strict=True):
                setattr(episode, key, number)
    return episodes


def read_flags(batch: TensorDictBase) -> Flags:
    """The flags of each row; False where an entry is absent."""
    held, absent = [batch.get(key, None) for key in FLAGS], [False] * batch.numel()
    columns = [absent if values is None else values.view(-1).tolist() for values in held]
    return list(zip(*columns, strict=True))


def flags_of(episodes: Sequence[Episode]) -> Flags:
    """The flags of episodes."""
    return [(e.is_terminated or e.is_truncated, e.is_terminated, e.is_truncated) for e in episodes]


def write_flags(batch: TensorDictBase, episodes: Sequence[Episode]) -> None:
    """Write which episodes are over, and how."""
    shape = (*batch.batch_size, 1)
    for key, values in zip(FLAGS, zip(*flags_of(episodes), strict=True), strict=True):
        batch.set(key, torch.tensor(values).view(shape))


def _write_int(batch: TensorDictBase, key: str, values: Sequence[int], *shape: int) -> None:
    batch.set(key, torch.tensor(values, dtype=torch.int64).view(*batch.batch_size, *shape))


def last_row(episode: Episode, values: Tensor) -> Tensor:
    """Values of all tokens of an episode, ``[sum of T, ...]``, at those of its last row."""
    if not episode.segments:
        return values
    return values[len(values) - episode.conversation.num_tokens(0) :]


class EpisodeEntries(Transform):
    """Declares the entries of every step, and writes them.

    ``stop_reason``, ``max_new_tokens``, what data loading carries, the counts of tools, and the
    rewards. Before the end of an episode ``reward`` is 0, ``("rewards", source)`` is NaN and
    ``scorable`` is False. Of an episode that could not be scored ``reward`` is NaN, too. The
    environment keeps the attributes up to date.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reward_names: Sequence[str] = ()
        """Of all sources of rewards."""
        self.dense = False
        """Whether a transform can make the reward dense."""
        self.loads_data = False
        """Whether data is loaded."""
        self.has_tools = False
        """Whether there are tools."""
        self.has_agents = False
        """Whether rows have authors."""
        self.has_sources = False
        """Whether somebody may give rewards."""
        self.exporting: Sequence[EpisodeTransform] = ()
        """Transforms that write entries of their own."""

    def write_values(
        self,
        batch: TensorDictBase,
        episodes: Sequence[Episode],
        given: TensorDictBase | None = None,
    ) -> None:
        """Write episodes and what is seen of them; of data what ``given`` has, if it has it."""
        write_objects(batch, EPISODE, episodes)
        write_objects(batch, keys.STOP_REASON, [e.stop_reason for e in episodes])
        limits = [keys.NO_LIMIT if e.max_new_tokens is None else e.max_new_tokens for e in episodes]
        _write_int(batch, keys.MAX_NEW_TOKENS, limits)
        if self.has_agents:
            write_objects(batch, keys.AGENT, [e.origins[-1].agent for e in episodes])
        if self.has_tools:
            _write_int(batch, keys.NUM_TOOL_CALLS, [e.num_tool_calls for e in episodes], 1)
            _write_int(batch, keys.NUM_TOOL_ERRORS, [e.num_tool_errors for e in episodes], 1)
        if not self.loads_data:
            return
        held = {} if given is None else {key: given.get(key, None) for key in _DATA}
        if held and all(value is not None for value in held.values()):
            for key, value in held.items():
                batch.set(key, value)
            return
        _write_int(batch, keys.GROUP_ID, [episode.group_id for episode in episodes])
        _write_int(batch, keys.SEED, [episode.seed for episode in episodes])
        write_objects(batch, keys.ROW, [episode.example for episode in episodes])

    def write_results(self, batch: TensorDictBase, ended: Sequence[Episode]) -> None:
        """Write what sources of rewards and other transforms gave episodes that have just ended."""
        scores = [episode.score for episode in ended]
        is_given = batch.get(keys.REWARD, None) is not None
        if is_given and (self.reward_names or any(score.by_source for score in scores)):
            raise ValueError(
                f"{WHO}: {[*self.reward_names]} score the episodes, and so does a transform that "
                "writes 'reward' by itself, and would be lost. Make it RewardFunctions([...])."
            )
        if not is_given and (self.reward_names or (ended and self.has_sources)):
            dense = None
            if self.dense:
                batch.set(TOKEN_ENTRIES, NonTensorData({}, batch_size=batch.batch_size))
            if any(score.by_token is not None for score in scores):
                for episode in ended:
                    total, by_token = torch.tensor(episode.score.reward), episode.score.by_token
                    reward = dense_reward(total, by_token, episode.assistant_mask)
                    episode.token_entries[keys.REWARD] = reward
                dense = [last_row(e, e.token_entries[keys.REWARD]) for e in ended]
            rows = [episode.row for episode in ended]
            write_rewards(batch, rows, scores, dense, self.reward_names)
        # By token.
        for key in dict.fromkeys(key for episode in ended for key in episode.token_entries):
            if key != keys.REWARD:
                own = [episode for episode in ended if key in episode.token_entries]
                values = [last_row(episode, episode.token_entries[key]) for episode in own]
                row_key: Any = unravel_key(("next", key))
                write_token_entry(batch, key, [e.row for e in own], values, row_key=row_key)
        for transform in self.exporting:
            transform.export(batch, ended)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:  # type: ignore[override]
        """Declares the entries of every observation."""
        shape = observation_spec.shape
        objects: dict[str, Any] = {EPISODE: Episode(), keys.STOP_REASON: ""}
        objects |= {keys.AGENT: ""} if self.has_agents else {}
        numbers = {keys.MAX_NEW_TOKENS: shape}
        if self.has_tools:
            counts = (keys.NUM_TOOL_CALLS, keys.NUM_TOOL_ERRORS)
            numbers |= dict.fromkeys(counts, torch.Size((*shape, 1)))
        if self.loads_data:
            numbers |= {keys.GROUP_ID: shape, keys.SEED: shape}
            objects[keys.ROW] = {}
        for key, example in objects.items():
            observation_spec[key] = NonTensor(shape=shape, example_data=example)
        for key, its in numbers.items():
            observation_spec[key] = Unbounded(shape=its, dtype=torch.int64)
        return observation_spec

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:  # type: ignore[override]
        """Declares the rewards of all sources; ``[*B, -1, 1]`` if it can be dense."""
        if not self.reward_names:
            return reward_spec
        shape = reward_spec.shape
        reward_spec[keys.REWARD] = Unbounded(shape=torch.Size((*shape, -1 if self.dense else 1, 1)))
        reward_spec[keys.SCORABLE] = Binary(n=1, shape=torch.Size((*shape, 1)), dtype=torch.bool)
        single = Unbounded(shape=torch.Size((*shape, 1, 1)))
        named = {name: single.clone() for name in self.reward_names}
        reward_spec[keys.REWARDS] = Composite(named, shape=shape)
        reward_spec[REWARD_ERRORS] = NonTensor(shape=shape, example_data="")
        if self.dense:
            reward_spec[TOKEN_ENTRIES] = NonTensor(shape=shape, example_data={})
        return reward_spec


def batch_of_ended(
    episodes: Sequence[Episode], reward_names: Sequence[str], *, has_tools: bool = False
) -> TensorDict:
    """Episodes that are over, with the entries that the last step of an environment has of them."""
    batch = TensorDict({}, batch_size=[len(episodes)])
    conversations = Conversations.cat([episode.conversation for episode in episodes])
    write_conversations(batch, keys.PROMPT, conversations)
    write_flags(batch, episodes)
    its = EpisodeEntries()
    its.reward_names, its.has_sources, its.loads_data = reward_names, True, True
    its.has_tools = has_tools
    its.write_results(batch, episodes)
    its.write_values(batch, episodes)
    return batch


WHO: Final = "EpisodeEnv.step"
