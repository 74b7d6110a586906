"""Finished trajectories as episodes that can be scored, and their scores as entries of the rows.

Shape legend: T tokens of a row.
"""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_data import keys
from torchrl_data.batched_object import read_objects
from torchrl_data.conversation_io import read_conversations
from torchrl_envs.datasets.row_checks import PROMPT_COLUMNS
from torchrl_envs.entries.rewards import REWARD_ERRORS, dense_reward
from torchrl_envs.entries.whole_episodes import episode_key
from torchrl_envs.episode.episode import LOGGED_EXTRA, Episode
from torchrl_envs.episode.row_origin import COMPACTION, RowOrigin

from .scoring_call import LOGGED_METRICS


def finished_episodes(
    rows: Sequence[TensorDictBase], who: str
) -> list[tuple[Episode, list[TensorDictBase]]]:
    """The episodes that rows are of, one for all rows of each, and these rows in order."""
    by_id: dict[Any, list[TensorDictBase]] = {}
    for number, row in enumerate(rows):
        is_part = int(row.get(keys.NUM_SEGMENTS, 1)) > 1
        by_id.setdefault(episode_key(row) if is_part else f"row {number}", []).append(row)
    found = []
    for parts in by_id.values():
        parts.sort(key=lambda row: int(row.get(keys.SEGMENT, 0)))
        wanted = int(parts[0].get(keys.NUM_SEGMENTS, 1))
        if len(parts) != wanted:
            raise ValueError(
                f"{who}: episode {int(parts[0][keys.EPISODE_ID])} has {wanted} rows, of which "
                f"{len(parts)} came in. Give all rows of an episode at once."
            )
        first, episode = parts[0], Episode()
        conversations = [read_conversations(row, keys.FULL, who=who) for row in parts]
        *earlier, episode.conversation = conversations
        episode.segments = tuple(earlier)
        episode.origins = tuple(_origin(row, number) for number, row in enumerate(parts))
        episode.example = read_objects(first, keys.ROW)[0]
        episode.stop_reason = read_objects(first, keys.STOP_REASON, "")[0]
        episode.num_turns = int(first.get("num_turns", 1))
        if first.get(keys.GROUP_ID, None) is not None:
            episode.group_id = int(first[keys.GROUP_ID])
        columns = [name for name in PROMPT_COLUMNS if name in (episode.example or {})]
        episode.query = (episode.example or {})[columns[0]] if columns else None
        found.append((episode, parts))
    return found


def _origin(row: TensorDictBase, number: int) -> RowOrigin:
    """The origin of a row; one that has none is the rewritten history of that before it."""
    if row.get(keys.PARENT_SEGMENT, None) is None:
        return RowOrigin(number, number - 1, None, COMPACTION) if number else RowOrigin()
    parent, num_tokens = int(row[keys.PARENT_SEGMENT]), int(row[keys.PARENT_TOKENS])
    kind, agent = (read_objects(row, key)[0] for key in (keys.ROW_KIND, keys.AGENT))
    return RowOrigin(number, parent, num_tokens, kind, agent)


def write_finished(episode: Episode, rows: Sequence[TensorDictBase], names: Sequence[str]) -> None:
    """Write what an episode was given into its rows, in the place of what is there."""
    score, start = episode.score, 0
    own = {name: torch.tensor([[score.by_source.get(name, torch.nan)]]) for name in names}
    for row, part in zip(rows, episode.rows, strict=True):
        reward = torch.tensor([[score.reward]])
        if score.by_token is not None:
            end = start + part.num_tokens(0)
            total = torch.tensor(score.reward if part is episode.rows[-1] else 0.0)
            by_token = score.by_token[start:end]
            reward, start = dense_reward(total, by_token, part.assistant_mask(0)), end
        row.set(keys.REWARD, reward)
        row.set(keys.SCORABLE, torch.tensor([score.is_scorable]))
        row.set(keys.REWARDS, TensorDict({name: value.clone() for name, value in own.items()}))
        row.set_non_tensor(REWARD_ERRORS, score.error)
        for key in (LOGGED_METRICS, LOGGED_EXTRA):
            if key in episode.metrics:
                row.set_non_tensor(key, episode.metrics[key])
