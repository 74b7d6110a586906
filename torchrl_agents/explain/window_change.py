"""The difference of a number between the first groups of a run and its last ones, and chance."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Final, TypeVar

import numpy as np

from .evidence import RolloutFacts

Groups = Sequence[Sequence[RolloutFacts]]
_Row = TypeVar("_Row")
LARGE: Final = 0.25
"""Standard deviations of a rollout, from which on a change is large."""
_NUM_GROUPS: Final = 8
"""Of fewer groups with a value at either end nothing is said."""
_NUM_DEALS: Final = 1999
_LEVEL: Final = 0.002


@dataclass(frozen=True, kw_only=True)
class WindowChange:
    """Means over the groups at the beginning and at the end, and whether they differ by chance."""

    before: float
    """NaN where too few groups have a value."""
    after: float
    chance: float
    """How often groups that are dealt to both ends at random differ as much, either way."""

    @property
    def gain(self) -> float:
        """The difference; NaN where too few groups have a value."""
        return self.after - self.before

    @property
    def is_sure(self) -> bool:
        """Return whether chance alone comes so far in one of 500 cases at most."""
        return self.chance <= _LEVEL


def change_between(
    first: Sequence[Sequence[_Row]],
    last: Sequence[Sequence[_Row]],
    value_of: Callable[[_Row], float | None],
) -> WindowChange:
    """Compare a value of rollouts between two ends of a run.

    The rollouts of a prompt are alike, so a group counts once, with its mean.

    Args:
        first: groups of the beginning.
        last: groups of the end.
        value_of: a rollout; ``None`` where it has no value.
    """
    ends = [_means(groups, value_of) for groups in (first, last)]
    if min(map(len, ends)) < _NUM_GROUPS:
        return WindowChange(before=math.nan, after=math.nan, chance=1.0)
    before, after = map(fmean, ends)
    pooled = np.array(ends[0] + ends[1])
    dealt = np.random.default_rng(0).permuted(np.tile(pooled, (_NUM_DEALS, 1)), axis=1)
    count = len(ends[0])
    gains = dealt[:, count:].mean(axis=1) - dealt[:, :count].mean(axis=1)
    as_far = int((np.abs(gains) >= abs(after - before) * (1 - 1e-9)).sum())
    return WindowChange(before=before, after=after, chance=(1 + as_far) / (1 + _NUM_DEALS))


def rollout_reward(row: RolloutFacts) -> float:
    """The reward of a rollout of a group, which has no others than those that were scored."""
    assert row.sample.reward is not None
    return row.sample.reward


def has_risen(first: Groups, last: Groups) -> bool:
    """Return whether the reward rose by a quarter of a rollout's deviation, and not by chance."""
    change = change_between(first, last, rollout_reward)
    spread = pstdev(rollout_reward(row) for group in first for row in group) if first else 0.0
    return change.is_sure and change.gain > LARGE * spread


def _means(
    groups: Sequence[Sequence[_Row]], value_of: Callable[[_Row], float | None]
) -> list[float]:
    found = ([v for row in group if (v := value_of(row)) is not None] for group in groups)
    return [fmean(values) for values in found if values]
