"""Finished episodes as the rows that are trained.

Shape legend: B rows of the environment, T tokens of a row (ragged).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, unravel_key

from torchrl_data.batched_object import read_objects
from torchrl_data.conversation import Conversations, Turn
from torchrl_data.conversation_io import row_tensordicts, write_conversations
from torchrl_data.keys import (
    AGENT,
    AGENT_REWARD,
    BRANCHED_FROM,
    BRANCHED_TOKENS,
    DONE,
    EPISODE_ID,
    FINISH_REASON,
    FULL,
    GROUP_ID,
    NUM_SEGMENTS,
    NUM_TOOL_CALLS,
    NUM_TOOL_ERRORS,
    PARENT_SEGMENT,
    PARENT_TOKENS,
    POLICY_VERSION,
    REWARD,
    REWARDS,
    ROW,
    ROW_KIND,
    SCORABLE,
    SEGMENT,
    STOP_CODE,
    STOP_LIMIT,
    STOP_REASON,
    TERMINATED,
    TOOL_CALLS,
    TRUNCATED,
)
from torchrl_data.stop_reason import StopReason, stop_reason_of
from torchrl_envs.agents.agent_program import AgentProgram
from torchrl_envs.entries.rewards import REWARD_ERRORS, token_entries_of_row, turn_ends
from torchrl_envs.episode.episode import LOGGED_EXTRA, Episode
from torchrl_envs.episode.episode_entries import EPISODE, batch_of_ended
from torchrl_envs.episode.episode_env import EpisodeEnv
from torchrl_envs.episode.trajectory_transform import TrajectoryTransform
from torchrl_envs.rewards.scoring_call import LOGGED_METRICS

_NO_BATCH = torch.Size([])
_DENSE = (
    *(REWARD, SCORABLE, REWARDS, DONE, TERMINATED, TRUNCATED, GROUP_ID),
    *(NUM_TOOL_CALLS, NUM_TOOL_ERRORS),
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
    columns = _columns(batch, rows, wanted, further) if rows else {}
    errors = read_objects(batch, REWARD_ERRORS, "")
    result = []
    for number, (row, episode) in enumerate(zip(rows, wanted, strict=True)):
        shared = {key: values[number] for key, values in columns.items()}
        shared[STOP_REASON] = _object(episode.stop_reason)
        shared[FINISH_REASON] = _object(episode.finish_reason)
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


def row_outline(env: EpisodeEnv) -> TensorDict:
    """Return a row with the entries that rollouts of an environment have, and no rollout in it.

    Nothing is run. What a policy records on request is left out, and what a transform of the
    user's own adds to an episode without declaring it.

    Args:
        env: whose rollouts.
    """
    opening = Conversations.from_tokens([[0]], [[]], awaits_response=True)
    turn = Turn([0], [0.0], {"role": "assistant", "content": ""}, versions=0)
    episode, names = Episode(), env.reward_names
    episode.example, episode.conversation = {}, opening.append_turns([turn])
    for part in env.transforms_of(AgentProgram):
        part.drawn([episode])
    for part in env.transforms_of(TrajectoryTransform):
        names = [*names, part.penalty_name]
        episode.token_entries |= dict.fromkeys(part.results, torch.zeros(2))
    batch = batch_of_ended([episode], names, has_tools=env.entries.has_tools)
    further = env.reward_entries
    for spec in (env.full_observation_spec, env.full_reward_spec):
        for key in map(unravel_key, spec.keys(include_nested=True, leaves_only=True)):
            if (key if isinstance(key, str) else key[0]) in further:
                batch.set(key, torch.zeros(1, 1))
    ((row,),) = trajectory_rows(batch, [0], further=further)
    return row


def _columns(
    batch: TensorDictBase, rows: Sequence[int], episodes: Sequence[Episode], further: Sequence[str]
) -> dict[str, Sequence[Any]]:
    """Values of all episodes by entry, each read or made at once."""
    index = torch.tensor(rows, dtype=torch.int64)
    columns: dict[str, Sequence[Any]] = {
        key: value[index].unbind(0)
        for key in (*_DENSE, *further)
        if (value := batch.get(key, None)) is not None
    }
    counts = {
        "num_turns": [
            len(turn_ends(episode.assistant_mask))
            if episode.segments
            else sum(message["role"] == "assistant" for message in episode.messages)
            for episode in episodes
        ],
        EPISODE_ID: [episode.id for episode in episodes],
        NUM_SEGMENTS: [len(episode.rows) for episode in episodes],
        STOP_CODE: [
            stop_reason_of(episode.stop_reason, StopReason.TRUNCATED)[0].number
            for episode in episodes
        ],
        STOP_LIMIT: [episode.stop_limit for episode in episodes],
        POLICY_VERSION: [
            int(versions.min()) if len(versions) else -1
            for versions in (episode.sampled_versions for episode in episodes)
        ],
    }
    return columns | {key: torch.tensor(values).unbind(0) for key, values in counts.items()}


def _object(value: Any) -> NonTensorData:
    """Return what ``set_non_tensor`` writes, without its checks."""
    nothing = TensorDict._new_unsafe({}, batch_size=_NO_BATCH)
    rest = {"data": value, "_metadata": None, "_is_non_tensor": True}
    return NonTensorData._from_tensordict(nothing, rest, safe=False)


def _rows_of(episode: Episode, shared: dict[str, Any], last: dict) -> list[TensorDict]:
    """The rows of one episode; ``last`` are the entries by token of the last of them."""
    out, start, places = [], 0, episode.row_places()
    for number, part in enumerate(episode.own_rows):
        end, own = start + part.num_tokens(0), last
        if number < len(episode.segments):
            own = {
                key if key == REWARD else ("next", key): value[start:end]
                for key, value in episode.token_entries.items()
            }
        (row,) = row_tensordicts(part)
        write_conversations(row, FULL, part)
        # All of them have the shape of a row, so that each need not be looked at once more.
        origin, (parent, parent_tokens) = episode.origins[number], places[number]
        entries = {
            **dict(row.items()),
            **shared,
            SEGMENT: torch.tensor(number),
            PARENT_SEGMENT: torch.tensor(parent),
            PARENT_TOKENS: torch.tensor(parent_tokens),
            ROW_KIND: _object(origin.kind),
            AGENT: _object(origin.agent),
        }
        if episode.branch is not None:
            entries[BRANCHED_FROM] = torch.tensor(episode.branch.episode)
            entries[BRANCHED_TOKENS] = torch.tensor(episode.branch.num_tokens)
        if episode.agent_rewards is not None:
            reward = episode.agent_rewards.get(origin.agent, math.nan)
            entries[AGENT_REWARD] = torch.tensor([[reward]], dtype=torch.float32)
        row = TensorDict._new_unsafe(entries, batch_size=_NO_BATCH)
        for key, value in own.items():
            row.set(key, value)
        out.append(row)
        start = end
    return out
