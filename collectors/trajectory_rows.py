"""Finished episodes as the rows that are trained.

Shape legend: B rows of the environment, T tokens of a row (ragged).
"""

from collections.abc import Sequence

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_data.conversation.conversations import Conversations
from torchrl_data.conversation.object_entries import read_objects
from torchrl_data.keys import (
    DONE,
    EPISODE_ID,
    FULL,
    GROUP_ID,
    NUM_SEGMENTS,
    NUM_TOOL_CALLS,
    NUM_TOOL_ERRORS,
    POLICY_VERSION,
    REWARD,
    REWARDS,
    ROW,
    SCORABLE,
    SEGMENT,
    STOP_REASON,
    TERMINATED,
    TRUNCATED,
)
from torchrl_data.layout.conversation_io import write_conversations
from torchrl_data.layout.token_tensordicts import row_tensordicts
from torchrl_envs.entries.padded import token_entries_of_row
from torchrl_envs.entries.rewards import REWARD_ERRORS, turn_ends
from torchrl_envs.episode.entries import EPISODE
from torchrl_envs.episode.episode import Episode
from torchrl_envs.rewards.reward_log import LOGGED_EXTRA, LOGGED_METRICS

_DENSE = (
    REWARD,
    SCORABLE,
    DONE,
    TERMINATED,
    TRUNCATED,
    GROUP_ID,
    NUM_TOOL_CALLS,
    NUM_TOOL_ERRORS,
)


def trajectory_rows(
    batch: TensorDictBase, rows: Sequence[int], *, further: Sequence[str] = ()
) -> list[list[TensorDict]]:
    """Finished episodes as rows, see :meth:`LLMCollector.collect`.

    Args:
        batch: ``[B]``, the ``next`` of the step in which they finished.
        rows: which.
        further: entries of the scoring to keep, see
            :attr:`~torchrl_envs.EpisodeEnv.reward_entries`.

    Returns:
        For each, one TensorDict or, where its past was rewritten, one for each segment.
    """
    episodes: list[Episode] = read_objects(batch, EPISODE)
    kept = (*_DENSE, *further)
    dense = {key: value for key in kept if (value := batch.get(key, None)) is not None}
    rewards = dict(batch.get(REWARDS, {}).items())
    errors = read_objects(batch, REWARD_ERRORS, "")
    result = []
    for row in rows:
        episode = episodes[row]
        shared = TensorDict({key: value[row] for key, value in dense.items()})
        if rewards:
            shared.set(REWARDS, TensorDict({name: value[row] for name, value in rewards.items()}))
        shared.set("num_turns", torch.tensor(_num_turns(episode)))
        shared.set(EPISODE_ID, torch.tensor(episode.id))
        shared.set(NUM_SEGMENTS, torch.tensor(len(episode.rows)))
        shared.set_non_tensor(STOP_REASON, episode.stop_reason)
        shared.set_non_tensor(REWARD_ERRORS, errors[row])
        if episode.example is not None:
            shared.set_non_tensor(ROW, episode.example)
        for key in (LOGGED_METRICS, LOGGED_EXTRA):
            if key in episode.metrics:
                shared.set_non_tensor(key, episode.metrics[key])
        versions = torch.cat([part.policy_versions(0) for part in episode.rows])
        sampled = versions[versions >= 0]
        shared.set(POLICY_VERSION, sampled[0] if len(sampled) else torch.tensor(-1))
        last = token_entries_of_row(batch, row, episode.conversation.num_tokens(0))
        result.append(_rows_of(episode, shared, last))
    return result


def _rows_of(episode: Episode, shared: TensorDict, last: dict) -> list[TensorDict]:
    """The rows of one episode; ``last`` are the entries by token of the last of them."""
    out, start = [], 0
    for number, part in enumerate(episode.rows):
        end = start + part.num_tokens(0)
        is_last = number == len(episode.segments)
        own = last if is_last else _earlier(episode, start, end)
        row = _row(part, shared, own)
        row.set(SEGMENT, torch.tensor(number))
        out.append(row)
        start = end
    return out


def _earlier(episode: Episode, start: int, end: int) -> dict:
    return {
        key if key == REWARD else ("next", key): value[start:end]
        for key, value in episode.token_entries.items()
    }


def _row(part: Conversations, shared: TensorDict, by_token: dict) -> TensorDict:
    (row,) = row_tensordicts(part)
    write_conversations(row, FULL, part)
    for key, value in shared.items():
        row.set(key, value)
    for key, value in by_token.items():
        row.set(key, value)
    return row


def _num_turns(episode: Episode) -> int:
    if episode.segments:
        return len(turn_ends(episode.assistant_mask))
    return sum(message["role"] == "assistant" for message in episode.messages)
