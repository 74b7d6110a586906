"""Metrics of the rewards of a batch, and which reward says that a rollout is solved."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

from tensordict import TensorDictBase

from torchrl_data.batched_object import read_objects
from torchrl_data.keys import (
    AGENT_REWARD,
    GROUP_ID,
    REWARD,
    REWARDS,
)
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.entries.rewards import REWARD_ERRORS, RewardSource, reward_of_row, several_rewards
from torchrl_envs.entries.whole_episodes import rows_by_episode, whole_episode
from torchrl_envs.episode.episode_transform import EpisodeEnvironment, EpisodeTransform


def names_that_solve(
    env: EpisodeEnvironment,
    solved_by: str | Sequence[str] | None = None,
    *,
    usual: Sequence[str] = (),
    setting: str,
) -> list[str]:
    """The names of the rewards that say whether a rollout of an environment is solved.

    Args:
        env: whose rewards, after :meth:`~torchrl_envs.EpisodeEnv.check`.
        solved_by: what was asked for; ``None`` takes the one reward that counts for an episode.
        usual: those that say so where several count, and none was asked for.
        setting: what was asked for by, as an error names it.

    Raises:
        ValueError: several rewards count for an episode, and none was asked for; none of those
            asked for is given to it; or there is no reward of a name.
    """
    asked = [solved_by] if isinstance(solved_by, str) else solved_by
    parts = [part for part in env.transforms_of(EpisodeTransform) if isinstance(part, RewardSource)]
    known = dict.fromkeys(name for part in parts for name in part.reward_names)
    for name in asked or ():
        if name not in known and name != REWARD:
            raise ValueError(
                f"{setting}={name!r} is no reward; there are {[*known]}, and {REWARD!r} for their "
                "sum."
            )
    found: dict[str, None] = {}
    for row in _rows_of_sources(env, parts):
        weights: dict[str, float] = {}
        for part in parts:
            if part.takes_part_in_row(row):
                own = dict(zip(part.reward_names, part.weights or repeat(1.0), strict=False))
                weights |= {name: own[name] for name in part.reward_names_of(row)}
        counted = [name for name, weight in weights.items() if weight]
        chosen = counted
        if asked is not None:
            chosen = [name for name in asked if name in weights or name == REWARD]
        elif len(counted) > 1:
            chosen = [name for name in usual if name in weights]
        if not chosen and asked is None and counted:
            raise ValueError(several_rewards(counted, setting))
        if not chosen and counted:
            raise ValueError(
                f"{setting}={asked}: an episode like that of the row {dict(row)!r:.160} has other "
                f"rewards: {counted}. Name one of these, too."
            )
        found |= dict.fromkeys(chosen)
    return [*found]


def _rows_of_sources(
    env: EpisodeEnvironment, parts: Sequence[EpisodeTransform]
) -> Iterable[Mapping[str, Any]]:
    """Rows of the data, as many as it takes to know which sources of rewards go together."""
    kinds: list[Any] = [type(part) for part in parts]
    is_alike = all(part.only_for is None for part in parts) and all(
        kind.reward_names_of is RewardSource.reward_names_of for kind in kinds
    )
    for loader in env.transforms_of(DataLoadingPrimer):
        yield from loader.sample_rows(1 if is_alike else None)


def reward_metrics(trajectories: TensorDictBase) -> dict[str, float]:
    """Rewards of a batch as numbers, ready for any logger.

    Args:
        trajectories: rows ``[B]``, as a collector gives them.

    Returns:
        ``reward/mean`` and ``reward/std`` over the episodes that could be scored;
        ``reward/unscorable_fraction`` and ``reward/error_fraction`` of all episodes;
        ``reward/zero_std_fraction`` of the groups whose scored episodes all have the same reward
        (where agents have rewards of their own, the same for each of them);
        for each source ``rewards/<name>/mean``, ``rewards/<name>/std`` and
        ``rewards/<name>/applied_fraction``, without the source's weight. A dense reward counts as
        its sum, and an episode of several rows once. Means are over the episodes to which a source
        applies, NaN where there are none; standard deviations are Bessel's, 0 for a single one.
    """
    rows = [whole_episode(own) for own in rows_by_episode(trajectories.reshape(-1).unbind(0))]
    rewards = [reward_of_row(row) for row in rows]
    scored = [row for row, reward in zip(rows, rewards, strict=True) if not math.isnan(reward)]
    totals = [reward for reward in rewards if not math.isnan(reward)]
    failed = [bool(read_objects(row, REWARD_ERRORS, "")[0]) for row in rows]
    groups: dict[int, set[Any]] = {}
    for row, total in zip(scored, totals, strict=True):
        if (group_id := row.get(GROUP_ID, None)) is not None:
            groups.setdefault(int(group_id), set()).add(_compared(row, total))
    mean, std = _mean_and_std(totals)
    alike, _ = _mean_and_std([len(group) == 1 for group in groups.values()])
    metrics = {
        "reward/mean": mean,
        "reward/std": std,
        "reward/unscorable_fraction": 1 - len(scored) / len(rows),
        "reward/error_fraction": sum(failed) / len(rows),
        "reward/zero_std_fraction": alike,
    }
    by_source: dict[str, list[float]] = {}
    for row in rows:
        group: Any = row.get(REWARDS, None)
        for name, value in () if group is None else group.items():
            by_source.setdefault(name, []).append(float(value.sum()))
    for name, values in by_source.items():
        applied = [value for value in values if not math.isnan(value)]
        mean, std = _mean_and_std(applied)
        metrics |= {f"rewards/{name}/mean": mean, f"rewards/{name}/std": std}
        metrics[f"rewards/{name}/applied_fraction"] = len(applied) / len(rows)
    return metrics


def _compared(row: TensorDictBase, total: float) -> Any:
    """The value that tells an episode from others of its group: its reward, or its agents'."""
    if row.get(AGENT_REWARD, None) is None:
        return total
    own: Any = row.get(REWARDS)
    return tuple(sorted((str(name), str(float(value.sum()))) for name, value in own.items()))


def _mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return math.nan, math.nan
    mean, least = sum(values) / len(values), max(len(values) - 1, 1)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / least)
