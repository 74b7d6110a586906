"""Estimators of advantages: one small class for each way from a complete group of rows.

The arithmetic is in :mod:`objectives.functional`.

Shape legend: T tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from objectives import functional as F
from torchrl_data import keys
from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_data.checks import check_counts, check_numbers, one_of
from torchrl_data.missing_entry import MissingEntryError

from .group_queue import num_rows
from .row_tree import RowTree, read_dense

WHO: Final = "MCAdvantage"
TrajectoryReturn = Literal["sum", "mean", "max"]
TRAJECTORY_RETURNS: Final[tuple[TrajectoryReturn, ...]] = ("sum", "mean", "max")


class RewardedGroup(NamedTuple):
    """A complete group on its way out."""

    group_id: Hashable
    rows: list[TensorDictBase]
    returns: list[float]
    """NaN where a row could not be scored."""

    @property
    def valid(self) -> list[bool]:
        """Whether each row could be scored."""
        return [not math.isnan(value) for value in self.returns]


class AdvantageEstimator(ChecksAttributes):
    """From groups to advantages."""

    def advantages(self, groups: Sequence[RewardedGroup]) -> Sequence[Tensor]:
        """The advantage of each row of all groups, in order.

        Args:
            groups: all that are released at once.

        Returns:
            ``[1, 1]`` each, or ``[T, 1]``; 0 for a row that could not be scored.

        Raises:
            MissingEntryError: a row lacks what the estimator reads.
            ValueError: a row holds something else than the estimator needs.
        """
        returns = [value for group in groups for value in group.returns]
        # In float64, in which no sum or square of float32 rewards overflows.
        wide = torch.tensor(returns, dtype=torch.float64)
        estimate = self._estimate(wide, _group_index(groups), groups)
        return estimate.float().view(-1, 1, 1).unbind(0)

    def by_row(self, groups: Sequence[RewardedGroup]) -> Sequence[Sequence[Tensor]]:
        """The advantages of the rows of each episode of all groups, in order.

        Args:
            groups: all that are released at once.

        Returns:
            For each episode one per row of it, as :meth:`advantages` gives them.
        """
        members = [row for group in groups for row in group.rows]
        pairs = zip(members, self.advantages(groups), strict=True)
        return [[advantage] * num_rows(member) for member, advantage in pairs]

    def _estimate(self, returns: Tensor, index: Tensor, groups: Sequence[RewardedGroup]) -> Tensor:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """State for a resumed run, as JSON can hold it; empty where nothing is remembered."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a state.

        Args:
            state: what :meth:`state_dict` gave.

        Raises:
            ValueError: it is that of another estimator.
        """
        if state:
            raise ValueError(
                f"{type(self).__name__} remembers nothing, but the saved estimator had "
                f"{sorted(state)}. Resume with the estimator of the saved run."
            )

    def is_flat(self, group: RewardedGroup) -> bool:
        """Return whether a group has nothing to learn from.

        Args:
            group: a complete one.

        Returns:
            True where fewer than two rows are valid, or no row is better than another.
        """
        valid = [value for value in group.returns if not math.isnan(value)]
        return len(valid) < 2 or min(valid) == max(valid)


class EstimatorOver(AdvantageEstimator):
    """Base of estimators that go by another one, their :attr:`estimator`, which remembers."""

    estimator: AdvantageEstimator

    def is_flat(self, group: RewardedGroup) -> bool:
        """See the base class; as the estimator within finds."""
        return self.estimator.is_flat(group)

    def state_dict(self) -> dict[str, Any]:
        """See the base class; that of the estimator within."""
        return self.estimator.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See the base class."""
        self.estimator.load_state_dict(state)


@dataclass(frozen=True, kw_only=True)
class GroupMean(AdvantageEstimator):
    """GRPO: ``(R - mean) / (std + 1e-4)``, see :func:`~objectives.functional.group_advantage`.

    Args:
        scale: the standard deviation of the ``"group"``; of the ``"batch"``, all rows released
            at once; or ``"none"`` (Dr. GRPO).

    Raises:
        ValueError: the scale is unknown.
    """

    scale: F.Scale | str = "group"

    def __post_init__(self) -> None:
        one_of("scale", self.scale, F.SCALES)

    def _estimate(self, returns: Tensor, index: Tensor, groups: Sequence[RewardedGroup]) -> Tensor:
        del groups
        return F.group_advantage(returns, index, scale=self.scale)


@dataclass(frozen=True)
class LeaveOneOut(AdvantageEstimator):
    """RLOO: less the mean of the others, see :func:`~objectives.functional.rloo_advantage`.

    Example:
        >>> from tensordict import lazy_stack
        >>> from torchrl.data import LazyStackStorage, ReplayBuffer
        >>> from objectives import MCAdvantage
        >>> advantage = MCAdvantage(3, estimator=LeaveOneOut())
        >>> buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=advantage)
        >>> rewards = [torch.tensor([[value]]) for value in (1.0, 0.0, 0.0)]
        >>> rows = [TensorDict({"reward": each, "group_id": torch.tensor(7)}) for each in rewards]
        >>> _ = buffer.extend(lazy_stack(rows))
        >>> buffer[:]["advantage"].flatten()  # 1 - 0, 0 - 1/2, 0 - 1/2
        tensor([ 1.0000, -0.5000, -0.5000])
    """

    def _estimate(self, returns: Tensor, index: Tensor, groups: Sequence[RewardedGroup]) -> Tensor:
        del groups
        return F.rloo_advantage(returns, index)


@dataclass(frozen=True)
class MaxRL(AdvantageEstimator):
    """Maximum likelihood RL: by the mean, see :func:`~objectives.functional.maxrl_advantage`.

    Raises (when it is asked):
        ValueError: a return is negative.
    """

    def _estimate(self, returns: Tensor, index: Tensor, groups: Sequence[RewardedGroup]) -> Tensor:
        negative = (returns < 0).nonzero()
        if len(negative):
            group = groups[int(index[negative[0]])].group_id
            raise ValueError(
                f"MaxRL divides by the mean return of a group, which has to be a rate of success; "
                f"group {group!r} has the return {float(returns[negative[0]])}. Use rewards of 0 "
                "and 1, or another estimator."
            )
        return F.maxrl_advantage(returns, index)


@dataclass(frozen=True, kw_only=True)
class DecoupledSources(AdvantageEstimator):
    """GDPO: every source normalised by itself, see :func:`~objectives.functional.gdpo_advantage`.

    Args:
        weights: of the sources by name. When not given, a collector takes those with which its
            environment adds the rewards up; without a collector it is 1 for each. A row must hold
            exactly these.
        sources_key: group of the rewards by source, one number each; NaN where one does not apply.

    Raises:
        ValueError: there are no weights in what is given, or one is not finite.
    """

    weights: Mapping[str, float] | None = None
    sources_key: NestedKey = keys.REWARDS

    def __post_init__(self) -> None:
        if self.weights is not None and not self.weights:
            raise ValueError("DecoupledSources: weights has no source; leave it out, or name them.")
        weights = {f"weight of {name!r}": x for name, x in (self.weights or {}).items()}
        check_numbers("DecoupledSources", **weights)

    def _estimate(self, returns: Tensor, index: Tensor, groups: Sequence[RewardedGroup]) -> Tensor:
        tables = [read_sources(row, self.sources_key) for group in groups for row in group.rows]
        weights = self.weights or dict.fromkeys(tables[0], 1.0)
        for table in tables:
            if table.keys() != weights.keys():
                raise ValueError(
                    f"{WHO}: a row has rewards of {sorted(table)}, but DecoupledSources weighs "
                    f"{sorted(weights)}. Give weights for exactly the sources that there are."
                )
        rewards = returns.new_tensor([[table[name] for name in weights] for table in tables])
        scored = ~returns.isnan().unsqueeze(1).expand_as(rewards)
        return F.gdpo_advantage(rewards, index, returns.new_tensor(list(weights.values())), scored)

    def is_flat(self, group: RewardedGroup) -> bool:
        """See the base class; here, no source with a weight tells two rows apart."""
        scored = zip(group.rows, group.valid, strict=True)
        tables = [read_sources(row, self.sources_key) for row, valid in scored if valid]
        if len(tables) < 2:
            return True
        weighed = [name for name in tables[0] if (self.weights or {}).get(name, 1.0)]
        columns = [[table.get(name, math.nan) for table in tables] for name in weighed]
        finite = [{value for value in column if math.isfinite(value)} for column in columns]
        return all(len(values) < 2 for values in finite)


@dataclass(frozen=True, kw_only=True)
class PassAtK(AdvantageEstimator):
    """Any success among k counts, see :func:`~objectives.functional.pass_at_k_advantage`.

    Args:
        k: size of the subsets of the group; a group of fewer valid rows has advantage 0.
        success_threshold: returns above it are successes.

    Raises:
        ValueError: k is no whole number of at least 1, or the threshold is not finite.

    Example:
        >>> from tensordict import lazy_stack
        >>> from torchrl.data import LazyStackStorage, ReplayBuffer
        >>> from objectives import MCAdvantage
        >>> advantage = MCAdvantage(4, estimator=PassAtK(k=2))
        >>> buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=advantage)
        >>> rewards = [torch.tensor([[value]]) for value in (1.0, 0.0, 0.0, 0.0)]
        >>> rows = [TensorDict({"reward": each, "group_id": torch.tensor(7)}) for each in rewards]
        >>> _ = buffer.extend(lazy_stack(rows))
        >>> buffer[:]["advantage"].flatten()  # (1 - 1/2) / (1/2), and (1/3 - 1/2) / (1/2)
        tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
    """

    k: int
    success_threshold: float = 0.0

    def __post_init__(self) -> None:
        check_counts("PassAtK", k=self.k)
        check_numbers("PassAtK", success_threshold=self.success_threshold)

    def _estimate(self, returns: Tensor, index: Tensor, groups: Sequence[RewardedGroup]) -> Tensor:
        del groups
        success = returns > self.success_threshold
        return F.pass_at_k_advantage(success, index, ~returns.isnan(), k=self.k)

    def is_flat(self, group: RewardedGroup) -> bool:
        """See the base class; here, every subset of k succeeds, or none does."""
        valid = [value for value in group.returns if not math.isnan(value)]
        failures = sum(value <= self.success_threshold for value in valid)
        return failures < self.k or failures == len(valid)


@dataclass(frozen=True, kw_only=True)
class TurnCredit(AdvantageEstimator):
    """Process supervision from dense rewards, see :func:`~objectives.functional.turn_advantage`.

    In a tree of rows, the turns of a row that left another one after a turn are later turns, too.
    """

    reward_key: NestedKey = keys.REWARD
    assistant_mask_key: NestedKey = keys.ASSISTANT_MASK

    def by_row(self, groups: Sequence[RewardedGroup]) -> Sequence[Sequence[Tensor]]:
        """See the base class; ``[T, 1]`` each."""
        trees = [RowTree.of(row, WHO) for group in groups for row in group.rows]
        dense = [read_dense(t, self.reward_key, self.assistant_mask_key, "turn") for t in trees]
        sizes = torch.tensor([len(tree.rows) for tree in trees])
        rewards = [reward for own, _ in dense for reward in own]
        masks = [mask.bool() for _, own in dense for mask in own]
        lengths = torch.tensor([len(mask) for mask in masks])
        valid = torch.tensor([valid for group in groups for valid in group.valid])
        to_go = F.turn_advantage(
            torch.cat(rewards).double(),
            torch.cat(masks),
            lengths,
            _group_index(groups).repeat_interleave(sizes),
            valid.repeat_interleave(sizes),
        ).split(lengths.tolist())
        found, start = [], 0
        for tree in trees:
            end = start + len(tree.rows)
            later = tree.later(list(to_go[start:end]), masks[start:end])
            found.append([values.float().unsqueeze(-1) for values in later])
            start = end
        return found

    def is_flat(self, group: RewardedGroup) -> bool:
        """See the base class; here, every turn of every row had the same reward."""
        if sum(group.valid) < 2:
            return True
        return not any(bool(part.any()) for own in self.by_row([group]) for part in own)


def _group_index(groups: Sequence[RewardedGroup]) -> Tensor:
    sizes = torch.tensor([len(group.rows) for group in groups])
    return torch.arange(len(groups)).repeat_interleave(sizes)


def read_entry(row: TensorDictBase, key: NestedKey, who: str) -> Tensor:
    """An entry that every row must have."""
    value = row.get(key, None)
    if value is None:
        found = sorted(map(str, row.keys(include_nested=True, leaves_only=True)))
        raise MissingEntryError(
            f"{who} reads {key!r}, which a row lacks. The row holds {found}. "
            "Run the step that writes the entry first, or rename it."
        )
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{who} reads {key!r} as a tensor, found {type(value).__name__}. (Groups go by an "
            "integer id, never by text: have the data loader write 'group_id'.)"
        )
    return value


def read_sources(row: TensorDictBase, key: NestedKey) -> dict[str, float]:
    """The rewards of a row by source."""
    group = row.get(key, None)
    if not isinstance(group, TensorDictBase) or group.is_empty():
        raise MissingEntryError(
            f"{WHO} reads the rewards by source at {key!r}, which a row lacks. "
            "Reward transforms write them; or rename the entry."
        )
    table = {str(name): value for name, value in group.items()}
    for name, value in table.items():
        if value.numel() != 1:
            raise ValueError(
                f"{WHO}: the reward source {name!r} has {value.numel()} values in a row; it needs "
                "one. (A dense reward has no advantage by source.)"
            )
    return {name: float(value) for name, value in table.items()}


def trajectory_return(reward: Tensor, scorable: Tensor | None, how: TrajectoryReturn) -> float:
    """A number for a row; NaN where it could not be scored, or is not finite."""
    if scorable is not None and not bool(scorable.all()):
        return math.nan
    one = reward.numel() == 1
    reduce = {"sum": Tensor.sum, "mean": Tensor.mean, "max": Tensor.amax}[how]
    value = float(reward if one else reduce(reward))
    return value if math.isfinite(value) else math.nan
