"""Finished episodes as the rows that are trained.

Shape legend: B rows of the environment, T tokens of a row (ragged).
"""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from torchrl_data.conversation.batched_object import read_objects
from torchrl_data.conversation.conversations import Conversations
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
    TOOL_CALLS,
    TRUNCATED,
)
from torchrl_data.layout.conversation_io import row_tensordicts, write_conversations
from torchrl_envs.entries.rewards import REWARD_ERRORS, token_entries_of_row, turn_ends
from torchrl_envs.episode.entries import EPISODE
from torchrl_envs.episode.episode import Episode
from torchrl_envs.rewards.calls import LOGGED_EXTRA, LOGGED_METRICS

_NO_BATCH = torch.Size([])
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
    wanted = [episodes[row] for row in rows]
    columns = _columns(batch, rows, wanted, further)
    errors = read_objects(batch, REWARD_ERRORS, "")
    result = []
    for number, (row, episode) in enumerate(zip(rows, wanted, strict=True)):
        shared = {key: values[number] for key, values in columns.items()}
        shared[STOP_REASON] = _object(episode.stop_reason)
        shared[REWARD_ERRORS] = _object(errors[row])
        if episode.example is not None:
            shared[ROW] = _object(episode.example)
        for key in (LOGGED_METRICS, LOGGED_EXTRA):
            if key in episode.metrics:
                shared[key] = _object(episode.metrics[key])
        if NUM_TOOL_CALLS in columns:
            calls = [call._asdict() for call in episode.tool_calls]
            shared[TOOL_CALLS] = _object({"calls": calls})
        last = token_entries_of_row(batch, row, episode.conversation.num_tokens(0))
        result.append(_rows_of(episode, shared, last))
    return result


def _columns(
    batch: TensorDictBase,
    rows: Sequence[int],
    episodes: Sequence[Episode],
    further: Sequence[str],
) -> dict[str, Sequence[Any]]:
    """Values of all episodes by entry, each read or made at once."""
    index = torch.tensor(rows, dtype=torch.int64)
    columns: dict[str, Sequence[Any]] = {
        key: value[index].unbind(0)
        for key in (*_DENSE, *further)
        if (value := batch.get(key, None)) is not None
    }
    rewards = batch.get(REWARDS, {})
    sources = {name: value[index].unbind(0) for name, value in rewards.items()}
    if sources:
        columns[REWARDS] = [
            TensorDict._new_unsafe({n: v[i] for n, v in sources.items()}, batch_size=_NO_BATCH)
            for i in range(len(rows))
        ]
    counts = {
        "num_turns": [_num_turns(episode) for episode in episodes],
        EPISODE_ID: [episode.id for episode in episodes],
        NUM_SEGMENTS: [len(episode.rows) for episode in episodes],
        POLICY_VERSION: [_first_version(episode) for episode in episodes],
    }
    return columns | {key: torch.tensor(values).unbind(0) for key, values in counts.items()}


def _object(value: Any) -> NonTensorData:
    """What ``set_non_tensor`` writes, without its checks."""
    nothing = TensorDict._new_unsafe({}, batch_size=_NO_BATCH)
    rest = {"data": value, "_metadata": None, "_is_non_tensor": True}
    return NonTensorData._from_tensordict(nothing, rest, safe=False)


def _first_version(episode: Episode) -> int:
    versions = episode.sampled_versions
    return int(versions.min()) if len(versions) else -1


def _rows_of(episode: Episode, shared: dict[str, Any], last: dict) -> list[TensorDict]:
    """The rows of one episode; ``last`` are the entries by token of the last of them."""
    out, start = [], 0
    for number, part in enumerate(episode.rows):
        end = start + part.num_tokens(0)
        is_last = number == len(episode.segments)
        own = last if is_last else _earlier(episode, start, end)
        out.append(_row(part, {**shared, SEGMENT: torch.tensor(number)}, own))
        start = end
    return out


def _earlier(episode: Episode, start: int, end: int) -> dict:
    return {
        key if key == REWARD else ("next", key): value[start:end]
        for key, value in episode.token_entries.items()
    }


def _row(part: Conversations, shared: dict[str, Any], by_token: dict) -> TensorDict:
    (row,) = row_tensordicts(part)
    write_conversations(row, FULL, part)
    # All of them have the shape of a row, so that each need not be looked at once more.
    row = TensorDict._new_unsafe({**dict(row.items()), **shared}, batch_size=_NO_BATCH)
    for key, value in by_token.items():
        row.set(key, value)
    return row


def _num_turns(episode: Episode) -> int:
    if episode.segments:
        return len(turn_ends(episode.assistant_mask))
    return sum(message["role"] == "assistant" for message in episode.messages)
