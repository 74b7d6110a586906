"""What a logger is told about the rewards of a batch of trajectories."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_data.conversation.batched_object import read_objects
from torchrl_data.keys import GROUP_ID, REWARD, REWARDS, SCORABLE
from torchrl_envs.entries.rewards import REWARD_ERRORS

_TRUE = torch.ones(1, dtype=torch.bool)


def reward_metrics(trajectories: TensorDictBase) -> dict[str, float]:
    """Rewards of a batch as numbers, ready for any logger.

    Args:
        trajectories: rows ``[B]``, as a collector gives them.

    Returns:
        ``reward/mean`` and ``reward/std`` over the rows that could be scored;
        ``reward/unscorable_fraction`` and ``reward/error_fraction`` of all rows;
        ``reward/zero_std_fraction`` of the groups whose scored rows all have the same reward;
        for each source ``rewards/<name>/mean``, ``rewards/<name>/std`` and
        ``rewards/<name>/applied_fraction``, without the source's weight. A dense reward counts as
        its sum. Means are over the rows to which a source applies, NaN where there are none;
        standard deviations are Bessel's, 0 for a single row.
    """
    rows = list(trajectories.reshape(-1).unbind(0))
    scored = [row for row in rows if bool(row.get(SCORABLE, _TRUE).all())]
    totals = [float(row.get(REWARD).sum()) for row in scored]
    failed = [bool(read_objects(row, REWARD_ERRORS, "")[0]) for row in rows]
    metrics = {
        "reward/mean": _mean(totals),
        "reward/std": _std(totals),
        "reward/unscorable_fraction": 1 - len(scored) / len(rows),
        "reward/error_fraction": sum(failed) / len(rows),
        "reward/zero_std_fraction": _zero_std_fraction(scored, totals),
    }
    for name in _names(rows):
        values = [float(row.get((REWARDS, name)).sum()) for row in rows if _has(row, name)]
        applied = [value for value in values if not math.isnan(value)]
        metrics[f"rewards/{name}/mean"] = _mean(applied)
        metrics[f"rewards/{name}/std"] = _std(applied)
        metrics[f"rewards/{name}/applied_fraction"] = len(applied) / len(rows)
    return metrics


def _names(rows: Sequence[TensorDictBase]) -> list[str]:
    names: dict[str, None] = {}
    for row in rows:
        group: Any = row.get(REWARDS, None)
        names.update(dict.fromkeys([] if group is None else list(group.keys())))
    return list(names)


def _has(row: TensorDictBase, name: str) -> bool:
    return row.get((REWARDS, name), None) is not None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _std(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0 if values else math.nan
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _zero_std_fraction(rows: Sequence[TensorDictBase], totals: Sequence[float]) -> float:
    groups: dict[int, set[float]] = {}
    for row, total in zip(rows, totals, strict=True):
        group_id = row.get(GROUP_ID, None)
        if group_id is not None:
            groups.setdefault(int(group_id), set()).add(total)
    return sum(len(group) == 1 for group in groups.values()) / len(groups) if groups else math.nan
