"""Episodes of several rows, each of which counts once in what is told of rollouts."""

from collections.abc import Iterable, Sequence

import torch
from tensordict import TensorDictBase

from torchrl_data.keys import EPISODE_ID, GROUP_ID, REWARD, SEGMENT


def episode_key(row: TensorDictBase) -> tuple[int, int]:
    """Group and id of the episode of a row.

    Ids count the episodes of a process. Rows of several processes, of collectors on Ray or of a run
    that was stopped and goes on, have ids in common, but a group is of one process.

    Args:
        row: as a collector gives it.

    Returns:
        ``group_id``, -1 where the data have no groups, and ``episode_id``.
    """
    group = row.get(GROUP_ID, None)
    return -1 if group is None else int(group), int(row.get(EPISODE_ID))


def rows_by_episode(rows: Iterable[TensorDictBase]) -> list[list[TensorDictBase]]:
    """The rows of each episode, in the order in which the episodes come first.

    Args:
        rows: as a collector gives them. Those of no collector, which name no episode, are an
            episode each.
    """
    episodes: dict[tuple[int, int] | str, list[TensorDictBase]] = {}
    for number, row in enumerate(rows):
        is_named = row.get(EPISODE_ID, None) is not None
        name = episode_key(row) if is_named else f"row {number}"
        episodes.setdefault(name, []).append(row)
    return [*episodes.values()]


def whole_episode(rows: Sequence[TensorDictBase]) -> TensorDictBase:
    """The row in which an episode ended, with the reward of the whole episode.

    Args:
        rows: of the episode, in any order. Where rewards are dense, each has those of its own
            tokens, and the whole has their sum, ``[1, 1]``.
    """
    if len(rows) == 1:
        return rows[0]
    last = max(rows, key=lambda row: int(row.get(SEGMENT)))
    rewards = [reward for row in rows if (reward := row.get(REWARD, None)) is not None]
    if all(reward.numel() == 1 for reward in rewards):
        return last
    whole = last.copy()
    whole.set(REWARD, torch.stack([reward.sum() for reward in rewards]).sum().reshape(1, 1))
    return whole
