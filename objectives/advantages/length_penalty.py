"""A price for length, relative to the group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tensordict import NestedKey
from torch import Tensor

from objectives import functional as F
from torchrl_data import keys
from torchrl_data.checks import POSITIVE, check_numbers

from .estimators import (
    WHO,
    AdvantageEstimator,
    DecoupledSources,
    EstimatorOver,
    GroupMean,
    MaxRL,
    PassAtK,
    RewardedGroup,
    TurnCredit,
    read_entry,
)
from .group_queue import rows_of_member
from .tree_credit import TREE_CREDITS


@dataclass(frozen=True, kw_only=True)
class LengthPenalty(EstimatorOver):
    """Takes ``coeff`` times a row's share of its group's longest output off its return.

    The share is that of sampled tokens, of all rows of an episode, so that the price follows the
    task: what is long for one prompt is short for another. Give it to
    ``MCAdvantage(8, estimator=LengthPenalty(coeff=0.1))``.

    Args:
        coeff: what the longest output of a group costs.
        estimator: what makes advantages of the returns that are left.
        success_threshold: only returns above it pay; ``None``: all do.
        assistant_mask_key: bool ``[T]``, True on what was sampled.

    Raises:
        ValueError: the coefficient is not positive, or the returns that are left could be negative
            though the estimator needs a rate of success.
        TypeError: the estimator does not go by returns.
    """

    coeff: float
    estimator: AdvantageEstimator = field(default_factory=GroupMean)
    success_threshold: float | None = None
    assistant_mask_key: NestedKey = keys.ASSISTANT_MASK

    def __post_init__(self) -> None:
        check_numbers("LengthPenalty", POSITIVE, coeff=self.coeff)
        check_numbers("LengthPenalty", success_threshold=self.success_threshold)
        others = (DecoupledSources, PassAtK, TurnCredit, LengthPenalty, *TREE_CREDITS)
        if isinstance(self.estimator, others):
            raise TypeError(
                "LengthPenalty changes the return of a row, by which "
                f"{type(self.estimator).__name__} does not go: use another estimator."
            )
        least = -math.inf if self.success_threshold is None else self.success_threshold
        if isinstance(self.estimator, MaxRL) and least < self.coeff:
            raise ValueError(
                f"LengthPenalty: MaxRL needs returns of at least 0, and coeff={self.coeff} may "
                f"leave less: set success_threshold to {self.coeff} or more."
            )

    def _penalised(self, group: RewardedGroup) -> RewardedGroup:
        lengths = [
            sum(
                int(read_entry(part, self.assistant_mask_key, WHO).sum())
                for part in rows_of_member(row)
            )
            for row in group.rows
        ]
        shares = F.relative_length(
            torch.tensor(lengths), torch.zeros(len(lengths), dtype=torch.int64)
        )
        least = -math.inf if self.success_threshold is None else self.success_threshold
        returns = [
            value - self.coeff * share if value > least else value
            for value, share in zip(group.returns, shares.tolist(), strict=True)
        ]
        return group._replace(returns=returns)

    def advantages(self, groups: Sequence[RewardedGroup]) -> Sequence[Tensor]:
        """See the base class."""
        return self.estimator.advantages([self._penalised(group) for group in groups])

    def is_flat(self, group: RewardedGroup) -> bool:
        """See the base class; equal rewards of different length are none."""
        return self.estimator.is_flat(self._penalised(group))
