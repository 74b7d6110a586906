"""Finished trajectories as episodes that can be scored, and their scores as entries of the rows.

Shape legend: T tokens of a row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_data.conversation.batched_object import read_objects
from torchrl_data.errors import MissingEntryError
from torchrl_data.keys import (
    EPISODE_ID,
    FULL,
    GROUP_ID,
    NUM_SEGMENTS,
    REWARD,
    REWARDS,
    ROW,
    SCORABLE,
    SEGMENT,
    STOP_REASON,
)
from torchrl_data.layout.conversation_io import read_conversations
from torchrl_envs.datasets.checks import PROMPT_COLUMNS
from torchrl_envs.entries.rewards import REWARD_ERRORS, dense_reward
from torchrl_envs.episode.episode import Episode

from .calls import LOGGED_EXTRA, LOGGED_METRICS


class FinishedEpisode(NamedTuple):
    """An episode, and the rows that are its own, in order."""

    episode: Episode
    rows: list[TensorDictBase]


def finished_episodes(rows: Sequence[TensorDictBase], who: str) -> list[FinishedEpisode]:
    """The episodes that rows are of: one for each, or for all rows of an episode together."""
    by_id: dict[Any, list[TensorDictBase]] = {}
    for number, row in enumerate(rows):
        is_part = int(row.get(NUM_SEGMENTS, 1)) > 1
        by_id.setdefault(int(row[EPISODE_ID]) if is_part else f"row {number}", []).append(row)
    found = []
    for parts in by_id.values():
        parts.sort(key=lambda row: int(row.get(SEGMENT, 0)))
        wanted = int(parts[0].get(NUM_SEGMENTS, 1))
        if len(parts) != wanted:
            raise ValueError(
                f"{who}: episode {int(parts[0][EPISODE_ID])} has {wanted} rows, of which "
                f"{len(parts)} came in. Give all rows of an episode at once."
            )
        found.append(FinishedEpisode(_episode(parts, who), parts))
    return found


def _episode(rows: Sequence[TensorDictBase], who: str) -> Episode:
    episode = Episode()
    conversations = [read_conversations(row, FULL, who=who) for row in rows]
    *earlier, episode.conversation = conversations
    episode.segments = tuple(earlier)
    episode.example = read_objects(rows[0], ROW)[0]
    episode.stop_reason = read_objects(rows[0], STOP_REASON, "")[0]
    episode.num_turns = int(rows[0].get("num_turns", 1))
    if rows[0].get(GROUP_ID, None) is not None:
        episode.group_id = int(rows[0][GROUP_ID])
    columns = [name for name in PROMPT_COLUMNS if name in (episode.example or {})]
    episode.query = (episode.example or {})[columns[0]] if columns else None
    return episode


def check_prompts_are_known(episodes: Sequence[FinishedEpisode], who: str) -> None:
    """Raise where nobody can tell whether a prompt was a string."""
    for episode, _ in episodes:
        if episode.query is None:
            raise MissingEntryError(
                f"{who}: a row does not say whether its prompt was a string or messages: its data "
                f"have none of the columns {list(PROMPT_COLUMNS)}. Say what the functions read: "
                "completion_format='text' or 'messages'."
            )


def write_finished(found: FinishedEpisode, names: Sequence[str]) -> None:
    """Write what an episode was given into its rows, in the place of what is there."""
    episode, rows = found
    score, start = episode.score, 0
    own = {name: torch.tensor([[score.by_source.get(name, torch.nan)]]) for name in names}
    for row, part in zip(rows, episode.rows, strict=True):
        reward = torch.tensor([[score.total]])
        if score.by_token is not None:
            end = start + part.num_tokens(0)
            is_last = part is episode.rows[-1]
            total = torch.tensor(score.total if is_last else 0.0)
            by_token = score.by_token[start:end]
            reward, start = dense_reward(total, by_token, part.assistant_mask(0)), end
        row.set(REWARD, reward)
        row.set(SCORABLE, torch.tensor([score.is_scorable]))
        row.set(REWARDS, TensorDict({name: value.clone() for name, value in own.items()}))
        row.set_non_tensor(REWARD_ERRORS, score.error)
        for key in (LOGGED_METRICS, LOGGED_EXTRA):
            if key in episode.metrics:
                row.set_non_tensor(key, episode.metrics[key])
